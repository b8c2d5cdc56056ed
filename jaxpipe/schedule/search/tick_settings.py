"""How to search for ticks, and what the costs of a work say of their number and length."""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.search.tick_engine import Work
from jaxpipe.schedule.simulate import Costs


class Settings(NamedTuple):
    """How to search.

    Args:
      by_rank: whether stages fill ticks in the order of `Work.ranks`.
      by_urgency: whether they fill them with one of F and B, then W, which goes first only if
        memory keeps a forward waiting. With both, either is tried in every tick.
      first: of F and B, which runs if both are ready, neither is under way and there are no ranks.
      shortest: shortest tick, in chunks of F.
      eagerness: how much waiting a unit of F or B offsets, against one of W.
      drains: whether the most delayed stage is the one that ends last when the gradients it sends
        last still have to reach the first virtual stage, with no W to fill that time.
      cells: how often the search may fill a tick of a stage, roughly.
    """

    by_rank: bool
    by_urgency: bool
    shortest: float
    eagerness: float
    first: Kind = Kind.B
    drains: bool = False
    cells: int = 60_000

    def tries(self, num_stages: int, num_ticks: float) -> float:
        """How many ticks may be tried between two ends of ticks."""
        return self.cells / (num_stages * num_ticks * (self.by_rank + self.by_urgency))


class Clock:
    """What the costs of a work say of its time."""

    def __init__(self, work: Work) -> None:
        schedule, placement, costs = work.schedule, work.schedule.placement, work.costs
        self.largest = Costs(
            *map(max, zip(*((c.f, c.b, c.w, c.message) for c in costs), strict=True))
        )
        self.stage_work = [
            schedule.num_microbatches
            * math.fsum(costs[s].f + costs[s].b + costs[s].w for s in held)
            for held in placement.virtual_stages
        ]
        self.num_ticks = max(self.stage_work) / self.largest.f
        longest = max(self.stage_work)
        self.behind = [work - longest for work in self.stage_work]
        self.passes = schedule.num_microbatches * placement.num_chunks
        # Virtual stages before the first of a stage.
        self.ticks_back = [held[0] % placement.depth for held in placement.virtual_stages]
        self.ways_back = []
        for held, behind in zip(placement.virtual_stages, self.behind, strict=True):
            first = held[0] % placement.depth
            way_back = math.fsum(cost.b for cost in costs[held[0] - first : held[0]])
            self.ways_back.append(max(0.0, way_back - costs[held[0]].w) + behind)

    def drains(self, settings: Settings) -> list[float]:
        """By stage, how much later than its work the end is."""
        return self.ways_back if settings.drains else self.behind
