"""Where the layers' parameters lie on a device.

Layers that are alike are *stacked*: one array a parameter, one row a layer; or *unrolled*: every
row an array of its own, which a GPU multiplies with where it lies. Layers that differ are *packed*:
one flat array a dtype, each layer in columns of its own, so that a stage takes the room of its own
layers and all stages still run one program. `Stacked`, `Unrolled` and `Packed` answer the same
calls.

A layer's parameters are *stored* in such arrays as a tree of leaves that the data axis may split;
`pack` and `unpack` turn the user's tree into it and back. A *place* says where something stored
lies: among the stage's own layers, or in one of a few slots that hold a chunk each, as gathered
weights and gradient sums do. Which places a program can name decides how it runs a cell: `loop` is
one loop over layers, or a loop for every row that runs once or never.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.schedule.table import NONE

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How one array is laid out.

    Args:
      shape: its shape.
      dtype: its dtype.
      stage_dim: dimension split over stages, or None.
      data_dim: dimension split over data shards when sharded, or None where none divides.
    """

    shape: tuple[int, ...]
    dtype: Any
    stage_dim: int | None
    data_dim: int | None

    def behind(self, *lead: int) -> Leaf:
        """The leaf with leading dimensions, which nothing splits."""
        shift = len(lead)
        return dataclasses.replace(
            self,
            shape=(*lead, *self.shape),
            stage_dim=None if self.stage_dim is None else self.stage_dim + shift,
            data_dim=None if self.data_dim is None else self.data_dim + shift,
        )

    def struct(self, *, parts: int = 1) -> jax.ShapeDtypeStruct:
        """Its shape and dtype; of one of ``parts`` data shards."""
        shape = list(self.shape)
        if self.data_dim is not None:
            shape[self.data_dim] //= parts
        return jax.ShapeDtypeStruct(tuple(shape), self.dtype)


def make_leaf(shape: Sequence[int], dtype, *, data: int, stage_dim: int | None = None) -> Leaf:
    """A leaf whose first dimension that divides is split over ``data`` shards."""
    dims = [d for d, n in enumerate(shape) if d != stage_dim and n % data == 0 and n > 0]
    # The first one: gathered along any other, XLA transposes whole weight buffers on GPUs.
    data_dim = dims[0] if dims and data > 1 else None
    return Leaf(tuple(shape), dtype, stage_dim, data_dim)


class _OneLoop:
    """Loops over layers of which the program learns the place when it runs."""

    num_pieces: int

    def loop(
        self, chunk, lo, hi, body: Callable, arrays: PyTree, carry: PyTree, *, down: bool = False
    ) -> tuple[PyTree, PyTree]:
        """Runs layers ``lo`` to ``hi`` of a chunk, last first if ``down``.

        Args:
          chunk, lo, hi: int32 scalars.
          body: ``body(chunk, layer, arrays, carry) -> (arrays, carry)``.
          arrays: of all layers or of slots; a body sees at least those of its layer.
          carry: any tree.
          down: the order.

        Returns:
          The arrays and the carry after the last layer.
        """

        def step(i, through):
            return body(chunk, lo + hi - 1 - i if down else i, *through)

        return lax.fori_loop(lo, hi, step, (arrays, carry))

    def loop_pieces(self, chunk, body: Callable, carry: PyTree) -> PyTree:
        """Runs ``body(chunk, number, carry)`` for all pieces of a chunk, for none if `NONE`."""
        trips = jnp.where(chunk == NONE, 0, self.num_pieces)
        return lax.fori_loop(0, trips, lambda number, carry: body(chunk, number, carry), carry)


