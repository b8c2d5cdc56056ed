"""Arrays in which several are joined, such as queries, keys and values, each split by itself.

A canonical array is split in equal runs of its own order, so that it lies like any other; a placed
one is split into parts of each array that is joined in it. The functions run inside
`jax.shard_map`, on one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax

from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.layout.parts import Slices
from jaxpipe.runtime.mesh import Axes


def to_parts(w: jax.Array, leaf: Leaf, axes: Axes, *, sharded: bool) -> jax.Array:
    """Makes a device's part of a placed array from its part of the canonical one.

    Args:
      w: the part.
      leaf: leaf of the whole array.
      axes: the mesh axes by their use.
      sharded: whether data shards split it.
    """
    for canonical, placed in _cuts(leaf, axes, sharded=sharded):
        w = placed.own(canonical.whole(w))
    return w


def from_parts(w: jax.Array, leaf: Leaf, axes: Axes, *, sharded: bool) -> jax.Array:
    """Undoes `to_parts`."""
    for canonical, placed in _cuts(leaf, axes, sharded=sharded):
        w = canonical.own(placed.whole(w))
    return w


def _cuts(leaf: Leaf, axes: Axes, *, sharded: bool) -> Iterator[tuple[Slices, Slices]]:
    """Yields the canonical and the placed cut of each dimension in which arrays are joined."""
    names = leaf.names(axes, sharded=sharded)
    for split in leaf.splits:
        if split.joined:
            dims = ((names[split.dim], split.dim),)
            yield Slices(leaf.shape, dims), Slices(leaf.shape, dims, (split,))
