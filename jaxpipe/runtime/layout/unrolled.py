"""Layers that are alike, unrolled: every row has arrays of its own, which are read in place."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.runtime.barriers import Carry, overwrite, run_if
from jaxpipe.runtime.layout import shares
from jaxpipe.runtime.layout.layer_layout import Body, ChunkSpan, LayerLayout, alike, cast, largest
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.layout.shares import Share
from jaxpipe.runtime.layout.splits import Splits
from jaxpipe.runtime.types import Arrays, At, Index, Params, Shapes, Span, Stored, Tree
from jaxpipe.schedule.lowering.table import Chunk


class _Place(NamedTuple):
    """A place in unrolled arrays: the row's number, the slot if it is in one, or a share of it."""

    number: int
    slot: Index
    share: Share | None


class Unrolled(LayerLayout):
    """Parameters of layers that are alike, every row of a stage in arrays of its own.

    A stage's arrays are a dictionary from row ``chunk * layers + layer`` to the layer's tree. k
    slots are the rows of k chunks, and chunk c lies in those of chunk ``c % k``. The program must
    know a row's number, so that it reads an array and not a part of one: a GPU copies a part before
    it multiplies with it.
    """

    own_arrays = True

    def __init__(self, layers: Params, rows: np.ndarray, splits: Splits) -> None:
        _, self.num_chunks, self.num_pieces = rows.shape
        self.piece, self.canonical = alike(layers, splits)
        self.placed = dict.fromkeys(range(self.num_chunks * self.num_pieces), self.piece)

    def slot_shapes(self, count: int) -> Shapes:
        row = jax.tree.map(Leaf.struct, self.piece)
        return dict.fromkeys(range(count * self.num_pieces), row)

    def cast(self, arrays: Arrays, dtypes: Tree, scales: Tree = None) -> Arrays:
        return {n: cast(row, dtypes, scales and scales[n]) for n, row in arrays.items()}

    def largest(self, arrays: Arrays, dtypes: Tree) -> Tree:
        return {n: largest(row, dtypes, layer_dims=0) for n, row in arrays.items()}

    def layer_at(self, at: At, example: int, *, slot: Index = None) -> _Place:
        return self.piece_at(at, slot=slot)

    def piece_at(self, at: At, *, slot: Index = None, share: Share | None = None) -> _Place:
        _, chunk, number = at
        return _Place(chunk * self.num_pieces + number, slot, share)

    def read(self, arrays: Arrays, place: _Place) -> Stored:
        row, share = arrays[place.number % len(arrays)], place.share
        if share is None:
            return row
        return jax.tree.map(lambda leaf, w: shares.read_share(leaf, w, (), share), self.piece, row)

    def write(self, arrays: Arrays, place: _Place, values: Stored) -> Arrays:
        number = place.number % len(arrays)

        def write(leaf: Leaf, w: jax.Array, value: jax.Array) -> jax.Array:
            if place.share is not None:
                return shares.write_share(leaf, w, (), place.share, value)
            value = value.astype(w.dtype)
            return value if place.slot is None else overwrite(w, value, place.slot)

        return arrays | {number: jax.tree.map(write, self.piece, arrays[number], values)}

    def loop(
        self, span: Span, body: Body, arrays: Arrays, carry: Carry, *, down: bool = False
    ) -> tuple[Arrays, Carry]:
        """Runs one loop per row, which runs if the row is one of these layers."""
        chunk, lo, hi = span
        rows = list(itertools.product(range(self.num_chunks), range(self.num_pieces)))
        for c, layer in reversed(rows) if down else rows:
            runs = (chunk == c) & (lo <= layer) & (layer < hi)
            # Only the loop's own row goes through it; the others are None, since places count all
            # rows. An evaluation has no sums.
            number = (c * self.num_pieces + layer) % max(len(arrays), 1)
            own = {n: row if n == number else None for n, row in arrays.items()}

            def step(through: tuple[Arrays, Carry], c: int = c, layer: int = layer) -> Any:
                return body(c, layer, *through)

            with jax.named_scope(f"chunk{c}_layer{layer}"):
                own, carry = run_if(runs, step, (own, carry))
            arrays = arrays | {n: row for n, row in own.items() if n == number}
        return arrays, carry

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
            number = (b * self.num_pieces + layer) % len(arrays)
            own = {n: row if n == number else None for n, row in arrays.items()}

            def step(through: tuple[Arrays, Carry], at: Any = ((b, layer), (f, i))) -> Any:
                return body(*at, *through)

            with jax.named_scope(f"chunk{b}_layer{layer}_chunk{f}_layer{i}"):
                own, carry = run_if(runs, step, (own, carry))
            arrays = arrays | {number: own[number]}
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
