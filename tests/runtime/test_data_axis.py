"""What data shards gather and reduce is the same in whatever dimension they split an array."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe import make_mesh
from jaxpipe.runtime.layout.data_axis import gather, own_shard, reduce_gradients
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.mesh import Axes

SHARDS, SHAPE = 4, (4, 8, 12)


def leaf(dim: int) -> Leaf:
    return Leaf(SHAPE, jnp.float32, None, dim, SHARDS)


def on_shards(function, array):
    """The function's results on all shards, of their rows of an array, one behind the other."""
    mesh = make_mesh(stage=1, data=SHARDS)
    rows = jax.shard_map(
        lambda own: function(own[0])[None],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    return jax.jit(rows)(array)


@pytest.mark.parametrize("dim", range(3))
def test_what_shards_gather_is_the_array(dim):
    whole = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    parts = np.stack(np.split(whole, SHARDS, axis=dim))
    found = on_shards(lambda own: gather(own, leaf(dim), Axes()), parts)
    np.testing.assert_array_equal(found, [whole] * SHARDS)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dim", range(3))
def test_shards_reduce_to_their_parts_of_the_sum(dim, zero):
    values = np.random.default_rng(0).integers(9, size=(SHARDS, *SHAPE)).astype(np.float32)
    reduce = functools.partial(reduce_gradients, leaves=leaf(dim), axes=Axes(), zero=zero)
    total = values.sum(axis=0)
    wanted = np.split(total, SHARDS, axis=dim) if zero else [total] * SHARDS
    np.testing.assert_array_equal(on_shards(reduce, values), wanted)


@pytest.mark.parametrize("dim", range(3))
def test_a_shard_has_the_part_that_it_reduces(dim):
    values = np.broadcast_to(np.arange(np.prod(SHAPE)).reshape(SHAPE), (SHARDS, *SHAPE))
    values = values.astype(np.float32)
    parts = on_shards(lambda own: own_shard(own, leaf(dim), Axes()), values)
    reduced = on_shards(lambda own: reduce_gradients(own, leaf(dim), Axes(), zero=1), values)
    np.testing.assert_array_equal(SHARDS * parts, reduced)
