"""What fits together: every rule names the field, its value, the rule and the nearest valid."""

import hashlib
import json
import math
import shutil

import numpy as np
import pytest

from jaxpipe.schedule import catalog
from jaxpipe.schedule.formats.files import write_csv
from train import checks, configured, errors
from train.data.folder import META_FILE, TOKENIZER_FILE
from train.data.text import HELDOUT_FILE, TRAIN_FILE, write_tokens


def _messages(config, **options):
    return [failure.message for failure in checks.check(config, **options)]


def test_a_right_configuration_passes_and_leaves_nothing(make, tmp_path):
    assert _messages(make()) == []
    assert not (tmp_path / "run").exists()


RULES = [
    (
        {"pipeline.microbatches": 3},
        "Nearest valid: pipeline.microbatches=2 or 4, or train.batch_size=12 or 18.",
    ),
    ({"mesh.data": 3}, "Nearest valid: mesh.data=2 or 4, or train.batch_size=12 or 24."),
    ({"pipeline.schedule": "1f1p"}, "Nearest valid: '1f1b'."),
    ({"pipeline.chunks": 2}, "pipeline.chunks=2 does not fit schedule '1f1b'"),
    ({"model.num_layers": 1}, "Nearest valid: model.num_layers=2 or mesh.stage=1."),
    (
        {"model.num_layers": 10**9, "pipeline.schedule": "auto"},
        "Nearest valid: at most 10000 layers.",
    ),
    (
        {"pipeline.sequence_slices": 3},
        "model.sequence_length=16 is not divisible by 3: pipeline.sequence_slices=3. "
        "Nearest valid: model.sequence_length=15 or 18.",
    ),
    (
        {"pipeline.sequence_slices": 4, "pipeline.schedule": "zb-v"},
        "pipeline.sequence_slices=4 does not fit schedule 'zb-v': it does not read it.",
    ),
    ({"pipeline.sequence_slices": 2, "pipeline.schedule": "2bw"}, "which runs whole sequences"),
    ({"model.num_heads": 3}, "model.num_heads=3 must divide model.width=128. Nearest valid: 2, 4"),
    ({"model.vocab_size": 299}, "model.vocab_size=299 is smaller than the tokenizer's 300 tokens"),
    (
        {"model.sequence_length": 17},
        "Nearest valid: model.sequence_length=16 or train.eval_batches=3.",
    ),
    ({"train.eval_batches": 5}, "Nearest valid: model.sequence_length=12 or train.eval_batches=4."),
    ({"optimizer.warmup_steps": 31}, "Nearest valid: 30."),
    (
        {"distributed.num_processes": 2, "distributed.process_id": 0},
        "distributed.num_processes=2 and distributed.process_id=0 need distributed.coordinator",
    ),
    (
        {
            "distributed.coordinator": "localhost",
            "distributed.num_processes": 2,
            "distributed.process_id": 0,
        },
        "distributed.coordinator='localhost' must be HOST:PORT, such as localhost:12345.",
    ),
    (
        {
            "distributed.coordinator": "localhost:1234",
            "distributed.num_processes": 2,
            "distributed.process_id": 2,
        },
        "Nearest valid: 1.",
    ),
    ({"asynchronous.warmup_steps": 3}, "Nearest valid: 0, or pipeline.schedule=pipemare."),
    ({"pipeline.schedule": "pipemare", "pipeline.weights": "unrolled"}, "Nearest valid: stacked."),
    (
        {"pipeline.schedule": "1f1b", "pipeline.pair_layers": True},
        "pipeline.pair_layers=true has no effect: pipeline.schedule=1f1b overlaps no forward with "
        "a backward. Nearest valid: null, or pipeline.schedule=dualpipe-v-published with more "
        "microbatches than stages.",
    ),
    (
        {"pipeline.compute_dtype": "bfloat16"},
        "Nearest valid: model.dtype=bfloat16, or no pipeline.compute_dtype.",
    ),
    (
        {
            "pipeline.compute_dtype": "bfloat16",
            "model.dtype": "bfloat16",
            "pipeline.schedule": "2bw",
        },
        "Nearest valid: none.",
    ),
    ({"pipeline.fp8": "*kernel", "pipeline.schedule": "2bw"}, "Nearest valid: none."),
    ({"pipeline.residuals": "host", "pipeline.schedule": "pipedream"}, "Nearest valid: device."),
    ({"mesh.data": 2, "mesh.replica": 3}, "Nearest valid: mesh.replica=2."),
    (
        {"mesh.tensor": 8, "model.num_heads": 4},
        "Nearest valid: model.num_heads=8, or mesh.tensor=4.",
    ),
    (
        {"mesh.expert": 4, "mesh.data": 4, "model.num_experts": 6},
        "Nearest valid: model.num_experts=4 or 8, or mesh.expert=3 or 6.",
    ),
    (
        {"mesh.expert": 4, "mesh.data": 4, "mesh.replica": 2, "model.num_experts": 4},
        "Nearest valid: mesh.expert=2.",
    ),
    ({"mesh.expert": 2, "mesh.data": 2}, "Nearest valid: mesh.expert=1."),
    (
        {"mesh.tensor": 2, "model.num_experts": 4, "model.bias_speed": 0.1},
        "Nearest valid: mesh.tensor=1, or model.bias_speed=None.",
    ),
    (
        {"pipeline.schedule": "pipemare", "model.num_experts": 4, "model.bias_speed": 0.1},
        "Nearest valid: model.bias_speed=None, or pipeline.schedule=1f1b.",
    ),
    (
        {"mesh.context": 4, "model.sequence_length": 12},
        "Nearest valid: model.sequence_length=8 or 16, or mesh.context=3 or 6.",
    ),
    (
        {"mesh.tensor": 4, "model.num_heads": 12, "model.num_kv_heads": 3, "model.head_size": 4},
        "Nearest valid: model.num_kv_heads=4, or mesh.tensor=3.",
    ),
    (
        {"mesh.tensor": 2, "pipeline.schedule": "pipemare"},
        "Nearest valid: mesh.tensor=1, or pipeline.schedule=1f1b.",
    ),
    ({"asynchronous.rescheduling_steps": 0}, "Nearest valid: None, or pipeline.schedule=pipemare."),
    (
        {"pipeline.schedule": "pipemare", "pipeline.chunks": 2},
        "pipeline.chunks=2 does not fit schedule 'pipemare': each of its stages holds 1 chunk",
    ),
    (
        {"pipeline.schedule": "2bw", "pipeline.microbatches": 2},
        "Nearest valid: pipeline.microbatches=3.",
    ),
    (
        {"pipeline.schedule": "pipedream", "asynchronous.discrepancy_decay": 0.2},
        "Nearest valid: 0.",
    ),
    (
        {"pipeline.schedule": "pipemare", "asynchronous.discrepancy_decay": 1.0},
        "asynchronous.discrepancy_decay=1.0 must be at least 0 and below 1.",
    ),
    (
        {"pipeline.schedule": "pipemare", "asynchronous.recompute_segment": 3},
        "Nearest valid: asynchronous.recompute_segment=2.",
    ),
    (
        {"pipeline.schedule": "pipemare", "asynchronous.warmup_steps": 30},
        "Nearest valid: 29, or pipeline.schedule=1f1b.",
    ),
    (
        {"pipeline.update": "chunk"},
        "Nearest valid: optimizer.clip_norm=0, or pipeline.update=step.",
    ),
    (
        {"pipeline.update": "chunk", "optimizer.clip_norm": 0.0, "pipeline.weights": "unrolled"},
        "Nearest valid: pipeline.weights=stacked, or pipeline.update=step.",
    ),
    ({"pipeline.update": "chunk", "pipeline.schedule": "2bw"}, "Nearest valid: step."),
    (
        {"mesh.stage": 10**12},
        "mesh.stage=1000000000000 x pipeline.microbatches=4 is more than a schedule can hold.",
    ),
    ({"optimizer.weight_decay": math.inf}, "optimizer.weight_decay=inf must be at least 0 and fin"),
    (
        {"sample.prompt": "a\ud800"},
        "sample.prompt='a\\ud800' has '\\ud800', which is no character.",
    ),
    ({"pipeline.zero": 4}, "pipeline.zero=4 must be at least 0 and at most 3. Nearest valid: 3."),
    (
        {"train.seed": 2**63},
        "train.seed=9223372036854775808 must be at least 0 and at most 9223372036854775807.",
    ),
    (
        {"train.checkpoint_every": 20, "train.keep_every": 50},
        "train.keep_every=50 is not a multiple of train.checkpoint_every=20, so not all of its "
        "steps have a checkpoint. Nearest valid: 40 or 60.",
    ),
    ({"optimizer.peak_lr": float("nan")}, "optimizer.peak_lr=nan must be above 0."),
    ({"data.mix": {"data/code": math.nan}}, "Nearest valid: 1e-06"),
    ({"optimizer.beta2": 1.0}, "optimizer.beta2=1.0 must be at least 0 and below 1."),
]


