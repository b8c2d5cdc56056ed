"""Shares: equal parts of a layer, which may move over data one at a time.

Data shards each have a part of an array; a share is an equal part of every one of those. With the
whole array seen as ``[data shards, shares, rest]``, it is a strided row, and is gathered or reduced
in the same dimension as the array. An array that does not divide goes with the first share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.types import Index, Leaves
from jaxpipe.schedule.lowering.transfers import SMALLEST_SHARE, dividing_shares


class Share(NamedTuple):
    """One of ``of`` shares of a layer."""

    number: Index
    of: int


def most(layer: Leaves, smallest: float = SMALLEST_SHARE) -> int:
    """Largest number of shares in which a layer may move (`dividing_shares`)."""
    leaves = [leaf.local for leaf in jax.tree.leaves(layer)]
    return dividing_shares([(_bytes(leaf), _length(leaf)) for leaf in leaves], smallest)


def share_of(layer: Leaves, of: int) -> Leaves:
    """A share of a layer, every array a `Leaf`; the layer itself if it has one share."""

    def share(leaf: Leaf) -> Leaf:
        if not _divides(leaf, of):
            return leaf
        shape = list(leaf.shape)
        shape[leaf.data_dim or 0] //= of
        return dataclasses.replace(leaf, shape=tuple(shape))

    return jax.tree.map(share, layer)


def read_share(leaf: Leaf, array: jax.Array, lead: Sequence[Index], share: Share) -> jax.Array:
    """Reads the share of the array that lies at ``lead`` in the leading dimensions."""
    rows, shape = len(lead), list(array.shape[len(lead) :])
    if not _divides(leaf, share.of):
        part = lax.dynamic_slice(array, (*lead, *[0] * len(shape)), (*[1] * rows, *shape))
        return part.reshape(shape)
    view, start, size = _view(leaf, array, lead, share)
    shape[leaf.data_dim or 0] //= share.of
    return lax.dynamic_slice(view, start, size).reshape(shape)


def write_share(
    leaf: Leaf, array: jax.Array, lead: Sequence[Index], share: Share, value: jax.Array
) -> jax.Array:
    """Writes the share that `read_share` reads, and returns the array."""
    value = value.astype(array.dtype)
    if not _divides(leaf, share.of):
        value = jnp.where(share.number == 0, value, read_share(leaf, array, lead, share))
        start = (*lead, *[0] * value.ndim)
        return lax.dynamic_update_slice(
            array, value.reshape([1] * len(lead) + [*value.shape]), start
        )
    view, start, size = _view(leaf, array, lead, share)
    return lax.dynamic_update_slice(view, value.reshape(size), start).reshape(array.shape)


def _view(
    leaf: Leaf, array: jax.Array, lead: Sequence[Index], share: Share
) -> tuple[jax.Array, tuple[Index, ...], tuple[int, ...]]:
    """Views the array with a dimension for shares; returns the share's start and size, too."""
    rows, shape, dim = len(lead), array.shape[len(lead) :], leaf.data_dim or 0
    shards = leaf.data_parts if shape[dim] == leaf.shape[dim] else 1
    length = shape[dim] // (shards * share.of)
    before, behind = shape[:dim], shape[dim + 1 :]
    view = array.reshape(*array.shape[:rows], *before, shards, share.of, length, *behind)
    start = (*lead, *[0] * len(before), 0, share.number, 0, *[0] * len(behind))
    return view, start, (*[1] * rows, *before, shards, 1, length, *behind)


def _divides(leaf: Leaf, of: int) -> bool:
    """Whether data shards split the array, and shares divide each shard's part."""
    length = _length(leaf)
    return length > 0 and length % of == 0


def _length(leaf: Leaf) -> int:
    """Length of a data shard's part of an array in the dimension that shards split; or 0."""
    return 0 if leaf.data_dim is None else leaf.shape[leaf.data_dim] // leaf.data_parts


def _bytes(leaf: Leaf) -> int:
    return math.prod(leaf.shape) * leaf.struct().dtype.itemsize
