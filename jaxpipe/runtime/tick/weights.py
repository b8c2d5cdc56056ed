"""Sources of weights: `Resident`, or `Gathered` from all data shards."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax

from jaxpipe.runtime.barriers import Carry, tie
from jaxpipe.runtime.float8 import E4M3, scale_for
from jaxpipe.runtime.layout.data_axis import (
    Joined,
    gather,
    gather_joined,
    gather_over_stages,
    get_piece,
    no_pieces,
    put_piece,
)
from jaxpipe.runtime.layout.layer_layout import LayerLayout, cast
from jaxpipe.runtime.layout.leaf import Leaf, Share, share_of
from jaxpipe.runtime.tick.chunk_pieces import MovedPiece, run_pieces
from jaxpipe.runtime.tick.fixed import Fixed, LayerWork, WeightSource
from jaxpipe.runtime.tick.setup import Setup
from jaxpipe.runtime.trees import combine
from jaxpipe.runtime.types import Arrays, At, Index, Leaves, OuterParams, Shapes, Stored, Tree
from jaxpipe.schedule.lowering.table import Transfer


class Held(NamedTuple):
    """A stage's weights.

    Args:
      layers: of its layers, as they are placed: those that are trained, then the others, if any.
      outer: what belongs to no single layer, whole, as far as this stage has it.
      copies: what layers read in their place, likewise: gathered chunks in slots, or all layers in
        the dtypes that they compute in; none if layers read `layers`.
      scales: of the quantized weights among the copies: like `layers`, one number per layer, None
        for other weights; None if no weight is quantized.
    """

    layers: list[Arrays]
    outer: OuterParams
    copies: Sequence[Arrays] = ()
    scales: Sequence[Arrays | None] = ()


class Resident(WeightSource):
    """Every data shard has its stage's weights whole."""

    def hold(self, setup: Setup, layers: list[Arrays], outers: list[OuterParams]) -> Held:
        """Makes what is held when a step begins, without its buffers."""
        scales = _scales(setup, layers)
        copies = () if setup.compute is None else _cast(setup, layers, scales)
        return Held(layers, _joined(setup, outers), copies, scales)

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        if fixed.setup.compute is None:
            return {}
        own = [jax.tree.map(Leaf.struct, one.placed) for one in fixed.setup.layer_layouts]
        return {"weights": _cast_shapes(fixed.setup, own)}

    def layer(self, work: LayerWork) -> list[Stored]:
        return work.read(work.held.copies or work.held.layers)


