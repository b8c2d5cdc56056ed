"""What a tick hands to the next."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import Cell

PyTree = Any

jax.tree_util.register_dataclass(Cell)  # here, since the schedule layer knows no jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carried:
    """What the loop over ticks carries on one device.

    Args:
      weights: what the weights' source holds.
      inboxes: messages that wait for their reader, by name: x for F, dy for the backward.
      residuals: what layers leave behind, by name: until_b, until_w, crossing.
      sent: messages that were put out in the last tick and travel in the next, by kind.
      replay: what F keeps for its recomputation, by name: inputs of segments, and the states that
        layers have read.
      gradients: the gradient sums of layers; nothing in an evaluation.
      outer_gradients: those of embedding and head.
      finished: what finished gradients have become.
      loss: the sum over microbatches, float32.
      states: the layers' states.
    """

    weights: PyTree
    inboxes: dict[str, list]
    residuals: dict[str, list]
    sent: dict[Kind, list]
    replay: dict[str, PyTree]
    gradients: PyTree
    outer_gradients: PyTree
    finished: PyTree
    loss: jax.Array
    states: PyTree

    def but(self, **changes: Any) -> Carried:
        """The same but for these fields."""
        return dataclasses.replace(self, **changes)
