"""Pacing: the ticks in which actions run, so that the ticks of all stages come at equal times.

Late messages travel in every tick between all pairs of stages that ever have one
(`jaxpipe.schedule.device_clock`), so no stage begins a tick much before its neighbors begin the one
before. If every action runs in its earliest tick, a stage with short actions counts ticks faster
than others, and waits for them; and whoever reads a message in the tick after it is sent counts
them slower, by the time of the message. A stage that leaves out ticks while nothing is there to run
keeps in step, and loses no time.

A tick takes at least the time of a late message, which a short action does not fill. So a W may
share the tick of the F or B before it, of the same chunk, whose result then leaves after both.
"""

import dataclasses
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from jaxpipe.schedule.actions import Action, Kind, Schedule, may_share_tick
from jaxpipe.schedule.check import Results
from jaxpipe.schedule.device_clock import received
from jaxpipe.schedule.simulate import Costs, of_virtual_stages, simulate, ticks

_LENGTHS = 1.0, 0.8, 0.9, 0.7, 0.6, 0.5
"""Lengths of a tick that are tried, in those of an average action."""
_MOST_TICKS = 3
"""Times as many ticks as the given ones that are tried: more come of messages longer than work."""
_PACED_ACTIONS = 100_000
"""Number of actions that are timed to pace one order: a third of a second."""
_WORTH = 0.002
"""Share of the time for which no further ticks are taken: each is a turn of the program's loop."""
_MOST_CELLS = 2_000_000
"""Ticks times stages beyond which an order is not timed and keeps its ticks."""
_ROUNDING = 1e-9


def soonest_on_devices(
    schedules: Iterable[Schedule], costs: Costs | Sequence[Costs]
) -> tuple[Schedule, float]:
    """Paces orders of one placement, and finds the one that ends first on the device clock.

    Args:
      schedules: at least one; the first of those that end at the same time wins.
      costs: costs of one chunk; or, if chunks differ, of every virtual stage.

    Returns:
      The schedule, with its ticks, and when it ends; infinity if all are too long to be timed.
    """
    best, ends = None, math.inf
    for schedule in schedules:
        alone = _Units(schedule, costs)
        if max(alone.given) * schedule.num_stages > _MOST_CELLS:
            best = best or schedule
            continue
        paces = [
            (end_of(units, pace), max(pace), units, pace)
            for units in (alone, *alone.sharing(costs))
            for pace in units.paces()
        ]
        enough = min(end for end, *_ in paces) * (1 + _WORTH)
        end, _, units, pace = min((one for one in paces if one[0] <= enough), key=lambda o: o[1])
        if best is None or end < ends * (1 - _ROUNDING):
            best, ends = units.in_ticks(pace), end
    assert best is not None, "there is a schedule"
    return best, ends


def of_ticks(costs: Costs) -> Costs:
    """Returns costs for which orders are made that run well in ticks: no action ends before a late
    message that travels under it."""
    f, b, w = (max(cost, costs.message) for cost in (costs.f, costs.b, costs.w))
    return dataclasses.replace(costs, f=f, b=b, w=w)


class Work(Protocol):
    """Actions or units by number, and what the device clock needs to know of them.

    Attributes:
      senders: those of other stages that send them what they read.
      message: time that a message takes.
      rendezvous: as in `Costs`.
    """

    stages: list[int]
    durations: list[float]
    senders: list[list[int]]
    message: float
    rendezvous: bool


def end_of(work: Work, ticks: Sequence[int]) -> float:
    """Computes when work in these ticks ends on the device clock, as
    `jaxpipe.schedule.device_clock.replay` does."""
    stages, durations, senders, waits = work.stages, work.durations, work.senders, work.rendezvous
    now = [0.0] * (max(stages) + 1)
    rows = [now.copy() for _ in range(max(ticks) + 1)]
    prompt: list[set[tuple[int, int]]] = [set() for _ in rows]
    late: set[tuple[int, int]] = set()
    for number, tick in enumerate(ticks):
        rows[tick][stages[number]] += durations[number]
        for sender in senders[number]:
            pairs = prompt[tick - 1] if ticks[sender] == tick - 1 else late
            pairs.add((stages[sender], stages[number]))
    for row, pairs in zip(rows, prompt, strict=True):
        ends = [*map(operator.add, now, row)]
        come = received(ends, now, late, work.message, rendezvous=waits)
        now = received(come, come, pairs, work.message, rendezvous=waits) if pairs else come
    return max(now)


