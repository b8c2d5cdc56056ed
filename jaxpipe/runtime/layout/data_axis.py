"""The data axes: gathering, reducing and sharding arrays that they may split.

Every function runs inside `jax.shard_map` and takes arrays together with the `Leaf` of each.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.types import Gradients, Leaves, Stored, Tree


def gather(shards: Stored, leaves: Leaves, axes: Axes) -> Stored:
    """Whole arrays of every data shard's part."""

    def whole(leaf: Leaf, shard: jax.Array) -> jax.Array:
        if leaf.data_dim is None:
            return shard
        return lax.all_gather(shard, axes.split, axis=leaf.data_dim, tiled=True)

    return jax.tree.map(whole, leaves, shards)


def reduce_gradients(values: Gradients, leaves: Leaves, axes: Axes, *, zero: int) -> Gradients:
    """Sums over data shards; each keeps its own part from ZeRO-1 on."""
    if lax.axis_size(axes.data) == 1:  # a sum over one device would still copy on some backends
        return values

    def reduce(leaf: Leaf, value: jax.Array) -> jax.Array:
        if leaf.data_dim is None or zero == 0:
            return lax.psum(value, axes.data)
        part = lax.psum_scatter(value, axes.split, scatter_dimension=leaf.data_dim, tiled=True)
        return lax.psum(part, axes.replica) if axes.replica else part

    return jax.tree.map(reduce, leaves, values)


def own_shard(whole: Stored, leaves: Leaves, axes: Axes) -> Stored:
    """The part of weights whose gradient and optimizer state this data shard holds."""

    def shard(leaf: Leaf, w: jax.Array) -> jax.Array:
        if leaf.data_dim is None:
            return w
        size = w.shape[leaf.data_dim] // lax.axis_size(axes.split)
        return lax.dynamic_slice_in_dim(w, lax.axis_index(axes.split) * size, size, leaf.data_dim)

    return jax.tree.map(shard, leaves, whole)


def average(values: Tree, axes: Axes) -> Tree:
    """The mean over data shards in each array's own dtype; integers are rounded down."""
    if lax.axis_size(axes.data) == 1:
        return values

    def mean(value: jax.Array) -> jax.Array:
        if jnp.issubdtype(value.dtype, jnp.inexact):
            return lax.pmean(value, axes.data)
        return (lax.psum(value, axes.data) // lax.axis_size(axes.data)).astype(value.dtype)

    return jax.tree.map(mean, values)
