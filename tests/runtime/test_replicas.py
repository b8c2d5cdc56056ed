"""Replicas: data shards of which several groups hold the same parts (hybrid sharding)."""

from __future__ import annotations

import functools
import math
import re

import chex
import jax
import layouts
import optax
import pytest
from covering import covering, some
from layouts import LAYOUTS, pipeline

import jaxpipe

CASES = [
    (schedule, layers, zero)
    for schedule in ("1f1b-fused", "zb-v", "breadth-first")
    for layers in LAYOUTS
    for zero in (0, 1, 2, 3)
]

FEW = covering([case for case in CASES if case[0] != "breadth-first"])


def hybrid(schedule, layers, zero, replica) -> jaxpipe.Pipeline:
    """A pipeline on 2 stages and 4 data shards, in this many replicas."""
    mesh = jaxpipe.make_mesh(stage=2, data=4, replica=replica)
    return pipeline(schedule, layers, zero, mesh=mesh, microbatches=2)


@functools.cache
def without_replicas(layers):
    pipe = hybrid("1f1b-fused", layers, 0, 1)
    args = pipe.place(layouts.params(layers)), layouts.batch(layers), jax.random.key(2)
    loss, grads = jax.jit(pipe.value_and_grad)(*args)
    return loss, pipe.unplace(grads)


@pytest.mark.parametrize(("schedule", "layers", "zero"), some(CASES, *FEW))
def test_replicas_change_where_parts_lie_and_nothing_else(schedule, layers, zero):
    pipe = hybrid(schedule, layers, zero, 2)
    placed = pipe.place(layouts.params(layers))
    chex.assert_trees_all_equal(pipe.unplace(placed), layouts.params(layers))
    loss, grads = jax.jit(pipe.value_and_grad)(placed, layouts.batch(layers), jax.random.key(2))
    actual = loss, pipe.unplace(grads)
    chex.assert_trees_all_close(actual, without_replicas(layers), rtol=1e-5, atol=1e-6)
    for tree, sharded in ((placed, zero == 3), (grads, zero >= 1)):
        leaf = max(jax.tree.leaves(tree["layers"]), key=lambda leaf: leaf.size)
        parts = leaf.size // leaf.addressable_shards[0].data.size
        assert parts == 2 * (2 if sharded else 1)  # stages, and shards within a replica


@pytest.mark.parametrize(
    ("layers", "zero", "update"),
    [("stacked", 3, "step"), ("tuple", 2, "chunk"), ("unrolled", 1, "step")],
)
def test_optimizers_give_the_same_with_replicas(layers, zero, update):
    clip = optax.clip_by_global_norm(0.1) if update == "step" else optax.identity()
    optimizer, found = optax.chain(clip, optax.lamb(1e-2)), []
    for replica in (1, 2):
        pipe = hybrid("1f1b", layers, zero, replica)
        placed = pipe.place(layouts.params(layers))
        state, step = pipe.init(optimizer, placed), pipe.train_step(optimizer, update=update)
        for _ in range(3):
            _, placed, state = step(placed, state, layouts.batch(layers))
        found.append(pipe.unplace(placed))
    chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-6)


def test_an_asynchronous_pipeline_clips_over_its_parts_once():
    sgd, found = optax.sgd(0.1), []
    for replica in (1, 2):
        pipe = hybrid("1f1b", "stacked", 2, replica)
        params = pipe.place(layouts.params("stacked"))
        training = jaxpipe.AsyncPipeline(pipe, sgd, clip_norm=0.5)
        state = training.init(params, pipe.init(sgd, params), layouts.batch("stacked"))
        for _ in range(3):
            state, _ = jax.jit(training.step)(state, layouts.batch("stacked"))
        state, _ = jax.jit(training.drain)(state)
        found.append(pipe.unplace(training.finish(state)[0]))
    chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-6)


def test_weights_are_gathered_within_a_replica_and_gradients_cross_it_in_parts():
    pipe = hybrid("1f1b-fused", "stacked", 3, 2)
    text = (
        jax.jit(pipe.value_and_grad).lower(pipe.placed_params, layouts.batch("stacked")).as_text()
    )
    parts = {}
    for name in ("all_gather", "reduce_scatter"):
        types = rf"stablehlo\.{name}\".*?: \(tensor<([\dx]+)x\w+>\) -> tensor<([\dx]+)x\w+>"
        pairs = re.findall(types, text, re.DOTALL)
        sizes = [[math.prod(map(int, one.split("x"))) for one in pair] for pair in pairs]
        parts[name] = {max(pair) / min(pair) for pair in sizes}
    assert parts == {"all_gather": {2}, "reduce_scatter": {2}}
    pipe = hybrid("1f1b-fused", "stacked", 3, 4)  # whole in every replica
    assert pipe.zero == 0


@pytest.mark.parametrize("layers", ["stacked", "tuple"])
def test_placing_has_a_derivative(layers):
    pipe, params, batch = (
        hybrid("1f1b", layers, 3, 2),
        layouts.params(layers),
        layouts.batch(layers),
    )
    grads = jax.jit(jax.grad(lambda params: pipe.loss(pipe.place(params), batch)))(params)
    _, expected = jax.jit(pipe.value_and_grad)(pipe.place(params), batch)
    chex.assert_trees_all_close(grads, pipe.unplace(expected), rtol=1e-6, atol=1e-7)


def test_replicas_divide_the_data_shards():
    message = r"replica=3 does not divide data=4\.\nNearest valid: 1, 2, 4"
    with pytest.raises(ValueError, match=message):
        jaxpipe.make_mesh(stage=2, data=4, replica=3)
