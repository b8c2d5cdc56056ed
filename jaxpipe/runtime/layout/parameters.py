"""Where the layers' parameters lie on a device.

Layers that are alike are *stacked*: one array per parameter, one row per layer; or *unrolled*:
every row an array of its own, which a GPU multiplies with where it lies. Layers that differ are
*packed*: one flat array per dtype, each layer in columns of its own, so that a stage takes the room
of its own layers and all stages still run one program. `Stacked`, `Unrolled` and `Packed` answer
the same calls.

A layer's parameters are *stored* in such arrays as a tree of leaves that the data axis may split;
`pack` and `unpack` turn the user's tree into it and back. A *place* says where something stored
lies: among the stage's own layers, or in one of a few slots that hold a chunk each, as gathered
weights and gradient sums do. Which places a program can name decides how it runs a cell: `loop` is
one loop over layers, or a loop for every row that runs once or never.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.barriers import overwrite, run_if, run_once
from jaxpipe.schedule.lowering.table import NONE

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


class OneLoop:
    """Loops over layers of which the program learns the place when it runs."""

    num_chunks: int
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

    def every_piece(self, body: Callable, carry: PyTree, *, in_place: bool) -> PyTree:
        """Runs ``body(chunk, number, carry)`` for all pieces of all chunks.

        Args:
          body, carry: as of `loop_pieces`.
          in_place: whether the body overwrites what it reads, piece by piece.
        """
        del in_place  # a loop's carry is
        n = self.num_pieces
        return lax.fori_loop(
            0, self.num_chunks * n, lambda i, carry: body(i // n, i % n, carry), carry
        )


class _Alike(abc.ABC):
    """What is known of layers that are alike, wherever they lie; arguments as for `Stacked`."""

    slot_dim = 0

    def __init__(self, layers: PyTree, rows: np.ndarray, data: int) -> None:
        _, self.num_chunks, self.num_pieces = rows.shape
        self._rows = rows.reshape(len(rows), -1)
        self.piece = jax.tree.map(lambda w: make_leaf(w.shape[1:], w.dtype, data=data), layers)
        depth = jax.tree.leaves(layers)[0].shape[0] if jax.tree.leaves(layers) else 0
        self.canonical = jax.tree.map(
            lambda leaf: dataclasses.replace(leaf.behind(depth), stage_dim=0), self.piece
        )

    def shape_of(self, layer: int) -> PyTree:
        """Shapes of one layer's parameters."""
        del layer
        return jax.tree.map(Leaf.struct, self.piece)

    def leaves_of(self, example: int) -> PyTree:
        """A stored layer, every array a `Leaf`."""
        del example
        return self.piece

    def pack(self, params: PyTree, example: int) -> PyTree:
        """A layer's parameters in the form they are stored in."""
        del example
        return params

    def unpack(self, stored: PyTree, example: int) -> PyTree:
        """Undoes `pack`."""
        del example
        return stored

    @abc.abstractmethod
    def read(self, arrays: PyTree, place) -> PyTree:
        """What is stored at a place."""

    @abc.abstractmethod
    def write(self, arrays: PyTree, place, values: PyTree) -> PyTree:
        """The arrays with other values stored at a place."""

    def add(self, arrays: PyTree, place, values: PyTree) -> PyTree:
        """The arrays with values added to what is stored at a place."""
        return self.write(arrays, place, jax.tree.map(jnp.add, self.read(arrays, place), values))


class Stacked(_Alike, OneLoop):
    """Parameters of layers that are alike, in one array per parameter.

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
      slot_dim: dimension of a stage's arrays along which slots follow each other.
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

    def piece_in_slot(self, slot, chunk, number):
        """The place of a piece of the chunk that lies in ``slot``."""
        del chunk
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


class _Row(NamedTuple):
    """A place in unrolled arrays: the row's number, and the slot if it is in one."""

    number: int
    slot: Any = None


class Unrolled(_Alike):
    """Parameters of layers that are alike, every row of a stage in arrays of its own.

    A stage's arrays are a dictionary: row ``chunk * layers + layer`` to the layer's tree. k slots
    are the rows of k chunks, and chunk c lies in those of chunk ``c % k``. A row's number must be
    known to the program, so that it reads an array and not a part of one: on GPUs a part is copied
    before it is multiplied with.

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
            # Only its own row goes through the loop, the others as None, for places count them all;
            # an evaluation has no sums.
            number = (c * self.num_pieces + layer) % max(len(arrays), 1)
            own = {n: row if n == number else None for n, row in arrays.items()}

            def step(through, c=c, layer=layer):
                return body(c, layer, *through)

            own, carry = run_if(runs, step, (own, carry))
            arrays = arrays | {n: row for n, row in own.items() if n == number}
        return arrays, carry

    def loop_pieces(self, chunk, body: Callable, carry: PyTree) -> PyTree:
        """As of `Stacked`; one loop a chunk, since on GPUs the host waits for each."""

        def pieces(carry, c: int):
            for number in range(self.num_pieces):
                carry = body(c, number, carry)
            return carry

        for c in range(self.num_chunks):
            carry = run_if(chunk == c, functools.partial(pieces, c=c), carry)
        return carry

    def every_piece(self, body: Callable, carry: PyTree, *, in_place: bool) -> PyTree:
        """As of `Stacked`, without a loop where nothing is overwritten."""
        for place in itertools.product(range(self.num_chunks), range(self.num_pieces)):
            one = functools.partial(body, *place)
            carry = run_once(one, carry) if in_place else one(carry)
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
        row = jax.tree.map(Leaf.struct, self.piece)
        return dict.fromkeys(range(count * self.num_pieces), row)

    def resident(self, stage, chunk: int, layer: int, example: int):
        """The place of a layer among the stage's own; ``example`` is a layer of its kind."""
        del stage, example
        return _Row(chunk * self.num_pieces + layer)

    def in_slot(self, slot, stage, chunk: int, layer: int, example: int):
        """The place of a layer of the chunk that lies in ``slot``."""
        del stage, example
        return _Row(chunk * self.num_pieces + layer, slot)

    def resident_piece(self, stage, chunk: int, number: int):
        """The place of a chunk's piece among the stage's own."""
        del stage
        return _Row(chunk * self.num_pieces + number)

    def piece_in_slot(self, slot, chunk: int, number: int):
        """The place of a piece of the chunk that lies in ``slot``."""
        return _Row(chunk * self.num_pieces + number, slot)

    def read(self, arrays: PyTree, place) -> PyTree:
        """What is stored at a place."""
        return arrays[place.number % len(arrays)]

    def write(self, arrays: PyTree, place, values: PyTree) -> PyTree:
        """The arrays with other values stored at a place."""
        number = place.number % len(arrays)

        def write(w, value):
            value = value.astype(w.dtype)
            if place.slot is None:
                return value
            return overwrite(w, value, place.slot)

        return arrays | {number: jax.tree.map(write, arrays[number], values)}


def _take(w, rows: np.ndarray):
    """Layers by number, zeros for -1: ``[*rows.shape, ...]`` of ``[layers, ...]``."""
    held = (rows >= 0).reshape(*rows.shape, *[1] * (w.ndim - 1))
    return jnp.where(held, w[np.maximum(rows, 0)], 0).astype(w.dtype)


def _put_back(w, rows: np.ndarray):
    """Undoes `_take`."""
    kept = np.flatnonzero(rows >= 0)
    order = np.argsort(rows.reshape(-1)[kept])
    return w.reshape(-1, *w.shape[2:])[kept[order]]
