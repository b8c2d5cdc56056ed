"""A checkpoint of any layout continues on any other: dropout, bfloat16 and batch norm included."""

import itertools

import chex
import jax
import numpy as np
import pytest

from train import checkpoint
from train.config import Config
from train.step import Setup

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

LAYOUTS = (
    {"mesh": {"stage": 2, "data": 2}, "pipeline": {"schedule": "1f1b", "zero": 3}},
    {"mesh": {"stage": 4, "data": 1}, "pipeline": {"schedule": "zb-h1", "zero": 0}},
    {"mesh": {"stage": 2, "data": 4}, "pipeline": {"schedule": "zb-v", "zero": 1}},
    {"mesh": {"stage": 1, "data": 2}, "pipeline": {"schedule": "gpipe", "zero": 2}},
    {"mesh": {"stage": 2, "data": 2, "tensor": 2}, "pipeline": {"schedule": "zb-v", "zero": 3}},
    {"mesh": {"stage": 2, "data": 1, "tensor": 2}, "pipeline": {"schedule": "1f1b", "zero": 0}},
    {"mesh": {"stage": 2, "data": 2, "expert": 2}, "pipeline": {"schedule": "zb-v", "zero": 3}},
    {"mesh": {"stage": 1, "data": 4, "expert": 4}, "pipeline": {"schedule": "gpipe", "zero": 1}},
    {
        "mesh": {"stage": 2, "data": 2, "tensor": 2, "expert": 2},
        "pipeline": {"schedule": "1f1b", "zero": 2},
    },
    {
        "mesh": {"stage": 2, "data": 1, "context": 2, "tensor": 2},
        "pipeline": {"schedule": "zb-h1", "zero": 0},
    },
)
_GPT = {"vocab_size": 64, "sequence_length": 8, "num_layers": 5, "width": 16, "num_heads": 2}
_RESNET = {"depth": 14, "num_classes": 3, "width": 4, "norm": "batch", "channels": 1}
MODELS = {
    "dropout": {"model": _GPT | {"dropout": 0.3}},
    "bfloat16": {"model": _GPT | {"dtype": "bfloat16"}},
    "batch norm": {"task": "resnet", "model": _RESNET},
    "experts": {"model": _GPT | {"num_experts": 4}},
}
PAIRS = [
    (model, here, there)
    for model in ("dropout", "bfloat16", "batch norm")
    for here, there in itertools.permutations(range(4), 2)
] + [("muon", here, there) for here, there in ((0, 1), (1, 0), (2, 3), (3, 2), (0, 4), (4, 3))]
PAIRS += [
    ("dropout", here, there)
    for here, there in itertools.permutations((0, 3, 4, 5), 2)
    if {here, there} & {4, 5}
]
PAIRS += [("experts", here, there) for here, there in itertools.permutations(range(6, 10), 2)]


def _setup(model, number):
    tree = {"model": _GPT, "optimizer": {"name": "muon"}} if model == "muon" else MODELS[model]
    layout = {part: dict(fields) for part, fields in LAYOUTS[number].items()}
    layout["pipeline"]["microbatches"] = 4
    return Setup(Config.model_validate(tree | layout | {"train": {"batch_size": 16}}))


def _data(number):
    return LAYOUTS[number]["mesh"]["data"]


def _batch(setup):
    rng = np.random.default_rng(0)

    def draw(row):
        if np.issubdtype(row.dtype, np.integer):
            return rng.integers(0, 3, (16, *row.shape)).astype(row.dtype)
        return rng.normal(size=(16, *row.shape)).astype(row.dtype)

    drawn = {name: draw(row) for name, row in setup.task.row_shapes().items()}
    return jax.device_put(drawn, setup.pipe.batch_sharding)


def _losses(setup, state):
    """The held-out loss, and that of the next step."""
    held_out = setup.evaluate(state, _batch(setup))["loss"]
    _, metrics = setup.train_step(state, _batch(setup), setup.rng(1))
    return [float(held_out), float(metrics["loss"])]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints after a step, with the losses there; each made when first asked for."""
    made = {}

    def find(model, number):
        if (model, number) not in made:
            folder = tmp_path_factory.mktemp("saved") / "checkpoints"
            setup = _setup(model, number)
            state, _ = setup.train_step(setup.init(), _batch(setup), setup.rng(0))
            with checkpoint.checkpoints_in(folder) as checkpoints:
                saved = setup.to_canonical(state)
                checkpoint.save(checkpoints, 1, saved, data={}, run={})
            saved = jax.device_get(saved)
            made[model, number] = setup, folder, _losses(setup, state), saved
        return made[model, number]

    return find


def test_the_campaign_is_large_enough():
    assert len(PAIRS) >= 40


@pytest.mark.parametrize(("model", "here", "there"), PAIRS)
def test_another_layout_has_the_same_state_and_losses(trained, model, here, there):
    _, folder, losses, expected = trained(model, here)
    other = trained(model, there)[0]
    with checkpoint.checkpoints_in(folder, read_only=True) as checkpoints:
        saved, _ = checkpoint.restore(checkpoints, 1, other.canonical_shapes)
    placed = other.from_canonical(saved)
    chex.assert_trees_all_equal(jax.device_get(other.to_canonical(placed)), expected)
    tolerance = 2e-2 if model == "bfloat16" else 1e-4
    # Every data shard draws dropout, and normalizes, for itself.
    own = model in ("dropout", "batch norm") and _data(here) != _data(there)
    compared = slice(1 if own else 2)
    assert _losses(other, placed)[compared] == pytest.approx(losses[compared], rel=tolerance)