class _Alike:
    """What is known of layers that are alike, wherever they lie; arguments as for `Stacked`."""

    def __init__(self, layers: PyTree, rows: np.ndarray, data: int) -> None:
        _, self.num_chunks, self.num_pieces = rows.shape
        self._rows = rows.reshape(len(rows), -1)
        self.piece = jax.tree.map(lambda w: make_leaf(w.shape[1:], w.dtype, data=data), layers)
        depth = jax.tree.leaves(layers)[0].shape[0] if jax.tree.leaves(layers) else 0
        self.canonical = jax.tree.map(lambda leaf: leaf.behind(depth), self.piece)

    def shape_of(self, layer: int) -> PyTree:
        """Shapes of one layer's parameters."""
        del layer
        return jax.tree.map(Leaf.struct, self.piece)

    def pack(self, params: PyTree, example: int) -> PyTree:
        """A layer's parameters in the form they are stored in."""
        del example
        return params

    def unpack(self, stored: PyTree, example: int) -> PyTree:
        """Undoes `pack`."""
        del example
        return stored


class Stacked(_Alike, _OneLoop):
    """Parameters of layers that are alike, in one array a parameter.

    Args:
      layers: one tree whose leaves stack all layers, ``[layers, ...]``; arrays or shapes.
      rows: canonical layer of every row of every stage, ``[stages, chunks, layers]``, -1 where a
        chunk has fewer layers than the largest.
      data: number of data shards.

    Attributes:
      canonical: the user's tree, every array a `Leaf`.
      placed: the arrays of one stage, every one a `Leaf`.
      piece: what is gathered or reduced at once, every array a `Leaf`.
      num_pieces: how many of them a chunk is.
    """

    def __init__(self, layers: PyTree, rows: np.ndarray, data: int) -> None:
        super().__init__(layers, rows, data)
        self.placed = self._chunks(self.num_chunks)

    def _chunks(self, count: int) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.behind(count * self.num_pieces), self.piece)

    def place(self, layers: PyTree) -> PyTree:
        """Canonical layers to placed arrays ``[stages, ...]``."""
        return jax.tree.map(lambda w: _take(w, self._rows), layers)

    def unplace(self, placed: PyTree) -> PyTree:
        """Undoes `place`."""
        return jax.tree.map(lambda w: _put_back(w, self._rows), placed)

    def slots(self, count: int) -> PyTree:
        """Shapes of arrays with room for ``count`` whole chunks."""
        return jax.tree.map(Leaf.struct, self._chunks(count))

    def resident(self, stage, chunk, layer, example: int):
        """The place of a layer among the stage's own; ``example`` is a layer of its kind."""
        del stage, example
        return chunk * self.num_pieces + layer

    def in_slot(self, slot, stage, chunk, layer, example: int):
        """The place of a layer of the chunk that lies in ``slot``."""
        del stage, chunk, example
        return slot * self.num_pieces + layer

    def resident_piece(self, stage, chunk, number):
        """The place of a chunk's piece among the stage's own."""
        del stage
        return chunk * self.num_pieces + number

    def piece_in_slot(self, slot, number):
        """The place of a piece of the chunk that lies in ``slot``."""
        return slot * self.num_pieces + number

    def read(self, arrays: PyTree, place) -> PyTree:
        """What is stored at a place."""
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, place, keepdims=False), arrays)

    def write(self, arrays: PyTree, place, values: PyTree) -> PyTree:
        """The arrays with other values stored at a place."""
        return jax.tree.map(
            lambda w, value: lax.dynamic_update_index_in_dim(w, value.astype(w.dtype), place, 0),
            arrays,
            values,
        )

    def add(self, arrays: PyTree, place, values: PyTree) -> PyTree:
        """The arrays with values added to what is stored at a place."""
        return self.write(arrays, place, jax.tree.map(jnp.add, self.read(arrays, place), values))


class _Row(NamedTuple):
    """A place in unrolled arrays: the row's number, and the slot if it is one of several."""

    number: int
    slot: Any = None


