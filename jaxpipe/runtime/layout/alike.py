"""Layers stacked in one array per parameter, which must be alike, or unrolled in one per layer."""

import abc
import functools
import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.barriers import Carry, overwrite, run_if
from jaxpipe.runtime.layout.layer_layout import Body, ChunkSpan, Combine, LayerLayout, cast, largest
from jaxpipe.runtime.layout.leaf import Leaf, Share, read_share, write_share
from jaxpipe.runtime.layout.splits import Splits
from jaxpipe.runtime.types import (
    Arrays,
    At,
    Flag,
    Index,
    LayerParams,
    Leaves,
    Path,
    Shapes,
    Slot,
    Span,
    Stored,
    Tree,
)
from jaxpipe.schedule.lowering.table import Chunk


class _Alike(LayerLayout):
    """Parameters of layers that are alike; places count rows, of all chunks."""

    in_rows = True

    def __init__(self, layers: Tree, rows: np.ndarray, splits: Splits) -> None:
        def leaf_of(path: Path, w: Tree) -> Leaf:
            return splits.leaf(path, jax.ShapeDtypeStruct(w.shape[1:], w.dtype))

        self.rows = rows
        _, self.num_chunks, self.num_pieces = rows.shape
        self.piece = jax.tree.map_with_path(leaf_of, layers)
        depth = jax.tree.leaves(layers)[0].shape[0] if jax.tree.leaves(layers) else 0
        self.canonical = jax.tree.map(lambda leaf: leaf.stacked(depth), self.piece)
        self.placed = self._chunks(self.num_chunks)

    @abc.abstractmethod
    def _chunks(self, count: int) -> Leaves:
        """The arrays of so many chunks."""

    def slot_shapes(self, count: int) -> Shapes:
        return jax.tree.map(Leaf.struct, self._chunks(count))


class _StackedPlace(NamedTuple):
    """A place in stacked arrays: a row, or a share of it."""

    row: Index
    share: Share | None


class Stacked(_Alike):
    """Parameters of layers that are alike, in one array per parameter."""

    def _chunks(self, count: int) -> Leaves:
        return jax.tree.map(lambda leaf: leaf.behind(count * self.num_pieces), self.piece)

    def piece_at(self, at: At, *, slot: Slot = None, share: Share | None = None) -> _StackedPlace:
        _, chunk, number = at
        return _StackedPlace((chunk if slot is None else slot) * self.num_pieces + number, share)

    def read(self, arrays: Arrays, place: _StackedPlace) -> Stored:
        row, share = place
        if share is not None:
            return jax.tree.map(
                lambda leaf, w: read_share(leaf, w, (row,), share), self.piece, arrays
            )
        return jax.tree.map(
            lambda w: lax.dynamic_index_in_dim(
                w, row, keepdims=False, allow_negative_indices=False
            ),
            arrays,
        )

    def write(self, arrays: Arrays, place: _StackedPlace, values: Stored) -> Arrays:
        row, share = place
        if share is not None:
            return jax.tree.map(
                lambda leaf, w, value: write_share(leaf, w, (row,), share, value),
                self.piece,
                arrays,
                values,
            )
        return jax.tree.map(
            lambda w, value: lax.dynamic_update_index_in_dim(
                w, value.astype(w.dtype), row, 0, allow_negative_indices=False
            ),
            arrays,
            values,
        )

    def update(
        self, arrays: Arrays, place: _StackedPlace, values: Stored, combine: Combine = jnp.add
    ) -> Arrays:
        if place.share is not None:
            return super().update(arrays, place, values, combine)
        # XLA for GPUs reads a row in the kernel that writes it only if nothing stands between the
        # two, no reshape and no choice of a row's number; otherwise it copies the row first.

        def update(w: jax.Array, value: jax.Array) -> jax.Array:
            old = lax.dynamic_slice_in_dim(w, place.row, 1, allow_negative_indices=False)
            new = combine(old, value[None]).astype(w.dtype)
            return lax.dynamic_update_slice_in_dim(
                w, new, place.row, 0, allow_negative_indices=False
            )

        return jax.tree.map(update, arrays, values)


class _UnrolledPlace(NamedTuple):
    """A place in unrolled arrays: the row's number, the slot if it is in one, or a share of it; and
    a layer like the one there, if it is its arrays alone that are meant."""

    number: Index
    slot: Slot
    share: Share | None
    example: int | None = None


Array: TypeAlias = tuple[Path, Leaf]
"""An array of a layer: its path there."""

Rows: TypeAlias = Collection[tuple[int, int]]
"""Rows of a stage: of each its chunk, and its number there."""