class Gathered(WeightSource):
    """Weights are sharded over data (ZeRO-3): chunks are gathered into slots, as the table says."""

    gathers = True

    def hold(self, setup: Setup, layers: list[Arrays], outers: list[OuterParams]) -> Held:
        """Makes what is held, as `Resident.hold` does, of gathered embedding and head."""
        whole = [
            gather(outer, layout.outer, layout.axes)
            for outer, layout in zip(outers, setup.layouts, strict=True)
        ]
        return Held(layers, _joined(setup, whole), scales=_scales(setup, layers))

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        count = fixed.table.gathers.num_slots
        slots = [one.slot_shapes(count) for one in fixed.setup.layer_layouts]
        if fixed.setup.compute is not None:
            slots = _cast_shapes(fixed.setup, slots)
        return {"weights": slots}

    def with_buffers(self, held: Held, buffers: dict[str, Arrays]) -> Held:
        return held._replace(copies=buffers["weights"])

    @jax.named_scope("gather")
    def gather(self, fixed: Fixed, held: Held, transfer: Transfer) -> Held:
        def body(chunk: Index, number: Index, slots: list[Arrays]) -> list[Arrays]:
            at = fixed.stage, chunk, number
            shards, slots = self._shards(fixed, held, at, None, slots)
            whole = self._whole(fixed, shards)
            given = zip(fixed.setup.layer_layouts, slots, whole, strict=True)
            return [
                layout.write(slot, layout.piece_at(at, slot=transfer.slot), one)
                for layout, slot, one in given
            ]

        return held._replace(copies=fixed.params.loop_pieces(transfer.chunk, body, held.copies))

    def moving(self, fixed: Fixed) -> Shapes:
        count, shares = fixed.table.gathers.most_moved
        leaves = self._leaves(fixed, shares)
        pieces = [self._piece_shapes(fixed, leaves, sharded=sharded) for sharded in (False, True)]
        return pieces * count

    @jax.named_scope("gather")
    def start(self, fixed: Fixed, held: Held, moved: Sequence[MovedPiece]) -> list[Joined]:
        leaves = self._leaves(fixed, moved[0].num_shares)
        shapes = self._piece_shapes(fixed, leaves, sharded=True)
        slots = [piece.slot for piece in moved]

        def read(n: int, at: At, nothing: Arrays, joined: list[Joined]) -> Tree:
            shards, joined = self._shards(fixed, held, at, moved[n].share, joined)
            given = zip(joined, shards, leaves, strict=True)
            return nothing, [put_piece(j, n, w, of, sharded=True) for j, w, of in given]

        empty = [
            no_pieces(slots, one, of, sharded=True) for one, of in zip(shapes, leaves, strict=True)
        ]
        _, joined = run_pieces(fixed.stage, fixed.params, moved, read, {}, empty)
        return [gather_joined(one, fixed.axes) for one in joined]

    @jax.named_scope("store_gathered")
    def finish(
        self, fixed: Fixed, held: Held, gathered: list[Joined], moved: Sequence[MovedPiece]
    ) -> Held:
        def stored(
            layout: LayerLayout, slots: Arrays, whole: Joined, shapes: Shapes, leaves: Leaves
        ) -> Arrays:
            def write(n: int, at: At, slots: Arrays, whole: Joined) -> Tree:
                place = layout.piece_at(at, slot=moved[n].slot, share=moved[n].share)
                return layout.write(slots, place, get_piece(whole, n, shapes, leaves)), whole

            return run_pieces(fixed.stage, layout, moved, write, slots, whole)[0]

        leaves = self._leaves(fixed, moved[0].num_shares)
        shapes = self._piece_shapes(fixed, leaves, sharded=False)
        given = fixed.setup.layer_layouts, held.copies, gathered, shapes, leaves
        return held._replace(copies=[stored(*one) for one in zip(*given, strict=True)])

    def _shards(
        self, fixed: Fixed, held: Held, at: At, share: Share | None, carried: Carry
    ) -> tuple[list[Stored], Carry]:
        """This data shard's part of a piece, or of a share of it, in the dtypes that are gathered,
        tied to a value."""
        layouts = fixed.setup.layer_layouts
        shards = [
            layout.read(one, layout.piece_at(at, share=share))
            for layout, one in zip(layouts, held.layers, strict=True)
        ]
        shards, carried = tie(shards, carried)
        if fixed.setup.compute is None:
            return shards, carried
        scales = [
            None if one is None else layout.read(one, layout.piece_at(at))
            for layout, one in zip(layouts, held.scales, strict=True)
        ]
        return list(map(cast, shards, fixed.setup.compute, scales)), carried

    def _leaves(self, fixed: Fixed, shares: int) -> list[Leaves]:
        """Leaves of a piece, or of one of its shares, by layout."""
        return [share_of(layout.piece, shares) for layout in fixed.setup.layer_layouts]

    def _piece_shapes(self, fixed: Fixed, leaves: list[Leaves], *, sharded: bool) -> list[Shapes]:
        """Shapes of what moves, or of a data shard's part, as it is gathered."""
        own = jax.tree.map(lambda leaf: leaf.struct(sharded=sharded), leaves)
        if fixed.setup.compute is None:
            return own
        return jax.tree.map(
            lambda shape, dtype: shape.update(dtype=dtype), own, list(fixed.setup.compute)
        )

    def _whole(self, fixed: Fixed, shards: list[Stored]) -> list[Stored]:
        pairs = zip(shards, fixed.setup.layer_layouts, strict=True)
        return [gather(one, layout.piece, fixed.axes) for one, layout in pairs]

    def layer(self, work: LayerWork) -> list[Stored]:
        return work.read(work.held.copies, slot=work.cell.weights)


def _joined(setup: Setup, outers: list[OuterParams]) -> OuterParams:
    """Joins what belongs to no single layer, as stages compute with it."""
    if not setup.table.together:
        outers = [
            gather_over_stages(outer, layout.outer, layout.axes)
            for outer, layout in zip(outers, setup.layouts, strict=True)
        ]
    return functools.reduce(combine, outers)


def _scales(setup: Setup, layers: list[Arrays]) -> Sequence[Arrays | None]:
    """Finds `Held.scales`, of whole weights: devices may have a part of each."""
    if setup.compute is None or not setup.quantizes:
        return [None] * len(layers)
    largest = [
        layout.largest(one, dtypes)
        for layout, one, dtypes in zip(setup.layer_layouts, layers, setup.compute, strict=True)
    ]
    return jax.tree.map(lambda w: scale_for(lax.pmax(w, setup.layout.axes.peers), E4M3), largest)


def _cast(setup: Setup, arrays: Sequence[Arrays], scales: Sequence[Arrays | None]) -> list[Arrays]:
    """A stage's arrays of all layouts, or slots, in the dtypes that layers compute in."""
    assert setup.compute is not None
    given = zip(setup.layer_layouts, arrays, setup.compute, scales, strict=True)
    return [layout.cast(one, dtypes, scale) for layout, one, dtypes, scale in given]


def _cast_shapes(setup: Setup, shapes: list[Shapes]) -> Shapes:
    return jax.eval_shape(lambda arrays: _cast(setup, arrays, _scales(setup, arrays)), shapes)
