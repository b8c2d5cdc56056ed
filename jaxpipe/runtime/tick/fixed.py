"""Inputs of ticks: values, and the three interfaces in which programs differ.

They say where weights come from (`WeightSource`), what becomes of gradients (`GradientSink`), and
of what the head returns (`Collector`).
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.defaults import known_fields
from jaxpipe.runtime.layers import losses
from jaxpipe.runtime.layout.data_axis import Joined
from jaxpipe.runtime.tick.chunk_pieces import MovedPiece
from jaxpipe.runtime.tick.microbatches import Microbatches, StepMicrobatches
from jaxpipe.runtime.tick.values import Carried, LayerPlace, Values
from jaxpipe.runtime.trees import widened
from jaxpipe.runtime.types import Arrays, Gradients, Index, OuterParams, Shapes, Stored, Tree
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import NONE, BodyParts, Cell, Row, Transfer


@dataclasses.dataclass(frozen=True)
class Fixed(Values):
    """Values that no tick changes, and how this program differs from others.

    Args:
      weights: where the weights of an action come from.
      gradients: what becomes of gradients; None for an evaluation.
      collector: what becomes of what the head returns.
      weight: the weight of a microbatch's loss, from what the head is given beside parameters and
        activation; None if the loss is not weighted, or nothing is trained.
    """

    weights: WeightSource
    gradients: GradientSink | None
    collector: Collector
    weight: Callable[[Tree], jax.Array] | None

    def cells(
        self, kind: Kind, known: Collection[str], parts: BodyParts
    ) -> dict[int, dict[str, Any]]:
        """The cells of a kind that ticks with these parts have, by number."""
        return self.table.cells(kind, known_fields(kind, known), self._ticks(parts))

    def runs(self, phase: str, parts: BodyParts) -> bool:
        """Whether any tick with these parts has an outer phase: a field of `Outer`."""
        column = getattr(self.table.outer, phase)[self._ticks(parts)]
        return not self.setup.cells_in_table or bool((column != NONE).any())

    def _ticks(self, parts: BodyParts) -> np.ndarray:
        """Marks the ticks with these parts, bool ``[ticks]``."""
        return np.asarray([one == parts for one in self.table.parts(**self.moves)])

    def numbered(self, kind: Kind, cell: Cell) -> Cell:
        """The cells of a kind with their numbers."""
        numbers = self.table.cell_numbers(kind, known_fields(kind, self.known_slots))
        return dataclasses.replace(cell, number=jnp.asarray(numbers))

    @property
    def bodies(self) -> tuple[tuple[BodyParts, ...], np.ndarray]:
        """The parts of ticks that occur, and how many ticks of each follow each other:
        `TickTable.runs`."""
        return self.table.runs(**self.moves)

    def runs_once(self, parts: BodyParts) -> bool:
        """Whether a single tick has these parts: XLA leaves out its loop."""
        return int(self._ticks(parts).sum()) == 1

    @property
    def moves(self) -> dict[str, bool]:
        """Arguments of `TickTable.runs` that say which transfers over data a step has."""
        reduces = self.gradients is not None and self.gradients.reduces(self)
        return {"gathers": self.weights.gathers, "reduces": reduces}

    def weighed(self, batch: StepMicrobatches) -> StepMicrobatches:
        """The microbatches with the scale of their losses, if these are weighted."""
        weight = self.weight
        if weight is None:
            return batch
        passes = jnp.arange(self.table.schedule.num_passes, dtype=jnp.int32)
        weights = lax.map(lambda i: weight(self.head_context(batch, i)), passes)
        return batch._replace(scale=1 / losses.divisor(lax.psum(weights.sum(), self.axes.peers)))


class WeightSource(abc.ABC):
    """A source of the weights of actions; ``held`` is what the ticks carry for it.

    Attributes:
      gathers: whether it gathers chunks, as the table says.
    """

    gathers: ClassVar[bool] = False

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        """Shapes of its buffers, by name."""
        return {}

    def with_buffers(self, held: Tree, buffers: dict[str, Arrays]) -> Tree:
        """Returns what is held, with its empty buffers."""
        return held

    def gather(self, fixed: Fixed, held: Tree, transfer: Transfer) -> Tree:
        """Gathers a chunk before layers run; returns what is held then."""
        return held

    def moving(self, fixed: Fixed) -> Shapes:
        """Shapes of what is on its way while layers run, and of what it is made from."""
        return []

    def start(self, fixed: Fixed, held: Tree, moved: Sequence[MovedPiece]) -> list[Joined]:
        """Begins to gather pieces that move while layers run."""
        raise NotImplementedError

    def finish(
        self, fixed: Fixed, held: Tree, gathered: list[Joined], moved: Sequence[MovedPiece]
    ) -> Tree:
        """Stores these pieces; returns what is held then."""
        raise NotImplementedError

    @abc.abstractmethod
    def layer(self, held: Tree, place: LayerPlace) -> list[Stored]:
        """A layer's weights as they are stored: those that are trained, then the others, if any."""

    def outer(self, fixed: Fixed, held: Tree, phase: str, value: Tree) -> tuple[OuterParams, Tree]:
        """Reads what a phase ("enter", "leave", "embed_gradient") needs of embedding and head.

        It comes with a value of the phase's loop, tied to it where a read must not be hoisted."""
        return held.outer, value


