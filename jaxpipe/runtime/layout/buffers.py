"""Buffers for values that layers keep and pass on: residuals, activations, cotangents.

A buffer has slots; a slot holds the values of all layers of a chunk. If a chunk has layers of the
same kind at each place on all stages, every value of a kind has a buffer, ``[slots * layers,
size]``, of so many layers of the kind. Other layers of several kinds share one flat buffer per
dtype, ``[slots, size]``, in which every layer of a chunk has a start of its own; where int32 does
not reach its end, ``[slots, rows, 1024]``, in which a start is a row. An inbox is the
same with one activation per slot. Buffers are flat because loops that see natural shapes, or a
dimension of 1, choose different layouts for them, and then transpose or copy whole buffers.

A TPU stores arrays in tiles of their last two dimensions, so that flattening one moves all of its
elements. There, values of layers of one kind keep their shapes, ``[slots * layers, ...]``, and a
constraint gives a buffer the same layout in every loop.

Where a matmul's result is kept in a slot that is a number in the table, a GPU writes it twice: XLA
fuses no write at such a place into a matmul. `KnownSlots` have an array for every slot and layer,
and the program a loop for every slot (`jaxpipe.runtime.tick.layer_passes`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxpipe.runtime.defaults import Size, numbered
from jaxpipe.runtime.host import to_devices, to_host
from jaxpipe.runtime.indices import start_at, unit_of
from jaxpipe.runtime.types import Arrays, At, Index, Message, Shapes

Start: TypeAlias = tuple[Index, ...]
"""The indices at which something starts in a buffer."""


class _Value(NamedTuple):
    """Place of one value of a kind: its buffer, offset from the layer's start, shape, and shape in
    the buffer."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    stored: tuple[int, ...]

    @property
    def padding(self) -> int:
        return math.prod(self.stored) - math.prod(self.shape)


class Piece(NamedTuple):
    """One of so many equal parts of what a slot holds of a layer; the last, which slices keep
    inside, may overlap the one before."""

    slot: Index
    layer: Index
    part: Index
    parts: int


def kinds_at_places(layers: np.ndarray) -> list[list[int]]:
    """The kinds of the layers at each place of a chunk, from ``layers`` as of `SharedBuffers`."""
    return [np.unique(at[at >= 0]).tolist() for at in np.moveaxis(layers, 2, 0)]


def values_in_room(shapes: Shapes) -> dict[tuple[tuple[int, jnp.dtype], int], Size]:
    """A layer's values as layers of other kinds share their arrays, by size and dtype."""
    return numbered(
        ((leaf.size, leaf.dtype), Size(leaf.dtype, leaf.size * leaf.dtype.itemsize))
        for leaf in shapes
    )


