"""Filling the gaps of a schedule, within its peak in flight."""

from __future__ import annotations

import dataclasses

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.check.validate import peak_in_flight
from jaxpipe.schedule.check.walk import Results, walk
from jaxpipe.schedule.simulate import Costs, simulate

HELD = {Kind.F: 1, Kind.B: 0, Kind.W: -1, Kind.BW: -1}
"""Chunks in flight that an action adds. A chunk's activations are kept from F until W or BW."""
ROUNDING = 1e-9
"""The share of an action by which a gap may be too short: sums of decimals are not exact."""


def earliest(schedule: Schedule, costs: Costs) -> Schedule:
    """Moves actions into earlier gaps of their stages.

    The actions are taken in the order in which they start. Each goes to the first gap of its stage
    that follows its inputs and is long enough, an F only if the stage stays within its peak all the
    way to where the F was. A gap is time in which the stage waits, so nothing else is delayed: no
    action ever starts later than before.

    Args:
      schedule: synchronous; its promised peaks in flight are kept.
      costs: costs of one chunk.
    """
    timeline, results = simulate(schedule, costs), Results(schedule)
    rows = [_Row(cap) for cap in schedule.peak_in_flight or peak_in_flight(schedule)]
    ends: dict[int, float] = {}
    # Equal starts are ordered by tick: an action too short to change a float sum starts at the same
    # time as the one it follows. Actions themselves are never compared.
    in_time = sorted(
        (
            (timed.start, tick, d, timed.action)
            for d, (row, ticks) in enumerate(zip(timeline.rows, walk(schedule).ticks, strict=True))
            for timed, tick in zip(row, ticks, strict=True)
        ),
        key=lambda entry: entry[:3],
    )
    for *_, d, action in in_time:
        ready = 0.0
        for needed in results.inputs(action):
            travel = costs.message if results.stage(needed) != d else 0.0
            ready = max(ready, ends[needed] + travel)
        end = rows[d].place(action, ready, costs.of(action.kind))
        if action.kind is not Kind.W:
            ends[results.number(action)] = end
    return dataclasses.replace(schedule, orders=tuple(tuple(row.order) for row in rows))


class _Row:
    """The actions that one stage runs so far, in order, with starts and ends."""

    def __init__(self, cap: int) -> None:
        self.cap, self.in_flight = cap, 0
        self.order: list[Action] = []
        self.starts: list[float] = []
        self.ends: list[float] = []

    def place(self, action: Action, ready: float, duration: float) -> float:
        """Puts an action into the first gap that it fits, or behind all others; returns its end."""
        chosen = len(self.order)
        start = max(ready, self.ends[-1] if self.ends else 0.0)
        in_flight = self.in_flight
        # From the last gap to the first that follows the inputs; the earliest that fits is kept.
        # `in_flight` counts the chunks before the action at `position`. An F adds one to this count
        # and to all later ones; once one is at the cap, no earlier gap will do either.
        for position in reversed(range(len(self.order))):
            if self.ends[position] <= ready:
                break
            in_flight -= HELD[self.order[position].kind]
            if action.kind is Kind.F and in_flight >= self.cap:
                break
            begin = max(ready, self.ends[position - 1] if position else 0.0)
            if begin + duration * (1 - ROUNDING) <= self.starts[position]:
                chosen, start = position, begin
        self.order.insert(chosen, action)
        self.starts.insert(chosen, start)
        self.ends.insert(chosen, start + duration)
        self.in_flight += HELD[action.kind]
        return start + duration
