"""The schedule for the clock it runs on: order and slices built together, under a memory limit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jaxpipe.schedule.actions import Kind, Schedule
from jaxpipe.schedule.check.validate import peak_in_flight
from jaxpipe.schedule.placement import Placement, wave
from jaxpipe.schedule.problems import Problem, refuse
from jaxpipe.schedule.search.bounds import lower_bound
from jaxpipe.schedule.search.candidates import named
from jaxpipe.schedule.search.order_search import search_orders, split
from jaxpipe.schedule.search.slices import check_layer_counts, slice_ticks, with_slices
from jaxpipe.schedule.search.tick_engine import Policy, Work
from jaxpipe.schedule.search.tick_search import Settings, TickSearch
from jaxpipe.schedule.simulate import UNIT, Costs, lock_step, of_virtual_stages, simulate

_NUM_COMPARED, _NUM_CUT = 8, 4
"""How many of the orders that end first on the free-running clock are cut quickly, and how many of
those, the ones that end first in lock-step, with care."""
_CUT_ACTIONS = 36_000
"""How many actions may be cut quickly, and a third of it with care; at least one schedule is."""
_TRIALS = tuple(
    Settings((Policy(in_order=False, first=first),), shortest=0.4, eagerness=1.0)
    for first in (Kind.F, Kind.B)
)


def auto(
    num_stages: int,
    num_microbatches: int,
    *,
    costs: Costs | Sequence[Costs] = UNIT,
    memory_limit: float | None = None,
    layers_per_chunk: int = 4,
    layer_counts: Sequence[int] | None = None,
    placement: Placement | None = None,
    candidates: Iterable[Schedule] | None = None,
) -> Schedule:
    """Searches for the schedule that ends first in lock-step under a memory limit.

    Takes the named schedules that fit and the best orders of `search_orders`, slices the most
    promising of them by `slice_ticks`, and also builds one order tick by tick: whatever is ready
    runs, under a cap on the chunks in flight. The best of all wins.

    ============  =====================================================================
    bubble        V placement, (F,B,W) = (1,1.2,.8), m = 4p, lock-step bubble ratio at 8 / 4 / 2
                  layers per chunk: p=4 .039 / .044 / .042, p=8 .049 / .061 / .054
    in flight     at most memory_limit microbatches of a full stage
    constraints   p >= 1, m >= 1, any placement; memory_limit at least 1
    source        jaxpipe
    ============  =====================================================================

    Args:
      costs: of one chunk; or, if chunks differ, of every virtual stage.
      memory_limit: peak in flight per stage, in microbatches of a full stage, at least 1; None for
        p, which is 1F1B's.
      layers_per_chunk: layers of every virtual stage, at least 1, without ``layer_counts``.
      placement: None for the V: two chunks per stage.
      candidates: schedules to slice, on this placement; those that need more memory are left out.
        None for those of this package that fit.

    Raises:
      ValueError: the memory limit is too small, or an argument does not fit the placement.

    Example:
      >>> schedule = auto(4, 16, costs=Costs(1, 1.2, 0.8), layers_per_chunk=8)
      >>> round(lock_step(schedule, Costs(1, 1.2, 0.8)).bubble_ratio, 3)
      0.039
    """
    placement = placement or wave(num_stages)
    limit = num_stages if memory_limit is None else memory_limit
    _check(num_stages, placement, limit)
    counts = tuple(layer_counts or [layers_per_chunk] * placement.num_virtual_stages)
    check_layer_counts(placement, counts)
    cap = int(min(limit, num_microbatches) * placement.num_chunks)
    costs = of_virtual_stages(placement, costs)
    if candidates is None:
        candidates = _candidates(placement, num_microbatches, cap, costs)
    fitting = [s for s in candidates if max(peak_in_flight(s)) <= cap]
    best, makespan = _best_sliced(fitting, placement, costs, counts)
    unordered = Schedule("auto", placement, num_microbatches, ())
    search = TickSearch(_work(unordered, cap, costs, counts))
    if (rows := search.best(_TRIALS, makespan=makespan)) is not None:
        best = with_slices(unordered, rows)
    assert best is not None, "every stage finds room for the microbatch that is farthest"
    return dataclasses.replace(best, name="auto", peak_in_flight=peak_in_flight(best))


def _candidates(
    placement: Placement, num_microbatches: int, cap: int, costs: tuple[Costs, ...]
) -> list[Schedule]:
    """The schedules of this package that fit, and the best orders found from there on."""
    same = costs[0] if len(set(costs)) == 1 else UNIT
    known = named(placement, num_microbatches, cap=cap, costs=same)
    bound = lower_bound(placement, num_microbatches, costs, cap=cap)
    seeds = [split(schedule) for schedule in known]
    return known + search_orders(
        placement, num_microbatches, costs=costs, cap=cap, seeds=seeds, bound=bound
    )


def _best_sliced(
    candidates: Sequence[Schedule],
    placement: Placement,
    costs: tuple[Costs, ...],
    layer_counts: tuple[int, ...],
) -> tuple[Schedule | None, float]:
    """The candidate that ends first once it is cut, with its makespan."""
    if any(s.placement != placement for s in candidates):
        raise ValueError("The candidates of schedule 'auto' are not all on its placement.")
    best, makespan = None, math.inf
    distinct = {schedule.orders: schedule for schedule in reversed(candidates)}.values()
    timed = sorted(distinct, key=lambda schedule: simulate(schedule, costs).makespan)
    compared = []
    size = sum(map(len, timed[0].orders)) if timed else 1
    num_compared = max(1, min(_NUM_COMPARED, _CUT_ACTIONS // size))
    num_cut = max(1, min(_NUM_CUT, _CUT_ACTIONS // 3 // size))
    for number, schedule in enumerate(timed[:num_compared]):
        sliced = slice_ticks(schedule, costs, layer_counts, quick=True)
        compared.append((lock_step(sliced, costs).makespan, number, sliced))
    for time, number, quick in sorted(compared, key=lambda item: item[:2])[:num_cut]:
        if time < makespan:
            best, makespan = quick, time
        # It only has to beat the best so far.
        sliced = slice_ticks(timed[number], costs, layer_counts, makespan=makespan)
        time = lock_step(sliced, costs).makespan
        if time < makespan:
            best, makespan = sliced, time
    return best, makespan


def _check(num_stages: int, placement: Placement, memory_limit: float) -> None:
    problems = []
    if placement.num_stages != num_stages or placement.num_copies != 1:
        rule = "it must be of one copy of the model on $num_stages"
        others = {"num_stages": num_stages}
        problems.append(Problem("placement", placement, rule, (), others, "auto"))
    if not memory_limit >= 1:
        rule = "a stage keeps all chunks of a microbatch at once"
        problems.append(Problem("memory_limit", memory_limit, rule, (1,), schedule="auto"))
    refuse(problems)


def _work(
    schedule: Schedule, cap: int, costs: tuple[Costs, ...], layer_counts: tuple[int, ...]
) -> Work:
    """Queues by virtual stage: any order that the cap allows."""
    placement = schedule.placement
    queues = [[schedule.passes(s) for s in held] for held in placement.virtual_stages]
    return Work(
        schedule=schedule,
        layer_counts=layer_counts,
        costs=costs,
        # The microbatch that is farthest goes first, and always finds room.
        forwards=[row[::-1] for row in queues],
        backwards=queues,
        weights=None,
        limits=[[cap - chunk for chunk in range(placement.num_chunks)]] * placement.num_stages,
    )
