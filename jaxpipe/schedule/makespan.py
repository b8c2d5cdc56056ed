"""The end of a schedule on the free-running clock, for searches that compare thousands."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.check.walk import Results
from jaxpipe.schedule.simulate import Costs, of_virtual_stages, simulate


def makespan(schedule: Schedule, costs: Costs | Sequence[Costs]) -> float:
    """The makespan of `simulate`, to the last bit, in a fraction of the time.

    Args:
      costs: as for `simulate`.

    Raises:
      ScheduleError, ValueError: as `simulate`.

    Example:
      >>> from jaxpipe.schedule.generators.one_f_one_b import one_f_one_b
      >>> makespan(one_f_one_b(4, 8, fused=True), Costs(1, 1, 1))
      33.0
    """
    if schedule.overlapped:
        return simulate(schedule, costs).makespan
    prices, stages = of_virtual_stages(schedule.placement, costs), schedule.placement.stages
    results = Results(schedule)

    def needs(action: Action) -> tuple[int, list[tuple[int, float]], float]:
        """Returns microbatch 0's result by number, its inputs with message times, its duration."""
        number, inputs = results.first(action)
        own, cost = stages[action.virtual_stage], prices[action.virtual_stage]
        senders = [results.action(needed).virtual_stage for needed in inputs]
        lags = [prices[s].message if stages[s] != own else 0.0 for s in senders]
        return number, [*zip(inputs, lags, strict=True)], cost.of(action.kind)

    known: dict[tuple[Kind, int], tuple[int, list[tuple[int, float]], float]] = {}
    ends: dict[int, float] = {}
    waiting: dict[int, list[int]] = collections.defaultdict(list)  # result -> stages
    rows = [iter(order) for order in schedule.orders]
    heads = [next(row, None) for row in rows]
    free, ready = [0.0] * len(rows), [*range(len(rows))]
    while ready:
        stage = ready.pop()
        action, end, awaited = heads[stage], free[stage], None
        while action is not None and awaited is None:
            place, i = (action.kind, action.virtual_stage), action.microbatch
            if (needed_by_kind := known.get(place)) is None:
                needed_by_kind = known[place] = needs(action)
            number, inputs, duration = needed_by_kind
            start = end
            for needed, lag in inputs:
                if (arrival := ends.get(needed + i)) is None:
                    awaited = needed + i
                    waiting[awaited].append(stage)
                    break
                start = max(start, arrival + lag)
            else:
                end = start + duration
                action = next(rows[stage], None)
                if place[0] is not Kind.W:
                    ends[number + i] = end
                    ready += waiting.pop(number + i, ())
        heads[stage], free[stage] = action, end
    if any(heads):
        # `simulate` says why stages wait for each other.
        return simulate(schedule, costs).makespan
    return max(free)
