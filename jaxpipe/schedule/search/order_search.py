"""The search for orders that end early on the free-running clock, under a memory limit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.search.dispatch import Rule, dispatch
from jaxpipe.schedule.search.local_search import improve
from jaxpipe.schedule.simulate import Costs, makespan

_PACES = (0.0, 0.3, 0.5, 0.75, 1.0, 1.3)
_LEADS = (0.0, 1.0, 2.0, 4.0, 8.0)
_PATIENCE = (0.0, 0.5, 0.99)
_STRIDE = 7
"""Step in which rules are tried, so that the first ones are unlike each other."""
_RULE_ACTIONS = 200_000
"""Number of actions that the rules may order: less than a second."""
_FINAL_ACTIONS = 50_000
"""Number of actions that the best of them may order once all microbatches are there."""
_MOVED_ACTIONS = 800_000
"""Number of actions that local search may time: about a second."""
_FEWEST_MOVES, _MOST_MOVES = 30, 3_000
_NUM_STARTS = 8
"""Number of orders from which local search starts; more moves from fewer find less."""


def search_orders(
    placement: Placement,
    num_microbatches: int,
    *,
    costs: Sequence[Costs],
    cap: int,
    seeds: Iterable[Schedule] = (),
    bound: float = 0.0,
) -> list[Schedule]:
    """Finds orders that end early on the free-running clock.

    Tries rules (`dispatch`), which see the costs and the limit, takes the seeds as they are, and
    improves the best of both step by step (`improve`). Deterministic.

    Args:
      costs: costs of every virtual stage.
      cap: the most chunks in flight on a stage, at least those of one microbatch.
      seeds: split schedules on this placement, within the cap.
      bound: no schedule ends before this.

    Returns:
      Schedules, the one that ends first in front.
    """
    schedules = [*seeds, *_by_rules(placement, num_microbatches, costs, cap)]
    timed = sorted(((makespan(s, costs), k) for k, s in enumerate(schedules)))
    distinct = {schedules[k].orders: (time, schedules[k]) for time, k in reversed(timed)}
    best = sorted(distinct.values(), key=lambda item: item[0])[:_NUM_STARTS]
    size = 3 * placement.num_virtual_stages * num_microbatches
    moves = min(_MOST_MOVES, _MOVED_ACTIONS // size // _NUM_STARTS)
    if moves < _FEWEST_MOVES:
        moves = 0
    improved: list[tuple[float, Schedule]] = []
    for time, schedule in best:
        if improved and improved[-1][0] <= bound * (1 + 1e-9):
            break
        if time > bound and moves:
            schedule = improve(schedule, costs, cap=cap, moves=moves, bound=bound)
            time = makespan(schedule, costs)
        improved.append((time, schedule))
    improved.sort(key=lambda item: item[0])
    return [schedule for _, schedule in improved]


def _by_rules(
    placement: Placement, num_microbatches: int, costs: Sequence[Costs], cap: int
) -> Iterator[Schedule]:
    """Yields the best schedules by rules; three rounds of the pipeline show how good a rule is."""
    trial = min(num_microbatches, 3 * placement.num_stages)
    size = 3 * placement.num_virtual_stages * trial

    def ordered(rule: Rule, count: int) -> Schedule:
        orders = dispatch(placement, count, costs, cap, rule)
        return Schedule("auto", placement, count, orders)

    tried = []
    for rule in itertools.islice(_rules(placement), max(1, _RULE_ACTIONS // size)):
        schedule = ordered(rule, trial)
        tried.append((makespan(schedule, costs), rule, schedule))
    tried.sort(key=lambda item: item[:2])
    if trial == num_microbatches:
        yield from (schedule for _, _, schedule in tried[: 4 * _NUM_STARTS])
    else:
        whole = 3 * placement.num_virtual_stages * num_microbatches
        number = max(1, min(2 * _NUM_STARTS, _FINAL_ACTIONS // whole))
        yield from (ordered(rule, num_microbatches) for _, rule, _ in tried[:number])


def _rules(placement: Placement) -> Iterator[Rule]:
    reserves = (False, True) if placement.num_chunks > 1 else (False,)
    grid = [*itertools.product(_PACES, _LEADS, _PATIENCE, (False, True), reserves)]
    return (Rule(*grid[k * _STRIDE % len(grid)]) for k in range(len(grid)))
