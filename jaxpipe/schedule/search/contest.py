"""The contest of schedules for one model under one memory limit: the first to end wins.

Named and searched schedules, on whatever placement, are measured alike: cut into slices as a named
schedule is that someone asks for. So the winner ends no later than any of those.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.check.validate import peak_in_flight
from jaxpipe.schedule.makespan import makespan
from jaxpipe.schedule.search.cuts import Cut
from jaxpipe.schedule.search.slices import (
    FIRST_TRIAL,
    OTHER_TRIALS,
    Uncut,
    slice_all,
)
from jaxpipe.schedule.search.tick_settings import Settings
from jaxpipe.schedule.simulate import Timeline

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

    @functools.cached_property
    def bound(self) -> float:
        """It cannot end before this in lock-step, however it is cut."""
        return self.cut.bound_at(self.schedule.num_microbatches, max(peak_in_flight(self.schedule)))

    @functools.cached_property
    def promise(self) -> float:
        """About when it may end in lock-step: an F and a B each end a tick with an exchange."""
        ends = makespan(self.schedule, self.cut.costs)
        return ends + 2 * self.cut.exchanges(self.schedule.num_microbatches)

    @property
    def is_due(self) -> bool:
        """Whether it is cut in all ways, however it does in the first."""
        return self.named or self.is_long


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
        """Cuts what has entered and may still win, in all ways or first in one."""
        entrants = sorted(self._waiting, key=lambda entrant: entrant.promise)
        self._waiting = []
        if any(entrant.is_long for entrant in entrants):
            entrants = entrants[:_NUM_LEADING]
        due = [entrant for entrant in entrants if entrant.is_due]
        # The first to be cut stops the searches of the rest once those cannot end before.
        for some in (due[:1], due[1:]):
            self._cut(some, FIRST_TRIAL + OTHER_TRIALS)
        tried = self._cut([each for each in entrants if not each.is_due], FIRST_TRIAL, _SLACK)
        tried.sort(key=lambda item: item[0])
        latest = _SLACK * self.makespan
        leading = [entrant for end, entrant in tried[:_NUM_LEADING] if end <= latest]
        self._cut(leading, OTHER_TRIALS)

    def offer(self, cut: Cut, timeline: Timeline) -> None:
        """Keeps a schedule if it ends before the best so far."""
        if timeline.makespan < self.makespan:
            self.best, self.makespan, self.leader = timeline.schedule, timeline.makespan, cut

    def _cut(
        self, entrants: Iterable[Entrant], trials: Sequence[Settings], slack: float = 1.0
    ) -> list[tuple[float, Entrant]]:
        """Cuts the schedules that may still win in some ways and offers them; when they end.

        Args:
          slack: a search stops once it cannot end before this times the best so far.
        """
        able = [entrant for entrant in entrants if entrant.bound < self.ahead]
        uncut = [Uncut(each.schedule, each.cut.costs, each.cut.layer_counts) for each in able]
        found = slice_all(uncut, trials, clock=self.clock, makespan=slack * self.ahead)
        for entrant, timeline in zip(able, found, strict=True):
            self.offer(entrant.cut, timeline)
        return [(timeline.makespan, each) for each, timeline in zip(able, found, strict=True)]
