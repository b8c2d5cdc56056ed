"""What fits together: every rule names the field, its value, the rule and the nearest valid."""

import hashlib
import json
import re
import shutil

import jax
import numpy as np
import pytest
import yaml

from jaxpipe.schedule import catalog
from jaxpipe.schedule.formats import write_csv
from jaxpipe.schedule.search import auto
from train import checks, errors, pipeline_section, tasks, train
from train.command_line import Invocation
from train.config import Config, Section
from train.data.folder import META_FILE, TOKENIZER_FILE
from train.data.text import HELDOUT_FILE, TRAIN_FILE, read_tokens, write_tokens
from train.processes import distributed
from train.watch.goodput import Goodput

NEAREST = {
    "pipeline.microbatches: 3": "pipeline.microbatches=2 or 4, or train.batch_size=12 or 18.",
    "mesh.data: 3": "mesh.data=2 or 4, or train.batch_size=12 or 24.",
    "mesh.data: 2, mesh.replica: 3": "mesh.replica=2.",
    "model.num_layers: 1": "model.num_layers=2 or mesh.stage=1.",
    "model.num_layers: 1000000000, pipeline.schedule: auto": "at most 10000 layers.",
    "model.num_heads: 3": "2, 4",
    "model.sequence_length: 17": "model.sequence_length=16 or train.eval_batches=3.",
    "train.eval_batches: 5": "model.sequence_length=12 or train.eval_batches=4.",
    "train.checkpoint_every: 20, train.keep_every: 50": "40 or 60.",
    "optimizer.warmup_steps: 31": "30.",
    "pipeline.zero: 4": "3.",
    "data.mix: {data/code: .nan}": "1e-06",
    # Schedules, and what they read.
    "pipeline.schedule: 1f1p": "'1f1b'.",
    "data.document_tokens: 9": "data.document_tokens=null, or data.documents=packed.",
    "pipeline.sequence_slices: 3": "model.sequence_length=15 or 18.",
    "pipeline.compute_dtype: bfloat16": "model.dtype=bfloat16, or pipeline.compute_dtype=null.",
    "pipeline.update: chunk": "optimizer.clip_norm=0, or pipeline.update=step.",
    "pipeline.update: chunk, optimizer.clip_norm: 0, pipeline.weights: unrolled": (
        "pipeline.weights=stacked, or pipeline.update=step."
    ),
    "pipeline.pair_layers: true": "null, or pipeline.schedule=dualpipe-v-published",
    # Adapters and frozen parameters.
    "lora.rank: 4, lora.targets: [v_porj]": "v_proj or ",
    "lora.rank: 4, lora.targets: [mlp/uo]": "mlp/up or mlp/down. Linear maps",
    "lora.rank: 4, lora.targets: []": (
        "attention/out, attention/qkv/query, attention/qkv/key, attention/qkv/value, mlp/down,"
    ),
    "lora.targets: [qkv]": "lora.rank=8.",
    "lora.rank: 4, pipeline.schedule: 2bw": "pipeline.schedule=1f1b.",
    "lora.rank: 4, lora.dropout: 0.1, mesh.tensor: 2": "lora.dropout=0, or mesh.tensor=1.",
    "lora.rank: 4, lora.base: nf4, mesh.tensor: 4": "lora.base=int8, or mesh.tensor=1.",
    "lora.rank: 4, lora.base: int8, pipeline.fp8: '*kernel'": "pipeline.fp8=null.",
    "lora.rank: 4, lora.base: int8, train.trainable: ['layers/*']": (
        "lora.base=float32, or a pattern"
    ),
    "lora.rank: 4, optimizer.ema_decay: 0.9": "optimizer.ema_decay=0.",
    "train.trainable: [layers/mlp/upp/kernel]": "layers/mlp/up/kernel",
    "train.trainable: []": "null, for all.",
    # Devices that share a layer.
    "mesh.tensor: 8, model.num_heads: 4": "model.num_heads=8, or mesh.tensor=4.",
    "mesh.tensor: 4, model.num_heads: 12, model.num_kv_heads: 3, model.head_size: 4": (
        "model.num_kv_heads=4, or mesh.tensor=3."
    ),
    "mesh.tensor: 4, model.tied: false, model.width: 126, model.head_size: 8": (
        "model.width=124 or 128"
    ),
    "mesh.context: 4, model.sequence_length: 12": "model.sequence_length=8 or 16",
    "mesh.expert: 2, mesh.data: 2": "mesh.expert=1.",
    "mesh.expert: 4, mesh.data: 4, model.num_experts: 6": "model.num_experts=4 or 8",
    "mesh.expert: 4, mesh.data: 4, mesh.replica: 2, model.num_experts: 4": "mesh.expert=2.",
    "mesh.tensor: 2, model.num_experts: 4, model.bias_speed: 0.1": "mesh.tensor=1, or",
    # Asynchronous schedules.
    "pipeline.schedule: 2bw, pipeline.microbatches: 2": "pipeline.microbatches=3.",
    "pipeline.schedule: 2bw, pipeline.update: chunk": "step.",
    "pipeline.schedule: 2bw, pipeline.fp8: '*kernel'": "null.",
    "pipeline.schedule: 2bw, pipeline.compute_dtype: bfloat16, model.dtype: bfloat16": "null.",
    "pipeline.schedule: pipedream, pipeline.residuals: host": "device.",
    "pipeline.schedule: pipedream, asynchronous.discrepancy_decay: 0.2": "0.",
    "pipeline.schedule: pipemare, pipeline.weights: unrolled": "stacked.",
    "pipeline.schedule: pipemare, mesh.tensor: 2": "mesh.tensor=1, or pipeline.schedule=1f1b.",
    "pipeline.update: chunk, optimizer.clip_norm: 0, model.qk_clip: 30": (
        "model.qk_clip=null, or pipeline.update=step."
    ),
    "pipeline.sequence_slices: 2, model.mtp_loss: 0.1": (
        "pipeline.sequence_slices=1, or model.mtp_loss=null."
    ),
    "pipeline.schedule: pipemare, model.num_experts: 4, model.bias_speed: 0.1": (
        "model.bias_speed=null, or pipeline.schedule=1f1b."
    ),
    "pipeline.schedule: pipemare, asynchronous.recompute_segment: 3": (
        "asynchronous.recompute_segment=2."
    ),
    "pipeline.schedule: pipemare, asynchronous.warmup_steps: 30": "29, or pipeline.schedule=1f1b.",
    "pipeline.schedule: pipemare, optimizer.ema_decay: 0.9": "optimizer.ema_decay=0.",
    "pipeline.schedule: pipemare, distributed.copy_every: 5": "0, or pipeline.schedule=1f1b.",
    "asynchronous.warmup_steps: 3": "0, or pipeline.schedule=pipemare.",
    "asynchronous.rescheduling_steps: 0": "null, or pipeline.schedule=pipemare.",
    "pipeline.schedule: auto, pipeline.residuals: 2.5, pipeline.memory_limit: 3": (
        "pipeline.memory_limit=null, or pipeline.residuals=device."
    ),
    # Optimizers.
    "optimizer.name: muno": "muon",
    "optimizer.offload: true, optimizer.max_skipped: 3": "optimizer.offload=false",
    "train.noise_every: 5, pipeline.microbatches: 1": "pipeline.microbatches=2",
    # Processes.
    "distributed.coordinator: a:1, distributed.num_processes: 2, distributed.process_id: 2": "1.",
}
"""Fields as in a file, and the valid values that their refusal names."""