class SharedBuffers:
    """Buffers that the values of layers of several kinds share.

    Args:
      kinds: for every kind, the shapes of its values.
      layers: kind of every layer of every chunk of every stage, int ``[stages, chunks, layers]``,
        -1 where a chunk has fewer layers than the largest.
      tiled: whether the devices store arrays in tiles (`jaxpipe.runtime.mesh.stores_tiles`).
      on_host: whether they lie in the memory of the host.
    """

    def __init__(
        self,
        kinds: Sequence[Sequence[jax.ShapeDtypeStruct]],
        layers: np.ndarray,
        *,
        tiled: bool,
        on_host: bool = False,
    ) -> None:
        self.on_host, self._tiled = on_host, tiled
        places = kinds_at_places(layers)
        self._places = None
        if all(len(at) == 1 for at in places):
            self._places = [kind for (kind,) in places]
            of_kinds = [(kind, leaf) for kind, leaves in enumerate(kinds) for leaf in leaves]
            self._dtypes = [leaf.dtype for _, leaf in of_kinds]
            self._stored = [leaf.shape if tiled else (leaf.size,) for _, leaf in of_kinds]
            self._values: list[list[_Value]] = [[] for _ in kinds]
            for b, (kind, leaf) in enumerate(of_kinds):
                self._values[kind].append(_Value(b, 0, leaf.shape, self._stored[b]))
            self._rows = [self._places.count(kind) for kind, _ in of_kinds]
            return
        self._dtypes = list(dict.fromkeys(leaf.dtype for kind in kinds for leaf in kind))
        unit = unit_of(max(self._arranged(kinds, layers, unit=1), default=0))
        sizes = self._arranged(kinds, layers, unit=unit)
        self._stored = [_shape(size, unit) for size in sizes]
        self._rows = [1] * len(sizes)

    def _arranged(
        self, kinds: Sequence[Sequence[jax.ShapeDtypeStruct]], layers: np.ndarray, *, unit: int
    ) -> list[int]:
        """Gives values and layers their starts, in units; returns the sizes of the buffers."""
        self._values, sizes = [], []
        for kind in kinds:
            taken = [0] * len(self._dtypes)
            values = []
            for leaf in kind:
                b, size = self._dtypes.index(leaf.dtype), -(-leaf.size // unit)
                values.append(_Value(b, taken[b], leaf.shape, _shape(size, unit)))
                taken[b] += size
            self._values.append(values)
            sizes.append(taken)
        table = np.asarray([*sizes, [0] * len(self._dtypes)])[layers]
        self._starts = np.cumsum(table, axis=2) - table
        found: list[int] = table.sum(axis=2).max(axis=(0, 1), initial=0).tolist()
        return found

    def shapes(self, slots: int) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the buffers, each ``[slots * layers, ...]``."""
        return [
            jax.ShapeDtypeStruct((slots * rows, *stored), dtype)
            for rows, stored, dtype in zip(self._rows, self._stored, self._dtypes, strict=True)
        ]

    def filled(self, slots: int, fill: Callable[[jax.ShapeDtypeStruct], jax.Array]) -> Arrays:
        """Makes the buffers, filled with what ``fill`` makes of a shape.

        Buffers of the host are written row by row: XLA for GPUs would first make one that is
        written at once on the device.
        """
        if not self.on_host:
            return [fill(shape) for shape in self.shapes(slots)]

        def rows(shape: jax.ShapeDtypeStruct) -> jax.Array:
            row = jax.ShapeDtypeStruct(shape.shape[1:], shape.dtype)
            return lax.scan(lambda *_: (None, to_host(fill(row))), None, length=shape.shape[0])[1]

        return [rows(shape) for shape in self.shapes(slots)]

    def read(self, buffers: list[jax.Array], kind: int, slot: Index, at: At) -> list[jax.Array]:
        """Reads the values of the layer ``at`` (stage, chunk, layer), which is of this kind."""
        values, start_of = [], self._starts_at(slot, at)
        for value in self._values[kind]:
            row = self._load(buffers[value.buffer], start_of(value), (1, *value.stored))
            row = row.reshape(-1)[: math.prod(value.shape)] if value.padding else row
            values.append(row.reshape(value.shape))
        return values

    def write(
        self, buffers: list[jax.Array], kind: int, slot: Index, at: At, values: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Writes a layer's values into their slot, in place, and returns the buffers."""
        buffers, start_of = list(buffers), self._starts_at(slot, at)
        for where, value in zip(self._values[kind], values, strict=True):
            row = jnp.pad(value.reshape(-1), (0, where.padding)) if where.padding else value
            row = row.reshape(1, *where.stored)
            buffers[where.buffer] = self._store(buffers[where.buffer], start_of(where), row)
        return buffers

    def piece_shapes(self, parts: int) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what `cut` reads, of one of so many parts."""
        sizes = [(-(-stored[0] // parts), *stored[1:]) if stored else () for stored in self._stored]
        return [
            jax.ShapeDtypeStruct((1, *size), dtype)
            for size, dtype in zip(sizes, self._dtypes, strict=True)
        ]

    def cut(self, buffers: list[jax.Array], piece: Piece) -> list[jax.Array]:
        """Reads a piece, as it is stored; layers must be of one kind."""
        pairs = zip(buffers, self.piece_shapes(piece.parts), strict=True)
        return [self._load(w, self._start(one, piece), one.shape) for w, one in pairs]

    def put(
        self, buffers: list[jax.Array], piece: Piece, values: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Writes what `cut` reads, in place, and returns the buffers."""
        pairs = zip(buffers, values, strict=True)
        return [self._store(w, self._start(value, piece), value) for w, value in pairs]

    def _load(self, buffer: jax.Array, start: Start, shape: tuple[int, ...]) -> jax.Array:
        buffer = self._in_order(buffer)
        row = lax.dynamic_slice(buffer, start, shape, allow_negative_indices=False)
        return to_devices(row) if self.on_host else row

    def _store(self, buffer: jax.Array, start: Start, row: jax.Array) -> jax.Array:
        row = to_host(row) if self.on_host else row
        written = lax.dynamic_update_slice(buffer, row, start, allow_negative_indices=False)
        return self._in_order(written)

    def _start(self, value: jax.Array | jax.ShapeDtypeStruct, piece: Piece) -> Start:
        """The indices at which a piece of a value starts."""
        within = (piece.part * size for size in value.shape[1:2])
        rest = (0 for _ in value.shape[2:])
        return start_at(piece.slot * self._rows[0] + piece.layer, *within, *rest)

    def with_part(self, buffers: Arrays, part: Arrays) -> Arrays:
        """Replaces the part of a loop, which is all: as `KnownSlots.with_part`."""
        return part

    def _in_order(self, buffer: jax.Array) -> jax.Array:
        """Keeps the dimensions of a TPU's buffer in their order in memory."""
        if not self._tiled:
            return buffer
        return with_layout_constraint(buffer, Layout(major_to_minor=tuple(range(buffer.ndim))))

    def _starts_at(self, slot: Index, at: At) -> Callable[[_Value], Start]:
        """Finds the indices at which values of a layer start."""
        stage, chunk, layer = at
        if self._places is None:
            starts = jnp.asarray(self._starts, jnp.int32)[stage, chunk, layer]
            return lambda value: start_at(
                slot, starts[value.buffer] + value.offset, *[0] * (len(value.stored) - 1)
            )
        if len(set(self._places)) > 1:
            of_kind = [self._places[:n].count(kind) for n, kind in enumerate(self._places)]
            layer = jnp.asarray(of_kind, jnp.int32)[layer]
        rows = {count: slot * count + layer for count in set(self._rows)}
        return lambda value: start_at(rows[self._rows[value.buffer]], *[0] * len(value.stored))


def _shape(size: int, unit: int) -> tuple[int, ...]:
    """The shape of so many units in a row."""
    return (size,) if unit == 1 else (size, unit)


class KnownSlots:
    """Buffers whose slots the program knows: every value has a flat array of its own in every slot,
    and for every layer, into which a kernel can write it.

    The buffers are a dictionary from ``slot * layers + layer`` to the values of that layer; if they
    are stacked, from slots to the values of all layers, ``[layers, size]``. Where a layer may be of
    several kinds, these share arrays of one size and dtype.

    Args:
      kinds: for every kind, the shapes of a layer's values.
      places: the kinds that a layer may be of, at each place of the largest chunk.
      stacked: whether the layers of a chunk, of one kind, share arrays.
    """

    on_host = False

    def __init__(
        self, kinds: Sequence[Shapes], places: Sequence[Sequence[int]], *, stacked: bool
    ) -> None:
        self._kinds, self._places, self._stacked = kinds, places, stacked
        self._values = list(map(values_in_room, kinds))
        self._rooms = [list(dict.fromkeys(v for k in at for v in self._values[k])) for at in places]

    def shapes(self, slots: int) -> dict[int, list[jax.ShapeDtypeStruct]]:
        """Shapes of the arrays."""
        rows = (len(self._places),) if self._stacked else ()
        rooms = [
            [jax.ShapeDtypeStruct((*rows, size), dtype) for (size, dtype), _ in room]
            for room in (self._rooms[:1] if self._stacked else self._rooms)
        ]
        return dict(enumerate(rooms * slots))

    def filled(self, slots: int, fill: Callable[[jax.ShapeDtypeStruct], jax.Array]) -> Arrays:
        """Makes the arrays, filled with what ``fill`` makes of a shape."""
        return jax.tree.map(fill, self.shapes(slots))

    def part(self, buffers: Arrays, slots: Iterable[tuple[int, Iterable[int]]]) -> Arrays:
        """Selects the arrays in which some layers of some slots lie."""
        numbers = {self._number(slot, layer) for slot, layers in slots for layer in layers}
        return {n: buffers[n] for n in sorted(numbers)}

    def with_part(self, buffers: Arrays, part: Arrays) -> Arrays:
        """Replaces such a part."""
        return buffers | part

    def read(self, buffers: Arrays, kind: int, slot: int, at: At) -> list[jax.Array]:
        """As `SharedBuffers.read`."""
        room = buffers[self._number(slot, at[2])]
        room = at_slot(room, at[2]) if self._stacked else room
        numbers = self._in_room(kind, at[2])
        return [
            room[n].reshape(leaf.shape) for n, leaf in zip(numbers, self._kinds[kind], strict=True)
        ]

    def write(
        self, buffers: Arrays, kind: int, slot: int, at: At, values: Sequence[jax.Array]
    ) -> Arrays:
        """As `SharedBuffers.write`."""
        number, own = self._number(slot, at[2]), [w.reshape(-1) for w in values]
        if self._stacked:
            return buffers | {number: put_slot(buffers[number], at[2], own)}
        new = dict(zip(self._in_room(kind, at[2]), own, strict=True))
        return buffers | {number: [new.get(n, w) for n, w in enumerate(buffers[number])]}

    def _in_room(self, kind: int, layer: Index) -> list[int]:
        """Numbers of a kind's values in the room of a layer."""
        room = self._rooms[0 if self._stacked else layer]
        return list(map(room.index, self._values[kind]))

    def _number(self, slot: int, layer: Index) -> Index:
        return slot if self._stacked else slot * len(self._places) + layer


def at_slot(inbox: Message, slot: Index) -> Message:
    return [
        lax.dynamic_index_in_dim(w, slot, keepdims=False, allow_negative_indices=False)
        for w in inbox
    ]


def put_slot(inbox: Message, slot: Index, message: Message) -> Message:
    """Writes a message into its slot."""
    return [
        lax.dynamic_update_index_in_dim(w, sent, slot, 0, allow_negative_indices=False)
        for w, sent in zip(inbox, message, strict=True)
    ]
