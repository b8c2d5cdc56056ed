"""Ticks in which fewer messages are urgent, for devices that wait for their neighbors alone.

In the earliest ticks (`jaxpipe.schedule.simulate.ticks`) a message is often read right after it was
sent, also where its reader has ticks to spare. Stages then have to meet, and each waits for the
slower of its neighbors. If instead every message of a tick has a tick to travel, nobody waits: see
`jaxpipe.schedule.lowering.lower`.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxpipe.schedule.actions import Kind, Schedule
from jaxpipe.schedule.check.walk import Results, walk

_ROUNDS = 8
"""Most times that the ticks are chosen; built-in schedules repeat themselves after 2 to 5."""


def patient_ticks(schedule: Schedule) -> list[list[int]]:
    """Ticks of all actions, per stage in order, in which as few messages as possible are urgent.

    There are no more ticks than in `jaxpipe.schedule.simulate.ticks`, and a stage runs its actions
    in the same order. An action waits one tick more for its inputs if the last tick is no later for
    it. That spares a meeting only if it helps every message of a tick, so further rounds let those
    messages go for which it did not.

    Args:
      schedule: a valid one of whole actions.

    Example:
      >>> from jaxpipe.schedule.generators.one_f_one_b import one_f_one_b
      >>> from jaxpipe.schedule.simulate import ticks
      >>> ticks(one_f_one_b(2, 2))
      [[0, 1, 3, 4, 6, 7], [1, 2, 3, 4, 5, 6]]
      >>> patient_ticks(one_f_one_b(2, 2))
      [[0, 1, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6]]
    """
    units = _units(schedule)
    earliest = _ticks(units, [False] * len(units), [0] * len(units))
    latest = _latest(units, earliest)
    best, fewest = earliest, len(_urgent(units, earliest))
    travels = [True] * len(units)
    for _ in range(_ROUNDS):
        found = _ticks(units, travels, latest)
        urgent = _urgent(units, found)
        if len(urgent) <= fewest:
            best, fewest = found, len(urgent)
        before, travels = travels, [tick not in urgent for tick in found]
        if travels == before:
            break
    rows: list[list[int]] = [[] for _ in schedule.orders]
    for unit, tick in zip(units, best, strict=True):
        rows[unit.stage] += [tick] * unit.size
    return rows


class _Unit(NamedTuple):
    """An action or an overlapped pair. Others are known by their numbers.

    Args:
      before: the unit before it on its stage, or -1.
      received: those of other stages whose messages it reads.
    """

    stage: int
    size: int
    before: int
    received: tuple[int, ...]


def _units(schedule: Schedule) -> list[_Unit]:
    """All units, each after those that it needs."""
    results, made, units = Results(schedule), dict[int, int](), list[_Unit]()
    remaining = [*map(schedule.units, range(schedule.num_stages))]
    newest = [-1] * schedule.num_stages
    for stage in walk(schedule).order:
        actions, number = next(remaining[stage]), len(units)
        needed = (made[n] for action in actions for n in results.inputs(action) if n in made)
        received = tuple(n for n in needed if units[n].stage != stage)
        units.append(_Unit(stage, len(actions), newest[stage], received))
        newest[stage] = number
        for action in actions:
            if action.kind is not Kind.W:
                made[results.number(action)] = number
    return units


def _ticks(units: list[_Unit], travels: list[bool], latest: list[int]) -> list[int]:
    """The earliest ticks; where ``latest`` allows it, a message that ``travels`` takes one more."""
    ticks: list[int] = []
    for unit, last in zip(units, latest, strict=True):
        soonest = ticks[unit.before] + 1 if unit.before >= 0 else 0
        patient = soonest
        for sender in unit.received:
            arrived = ticks[sender] + 1
            soonest, patient = max(soonest, arrived), max(patient, arrived + travels[sender])
        ticks.append(patient if patient <= last else soonest)
    return ticks


def _latest(units: list[_Unit], ticks: list[int]) -> list[int]:
    """The latest ticks with which no more ticks are needed."""
    latest = [max(ticks)] * len(units)
    for number in range(len(units) - 1, -1, -1):
        unit, tick = units[number], latest[number]
        for needed in (unit.before, *unit.received) if unit.before >= 0 else unit.received:
            latest[needed] = min(latest[needed], tick - 1)
    return latest


def _urgent(units: list[_Unit], ticks: list[int]) -> set[int]:
    """The ticks of messages that are read in the next one."""
    return {
        tick - 1
        for unit, tick in zip(units, ticks, strict=True)
        if any(ticks[sender] == tick - 1 for sender in unit.received)
    }