@pytest.mark.parametrize(("fields", "expected"), RULES, ids=lambda value: str(value)[:40])
def test_a_rule_says_what_to_do_and_nothing_else_fails(make, fields, expected):
    (message,) = _messages(make(fields))
    assert expected in message
    assert any(path in message for path in fields)


def write_schedule(path, *, stages: int, microbatches: int):
    order = catalog.build("zb-h1", stages=stages, microbatches=microbatches)
    path.write_text(write_csv(order))
    return order


def test_a_schedule_of_ones_own_is_what_the_trainer_runs(make, tmp_path):
    path = tmp_path / "mine.csv"
    order = write_schedule(path, stages=2, microbatches=4)
    config = make({"pipeline.schedule": str(path)})
    assert checks.check(config) == []
    assert configured.order(config).orders == order.orders
    config = make({"pipeline.schedule": "jaxpipe.schedule.generators.depth_first:one_f_one_b"})
    assert checks.check(config) == []
    assert configured.order(config).orders == configured.order(make()).orders


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"mesh.stage": 4}, "is not a schedule for mesh.stage=4 and pipeline.microbatches=4"),
        ({"pipeline.microbatches": 8}, "Nearest valid: mesh.stage=2, pipeline.microbatches=4."),
        ({"pipeline.schedule": "missing.csv"}, "cannot be read"),
        ({"asynchronous.warmup_steps": 3, "pipeline.schedule": "pipemar"}, "not a known schedule"),
    ],
)
def test_a_schedule_of_ones_own_that_does_not_fit(make, tmp_path, fields, expected):
    path = tmp_path / "mine.csv"
    write_schedule(path, stages=2, microbatches=4)
    (failure,) = checks.check(make({"pipeline.schedule": str(path)} | fields))
    assert expected in str(failure)


