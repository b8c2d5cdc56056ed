"""Layers that differ, packed: one flat array per group, each layer in columns of its own.

A group is all arrays of one dtype that the same axes split. A stage takes the room of its own
layers, and all stages still run one program.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxpipe.runtime.indices import unit_of
from jaxpipe.runtime.layout.layer_layout import DeviceParts, LayerLayout
from jaxpipe.runtime.layout.leaf import AxisSplit, Cut, DevicePart, Flat, Leaf, Share
from jaxpipe.runtime.layout.splits import Splits
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.types import (
    Arrays,
    At,
    LayerParams,
    Leaves,
    Shapes,
    Slot,
    Stored,
    Tree,
)


class _Columns(NamedTuple):
    """A place in packed arrays, by group: first column, in units, number of columns, and how many
    units are its own; None where all are."""

    start: dict[str, Tree]
    width: dict[str, int]
    valid: dict[str, Tree] | None = None


class Packed(LayerLayout):
    """Parameters of layers that differ, one tree per layer.

    An array is stored as ``[data, columns]``, flat and padded to a multiple of the data shards; a
    layer's arrays of one group lie beside each other, and so do a stage's layers. Devices along a
    model axis each pack their own part.

    Two layers in one chunk, of arrays a and b, and c, of 5, 2 and 3 float32, on 2 data shards::

        shard 0  a0 a1 a2  b0 | c0 c1
        shard 1  a3 a4  0  b1 | c2  0
    """

    in_shares = False
    slot_dim = 1
    num_pieces = 1

    def __init__(self, layers: Sequence[LayerParams], rows: np.ndarray, splits: Splits) -> None:
        self.rows, self.num_chunks = rows, rows.shape[1]
        self.canonical = jax.tree.map_with_path(splits.leaf, layers)
        leaves = {self.group_of(leaf): leaf for leaf in jax.tree.leaves(self.canonical)}
        self._groups = {g: leaves[g] for g in sorted(leaves)}
        self._unit = unit_of(max(self._arranged(unit=1).values(), default=0))
        self.placed = self._leaves(self._arranged(unit=self._unit))
        self.piece = self._leaves(self._widest_chunk)

    def _arranged(self, *, unit: int) -> dict[str, int]:
        """Gives layers their starts, in units of so many columns; returns a stage's columns."""
        self._layer_columns = columns = [
            {g: -(-n // unit) * unit for g, n in self._columns_of_layer(layer).items()}
            for layer in self.canonical
        ]
        # rows holds -1, the last, where there is no layer.
        by_layer = {g: np.asarray([*(n[g] for n in columns), 0]) // unit for g in self._groups}
        by_row = {g: n[self.rows] for g, n in by_layer.items()}
        # [stages, chunks, rows], then [stages, chunks]
        self._start_in_chunk = {g: np.cumsum(n, axis=2) - n for g, n in by_row.items()}
        self._chunk_units = {g: n.sum(axis=2) for g, n in by_row.items()}
        self._chunk_start = {g: np.cumsum(n, axis=1) - n for g, n in self._chunk_units.items()}
        widest = {g: int(n.max()) for g, n in self._chunk_units.items()}
        self._widest_chunk = {g: n * unit for g, n in widest.items()}
        # A piece is as wide as the widest chunk, and must not reach past the end.
        return {g: (int(n.max()) + widest[g]) * unit for g, n in self._chunk_start.items()}

    @staticmethod
    def _moves(split: AxisSplit) -> bool:
        return True

    @staticmethod
    def group_of(leaf: Leaf) -> str:
        return " ".join((str(leaf.dtype), *leaf.apart))

    def _columns_of_layer(self, layer: Leaves) -> dict[str, int]:
        columns = dict.fromkeys(self._groups, 0)
        for leaf in jax.tree.leaves(layer):
            columns[self.group_of(leaf)] += _columns_of(leaf)
        return columns

    def _leaves(self, columns: dict[str, int]) -> dict[str, Leaf]:
        return {g: _group_leaf(self._groups[g], n) for g, n in columns.items()}

    def canonical_of(self, layer: int) -> Leaves:
        return self.canonical[layer]

    def slot_shapes(self, count: int) -> Shapes:
        slots = self._leaves({g: count * n for g, n in self._widest_chunk.items()})
        return {g: leaf.local.struct() for g, leaf in slots.items()}

    def layer_at(self, at: At, example: int, *, slot: Slot = None) -> _Columns:
        chunk_start = self._starts(at, slot)
        width = {g: n for g, n in self._layer_columns[example].items() if n}
        start = {g: chunk_start[g] + _int32(self._start_in_chunk[g])[at] for g in width}
        return _Columns(start, width)

    def piece_at(self, at: At, *, slot: Slot = None, share: Share | None = None) -> _Columns:
        assert share is None  # pieces move as a whole
        valid = None
        if slot is None:
            valid = {g: _int32(n)[at[:2]] for g, n in self._chunk_units.items()}
        return _Columns(self._starts(at, slot), self._widest_chunk, valid)

    def _starts(self, at: At, slot: Slot) -> dict[str, Tree]:
        if slot is None:
            return {g: _int32(n)[at[:2]] for g, n in self._chunk_start.items()}
        return {g: slot * (n // self._unit) for g, n in self._widest_chunk.items()}

    def read(self, arrays: Arrays, place: _Columns) -> Stored:
        def read(g: str, width: int) -> jax.Array:
            units = self._in_units(arrays[g])
            found = lax.dynamic_slice_in_dim(units, place.start[g], width // self._unit, axis=1)
            return found.reshape(-1, width)

        return {g: read(g, n) for g, n in place.width.items()}

    def _in_units(self, columns: jax.Array) -> jax.Array:
        """Columns ``[data, columns]`` with the dimension in which starts count."""
        if self._unit == 1:
            return columns
        return columns.reshape(len(columns), -1, self._unit)

    def write(self, arrays: Arrays, place: _Columns, values: Stored) -> Arrays:
        def write(g: str, new: jax.Array) -> jax.Array:
            new, old = self._in_units(new), self._in_units(arrays[g])
            if place.valid is not None:
                # Columns behind a narrower chunk belong to the next one.
                number = lax.broadcasted_iota(jnp.int32, new.shape, 1)
                kept = self._in_units(self.read(arrays, place)[g])
                new = jnp.where(number < place.valid[g], new, kept)
            written = lax.dynamic_update_slice_in_dim(old, new, place.start[g], axis=1)
            return written.reshape(arrays[g].shape)

        return arrays | {g: write(g, values[g]) for g in place.width}

    def compute_dtypes(self, dtype_of: Callable[[str, jax.ShapeDtypeStruct], DTypeLike]) -> Tree:
        return {g: dtype_of("layers", leaf.struct()) for g, leaf in self.piece.items()}

    def _arrays(self, stored: Stored, example: int) -> list[jax.Array]:
        """The columns of each of a layer's arrays, in the order of its tree, in which `_joined`
        puts them beside each other."""
        taken, found = dict.fromkeys(stored, 0), []
        for leaf in jax.tree.leaves(self.canonical[example]):
            g, columns = self.group_of(leaf), _columns_of(leaf)
            found.append(lax.slice_in_dim(stored[g], taken[g], taken[g] + columns, axis=1))
            taken[g] += columns
        return found

    def _joined(self, arrays: Sequence[jax.Array], example: int) -> Stored:
        """Undoes `_arrays`."""
        by_group: dict[str, list[jax.Array]] = {g: [] for g in self.leaves_of(example)}
        for leaf, w in zip(jax.tree.leaves(self.canonical[example]), arrays, strict=True):
            by_group[self.group_of(leaf)].append(w)
        room = {
            g: n - sum(w.shape[1] for w in by_group[g])
            for g, n in self._layer_columns[example].items()
            if n
        }
        joined = {g: jnp.concatenate(columns, axis=1) for g, columns in by_group.items()}
        return {g: jnp.pad(w, ((0, 0), (0, room[g]))) if room[g] else w for g, w in joined.items()}

    def _cuts(self, example: int, axes: Axes, *, sharded: bool) -> Sequence[Cut]:
        leaves = jax.tree.leaves(self.canonical[example])
        cuts = [leaf.cut(axes, sharded=False) for leaf in leaves]
        if not sharded:
            return cuts
        return [
            Flat(cut.shape, cut.dims, cut.joined, leaf.local.shape, axes.sharding(leaf.apart))
            for cut, leaf in zip(cuts, leaves, strict=True)
        ]

    def parts(self, stored: Stored, example: int, axes: Axes, *, sharded: bool) -> list[DevicePart]:
        values = (
            [columns[0] for columns in self._arrays(stored, example)]
            if sharded
            else jax.tree.leaves(self.unpack(stored, example))
        )
        return list(map(DevicePart, values, self._cuts(example, axes, sharded=sharded)))

    def of_parts(
        self, parts: DeviceParts, stored: Stored, example: int, axes: Axes, *, sharded: bool
    ) -> Stored:
        if not sharded:
            tree = jax.tree.structure(self.canonical[example])
            return self.pack(jax.tree.unflatten(tree, parts), example)
        padded = map(Cut.with_padding, self._cuts(example, axes, sharded=True), parts)
        return self._joined([part[None] for part in padded], example)

    def leaves_of(self, example: int) -> Leaves:
        return {g: self.piece[g] for g, n in self._layer_columns[example].items() if n}

    def pack(self, params: LayerParams, example: int) -> Stored:
        def pack(leaf: Leaf, w: jax.Array) -> jax.Array:
            columns, data = _columns_of(leaf), leaf.data_parts
            return jnp.pad(w.reshape(-1), (0, data * columns - w.size)).reshape(data, columns)

        packed = jax.tree.map(pack, self.canonical[example], params)
        return self._joined(jax.tree.leaves(packed), example)

    def unpack(self, stored: Stored, example: int) -> LayerParams:
        leaves, structure = jax.tree.flatten(self.canonical[example])
        shapes = [leaf.local.shape for leaf in leaves]
        arrays = zip(self._arrays(stored, example), shapes, strict=True)
        values = [w.reshape(-1)[: math.prod(shape)].reshape(shape) for w, shape in arrays]
        return jax.tree.unflatten(structure, values)


def _int32(table: np.ndarray) -> jax.Array:
    return jnp.asarray(table, jnp.int32)


def _columns_of(leaf: Leaf) -> int:
    """Columns of an array: the elements that each data shard holds of a device's part."""
    return -(-math.prod(leaf.local.shape) // leaf.data_parts)


def _group_leaf(group: Leaf, columns: int) -> Leaf:
    """The leaf of a group's arrays with so many columns on every device, from one of its arrays."""
    data = group.data_parts
    splits = [AxisSplit(split.axes, 1, split.size) for split in group.splits]
    total = columns * math.prod(split.size for split in splits)
    dim = 0 if data > 1 else None
    return Leaf((data, total), group.dtype, None, dim, data, tuple(splits), group.apart)
