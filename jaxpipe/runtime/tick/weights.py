"""Where the weights of an action come from: `Resident`, or `Gathered` from all data shards."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxpipe.runtime.barriers import tie
from jaxpipe.runtime.layout.data_axis import gather
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.tick.fixed import Fixed, Setup
from jaxpipe.runtime.tick.work import LayerWork
from jaxpipe.runtime.trees import combine
from jaxpipe.runtime.types import Arrays, Index, OuterParams, Shapes, Stored, Tree
from jaxpipe.schedule.lowering.table import Outer, Transfer


class Held(NamedTuple):
    """A stage's weights.

    Args:
      layers: of its layers, as they are placed: those that are trained, then the others, if any.
      outer: what belongs to no single layer, whole, as far as this stage has it.
      copies: what layers read in their place, likewise: gathered chunks in slots, or all layers in
        the dtypes that they compute in; none if layers read `layers`.
    """

    layers: list[Arrays]
    outer: OuterParams
    copies: Sequence[Arrays] = ()


class WeightSource(abc.ABC):
    """Where the weights of an action come from; ``held`` is what the ticks carry for it."""

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        """Shapes of its buffers, by name."""
        return {}

    def with_buffers(self, held: Any, buffers: dict[str, Arrays]) -> Any:
        """What is held, with its empty buffers."""
        return held

    def gather(self, fixed: Fixed, held: Any, transfer: Transfer) -> Any:
        """What is held after a tick's transfer, before its layers run."""
        return held

    @abc.abstractmethod
    def layer(self, work: LayerWork) -> list[Stored]:
        """A layer's weights as they are stored: those that are trained, then the others, if any."""

    def outer(
        self, fixed: Fixed, held: Any, phase: str, row: Outer, value: Tree
    ) -> tuple[OuterParams, Tree]:
        """What a phase ("enter", "leave", "embed_gradient") reads of embedding and head.

        It comes with a value of the phase's loop, tied to it where a read must not be hoisted."""
        return held.outer, value


class Resident(WeightSource):
    """Every data shard has its stage's weights whole."""

    def hold(self, setup: Setup, layers: list[Arrays], outers: list[OuterParams]) -> Held:
        """What is held when a step begins, without its buffers."""
        copies = () if setup.compute is None else _cast(setup, layers)
        return Held(layers, functools.reduce(combine, outers), copies)

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        if fixed.setup.compute is None:
            return {}
        own = [jax.tree.map(Leaf.struct, one.layers.placed) for one in fixed.setup.layouts]
        return {"weights": jax.eval_shape(functools.partial(_cast, fixed.setup), own)}

    def layer(self, work: LayerWork) -> list[Stored]:
        return work.read(work.held.copies or work.held.layers)


class Gathered(WeightSource):
    """Weights are sharded over data (ZeRO-3): chunks are gathered into slots, as the table says."""

    def hold(self, setup: Setup, layers: list[Arrays], outers: list[OuterParams]) -> Held:
        """As of `Resident`."""
        whole = [
            gather(outer, layout.outer, layout.axes)
            for outer, layout in zip(outers, setup.layouts, strict=True)
        ]
        return Held(layers, functools.reduce(combine, whole))

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        count = fixed.table.gathers.num_slots
        slots = [one.layers.slot_shapes(count) for one in fixed.setup.layouts]
        if fixed.setup.compute is not None:
            slots = jax.eval_shape(functools.partial(_cast, fixed.setup), slots)
        return {"weights": slots}

    def with_buffers(self, held: Held, buffers: dict[str, Arrays]) -> Held:
        return held._replace(copies=buffers["weights"])

    @jax.named_scope("gather")
    def gather(self, fixed: Fixed, held: Held, transfer: Transfer) -> Held:
        layouts = [layout.layers for layout in fixed.setup.layouts]

        def body(chunk: Index, number: Index, slots: list[Arrays]) -> list[Arrays]:
            at, written = (fixed.stage, chunk, number), []
            for n, params in enumerate(layouts):
                shards = params.read(held.layers[n], params.piece_at(at))
                shards, slot = tie(shards, slots[n])
                if fixed.setup.compute is not None:
                    dtypes = fixed.setup.compute[n]
                    shards = jax.tree.map(lambda w, dtype: w.astype(dtype), shards, dtypes)
                whole = gather(shards, params.piece, fixed.axes)
                written.append(params.write(slot, params.piece_at(at, slot=transfer.slot), whole))
            return written

        return held._replace(copies=fixed.params.loop_pieces(transfer.chunk, body, held.copies))

    def layer(self, work: LayerWork) -> list[Stored]:
        return work.read(work.held.copies, slot=work.cell.weights)


def _cast(setup: Setup, arrays: Sequence[Arrays]) -> list[Arrays]:
    """A stage's arrays of all layouts, or slots, in the dtypes that layers compute in."""
    assert setup.compute is not None
    layouts = [layout.layers for layout in setup.layouts]
    return [
        layout.cast(one, dtypes)
        for layout, one, dtypes in zip(layouts, arrays, setup.compute, strict=True)
    ]
