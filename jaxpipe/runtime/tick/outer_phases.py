"""Embedding and head: the parts of a tick that all stages compute together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.barriers import run_if, tie
from jaxpipe.runtime.layers.losses import differentiated
from jaxpipe.runtime.layout.buffers import put_slot
from jaxpipe.runtime.mesh import STAGE
from jaxpipe.runtime.tick.carried import Carried
from jaxpipe.runtime.tick.fixed import Fixed, Microbatches
from jaxpipe.runtime.types import Activation, Gradients, Message, OuterParams, Tree
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
    """Only the loss, or the output, of the microbatch that leaves."""

    def body(collected: Tree) -> Tree:
        mine, collected = tie(y, collected)
        x = _from_stage(fixed, mine, -1, fixed.layers.last)
        outer, x = fixed.weights.outer(fixed, carried.weights, "leave", row, x)
        return fixed.collector.add(collected, fixed.head(batch, outer, x, row.head), row.head)

    return carried.but(collected=run_if(row.head != NONE, body, carried.collected))


def leave(fixed: Fixed, batch: Microbatches, carried: Carried, row: Outer, y: Message) -> Carried:
    """The loss of the microbatch that leaves, its cotangent, and the gradient of the head."""
    assert fixed.gradients is not None
    sink = fixed.gradients
    here = jnp.where(fixed.stage == _stage_of(fixed, -1), row.head_slot, NONE)

    def body(through: Tree) -> Tree:
        mine, (collected, inbox, gradients) = tie(y, through)
        x = _from_stage(fixed, mine, -1, fixed.layers.last)
        outer, x = fixed.weights.outer(fixed, carried.weights, "leave", row, x)

        def loss(outer: OuterParams, x: Activation) -> tuple[jax.Array, Tree]:
            result = fixed.head(batch, outer, x, row.head)
            return differentiated(result), result

        value, vjp, result = jax.vjp(loss, outer, x, has_aux=True)
        douter, dx = vjp(jnp.asarray(fixed.loss_scale(batch, row.head), value.dtype))
        gradients = sink.add_outer(gradients, douter, "leave", row)
        message = fixed.message(fixed.empty_message(), fixed.layers.last, dx)
        collected = fixed.collector.add(collected, result, row.head)
        return collected, put_slot(inbox, here, message), gradients

    through = carried.collected, carried.inboxes["dy"], carried.outer_gradients
    collected, dy, gradients = run_if(row.head != NONE, body, through)
    inboxes = carried.inboxes | {"dy": dy}
    return carried.but(collected=collected, inboxes=inboxes, outer_gradients=gradients)


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
    return fixed.activation([lax.psum(jnp.where(has, w, 0), STAGE) for w in message], number)
