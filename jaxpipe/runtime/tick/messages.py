"""Messages: the only lines that move data between stages.

``ppermute`` is never inside control flow that differs by stage: its rendezvous spans all devices. A
late message is sent before the tick's loops and received after them, so that on a GPU it travels
while they run.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
from jax import lax

from jaxpipe.runtime.barriers import tie
from jaxpipe.runtime.layout.buffers import put_slot
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.tick.carried import Carried
from jaxpipe.runtime.types import Index, Message
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import Channel, Parts, Row, TickTable

Inboxes: TypeAlias = dict[str, Message]

INBOX = {Kind.F: "x", Kind.B: "dy", Kind.BW: "dy"}
"""The buffer in which the input of an action waits, by its kind."""


def send(message: Message, channel: Channel, axes: Axes) -> Message:
    """The message that reaches this stage when every stage sends its own."""
    return [lax.ppermute(w, axes.stage, channel.edges) for w in message]


def send_late(
    table: TickTable, parts: Parts, sent: dict[Kind, Message], axes: Axes
) -> list[Message | None]:
    """Sends what the last tick has produced: it travels while this tick's layers run.

    What R has produced is read by this tick's R, which waits for it.
    """
    return [
        send(sent[c.kind], c, axes) if c.late and parts.has(c.kind) else None
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
    channels = [
        through
        for through in zip(table.channels, row.arrivals, arriving, strict=True)
        if through[0].kind in outputs
    ]

    def receive(inboxes: Inboxes, channel: Channel, slot: Index, message: Message) -> Inboxes:
        name = INBOX[channel.kind]
        return inboxes | {name: put_slot(inboxes[name], slot, message)}

    def meet(_: Index, inboxes: Inboxes) -> Inboxes:
        ready, inboxes = tie(outputs, inboxes)
        for channel, arrival, _ in channels:
            if not channel.local:
                message = send(ready[channel.kind], channel, axes)
                inboxes = receive(inboxes, channel, arrival.slot, message)
        return inboxes

    inboxes, late = carried.inboxes, carried.sent.keys() & outputs.keys()
    for channel, arrival, message in channels:
        if channel.local:
            inboxes = receive(inboxes, channel, arrival.slot, outputs[channel.kind])
        if message is not None:
            inboxes = receive(inboxes, channel, arrival.late_slot, message)
    # All stages meet or none: the trip count is the same on every device.
    skips = not table.meets.all()
    inboxes = lax.fori_loop(0, row.meets, meet, inboxes) if skips else meet(0, inboxes)
    return carried.but(inboxes=inboxes, sent=carried.sent | {k: outputs[k] for k in late})
