"""Time slices: cutting the actions of a schedule into ticks for the lock-step clock.

A tick lasts as long as its slowest stage. With one whole action per tick, a stage that runs a short
F waits for one that runs a long B. A stage may therefore run some of an action's layers and
continue in the next tick, and W may fill the rest of a tick.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxpipe.schedule.actions import Kind, Schedule, Slice, split_backwards
from jaxpipe.schedule.check.slice_rules import order_of
from jaxpipe.schedule.check.validate import peak_in_flight
from jaxpipe.schedule.neighbors import neighbor_clock
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.problems import Problem, refuse
from jaxpipe.schedule.search.tick_engine import Work
from jaxpipe.schedule.search.tick_search import TickSearch
from jaxpipe.schedule.search.tick_settings import Settings
from jaxpipe.schedule.simulate import Costs, Timeline, lock_step, of_virtual_stages

CLOCKS = {"lock-step": lock_step, "neighbor": neighbor_clock}
"""Those that a schedule can be planned for: of simulated devices, and of GPUs."""

FIRST_TRIAL = (Settings(by_rank=False, by_urgency=True, shortest=0.2, eagerness=0.3),)
OTHER_TRIALS = (
    Settings(by_rank=True, by_urgency=False, shortest=0.1, eagerness=0.3),
    Settings(by_rank=False, by_urgency=True, shortest=0.4, eagerness=0.3, drains=True),
    Settings(by_rank=True, by_urgency=True, shortest=0.4, eagerness=1.0),
    Settings(by_rank=True, by_urgency=True, shortest=0.4, eagerness=0.3),
)
"""Each is the best of a wide sweep for some schedule."""
_QUICK = (FIRST_TRIAL[0]._replace(cells=15_000),)


def slice_ticks(
    schedule: Schedule,
    costs: Costs | Sequence[Costs],
    layer_counts: Sequence[int],
    *,
    quick: bool = False,
    clock: str = "lock-step",
) -> Schedule:
    """Cuts the actions of a schedule into ticks, so that it ends as early as possible in lock-step.

    The order of the F, of the B and of the W of each stage stays. Between kinds, an action that is
    ready may go first: W fills ticks, and F and B do not wait for each other, within the schedule's
    own peak in flight. A beam search chooses the length of every tick
    (`jaxpipe.schedule.search.tick_search`); the result never takes longer than one whole action per
    tick.

    Args:
      costs: of one chunk, however many layers it has; or, if chunks differ, of every virtual stage.
        The layers of a chunk count as alike.
      layer_counts: layers of every virtual stage, at least 1 each.
      quick: search for about a tenth of the time, to compare schedules.
      clock: on which the result has to end before whole actions: "lock-step", or "neighbor", as on
        GPUs. Slices are searched for lock-step in any case.

    Returns:
      The schedule with `Schedule.slices`, and its orders as the slices have them (`order_of`);
      without slices if nothing is found that beats one whole action per tick. Deterministic.

    Raises:
      ValueError: ``layer_counts`` does not fit the schedule.

    Example:
      >>> from jaxpipe.schedule.generators.one_f_one_b import one_f_one_b
      >>> costs, schedule = Costs(1, 1.2, 0.8), one_f_one_b(4, 16)
      >>> round(lock_step(schedule, costs).bubble_ratio, 3)
      0.245
      >>> sliced = slice_ticks(schedule, costs, [8] * 4)
      >>> round(lock_step(sliced, costs).bubble_ratio, 3)
      0.127
    """
    costs = of_virtual_stages(schedule.placement, costs)
    trials = _QUICK if quick else (*FIRST_TRIAL, *OTHER_TRIALS)
    [found] = slice_all([Uncut(schedule, costs, tuple(layer_counts))], trials, clock=clock)
    return found.schedule


class Uncut(NamedTuple):
    """A schedule to be cut into slices, with costs and layers of every virtual stage."""

    schedule: Schedule
    costs: tuple[Costs, ...]
    layer_counts: tuple[int, ...]


def slice_all(
    uncut: Sequence[Uncut],
    trials: Sequence[Settings],
    *,
    clock: str = "lock-step",
    makespan: float = math.inf,
) -> list[Timeline]:
    """Cuts schedules of equally many stages as `slice_ticks` does each; together it takes less
    time.

    Args:
      trials: the ways to search; the best of their results counts.
      clock: as for `slice_ticks`.
      makespan: searches stop once they cannot end before this; those that do end as they would
        have without it.

    Returns:
      Of each, what ends first on the clock.
    """
    works, wholes = [], []
    for schedule, costs, layer_counts in uncut:
        check_layer_counts(schedule.placement, layer_counts)
        if schedule.minibatches is not None:
            raise ValueError(
                f"Schedule {schedule.name!r} has ticks of its own, in which a stage runs whole "
                "actions."
            )
        whole = dataclasses.replace(schedule, slices=None)
        apart = split_backwards(whole) if whole.mixes_backwards else whole
        works.append(_work(apart, costs, layer_counts))
        wholes.append(lock_step(whole, costs))
    if not works:
        return []
    found = TickSearch(works, trials).best([whole.makespan for whole in wholes], makespan=makespan)
    best, runs = [], CLOCKS[clock]
    for work, one_by_one, rows in zip(works, wholes, found, strict=True):
        timeline = one_by_one
        if clock != "lock-step":
            timeline = runs(one_by_one.schedule, work.costs)
        if rows is not None:
            sliced = runs(with_slices(work.schedule, rows), work.costs)
            timeline = min(sliced, timeline, key=lambda each: each.makespan)
        best.append(timeline)
    return best


def check_layer_counts(placement: Placement, layer_counts: Sequence[int]) -> None:
    """Raises ValueError unless there is one layer count, at least 1, for every virtual stage."""
    needed = placement.num_virtual_stages
    if len(layer_counts) != needed or min(layer_counts) < 1:
        rule = f"does not fit {needed} virtual stages: each needs its number of layers, at least 1"
        refuse([Problem("layer_counts", tuple(layer_counts), rule, ((1,) * needed,))])


def with_slices(schedule: Schedule, rows: Iterable[Iterable[Slice]]) -> Schedule:
    """Gives a schedule slices, per stage in order, and the orders that follow (`order_of`)."""
    slices = tuple(map(tuple, rows))
    orders = tuple(map(order_of, slices))
    return dataclasses.replace(schedule, slices=slices, orders=orders, overlapped=())


def _work(schedule: Schedule, costs: tuple[Costs, ...], layer_counts: tuple[int, ...]) -> Work:
    """The queues of a schedule: per stage, one of each kind."""
    queues: list[list[list[int]]] = [[], [], []]
    ranks = tuple([0] * schedule.num_passes for _ in queues)
    column = {Kind.F: 0, Kind.B: 1, Kind.BW: 1, Kind.W: 2}
    fused = set()
    for order in schedule.orders:
        for queue in queues:
            queue.append([])
        for rank, action in enumerate(order):
            number = schedule.number(action.virtual_stage, action.microbatch)
            kind = column[action.kind]
            queues[kind][-1].append(number)
            ranks[kind][number] = rank
            if action.kind is Kind.BW:
                fused.add(number)
    return Work(
        schedule=schedule,
        layer_counts=layer_counts,
        costs=costs,
        forwards=[[queue] for queue in queues[0]],
        backwards=[[queue] for queue in queues[1]],
        weights=queues[2],
        limits=[[peak] for peak in peak_in_flight(schedule)],
        fused=frozenset(fused),
        ranks=ranks,
    )
