"""Steps that never drain the pipeline, for every model family: against steps that do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_tasks import TINY, assert_same_first_step, rows

from train.checkpoint import Checkpoints
from train.config import Config
from train.phases import AsynchronousPhase, Phases
from train.step import Program

pytestmark = pytest.mark.pipeline
GPT = {"vocab_size": 40, "sequence_length": 8, "num_layers": 2, "width": 8, "num_heads": 2}


def config(task: str, *, asynchronous: dict, schedule: str = "pipemare", **model) -> Config:
    shape = {"model": GPT | model} if task == "gpt" else {task: TINY[task] | model}
    return Config(
        task=task,
        **shape,
        mesh={"stage": 2, "data": 2},
        pipeline={"schedule": schedule, "microbatches": 2, "slices": False},
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
        ("resnet", "pipemare", 2),
        *(
            pytest.param(task, schedule, segment, marks=pytest.mark.slow)
            for task, schedule, segment in (
                ("gpt", "pipemare", None),
                ("bert", "pipemare", 1),
                ("transformer", "pipemare", 2),
                ("resnet", "pipemare", None),
                ("resnet", "pipedream", 1),
            )
        ),
    ],
)
def test_one_step_and_a_drain_are_a_synchronous_step(task, schedule, segment):
    """No weights are late for the first minibatch: weight decay and states included."""
    settings = {"rescheduling_steps": 0, "recompute_segment": segment}
    program = Program(config(task, asynchronous=settings, schedule=schedule))
    batch, phase = rows(program), AsynchronousPhase(program)
    carried, _ = phase.compile()(phase.begin(program.init(), 0), batch, None)
    state, losses = phase.settle(carried)
    want, metrics = program.train_step(program.init(), batch, None)
    np.testing.assert_allclose(losses, [metrics["loss"]], rtol=1e-5)
    got, want = program.to_canonical(state), program.to_canonical(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), got.layers, want.layers)
    assert_same_first_step(got.params, want.params, want.optimizer[1].mu)


def test_a_checkpoint_from_before_states_had_a_value_for_every_data_shard(tmp_path):
    phase = AsynchronousPhase(Program(config("resnet", asynchronous={})))
    saved = phase.to_saved(phase.begin(phase.program.init(), 0))
    old = {name: leaf for name, leaf in saved.items() if not name.startswith("flight.states")}
    assert 0 < len(old) < len(saved)
    old |= {name: leaf + 1 for name, leaf in saved.items() if name.startswith("states")}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, old, data={}, run={})
        checkpoints.wait()
        restored, _ = checkpoints.restore(3, phase.saved_shapes)
    carried = phase.from_saved(restored, 3)
    assert {name: jnp.shape(leaf) for name, leaf in phase.to_saved(carried).items()} == {
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
    program = Program(config("gpt", asynchronous=settings, dropout=0.2))
    batch, phase = rows(program), Phases(program).after(0)
    step = phase.compile()

    def train(looks: bool):
        carried = phase.begin(program.init(), 0)
        for k in range(4):
            carried, values = step(carried, batch, program.rng(k))
            if looks:
                phase.settle(carried)
                saved = jax.tree.map(np.asarray, phase.to_saved(carried))
                phase.first = -1
                carried = phase.from_saved(saved, k + 1)
                assert phase.first == 0
        return *phase.settle(carried), values

    equal(train(looks=True), jax.tree.map(np.asarray, train(looks=False)))
