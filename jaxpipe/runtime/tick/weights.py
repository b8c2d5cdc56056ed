"""Where the weights of an action come from: `Resident`, or `Gathered` from all data shards."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

from jaxpipe.runtime.barriers import tie
from jaxpipe.runtime.layout.data_axis import gather
from jaxpipe.runtime.tick.fixed import Fixed, Setup
from jaxpipe.runtime.tick.work import LayerWork
from jaxpipe.runtime.types import Arrays, Index, OuterParams, Shapes, Stored, Tree
from jaxpipe.schedule.lowering.table import Outer, Transfer


class Held(NamedTuple):
    """A stage's weights.

    Args:
      layers: of its layers, as they are placed.
      outer: whole embedding and head, as far as this stage has them.
      slots: gathered chunks; None where weights are not sharded.
    """

    layers: Arrays
    outer: OuterParams
    slots: Arrays = None


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
    def layer(self, work: LayerWork) -> Stored:
        """A layer's weights as they are stored."""

    def outer(
        self, fixed: Fixed, held: Any, phase: str, row: Outer, value: Tree
    ) -> tuple[OuterParams, Tree]:
        """What a phase ("enter", "leave", "embed_gradient") reads of embedding and head.

        It comes with a value of the phase's loop, tied to it where a read must not be hoisted."""
        return held.outer, value


class Resident(WeightSource):
    """Every data shard has its stage's weights whole."""

    def hold(self, setup: Setup, layers: Arrays, outer: OuterParams) -> Held:
        """What is held when a step begins, without its buffers."""
        return Held(layers, outer)

    def layer(self, work: LayerWork) -> Stored:
        return work.fixed.params.read(work.held.layers, work.place())


class Gathered(WeightSource):
    """Weights are sharded over data (ZeRO-3): chunks are gathered into slots, as the table says."""

    def hold(self, setup: Setup, layers: Arrays, outer: OuterParams) -> Held:
        """As of `Resident`."""
        return Held(layers, gather(outer, setup.layout.outer, setup.layout.axes))

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        return {"weights": fixed.params.slot_shapes(fixed.table.gathers.num_slots)}

    def with_buffers(self, held: Held, buffers: dict[str, Arrays]) -> Held:
        return held._replace(slots=buffers["weights"])

    def gather(self, fixed: Fixed, held: Held, transfer: Transfer) -> Held:
        params = fixed.params

        def body(chunk: Index, number: Index, slots: Arrays) -> Arrays:
            here = params.piece_at((fixed.stage, chunk, number))
            shards, slots = tie(params.read(held.layers, here), slots)
            whole = gather(shards, params.piece, fixed.axes)
            return params.write(
                slots, params.piece_at((fixed.stage, chunk, number), slot=transfer.slot), whole
            )

        return held._replace(slots=params.loop_pieces(transfer.chunk, body, held.slots))

    def layer(self, work: LayerWork) -> Stored:
        return work.fixed.params.read(work.held.slots, work.place(work.cell.weights))