class Unrolled(_Alike):
    """Parameters of layers that are alike, every row of a stage in arrays of its own.

    A stage's arrays are a dictionary: row ``chunk * layers + layer`` to the layer's tree. Those of
    slots have a row a layer of a chunk, and a dimension of slots if there are several. A row's
    number must be known to the program, so that it reads an array and not a part of one: on GPUs a
    part is copied before it is multiplied with.

    Args and attributes: as of `Stacked`.
    """

    def __init__(self, layers: PyTree, rows: np.ndarray, data: int) -> None:
        super().__init__(layers, rows, data)
        self.placed = dict.fromkeys(range(self.num_chunks * self.num_pieces), self.piece)

    def loop(
        self, chunk, lo, hi, body: Callable, arrays: PyTree, carry: PyTree, *, down: bool = False
    ) -> tuple[PyTree, PyTree]:
        """As of `Stacked`: a loop for every row, which runs if the row is one of these layers."""
        rows = list(itertools.product(range(self.num_chunks), range(self.num_pieces)))
        for c, layer in reversed(rows) if down else rows:
            runs = (chunk == c) & (lo <= layer) & (layer < hi)
            # Only its own row goes through the loop; slots have one chunk's, an evaluation none.
            number = (c * self.num_pieces + layer) % max(len(arrays), 1)
            own = {n: row for n, row in arrays.items() if n == number}

            def step(_, through, c=c, layer=layer):
                return body(c, layer, *through)

            own, carry = lax.fori_loop(0, runs.astype(jnp.int32), step, (own, carry))
            arrays = arrays | own
        return arrays, carry

    def loop_pieces(self, chunk, body: Callable, carry: PyTree) -> PyTree:
        """As of `Stacked`; one loop a chunk, since on GPUs the host waits for each."""

        def pieces(_, carry, c: int):
            for number in range(self.num_pieces):
                carry = body(c, number, carry)
            return carry

        for c in range(self.num_chunks):
            trips = (chunk == c).astype(jnp.int32)
            carry = lax.fori_loop(0, trips, functools.partial(pieces, c=c), carry)
        return carry

    def place(self, layers: PyTree) -> PyTree:
        """Canonical layers to placed arrays ``[stages, ...]``."""
        return {
            n: jax.tree.map(lambda w, held=held: _take(w, held), layers)
            for n, held in enumerate(self._rows.T)
        }

    def unplace(self, placed: PyTree) -> PyTree:
        """Undoes `place`."""
        return jax.tree.map(lambda *w: _put_back(jnp.stack(w, 1), self._rows), *placed.values())

    def slots(self, count: int) -> PyTree:
        """Shapes of arrays with room for ``count`` whole chunks."""
        lead = (count,) if count > 1 else ()
        row = jax.tree.map(lambda leaf: leaf.behind(*lead).struct(), self.piece)
        return dict.fromkeys(range(self.num_pieces), row)

    def resident(self, stage, chunk: int, layer: int, example: int):
        """The place of a layer among the stage's own; ``example`` is a layer of its kind."""
        del stage, example
        return _Row(chunk * self.num_pieces + layer)

    def in_slot(self, slot, stage, chunk, layer: int, example: int):
        """The place of a layer of the chunk that lies in ``slot``."""
        del stage, chunk, example
        return _Row(layer, slot)

    def resident_piece(self, stage, chunk: int, number: int):
        """The place of a chunk's piece among the stage's own."""
        del stage
        return _Row(chunk * self.num_pieces + number)

    def piece_in_slot(self, slot, number: int):
        """The place of a piece of the chunk that lies in ``slot``."""
        return _Row(number, slot)

    def read(self, arrays: PyTree, place) -> PyTree:
        """What is stored at a place."""

        def read(w, leaf: Leaf):
            if w.ndim == len(leaf.shape):
                return w
            return lax.dynamic_index_in_dim(w, place.slot, keepdims=False)

        return jax.tree.map(read, arrays[place.number], self.piece)

    def write(self, arrays: PyTree, place, values: PyTree) -> PyTree:
        """The arrays with other values stored at a place."""

        def write(w, value):
            value = value.astype(w.dtype)
            if place.slot is None:
                return value
            if w.ndim == value.ndim:
                # Reads what it overwrites, or XLA would gather every chunk before the first tick.
                return jnp.where(place.slot >= 0, value, w)
            return lax.dynamic_update_index_in_dim(w, value, place.slot, 0)

        return arrays | {place.number: jax.tree.map(write, arrays[place.number], values)}

    def add(self, arrays: PyTree, place, values: PyTree) -> PyTree:
        """The arrays with values added to what is stored at a place."""
        return self.write(arrays, place, jax.tree.map(jnp.add, self.read(arrays, place), values))


