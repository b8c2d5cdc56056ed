"""Beam search for the lock-step clock: how long every tick lasts.

A tick ends when its slowest stage does, so its length is the decision that matters. Each length
worth trying lets some stage finish a forward or a backward; given the length, every stage fills it
layer by layer (`jaxpipe.schedule.search.tick_engine`). The search keeps, for every span of time,
the few states that waited least.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxpipe.schedule.actions import Slice
from jaxpipe.schedule.search.tick_engine import (
    Choice,
    Counts,
    Engine,
    Policy,
    Progress,
    Ready,
    Work,
)

_SPANS = 12
"""Spans of time, per F+B+W of a chunk, within each of which states compete."""
_MIN_LENGTHS, _MAX_LENGTHS = 3, 6
"""Lengths tried per state; twice as many find no better schedule at p=4."""
_LONGEST = 1.6
"""Longest tick, in chunks of the longer of F and B."""

_MAX_WIDTH = 8
"""States kept per span of time; fewer where that would exceed `Settings.cells`."""


class Settings(NamedTuple):
    """How to search.

    Args:
      policies: tried at every tick.
      shortest: shortest tick, in chunks of F.
      eagerness: how much waiting a unit of F or B offsets, against one of W.
      drains: whether the most delayed stage is the one that ends last when the gradients it sends
        last still have to reach the first virtual stage, with no W to fill that time.
      cells: how often the search may fill a tick of a stage, roughly; by default about half a
        second.
    """

    policies: tuple[Policy, ...]
    shortest: float
    eagerness: float
    drains: bool = False
    cells: int = 60_000


class Option(NamedTuple):
    """A state one tick later, of which only the times are known yet.

    Args:
      score: smaller is better.
      left: layers to run.
      before: the state before the tick, what its stages could run then, and what they run.
    """

    score: float
    time: float
    busy: tuple[float, ...]
    critical: float
    left: int
    before: tuple[Progress, list[Ready], tuple[Counts, ...]]


class TickSearch:
    """Searches the lengths of the ticks that run some work."""

    def __init__(self, work: Work) -> None:
        self.engine = Engine(work)
        schedule, placement, costs = work.schedule, work.schedule.placement, work.costs
        total = self.engine.largest.f + self.engine.largest.b + self.engine.largest.w
        self.span = total / _SPANS
        self.stage_work = [
            schedule.num_microbatches
            * math.fsum(costs[s].f + costs[s].b + costs[s].w for s in held)
            for held in placement.virtual_stages
        ]
        longest = max(self.stage_work)
        self.behind = [work - longest for work in self.stage_work]
        self.drains = []
        for held, behind in zip(placement.virtual_stages, self.behind, strict=True):
            first = held[0] % placement.depth
            way_back = math.fsum(cost.b for cost in costs[held[0] - first : held[0]])
            self.drains.append(max(0.0, way_back - costs[held[0]].w) + behind)

    def best(self, trials: Iterable[Settings], *, makespan: float) -> list[list[Slice]] | None:
        """The slices that every stage runs, in order, by the best of several searches' plans; None
        if no plan ends before ``makespan``."""
        best = None
        for settings in trials:
            plan = self._search(settings, makespan)
            if plan is not None:
                makespan, best = plan
        return None if best is None else self._slices(best)

    def _search(self, settings: Settings, makespan: float) -> tuple[float, Choice | None] | None:
        """Looks for a plan that ends before ``makespan``: when it ends, and its last tick."""
        num_ticks = max(self.stage_work) / self.engine.largest.f
        tries = settings.cells / (len(self.engine.stages) * num_ticks * len(settings.policies))
        number = max(_MIN_LENGTHS, min(_MAX_LENGTHS, int(tries)))
        width = max(1, min(_MAX_WIDTH, int(tries / number)))
        rounding = self.engine.rounding
        plan = None
        drains = self.drains if settings.drains else self.behind
        spans: dict[int, list[Option]] = {}
        states = [self.engine.start()]
        while states:
            for state in states:
                for before in self._ticks(state, settings, number):
                    new = self._option(before, drains, settings.eagerness)
                    rest = max(map(operator.sub, self.stage_work, new.busy))
                    if new.time + rest >= makespan - rounding:
                        continue
                    if new.left:
                        spans.setdefault(int(new.time / self.span), []).append(new)
                    else:
                        makespan = new.time
                        plan = new.time, self._after(new).choice
            states = []
            while spans and not states:
                states = self._best_of(spans.pop(min(spans)), width)
        return plan

    def _slices(self, last: Choice) -> list[list[Slice]]:
        engine, choices = self.engine, []
        choice: Choice | None = last
        while choice is not None:
            choices.append(choice.counts)
            choice = choice.before
        rows: list[list[Slice]] = [[] for _ in engine.stages]
        state = engine.start()
        for tick, counts in enumerate(reversed(choices)):
            ready = [engine.ready(state, d) for d in engine.stages]
            for d, row in enumerate(rows):
                row.extend(engine.slices(state, d, ready[d], counts[d], tick))
            state = engine.tick(state, ready, counts)
        return rows

    def _option(
        self,
        before: tuple[Progress, list[Ready], tuple[Counts, ...]],
        drains: Sequence[float],
        eagerness: float,
    ) -> Option:
        """The times after a tick, and the score that they make."""
        state, ready, counts = before
        critical, longest, left, p = state.critical, 0.0, state.left, len(ready)
        busy = []
        for so_far, stage, (forward, backward, weights) in zip(
            state.busy, ready, counts, strict=True
        ):
            f, b, w = stage.costs
            used = forward * f + backward * b
            critical += used
            used += weights * w
            busy.append(so_far + used)
            left -= forward + backward + weights
            if used > longest:
                longest = used
        time = state.time + (longest + self.engine.message)
        # `sum` of floats rounds differently from Python 3.12 on, and a rounding error can decide
        # which state is best. Adding from left to right is the same everywhere.
        mean = time - functools.reduce(operator.add, busy) / p
        worst = time + max(map(operator.sub, drains, busy))
        score = worst + mean - eagerness * critical / p
        return Option(score, time, tuple(busy), critical, left, before)

    def _best_of(self, options: list[Option], width: int) -> list[Progress]:
        """The states with the best scores, no two with the same work done."""
        options.sort(key=operator.itemgetter(0))
        found: dict[tuple[tuple[int, ...], ...], Progress] = {}
        for option in options:
            if len(found) == width:
                break
            state = self._after(option)
            found.setdefault(state.work_done(), state)
        return [*found.values()]

    def _after(self, option: Option) -> Progress:
        """The state that an option leads to."""
        state, ready, counts = option.before
        new = self.engine.tick(state, ready, counts)
        new.time, new.busy, new.critical = option.time, option.busy, option.critical
        new.choice = Choice(counts, state.choice)
        return new

    def _ticks(
        self, state: Progress, settings: Settings, number: int
    ) -> Iterator[tuple[Progress, list[Ready], tuple[Counts, ...]]]:
        """What the next tick may run, for every length and policy worth trying."""
        engine = self.engine
        ready = [engine.ready(state, d) for d in engine.stages]
        lengths = self._lengths(ready, settings, number)
        # If no stage runs anything, all of them wait for good.
        seen = {((0, 0, 0),) * len(ready)}
        for policy in settings.policies:
            claims = [engine.claims(state, d, policy, ready[d]) for d in engine.stages]
            for length in lengths:
                counts = tuple(map(engine.fill, itertools.repeat(length), ready, claims))
                if counts not in seen:
                    seen.add(counts)
                    yield state, ready, counts

    def _lengths(self, ready: list[Ready], settings: Settings, number: int) -> list[float]:
        """Lengths that let some stage finish its F, its B, or both; evenly thinned out."""
        costs, rounding = self.engine.largest, self.engine.rounding
        lengths = {costs.f, costs.b, costs.w}
        for stage in ready:
            forward, backward = map(operator.mul, stage.rooms[:2], stage.costs[:2])
            lengths |= {forward, backward, forward + backward}
        # Every tick has room for a layer of any kind, so that none passes idle.
        shortest = max(self.engine.longest_layer, settings.shortest * costs.f)
        longest = max(shortest, _LONGEST * max(costs.f, costs.b))
        kept = sorted(
            {
                round(length / rounding) * rounding
                for length in lengths
                if shortest - rounding <= length <= longest + rounding
            }
        ) or [shortest]
        number = min(number, len(kept))
        return [kept[i * len(kept) // number] for i in range(number)]
