"""An action of a tick, and one layer of it with what it may read."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxpipe.runtime.layers.kinds import LayerKind
from jaxpipe.runtime.tick.carried import Carried
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.microbatches import Microbatches
from jaxpipe.runtime.types import At, Batch, Index, Key, Leaves, Stored
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import Cell


@dataclasses.dataclass(frozen=True)
class Work:
    """An action of a tick.

    Args:
      held: the weights.
      replay: the slot of what F keeps for R; None if nothing is recomputed.
    """

    fixed: Fixed
    batch: Microbatches
    held: Any
    action: Kind
    cell: Cell
    replay: Index

    def of_layer(self, chunk: Index, layer: Index, kind: LayerKind) -> LayerWork:
        """The part of a layer of this kind, counted within its chunk."""
        cell = dataclasses.replace(self.cell, chunk=chunk)
        shared = self.fixed, self.batch, self.held, self.action, cell, self.replay
        return LayerWork(*shared, layer, kind)


@dataclasses.dataclass(frozen=True)
class LayerWork(Work):
    """One layer of an action, and what it may read.

    Args:
      layer: counted within the chunk.
    """

    layer: Index
    kind: LayerKind

    @property
    def at(self) -> At:
        """The layer's stage, chunk and number."""
        return self.fixed.stage, self.cell.chunk, self.layer

    def context(self) -> tuple[Batch, Key]:
        """The microbatch's rows, and the layer's key."""
        layer = self.fixed.first_layer[self.cell.chunk] + self.layer
        return self.fixed.context(self.batch, self.cell.microbatch, layer)

    def weights(self) -> Stored:
        """The layer's weights as they are stored."""
        return self.fixed.weights.layer(self)

    def place(self, slot: Index = None) -> Any:
        """Where the layer's parameters lie: among the stage's own, or in a slot of chunks."""
        return self.fixed.params.layer_at(self.at, self.kind.example, slot=slot)

    @property
    def leaves(self) -> Leaves:
        """The layer's parameters as they are stored, every array a `Leaf`."""
        return self.fixed.params.leaves_of(self.kind.example)

    def saved(self, carried: Carried, *names: str) -> list[list[jax.Array]]:
        """Residuals of the layer, by these names."""
        number, at = self.kind.number, self.at
        return [
            self.fixed.residuals[name].read(
                carried.residuals[name], number, getattr(self.cell, name), at
            )
            for name in names
        ]
