"""Gathering, reducing and sharding arrays over data shards or stages; sums over model axes.

Every function runs inside `jax.shard_map` and takes arrays together with the `Leaf` of each.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.barriers import always
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.types import Gradients, Index, Leaves, Shapes, Stored, Tree
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
    return _joined(lax.all_gather(shard, names, axis=0), dim)


def _scatter(value: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """Sums all devices' values and keeps this device's part in a dimension; see `_gather`."""
    if dim == 0:
        return lax.psum_scatter(value, names, scatter_dimension=0, tiled=True)
    return lax.psum_scatter(_parts(value, lax.axis_size(names), dim), names, scatter_dimension=0)


def _parts(whole: jax.Array, count: int, dim: int) -> jax.Array:
    """The parts of an array that is split in a dimension, one behind the other."""
    shape = (*whole.shape[:dim], count, -1, *whole.shape[dim + 1 :])
    return jnp.moveaxis(whole.reshape(shape), dim, 0)


def _joined(parts: jax.Array, dim: int) -> jax.Array:
    """Undoes `_parts`."""
    _, *shape = parts.shape
    return jnp.moveaxis(parts, 0, dim).reshape(*shape[:dim], -1, *shape[dim + 1 :])


def reduce_gradients(values: Gradients, leaves: Leaves, axes: Axes, *, zero: Zero) -> Gradients:
    """Sums over data shards, and over the devices along model axes where these hold the same array.

    Each keeps its own part from ZeRO-1 on.
    """

    def reduce(leaf: Leaf, value: jax.Array) -> jax.Array:
        return _reduce(value, leaf.apart, leaf.data_dim, axes, zero)

    return jax.tree.map(reduce, leaves, values)


def _reduce(
    value: jax.Array, apart: tuple[str, ...], data_dim: int | None, axes: Axes, zero: Zero
) -> jax.Array:
    scattered: tuple[str, ...] = ()
    if zero.shards_state and data_dim is not None:
        scattered = axes.sharding(apart)
        value = _scatter(value, scattered, data_dim)
    several = summed_over((*scattered, *apart), axes)
    return lax.psum(value, several) if several else value


def summed_over(apart: tuple[str, ...], axes: Axes) -> tuple[str, ...]:
    """The axes over which gradients of arrays are summed that differ along ``apart``.

    A sum over one device would still copy on some backends.
    """
    return tuple(n for n in axes.peers if n not in apart and lax.axis_size(n) > 1)


# Pieces that move while layers run. XLA for GPUs has one collective of a group of devices under way
# at a time, and a loop over layers hides no more: all arrays of all pieces are joined.

_Key: TypeAlias = tuple[str, tuple[str, ...], bool]
"""Dtype, `Leaf.apart`, and whether data shards split them, of arrays that are joined."""

Joined: TypeAlias = dict[_Key, jax.Array]
"""Arrays of pieces, those of a piece one behind the other: ``[data shards, pieces, n]``, or a
shard's part ``[pieces, n]``."""


def room_for(pieces: Iterable[tuple[Shapes, Leaves]], *, sharded: bool) -> Shapes:
    """The shapes of a piece's arrays as they are joined, of the widest piece of several."""
    room: dict[_Key, jax.ShapeDtypeStruct] = {}
    for shapes, leaves in pieces:
        one = jax.eval_shape(partial(_in_a_row, leaves=leaves, sharded=sharded), shapes)
        for key, w in one.items():
            room[key] = max(room.get(key, w), w, key=lambda shape: shape.size)
    return room


def summed_of(room: Shapes, axes: Axes) -> Shapes:
    """The room of those arrays whose sum takes more than one device."""
    return {key: w for key, w in room.items() if summed_over(key[1], axes)}


def no_pieces(slots: Sequence[Index], room: Shapes) -> Joined:
    """Zeros in place of pieces that go into these slots, or out of them, and need this room. Zeros
    that XLA knows, it would make before the first tick."""
    zero = jnp.where(always(slots[0]), np.int32(0), np.int32(1))
    return {
        key: jnp.full((*w.shape[:-1], len(slots), w.shape[-1]), zero, w.dtype)
        for key, w in room.items()
    }


def put_piece(joined: Joined, n: int, values: Stored, leaves: Leaves, *, sharded: bool) -> Joined:
    """Writes those arrays of piece ``n`` that have room, whole or this data shard's parts."""
    own = _in_a_row(values, leaves, sharded=sharded)
    return joined | {
        key: lax.dynamic_update_index_in_dim(joined[key], w, np.int32(n), axis=-2)
        for key, w in own.items()
        if key in joined
    }


def get_piece(joined: Joined, n: int, likes: Tree, leaves: Leaves) -> Stored:
    """Reads the arrays of piece ``n``, of the shapes and dtypes of ``likes``, and returns those of
    ``likes`` themselves that had no room."""
    ends = dict.fromkeys(joined, 0)

    def own(leaf: Leaf, like: jax.Array) -> jax.Array:
        key, dim, shape = _key(leaf, like), leaf.data_dim, like.shape
        if key not in joined:
            return like
        rows = lax.index_in_dim(joined[key], n, -2, keepdims=False)
        parts = math.prod(rows.shape[:-1])
        start, ends[key] = ends[key], ends[key] + like.size // parts
        run = rows[..., start : ends[key]]
        if dim is None:
            return run.reshape(shape)
        return _joined(run.reshape(parts, *shape[:dim], -1, *shape[dim + 1 :]), dim)

    return jax.tree.map(own, leaves, likes)


def _in_a_row(values: Stored, leaves: Leaves, *, sharded: bool) -> Joined:
    """A piece's arrays one behind the other, ``[data shards, n]`` or ``[n]``."""
    found: dict[_Key, list[jax.Array]] = {}
    for leaf, value in zip(jax.tree.leaves(leaves), jax.tree.leaves(values), strict=True):
        rows = value.reshape(-1)
        if leaf.data_dim is not None and not sharded:
            rows = _parts(value, leaf.data_parts, leaf.data_dim).reshape(leaf.data_parts, -1)
        found.setdefault(_key(leaf, value), []).append(rows)
    return {key: jnp.concatenate(arrays, axis=-1) for key, arrays in found.items()}


def _key(leaf: Leaf, value: jax.Array | jax.ShapeDtypeStruct) -> _Key:
    return str(value.dtype), leaf.apart, leaf.data_dim is not None


def gather_joined(shards: Joined, axes: Axes) -> Joined:
    """Does as `gather`."""
    return {
        key: lax.all_gather(w, axes.sharding(key[1]), axis=0) if key[2] else w
        for key, w in shards.items()
    }


def reduce_joined(values: Joined, axes: Axes, *, zero: Zero) -> Joined:
    """Does as `reduce_gradients`."""
    return {
        key: _reduce(value, key[1], 0 if key[2] else None, axes, zero)
        for key, value in values.items()
    }


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
