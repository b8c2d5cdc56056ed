"""Embedding and head: the parts of a tick that all stages compute together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.barriers import run_if, tie
from jaxpipe.runtime.layout.buffers import put_slot
from jaxpipe.runtime.tick.carried import Carried
from jaxpipe.runtime.tick.fixed import Fixed, Microbatches
from jaxpipe.runtime.types import Activation, Gradients, Message, Tree
from jaxpipe.schedule.lowering.table import NONE, Outer


def enter(fixed: Fixed, batch: Microbatches, carried: Carried, row: Outer) -> Carried:
    """Embeds the microbatch that enters, into the first stage's inbox."""
    here = jnp.where(fixed.stage == _stage_of(fixed, 0), row.embed_slot, NONE)

    def body(inbox: Message) -> Message:
        i, inbox = tie(row.embed, inbox)
        outer, i = fixed.weights.outer(fixed, carried.weights, "enter", row, i)
        x = fixed.embed(batch, outer, i)
        return put_slot(inbox, here, fixed.message(fixed.empty_message(), fixed.layers.first, x))

    x = run_if(row.embed != NONE, body, carried.inboxes["x"])
    return carried.but(inboxes=carried.inboxes | {"x": x})


def evaluate(
    fixed: Fixed, batch: Microbatches, carried: Carried, row: Outer, y: Message
) -> Carried:
    """Only the loss of the microbatch that leaves."""

    def body(loss: jax.Array) -> jax.Array:
        mine, loss = tie(y, loss)
        x = _from_stage(fixed, mine, -1, fixed.layers.last)
        outer, x = fixed.weights.outer(fixed, carried.weights, "leave", row, x)
        return loss + fixed.head_loss(batch, outer, x, row.head)

    return carried.but(loss=run_if(row.head != NONE, body, carried.loss))


def leave(fixed: Fixed, batch: Microbatches, carried: Carried, row: Outer, y: Message) -> Carried:
    """The loss of the microbatch that leaves, its cotangent, and the gradient of the head."""
    assert fixed.gradients is not None
    sink = fixed.gradients
    scale = 1 / (fixed.table.schedule.step_microbatches * lax.axis_size(fixed.axes.data))
    here = jnp.where(fixed.stage == _stage_of(fixed, -1), row.head_slot, NONE)

    def body(through: Tree) -> Tree:
        mine, (loss, inbox, gradients) = tie(y, through)
        x = _from_stage(fixed, mine, -1, fixed.layers.last)
        outer, x = fixed.weights.outer(fixed, carried.weights, "leave", row, x)
        value, vjp = jax.vjp(lambda outer, x: fixed.head_loss(batch, outer, x, row.head), outer, x)
        douter, dx = vjp(jnp.asarray(scale, value.dtype))
        gradients = sink.add_outer(gradients, douter, "leave", row)
        message = fixed.message(fixed.empty_message(), fixed.layers.last, dx)
        return loss + value, put_slot(inbox, here, message), gradients

    through = carried.loss, carried.inboxes["dy"], carried.outer_gradients
    loss, dy, gradients = run_if(row.head != NONE, body, through)
    inboxes = carried.inboxes | {"dy": dy}
    return carried.but(loss=loss, inboxes=inboxes, outer_gradients=gradients)


def embed_gradient(
    fixed: Fixed, batch: Microbatches, carried: Carried, row: Outer, dx: Message
) -> Carried:
    """The gradient of the embedding for the microbatch whose cotangent has come back."""
    assert fixed.gradients is not None
    sink = fixed.gradients

    def body(gradients: Gradients) -> Gradients:
        mine, gradients = tie(dx, gradients)
        cotangent = _from_stage(fixed, mine, 0, fixed.layers.first)
        outer, cotangent = fixed.weights.outer(
            fixed, carried.weights, "embed_gradient", row, cotangent
        )
        _, vjp = jax.vjp(lambda outer: fixed.embed(batch, outer, row.embed_gradient), outer)
        return sink.add_outer(gradients, vjp(cotangent)[0], "embed_gradient", row)

    gradients = run_if(row.embed_gradient != NONE, body, carried.outer_gradients)
    return carried.but(outer_gradients=gradients)


def _stage_of(fixed: Fixed, virtual_stage: int) -> int:
    return fixed.table.schedule.placement.stages[virtual_stage]


def _from_stage(fixed: Fixed, message: Message, virtual_stage: int, number: int) -> Activation:
    """The activation in one stage's message, on every stage."""
    has = fixed.stage == _stage_of(fixed, virtual_stage)
    return fixed.activation(
        [lax.psum(jnp.where(has, w, 0), fixed.axes.stage) for w in message], number
    )
