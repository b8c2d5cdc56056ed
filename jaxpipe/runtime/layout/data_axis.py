"""Gathering, reducing and sharding arrays over data shards or stages; sums over model axes.

Every function runs inside `jax.shard_map` and takes arrays together with the `Leaf` of each.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.types import Gradients, Leaves, Stored, Tree
from jaxpipe.runtime.zero import Zero


def gather(shards: Stored, leaves: Leaves, axes: Axes) -> Stored:
    """Gathers the parts of all data shards into whole arrays."""

    def whole(leaf: Leaf, shard: jax.Array) -> jax.Array:
        if leaf.data_dim is None:
            return shard
        return _gather(shard, axes.sharding(leaf.apart), leaf.data_dim)

    return jax.tree.map(whole, leaves, shards)


def gather_over_stages(parts: Stored, leaves: Leaves, axes: Axes) -> Stored:
    """Gathers the parts of all stages into whole arrays."""

    def whole(leaf: Leaf, part: jax.Array) -> jax.Array:
        return part if leaf.stage_dim is None else _gather(part, (axes.stage,), leaf.stage_dim)

    return jax.tree.map(whole, leaves, parts)


def reduce_over_stages(values: Gradients, leaves: Leaves, axes: Axes) -> Gradients:
    """Sums over stages; each keeps its own part of arrays that stages split."""

    def reduce(leaf: Leaf, value: jax.Array) -> jax.Array:
        if leaf.stage_dim is None:
            return lax.psum(value, axes.stage)
        return _scatter(value, (axes.stage,), leaf.stage_dim)

    return jax.tree.map(reduce, leaves, values)


def _gather(shard: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """Joins shards in a dimension.

    Along any dimension but the first, XLA for GPUs would lay out the gathered array in another
    order, and copy everything that may be gathered into that order before the first tick. So parts
    are gathered one behind the other, and put in order where they are written.
    """
    if dim == 0:
        return lax.all_gather(shard, names, axis=0, tiled=True)
    parts = lax.all_gather(shard, names, axis=0)
    shape = (*shard.shape[:dim], -1, *shard.shape[dim + 1 :])
    return jnp.moveaxis(parts, 0, dim).reshape(shape)


def _scatter(value: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """Sums all devices' values and keeps this device's part in a dimension; see `_gather`."""
    if dim == 0:
        return lax.psum_scatter(value, names, scatter_dimension=0, tiled=True)
    shape = (*value.shape[:dim], lax.axis_size(names), -1, *value.shape[dim + 1 :])
    parts = jnp.moveaxis(value.reshape(shape), dim, 0)
    return lax.psum_scatter(parts, names, scatter_dimension=0)


def reduce_gradients(values: Gradients, leaves: Leaves, axes: Axes, *, zero: Zero) -> Gradients:
    """Sums over data shards, and over the devices along model axes where these hold the same array.

    Each data shard keeps its own part from ZeRO-1 on.
    """

    def reduce(leaf: Leaf, value: jax.Array) -> jax.Array:
        scattered: tuple[str, ...] = ()
        if zero.shards_state and leaf.data_dim is not None:
            scattered = axes.sharding(leaf.apart)
            value = _scatter(value, scattered, leaf.data_dim)
        names = [n for n in axes.peers if n not in (*scattered, *leaf.apart)]
        # A sum over one device would still copy on some backends.
        several = tuple(n for n in names if lax.axis_size(n) > 1)
        return lax.psum(value, several) if several else value

    return jax.tree.map(reduce, leaves, values)


def own_shard(whole: Stored, leaves: Leaves, axes: Axes) -> Stored:
    """Takes the part of weights whose gradient and optimizer state this data shard holds."""

    def shard(leaf: Leaf, w: jax.Array) -> jax.Array:
        if leaf.data_dim is None:
            return w
        size = w.shape[leaf.data_dim] // leaf.data_parts
        number = lax.axis_index(axes.sharding(leaf.apart))
        return lax.dynamic_slice_in_dim(w, number * size, size, leaf.data_dim)

    return jax.tree.map(shard, leaves, whole)


def average(values: Tree, axes: Axes) -> Tree:
    """Averages over data shards and the devices along model axes, in each array's own dtype;
    integers are rounded down."""
    if lax.axis_size(axes.peers) == 1:
        return values

    def mean(value: jax.Array) -> jax.Array:
        if jnp.issubdtype(value.dtype, jnp.inexact):
            return lax.pmean(value, axes.peers)
        return (lax.psum(value, axes.peers) // lax.axis_size(axes.peers)).astype(value.dtype)

    return jax.tree.map(mean, values)
