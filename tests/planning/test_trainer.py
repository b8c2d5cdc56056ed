"""The trainer's side of plans: what it counts, offers, reads, writes and chooses."""

from collections import Counter
from importlib.metadata import EntryPoint

import jax
import numpy as np
import pytest
import yaml
from synthetic import NONE, synthetic

from jaxpipe import cli, measure
from jaxpipe.errors import ArgumentError
from jaxpipe.planning import configurations, cost, devices, memory, plans
from jaxpipe.planning.plans import Plan
from jaxpipe.planning.sizes import Variant
from jaxpipe.runtime.zero import Zero
from jaxpipe.schedule import Costs
from train import checks, pipeline_section, plan
from train.command_line import parse
from train.config import Config
from train.modes import device_bytes
from train.plan import Planned
from train.step import Setup
from train.watch import metrics

SMALL = {"vocab_size": 64, "sequence_length": 64, "num_layers": 4, "width": 8, "num_heads": 2}
PLAN = Plan(2, 2, 1, 1, 1, "1f1b-fused", 1, 4, 4, "none", Zero(1), 1, "stacked")
COSTS = Costs(1, 1.2, 0.8, attention=0.5)
# What `make train` prepares has another vocabulary; no two devices can share such layers.
CONFIG = """
data: {path: not-prepared}
model: {vocab_size: 256, sequence_length: 63, num_layers: 4, width: 24, num_heads: 3}
mesh: {stage: 3}
train: {batch_size: 4, steps: 40}
"""


@pytest.fixture
def reader(monkeypatch):
    """Lets the command find an installed reader of configurations."""

    def install(name: str) -> None:
        point = EntryPoint("train", name, configurations.GROUP)
        monkeypatch.setattr(configurations, "entry_points", lambda group: [point])

    return install


def test_without_a_reader_the_command_says_so(reader, tmp_path):
    reader("no_such_module:read")
    with pytest.raises(ArgumentError, match=r"no_such_module.*--sizes FILE"):
        configurations.read(tmp_path / "config.yaml")


def test_configurations_are_read_and_plans_written_as_configurations(reader, tmp_path, capsys):
    reader("train.plan:read")
    config, out = tmp_path / "config.yaml", tmp_path / "plan.yaml"
    arguments = ["plan", "--config", str(config), "--devices", "2", "--device", "cpu"]
    for wrong, text in (
        ("model: {width: 63}", "model.width=63"),
        (f"{CONFIG}pipeline: {{fp8: '*kernels'}}", "*kernels"),
    ):
        config.write_text(wrong)
        assert cli.main(arguments) == 2
        assert text in capsys.readouterr().err
    config.write_text(f"{CONFIG}pipeline: {{fp8: '*kernel'}}".replace("layers: 4", "layers: 2"))
    assert cli.main([*arguments, "--measure", "1", "--out", str(out)]) == 0
    assert "compiled" in capsys.readouterr().out
    written = parse(["--config", str(out)])
    assert not written.failures
    assert written.config.mesh.num_devices == 2
    assert written.config.train.batch_size == 4
    assert written.config.model.num_layers == 2
    assert written.config.pipeline.fp8 == "*kernel"


def test_a_schedule_is_chosen_for_a_mesh(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("stage: 3", "stage: 4, data: 1"))
    config = pipeline_section.without_choice(parse(["--config", str(path)]).config)
    chosen, why = plan.choose(config)
    assert chosen.mesh == config.mesh
    assert chosen.train == config.train
    assert chosen.pipeline.schedule in plans.SCHEDULES
    assert chosen.pipeline.zero == config.pipeline.zero
    assert chosen.train.batch_size % chosen.pipeline.microbatches == 0
    assert why.startswith(f"pipeline.schedule=plan on cpus: {chosen.pipeline.schedule}, ")
    assert "then" in why
    assert not checks.check(chosen, writes=False, reads=False)


def test_meshes_of_plans_are_accepted():
    model = synthetic(*(NONE._replace(expert=expert) for expert in (1, 2, 4)))
    families = plans.families(model, devices.cluster("h100", 8), (32,), Counter())
    found = [one.plan for family in families for one in family]
    assert {plan.expert for plan in found} == {1, 2, 4}
    experts = SMALL | {"num_experts": 4}
    planned = Planned(Config(model=experts), "experts")
    meshes = {(p.stage, p.data, p.expert, p.replica): p for p in found}
    for one in meshes.values():
        written = yaml.safe_load(planned.write(one, COSTS, None))
        config = Config(model=experts, mesh=written["mesh"])
        assert not [*checks.replicas(config), *checks.shared_axes(config)]
        assert config.mesh.expert == one.expert