SAID = {
    "model.vocab_size: 299": "model.vocab_size=299 is smaller than the tokenizer's 300 tokens",
    "pipeline.chunks: 2": "pipeline.chunks=2 does not fit schedule '1f1b'",
    "pipeline.schedule: zb-v, pipeline.sequence_slices: 4": "the schedule has no such option.",
    "pipeline.schedule: 2bw, pipeline.sequence_slices: 2": "which runs whole sequences",
    "pipeline.schedule: pipemare, pipeline.chunks: 2": "'pipemare': each of its stages holds 1",
    "asynchronous.discrepancy_decay: 1.0": "=1.0 must be at least 0 and below 1.",
    "pipeline.schedule: auto, pipeline.residuals: 0.5": "pipeline.residuals=0.5 does not fit sch",
    "pipeline.partition: flop": "must be equal, flops, measured, or the number",
    "pipeline.partition: '2,3'": "must be 2 counts of at least 1",
    "pipeline.partition: '4,0'": "must be 2 counts of at least 1",
    "mesh.stage: 1000000000000": " x pipeline.microbatches=4 is more than a schedule can hold.",
    "distributed.num_processes: 2, distributed.process_id: 0": "need distributed.coordinator",
    "distributed.coordinator: a": "='a' must be HOST:PORT, such as localhost:12345.",
    "distributed.coordinator: 'a:65536'": "='a:65536' must be HOST:PORT",
    "distributed.coordinator: ':80'": "=':80' must be HOST:PORT",
    "optimizer.weight_decay: .inf": "optimizer.weight_decay=inf must be at least 0 and finite.",
    "optimizer.peak_lr: .nan": "optimizer.peak_lr=nan must be above 0.",
    "optimizer.beta2: 1.0": "optimizer.beta2=1.0 must be at least 0 and below 1.",
    "optimizer.name: lbfgs": "'value_fn'",
    "optimizer.name: muon, optimizer.arguments: {decay: 1}": "unexpected keyword argument 'decay'",
    "optimizer.name: muon, optimizer.beta1: 0.5": "optimizer.beta1=0.5 has no effect",
    "optimizer.arguments: {b1: 0.5}": "has no effect with optimizer.name=adamw",
    "optimizer.skip_above: 1.0": "optimizer.skip_above=1.0 has no effect with",
    "optimizer.schedule: cosine": "optimizer.schedule=cosine is none of optax",
    "optimizer.schedule: constant_schedule": "missing 1 required positional argument: 'value'",
    "optimizer: {schedule: constant_schedule, schedule_arguments: {value: 1.0}, peak_lr: 1.0}": (
        "optimizer.peak_lr=1.0 has no effect with optimizer.schedule=constant_schedule"
    ),
    "train.noise_every: 5, pipeline.update: chunk, optimizer.clip_norm: 0": "=chunk does not know",
    "train.noise_every: 5, pipeline.schedule: pipemare": "=pipemare are of several",
    "train.seed: 9223372036854775808": "must be at least 0 and at most 9223372036854775807.",
}
RULES = {fields: f"Nearest valid: {valid}" for fields, valid in NEAREST.items()} | SAID