class GradientSink(abc.ABC):
    """A sink of gradients: sums them, reduces them or updates with them."""

    @abc.abstractmethod
    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        """Shapes of its buffers, by name: "gradients", the sums of layers, and what they become."""

    def reduces(self, fixed: Fixed) -> bool:
        """Whether it reduces chunks when the table says."""
        return False

    def finished(self, buffers: dict[str, Arrays]) -> Tree:
        """Makes what finished gradients have become when nothing has run; ``buffers`` of zeros."""
        return buffers.get("reduced")

    def add(self, place: LayerPlace, sums: Arrays, stored: Stored) -> Arrays:
        """Adds the gradient of a layer, for one microbatch, to the sums of the chunk in a slot."""
        return place.fixed.params.update(
            sums, place.trained_at(place.cell.gradient), widened(stored)
        )

    def add_outer(self, sums: Gradients, new: Gradients, phase: str) -> Gradients:
        """Adds a microbatch's share of a phase to the sums of embedding and head."""
        return jax.tree.map(jnp.add, sums, widened(new))

    def before_layers(
        self, fixed: Fixed, batch: Microbatches, carried: Carried, row: Row
    ) -> Carried:
        """Prepares what is carried for the layers of a tick."""
        return carried

    def chunk(self, fixed: Fixed, carried: Carried, transfer: Transfer) -> Carried:
        """Ends the layers' part of a tick: reduces the chunk whose sums leave their slot."""
        return carried

    def moving(self, fixed: Fixed) -> Shapes:
        """Shapes of what is on its way while layers run, and of what it is made from."""
        return []

    def take(
        self, fixed: Fixed, carried: Carried, moved: Sequence[MovedPiece]
    ) -> tuple[Carried, Joined]:
        """Takes the sums of pieces that are reduced while layers run."""
        raise NotImplementedError

    def start(self, fixed: Fixed, sums: Joined) -> Joined:
        """Reduces the pieces."""
        raise NotImplementedError

    def finish(
        self, fixed: Fixed, carried: Carried, reduced: Joined, moved: Sequence[MovedPiece]
    ) -> Carried:
        """Stores the reduced pieces."""
        raise NotImplementedError


class Collector(Protocol):
    """A collector of what the head returns for the microbatches."""

    def empty(self) -> Tree:
        """Makes what is collected before the first microbatch."""

    def add(self, collected: Tree, new: Tree, i: Index) -> Tree:
        """Adds what the head returns for microbatch i."""

    def result(self, collected: Tree, layer_losses: Tree) -> Tree:
        """Makes what a step returns; ``layer_losses`` are this stage's sums over layers, if any."""
