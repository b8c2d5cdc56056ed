"""Plans as options of other systems."""

import shlex

import pytest
import yaml

from train import export_plan
from train.config import Config
from train.errors import ConfigError

SIZES = {"vocab_size": 32000, "sequence_length": 4096, "num_layers": 32, "width": 4096}
SIZES |= {"num_heads": 32, "num_kv_heads": 8, "mlp_width": 11008, "tied": False}


def plan(schedule: str = "interleaved-fused", *, zero: int = 1, **changes) -> Config:
    """64 devices: 4 stages x 8 data shards x 2 tensor devices, 16 microbatches of 2 rows."""
    pipeline = {"schedule": schedule, "microbatches": 16, "zero": zero, "remat": "full"}
    if schedule != "zb-h1":
        pipeline["chunks"] = 2
    model = SIZES | changes.pop("model", {})
    mesh = {"stage": 4, "data": 8, "tensor": 2} | changes.pop("mesh", {})
    train, data = {"batch_size": 256}, {"path": "elsewhere"}
    pipeline |= changes
    return Config(model=model, mesh=mesh, pipeline=pipeline, train=train, data=data)


def flags(text: str) -> dict[str, str | None]:
    """Reads a command line again."""
    words = shlex.split(text.replace("\\\n", ""), comments=True)
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {
        word.removeprefix("--"): None if value.startswith("--") else value
        for word, value in pairs
        if word.startswith("--")
    }


def test_megatron_has_the_same_devices_batch_and_chunks():
    options = flags(export_plan.export(plan(), "megatron"))
    model_devices = 4 * int(options["tensor-model-parallel-size"] or 0)
    data = 64 // model_devices
    assert options["pipeline-model-parallel-size"] == "4"
    assert options["num-virtual-stages-per-pipeline-rank"] == "2"
    rows = int(options["micro-batch-size"] or 0)
    assert int(options["global-batch-size"] or 0) == rows * data * 16
    assert options["num-query-groups"] == "8"
    assert {"swiglu", "use-distributed-optimizer", "sequence-parallel"} <= options.keys()
    assert "qk-layernorm" not in options


def test_torchtitan_takes_schedules_by_name_or_as_a_file():
    named = flags(export_plan.export(plan(zero=3), "torchtitan"))
    prefix = "parallelism.pipeline_parallel_"
    assert named[f"{prefix}schedule"] == "Interleaved1F1B"
    assert named[f"{prefix}layers_per_stage"] == "4"
    assert named["training.num_tokens_per_microbatch_per_dp_rank"] == str(2 * 4096)
    text = export_plan.export(plan("zb-h1", zero=3), "torchtitan")
    assert flags(text)[f"{prefix}schedule_csv"] == "schedule.csv"
    assert "jaxpipe show zb-h1 --stages 4 --microbatches 16 --format csv" in text


def test_maxtext_has_the_same_devices_and_layers():
    options = yaml.safe_load(export_plan.export(plan("breadth-first-fused", zero=3), "maxtext"))
    axes = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
    sizes = [options[f"ici_{axis}_parallelism"] for axis in axes]
    assert sizes == [4, 1, 8, 1, 1, 2]
    layers = 4 * options["num_layers_per_pipeline_stage"] * options["num_pipeline_repeats"]
    assert layers == options["base_num_decoder_layers"]
    assert options["per_device_batch_size"] * 64 == 256


@pytest.mark.parametrize(
    ("system", "config", "messages"),
    [
        (
            "megatron",
            plan("zb-v", zero=3, model={"window": 1024}),
            ("pipeline.schedule=zb-v", "pipeline.zero=3", "model.window=1024"),
        ),
        ("torchtitan", plan(zero=1), ("pipeline.zero=1", "0, 2, 3")),
        (
            "maxtext",
            plan(zero=1, model={"norm": "layer"}),
            ("pipeline.schedule=interleaved-fused", "model.norm=layer"),
        ),
    ],
)
def test_a_system_refuses_what_it_has_no_option_for(system, config, messages):
    with pytest.raises(ConfigError) as error:
        export_plan.export(config, system)
    assert all(message in str(error.value) for message in messages)
    assert len(error.value.failures) == len(messages) - (system == "torchtitan")
