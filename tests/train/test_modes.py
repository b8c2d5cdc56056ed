"""Steps that never drain the pipeline, for every model family: against steps that do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_tasks import TINY, assert_same_first_step, rows

from train import checkpoint
from train.config import Config
from train.modes import Asynchronous, Modes
from train.step import Setup

pytestmark = pytest.mark.pipeline


def config(task: str, *, asynchronous: dict, schedule: str = "pipemare", **model) -> Config:
    return Config(
        task=task,
        model=TINY[task] | model,
        mesh={"stage": 2, "data": 2},
        pipeline={"schedule": schedule, "microbatches": 2},
        # So loose that it does not matter which norms a stage knows.
        optimizer={"clip_norm": 1e9, "warmup_steps": 0, "weight_decay": 0.5},
        asynchronous=asynchronous,
        train={"batch_size": 8, "steps": 20},
    )


def equal(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, a), b)


@pytest.mark.parametrize(
    ("task", "schedule", "segment"),
    [
        ("toy_family:Toy", "pipemare", 2),
        *(
            pytest.param(task, schedule, segment, marks=pytest.mark.slow)
            for task, schedule, segment in (
                ("gpt", "pipemare", None),
                ("bert", "pipemare", 1),
                ("transformer", "pipemare", 2),
                ("resnet", "pipemare", 2),
                ("resnet", "pipemare", None),
                ("resnet", "pipedream", 1),
            )
        ),
    ],
)
def test_one_step_and_a_drain_are_a_synchronous_step(task, schedule, segment):
    """No weights are late for the first minibatch: weight decay and states included."""
    settings = {"rescheduling_steps": 0, "recompute_segment": segment}
    setup = Setup(config(task, asynchronous=settings, schedule=schedule))
    batch, mode = rows(setup), Asynchronous(setup)
    carried, _ = mode.compile()(mode.begin(setup.init(), 0), batch, None)
    state, losses = mode.settle(carried)
    want, metrics = setup.train_step(setup.init(), batch, None)
    np.testing.assert_allclose(losses, [metrics["loss"]], rtol=1e-5)
    got, want = setup.to_canonical(state), setup.to_canonical(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), got.layers, want.layers)
    assert_same_first_step(got.params, want.params, want.optimizer[1].mu)


def test_a_checkpoint_from_before_states_had_a_value_for_every_data_shard(tmp_path):
    mode = Asynchronous(Setup(config("toy_family:Running", asynchronous={})))
    saved = mode.to_saved(mode.begin(mode.setup.init(), 0))
    old = {name: leaf for name, leaf in saved.items() if not name.startswith("flight.states")}
    assert 0 < len(old) < len(saved)
    old |= {name: leaf + 1 for name, leaf in saved.items() if name.startswith("states")}
    with checkpoint.checkpoints_in(tmp_path) as checkpoints:
        checkpoint.save(checkpoints, 3, old, data={}, run={})
        checkpoints.wait()
        restored, _ = checkpoint.restore(checkpoints, 3, mode.saved_shapes)
    carried = mode.from_saved(restored, 3)
    assert {name: jnp.shape(leaf) for name, leaf in mode.to_saved(carried).items()} == {
        name: leaf.shape for name, leaf in saved.items()
    }
    for name, leaf in carried["states"].items():
        np.testing.assert_array_equal(leaf, saved[f"states.{name}"] + 1)
        for shard in carried["flight"]["states"][name]:
            np.testing.assert_array_equal(shard, leaf)


@pytest.mark.slow
def test_settling_and_saving_disturb_nothing():
    """Evaluation and checkpoints look at a run with dropout, T1 and T2 in mid-flight."""
    settings = {"rescheduling_steps": 4, "discrepancy_decay": 0.2}
    setup = Setup(config("gpt", asynchronous=settings, dropout=0.2))
    batch, mode = rows(setup), Modes(setup).after(0)
    step = mode.compile()

    def train(looks: bool):
        carried = mode.begin(setup.init(), 0)
        for k in range(4):
            carried, values = step(carried, batch, setup.rng(k))
            if looks:
                mode.settle(carried)
                saved = jax.tree.map(np.asarray, mode.to_saved(carried))
                mode.first = -1
                carried = mode.from_saved(saved, k + 1)
                assert mode.first == 0
        return *mode.settle(carried), values

    equal(train(looks=True), jax.tree.map(np.asarray, train(looks=False)))
