"""Layered gradient accumulation: the optimizer updates each chunk within the step.

Where a schedule finishes all microbatches of a chunk before it goes on to the next one, the chunk's
gradient is complete while other chunks still run backward. It is reduced and updates the chunk's
weights at once, so that only the gradients of chunks in work are kept: one, or one per slot.
`docs/design/004-optimizers.md` says when this pays.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.runtime.barriers import after
from jaxpipe.runtime.layout.data_axis import reduce_gradients
from jaxpipe.runtime.layout.whole_model import outer_of
from jaxpipe.runtime.tick.fixed import Carried, Fixed, GradientSink
from jaxpipe.runtime.tick.gradients import reduced_outer
from jaxpipe.runtime.trees import rounded
from jaxpipe.runtime.types import (
    Arrays,
    Index,
    OptimizerState,
    OuterParams,
    Placed,
    Shapes,
    Stored,
    Tree,
)
from jaxpipe.runtime.update.optimizer import PlacedOptimizer
from jaxpipe.runtime.update.per_unit import with_stages, without_stages
from jaxpipe.schedule.lowering.table import NONE, Transfer


class Updating(NamedTuple):
    """Values that a step which updates its weights carries beside them.

    Args:
      layers: the layers' part of the components of the optimizer's state.
      others: the components, without it.
      rest: what the state holds beside components.
      outer: embedding and head.
    """

    layers: list[Arrays]
    others: list[OuterParams]
    rest: list[Tree]
    outer: OuterParams


class Applied(GradientSink):
    """A finished gradient is reduced and updates its chunk's weights at once."""

    def __init__(self, optimizer: PlacedOptimizer) -> None:
        self._optimizer = optimizer

    def begin(self, placed: Placed, state: OptimizerState) -> Updating:
        """Makes what is carried when the step begins."""
        components, rest = self._optimizer.state.split(state)
        layers = [without_stages(component)["layers"] for component in components]
        return Updating(layers, list(map(outer_of, components)), rest, outer_of(placed))

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        return {"gradients": fixed.params.sum_shapes(fixed.table.reduces.num_slots)}

    def reduces(self, fixed: Fixed) -> bool:
        return True

    def chunk(self, fixed: Fixed, carried: Carried, transfer: Transfer) -> Carried:
        """Updates a chunk whose gradient is complete; nothing reads it again."""
        params, updating = fixed.params, carried.finished
        step, zero = self._optimizer.step, fixed.setup.options.zero
        shared = step.share(updating.rest)

        def body(
            chunk: Index, layer: Index, sums: Arrays, kept: list[Arrays]
        ) -> tuple[Arrays, list[Arrays]]:
            at = fixed.stage, chunk, layer

            def gradient(example: int) -> Stored:
                place = params.layer_at(at, example, slot=transfer.slot)
                leaves = params.leaves_of(example)
                total = params.read(sums, place)
                return rounded(reduce_gradients(total, leaves, fixed.axes, zero=zero), leaves)

            return sums, step.layer(at, gradient, kept, shared)

        last = jnp.where(transfer.chunk == NONE, 0, fixed.table.layers_per_chunk)
        (trained, *frozen), layers = carried.weights.layers, updating.layers
        kept = [trained, *layers]
        sums, (weights, *layers) = params.loop(
            (transfer.chunk, 0, last), body, carried.gradients, kept
        )

        # The sums are cleared after what reads them, or XLA copies them.
        transfer = after((weights, *layers), transfer, fixed.stage)

        def clear(chunk: Index, number: Index, sums: Arrays) -> Arrays:
            place = params.piece_at((fixed.stage, chunk, number), slot=transfer.slot)
            return params.write(sums, place, jax.tree.map(jnp.zeros_like, params.read(sums, place)))

        return carried.but(
            gradients=params.loop_pieces(transfer.chunk, clear, sums),
            weights=carried.weights._replace(layers=[weights, *frozen]),
            finished=updating._replace(layers=layers),
        )

    def result(self, fixed: Fixed, carried: Carried) -> tuple[Placed, OptimizerState]:
        """This device's part of the new parameters and optimizer state."""
        updating, step = carried.finished, self._optimizer.step
        shared = step.share(updating.rest)
        given = [reduced_outer(fixed, carried), updating.outer, *updating.others]
        layers = [carried.weights.layers[0], *updating.layers]
        new = list(map(with_stages, step.with_outer(layers, given, shared)))
        return new[0], self._optimizer.state.join(new[1:], step.rest(shared))
