"""The schedule for the clock it runs on: order and slices built together, under a memory limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from jaxpipe.schedule.actions import Kind, Schedule, split_backwards
from jaxpipe.schedule.check.validate import peak_in_flight
from jaxpipe.schedule.placement import Placement, wave
from jaxpipe.schedule.problems import Problem, refuse
from jaxpipe.schedule.search.bounds import lower_bound
from jaxpipe.schedule.search.candidates import named, reordered
from jaxpipe.schedule.search.contest import Contest
from jaxpipe.schedule.search.cuts import Cut
from jaxpipe.schedule.search.order_search import search_orders
from jaxpipe.schedule.search.slices import CLOCKS, check_layer_counts, with_slices
from jaxpipe.schedule.search.tick_engine import Work
from jaxpipe.schedule.search.tick_search import TickSearch
from jaxpipe.schedule.search.tick_settings import Settings
from jaxpipe.schedule.simulate import UNIT, Costs, of_virtual_stages

_TRIALS = tuple(
    Settings(by_rank=False, by_urgency=True, shortest=0.4, eagerness=1.0, first=first)
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
    clock: str = "lock-step",
) -> Schedule:
    """Searches for the schedule that ends first under a memory limit, in lock-step by default.

    The most promising of the named schedules that fit, and of `search_orders`, are cut into slices.
    Another order is made tick by tick: what is ready runs, under a cap on chunks in flight.

    ============  =====================================================================
    bubble        V placement, (F,B,W) = (1,1.2,.8), m = 4p, lock-step bubble ratio at 8 / 4 / 2
                  layers per chunk: p=4 .039 / .044 / .042, p=8 .049 / .061 / .054
    in flight     at most memory_limit microbatches of a full stage
    constraints   p >= 1, m >= 1, any placement; memory_limit at least 1
    source        jaxpipe
    ============  =====================================================================

    Args:
      costs: of one chunk; or, if chunks differ, of every virtual stage.
      memory_limit: peak in flight per stage, in microbatches of a full stage; None for p.
      layers_per_chunk: layers of every virtual stage, at least 1, without ``layer_counts``.
      placement: None for the V: two chunks per stage.
      candidates: to slice, on this placement, as far as they fit; None for this package's.
      clock: on which it has to end first: "lock-step", as on simulated devices; or "neighbor", as
        on GPUs, where whole actions are candidates, too.

    Raises:
      ValueError: the memory limit is too small, or an argument does not fit the placement.

    Example:
      >>> from jaxpipe.schedule.simulate import lock_step
      >>> schedule = auto(2, 4, costs=Costs(1, 1.2, 0.8), layers_per_chunk=2)
      >>> round(lock_step(schedule, Costs(1, 1.2, 0.8)).bubble_ratio, 3)
      0.048
    """
    placement = placement or wave(num_stages)
    limit = num_stages if memory_limit is None else memory_limit
    check(num_stages, placement, limit)
    counts = tuple(layer_counts or [layers_per_chunk] * placement.num_virtual_stages)
    check_layer_counts(placement, counts)
    cut = Cut(placement, counts, of_virtual_stages(placement, costs))
    contest = Contest(clock)
    if candidates is None:
        found = named_for(cut, num_microbatches, limit)
        enter_named(contest, cut, found, num_microbatches, limit)
        return search_best(contest, [(cut, found)], num_microbatches, limit)
    cap = cut.cap(num_microbatches, limit)
    fitting = [s for s in candidates if max(peak_in_flight(s)) <= cap]
    if any(s.placement != placement for s in fitting):
        raise ValueError("The candidates of schedule 'auto' are not all on its placement.")
    contest.enter(cut, fitting, named=True)
    return _finished(contest, [cut], num_microbatches, limit)


def named_for(cut: Cut, num_microbatches: int, memory_limit: float) -> list[Schedule]:
    """The schedules of this package on a placement that fit the limit."""
    cap = cut.cap(num_microbatches, memory_limit)
    return named(cut.placement, num_microbatches, cap=cap, costs=_of_chunk(cut))


def enter_named(
    contest: Contest, cut: Cut, found: Iterable[Schedule], num_microbatches: int, limit: float
) -> None:
    """Enters schedules of this package on a placement, and those that users get in another order
    for its costs."""
    contest.enter(cut, found, named=True)
    cap = cut.cap(num_microbatches, limit)
    others = reordered(cut.placement, num_microbatches, cap=cap, costs=_of_chunk(cut))
    contest.enter(cut, others, named=True)


def _of_chunk(cut: Cut) -> Costs:
    """What every chunk costs, or the unit if they differ."""
    return cut.costs[0] if len(set(cut.costs)) == 1 else UNIT


def search_best(
    contest: Contest,
    known: Sequence[tuple[Cut, list[Schedule]]],
    num_microbatches: int,
    memory_limit: float,
) -> Schedule:
    """Searches orders on some placements, from schedules that are known there; the best of all
    that have entered the contest wins."""
    for cut, schedules in known:
        contest.enter(cut, schedules, named=True)
        cap = cut.cap(num_microbatches, memory_limit)
        found = search_orders(
            cut.placement,
            num_microbatches,
            costs=cut.costs,
            cap=cap,
            seeds=map(split_backwards, schedules),
            bound=lower_bound(cut.placement, num_microbatches, cut.costs, cap=cap),
        )
        contest.enter(cut, found, named=False)
    return _finished(contest, [cut for cut, _ in known], num_microbatches, memory_limit)


def _finished(
    contest: Contest, cuts: Sequence[Cut], num_microbatches: int, memory_limit: float
) -> Schedule:
    """The winner, once schedules that are built tick by tick have had their turn, too."""
    contest.compare()
    for cut in cuts:
        unordered = Schedule("auto", cut.placement, num_microbatches, ())
        work = _work(unordered, cut, cut.cap(num_microbatches, memory_limit))
        [rows] = TickSearch([work], _TRIALS).best([contest.ahead])
        if rows is not None:
            runs = CLOCKS[contest.clock]
            contest.offer(cut, runs(with_slices(unordered, rows), cut.costs))
    best = contest.best
    assert best is not None, "every stage finds room for the microbatch that is farthest"
    return dataclasses.replace(best, name="auto", peak_in_flight=peak_in_flight(best))


def check(num_stages: int, placement: Placement, memory_limit: float) -> None:
    """Refuses what no search can be made for."""
    problems = []
    if placement.num_stages != num_stages or placement.num_copies != 1:
        rule = "it must be of one copy of the model on $num_stages"
        others = {"num_stages": num_stages}
        problems.append(Problem("placement", placement, rule, (), others, "auto"))
    if not memory_limit >= 1:
        rule = "a stage keeps all chunks of a microbatch at once"
        problems.append(Problem("memory_limit", memory_limit, rule, (1,), schedule="auto"))
    refuse(problems)


def _work(schedule: Schedule, cut: Cut, cap: int) -> Work:
    """Queues by virtual stage: any order that the cap allows."""
    placement = cut.placement
    queues = [[schedule.passes(s) for s in held] for held in placement.virtual_stages]
    return Work(
        schedule=schedule,
        layer_counts=cut.layer_counts,
        costs=cut.costs,
        # The microbatch that is farthest goes first, and always finds room.
        forwards=[row[::-1] for row in queues],
        backwards=queues,
        weights=None,
        limits=[[cap - chunk for chunk in range(placement.num_chunks)]] * placement.num_stages,
    )
