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

import bisect
import dataclasses
import math
import operator
from collections.abc import Iterable, Iterator, Sequence

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
    schedules: Iterable[Schedule], costs: Costs | Sequence[Costs], *, trials: int = 0
) -> tuple[Schedule, float]:
    """Paces orders of one placement, and finds the one that ends first on the device clock.

    Args:
      schedules: at least one; the first of those that end at the same time wins.
      costs: costs of one chunk; or, if chunks differ, of every virtual stage.
      trials: how often ticks are moved at most to shorten what each schedule waits.

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
            (units.run(pace)[0], max(pace), units, pace)
            for units in (alone, *alone.sharing(costs))
            for pace in units.paces()
        ]
        enough = min(end for end, *_ in paces) * (1 + _WORTH)
        end, _, units, pace = min((one for one in paces if one[0] <= enough), key=lambda o: o[1])
        end, pace = units.waiting_less(pace, trials)
        if best is None or end < ends * (1 - _ROUNDING):
            best, ends = units.in_ticks(pace), end
    assert best is not None, "there is a schedule"
    return best, ends


def of_ticks(costs: Costs) -> Costs:
    """Returns costs for which orders are made that run well in ticks: no action ends before a late
    message that travels under it."""
    f, b, w = (max(cost, costs.message) for cost in (costs.f, costs.b, costs.w))
    return dataclasses.replace(costs, f=f, b=b, w=w)


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

    def run(self, pace: Sequence[int]) -> tuple[float, list[tuple[int, int]]]:
        """Computes when all is done on the device clock, as `jaxpipe.schedule.device_clock.replay`
        does, and the late messages that the longest chain waits for: senders and ticks."""
        work: list[list[tuple[int, float]]] = [[] for _ in range(max(pace) + 1)]
        prompt: list[set[tuple[int, int]]] = [set() for _ in work]
        late: set[tuple[int, int]] = set()
        for number, (tick, stage) in enumerate(zip(pace, self.stages, strict=True)):
            work[tick].append((stage, self.durations[number]))
            for sender in self.senders[number]:
                pairs = prompt[tick - 1] if pace[sender] == tick - 1 else late
                pairs.add((self.stages[sender], stage))
        now, waits = [0.0] * self.schedule.num_stages, self.rendezvous
        times = list[tuple[list[float], list[float], list[float]]]()
        for units, pairs in zip(work, prompt, strict=True):
            ends = now.copy()
            for stage, duration in units:
                ends[stage] += duration
            come = received(ends, now, late, self.message, rendezvous=waits)
            times.append((now, ends, come))
            now = received(come, come, pairs, self.message, rendezvous=waits)

        def awaited(stage: int, pairs: set[tuple[int, int]], come: Sequence[float]) -> int:
            both = (one for pair in pairs if stage in pair for one in pair)
            senders = (sender for sender, to in pairs if to == stage)
            return max(both if waits else senders, key=come.__getitem__)

        end, after, senders = max(now), now, list[tuple[int, int]]()
        stage = now.index(end)
        for tick in reversed(range(len(times))):
            starts, ends, come = times[tick]
            if after[stage] > come[stage]:
                stage = awaited(stage, prompt[tick], come)
            if come[stage] > ends[stage]:
                stage = awaited(stage, late, starts)
                senders.append((stage, tick))
            after = starts
        return end, senders

    def waiting_less(self, pace: list[int], trials: int) -> tuple[float, list[int]]:
        """Looks for a pace that ends sooner, in so many trials: the last unit before a late message
        that the longest chain waits for moves to the tick that brings the message. Takes the best
        of these moves even if nothing ends sooner, and no pace twice."""
        end, senders = self.run(pace)
        best, seen = (end, pace), {tuple(pace)}
        while senders and len(seen) <= trials:
            places, tried = [*zip(self.stages, pace, strict=True)], []
            for stage, tick in senders:
                number = bisect.bisect_left(places, (stage, tick)) - 1
                later = self._ticks([*pace[:number], tick, *pace[number + 1 :]], travel=1)
                if self.stages[number] == stage and tuple(later) not in seen:
                    seen.add(tuple(later))
                    tried.append((*self.run(later), later))
            if not tried:
                break
            end, senders, pace = min(tried, key=operator.itemgetter(0))
            if end < best[0] * (1 - _WORTH):
                best = end, pace
        return best

    def in_ticks(self, pace: Sequence[int]) -> Schedule:
        """Returns the schedule in these ticks."""
        if pace is self.given and not self.shares:
            return self.schedule
        rows: list[list[int]] = [[] for _ in self.schedule.orders]
        for stage, tick, count in zip(self.stages, pace, self.sizes, strict=True):
            rows[stage] += [tick] * count
        return dataclasses.replace(self.schedule, ticks=tuple(map(tuple, rows)))
