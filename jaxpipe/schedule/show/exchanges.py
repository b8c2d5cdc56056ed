"""Messages between the stages of a timeline, and their transfers over the data axis, in time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from jaxpipe.schedule.actions import Action, Kind
from jaxpipe.schedule.check.validate import simulated_only
from jaxpipe.schedule.check.walk import Results
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.lowering.table import NONE, TickTable, Transfers
from jaxpipe.schedule.simulate import Timeline


class Exchange(NamedTuple):
    """A result on its way from one stage to another.

    Args:
      action: the action whose result it is; B if that is a fused backward.
      reader: the action that it is for.
      sender, receiver: stages.
      sent: when the action ends.
      arrives: when the receiver may read it: on the clocks that have ticks, at the start of one.
      read: when its reader starts.
      tick: tick in which it is sent; None on the free-running clock.
      late: whether it travels under the layers of the tick after the one that sends it.
    """

    action: Action
    reader: Action
    sender: int
    receiver: int
    sent: float
    arrives: float
    read: float
    tick: int | None
    late: bool


class Move(NamedTuple):
    """A chunk's weights gathered over data before a tick's layers, or its gradient reduced after
    them, as ZeRO-3 does with one slot of each."""

    what: str
    stage: int
    chunk: int
    tick: int
    time: float


class Exchanges(NamedTuple):
    """Messages by time of arrival, and moves; without ticks there are no moves."""

    messages: tuple[Exchange, ...]
    moves: tuple[Move, ...]


def exchanges(timeline: Timeline) -> Exchanges:
    """Finds the messages of a timeline, and what its ticks gather and reduce.

    Example:
      >>> from jaxpipe.schedule.generators.gpipe import gpipe
      >>> from jaxpipe.schedule.device_clock import device_clock
      >>> from jaxpipe.schedule.simulate import Costs
      >>> found = exchanges(device_clock(gpipe(2, 1), Costs(1, 1, 1)))
      >>> [(str(message.action), message.arrives) for message in found.messages]
      [('0F0', 1.0), ('1B0', 3.0)]
      >>> [(move.what, move.stage, move.time) for move in found.moves]
      [('gather', 0, 0.0), ('gather', 1, 1.0), ('reduce', 1, 4.0), ('reduce', 0, 5.0)]
    """
    schedule, table = timeline.schedule, None
    if timeline.ticks and not any(simulated_only(schedule)):
        table = lower(schedule, [1] * len(timeline.costs))
    messages = sorted(_messages(timeline), key=lambda message: message.arrives)
    moves = [] if table is None else [*_moves(timeline, table)]
    return Exchanges(tuple(messages), tuple(sorted(moves, key=lambda move: move.time)))


def _messages(timeline: Timeline) -> Iterator[Exchange]:
    results = Results(timeline.schedule)
    done = {
        results.number(timed.action): timed
        for row in timeline.rows
        for timed in row
        if timed.action.kind is not Kind.W
    }
    if timeline.schedule.overlapped:
        # A pair gives both results when it ends.
        for row in timeline.rows:
            for forward, backward in itertools.pairwise(row):
                if forward.action in timeline.schedule.overlapped:
                    both = dataclasses.replace(forward, end=backward.end)
                    done[results.number(forward.action)] = both
    for stage, row in enumerate(timeline.rows):
        for timed in row:
            for needed in results.inputs(timed.action):
                if (sender := results.stage(needed)) == stage:
                    continue
                source = done[needed]
                if source.tick is None or timed.tick is None:
                    cost, late = timeline.costs[source.action.virtual_stage], False
                    arrives = source.end + cost.message
                else:
                    late = timed.tick > source.tick + 1
                    arrives = timeline.ticks[source.tick + 1 + late][stage]
                yield Exchange(
                    results.action(needed),
                    timed.action,
                    sender,
                    stage,
                    sent=source.end,
                    arrives=arrives,
                    read=timed.start,
                    tick=source.tick,
                    late=late,
                )


def _moves(timeline: Timeline, table: TickTable) -> Iterator[Move]:
    spans: dict[tuple[int, int | None], tuple[float, float]] = {}
    for stage, row in enumerate(timeline.rows):
        for part in row:
            start, _ = spans.get((stage, part.tick), (part.start, part.end))
            spans[stage, part.tick] = start, part.end

    def moves_of(what: str, transfers: Transfers) -> Iterator[Move]:
        for tick, stage in itertools.product(*map(range, transfers.chunk.shape)):
            if (chunk := int(transfers.chunk[tick, stage])) == NONE:
                continue
            start, end = spans[stage, tick]
            yield Move(what, stage, chunk, tick, start if what == "gather" else end)

    yield from moves_of("gather", table.gathers)
    yield from moves_of("reduce", table.reduces)