def _messages(config, **options):
    # Computes nothing: devices can be simulated only before the first array.
    with jax.default_device("tpu"):
        return [failure.message for failure in checks.check(config, **options)]


def test_a_right_configuration_passes_and_leaves_nothing(make, tmp_path):
    assert _messages(make()) == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fields", RULES)
def test_a_rule_says_what_to_do_and_nothing_else_fails(make, fields):
    given = yaml.safe_load(f"{{{fields}}}")
    (message,) = _messages(make(given))
    assert RULES[fields] in message
    assert "\n" not in message
    assert any(path in message for path in given)


@pytest.mark.parametrize(
    ("field", "nearest"),
    [
        ("run_dir", "runs/gpt"),
        ("data.path", "data/stdlib"),
        ("data.rows", "null"),
        ("init_from", "null"),
    ],
)
@pytest.mark.parametrize("value", ["", "  "])
def test_a_folder_has_a_name(make, field, nearest, value):
    (message,) = _messages(make({field: value}))
    assert message == f"{field}={value!r} names no folder. Nearest valid: {nearest}."


def test_text_must_be_of_characters(make):
    (message,) = _messages(make({"sample.prompt": "a\ud800"}))
    assert message == "sample.prompt='a\\ud800' contains '\\ud800', which text cannot have."


