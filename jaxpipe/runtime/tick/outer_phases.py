"""Embedding and head of a tick: all stages compute them together, or the ends of the pipeline do.

Together, they need sums over all stages, in which every stage waits for the slowest. Otherwise the
stage of the first virtual stage embeds, and that of the last one computes the head, from what lies
on them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.barriers import run_if, tie
from jaxpipe.runtime.layers.losses import differentiated
from jaxpipe.runtime.layout.buffers import at_slot, put_slot
from jaxpipe.runtime.tick.carried import Carried
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.inputs import WithInputs, add_gradients, inputs_of
from jaxpipe.runtime.tick.microbatches import Microbatches
from jaxpipe.runtime.trees import combine
from jaxpipe.runtime.types import Activation, Index, Message, OuterParams, Tree
from jaxpipe.schedule.lowering.table import NONE, Outer


@jax.named_scope("enter")
def enter(fixed: Fixed, batch: Microbatches, carried: Carried, row: Outer) -> Carried:
    """Embeds the microbatch that enters, into the first stage's inbox."""
    is_first = _is_at(fixed, 0)
    here = jnp.where(is_first, row.embed_slot, NONE)

    def body(inbox: Message) -> Message:
        i, inbox = tie(row.embed, inbox)
        outer, i = fixed.weights.outer(fixed, carried.weights, "enter", i)
        x = fixed.embed(batch, outer, i)
        return put_slot(inbox, here, fixed.message(fixed.empty_message(), fixed.layers.first, x))

    runs = _runs(fixed, row.embed != NONE, is_first)
    x = run_if(runs, body, carried.inboxes["x"])
    return carried.but(inboxes=carried.inboxes | {"x": x})


@jax.named_scope("leave")
def evaluate(
    fixed: Fixed, batch: Microbatches, carried: Carried, row: Outer, y: Message
) -> Carried:
    """Only the loss, or the output, of the microbatch that leaves."""

    def body(collected: Tree) -> Tree:
        mine, collected = tie(y, collected)
        x = _from_stage(fixed, mine, -1, fixed.layers.last)
        outer, x = fixed.weights.outer(fixed, carried.weights, "leave", x)
        return fixed.collector.add(collected, fixed.head(batch, outer, x, row.head), row.head)

    runs = _runs(fixed, row.head != NONE, _is_at(fixed, -1))
    return carried.but(collected=run_if(runs, body, carried.collected))


@jax.named_scope("leave")
def leave(fixed: Fixed, batch: Microbatches, carried: Carried, row: Outer, y: Message) -> Carried:
    """The loss of the microbatch that leaves, its cotangent, and the gradient of the head."""
    assert fixed.gradients is not None
    sink, inputs = fixed.gradients, fixed.setup.inputs
    is_last = _is_at(fixed, -1)
    here = jnp.where(is_last, row.head_slot, NONE)

    def body(through: Tree) -> Tree:
        mine, (collected, inbox, gradients, of_inputs) = tie(y, through)
        x = _from_stage(fixed, mine, -1, fixed.layers.last)
        outer, x = fixed.weights.outer(fixed, carried.weights, "leave", x)

        outer, constant = fixed.divided(outer)

        def loss(
            outer: OuterParams, x: Activation, values: list[jax.Array]
        ) -> tuple[jax.Array, Tree]:
            outer = combine(outer, constant)
            result = fixed.head(WithInputs(batch, inputs, values), outer, x, row.head)
            return differentiated(result), result

        # A sum over devices of a constant cotangent would run before the loop, beside those in it.
        scale, x = tie(fixed.loss_scale(batch, row.head), x)
        values = inputs_of(batch, inputs, row.head)
        value, vjp, result = jax.vjp(loss, outer, x, values, has_aux=True)
        douter, dx, new = vjp(jnp.asarray(scale, value.dtype))
        gradients = sink.add_outer(gradients, douter, "leave")
        of_inputs = add_gradients(of_inputs, new, row.head)
        message = fixed.message(fixed.empty_message(), fixed.layers.last, dx)
        collected = fixed.collector.add(collected, result, row.head)
        return collected, put_slot(inbox, here, message), gradients, of_inputs

    sums = carried.outer_gradients, carried.input_gradients
    through = carried.collected, carried.inboxes["dy"], *sums
    runs = _runs(fixed, row.head != NONE, is_last)
    collected, dy, gradients, of_inputs = run_if(runs, body, through)
    return carried.but(
        collected=collected,
        inboxes=carried.inboxes | {"dy": dy},
        outer_gradients=gradients,
        input_gradients=of_inputs,
    )


@jax.named_scope("embed_gradient")
def embed_gradient(
    fixed: Fixed, batch: Microbatches, carried: Carried, row: Outer, dx: Message
) -> Carried:
    """The gradient of the embedding for microbatches whose cotangents have come back, in this tick
    or, waiting in the first stage's inbox, in one before."""
    assert fixed.gradients is not None
    sink, inputs, inbox = fixed.gradients, fixed.setup.inputs, carried.inboxes["dy"]

    def one(k: Index, through: Tree) -> Tree:
        i, slot = row.embed_gradient[k], row.embed_gradient_slot[k]
        mine, (gradients, of_inputs) = tie(dx, through)
        if fixed.table.cotangents_wait:
            kept = at_slot(inbox, jnp.maximum(slot, 0))
            mine = [jnp.where(slot == NONE, *pair) for pair in zip(mine, kept, strict=True)]
        cotangent = _from_stage(fixed, mine, 0, fixed.layers.first)
        outer, cotangent = fixed.weights.outer(fixed, carried.weights, "embed_gradient", cotangent)

        outer, constant = fixed.divided(outer)

        def embed(outer: OuterParams, values: list[jax.Array]) -> Activation:
            return fixed.embed(WithInputs(batch, inputs, values), combine(outer, constant), i)

        _, vjp = jax.vjp(embed, outer, inputs_of(batch, inputs, i))
        douter, new = vjp(cotangent)
        gradients = sink.add_outer(gradients, douter, "embed_gradient")
        return gradients, add_gradients(of_inputs, new, i)

    through = carried.outer_gradients, carried.input_gradients
    count = (row.embed_gradient != NONE).sum(dtype=jnp.int32)
    count = count * _runs(fixed, count > 0, _is_at(fixed, 0))
    gradients, of_inputs = lax.fori_loop(0, count, one, through)
    return carried.but(outer_gradients=gradients, input_gradients=of_inputs)


def _is_at(fixed: Fixed, virtual_stage: int) -> Index:
    """Whether this device's stage holds a virtual stage."""
    return fixed.stage == fixed.table.schedule.placement.stages[virtual_stage]


def _runs(fixed: Fixed, due: Index, is_mine: Index) -> Index:
    """Whether this stage computes what is due."""
    return due if fixed.table.together else due & is_mine


def _from_stage(fixed: Fixed, message: Message, virtual_stage: int, number: int) -> Activation:
    """The activation in one stage's message: on every stage, if all compute with it."""
    if fixed.table.together:
        has = _is_at(fixed, virtual_stage)
        message = [lax.psum(jnp.where(has, w, 0), fixed.axes.stage) for w in message]
    return fixed.activation(message, number)
