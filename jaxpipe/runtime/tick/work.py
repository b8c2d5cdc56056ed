"""An action of a tick, and one layer of it with what it may read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from jaxpipe.runtime.layers.kinds import LayerKind
from jaxpipe.runtime.layout.whole_model import SHARED
from jaxpipe.runtime.tick.carried import Carried
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.microbatches import Microbatches
from jaxpipe.runtime.trees import combine
from jaxpipe.runtime.types import (
    Arrays,
    At,
    Batch,
    Index,
    Key,
    LayerParams,
    Leaves,
    Stored,
    Tree,
)
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import Cell


@dataclasses.dataclass(frozen=True)
class Work:
    """An action of a tick.

    Args:
      held: the weights.
    """

    fixed: Fixed
    batch: Microbatches
    held: Any
    action: Kind
    cell: Cell

    def of_layer(self, chunk: Index, layer: Index, kind: LayerKind) -> LayerWork:
        """The part of a layer of this kind, counted within its chunk."""
        cell = dataclasses.replace(self.cell, chunk=chunk)
        return LayerWork(self.fixed, self.batch, self.held, self.action, cell, layer, kind)


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

    def weights(self) -> tuple[list[Stored], Tree]:
        """The layer's weights as they are stored, and what it shares with others, if anything."""
        shared = self.held.outer[SHARED] if self.fixed.setup.shares else None
        return self.fixed.weights.layer(self), shared

    def params(self, weights: tuple[list[Stored], Tree]) -> LayerParams:
        """What the layer's function is given as its parameters, from its weights.

        They have the parameters' dtypes, whatever the weights' are: a layer that casts them to what
        it computes in compiles to no cast.
        """
        stored, shared = weights
        example, parts = self.kind.example, []
        for layout, one in zip(self.fixed.setup.layer_layouts, stored, strict=True):
            leaves = layout.leaves_of(example)
            whole = jax.tree.map(lambda w, leaf: w.astype(leaf.dtype), one, leaves)
            parts.append(layout.unpack(whole, example))
        own = functools.reduce(combine, parts)
        return (own, shared) if self.fixed.setup.shares else own

    def read(self, arrays: Sequence[Arrays], slot: Index = None) -> list[Stored]:
        """The layer's part of the arrays of all layouts."""
        return [
            layout.read(one, layout.layer_at(self.at, self.kind.example, slot=slot))
            for layout, one in zip(self.fixed.setup.layer_layouts, arrays, strict=True)
        ]

    def place(self, slot: Index = None) -> Any:
        """Where its trained parameters lie: among the stage's own, or in a slot of chunks."""
        return self.fixed.params.layer_at(self.at, self.kind.example, slot=slot)

    @property
    def leaves(self) -> Leaves:
        """Its trained parameters as they are stored, every array a `Leaf`."""
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
