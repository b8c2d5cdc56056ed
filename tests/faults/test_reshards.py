"""A checkpoint of any layout continues on any other: dropout, bfloat16 and batch norm included."""

import itertools

import chex
import jax
import pytest
import tiny_tasks

from jaxpipe import Checkpoints
from train.runs import checkpoint
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
MODELS = {
    "dropout": ("gpt", {"model": {"dropout": 0.3}}),
    "bfloat16": ("gpt", {"model": {"dtype": "bfloat16"}}),
    "batch norm": ("resnet", {}),
    "experts": ("gpt", {"model": {"num_experts": 4}}),
    "muon": ("gpt", {"optimizer": {"name": "muon"}}),
}
SOME = (0, 1), (1, 0), (2, 3), (3, 2), (0, 4), (4, 3)
PAIRS = [
    *itertools.product(("dropout", "bfloat16", "batch norm"), itertools.permutations(range(4), 2)),
    *(("dropout", pair) for pair in itertools.permutations((0, 3, 4, 5), 2) if {*pair} & {4, 5}),
    *(("experts", pair) for pair in itertools.permutations(range(6, 10), 2)),
    *(("muon", pair) for pair in SOME),
]


def _setup(model, number):
    (task, sections), layout = MODELS[model], LAYOUTS[number]
    pipeline = {"microbatches": 4, "vocabulary": "auto"} | layout["pipeline"]
    shape = {"depth": 14} if task == "resnet" else {"num_layers": 5, "width": 16}
    shape |= sections.get("model", {})
    made = sections | layout | {"pipeline": pipeline, "model": shape, "train": {"batch_size": 16}}
    return Setup(tiny_tasks.config(task, **made))


def _data(number):
    return LAYOUTS[number]["mesh"]["data"]


def _losses(setup, state):
    """The held-out loss, and that of the next step."""
    held_out = setup.evaluate(state, tiny_tasks.rows(setup))["loss"].mean
    _, metrics = setup.train_step(state, tiny_tasks.rows(setup), setup.rng(1))
    return [float(held_out), float(metrics["loss"])]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints after a step, with the losses there; each made when first asked for."""
    made = {}

    def find(model, number):
        if (model, number) not in made:
            folder = tmp_path_factory.mktemp("saved") / "checkpoints"
            setup = _setup(model, number)
            state, _ = setup.train_step(setup.init(), tiny_tasks.rows(setup), setup.rng(0))
            with Checkpoints(folder) as checkpoints:
                saved = setup.to_canonical(state)
                checkpoint.save(checkpoints, 1, saved, data={}, run={})
            saved = jax.device_get(saved)
            made[model, number] = setup, folder, _losses(setup, state), saved
        return made[model, number]

    return find


@pytest.mark.parametrize(("model", "pair"), PAIRS)
def test_another_layout_has_the_same_state_and_losses(trained, model, pair):
    here, there = pair
    _, folder, losses, expected = trained(model, here)
    other = trained(model, there)[0]
    with Checkpoints(folder, read_only=True) as checkpoints:
        saved, _ = checkpoint.restore(checkpoints, 1, other.canonical_shapes)
    placed = other.from_canonical(saved)
    chex.assert_trees_all_equal(jax.device_get(other.to_canonical(placed)), expected)
    tolerance = 2e-2 if model == "bfloat16" else 1e-4
    # Every data shard draws dropout, and normalizes, for itself.
    own = model in ("dropout", "batch norm") and _data(here) != _data(there)
    compared = slice(1 if own else 2)
    assert _losses(other, placed)[compared] == pytest.approx(losses[compared], rel=tolerance)
