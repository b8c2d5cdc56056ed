"""Sources of weights: `Resident`, or `Gathered` from all data shards."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.barriers import Carry, tie
from jaxpipe.runtime.float8 import E4M3, scale_for
from jaxpipe.runtime.layout.data_axis import gather, gather_over_stages
from jaxpipe.runtime.layout.layer_layout import LayerLayout, cast
from jaxpipe.runtime.layout.leaf import Leaf, Share, share_of
from jaxpipe.runtime.tick.fixed import (
    Fixed,
    LayerWork,
    MovedPiece,
    Pieces,
    Setup,
    WeightSource,
    pieces_of,
)
from jaxpipe.runtime.trees import combine
from jaxpipe.runtime.types import Arrays, At, Index, OuterParams, Shapes, Stored, Tree
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
            whole = self._whole(fixed, shards, 1)
            given = zip(fixed.setup.layer_layouts, slots, whole, strict=True)
            return [
                layout.write(slot, layout.piece_at(at, slot=transfer.slot), one)
                for layout, slot, one in given
            ]

        return held._replace(copies=fixed.params.loop_pieces(transfer.chunk, body, held.copies))

    def moving(self, fixed: Fixed) -> Shapes:
        gathers = fixed.table.gathers
        pieces = [self._piece_shapes(fixed, sharded=sharded) for sharded in (False, True)]
        return pieces * gathers.group if gathers.shared.any() else []

    @jax.named_scope("gather")
    def start(self, fixed: Fixed, held: Held, transfer: Transfer) -> Pieces:
        gathers = fixed.table.gathers
        empty = jax.tree.map(jnp.zeros_like, self._piece_shapes(fixed, sharded=True))

        def gathered(moved: MovedPiece) -> list[Stored]:
            def read(chunk: Index, number: Index, nothing: Arrays, shards: Tree) -> Tree:
                at = fixed.stage, chunk, number
                return nothing, self._shards(fixed, held, at, moved.share, shards)[0]

            _, shards = fixed.params.loop(moved.span, read, {}, empty)
            return self._whole(fixed, shards, gathers.shares)

        return list(map(gathered, pieces_of(gathers, transfer)))

    @jax.named_scope("store_gathered")
    def finish(self, fixed: Fixed, held: Held, pieces: Pieces, transfer: Transfer) -> Held:
        def stored(layout: LayerLayout, moved: MovedPiece, slots: Arrays, one: Stored) -> Arrays:
            def write(chunk: Index, number: Index, slots: Arrays, one: Stored) -> Tree:
                at = fixed.stage, chunk, number
                place = layout.piece_at(at, slot=transfer.slot, share=moved.share)
                return layout.write(slots, place, one), one

            return layout.loop(moved.span, write, slots, one)[0]

        copies, layouts = held.copies, fixed.setup.layer_layouts
        for moved, piece in zip(pieces_of(fixed.table.gathers, transfer), pieces, strict=True):
            copies = [
                stored(layout, moved, slots, one)
                for layout, slots, one in zip(layouts, copies, piece, strict=True)
            ]
        return held._replace(copies=copies)

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

    def _piece_shapes(self, fixed: Fixed, *, sharded: bool) -> Shapes:
        """Shapes of what moves of all layouts, or of a data shard's part, as they are gathered."""
        shares = fixed.table.gathers.shares
        leaves = [share_of(layout.piece, shares) for layout in fixed.setup.layer_layouts]
        own = jax.tree.map(lambda leaf: leaf.struct(sharded=sharded), leaves)
        if fixed.setup.compute is None:
            return own
        return jax.tree.map(
            lambda shape, dtype: shape.update(dtype=dtype), own, list(fixed.setup.compute)
        )

    def _whole(self, fixed: Fixed, shards: list[Stored], shares: int) -> list[Stored]:
        pairs = zip(shards, fixed.setup.layer_layouts, strict=True)
        return [gather(one, share_of(layout.piece, shares), fixed.axes) for one, layout in pairs]

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
    """Shapes of what `_cast` makes."""
    return jax.eval_shape(lambda arrays: _cast(setup, arrays, _scales(setup, arrays)), shapes)
