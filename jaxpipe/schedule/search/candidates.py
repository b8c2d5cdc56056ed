"""The named schedules that a search starts from: those on its placement, under its memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.check.validate import peak_in_flight
from jaxpipe.schedule.generators.breadth_first import breadth_first
from jaxpipe.schedule.generators.dualpipe import dualpipe_v
from jaxpipe.schedule.generators.eager import in_time
from jaxpipe.schedule.generators.gpipe import gpipe
from jaxpipe.schedule.generators.hanayo import hanayo
from jaxpipe.schedule.generators.interleaved import interleaved
from jaxpipe.schedule.generators.one_f_one_b import one_f_one_b
from jaxpipe.schedule.generators.v_schedules import one_f_one_b_v, v_half, v_min, zb_v
from jaxpipe.schedule.generators.zero_bubble import interleaved_zb, zb_h1, zb_h2
from jaxpipe.schedule.placement import Placement, linear, looped, wave
from jaxpipe.schedule.search.controllable_memory import controllable_memory
from jaxpipe.schedule.search.dispatch import Rule, dispatch
from jaxpipe.schedule.simulate import UNIT, Costs, makespan

_NUM_ADAPTED = 1
"""Number of published orders that are worth the time to adapt them to costs."""
_RULE = Rule(pace=1.0, lead=2.0, patience=0.5, frees=True, reserves=True)
_MOST_ACTIONS = 6_000
"""Actions of the longest schedule that is adapted: longer ones would take seconds."""


def published(
    placement: Placement, num_microbatches: int, *, cap: int, costs: Sequence[Costs]
) -> list[Schedule]:
    """Builds the schedules of this package on a placement that keep at most ``cap`` chunks, and one
    by a rule, which always does.

    The `_NUM_ADAPTED` that end first also come in a second form, ordered anew for the costs. Fused
    variants are left out: those with B and W end no later.

    Args:
      costs: costs of every virtual stage.
    """
    m, chunk = num_microbatches, _of_chunk(costs)
    schedules = _fitting(_on(placement, m, cap, chunk), cap)
    if _adapts(placement, m, chunk):
        schedules.sort(key=lambda schedule: makespan(schedule, chunk))
        schedules += [in_time(schedule, chunk) for schedule in schedules[:_NUM_ADAPTED]]
    by_rule = Schedule("auto", placement, m, dispatch(placement, m, costs, cap, _RULE))
    return [*schedules, by_rule]


def reordered(
    placement: Placement, num_microbatches: int, *, cap: int, costs: Sequence[Costs]
) -> list[Schedule]:
    """Builds the schedules that `jaxpipe.schedule.catalog.build` orders anew for given costs, in
    the same order; arguments as for `published`."""
    chunk = _of_chunk(costs)
    if not _adapts(placement, num_microbatches, chunk):
        return []
    return _fitting(_reordered(placement, num_microbatches, cap, chunk), cap)


def _of_chunk(costs: Sequence[Costs]) -> Costs:
    """Costs of every chunk, or the unit if they differ."""
    return costs[0] if len(set(costs)) == 1 else UNIT


def _adapts(placement: Placement, num_microbatches: int, costs: Costs) -> bool:
    size = 3 * placement.num_virtual_stages * num_microbatches
    return costs != UNIT and size <= _MOST_ACTIONS


def _fitting(schedules: Iterator[Schedule], cap: int) -> list[Schedule]:
    return [schedule for schedule in schedules if max(peak_in_flight(schedule)) <= cap]


def _on(placement: Placement, m: int, cap: int, costs: Costs) -> Iterator[Schedule]:
    p, v = placement.num_stages, placement.num_chunks
    if v == 1 and placement == linear(p):
        yield from (gpipe(p, m), one_f_one_b(p, m), zb_h1(p, m), zb_h2(p, m))
    elif placement == looped(p, num_chunks=v):
        yield from (interleaved(p, m, num_chunks=v), interleaved_zb(p, m, num_chunks=v))
        yield from (breadth_first(p, m, num_chunks=v),)
        for group in range(-(-p // 2), p):
            yield interleaved(p, m, num_chunks=v, group=group)
    elif v % 2 == 0 and placement == wave(p, num_waves=v // 2):
        yield hanayo(p, m, num_chunks=v, memory_limit=cap / v)
        if v == 2:
            yield from (zb_v(p, m), v_half(p, m), v_min(p, m), dualpipe_v(p, m))
            yield one_f_one_b_v(p, m)
            least = min(max(v_min(p, m).peak_in_flight or ()), 2 * m)
            if least <= cap < 2 * p:
                yield controllable_memory(p, m, memory_limit=cap / 2, costs=costs)


def _reordered(placement: Placement, m: int, cap: int, costs: Costs) -> Iterator[Schedule]:
    p, v = placement.num_stages, placement.num_chunks
    if v == 1 and placement == linear(p):
        yield from (in_time(zb_h1(p, m), costs), in_time(zb_h2(p, m), costs))
    elif placement == looped(p, num_chunks=v):
        yield in_time(interleaved_zb(p, m, num_chunks=v), costs)
    elif v % 2 == 0 and placement == wave(p, num_waves=v // 2):
        yield hanayo(p, m, num_chunks=v, memory_limit=cap / v, costs=costs)
        if v == 2:
            for make in (zb_v, v_half, v_min):
                yield make(p, m, costs=costs)
            yield in_time(one_f_one_b_v(p, m), costs)
