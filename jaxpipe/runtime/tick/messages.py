"""Messages: the only lines that send activations and their gradients from stage to stage.

``ppermute`` is never inside control flow that differs by stage. A late message is sent before the
tick's loops and received after them, so that on a GPU it travels while they run. What ends a tick
connects the pairs that have a message for each other and no others: which these are is a number
that all stages read from the table, so that all of them take the same branch.
"""

import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxpipe.runtime.barriers import tie
from jaxpipe.runtime.layout.buffers import put_slot
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.tick.fixed import Carried, Fixed
from jaxpipe.runtime.types import Index, Message
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import NONE, BodyParts, Edges, Row, TickTable

Inboxes: TypeAlias = dict[str, Message]

INBOX = {Kind.F: "x", Kind.R: "x", Kind.B: "dy", Kind.BW: "dy"}
"""The buffer in which the input of an action waits, by its kind."""


def send(message: Message, edges: Edges, axes: Axes) -> Message:
    """The message that reaches this stage when senders send theirs along the edges."""
    return [lax.ppermute(w, axes.stage, edges) for w in message]


def send_late(fixed: Fixed, parts: BodyParts, sent: dict[Kind, Message]) -> list[Message | None]:
    """Sends what the last tick has produced: it travels while this tick's layers run.

    XLA for GPUs has a stream for messages between two devices. On the stream of other collectives
    they would wait for what moves over data in the same tick, or it for them. In a body that runs
    once, XLA would then make room for what is reduced at the start of the step.
    """
    shares = parts.reduce and fixed.runs_once(parts)
    with set_xla_metadata(**({} if shares else {"_xla_gpu_collective_stream": "p2p"})):
        return [
            send(sent[c.kind], c.late_edges, fixed.axes)
            if c.late_edges and c.kind in sent and parts.has(c.kind)
            else None
            for c in fixed.table.channels
        ]


def _receive(
    slots: jax.Array, place: int, inboxes: Inboxes, name: str, message: Message
) -> tuple[jax.Array, Inboxes]:
    """Writes a message into the slot at this place, which is `NONE` then, or leaves the inboxes as
    they are: a loop of one trip or none."""

    def put(through: tuple[jax.Array, Message]) -> tuple[jax.Array, Message]:
        slots, inbox = through
        ended = lax.dynamic_update_index_in_dim(slots, jnp.int32(NONE), jnp.int32(place), 0)
        return ended, put_slot(inbox, slots[place], message)

    with jax.named_scope(f"receive{place}"):
        slots, inbox = lax.while_loop(
            lambda through: through[0][place] != NONE, put, (slots, inboxes[name])
        )
    return slots, inboxes | {name: inbox}


@jax.named_scope("meet")
def exchange(
    table: TickTable,
    carried: Carried,
    row: Row,
    outputs: dict[Kind, Message],
    arriving: list[Message | None],
    axes: Axes,
) -> Carried:
    """The end of a tick: sends ``outputs``, and receives them and what `send_late` has sent.

    What has no output in this tick's body has no message, either.
    """

    slots = jnp.asarray([slot for arrival in row.arrivals for slot in arrival], jnp.int32)
    inboxes, late = carried.inboxes, carried.sent.keys() & outputs.keys()
    for number, (channel, message) in enumerate(zip(table.channels, arriving, strict=True)):
        if channel.kind not in outputs:
            continue
        name, place = INBOX[channel.kind], 2 * number
        if channel.local:
            slots, inboxes = _receive(slots, place, inboxes, name, outputs[channel.kind])
        if message is not None:
            slots, inboxes = _receive(slots, place + 1, inboxes, name, message)
    ready, inboxes = tie(outputs, inboxes)
    received, zero = _exchanged(table, row.exchange, ready, axes)
    slots = slots + zero
    for numbers, message in received:
        name = INBOX[table.channels[numbers[0]].kind]
        for number in numbers:
            slots, inboxes = _receive(slots, 2 * number, inboxes, name, message)
    return carried.but(inboxes=inboxes, sent=carried.sent | {k: outputs[k] for k in late})


def _exchanged(
    table: TickTable, exchange: Index, outputs: dict[Kind, Message], axes: Axes
) -> tuple[list[tuple[list[int], Message]], Index]:
    """Exchanges; returns what this stage receives, with the channels that bring it, and zero.

    Messages alone pass through the branches: XLA copies whatever does. Zero is computed in them,
    because XLA for GPUs starts a message only when the one before has arrived, in a branch that has
    nothing else to do.
    """
    used, distinct, numbers = table.branches(outputs)
    sent = [outputs[table.channels[numbers[0]].kind] for numbers in used]

    def arriving(permutations: tuple[Edges, ...], message: Message) -> Message:
        # Where a permutation brings nothing, it brings zeros.
        brought = [send(message, pairs, axes) for pairs in permutations]
        return [sum(arrays[1:], arrays[0]) for arrays in zip(*brought, strict=True)]

    def branch(
        of_lists: tuple[tuple[Edges, ...], ...], sent: list[Message]
    ) -> tuple[list[Message], jax.Array]:
        received = [
            arriving(one, message) if one else jax.tree.map(jnp.zeros_like, message)
            for message, one in zip(sent, of_lists, strict=True)
        ]
        return received, jnp.zeros(1, jnp.int32)

    branches = [functools.partial(branch, edges) for edges in distinct]
    if len(branches) == 1:
        received, zero = branches[0](sent)
    else:
        chosen = jnp.asarray(numbers, jnp.int32)[exchange]
        received, zero = lax.switch(chosen, branches, sent)
    return list(zip(used, received, strict=True)), zero[0]
