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
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxpipe.schedule.actions import Slice
from jaxpipe.schedule.search.tick_engine import Choice, Engine, Policy, Progress, Ready, Work

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
        spans: dict[int, list[Progress]] = {0: [self.engine.start()]}
        while spans:
            for state in self._best_of(spans.pop(min(spans)), settings, width):
                rest = max(map(operator.sub, self.stage_work, state.busy))
                if state.time + rest >= makespan - rounding:
                    continue
                for new in self._ticks(state, settings, number):
                    if new.left:
                        spans.setdefault(int(new.time / self.span), []).append(new)
                    elif new.time < makespan - rounding:
                        makespan = new.time
                        plan = new.time, new.choice
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

    def _best_of(
        self, states: list[Progress], settings: Settings, width: int
    ) -> Iterator[Progress]:
        """The states with the best scores, no two with the same work done."""
        p = len(self.engine.stages)
        drains = self.drains if settings.drains else self.behind

        def score(state: Progress) -> float:
            # `sum` of floats rounds differently from Python 3.12 on, and a rounding error can
            # decide which state is best. Adding from left to right is the same everywhere.
            mean = state.time - functools.reduce(operator.add, state.busy) / p
            worst: float = state.time + max(map(operator.sub, drains, state.busy))
            return worst + mean - settings.eagerness * state.critical / p

        states.sort(key=score)
        seen: set[tuple[tuple[int, ...], ...]] = set()
        for state in states:
            if len(seen) == width:
                return
            work_done = state.work_done()
            if work_done not in seen:
                seen.add(work_done)
                yield state

    def _ticks(self, state: Progress, settings: Settings, number: int) -> Iterator[Progress]:
        """The states one tick later, for every length and policy worth trying."""
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
                    new = engine.tick(state, ready, counts)
                    new.choice = Choice(counts, state.choice)
                    yield new

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
