"""The schedule for the clock it runs on: order and slices built together, under a memory limit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from jaxpipe.schedule.actions import Kind, Schedule
from jaxpipe.schedule.check.validate import peak_in_flight
from jaxpipe.schedule.generators.one_f_one_b import one_f_one_b
from jaxpipe.schedule.generators.v_schedules import v_half, v_min, zb_v
from jaxpipe.schedule.generators.zero_bubble import zb_h1, zb_h2
from jaxpipe.schedule.placement import Placement, linear, wave
from jaxpipe.schedule.problems import Problem, refuse
from jaxpipe.schedule.search.controllable_memory import controllable_memory
from jaxpipe.schedule.search.slices import check_layer_counts, slice_ticks, with_slices
from jaxpipe.schedule.search.tick_engine import Policy, Work
from jaxpipe.schedule.search.tick_search import Settings, TickSearch
from jaxpipe.schedule.simulate import UNIT, Costs, lock_step, simulate

_TRIALS = tuple(
    Settings((Policy(in_order=False, first=first),), shortest=0.4, eagerness=1.0)
    for first in (Kind.F, Kind.B)
)


def auto(
    num_stages: int,
    num_microbatches: int,
    *,
    costs: Costs = UNIT,
    memory_limit: float | None = None,
    layers_per_chunk: int = 4,
    layer_counts: Sequence[int] | None = None,
    placement: Placement | None = None,
    candidates: Iterable[Schedule] | None = None,
) -> Schedule:
    """Searches for the schedule that ends first in lock-step under a memory limit.

    Slices the orders of other schedules on the same placement, and one order built tick by tick:
    whatever is ready runs, under a cap on the chunks in flight. None of the candidates, sliced by
    `slice_ticks`, ends before the result.

    ============  =====================================================================
    bubble        V placement, (F,B,W) = (1,1.2,.8), m = 4p, lock-step bubble ratio at 8 / 4 / 2
                  layers per chunk: p=4 .039 / .044 / .042, p=8 .049 / .061 / .054
    in flight     at most memory_limit microbatches of a full stage
    constraints   p >= 1, m >= 1, any placement; memory_limit at least 1
    source        jaxpipe
    ============  =====================================================================

    Args:
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
    if candidates is None:
        candidates = _named(num_stages, num_microbatches, placement, cap, costs)
    fitting = [s for s in candidates if max(peak_in_flight(s)) <= cap]
    best, makespan = _best_sliced(fitting, placement, costs, counts)
    unordered = Schedule("auto", placement, num_microbatches, ())
    search = TickSearch(_work(unordered, cap, costs, counts))
    if (rows := search.best(_TRIALS, makespan=makespan)) is not None:
        best = with_slices(unordered, rows)
    assert best is not None, "every stage finds room for the microbatch that is farthest"
    return dataclasses.replace(best, name="auto", peak_in_flight=peak_in_flight(best))


def _best_sliced(
    candidates: Sequence[Schedule],
    placement: Placement,
    costs: Costs,
    layer_counts: tuple[int, ...],
) -> tuple[Schedule | None, float]:
    """The candidate that ends first once it is cut, with its makespan."""
    if any(s.placement != placement for s in candidates):
        raise ValueError("The candidates of schedule 'auto' are not all on its placement.")
    best, makespan = None, math.inf
    # Each only has to beat the best so far: start with what ends first on the free-running clock.
    for candidate in sorted(candidates, key=lambda s: simulate(s, costs).makespan):
        sliced = slice_ticks(candidate, costs, layer_counts, makespan=makespan)
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


def _named(p: int, m: int, placement: Placement, cap: int, costs: Costs) -> Iterator[Schedule]:
    """The schedules of this package on a placement."""
    if placement == linear(p):
        yield from (one_f_one_b(p, m), zb_h1(p, m), zb_h2(p, m))
    elif placement == wave(p):
        named = [zb_v(p, m), v_half(p, m), v_min(p, m)]
        yield from named
        peaks = [max(schedule.peak_in_flight or ()) for schedule in named]
        if peaks[-1] < cap < peaks[0] and cap not in peaks:
            yield controllable_memory(p, m, memory_limit=cap / 2, costs=costs)


def _work(schedule: Schedule, cap: int, costs: Costs, layer_counts: tuple[int, ...]) -> Work:
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
