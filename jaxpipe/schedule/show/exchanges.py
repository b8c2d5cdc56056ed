"""Messages between the stages of a timeline, in time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from jaxpipe.schedule.actions import Action, Kind
from jaxpipe.schedule.check.walk import Results
from jaxpipe.schedule.simulate import TimedAction, Timeline


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


def exchanges(timeline: Timeline) -> list[Exchange]:
    """Finds the messages of a timeline, by time of arrival.

    Example:
      >>> from jaxpipe.schedule.generators.breadth_first import gpipe
      >>> from jaxpipe.schedule.device_clock import device_clock
      >>> from jaxpipe.schedule.simulate import Costs
      >>> messages = exchanges(device_clock(gpipe(2, 1), Costs(1, 1, 1)))
      >>> [(str(message.action), message.arrives) for message in messages]
      [('0F0', 1.0), ('1B0', 3.0)]
    """
    return sorted(_messages(timeline), key=lambda message: message.arrives)


def _messages(timeline: Timeline) -> Iterator[Exchange]:
    """Yields every result that another stage reads. Results are found by their number (`Results`),
    which a fused backward shares with the B it stands for; nothing reads W's."""
    results = Results(timeline.schedule)
    finished = _finished(timeline, results)
    for stage, row in enumerate(timeline.rows):
        for timed in row:
            for needed in results.inputs(timed.action):
                if (sender := results.stage(needed)) == stage:
                    continue
                source = finished[needed]
                if source.tick is None or timed.tick is None:
                    late = False
                    arrives = source.end + timeline.costs[source.action.virtual_stage].message
                else:
                    late = timed.tick > source.tick + 1
                    # A late message travels under the layers of the tick after its sender's.
                    arrival_tick = source.tick + (2 if late else 1)
                    arrives = timeline.ticks[arrival_tick][stage]
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


def _finished(timeline: Timeline, results: Results) -> dict[int, TimedAction]:
    """Timed actions by the number of their result; each ends when its result is there."""
    finished = {}
    for row in timeline.rows:
        for k, timed in enumerate(row):
            # An overlapped pair gives both results when it ends.
            last = row[k + 1] if timed.action in timeline.schedule.overlapped else timed
            if timed.action.kind is not Kind.W:
                number = results.number(timed.action)
                finished[number] = dataclasses.replace(timed, end=last.end)
    return finished
