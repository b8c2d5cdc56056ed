"""Placed trees tell the order of their layers: in another order, every door refuses them."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import split_toy
import toys
from compilations import refusal

import jaxpipe
from jaxpipe import measure

ADAM = optax.adam(0.1)
SCHEDULES = ("1f1b", "gpipe", "interleaved", "breadth-first", "hanayo", "zb-v", "v-min", "auto")
IN_ORDER, FOLDED = "layers 0, 1, 2, 3", "layers 0, 1, 6, 7"
"""The layers that 1F1B and ZB-V give the first of two stages."""


@functools.cache
def pipe(schedule: str, name: str = "ends", num_layers: int = 8) -> jaxpipe.Pipeline:
    return toys.pipeline(name, schedule, microbatches=4, num_layers=num_layers)


@functools.cache
def place(schedule: str) -> jaxpipe.Pipeline:
    return pipe(schedule).place(toys.named("ends", 8).params)


@pytest.mark.parametrize("name", ["ends", "unrolled", "uneven", "adapted"])
@pytest.mark.parametrize("theirs", SCHEDULES)
def test_a_pipeline_takes_trees_in_its_own_order_alone(theirs, name):
    own, other = pipe("zb-v", name), pipe(theirs, name)
    rows = [one.layout.layers.rows.reshape(2, -1).tolist() for one in (own, other)]
    problems = own.params_placing.problems("params", other.placed_params)
    assert (problems == []) == (rows[0] == rows[1])
    assert other.params_placing.problems("params", other.placed_params) == []


class Case(NamedTuple):
    """A pipeline with its own trees, and those of one in another order."""

    pipe: jaxpipe.Pipeline
    batch: dict
    placed: Any
    theirs: Any
    state: Any
    their_state: Any


@functools.cache
def case() -> Case:
    placed, theirs = place("zb-v"), place("1f1b")
    batch = toys.named("ends", 8).batch(8)
    return Case(pipe("zb-v"), batch, placed, theirs, ADAM.init(placed), ADAM.init(theirs))


DOORS = {
    "loss": lambda c: c.pipe.loss(c.theirs, c.batch),
    "in jit": lambda c: jax.jit(c.pipe.loss).lower(c.theirs, c.batch),
    "gradient of the loss": lambda c: jax.grad(c.pipe.loss)(c.theirs, c.batch),
    "value_and_grad": lambda c: c.pipe.value_and_grad(c.theirs, c.batch),
    "outputs": lambda c: c.pipe.outputs(c.theirs, c.batch),
    "unplace": lambda c: c.pipe.unplace(c.theirs),
    "init": lambda c: c.pipe.init(ADAM, c.theirs),
    "update, parameters": lambda c: c.pipe.update(ADAM, c.placed, c.state, c.theirs),
    "update, gradients": lambda c: c.pipe.update(ADAM, c.theirs, c.state, c.placed),
    "update, state": lambda c: c.pipe.update(ADAM, c.placed, c.their_state, c.placed),
    "step, parameters": lambda c: c.pipe.train_step(ADAM)(c.theirs, c.state, c.batch),
    "step, state": lambda c: c.pipe.train_step(ADAM)(c.placed, c.their_state, c.batch),
    "state to canonical": lambda c: c.pipe.optimizer_placing(ADAM).unplace(c.their_state),
    "state to the host": lambda c: c.pipe.optimizer_placing(ADAM).to_host(c.their_state),
    "timeline": lambda c: measure.timeline(c.pipe, c.theirs, c.batch),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_another_order(door):
    text = refusal(DOORS[door], case())
    assert f"stage 0 holds {IN_ORDER}; expected {FOLDED}." in text
    assert "or move it: `pipe." in text


def test_checkpoints_refuse_another_order(tmp_path):
    checkpoints = jaxpipe.Checkpoints(tmp_path / "run")
    state = ADAM.init(place("zb-v"))
    with pytest.raises(ValueError, match=f"stage 0 holds {IN_ORDER}; expected {FOLDED}"):
        checkpoints.save(1, pipe("zb-v"), ADAM, place("1f1b"), state)
    with checkpoints:
        checkpoints.save_arrays(1, {"params": place("1f1b")}, data={"seed": 3})
    restored, data = checkpoints.restore_arrays(1, {"params": pipe("gpipe").placed_params})
    assert not pipe("1f1b").params_placing.problems("params", restored["params"])
    assert data == {"seed": 3}
    with pytest.raises(ValueError, match="a pipeline that orders its layers otherwise"):
        checkpoints.restore_arrays(1, {"params": pipe("zb-v").placed_params})


def test_states_tell_their_order():
    named = toys.named("stateful")
    ours, other = pipe("zb-v", "stateful"), pipe("1f1b", "stateful")
    theirs = other.place_states(named.options["states"])
    placed, batch = ours.place(named.params), named.batch(8)
    for door in (
        lambda: ours.value_and_grad(placed, batch, states=theirs),
        lambda: ours.unplace_states(theirs),
    ):
        assert "or move it: `pipe.place_states(other.unplace_states(" in refusal(door)
    (_, new), _ = jax.eval_shape(ours.value_and_grad, placed, batch, states=ours.placed_states)
    assert not ours.states_problems(new)


def test_a_state_in_flight_tells_its_order():
    """The layers of two stages may be divided otherwise, into arrays of the same shapes."""
    batch, params = toys.named("ends", 4).batch(4), toys.named("ends", 4).params
    ours, other = (
        jaxpipe.AsyncPipeline(
            toys.pipeline("ends", microbatches=2, num_layers=4, layer_counts=counts, poison=False),
            optax.sgd(0.1),
        )
        for counts in ((1, 3), (3, 1))
    )
    placed = other.pipe.place(params)
    theirs = other.init(placed, other.pipe.init(other.optimizer, placed), batch)
    text = refusal(jax.eval_shape, ours.step, theirs, batch)
    assert "state['weights'] was placed in another order: stage 0 holds layers 0, 1, 2" in text


def test_parts_that_devices_share_otherwise_are_another_order():
    """Arrays in which two are joined are the same shape, and another order, on other devices."""
    params = jax.eval_shape(lambda: split_toy.params(4))
    model, pipes = split_toy.model(split=True), []
    for tensor in (2, 4):
        mesh = jaxpipe.make_mesh(stage=2, tensor=tensor)
        pipes.append(jaxpipe.Pipeline(model, params, schedule="1f1b", mesh=mesh))
    wide = pipes[1].params_placing.problems("params", pipes[0].placed_params)
    assert "model axes share its arrays in other parts" in wide[0]


def test_what_users_do_with_placed_trees_keeps_their_order(tmp_path):
    ours, placed = pipe("zb-v"), place("zb-v")
    state = ADAM.init(placed)
    updates, _ = ADAM.update(jax.tree.map(np.ones_like, placed), state, placed)
    stepped = optax.apply_updates(placed, updates)
    halved = stepped | {"head": jax.tree.map(lambda w: w / 2, stepped["head"])}
    for tree in (stepped, halved, jax.jit(lambda tree: tree)(halved)):
        assert not ours.params_placing.problems("params", tree)
    assert "does not tell the order of its layers" in refusal(ours.unplace, dict(halved))

    # docs/checkpoints.md: canonical trees are what other libraries save.
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "plain", ours.unplace(halved))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "plain", pipe("1f1b").canonical_params)
    for one, want in zip(
        jax.tree.leaves(pipe("1f1b").unplace(pipe("1f1b").place(restored))),
        jax.tree.leaves(ours.unplace(halved)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, want)