class Unrolled(_Alike):
    """Parameters of layers, every row of a stage in arrays of its own.

    A stage's arrays are a dictionary from row ``chunk * layers + layer`` to the layer's tree. k
    slots are the rows of k chunks, and chunk c lies in those of chunk ``c % k``. The program must
    know a row's number, so that it reads an array and not a part of one: a GPU copies a part before
    it multiplies with it.
    """

    own_arrays = True

    def _chunks(self, count: int) -> Leaves:
        rows = range(count * self.num_pieces)
        return {n: self._of_row(self.piece, n, len(rows)) for n in rows}

    def _of_row(self, trees: Tree, number: Index, count: int) -> Tree:
        """Selects what belongs to one of so many rows, as `of_piece`."""
        return trees

    def cast(self, arrays: Arrays, dtypes: Tree, scales: Tree = None) -> Arrays:
        own = {n: self._of_row(dtypes, n, len(arrays)) for n in arrays}
        return {n: cast(w, own[n], scales and scales[n]) for n, w in arrays.items()}

    def largest(self, arrays: Arrays, dtypes: Tree) -> Tree:
        own = {n: self._of_row(dtypes, n, len(arrays)) for n in arrays}
        return {n: largest(w, own[n], layer_dims=0) for n, w in arrays.items()}

    def piece_at(self, at: At, *, slot: Slot = None, share: Share | None = None) -> _UnrolledPlace:
        _, chunk, number = at
        return _UnrolledPlace(chunk * self.num_pieces + number, slot, share)

    def read(self, arrays: Arrays, place: _UnrolledPlace) -> Stored:
        row, share = arrays[place.number % len(arrays)], place.share
        if share is None:
            return row
        leaves = self._of_row(self.piece, place.number, len(arrays))
        return jax.tree.map(lambda leaf, w: read_share(leaf, w, (), share), leaves, row)

    def write(self, arrays: Arrays, place: _UnrolledPlace, values: Stored) -> Arrays:
        number = place.number % len(arrays)

        def write(leaf: Leaf, w: jax.Array, value: jax.Array | None) -> jax.Array:
            if value is None:
                return w
            if place.share is not None:
                return write_share(leaf, w, (), place.share, value)
            value = value.astype(w.dtype)
            return value if place.slot is None else overwrite(w, value, place.slot)

        leaves = self._of_row(self.piece, number, len(arrays))
        return arrays | {number: jax.tree.map(write, leaves, arrays[number], values)}

    def loop(
        self, span: Span, body: Body, arrays: Arrays, carry: Carry, *, down: bool = False
    ) -> tuple[Arrays, Carry]:
        """Runs one loop per row, which runs if the row is one of these layers."""
        chunk, lo, hi = span
        rows = list(itertools.product(range(self.num_chunks), range(self.num_pieces)))
        for c, layer in reversed(rows) if down else rows:
            runs = (chunk == c) & (lo <= layer) & (layer < hi)
            with jax.named_scope(f"chunk{c}_layer{layer}"):
                step = functools.partial(body, c, layer)
                arrays, carry = self._run_rows([(c, layer)], runs, step, arrays, carry)
        return arrays, carry

    def part(self, arrays: Arrays, chunks: Collection[Chunk]) -> Arrays:
        rows = [(chunk, layer) for chunk, count in chunks for layer in range(count)]
        return self._own(arrays, rows)

    def with_part(self, arrays: Arrays, part: Arrays) -> Arrays:
        return _joined(arrays, part)

    def run_chunk(
        self,
        chunk: int,
        layers: range,
        body: Body,
        arrays: Arrays,
        carry: Carry,
        *,
        down: bool = False,
    ) -> tuple[Arrays, Carry]:
        # The body sees the arrays of its layer alone: XLA for GPUs adds a product to a sum in its
        # matmul only if no barrier of another layer stands before the sum.
        for layer in reversed(layers) if down else layers:
            own = self._own(arrays, [(chunk, layer)])
            own, carry = body(chunk, layer, own, carry)
            arrays = _joined(arrays, own)
        return arrays, carry

    def _run_rows(
        self, rows: Rows, runs: Flag, body: Body, arrays: Arrays, carry: Carry
    ) -> tuple[Arrays, Carry]:
        """Runs ``body(arrays, carry)`` in a loop through which the arrays of these rows go."""
        own, carry = run_if(runs, lambda through: body(*through), (self._own(arrays, rows), carry))
        return _joined(arrays, own), carry

    def _own(self, arrays: Arrays, rows: Rows) -> Arrays:
        """Selects the arrays of some rows; others are None, since places count all rows.

        An evaluation has no sums.
        """
        count = max(len(arrays), 1)
        numbers = {(chunk * self.num_pieces + layer) % count for chunk, layer in rows}
        return {n: values if n in numbers else None for n, values in arrays.items()}

    def loop_pairs(
        self,
        backward: ChunkSpan,
        forward: ChunkSpan,
        pairs: Collection[tuple[Chunk, Chunk]],
        body: Body,
        arrays: Arrays,
        carry: Carry,
    ) -> tuple[Arrays, Carry, Index]:
        """Runs one loop per pair of rows that come together, in the order of the forward's."""
        turns = jnp.minimum(backward[1], forward[1])
        rows = {
            ((f, i), (b, layers - 1 - i))
            for (b, layers), (f, count) in pairs
            for i in range(min(layers, count))
        }
        for (f, i), (b, layer) in sorted(rows):
            is_forward = (forward[0] == f) & (i < turns)
            runs = is_forward & (backward[0] == b) & (backward[1] - 1 - i == layer)
            with jax.named_scope(f"chunk{b}_layer{layer}_chunk{f}_layer{i}"):
                step = functools.partial(body, (b, layer), (f, i))
                arrays, carry = self._run_rows([(b, layer)], runs, step, arrays, carry)
        return arrays, carry, turns

    def loop_pieces(self, chunk: Index, body: Body, carry: Carry) -> Carry:
        """Runs one loop per chunk, since on GPUs the host waits for each loop."""

        def pieces(carry: Carry, c: int) -> Carry:
            for number in range(self.num_pieces):
                carry = body(c, number, carry)
            return carry

        for c in range(self.num_chunks):
            with jax.named_scope(f"chunk{c}"):
                carry = run_if(chunk == c, functools.partial(pieces, c=c), carry)
        return carry

    def every_layer(self, count: int, body: Body, carry: Carry) -> Carry:
        """Runs every layer without a loop: each has arrays of its own."""
        for place in itertools.product(range(self.num_chunks), range(count)):
            carry = body(*place, carry)
        return carry


