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
    room_for,
)
from jaxpipe.runtime.layout.layer_layout import LayerLayout, cast
from jaxpipe.runtime.layout.leaf import Leaf, Share
from jaxpipe.runtime.tick.chunk_pieces import MovedPiece, run_pieces
from jaxpipe.runtime.tick.fixed import Fixed, WeightSource
from jaxpipe.runtime.tick.setup import Setup
from jaxpipe.runtime.tick.values import LayerPlace
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

    def layer(self, held: Held, place: LayerPlace) -> list[Stored]:
        return place.read(held.copies or held.layers)


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
            whole = self._whole(fixed, shards, at)
            given = zip(fixed.setup.layer_layouts, slots, whole, strict=True)
            return [
                layout.write(slot, layout.piece_at(at, slot=transfer.slot), one)
                for layout, slot, one in given
            ]

        return held._replace(copies=fixed.params.loop_pieces(transfer.chunk, body, held.copies))

    def moving(self, fixed: Fixed) -> Shapes:
        count, shares = fixed.table.gathers.most_moved
        return [self._rooms(fixed, shares, sharded=sharded) for sharded in (False, True)] * count

    @jax.named_scope("gather")
    def start(self, fixed: Fixed, held: Held, moved: Sequence[MovedPiece]) -> list[Joined]:
        slots, shares = [piece.slot for piece in moved], moved[0].num_shares

        def read(n: int, at: At, nothing: Arrays, joined: list[Joined]) -> Tree:
            shards, joined = self._shards(fixed, held, at, moved[n].share, joined)
            given = zip(fixed.setup.layer_layouts, joined, shards, strict=True)
            return nothing, [
                put_piece(row, n, w, layout.leaves_at(at, shares), sharded=True)
                for layout, row, w in given
            ]

        empty = [no_pieces(slots, room) for room in self._rooms(fixed, shares, sharded=True)]
        _, joined = run_pieces(fixed.stage, fixed.params, moved, read, {}, empty)
        return [gather_joined(one, fixed.axes) for one in joined]

    @jax.named_scope("store_gathered")
    def finish(
        self, fixed: Fixed, held: Held, gathered: list[Joined], moved: Sequence[MovedPiece]
    ) -> Held:
        def stored(c: int, layout: LayerLayout, slots: Arrays, whole: Joined) -> Arrays:
            def write(n: int, at: At, slots: Arrays, whole: Joined) -> Tree:
                place = layout.piece_at(at, slot=moved[n].slot, share=moved[n].share)
                piece = self._pieces(fixed, moved[n].num_shares, at, sharded=False)[c]
                return layout.write(slots, place, get_piece(whole, n, *piece)), whole

            return run_pieces(fixed.stage, layout, moved, write, slots, whole)[0]

        given = zip(fixed.setup.layer_layouts, held.copies, gathered, strict=True)
        return held._replace(copies=[stored(c, *one) for c, one in enumerate(given)])

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
        return list(map(cast, shards, self._dtypes(fixed, at), scales)), carried

    def _dtypes(self, fixed: Fixed, at: At) -> list[Tree]:
        """Dtypes in which layers read a piece, by layout."""
        assert fixed.setup.compute is not None
        pairs = zip(fixed.setup.layer_layouts, fixed.setup.compute, strict=True)
        return [layout.of_piece(dtypes, at) for layout, dtypes in pairs]

    def _pieces(
        self, fixed: Fixed, shares: int, at: At, *, sharded: bool
    ) -> list[tuple[Shapes, Leaves]]:
        """Shapes of what moves, or of a data shard's part, as it is gathered, and its leaves."""
        leaves = [layout.leaves_at(at, shares) for layout in fixed.setup.layer_layouts]
        own = jax.tree.map(lambda leaf: leaf.struct(sharded=sharded), leaves)
        if fixed.setup.compute is not None:
            dtypes = self._dtypes(fixed, at)
            own = jax.tree.map(lambda shape, dtype: shape.update(dtype=dtype), own, dtypes)
        return list(zip(own, leaves, strict=True))

    def _rooms(self, fixed: Fixed, shares: int, *, sharded: bool) -> list[Shapes]:
        """The room that pieces, or shares of them, need on their way, by layout."""
        places = fixed.params.differing
        pieces = [self._pieces(fixed, shares, at, sharded=sharded) for at in places]
        return [room_for(one, sharded=sharded) for one in zip(*pieces, strict=True)]

    def _whole(self, fixed: Fixed, shards: list[Stored], at: At) -> list[Stored]:
        pairs = zip(fixed.setup.layer_layouts, shards, strict=True)
        return [gather(one, layout.leaves_at(at), fixed.axes) for layout, one in pairs]

    def layer(self, held: Held, place: LayerPlace) -> list[Stored]:
        return place.read(held.copies, slot=place.cell.weights)


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
    if setup.compute is None or not setup.options.stores_fp8:
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
