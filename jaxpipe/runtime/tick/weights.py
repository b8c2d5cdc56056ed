"""Where the weights of an action come from: `Resident`, or `Gathered` from all data shards."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

from jaxpipe.runtime.barriers import tie
from jaxpipe.runtime.layout.data_axis import gather
from jaxpipe.runtime.tick.fixed import Fixed, Plan
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import Cell, Outer, Transfer

PyTree = Any


class Held(NamedTuple):
    """A stage's weights.

    Args:
      layers: of its layers, as they are placed.
      outer: whole embedding and head, as far as this stage has them.
      slots: gathered chunks; None where weights are not sharded.
    """

    layers: PyTree
    outer: PyTree
    slots: PyTree = None


class WeightSource(abc.ABC):
    """Where the weights of an action come from; ``held`` is what the ticks carry for it."""

    def shapes(self, fixed: Fixed) -> dict[str, PyTree]:
        """Shapes of its buffers, by name."""
        del fixed
        return {}

    def with_buffers(self, held: Any, buffers: dict[str, PyTree]) -> Any:
        """What is held, with its empty buffers."""
        del buffers
        return held

    def gather(self, fixed: Fixed, held: Any, transfer: Transfer) -> Any:
        """What is held after a tick's transfer, before its layers run."""
        del fixed, transfer
        return held

    @abc.abstractmethod
    def layer(self, fixed: Fixed, held: Any, kind: Kind, cell: Cell, layer, example: int) -> PyTree:
        """A layer's weights as they are stored, for an action of this kind."""

    def outer(
        self, fixed: Fixed, held: Any, phase: str, row: Outer, value: PyTree
    ) -> tuple[PyTree, PyTree]:
        """What a phase ("enter", "leave", "embed_gradient") reads of embedding and head, and a
        value of its loop that goes with it, for reads that must not be hoisted out."""
        del fixed, phase, row
        return held.outer, value


class Resident(WeightSource):
    """Every data shard has its stage's weights whole."""

    def hold(self, plan: Plan, layers: PyTree, outer: PyTree) -> Held:
        """What is held when a step begins, but for its buffers."""
        del plan
        return Held(layers, outer)

    def layer(self, fixed: Fixed, held: Held, kind: Kind, cell: Cell, layer, example: int):
        place = fixed.params.resident(fixed.stage, cell.chunk, layer, example)
        return fixed.params.read(held.layers, place)


class Gathered(WeightSource):
    """Weights are sharded over data (ZeRO-3): chunks are gathered into slots, as the table says."""

    def hold(self, plan: Plan, layers: PyTree, outer: PyTree) -> Held:
        """As of `Resident`."""
        return Held(layers, gather(outer, plan.layout.outer))

    def shapes(self, fixed: Fixed) -> dict[str, PyTree]:
        return {"weights": fixed.params.slots(fixed.table.gathers.num_slots)}

    def with_buffers(self, held: Held, buffers: dict[str, PyTree]) -> Held:
        return held._replace(slots=buffers["weights"])

    def gather(self, fixed: Fixed, held: Held, transfer: Transfer) -> Held:
        params = fixed.params

        def body(chunk, number, slots):
            here = params.resident_piece(fixed.stage, chunk, number)
            shards, slots = tie(params.read(held.layers, here), slots)
            whole = gather(shards, params.piece)
            return params.write(slots, params.piece_in_slot(transfer.slot, chunk, number), whole)

        return held._replace(slots=params.loop_pieces(transfer.chunk, body, held.slots))

    def layer(self, fixed: Fixed, held: Held, kind: Kind, cell: Cell, layer, example: int):
        place = fixed.params.in_slot(cell.weights, fixed.stage, cell.chunk, layer, example)
        return fixed.params.read(held.slots, place)
