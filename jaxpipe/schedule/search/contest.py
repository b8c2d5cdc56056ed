"""The contest of schedules for one model under one memory limit: the first to end wins.

Named and searched schedules, on whatever placement, are measured alike: the promising ones are cut
into slices quickly, and the best of them with care. What counts is the clock that they will run on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.neighbors import neighbor_clock
from jaxpipe.schedule.search.cuts import Cut
from jaxpipe.schedule.search.slices import slice_ticks
from jaxpipe.schedule.simulate import lock_step

CLOCKS = {"lock-step": lock_step, "neighbor": neighbor_clock}
"""Those that a schedule can be planned for: of simulated devices, and of GPUs."""

_QUICK_ACTIONS, _CAREFUL_ACTIONS = 40_000, 12_000
"""How many actions each comparison may cut quickly, and in the end with care; at least one
schedule is."""
_MOST_CAREFUL = 3
_QUICK_SLACK, _CAREFUL_SLACK = 1.05, 1.03
"""How far behind the best a schedule may be and still be cut: quickly, if that is what it promises;
with care, if that is when it ends once cut quickly."""


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A schedule in the contest.

    Args:
      schedule: without slices.
      promise: about when it may end in lock-step at best.
    """

    cut: Cut
    schedule: Schedule
    promise: float

    @property
    def num_actions(self) -> int:
        return sum(map(len, self.schedule.orders))


class Contest:
    """Takes schedules, cuts the promising ones, and knows the best so far.

    Args:
      clock: a key of `CLOCKS`.
    """

    def __init__(self, clock: str) -> None:
        self.clock = clock
        self.best: Schedule | None = None
        self.makespan = math.inf
        self.quick: list[tuple[float, Entrant]] = []
        self._entered: set[object] = set()
        self._waiting: list[Entrant] = []

    @property
    def ahead(self) -> float:
        """What a schedule has to beat in lock-step."""
        return self.makespan if self.clock == "lock-step" else math.inf

    @property
    def earliest(self) -> float:
        """When the best of those that are cut quickly ends in lock-step."""
        return self.quick[0][0] if self.quick else math.inf

    def enter(self, cut: Cut, schedules: Iterable[Schedule]) -> None:
        """Adds schedules of one placement; equal orders count once."""
        for schedule in schedules:
            key = cut.placement, schedule.orders
            if key not in self._entered:
                self._entered.add(key)
                self._waiting.append(Entrant(cut, schedule, cut.promise(schedule)))

    def compare(self) -> None:
        """Cuts quickly what has entered, the most promising first."""
        left = _QUICK_ACTIONS
        for entrant in sorted(self._waiting, key=lambda entrant: entrant.promise):
            left -= entrant.num_actions
            if self.quick and (left < 0 or entrant.promise > _QUICK_SLACK * self.earliest):
                break
            self.quick.append((self._slice(entrant, quick=True), entrant))
            self.quick.sort(key=lambda item: item[0])
        self._waiting = []

    def finish(self) -> None:
        """Cuts the best with care."""
        left, latest = _CAREFUL_ACTIONS, _CAREFUL_SLACK * self.earliest
        for rank, (ends, entrant) in enumerate(self.quick[:_MOST_CAREFUL]):
            left -= entrant.num_actions
            if rank and (left < 0 or ends > latest):
                break
            self._slice(entrant, quick=False)

    def offer(self, cut: Cut, schedule: Schedule) -> None:
        """Keeps a schedule if it ends before the best so far."""
        ends = CLOCKS[self.clock](schedule, cut.costs).makespan
        if ends < self.makespan:
            self.best, self.makespan = schedule, ends

    def _slice(self, entrant: Entrant, *, quick: bool) -> float:
        """Cuts a schedule and offers it; when it ends in lock-step."""
        cut, whole = entrant.cut, entrant.schedule
        # With care, it only has to beat the best so far.
        makespan = math.inf if quick else self.ahead
        sliced = slice_ticks(whole, cut.costs, cut.layer_counts, makespan=makespan, quick=quick)
        if self.clock == "neighbor" and not quick:
            # On this clock, slices may be slower than whole actions.
            self.offer(cut, whole)
        if self.clock == "lock-step" or not quick:
            self.offer(cut, sliced)
        return lock_step(sliced, cut.costs).makespan