def test_wandb_is_only_needed_by_those_who_ask(make, monkeypatch):
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    (message,) = _messages(make({"wandb.project": "gpt"}))
    assert "wandb.project='gpt' needs a package that is not installed: pip install wandb" in message


def test_all_failures_at_once(make):
    found = "\n".join(
        _messages(
            make(
                {
                    "pipeline.schedule": "1f1p",
                    "pipeline.microbatches": 3,
                    "model.vocab_size": 10,
                    "optimizer.warmup_steps": 31,
                    "train.seed": -1,
                }
            )
        )
    )
    for part in ("'1f1p'", "microbatches=3", "vocab_size=10", "warmup_steps=31", "seed=-1"):
        assert part in found


def test_a_field_with_a_wrong_type_is_reported_once(make):
    broken = [errors.Failure("pipeline.microbatches='x': must be", ("pipeline.microbatches",))]
    found = checks.check(make({"pipeline.microbatches": 3, "train.seed": -1}))
    (left,) = checks.without(found, broken)
    assert left.fields == ("train.seed",)


def test_missing_data_names_the_command(make, tmp_path):
    missing = tmp_path / "nowhere"
    (message,) = _messages(make({"data.path": str(missing)}))
    assert f"data.path={missing} is not a folder" in message
    assert f"python -m train.prepare --out {missing}" in message


@pytest.mark.parametrize("name", [TRAIN_FILE, HELDOUT_FILE])
def test_missing_and_truncated_token_files(make, folder, name):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-1])
    (message,) = _messages(make())
    assert f"{name} is truncated: expected {len(whole)} bytes" in message
    assert f"found {len(whole) - 1} bytes" in message
    (folder / name).unlink()
    (message,) = _messages(make())
    assert f"data.path={folder}: there is no {name}" in message


def test_token_files_of_another_preparation(make, folder):
    shutil.copy(folder / HELDOUT_FILE, folder / TRAIN_FILE)
    (message,) = _messages(make())
    assert "train.tokens holds 1025 tokens, but meta.json says 2000" in message


def test_another_tokenizer(make, folder):
    (folder / TOKENIZER_FILE).write_bytes(b"{ }")
    (message,) = _messages(make())
    assert "tokenizer.json is not the tokenizer these tokens were made with" in message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {
                "pipeline.microbatches": 10**6,
                "train.batch_size": 10**6,
                "pipeline.schedule": "auto",
            },
            "mesh.stage=2 x pipeline.microbatches=1000000 is more than a schedule can hold.",
        ),
        (
            {"train.batch_size": 10**9 + 7},
            "pipeline.microbatches=4 does not divide train.batch_size=1000000007. Nearest valid: "
            "pipeline.microbatches=1 or 1000000007, or train.batch_size=1000000000 or 1000000008.",
        ),
        (
            {"train.batch_size": 10**18 + 3},
            "pipeline.microbatches=4 does not divide train.batch_size=1000000000000000003.",
        ),
    ],
)
def test_a_size_that_is_a_mistake_is_refused_at_once(make, fields, expected):
    """Beside too few held-out rows for such a batch."""
    _, message = sorted(_messages(make(fields)))
    assert expected in message


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
