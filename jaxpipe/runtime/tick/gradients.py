"""Gradients `Summed` over microbatches, and reduced over data chunk by chunk."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.barriers import after, tie
from jaxpipe.runtime.layout.data_axis import (
    Joined,
    get_piece,
    no_pieces,
    put_piece,
    reduce_gradients,
    reduce_joined,
    reduce_over_stages,
    room_for,
    summed_of,
    summed_over,
)
from jaxpipe.runtime.layout.leaf import Share
from jaxpipe.runtime.layout.placed import Placed
from jaxpipe.runtime.layout.whole_model import SHARED
from jaxpipe.runtime.tick.chunk_pieces import MovedPiece, run_pieces
from jaxpipe.runtime.tick.fixed import Fixed, GradientSink
from jaxpipe.runtime.tick.values import Carried, LayerPlace
from jaxpipe.runtime.trees import rounded, widened
from jaxpipe.runtime.types import Arrays, At, Gradients, Index, Leaves, Shapes, Stored, Tree
from jaxpipe.runtime.zero import Zero
from jaxpipe.schedule.lowering.table import Transfer

_Moved = tuple[Arrays, Stored]
"""Arrays, and what was taken from them or put into them."""


class Summed(GradientSink):
    """A chunk's gradients are summed over microbatches, and then over data (a step's ZeRO level).

    The sums of all chunks have room until ZeRO-2, from there on those in slots. What they are
    reduced to takes their place (ZeRO-0), or is this data shard's part. Sums of gradients in narrow
    dtypes are float32, over microbatches and over data, and rounded once, when all are complete.
    """

    def __init__(self, zero: Zero) -> None:
        self._in_slots, self._in_place = zero.shards_gradients, not zero.shards_state

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        params = fixed.params
        sums = jax.tree.map(lambda leaf: leaf.summed.struct(), params.placed)
        if self._in_slots:
            sums = params.sum_shapes(fixed.table.reduces.num_slots)
        if self._in_place:
            return {"gradients": sums}
        reduced = jax.tree.map(lambda leaf: leaf.summed.struct(sharded=True), params.placed)
        return {"gradients": sums, "reduced": reduced}

    def reduces(self, fixed: Fixed) -> bool:
        leaves = jax.tree.leaves(fixed.params.placed)
        return any(summed_over(leaf.apart, fixed.axes) for leaf in leaves)

    def add(self, place: LayerPlace, sums: Arrays, stored: Stored) -> Arrays:
        if self._in_slots:
            return super().add(place, sums, stored)
        return place.fixed.params.update(sums, place.trained_at(), widened(stored))

    @jax.named_scope("reduce")
    def chunk(self, fixed: Fixed, carried: Carried, transfer: Transfer) -> Carried:
        def body(chunk: Index, number: Index, sums_and_reduced: _Moved) -> _Moved:
            sums, reduced = sums_and_reduced
            at = fixed.stage, chunk, number
            total = fixed.params.read(sums, self._sums_at(fixed, at, transfer.slot))
            if self._in_place:
                return self._put(fixed, at, None, sums, self._reduced(fixed, total, at)), reduced
            total, reduced = tie(total, reduced)
            shards = self._reduced(fixed, total, at)
            sums = self._cleared(fixed, at, transfer.slot, None, sums, shards)
            return sums, self._put(fixed, at, None, reduced, shards)

        through = carried.gradients, carried.finished
        sums, reduced = fixed.params.loop_pieces(transfer.chunk, body, through)
        return carried.but(gradients=sums, finished=reduced)

    def moving(self, fixed: Fixed) -> Shapes:
        count, shares = fixed.table.reduces.most_moved
        parts = (False,) if self._in_place else (False, True)
        rooms = [self._room(fixed, shares, sharded=part) for part in parts]
        return rooms * count if self.reduces(fixed) else []

    @jax.named_scope("reduce")
    def take(
        self, fixed: Fixed, carried: Carried, moved: Sequence[MovedPiece]
    ) -> tuple[Carried, Joined]:
        def read(n: int, at: At, sums: Arrays, joined: Joined) -> Tree:
            slot, share = moved[n].slot, moved[n].share
            leaves = fixed.params.leaves_at(at, moved[n].num_shares)
            total = fixed.params.read(sums, self._sums_at(fixed, at, slot, share))
            joined = put_piece(joined, n, total, leaves, sharded=False)
            if not moved[n].at_edge:
                sums = self._cleared(fixed, at, slot, share, sums, joined)
            return sums, joined

        room = self._room(fixed, moved[0].num_shares, sharded=False)
        empty = no_pieces([one.slot for one in moved], room)
        sums, joined = run_pieces(fixed.stage, fixed.params, moved, read, carried.gradients, empty)
        return carried.but(gradients=sums), joined

    @jax.named_scope("reduce")
    def start(self, fixed: Fixed, sums: Joined) -> Joined:
        return reduce_joined(sums, fixed.axes, zero=fixed.setup.options.zero)

    @jax.named_scope("store_reduced")
    def finish(
        self, fixed: Fixed, carried: Carried, reduced: Joined, moved: Sequence[MovedPiece]
    ) -> Carried:
        def put(n: int, at: At, arrays: Arrays, reduced: Joined) -> Tree:
            leaves = fixed.params.leaves_at(at, moved[n].num_shares)
            there = fixed.params.read(arrays, fixed.params.piece_at(at, share=moved[n].share))
            values = get_piece(reduced, n, there, leaves)
            return self._put(fixed, at, moved[n].share, arrays, values), reduced

        name = "gradients" if self._in_place else "finished"
        arrays, _ = run_pieces(
            fixed.stage, fixed.params, moved, put, getattr(carried, name), reduced
        )
        return carried.but(**{name: arrays})

    def _room(self, fixed: Fixed, shares: int, *, sharded: bool) -> Shapes:
        """The room that pieces, or shares of them, need on their way.

        Sums that no other device adds to stay where they are, if their place is what they become.
        """
        shared = [fixed.params.leaves_at(at, shares) for at in fixed.params.differing]
        pieces = [(_summed(leaves, sharded=sharded), leaves) for leaves in shared]
        room = room_for(pieces, sharded=sharded)
        return summed_of(room, fixed.axes) if self._in_place else room

    def _sums_at(self, fixed: Fixed, at: At, slot: Index, share: Share | None = None) -> Tree:
        """The place of the sums of a piece, or of a share of it."""
        return fixed.params.piece_at(at, slot=slot if self._in_slots else None, share=share)

    def _cleared(
        self, fixed: Fixed, at: At, slot: Index, share: Share | None, sums: Arrays, taken: Stored
    ) -> Arrays:
        """The sums with a slot cleared for the next chunk there, once a piece is ``taken``.

        On GPUs, a matmul adds its product to a sum without writing it first, but only where nothing
        chooses between overwriting and adding.
        """
        if not self._in_slots:
            return sums
        place = self._sums_at(fixed, at, after(taken, slot, fixed.stage), share)
        zeros = jax.tree.map(jnp.zeros_like, fixed.params.read(sums, place))
        return fixed.params.write(sums, place, zeros)

    def _reduced(self, fixed: Fixed, total: Stored, at: At) -> Stored:
        leaves, zero = fixed.params.leaves_at(at), fixed.setup.options.zero
        return reduce_gradients(total, leaves, fixed.axes, zero=zero)

    def _put(
        self, fixed: Fixed, at: At, share: Share | None, arrays: Arrays, shards: Stored
    ) -> Arrays:
        """The finished gradients with those of a piece, of which there may be some already."""
        put = fixed.params.write if self._in_place else fixed.params.update
        return put(arrays, fixed.params.piece_at(at, share=share), shards)

    def result(self, fixed: Fixed, carried: Carried) -> Gradients:
        """The finished gradients of this device, shaped like its placed parameters."""
        layers = carried.gradients if self._in_place else carried.finished
        layers = jax.tree.map(lambda w: w[None], rounded(layers, fixed.params.placed))
        return Placed({"layers": layers, **reduced_outer(fixed, carried)}, fixed.params.order)


def _summed(leaves: Leaves, *, sharded: bool = False) -> Shapes:
    """Shapes of the sums of these arrays, or of what they are reduced to."""
    return jax.tree.map(lambda leaf: leaf.summed.struct(sharded=sharded), leaves)


def reduced_outer(fixed: Fixed, carried: Carried) -> Gradients:
    """The finished gradients of what belongs to no single layer."""
    outer, setup, axes = carried.outer_gradients, fixed.setup, fixed.axes
    leaves, together = setup.layout.outer, fixed.table.together
    if setup.shares:
        of_layers = carried.shared_gradients
        if together:
            of_layers = lax.psum(of_layers, axes.stage)
        outer = outer | {SHARED: jax.tree.map(jnp.add, outer[SHARED], of_layers)}
    if not together:  # stages have summed some each
        outer = reduce_over_stages(outer, leaves, axes)
    outer = reduce_gradients(outer, leaves, axes, zero=setup.options.zero)
    return rounded(outer, leaves)