class ByPlace(Unrolled):
    """Parameters of layers that differ, unrolled. Canonical layers are a tree each.

    A row has room for every layer that a stage has there, and in slots for those of all chunks that
    lie in one: a list of arrays, those of one layer in the order of its tree, then those of others
    that differ in name or shape. `jaxpipe.runtime.defaults.room` says how much room that is.
    """

    def __init__(self, layers: Sequence[LayerParams], rows: np.ndarray, splits: Splits) -> None:
        self.rows = rows
        _, self.num_chunks, self.num_pieces = rows.shape
        self.canonical = self.piece = jax.tree.map_with_path(splits.leaf, layers)
        self._arrays = [jax.tree.leaves_with_path(layer) for layer in self.canonical]
        self._room = functools.cache(self._room_of)
        self.placed = self._chunks(self.num_chunks)

    def _room_of(self, row: int, count: int) -> dict[Array, tuple[int, int]]:
        """The arrays of one of so many rows: of each a layer that has it, and its number there."""
        found: dict[Array, tuple[int, int]] = {}
        slot, place = divmod(row, self.num_pieces)
        layers = self.rows[:, slot :: count // self.num_pieces, place]
        for layer in np.unique(layers[layers >= 0]).tolist():
            for number, array in enumerate(self._arrays[layer]):
                found.setdefault(array, (layer, number))
        return found

    def of_layer(self, trees: Tree, example: int) -> Tree:
        return trees[example]

    def of_piece(self, trees: Tree, at: At) -> Tree:
        return self._of_row(trees, self.piece_at(at).number, len(self.placed))

    def _of_row(self, trees: Tree, number: Index, count: int) -> Tree:
        room = self._room(number % count, count).values()
        flat = {n: self._flat(trees[n], n) for n, _ in room}
        return [flat[layer][n] for layer, n in room]

    def _flat(self, tree: Tree, example: int) -> list[Tree]:
        structure: Tree = jax.tree.structure(self.canonical[example])
        return list(structure.flatten_up_to(tree))

    @property
    def differing(self) -> Sequence[At]:
        return [(0, *at) for at in np.ndindex(self.rows.shape[1:])]

    def layer_at(self, at: At, example: int, *, slot: Slot = None) -> _UnrolledPlace:
        return self.piece_at(at, slot=slot)._replace(example=example)

    def _numbers(self, place: _UnrolledPlace, count: int) -> list[int]:
        """Numbers of the arrays of a layer, or of a piece, in the room of one of so many rows."""
        own: Collection[Array] = self._room(place.number, len(self.placed))
        if place.example is not None:
            own = self._arrays[place.example]
        numbers = {array: n for n, array in enumerate(self._room(place.number % count, count))}
        return [numbers[array] for array in own]

    def read(self, arrays: Arrays, place: _UnrolledPlace) -> Stored:
        room = super().read(arrays, place)
        own = [room[n] for n in self._numbers(place, len(arrays))]
        if place.example is None:
            return own
        return jax.tree.unflatten(jax.tree.structure(self.canonical[place.example]), own)

    def write(self, arrays: Arrays, place: _UnrolledPlace, values: Stored) -> Arrays:
        own = values if place.example is None else self._flat(values, place.example)
        new = dict(zip(self._numbers(place, len(arrays)), own, strict=True))
        room = range(len(arrays[place.number % len(arrays)]))
        return super().write(arrays, place, [new.get(n) for n in room])


def _joined(arrays: Arrays, own: Arrays) -> Arrays:
    """The arrays with those of some rows replaced."""
    return arrays | {n: values for n, values in own.items() if values is not None}