def test_a_schedule_of_ones_own_is_what_the_trainer_runs(make, tmp_path):
    path = tmp_path / "mine.csv"
    order = catalog.build("zb-h1", stages=2, microbatches=4)
    path.write_text(write_csv(order))
    one_f_one_b = "jaxpipe.schedule.generators.depth_first:one_f_one_b"
    built = pipeline_section.order(make())
    for name, orders in ((str(path), order.orders), (one_f_one_b, built.orders)):
        config = make({"pipeline.schedule": name})
        assert checks.check(config) == []
        assert pipeline_section.order(config).orders == orders
    for fields, expected in (
        ({"mesh.stage": 4}, "is not a schedule for mesh.stage=4 and pipeline.microbatches=4"),
        ({"pipeline.microbatches": 8}, "Nearest valid: mesh.stage=2, pipeline.microbatches=4."),
        ({"pipeline.schedule": "missing.csv"}, "cannot be read"),
        ({"asynchronous.warmup_steps": 3, "pipeline.schedule": "pipemar"}, "not a known schedule"),
    ):
        (message,) = _messages(make({"pipeline.schedule": str(path)} | fields))
        assert expected in message


def test_the_first_process_alone_searches(make, monkeypatch):
    """A check, which every process makes, asks for some schedule that fits."""
    monkeypatch.setattr(auto, "search_orders", lambda *args, **options: pytest.fail("it searches"))
    tight = {"pipeline.schedule": "auto", "pipeline.memory_limit": 1}
    config = make({"pipeline.schedule": "auto", "pipeline.memory_limit": 1.5})
    assert checks.check(config) == []
    (message,) = _messages(make(tight | {"pipeline.sequence_slices": 4}))
    assert "pipeline.memory_limit=1" in message
    with pytest.raises(pytest.fail.Exception):
        pipeline_section.order(config)


def test_wandb_is_only_needed_by_those_who_ask(make, monkeypatch):
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    (message,) = _messages(make({"wandb.project": "gpt"}))
    assert "wandb.project='gpt' needs a package that is not installed: pip install wandb" in message


def test_all_failures_at_once_but_those_of_fields_of_a_wrong_type(make):
    wrong = {"pipeline.schedule": "1f1p", "pipeline.microbatches": 3, "train.seed": -1}
    found = checks.check(make(wrong | {"model.vocab_size": 10}))
    assert [failure.message.split()[0] for failure in found] == [
        *("train.seed=-1", "pipeline.schedule='1f1p'", "pipeline.microbatches=3"),
        "model.vocab_size=10",
    ]
    broken = [errors.Failure("pipeline.microbatches='x': must be", ("pipeline.microbatches",))]
    left = checks.without(found, broken)
    assert [failure.fields[0] for failure in left] == [
        *("train.seed", "pipeline.schedule", "model.vocab_size"),
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pipeline.microbatches": 10**6, "train.batch_size": 10**6}, "than a schedule can hold."),
        ({"train.batch_size": 10**9 + 7}, "pipeline.microbatches=1 or 1000000007, or train"),
        ({"train.batch_size": 10**18 + 3}, "train.batch_size=1000000000000000003."),
    ],
)
def test_a_size_that_is_a_mistake_is_refused_at_once(make, fields, expected):
    """Beside too few held-out rows for such a batch."""
    _, message = sorted(_messages(make(fields)))
    assert expected in message


