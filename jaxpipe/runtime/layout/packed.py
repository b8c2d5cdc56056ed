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
    """A place in packed arrays, by group: first column, number of columns, and of valid columns."""

    start: dict[str, Tree]
    width: dict[str, int]
    valid: dict[str, Tree]


class Packed(LayerLayout):
    """Parameters of layers that differ, one tree per layer.

    A layer's parameters of one group are stored as ``[data, columns]``, flat and padded to a
    multiple of the data shards; a stage's array is ``[data, all columns]``. Devices along a model
    axis each pack their own part.
    """

    slot_dim = 1
    num_pieces = 1

    def __init__(self, layers: Sequence[LayerParams], rows: np.ndarray, splits: Splits) -> None:
        self.num_chunks = rows.shape[1]
        self.canonical = jax.tree.map_with_path(splits.leaf, layers)
        leaves = {self.group_of(leaf): leaf for leaf in jax.tree.leaves(self.canonical)}
        self._groups = {g: leaves[g] for g in sorted(leaves)}
        self._widths = [self._width(layer) for layer in self.canonical]
        none = dict.fromkeys(self._groups, 0)  # rows holds -1, the last, where there is no layer
        widths = {g: np.asarray([w[g] for w in [*self._widths, none]]) for g in self._groups}
        width = {g: w[rows] for g, w in widths.items()}
        self._within = {g: np.cumsum(w, axis=2, dtype=np.int32) - w for g, w in width.items()}
        self._valid = {g: w.sum(axis=2, dtype=np.int32) for g, w in width.items()}
        self._start = {g: np.cumsum(w, axis=1, dtype=np.int32) - w for g, w in self._valid.items()}
        self._chunk_width = {g: int(w.max()) for g, w in self._valid.items()}
        # A piece is as wide as the widest chunk, and must not reach past the end.
        total = {g: int(self._start[g].max(axis=1).max()) + self._chunk_width[g] for g in width}
        self.piece = self._leaves(self._chunk_width)
        self.placed = self._leaves(total)

    @staticmethod
    def group_of(leaf: Leaf) -> str:
        """The group of an array."""
        return " ".join((str(leaf.dtype), *leaf.apart))

    def _width(self, layer: Leaves) -> dict[str, int]:
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

    def _leaves(self, width: dict[str, int]) -> dict[str, Leaf]:
        return {g: _columns(self._groups[g], n) for g, n in width.items()}

    def canonical_of(self, layer: int) -> Leaves:
        return self.canonical[layer]

    def shard_shape_of(self, layer: int) -> Shapes:
        return {
            g: jax.ShapeDtypeStruct((1, n), self._groups[g].dtype)
            for g, n in self._widths[layer].items()
        }

    def slot_shapes(self, count: int) -> Shapes:
        slots = self._leaves({g: count * n for g, n in self._chunk_width.items()})
        return {g: leaf.local.struct() for g, leaf in slots.items()}

    def layer_at(self, at: At, example: int, *, slot: Index = None) -> _Columns:
        start = self._starts(at, slot)
        within = {g: jnp.asarray(w)[at] for g, w in self._within.items()}
        width = {g: n for g, n in self._widths[example].items() if n}
        return _Columns({g: start[g] + within[g] for g in width}, width, width)

    def piece_at(self, at: At, *, slot: Index = None, share: Share | None = None) -> _Columns:
        assert share is None  # most_shares
        width = self._chunk_width
        valid = _of_chunk(self._valid, at) if slot is None else width
        return _Columns(self._starts(at, slot), width, valid)

    def _starts(self, at: At, slot: Index) -> dict[str, Tree]:
        if slot is None:
            return _of_chunk(self._start, at)
        return {g: slot * n for g, n in self._chunk_width.items()}

    def read(self, arrays: Arrays, place: _Columns) -> Stored:
        return {
            g: lax.dynamic_slice_in_dim(arrays[g], place.start[g], n, axis=1)
            for g, n in place.width.items()
        }

    def write(self, arrays: Arrays, place: _Columns, values: Stored) -> Arrays:
        def write(g: str, new: jax.Array) -> jax.Array:
            if place.valid[g] is not place.width[g]:
                # Columns behind a narrower chunk belong to the next one.
                counts = jnp.arange(place.width[g]) < place.valid[g]
                new = jnp.where(counts, new, self.read(arrays, place)[g])
            return lax.dynamic_update_slice_in_dim(arrays[g], new, place.start[g], axis=1)

        return arrays | {g: write(g, values[g]) for g in place.width}

    def compute_dtypes(self, dtype_of: Callable[[str, jax.ShapeDtypeStruct], DTypeLike]) -> Tree:
        return {g: dtype_of("layers", leaf.struct()) for g, leaf in self.piece.items()}

    def _windows(self, example: int, axes: Axes) -> Iterator[tuple[str, Window]]:
        """Yields the group of each of a layer's arrays, and its place there."""
        taken = dict.fromkeys(self._groups, 0)
        for leaf in jax.tree.leaves(self.canonical[example]):
            g, own = self.group_of(leaf), leaf.cut(axes, sharded=False)
            data = axes.sharding(leaf.apart)
            shape, columns = leaf.local.shape, self._widths[example][g]
            window = Window(own, shape, taken[g], columns, data)
            yield g, window
            taken[g] += window.size

    def parts(self, stored: Stored, example: int, axes: Axes, *, sharded: bool) -> list[DevicePart]:
        if sharded:
            return [DevicePart(w.read(stored[g]), w) for g, w in self._windows(example, axes)]
        values = jax.tree.leaves(self.unpack(stored, example))
        leaves = jax.tree.leaves(self.canonical[example])
        return list(map(DevicePart, values, [leaf.cut(axes, sharded=False) for leaf in leaves]))

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
        return {g: self.piece[g] for g, n in self._widths[example].items() if n}

    def pack(self, params: LayerParams, example: int) -> Stored:
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(self.canonical[example]), strict=True)
        flat = [(self.group_of(leaf), w.reshape(-1)) for w, leaf in pairs]

        def group(g: str, width: int) -> jax.Array:
            joined = jnp.concatenate([w for of, w in flat if of == g])
            data = self._groups[g].data_parts
            return jnp.pad(joined, (0, data * width - joined.size)).reshape(data, width)

        return {g: group(g, n) for g, n in self._widths[example].items() if n}

    def unpack(self, stored: Stored, example: int) -> LayerParams:
        flat = {g: w.reshape(-1) for g, w in stored.items()}
        leaves, tree = jax.tree.flatten(self.canonical[example])
        taken = dict.fromkeys(self._groups, 0)
        values = []
        for leaf in leaves:
            g, shape = self.group_of(leaf), leaf.local.shape
            start = taken[g]
            taken[g] += math.prod(shape)
            values.append(flat[g][start : taken[g]].reshape(shape))
        return jax.tree.unflatten(tree, values)


def _columns(group: Leaf, width: int) -> Leaf:
    """The leaf of a group's arrays with so many columns on every device, from one of its arrays."""
    data, splits = (
        group.data_parts,
        [AxisSplit(split.axes, 1, split.size) for split in group.splits],
    )
    total = width * math.prod(split.size for split in splits)
    dim = 0 if data > 1 else None
    return Leaf((data, total), group.dtype, None, dim, data, tuple(splits), group.apart)


def _of_chunk(table: dict[str, np.ndarray], at: At) -> dict[str, Tree]:
    stage, chunk, _ = at
    return {g: jnp.asarray(w)[stage, chunk] for g, w in table.items()}
