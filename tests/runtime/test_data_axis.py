"""The data axes: what shards gather and reduce, and replicas of which several hold the same parts.

Results with replicas (hybrid sharding) are in `test_equivalence`.
"""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.runtime.layout.data_axis import (
    average,
    gather,
    gather_joined,
    get_piece,
    no_pieces,
    own_shard,
    put_piece,
    reduce_gradients,
    reduce_joined,
    room_for,
)
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.zero import Zero

SHARDS, SHAPE = 4, (4, 8, 12)


def on_shards(function, array, shards=SHARDS):
    """The function's results on all shards, of their rows of an array, one behind the other."""
    rows = jax.shard_map(
        lambda own: jax.tree.map(lambda w: w[None], function(jax.tree.map(lambda w: w[0], own))),
        mesh=jaxpipe.make_mesh(stage=1, data=shards),
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    return jax.jit(rows)(array)


@pytest.mark.parametrize("dim", range(3))
def test_shards_gather_the_array_and_reduce_to_their_parts_of_the_sum(dim):
    """In whatever dimension they split it."""
    leaf, axes = Leaf(SHAPE, jnp.float32, None, dim, SHARDS), Axes()
    values = np.random.default_rng(0).integers(9, size=(SHARDS, *SHAPE)).astype(np.float32)
    total = values.sum(axis=0)
    parts = np.stack(np.split(total, SHARDS, axis=dim))

    def run(own):
        sums = [reduce_gradients(own, leaf, axes, zero=Zero(zero)) for zero in (0, 1)]
        return (*sums, gather(sums[1], leaf, axes), own_shard(sums[0], leaf, axes))

    whole, reduced, gathered, own = on_shards(run, values)
    for found in (whole, gathered):
        np.testing.assert_array_equal(found, [total] * SHARDS)
    for found in (reduced, own):
        np.testing.assert_array_equal(found, parts)


@pytest.mark.parametrize("zero", [0, 2])
def test_joined_pieces_move_as_their_arrays_do_by_themselves(zero):
    """Two pieces of arrays that are split in several dimensions, or not at all, of two dtypes; the
    first lacks some."""
    axes, level, rng = Axes(), Zero(zero), np.random.default_rng(1)
    leaves = {
        "rows": Leaf((8, 3), jnp.float32, None, 0, SHARDS),
        "columns": Leaf((2, 4, 5), jnp.float32, None, 1, SHARDS),
        "narrow": Leaf((4,), jnp.bfloat16, None, 0, SHARDS),
        "whole": Leaf((3,), jnp.float32, None, None),
    }
    kinds = [{name: leaves[name] for name in ("rows", "whole")}, leaves]
    values = jax.tree.map(
        lambda leaf: rng.integers(9, size=(SHARDS, *leaf.shape)).astype(leaf.dtype), kinds
    )

    def run(own):
        shapes = jax.tree.map(Leaf.struct, kinds)
        room = room_for(zip(shapes, kinds, strict=True), sharded=False)
        joined = no_pieces([0, 1], room)
        for n, piece in enumerate(own):
            joined = put_piece(joined, n, piece, kinds[n], sharded=False)
        joined = reduce_joined(joined, axes, zero=level)
        pairs = list(zip(own, kinds, strict=True))
        alone = [reduce_gradients(piece, of, axes, zero=level) for piece, of in pairs]
        shapes = jax.eval_shape(lambda: alone)
        found = [get_piece(joined, n, shapes[n], kinds[n]) for n in range(2)]
        if zero == 0:
            return found, alone
        shards = no_pieces([0], room_for([(shapes[1], leaves)], sharded=True))
        shards = put_piece(shards, 0, alone[1], leaves, sharded=True)
        whole = gather(alone[1], leaves, axes)
        again = get_piece(gather_joined(shards, axes), 0, jax.eval_shape(lambda: whole), leaves)
        return [*found, again], [*alone, whole]

    found, alone = on_shards(run, values)
    chex.assert_trees_all_equal(found, alone)


def test_averages_keep_their_dtype_and_count_exactly():
    large = 2**24 + 1
    values = {"count": jnp.full(2, large), "mean": jnp.asarray([1.0, 2.0], jnp.bfloat16)}
    averaged = on_shards(functools.partial(average, axes=Axes()), values, shards=2)
    assert averaged["count"].tolist() == [large, large]
    assert averaged["mean"].dtype == jnp.bfloat16
    assert averaged["mean"].tolist() == [1.5, 1.5]


# Replicas.


def hybrid(name: str, zero: int, replica: int) -> jaxpipe.Pipeline:
    """A pipeline on 2 stages and 4 data shards, in this many replicas."""
    sizes = {"stage": 2, "data": 4, "replica": replica}
    return toys.pipeline(name, "1f1b-fused", sizes, zero=zero, microbatches=2)


@pytest.mark.parametrize("name", toys.LAYOUTS)
def test_parts_are_those_of_the_shards_within_a_replica(name):
    for zero in range(4):
        pipe, params = hybrid(name, zero, 2), toys.named(name).params
        moments = pipe.optimizer_placing(optax.adam(0.1)).placed[0].mu
        for tree, sharded in ((pipe.placed_params, zero == 3), (moments, zero >= 1)):
            leaf = max(jax.tree.leaves(tree["layers"]), key=lambda leaf: leaf.size)
            parts = leaf.size // math.prod(leaf.sharding.shard_shape(leaf.shape))
            assert parts == 2 * (2 if sharded else 1)  # stages, and shards within a replica
    chex.assert_trees_all_equal(pipe.unplace(pipe.place(params)), params)
    assert hybrid(name, 3, 4).options.zero == 0  # whole in every replica


def test_optimizers_see_whole_parameters_and_placing_has_a_derivative():
    pipe, params = hybrid("tied", 3, 2), toys.named("tied").params
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
    pipe, batch = hybrid("tied", 3, 2), toys.named("tied").batch(16)
    text = jax.jit(pipe.value_and_grad).lower(pipe.placed_params, batch).as_text()
    parts = {}
    for name in ("all_gather", "reduce_scatter"):
        types = rf"stablehlo\.{name}\".*?: \(tensor<([\dx]+)x\w+>\) -> tensor<([\dx]+)x\w+>"
        pairs = re.findall(types, text, re.DOTALL)
        sizes = [[math.prod(map(int, one.split("x"))) for one in pair] for pair in pairs]
        parts[name] = {max(pair) / min(pair) for pair in sizes}
    assert parts == {"all_gather": {2}, "reduce_scatter": {2}}