@pytest.mark.parametrize(
    ("mesh", "num_devices", "platform", "expected"),
    [
        ((4, 4, 1, 1), 8, "gpu", "mesh.data=4 needs 16 devices, but there are 8 (gpu)."),
        ((4, 4, 1, 1), 8, "gpu", "Nearest valid: mesh.stage=2 or mesh.data=2."),
        ((4, 4, 1, 1), 1, "cpu", "out of XLA_FLAGS, and they are simulated."),
        ((2, 2, 2, 2), 8, "gpu", "mesh.stage=2 x mesh.data=2 x mesh.context=2 x mesh.tensor=2"),
    ],
)
def test_more_stages_than_devices(make, mesh, num_devices, platform, expected):
    axes = "mesh.stage", "mesh.data", "mesh.context", "mesh.tensor"
    config = make(zip(axes, mesh, strict=True))
    (failure,) = checks.device_failures(config, num_devices=num_devices, platform=platform)
    assert expected in failure.message
    assert not checks.device_failures(config, num_devices=16, platform=platform)


# The data.


def test_missing_data_names_the_command(make, tmp_path):
    missing = tmp_path / "nowhere"
    (message,) = _messages(make({"data.path": str(missing)}))
    assert f"data.path={missing} is not a folder" in message
    assert f"python -m train.prepare --out {missing}" in message


