"""A lower bound on the time of any schedule, on either clock, under a memory limit."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.simulate import Costs, Timeline


def lower_bound(
    placement: Placement,
    num_microbatches: int,
    costs: Sequence[Costs],
    *,
    cap: float = math.inf,
    num_slices: int = 1,
) -> float:
    """A time before which no schedule of a placement ends.

    Each stage has to wait for the first microbatch, do its work, and wait while the last gradient
    goes on to the first layers; it may defer at most as many W as its memory holds. Memory also
    holds every chunk from F until its gradient has come back: the sum of these times, divided by
    the number of chunks that fit, is another bound.

    Args:
      costs: costs of every virtual stage.
      cap: the most chunks in flight on a stage, or slices of them.
      num_slices: slices of a microbatch's sequences; the first is the shortest.

    Example:
      >>> from jaxpipe.schedule.placement import wave
      >>> lower_bound(wave(2), 4, [Costs(1, 1, 1)] * 4, cap=4)
      25.0
    """
    m, average = num_microbatches * num_slices, costs
    costs = [_first_slice(cost, num_slices) for cost in costs]
    down, up = _ways(placement, costs)
    ends = [down[-1] + up[0] + costs[-1].f + costs[0].b + costs[0].w]
    for own_stages in placement.virtual_stages:
        critical = m * math.fsum(average[s].f + average[s].b for s in own_stages)
        weights = m * math.fsum(costs[s].w for s in own_stages)
        reaches = down[own_stages[0]]
        # The last B of the stage is followed by the way of its gradient, or by deferred W.
        leaves = min(up[0] - up[s] + costs[0].b - costs[s].b for s in own_stages) + costs[0].w
        deferred = min(weights, cap * max(costs[s].w for s in own_stages))
        ends.append(reaches + critical + weights - deferred + leaves)
        ends.append(reaches + critical + weights)
        # From the start of F to the end of W: one microbatch on its way to the loss and back.
        lives = math.fsum(
            down[-1] + costs[-1].f + up[s] + costs[s].b + costs[s].w - down[s] for s in own_stages
        )
        ends.append(reaches + m * lives / cap)
    return max(ends)


def gap(timeline: Timeline) -> str:
    """Says how far a schedule is at most from the best on its placement, at its peak in flight.

    Example:
      >>> from jaxpipe.schedule.generators.depth_first import one_f_one_b
      >>> from jaxpipe.schedule.simulate import simulate
      >>> gap(simulate(one_f_one_b(2, 4), Costs(1, 1, 1)))
      '1f1b: 14, at most 7.7% above the optimum on this placement at this peak'
    """
    schedule = timeline.schedule
    bound = lower_bound(
        schedule.placement,
        schedule.num_microbatches,
        timeline.costs,
        cap=max(timeline.peak_in_flight),
        num_slices=schedule.num_slices,
    )
    above = max(0.0, timeline.makespan / bound - 1)
    return (
        f"{schedule.name}: {timeline.makespan:.4g}, at most {above:.1%} above the optimum on this "
        "placement at this peak"
    )


def _first_slice(cost: Costs, num_slices: int) -> Costs:
    f, b = (cost.of(kind) + cost.more(kind, 0, num_slices) for kind in (Kind.F, Kind.B))
    return dataclasses.replace(cost, f=f, b=b)


def _ways(placement: Placement, costs: Sequence[Costs]) -> tuple[list[float], list[float]]:
    """Computes, by virtual stage, when the first microbatch's F can start, and how long after the
    end of that microbatch's last F its B can start."""
    crosses = [a != b for a, b in itertools.pairwise(placement.stages)]
    hops = [c.f + (c.message if cross else 0) for c, cross in zip(costs, crosses, strict=False)]
    backs = [c.b + (c.message if cross else 0) for c, cross in zip(costs[1:], crosses, strict=True)]
    down = list(itertools.accumulate(hops, initial=0.0))
    up = list(itertools.accumulate(reversed(backs), initial=0.0))[::-1]
    return down, up