def _take(w, rows: np.ndarray):
    """Layers by number, zeros for -1: ``[*rows.shape, ...]`` of ``[layers, ...]``."""
    held = (rows >= 0).reshape(*rows.shape, *[1] * (w.ndim - 1))
    return jnp.where(held, w[np.maximum(rows, 0)], 0).astype(w.dtype)


def _put_back(w, rows: np.ndarray):
    """Undoes `_take`."""
    kept = np.flatnonzero(rows >= 0)
    order = np.argsort(rows.reshape(-1)[kept])
    return w.reshape(-1, *w.shape[2:])[kept[order]]


class _Columns(NamedTuple):
    """A place in packed arrays, by dtype: first column, how many, how many of them count."""

    start: dict[str, Any]
    width: dict[str, int]
    valid: dict[str, Any]


class Packed(_OneLoop):
    """Parameters of layers that differ.

    A layer's parameters of one dtype are stored as ``[data, columns]``, flat and padded to a
    multiple of the data shards; a stage's array is ``[data, all columns]``.

    Args:
      layers: one tree a layer, of arrays or shapes.
      rows: as for `Stacked`.
      data: number of data shards.

    Attributes: as of `Stacked`.
    """

    num_pieces = 1

    def __init__(self, layers: Sequence[PyTree], rows: np.ndarray, data: int) -> None:
        self._layers = [jax.tree.map(_struct, layer) for layer in layers]
        self._rows, self._data = rows, data
        self.canonical = tuple(
            jax.tree.map(lambda w: make_leaf(w.shape, w.dtype, data=data), layer)
            for layer in layers
        )
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

    def _width(self, layer: PyTree) -> dict[str, int]:
        size = dict.fromkeys(self._groups, 0)
        for leaf in jax.tree.leaves(layer):
            size[str(leaf.dtype)] += leaf.size
        return {g: -(-n // self._data) for g, n in size.items()}

    def _leaves(self, width: dict[str, int]) -> dict[str, Leaf]:
        split = 0 if self._data > 1 else None
        return {g: Leaf((self._data, n), jnp.dtype(g), None, split) for g, n in width.items()}

    def shape_of(self, layer: int) -> PyTree:
        """Shapes of one layer's parameters."""
        return self._layers[layer]

    def place(self, layers: Sequence[PyTree]) -> PyTree:
        """Canonical layers to placed arrays ``[stages, ...]``."""
        stored = [self.pack(layer, n) for n, layer in enumerate(layers)]

        def stage(held, group: str):
            parts = [stored[n][group] for n in held.reshape(-1) if n >= 0]
            placed = jnp.concatenate(parts, axis=1)
            room = self.placed[group].shape[1] - placed.shape[1]
            return jnp.pad(placed, ((0, 0), (0, room)))

        return {g: jnp.stack([stage(held, g) for held in self._rows]) for g in self._groups}

    def unplace(self, placed: PyTree) -> tuple[PyTree, ...]:
        """Undoes `place`."""
        layers = {}
        for d, chunks in enumerate(self._rows):
            for c, held in enumerate(chunks):
                for i, n in enumerate(held[held >= 0]):
                    stage = {g: w[d] for g, w in placed.items()}
                    layers[n] = self.unpack(self.read(stage, self.resident(d, c, i, n)), n)
        return tuple(layers[n] for n in sorted(layers))

    def slots(self, count: int) -> PyTree:
        """Shapes of arrays with room for ``count`` whole chunks."""
        return jax.tree.map(
            Leaf.struct, self._leaves({g: count * n for g, n in self._chunk_width.items()})
        )

    def resident(self, stage, chunk, layer, example: int) -> _Columns:
        """The place of a layer among the stage's own; ``example`` is a layer of its kind."""
        start = self._of_chunk(self._start, stage, chunk)
        return self._layer_at(start, stage, chunk, layer, example)

    def in_slot(self, slot, stage, chunk, layer, example: int) -> _Columns:
        """The place of a layer of the chunk that lies in ``slot``."""
        start = {g: slot * n for g, n in self._chunk_width.items()}
        return self._layer_at(start, stage, chunk, layer, example)

    def _layer_at(self, start: dict, stage, chunk, layer, example: int) -> _Columns:
        within = {g: jnp.asarray(w)[stage, chunk, layer] for g, w in self._within.items()}
        width = {g: n for g, n in self._widths[example].items() if n}
        return _Columns({g: start[g] + within[g] for g in width}, width, width)

    def resident_piece(self, stage, chunk, number) -> _Columns:
        """The place of a chunk's piece among the stage's own."""
        del number
        start = self._of_chunk(self._start, stage, chunk)
        return _Columns(start, self._chunk_width, self._of_chunk(self._valid, stage, chunk))

    def piece_in_slot(self, slot, number) -> _Columns:
        """The place of a piece of the chunk that lies in ``slot``."""
        del number
        start = {g: slot * n for g, n in self._chunk_width.items()}
        return _Columns(start, self._chunk_width, self._chunk_width)

    @staticmethod
    def _of_chunk(table: dict[str, np.ndarray], stage, chunk) -> dict[str, Any]:
        return {g: jnp.asarray(w)[stage, chunk] for g, w in table.items()}

    def read(self, arrays: PyTree, place: _Columns) -> PyTree:
        """What is stored at a place."""
        return {
            g: lax.dynamic_slice_in_dim(arrays[g], place.start[g], n, axis=1)
            for g, n in place.width.items()
        }

    def write(self, arrays: PyTree, place: _Columns, values: PyTree) -> PyTree:
        """The arrays with other values stored at a place."""

        def write(g: str, new):
            if place.valid[g] is not place.width[g]:
                # What lies behind a narrower chunk belongs to the next one.
                counts = jnp.arange(place.width[g]) < place.valid[g]
                new = jnp.where(counts, new, self.read(arrays, place)[g])
            return lax.dynamic_update_slice_in_dim(arrays[g], new, place.start[g], axis=1)

        return arrays | {g: write(g, values[g]) for g in place.width}

    def add(self, arrays: PyTree, place: _Columns, values: PyTree) -> PyTree:
        """The arrays with values added to what is stored at a place."""
        held = self.read(arrays, place)
        return self.write(arrays, place, {g: old + values[g] for g, old in held.items()})

    def pack(self, params: PyTree, example: int) -> dict[str, jax.Array]:
        """A layer's parameters in the form they are stored in."""
        leaves = jax.tree.leaves(params)

        def group(g: str, width: int):
            parts = [w.reshape(-1) for w in leaves if str(w.dtype) == g]
            flat = jnp.concatenate(parts) if parts else jnp.zeros(0, jnp.dtype(g))
            return jnp.pad(flat, (0, self._data * width - flat.size)).reshape(self._data, width)

        return {g: group(g, n) for g, n in self._widths[example].items()}

    def unpack(self, stored: dict[str, jax.Array], example: int) -> PyTree:
        """Undoes `pack`."""
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


def _struct(leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
