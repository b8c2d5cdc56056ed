"""Layers that differ, packed: one flat array per group, each layer in columns of its own.

A group is all arrays of one dtype that the same axes split. A stage takes the room of its own
layers, and all stages still run one program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxpipe.runtime.layout.layer_layout import DeviceParts, LayerLayout
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.layout.parts import AxisSplit, DevicePart, Window
from jaxpipe.runtime.layout.shares import Share
from jaxpipe.runtime.layout.splits import Splits
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.types import (
    Arrays,
    At,
    Index,
    LayerParams,
    Leaves,
    Params,
    Shapes,
    Stored,
    Tree,
)


class _Columns(NamedTuple):
    """A place in packed arrays, by group: first column, number of columns, and how many of them are
    its own; None where all are."""

    start: dict[str, Tree]
    width: dict[str, int]
    valid: dict[str, Tree] | None = None


class Packed(LayerLayout):
    """Parameters of layers that differ, one tree per layer.

    A layer's parameters of one group are stored as ``[data, columns]``, flat and padded to a
    multiple of the data shards; a stage's array is ``[data, all columns]``. Devices along a model
    axis each pack their own part.

    Two layers a and b of 5 and 3 float32 in one chunk take 3 and 2 columns on 2 data shards::

        shard 0  a0 a1 a2 | b0 b1
        shard 1  a3 a4  0 | b2  0
    """

    slot_dim = 1
    num_pieces = 1

    def __init__(self, layers: Sequence[LayerParams], rows: np.ndarray, splits: Splits) -> None:
        self.num_chunks = rows.shape[1]
        self.canonical = jax.tree.map_with_path(splits.leaf, layers)
        leaves = {self.group_of(leaf): leaf for leaf in jax.tree.leaves(self.canonical)}
        self._groups = {g: leaves[g] for g in sorted(leaves)}
        self._layer_columns = columns = [self._columns_of_layer(layer) for layer in self.canonical]
        # rows holds -1, the last, where there is no layer.
        columns_by_layer = {g: np.asarray([*(n[g] for n in columns), 0]) for g in self._groups}
        columns_by_row = {g: n[rows] for g, n in columns_by_layer.items()}
        self._start_in_chunk = {  # [stages, chunks, rows]
            g: np.cumsum(n, axis=2, dtype=np.int32) - n for g, n in columns_by_row.items()
        }
        self._chunk_columns = {g: n.sum(axis=2, dtype=np.int32) for g, n in columns_by_row.items()}
        self._chunk_start = {  # [stages, chunks], as of `_chunk_columns`
            g: np.cumsum(n, axis=1, dtype=np.int32) - n for g, n in self._chunk_columns.items()
        }
        self._widest_chunk = {g: int(n.max()) for g, n in self._chunk_columns.items()}
        # A piece is as wide as the widest chunk, and must not reach past the end.
        total = {g: int(n.max()) + self._widest_chunk[g] for g, n in self._chunk_start.items()}
        self.piece = self._leaves(self._widest_chunk)
        self.placed = self._leaves(total)

    @staticmethod
    def group_of(leaf: Leaf) -> str:
        """The group of an array."""
        return " ".join((str(leaf.dtype), *leaf.apart))

    def _columns_of_layer(self, layer: Leaves) -> dict[str, int]:
        size = dict.fromkeys(self._groups, 0)
        for leaf in jax.tree.leaves(layer):
            size[self.group_of(leaf)] += math.prod(leaf.local.shape)
        return {g: -(-n // self._groups[g].data_parts) for g, n in size.items()}

    @classmethod
    def pieces_of(cls, layers: int) -> int:
        return 1

    @classmethod
    def most_shares(cls, layers: Params, splits: Splits) -> int:
        return 1

    def _leaves(self, columns: dict[str, int]) -> dict[str, Leaf]:
        return {g: _group_leaf(self._groups[g], n) for g, n in columns.items()}

    def canonical_of(self, layer: int) -> Leaves:
        return self.canonical[layer]

    def shard_shape_of(self, layer: int) -> Shapes:
        return {
            g: jax.ShapeDtypeStruct((1, n), self._groups[g].dtype)
            for g, n in self._layer_columns[layer].items()
        }

    def slot_shapes(self, count: int) -> Shapes:
        slots = self._leaves({g: count * n for g, n in self._widest_chunk.items()})
        return {g: leaf.local.struct() for g, leaf in slots.items()}

    def layer_at(self, at: At, example: int, *, slot: Index = None) -> _Columns:
        chunk_start = self._starts(at, slot)
        width = {g: n for g, n in self._layer_columns[example].items() if n}
        start = {g: chunk_start[g] + jnp.asarray(self._start_in_chunk[g])[at] for g in width}
        return _Columns(start, width)

    def piece_at(self, at: At, *, slot: Index = None, share: Share | None = None) -> _Columns:
        assert share is None  # `most_shares` is 1: pieces move as a whole
        valid = None
        if slot is None:
            valid = {g: jnp.asarray(n)[at[:2]] for g, n in self._chunk_columns.items()}
        return _Columns(self._starts(at, slot), self._widest_chunk, valid)

    def _starts(self, at: At, slot: Index) -> dict[str, Tree]:
        if slot is None:
            return {g: jnp.asarray(n)[at[:2]] for g, n in self._chunk_start.items()}
        return {g: slot * n for g, n in self._widest_chunk.items()}

    def read(self, arrays: Arrays, place: _Columns) -> Stored:
        return {
            g: lax.dynamic_slice_in_dim(arrays[g], place.start[g], n, axis=1)
            for g, n in place.width.items()
        }

    def write(self, arrays: Arrays, place: _Columns, values: Stored) -> Arrays:
        def write(g: str, new: jax.Array) -> jax.Array:
            if place.valid is not None:
                # Columns behind a narrower chunk belong to the next one.
                is_own = jnp.arange(place.width[g]) < place.valid[g]
                new = jnp.where(is_own, new, self.read(arrays, place)[g])
            return lax.dynamic_update_slice_in_dim(arrays[g], new, place.start[g], axis=1)

        return arrays | {g: write(g, values[g]) for g in place.width}

    def compute_dtypes(self, dtype_of: Callable[[str, jax.ShapeDtypeStruct], DTypeLike]) -> Tree:
        return {g: dtype_of("layers", leaf.struct()) for g, leaf in self.piece.items()}

    def _places(self, example: int) -> Iterator[tuple[str, int, Leaf]]:
        """Yields every array of a layer in tree order: its group, its first element in the group's
        flat array, and its leaf. `pack` joins in this order."""
        taken = dict.fromkeys(self._groups, 0)
        for leaf in jax.tree.leaves(self.canonical[example]):
            g = self.group_of(leaf)
            yield g, taken[g], leaf
            taken[g] += math.prod(leaf.local.shape)

    def _windows(self, example: int, axes: Axes) -> Iterator[tuple[str, Window]]:
        """Yields the group of each of a layer's arrays, and its place there."""
        for g, start, leaf in self._places(example):
            local, columns = leaf.cut(axes, sharded=False), self._layer_columns[example][g]
            yield g, Window(local, leaf.local.shape, start, columns, axes.sharding(leaf.apart))

    def parts(self, stored: Stored, example: int, axes: Axes, *, sharded: bool) -> list[DevicePart]:
        if sharded:
            windows = self._windows(example, axes)
            return [DevicePart(window.read(stored[g]), window) for g, window in windows]
        cuts = [leaf.cut(axes, sharded=False) for _, _, leaf in self._places(example)]
        return list(map(DevicePart, jax.tree.leaves(self.unpack(stored, example)), cuts))

    def of_parts(
        self, parts: DeviceParts, stored: Stored, example: int, axes: Axes, *, sharded: bool
    ) -> Stored:
        if not sharded:
            tree = jax.tree.structure(self.canonical[example])
            return self.pack(jax.tree.unflatten(tree, parts), example)
        stored = dict(stored)
        for (g, window), part in zip(self._windows(example, axes), parts, strict=True):
            stored[g] = window.write(stored[g], part)
        return stored

    def leaves_of(self, example: int) -> Leaves:
        return {g: self.piece[g] for g, n in self._layer_columns[example].items() if n}

    def pack(self, params: LayerParams, example: int) -> Stored:
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(self.canonical[example]), strict=True)
        flat = [(self.group_of(leaf), w.reshape(-1)) for w, leaf in pairs]

        def pack_group(g: str, columns: int) -> jax.Array:
            joined = jnp.concatenate([w for group, w in flat if group == g])
            data = self._groups[g].data_parts
            return jnp.pad(joined, (0, data * columns - joined.size)).reshape(data, columns)

        return {g: pack_group(g, n) for g, n in self._layer_columns[example].items() if n}

    def unpack(self, stored: Stored, example: int) -> LayerParams:
        flat = {g: w.reshape(-1) for g, w in stored.items()}
        values = [
            flat[g][start : start + math.prod(leaf.local.shape)].reshape(leaf.local.shape)
            for g, start, leaf in self._places(example)
        ]
        return jax.tree.unflatten(jax.tree.structure(self.canonical[example]), values)


def _group_leaf(group: Leaf, columns: int) -> Leaf:
    """The leaf of a group's arrays with so many columns on every device, from one of its arrays."""
    data = group.data_parts
    splits = [AxisSplit(split.axes, 1, split.size) for split in group.splits]
    total = columns * math.prod(split.size for split in splits)
    dim = 0 if data > 1 else None
    return Leaf((data, total), group.dtype, None, dim, data, tuple(splits), group.apart)