def test_only_a_model_with_experts_is_counted_with_them():
    for experts, expected in ((None, {1}), (4, {1, 2, 4})):
        planned = Planned(Config(model=SMALL | {"num_experts": experts}), "small")
        assert {expert for expert in (1, 2, 4, 8) if planned._may_share(1, 1, expert)} == expected


def test_few_layers_tell_as_much_as_all():
    """Layers that differ are traced once per kind; each of the model counts."""
    model = SMALL | {"num_layers": 6, "num_experts": 4, "dense_layers": 2, "expert_width": 24}
    planned = Planned(Config(model=model), "small")
    assert planned._few.model.num_layers == 3
    found = planned.counted([NONE], lambda share: None)
    assert found.variants[NONE].kind_of == (0, 0, 1, 1, 1, 1)
    params = jax.eval_shape(planned.task.init, jax.random.key(0))
    assert found.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(params))
    alike = Planned(Config(model=SMALL), "small")
    assert alike._few == alike.config


def test_experts_are_split_over_one_shard_or_as_many_as_can_be_in_a_host_or_at_all():
    assert plans.expert_groups([1, 2, 4, 8], 12, 8) == {1, 4}
    assert plans.expert_groups([1, 2, 4, 8, 16, 32], 48, 8) == {1, 8, 16}
    assert plans.expert_groups([2], 4, 1) == {1, 2}
    planned = Planned(Config(model=SMALL | {"num_experts": 8}), "small")
    assert [n for n in (1, 2, 4, 8) if planned._may_run(2, 1, 1, n)] == [1, 2]


def test_a_model_with_states_is_not_counted_where_a_layer_is_shared():
    for speed, expected in ((None, {1, 2}), (0.01, {1})):
        model = SMALL | {"num_experts": 4, "router": "sigmoid", "bias_speed": speed}
        planned = Planned(Config(model=model), "small")
        assert {tensor for tensor in (1, 2) if planned._may_share(1, tensor, 1)} == expected
        assert {context for context in (1, 2) if planned._may_share(context, 1, 1)} == expected


def test_slices_are_counted_and_written(monkeypatch):
    planned = Planned(Config(model=SMALL), "small")
    found = [
        planned.counted([variant], lambda share: None).variants[variant].layer_flops(2)
        for variant in (NONE, NONE._replace(slices=4))
    ]
    assert found[1] < found[0] / 2
    monkeypatch.setattr(planned, "counted", lambda cases, progress: cases)
    assert {case.slices for case in planned.sizes((8,), 1, 4, lambda share: None)} == {1, 2, 4}
    written = planned.write(PLAN._replace(data=1, zero=Zero.NOTHING, slices=4), COSTS, None)
    assert "sequence_slices: 4" in written
    assert "attention: 0.5" in written


def test_attention_within_documents_is_counted():
    """A token sees half of its document on average, or its window."""
    shape = SMALL | {"sequence_length": 64, "num_layers": 2, "window": 4, "global_every": 2}
    whole, short = (
        Planned(Config(model=shape, data={"documents": "packed", **tokens}), "small").counted(
            [NONE], lambda share: None
        )
        for tokens in ({}, {"document_tokens": 16})
    )
    assert (whole.document_share, short.document_share) == (1, 1 / 4)

    def attention(model, name):
        kernels = (getattr(layer, name).kernels for layer in model.variants[NONE].layers)
        return [
            one.flops.at(2) for of_layer in kernels for one in of_layer if one.kind == "attention"
        ]

    for name in "fb":
        in_window, all_keys = attention(whole, name)
        assert attention(short, name) == [in_window, all_keys / 4]


@pytest.mark.parametrize("max_skipped", [0, 3])
def test_the_host_is_offered_where_steps_are_never_skipped(max_skipped):
    optimizer = {"max_skipped": max_skipped, "offload": not max_skipped}
    planned = Planned(Config(model=SMALL, optimizer=optimizer), "small")
    model = planned.counted([NONE], lambda share: None)
    assert model.may_offload == (max_skipped == 0)
    for on_host in plans.on_host(model, devices.cluster("h100", 4)):
        text = planned.write(PLAN._replace(on_host=on_host), COSTS, None)
        written = yaml.safe_load(text)
        assert on_host.state <= model.may_offload
        assert written.get("optimizer", {}).get("offload", False) == on_host.state
        place = written.get("pipeline", {}).get("residuals", "device")
        assert (place == "host") == on_host.residuals