class _Units:
    """Content of one tick: the units of a schedule (`Schedule.units`) by number, stage after
    stage.

    Args:
      shares: whether W share the tick of an action before them where the given ticks permit.

    Attributes:
      starts: when they start on the free-running clock.
      ends: when they end on it, but for W that share a tick: what others read is there before.
      given: their ticks in the schedule.
      senders: units of other stages that send them what they read.
    """

    def __init__(
        self, schedule: Schedule, costs: Costs | Sequence[Costs], *, shares: bool = False
    ) -> None:
        prices = of_virtual_stages(schedule.placement, costs)
        self.schedule, self.message = schedule, max(cost.message for cost in prices)
        self.shares, self.rendezvous = shares, any(cost.rendezvous for cost in prices)
        results, sent_by = Results(schedule), dict[int, int]()
        self.stages, self.starts, self.given = list[int](), list[float](), list[int]()
        self.durations, self.sizes, inputs = list[float](), list[int](), list[list[int]]()
        self.ends = list[float]()
        last = 0
        rows = zip(simulate(schedule, prices).rows, ticks(schedule), strict=True)
        for stage, (row, in_ticks) in enumerate(rows):
            before: Action | None = None
            for part, tick in zip(row, in_ticks, strict=True):
                action = part.action
                joins = shares and before is not None and may_share_tick((before, action))
                if part is row[0] or (tick > last and not joins):
                    self.stages.append(stage)
                    self.starts.append(part.start)
                    self.given.append(tick)
                    self.durations.append(0.0)
                    self.ends.append(0.0)
                    self.sizes.append(0)
                    inputs.append([])
                before, last = None if joins else action, tick
                cost = prices[action.virtual_stage]
                more = cost.more(action.kind, action.microbatch, schedule.num_slices)
                self.durations[-1] += cost.of(action.kind) + more
                if not joins:
                    self.ends[-1] = self.starts[-1] + self.durations[-1]
                self.sizes[-1] += 1
                inputs[-1] += [n for n in results.inputs(action) if results.stage(n) != stage]
                if action.kind is not Kind.W:
                    sent_by[results.number(action)] = len(inputs) - 1
        self.senders = [[sent_by[number] for number in numbers] for numbers in inputs]
        self.in_turn = sorted(range(len(self.given)), key=self.given.__getitem__)

    def sharing(self, costs: Costs | Sequence[Costs]) -> "Iterator[_Units]":
        """Yields the units in which W share ticks, if any action is shorter than a message."""
        if not self.schedule.overlapped and min(self.durations) < self.message:
            yield _Units(self.schedule, costs, shares=True)

    def paces(self) -> Iterator[list[int]]:
        """Yields ticks of all units: the given ones; those in which all messages travel late; those
        in the order in which units end; and those in step with ticks of several lengths."""
        yield self.given
        if not any(self.senders):
            return
        yield self._ticks([0] * len(self.given), travel=2)
        yield self._ticks(None, travel=1)
        average = math.fsum(self.durations) / len(self.durations)
        shortest = min(self.durations)
        # A long action is in the tick of its middle: others have their ticks before it ends.
        middles = [s + (d - shortest) / 2 for s, d in zip(self.starts, self.durations, strict=True)]
        affordable = _PACED_ACTIONS // len(self.durations)
        for length in _LENGTHS[: max(0, affordable - 3) // 2]:
            least = [int(middle / (length * average) + _ROUNDING) for middle in middles]
            if max(least) > _MOST_TICKS * max(self.given):
                return
            yield self._ticks(least, travel=1)
            yield self._ticks(least, travel=2)

    def _ticks(self, least: Sequence[int] | None, *, travel: int) -> list[int]:
        """Finds the earliest ticks in which results of other stages are read so many ticks after
        the one that sends them.

        Args:
          least: no unit is in an earlier tick; None for that of any unit that ends before.
        """
        found, stages, tick = [0] * len(self.given), self.stages, 0
        for number in self.in_turn if least is not None else self._by_end():
            tick = least[number] if least is not None else tick
            if number and stages[number - 1] == stages[number]:
                tick = max(tick, found[number - 1] + 1)
            for sender in self.senders[number]:
                tick = max(tick, found[sender] + travel)
            found[number] = tick
        return found

    def _by_end(self) -> list[int]:
        keys = [*zip(self.ends, self.given, strict=True)]
        return sorted(range(len(keys)), key=keys.__getitem__)

    def in_ticks(self, pace: Sequence[int]) -> Schedule:
        """Returns the schedule in these ticks."""
        if pace is self.given and not self.shares:
            return self.schedule
        rows: list[list[int]] = [[] for _ in self.schedule.orders]
        for stage, tick, count in zip(self.stages, pace, self.sizes, strict=True):
            rows[stage] += [tick] * count
        return dataclasses.replace(self.schedule, ticks=tuple(map(tuple, rows)))
