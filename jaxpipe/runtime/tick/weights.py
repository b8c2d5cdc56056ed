"""Where the weights of an action come from: `Resident`, or `Gathered` from all data shards."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpipe.runtime.barriers import tie
from jaxpipe.runtime.layout.data_axis import gather
from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.runtime.tick.fixed import Fixed, Setup
from jaxpipe.runtime.tick.work import LayerWork
from jaxpipe.runtime.trees import combine
from jaxpipe.runtime.types import Arrays, At, Index, OuterParams, Shapes, Stored, Tree
from jaxpipe.schedule.lowering.table import Outer, Transfer


class Held(NamedTuple):
    """A stage's weights.

    Args:
      layers: of its layers, as they are placed: those that are trained, then the others, if any.
      outer: what belongs to no single layer, whole, as far as this stage has it.
      slots: gathered chunks, likewise; none where weights are not sharded.
    """

    layers: list[Arrays]
    outer: OuterParams
    slots: Sequence[Arrays] = ()


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
        return Held(layers, functools.reduce(combine, outers))

    def layer(self, work: LayerWork) -> list[Stored]:
        return work.read(work.held.layers)


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
        return {"weights": [one.layers.slot_shapes(count) for one in fixed.setup.layouts]}

    def with_buffers(self, held: Held, buffers: dict[str, Arrays]) -> Held:
        return held._replace(slots=buffers["weights"])

    def gather(self, fixed: Fixed, held: Held, transfer: Transfer) -> Held:
        def piece(params: LayerLayout, layers: Arrays, at: At, slots: Arrays) -> Arrays:
            shards, slots = tie(params.read(layers, params.piece_at(at)), slots)
            whole = gather(shards, params.piece, fixed.axes)
            return params.write(slots, params.piece_at(at, slot=transfer.slot), whole)

        def body(chunk: Index, number: Index, slots: list[Arrays]) -> list[Arrays]:
            at = fixed.stage, chunk, number
            return [
                piece(layout.layers, layers, at, one)
                for layout, layers, one in zip(fixed.setup.layouts, held.layers, slots, strict=True)
            ]

        return held._replace(slots=fixed.params.loop_pieces(transfer.chunk, body, held.slots))

    def layer(self, work: LayerWork) -> list[Stored]:
        return work.read(work.held.slots, slot=work.cell.weights)
