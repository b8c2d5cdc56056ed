"""Layers that differ, packed: one flat array per dtype, each layer in columns of its own.

A stage takes the room of its own layers, and all stages still run one program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.layout.layer_layout import LayerLayout, Parts
from jaxpipe.runtime.layout.leaf import Leaf, make_leaf
from jaxpipe.runtime.layout.parts import Cut, Slices, Window
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.types import (
    Arrays,
    At,
    Index,
    LayerParams,
    Leaves,
    Shapes,
    Stored,
    Tree,
)


class _Columns(NamedTuple):
    """A place in packed arrays, by dtype: first column, how many, how many of them count."""

    start: dict[str, Any]
    width: dict[str, int]
    valid: dict[str, Any]


class Packed(LayerLayout):
    """Parameters of layers that differ, one tree per layer.

    A layer's parameters of one dtype are stored as ``[data, columns]``, flat and padded to a
    multiple of the data shards; a stage's array is ``[data, all columns]``.
    """

    slot_dim = 1
    num_pieces = 1

    def __init__(self, layers: Sequence[LayerParams], rows: np.ndarray, data: int) -> None:
        self._data = data
        self.num_chunks = rows.shape[1]
        self.canonical = jax.tree.map(lambda w: make_leaf(w, data=data), layers)
        self._layers = jax.tree.map(Leaf.struct, self.canonical)
        self._groups = sorted({str(w.dtype) for w in jax.tree.leaves(self._layers)})
        self._widths = [self._width(layer) for layer in self._layers]
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

    def _width(self, layer: Shapes) -> dict[str, int]:
        size = dict.fromkeys(self._groups, 0)
        for leaf in jax.tree.leaves(layer):
            size[str(leaf.dtype)] += leaf.size
        return {g: -(-n // self._data) for g, n in size.items()}

    def _leaves(self, width: dict[str, int]) -> dict[str, Leaf]:
        split = 0 if self._data > 1 else None
        return {g: Leaf((self._data, n), jnp.dtype(g), None, split) for g, n in width.items()}

    @classmethod
    def pieces_of(cls, layers: int) -> int:
        return 1

    def shape_of(self, layer: int) -> Shapes:
        return self._layers[layer]

    def slot_shapes(self, count: int) -> Shapes:
        return jax.tree.map(
            Leaf.struct, self._leaves({g: count * n for g, n in self._chunk_width.items()})
        )

    def layer_at(self, at: At, example: int, *, slot: Index = None) -> _Columns:
        start = self._starts(at, slot)
        within = {g: jnp.asarray(w)[at] for g, w in self._within.items()}
        width = {g: n for g, n in self._widths[example].items() if n}
        return _Columns({g: start[g] + within[g] for g in width}, width, width)

    def piece_at(self, at: At, *, slot: Index = None) -> _Columns:
        width = self._chunk_width
        valid = _of_chunk(self._valid, at) if slot is None else width
        return _Columns(self._starts(at, slot), width, valid)

    def _starts(self, at: At, slot: Index) -> dict[str, Any]:
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
                # What lies behind a narrower chunk belongs to the next one.
                counts = jnp.arange(place.width[g]) < place.valid[g]
                new = jnp.where(counts, new, self.read(arrays, place)[g])
            return lax.dynamic_update_slice_in_dim(arrays[g], new, place.start[g], axis=1)

        return arrays | {g: write(g, values[g]) for g in place.width}

    def compute_dtypes(self, dtype_of: Callable[[str, Any], Any]) -> Tree:
        return {g: dtype_of("layers", leaf.struct()) for g, leaf in self.piece.items()}

    def cuts(self, example: int, axes: Axes, *, sharded: bool) -> Sequence[Cut]:
        leaves = jax.tree.leaves(self._layers[example])
        if not sharded:
            return [Slices(leaf.shape, ()) for leaf in leaves]
        return [window for _, window in self._windows(example, axes)]

    def _windows(self, example: int, axes: Axes) -> Iterator[tuple[str, Window]]:
        """The group of each of a layer's arrays, and its place there."""
        taken = dict.fromkeys(self._groups, 0)
        for leaf in jax.tree.leaves(self._layers[example]):
            g = str(leaf.dtype)
            yield g, Window(leaf.shape, taken[g], self._widths[example][g], axes.split)
            taken[g] += leaf.size

    def parts(self, stored: Stored, example: int, axes: Axes, *, sharded: bool) -> list[jax.Array]:
        if not sharded:
            return jax.tree.leaves(self.unpack(stored, example))
        return [window.read(stored[g]) for g, window in self._windows(example, axes)]

    def of_parts(
        self, parts: Parts, stored: Stored, example: int, axes: Axes, *, sharded: bool
    ) -> Stored:
        if not sharded:
            tree = jax.tree.structure(self._layers[example])
            return self.pack(jax.tree.unflatten(tree, parts), example)
        stored = dict(stored)
        for (g, window), part in zip(self._windows(example, axes), parts, strict=True):
            stored[g] = window.write(stored[g], part)
        return stored

    def leaves_of(self, example: int) -> Leaves:
        return {g: self.piece[g] for g, n in self._widths[example].items() if n}

    def pack(self, params: LayerParams, example: int) -> Stored:
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(self._layers[example]), strict=True)
        flat = [(str(leaf.dtype), w.reshape(-1)) for w, leaf in pairs]

        def group(g: str, width: int) -> jax.Array:
            joined = jnp.concatenate([w for of_leaf, w in flat if of_leaf == g])
            return jnp.pad(joined, (0, self._data * width - joined.size)).reshape(self._data, width)

        return {g: group(g, n) for g, n in self._widths[example].items() if n}

    def unpack(self, stored: Stored, example: int) -> LayerParams:
        flat = {g: w.reshape(-1) for g, w in stored.items()}
        leaves, tree = jax.tree.flatten(self._layers[example])
        taken = dict.fromkeys(self._groups, 0)
        values = []
        for leaf in leaves:
            g = str(leaf.dtype)
            start = taken[g]
            taken[g] += leaf.size
            values.append(flat[g][start : start + leaf.size].reshape(leaf.shape))
        return jax.tree.unflatten(tree, values)


def _of_chunk(table: dict[str, np.ndarray], at: At) -> dict[str, Any]:
    stage, chunk, _ = at
    return {g: jnp.asarray(w)[stage, chunk] for g, w in table.items()}
