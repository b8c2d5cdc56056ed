"""Values that a tick hands to the next."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxpipe.runtime.types import Arrays, Gradients, Message, States, Tree
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import Cell

jax.tree_util.register_dataclass(Cell)  # here, since the schedule layer knows no jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carried:
    """Values that the loop over ticks carries on one device.

    Args:
      weights: what the weights' source holds.
      inboxes: messages that wait for their reader, by name: x for F, dy for the backward.
      residuals: what layers leave behind, by name: until_b, until_w, crossing.
      sent: messages that the last tick has produced and that travel in the next, by kind.
      gradients: the gradient sums of layers; nothing in an evaluation.
      outer_gradients: those of embedding and head, which all stages compute alike.
      shared_gradients: this stage's share of those of what its layers share; None for nothing.
      finished: what finished gradients have become, or what else their sink carries.
      collected: what the head has returned: sums of loss and metrics, or outputs.
      layer_losses: the sums of the losses and metrics of this stage's layers; None if no layer has
        a loss.
      states: the layers' states.
      input_gradients: of the batch's arrays whose gradients are wanted, ``[rows, m, ...]``.
    """

    weights: Any
    inboxes: dict[str, Message]
    residuals: dict[str, list[jax.Array]]
    sent: dict[Kind, Message]
    gradients: Arrays
    outer_gradients: Gradients
    shared_gradients: Gradients
    finished: Any
    collected: Tree
    layer_losses: Tree
    states: States
    input_gradients: list[jax.Array]

    def but(self, **changes: Any) -> Carried:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)
