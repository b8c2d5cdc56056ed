"""Chimera: two pipelines from opposite ends, each with a copy of the weights, in simulation.

A schedule of `jaxpipe` has one copy of the model; this one is for comparison alone.

Source: Li and Hoefler, "Chimera", arXiv 2107.06925.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache

from jaxpipe.schedule.simulate import UNIT, Costs

Orders = tuple[tuple[int, ...], ...]
"""By stage, the passes that it runs: backwards of the two copies (0, 1), then forwards (2, 3)."""


def makespan(stages: int, microbatches: int, costs: Costs) -> float:
    """Free-running time of a batch, whose halves go in opposite directions; backwards are fused.

    Example:
      >>> makespan(4, 4, UNIT)
      16.0
    """
    return _play(stages, microbatches // 2, costs, _orders(stages, microbatches // 2))[1]


def peak(stages: int, microbatches: int) -> int:
    """The most microbatches in flight: each direction on its own is 1F1B."""
    limits = _limits(stages, microbatches // 2)
    return max(here + there for here, there in zip(limits, reversed(limits), strict=True))


@lru_cache(maxsize=512)
def _orders(stages: int, microbatches: int) -> Orders:
    """The published order, which is made for equal costs."""
    return _play(stages, microbatches, UNIT, None)[0]


def _limits(stages: int, microbatches: int) -> list[int]:
    return [min(microbatches, stages - position) for position in range(stages)]


def _play(
    stages: int, microbatches: int, costs: Costs, orders: Orders | None
) -> tuple[Orders, float]:
    """Runs both directions event by event, in given orders or the most urgent pass first."""
    last, lengths = stages - 1, (costs.b + costs.w,) * 2 + (costs.f,) * 2
    arrivals: list[list[list[float]]] = [[[] for _ in range(4)] for _ in range(stages)]
    arrivals[0][2], arrivals[last][3] = [0.0] * microbatches, [0.0] * microbatches
    done = [[0] * 4 for _ in range(stages)]
    taken: list[list[int]] = [[] for _ in range(stages)]
    free, limits = [0.0] * stages, _limits(stages, microbatches)
    events = [(0.0, d) for d in range(stages)]

    def position(stage: int, copy: int) -> int:
        return last - stage if copy else stage

    def choose(stage: int, now: float) -> int | None:
        candidates: Sequence[int] = range(4)
        if orders is not None:
            candidates = orders[stage][len(taken[stage]) :][:1]
        chosen, earliest = None, math.inf
        for n in candidates:
            place, count = position(stage, n % 2), done[stage][n]
            if count == len(arrivals[stage][n]) or arrivals[stage][n][count] > now:
                continue
            if orders is None and n > 1 and count - done[stage][n - 2] >= limits[place]:
                continue
            # Due if nobody waited, and microbatches entered twice as fast as they leave.
            due = 1.5 * count + (place if n > 1 else stages + 2 * (last - place))
            if due < earliest:
                chosen, earliest = n, due
        return chosen

    while events:
        now, d = heapq.heappop(events)
        if free[d] > now or (n := choose(d, now)) is None:
            continue
        taken[d].append(n)
        done[d][n] += 1
        free[d] = now + lengths[n]
        heapq.heappush(events, (free[d], d))
        turns = position(d, n % 2) == (last if n > 1 else 0)
        if turns and n > 1:
            arrivals[d][n - 2].append(free[d])
        elif not turns:
            reader = d + (1 if (n % 2 == 0) == (n > 1) else -1)
            arrivals[reader][n].append(free[d] + costs.message)
            heapq.heappush(events, (free[d] + costs.message, reader))
    return tuple(map(tuple, taken)), max(free)