@pytest.mark.parametrize("name", [TRAIN_FILE, HELDOUT_FILE])
def test_token_files_that_are_damaged_or_do_not_fit(make, folder, name):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-1])
    (message,) = _messages(make())
    assert f"{name} is truncated: expected {len(whole)} bytes" in message
    (folder / name).unlink()
    (message,) = _messages(make())
    assert f"data.path={folder}: there is no {name}" in message
    (folder / name).write_bytes(whole)
    tokens = read_tokens(folder / name)[:].copy()
    tokens[len(tokens) // 2] = 5000
    write_tokens(folder / name, tokens, vocab_size=1 << 16)
    (message,) = _messages(make())
    assert f"data.path={folder}: {name} holds token 5000" in message
    assert "its tokenizer knows 300 tokens, 0 to 299" in message


def test_files_of_another_preparation(make, folder):
    shutil.copy(folder / HELDOUT_FILE, folder / TRAIN_FILE)
    (message,) = _messages(make())
    assert "train.tokens holds 1025 tokens, but meta.json says 2000" in message
    (folder / TOKENIZER_FILE).write_bytes(b"{ }")
    (message,) = _messages(make())
    assert "tokenizer.json is not the tokenizer these tokens were made with" in message


def test_packed_rows_do_not_predict_the_first_token_of_any_document(make, folder):
    """One more held-out token than predictions is too few where there are two documents."""
    meta = json.loads((folder / META_FILE).read_text())
    meta["heldout"]["documents"] = 2
    (folder / META_FILE).write_text(json.dumps(meta))
    assert _messages(make({"data.documents": "apart"})) == []
    (message,) = _messages(make({"data.documents": "packed"}))
    assert "need 1026. Nearest valid: model.sequence_length=15 or train.eval_batches=3." in message


def test_other_texts_of_a_mixture_must_fit(make, folder, tmp_path):
    """The same tokenizer, whole files, at least one row, and a family that reads them."""
    same, short, other = (
        shutil.copytree(folder, tmp_path / name) for name in ("same", "short", "other")
    )
    missing = tmp_path / "missing"
    write_tokens(short / "train.tokens", np.arange(9), vocab_size=300)
    meta = json.loads((other / META_FILE).read_text())
    (other / TOKENIZER_FILE).write_bytes(b"{ }")
    meta["tokenizer_sha256"] = hashlib.sha256(b"{ }").hexdigest()
    (other / META_FILE).write_text(json.dumps(meta))
    assert _messages(make({"data.mix": {str(same): 2.0}})) == []
    found = _messages(make({"data.mix": {str(f): 1.0 for f in (missing, same, other, short)}}))
    assert [message.split(" ")[0].rstrip(":") for message in found] == [
        f"data.mix={name}" for name in (missing, other, short)
    ]
    assert "was prepared with another tokenizer than data.path=" in found[1]
    assert "has 9 tokens, too few for one row of model.sequence_length=16" in found[2]
    failures = _messages(make({"task": "resnet", "data.mix": {"a": 1.0}, "model": {}}))
    assert "data.mix={'a': 1.0} has no effect: task=resnet does not read it" in "\n".join(failures)


# Numbers below their range.


def _integers(section, prefix=""):
    """The path of every integer of the configuration; -1 is out of range for each of them."""
    for name, field in type(section).model_fields.items():
        if isinstance(value := getattr(section, name), Section):
            yield from _integers(value, f"{prefix}{name}.")
        elif isinstance(value, dict) or "tuple" in str(field.annotation):
            continue
        elif re.search(r"\bint\b", str(field.annotation)):
            yield f"{prefix}{name}"


COUNTS = [path for path, found in checks.limits(Config()) if found.low == 1]


@pytest.fixture
def refuse(make, tmp_path, monkeypatch):
    """Starts a run as `train.main` does, and returns the lines with which it is refused."""
    simulated = []
    monkeypatch.setattr(
        distributed, "simulate_devices", lambda config, processes: simulated.append(config.mesh)
    )

    def refuse(fields, *, dry_run=True):
        config = make({"data.path": str(tmp_path / "no"), "model": {}} | fields)
        with pytest.raises(errors.ConfigError) as error:
            train._run(Invocation(config, dry_run=dry_run), Goodput())
        # Simulated devices cannot be fewer than one: jax would end in a traceback.
        assert all(mesh.stage > 0 and mesh.data > 0 for mesh in simulated)
        return [failure.message for failure in error.value.failures]

    return refuse


@pytest.mark.parametrize(
    ("task", "schedule"),
    [(name, ("interleaved", "pipemare")[n % 2]) for n, name in enumerate(tasks.names())],
)
def test_every_integer_below_its_range_is_one_line(refuse, task, schedule):
    base = {"task": task, "pipeline.schedule": schedule, "pipeline.microbatches": 8}
    defaults = Config(task=task).flat()
    for path in _integers(Config(task=task)):
        is_count = path in COUNTS or (path.startswith("model.") and defaults[path] != 0)
        for value in (0, -1) if is_count else (-1,):
            lines = refuse(base | {"optimizer.clip_norm": -3.0, path: value})
            first, *others = (line for line in lines if "optimizer.clip_norm=-3.0" not in line)
            assert first.startswith(f"{path}={value} "), lines
            assert all(f"{path}={value}" in line for line in others), lines
            assert len(lines) == 2 + len(others), lines


def test_other_rules_still_speak_beside_a_wrong_mesh(refuse, tmp_path):
    lines = refuse({"mesh.stage": 0, "pipeline.schedule": "1f1p"}, dry_run=False)
    assert [line.split(" ")[0] for line in lines] == [
        *("mesh.stage=0", "pipeline.schedule='1f1p'", f"data.path={tmp_path}/no"),
    ]
    # A group of 1 fits two stages, and would not fit the four that are the default.
    fields = {"pipeline.schedule": "interleaved", "pipeline.group": 1}
    (line,) = refuse(fields | {"mesh.stage": -2, "mesh.data": 1})
    assert line == "mesh.stage=-2 must be at least 1. Nearest valid: 1."


@pytest.mark.parametrize("number", ["0", "1"])
def test_a_wrong_mesh_is_not_shared_by_processes(refuse, monkeypatch, number):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
    monkeypatch.setenv("SLURM_PROCID", number)
    lines = refuse({"mesh.stage": -1, "train.steps": -3}, dry_run=False)
    assert [line.split(" ")[0] for line in lines[:2]] == ["mesh.stage=-1", "train.steps=-3"]
    assert not any("processes" in line for line in lines)
