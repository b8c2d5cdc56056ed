"""Messages: the only lines that move data between stages.

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

from jaxpipe.runtime.barriers import tie
from jaxpipe.runtime.layout.buffers import put_slot
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.tick.fixed import Carried
from jaxpipe.runtime.types import Index, Message
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import BodyParts, Edges, Row, TickTable

Inboxes: TypeAlias = dict[str, Message]

INBOX = {Kind.F: "x", Kind.R: "x", Kind.B: "dy", Kind.BW: "dy"}
"""The buffer in which the input of an action waits, by its kind."""


def send(message: Message, edges: Edges, axes: Axes) -> Message:
    """The message that reaches this stage when senders send theirs along the edges."""
    return [lax.ppermute(w, axes.stage, edges) for w in message]


def send_late(
    table: TickTable, parts: BodyParts, sent: dict[Kind, Message], axes: Axes
) -> list[Message | None]:
    """Sends what the last tick has produced: it travels while this tick's layers run."""
    return [
        send(sent[c.kind], c.late_edges, axes) if c.late_edges and parts.has(c.kind) else None
        for c in table.channels
    ]


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

    def receive(inboxes: Inboxes, kind: Kind, slot: Index, message: Message) -> Inboxes:
        name = INBOX[kind]
        return inboxes | {name: put_slot(inboxes[name], slot, message)}

    inboxes, late = carried.inboxes, carried.sent.keys() & outputs.keys()
    for channel, arrival, message in zip(table.channels, row.arrivals, arriving, strict=True):
        if channel.kind not in outputs:
            continue
        if channel.local:
            inboxes = receive(inboxes, channel.kind, arrival.slot, outputs[channel.kind])
        if message is not None:
            inboxes = receive(inboxes, channel.kind, arrival.late_slot, message)
    ready, inboxes = tie(outputs, inboxes)
    received, zero = _exchanged(table, row.exchange, ready, axes)
    for number, message in received.items():
        kind, slot = table.channels[number].kind, row.arrivals[number].slot + zero
        inboxes = receive(inboxes, kind, slot, message)
    return carried.but(inboxes=inboxes, sent=carried.sent | {k: outputs[k] for k in late})


def _exchanged(
    table: TickTable, exchange: Index, outputs: dict[Kind, Message], axes: Axes
) -> tuple[dict[int, Message], Index]:
    """Exchanges; returns what this stage receives, by the number of the channel, and zero.

    Messages alone pass through the branches: XLA copies whatever does. Zero is computed in them,
    because XLA for GPUs starts a message only when the one before has arrived, in a branch that has
    nothing else to do.
    """
    used = [
        number
        for number, channel in enumerate(table.channels)
        if channel.kind in outputs and any(pairs[number] for pairs in table.exchanges)
    ]
    sent = [outputs[table.channels[number].kind] for number in used]

    def branch(edges: tuple[Edges, ...], sent: list[Message]) -> tuple[list[Message], jax.Array]:
        received = [
            send(message, pairs, axes) if pairs else jax.tree.map(jnp.zeros_like, message)
            for message, pairs in zip(sent, edges, strict=True)
        ]
        return received, jnp.zeros(1, jnp.int32)

    of_exchange = [tuple(pairs[number] for number in used) for pairs in table.exchanges]
    distinct = list(dict.fromkeys(of_exchange))
    branches = [functools.partial(branch, edges) for edges in distinct]
    if len(branches) == 1:
        received, zero = branches[0](sent)
    else:
        chosen = jnp.asarray([distinct.index(edges) for edges in of_exchange], jnp.int32)[exchange]
        received, zero = lax.switch(chosen, branches, sent)
    return dict(zip(used, received, strict=True)), zero[0]
