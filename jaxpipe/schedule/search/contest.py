"""The contest of schedules for one model under one memory limit: the first to end wins.

Named and searched schedules, on whatever placement, are measured alike: cut into slices as a named
schedule is that someone asks for. So the winner ends no later than any of those.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.check.validate import peak_in_flight
from jaxpipe.schedule.search.cuts import Cut
from jaxpipe.schedule.search.slices import (
    FIRST_TRIAL,
    OTHER_TRIALS,
    Uncut,
    slice_all,
)
from jaxpipe.schedule.search.tick_settings import Settings
from jaxpipe.schedule.simulate import Timeline, simulate

_LONG = 1_024
"""Up to so many microbatches times stages, every named schedule is cut in all ways; of longer ones
only those that promise most are cut at all, so that no search takes minutes."""
_NUM_LEADING = 4
_SLACK = 1.03
"""How far behind the best a schedule is that is still cut in all ways, if not all of them are."""


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A schedule without slices.

    Args:
      named: whether users can ask for it by name: it is then cut as they would have it cut.
    """

    cut: Cut
    schedule: Schedule
    named: bool

    @property
    def is_long(self) -> bool:
        return self.schedule.num_stages * self.schedule.num_microbatches > _LONG

    @property
    def bound(self) -> float:
        """It cannot end before this in lock-step, however it is cut."""
        return self.cut.bound_at(self.schedule.num_microbatches, max(peak_in_flight(self.schedule)))

    @property
    def promise(self) -> float:
        """About when it may end in lock-step."""
        return simulate(self.schedule, self.cut.costs).makespan


class Contest:
    """Takes schedules, cuts those that may win, and knows the best so far.

    Args:
      clock: a key of `jaxpipe.schedule.search.slices.CLOCKS`.
    """

    def __init__(self, clock: str) -> None:
        self.clock = clock
        self.best: Schedule | None = None
        self.makespan = math.inf
        self.leader: Cut | None = None
        self._entered: set[object] = set()
        self._waiting: list[Entrant] = []

    @property
    def ahead(self) -> float:
        """What a schedule has to beat in lock-step."""
        return self.makespan if self.clock == "lock-step" else math.inf

    def enter(self, cut: Cut, schedules: Iterable[Schedule], *, named: bool) -> None:
        """Adds schedules of one placement; equal orders count once."""
        for schedule in schedules:
            key = cut.placement, schedule.orders
            if key not in self._entered:
                self._entered.add(key)
                self._waiting.append(Entrant(cut, schedule, named))

    def compare(self) -> None:
        """Cuts what has entered in one way, and what may then still win in all others."""
        able = [entrant for entrant in self._waiting if entrant.bound < self.ahead]
        self._waiting, most = [], _NUM_LEADING
        if any(entrant.is_long for entrant in able):
            able, most = sorted(able, key=lambda entrant: entrant.promise)[:most], 1
        ends = self._cut(able, FIRST_TRIAL)
        latest, again = _SLACK * min(ends, default=0.0), []
        for end, entrant in sorted(zip(ends, able, strict=True), key=lambda item: item[0]):
            if entrant.named and not entrant.is_long:
                again.append(entrant)
            elif most and end <= latest:
                most -= 1
                again.append(entrant)
        self._cut(again, OTHER_TRIALS)

    def offer(self, cut: Cut, timeline: Timeline) -> None:
        """Keeps a schedule if it ends before the best so far."""
        if timeline.makespan < self.makespan:
            self.best, self.makespan, self.leader = timeline.schedule, timeline.makespan, cut

    def _cut(self, entrants: Sequence[Entrant], trials: Sequence[Settings]) -> list[float]:
        """Cuts schedules in some ways and offers them; when they end."""
        uncut = [Uncut(each.schedule, each.cut.costs, each.cut.layer_counts) for each in entrants]
        found = slice_all(uncut, trials, clock=self.clock, makespan=self.ahead)
        for entrant, timeline in zip(entrants, found, strict=True):
            self.offer(entrant.cut, timeline)
        return [timeline.makespan for timeline in found]
