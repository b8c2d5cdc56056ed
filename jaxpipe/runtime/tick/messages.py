"""Messages: the only lines that send activations and their gradients from stage to stage.

``ppermute`` is never inside control flow that differs by stage. A late message is sent before the
tick's loops and received after them, so that on a GPU it travels while they run. What ends a tick
connects the pairs that have a message for each other and no others: which these are is a number
that all stages read from the table, so that all of them take the same branch.
"""

import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxpipe.runtime.barriers import copied, tie
from jaxpipe.runtime.layout.buffers import put_slot
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.setup import INBOX
from jaxpipe.runtime.tick.values import Carried
from jaxpipe.runtime.types import Index, Message
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import NONE, BodyParts, Edges, Row, TickTable

Inboxes: TypeAlias = dict[str, Message]


def send(message: Message, edges: Edges, axes: Axes) -> Message:
    """The message that reaches this stage when senders send theirs along the edges."""
    return [lax.ppermute(w, axes.stage, edges) for w in message]


def send_late(fixed: Fixed, parts: BodyParts, messages: dict[str, Message]) -> list[Message | None]:
    """Sends what the last tick has produced: it travels while this tick's layers run.

    XLA for GPUs has a stream for messages between two devices. On the stream of other collectives
    they would wait for what moves over data in the same tick, or it for them. In a body that runs
    once, XLA would then make room for what is reduced at the start of the step.
    """
    shares = parts.reduce and fixed.runs_once(parts)
    arriving: dict[tuple[str, Edges], Message] = {}
    travels = [
        (fixed.outbox(c.kind), c.late_edges) if c.late_edges and parts.has(c.kind) else None
        for c in fixed.table.channels
    ]
    sent = {name: [copied(w, fixed.stage) for w in message] for name, message in messages.items()}
    with set_xla_metadata(**({} if shares else {"_xla_gpu_collective_stream": "p2p"})):
        for name, edges in filter(None, dict.fromkeys(travels)):
            if name in messages:
                arriving[name, edges] = send(sent[name], edges, fixed.axes)
    return [arriving.get(one) if one else None for one in travels]


class _Arrival(NamedTuple):
    """A message that may have come: its place among all, its inbox, and its slot, `NONE` if not."""

    place: str
    inbox: str
    slot: Index
    message: Message


def _receive(inboxes: Inboxes, arrivals: list[_Arrival]) -> Inboxes:
    """Writes messages that have come into their slots, each in a loop of one trip or none."""

    def put(through: tuple[Index, Message], message: Message) -> tuple[Index, Message]:
        slot, inbox = through
        return jnp.full_like(slot, NONE), put_slot(inbox, slot, message)

    for place, name, slot, message in arrivals:
        with jax.named_scope(f"receive{place}"):
            _, inbox = lax.while_loop(
                lambda through: through[0] != NONE,
                functools.partial(put, message=message),
                (slot, inboxes[name]),
            )
        inboxes = inboxes | {name: inbox}
    return inboxes


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
    arrivals = list[_Arrival]()
    for number, (channel, late) in enumerate(zip(table.channels, arriving, strict=True)):
        if channel.kind not in outputs:
            continue
        name, slots = INBOX[channel.kind], row.arrivals[number]
        if channel.local:
            arrivals.append(_Arrival(f"{2 * number}", name, slots.slot, outputs[channel.kind]))
        if late is not None:
            arrivals.append(_Arrival(f"{2 * number + 1}", name, slots.late_slot, late))
    ready, inboxes = tie(outputs, _receive(carried.inboxes, arrivals))
    received, zero = _exchanged(table, row.exchange, ready, axes)
    arrivals = []
    for numbers, message in received:
        places = "_".join(str(2 * number) for number in numbers)
        slot = functools.reduce(jnp.maximum, [row.arrivals[number].slot for number in numbers])
        name = INBOX[table.channels[numbers[0]].kind]
        arrivals.append(_Arrival(places, name, slot + zero, message))
    return carried.but(inboxes=_receive(inboxes, arrivals))


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
            arriving(one, message) if one else [lax.empty(w.shape, w.dtype) for w in message]
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
