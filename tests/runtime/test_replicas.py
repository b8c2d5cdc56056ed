"""Replicas: data shards of which several groups hold the same parts (hybrid sharding).

Two cases of `test_equivalence` are executed with them.
"""

from __future__ import annotations

import math
import re

import chex
import jax
import optax
import pytest
import toys

import jaxpipe


def hybrid(layout: str, zero: int, replica: int) -> jaxpipe.Pipeline:
    """A pipeline on 2 stages and 4 data shards, in this many replicas."""
    mesh = jaxpipe.make_mesh(stage=2, data=4, replica=replica)
    return toys.pipeline("1f1b-fused", layout, zero, mesh=mesh, microbatches=2)


@pytest.mark.parametrize("layout", toys.LAYOUTS)
def test_parts_are_those_of_the_shards_within_a_replica(layout):
    for zero in range(4):
        pipe, params = hybrid(layout, zero, 2), toys.params(layout)
        moments = pipe.optimizer_placing(optax.adam(0.1)).placed[0].mu
        for tree, sharded in ((pipe.placed_params, zero == 3), (moments, zero >= 1)):
            leaf = max(jax.tree.leaves(tree["layers"]), key=lambda leaf: leaf.size)
            parts = leaf.size // math.prod(leaf.sharding.shard_shape(leaf.shape))
            assert parts == 2 * (2 if sharded else 1)  # stages, and shards within a replica
    chex.assert_trees_all_equal(pipe.unplace(pipe.place(params)), params)
    assert hybrid(layout, 3, 4).options.zero == 0  # whole in every replica


def test_optimizers_see_whole_parameters_and_placing_has_a_derivative():
    pipe, params = hybrid("stacked", 3, 2), toys.params("stacked")
    gradients = jax.tree.map(lambda w: w**2 - 0.1, params)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2))
    expected = toys.expected_update(optimizer, params, gradients)
    found = toys.updated(pipe, optimizer, params, gradients)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)

    def product(params, other):
        products = jax.tree.map(lambda a, b: (a * b).sum(), *map(pipe.place, (params, other)))
        return sum(jax.tree.leaves(products))

    chex.assert_trees_all_equal(jax.jit(jax.grad(product))(params, gradients), gradients)


def test_weights_are_gathered_within_a_replica_and_gradients_cross_it_in_parts():
    pipe = hybrid("stacked", 3, 2)
    step = jax.jit(pipe.value_and_grad)
    text = step.lower(pipe.placed_params, toys.batch("stacked")).as_text()
    parts = {}
    for name in ("all_gather", "reduce_scatter"):
        types = rf"stablehlo\.{name}\".*?: \(tensor<([\dx]+)x\w+>\) -> tensor<([\dx]+)x\w+>"
        pairs = re.findall(types, text, re.DOTALL)
        sizes = [[math.prod(map(int, one.split("x"))) for one in pair] for pair in pairs]
        parts[name] = {max(pair) / min(pair) for pair in sizes}
    assert parts == {"all_gather": {2}, "reduce_scatter": {2}}