@pytest.mark.pipeline
def test_a_plan_knows_what_an_optimizer_multiplies():
    """Newton-Schulz of [m, n] with m <= n: a step takes X X', its square, and their sum times X."""
    config = Config(model=SMALL, optimizer={"name": "muon"}, pipeline={"schedule": "1f1b"})
    model = Planned(config, "muon").counted([], lambda share: None)
    matrices = [(8, 24), (8, 8), (8, 64), (8, 64), (8, 64)]
    expected = [5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n) for m, n in matrices]
    assert sorted(model.update_flops) == sorted(expected)
    assert not Planned(Config(model=SMALL), "adamw").counted([], lambda share: None).update_flops


@pytest.mark.pipeline
def test_a_model_without_the_trainer_has_the_sizes_that_it_has_there(tmp_path, capsys):
    """With its optimizer; the command plans with them."""
    optimizer, batch = {"name": "muon"}, {"batch_size": 8}
    planned = Planned(Config(model=SMALL, optimizer=optimizer, train=batch), "there")
    remats = [NONE._replace(remat=remat) for remat in ("none", "dots", "full")]
    there = planned.counted(remats, lambda share: None)
    rows = {n: ((8, *leaf.shape), leaf.dtype) for n, leaf in planned.task.row_shapes().items()}
    found = measure.model_sizes(
        planned.task.model(train=True, axis=None),
        jax.eval_shape(planned.task.init, jax.random.key(0)),
        {name: jax.ShapeDtypeStruct(*of_rows) for name, of_rows in rows.items()},
        planned._optimizer,
        states=planned.task.init_states(),
        name="there",
        tokens_per_row=SMALL["sequence_length"],
    )
    differ = {"variants", "may_offload", "in_pieces"}
    assert {n: v for n, v in vars(found).items() if n not in differ} == {
        n: v for n, v in vars(there).items() if n not in differ
    }
    for variant, sizes in found.variants.items():
        assert sizes.layers == there.variants[variant].layers
    path = tmp_path / "sizes.json"
    path.write_text(found.to_json())
    command = ["plan", "--sizes", str(path), "--devices", "2", "--device", "h100"]
    assert cli.main(command) == 0
    assert "there" in capsys.readouterr().out


@pytest.mark.pipeline
def test_a_plan_knows_what_is_frozen_and_in_how_many_bits():
    """Adapters have gradients and optimizer state; the rest takes its own bytes alone."""
    lora = {"rank": 2, "targets": ["qkv"], "base": "int8"}
    config = Config(model=SMALL, lora=lora, pipeline={"schedule": "1f1b"})
    case = Variant(1, 1, "none")
    model = Planned(config, "adapted").counted([case], lambda share: None)
    (layer,), counted = model.variants[case].layers, model.variants[case]
    assert model.moments == 2
    assert layer.parameters - layer.frozen == 3 * 2 * (8 + 8)  # of queries, keys and values
    assert layer.rounded == 8 * (3 * 8 + 8 + 3 * 64)  # the MLP has 64 hidden values
    assert counted.outer_frozen == counted.outer_parameters == 64 * 8 + 8
    mesh = {"stage": 2, "data": 2}
    pipeline = {"schedule": "1f1b-fused", "microbatches": 4, "zero": 1, "vocabulary": "split"}
    run = Setup(Config(model=SMALL, lora=lora, mesh=mesh, pipeline=pipeline)).state_shapes
    placed = plans.PlacedPlan(PLAN, model, devices.cluster("cpu", 4))
    parts = memory.device_bytes(placed, cost.program_of(placed))
    assert np.isclose(parts["parameters"], device_bytes(run.params), rtol=0.02)
    assert np.isclose(parts["optimizer"], device_bytes(run.optimizer), rtol=0.02)
    assert parts["gradients"] == 1.5 * parts["optimizer"]  # a sum of two layers, and its part


@pytest.mark.parametrize(
    ("kind", "flops"),
    [
        ("NVIDIA GB200", devices.DEVICES["gb200"].flops),
        ("AMD Instinct MI300X", devices.DEVICES["mi300x"].flops),
        ("NVIDIA H100 PCIe", 756e12),
        ("TPU v5 lite", 197e12),
        ("cpu", None),
        ("another", None),
    ],
)
def test_a_share_of_the_peak_is_of_the_planners_device_where_it_has_it(kind, flops):
    assert metrics.peak_flops(kind, "bfloat16") == flops
    assert metrics.peak_flops(kind, "float32") is None
