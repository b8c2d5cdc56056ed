"""Named schedules are at least as good as others' of the same name, in makespan and in peak."""

import dataclasses
import itertools

import pytest

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.check import peak_in_flight, validate
from jaxpipe.schedule.placement import looped
from jaxpipe.schedule.simulate import UNIT, Costs, simulate

SAMPLE = ((2, 3), (3, 2), (4, 4), (4, 8), (5, 7), (8, 8), (8, 16))
GRID = tuple(itertools.product(range(2, 10), range(1, 26)))
"""p and m."""
grids = pytest.mark.parametrize(
    "grid", [SAMPLE, pytest.param(GRID, marks=pytest.mark.slow)], ids=["sample", "grid"]
)


def makespan(schedule: Schedule, costs: Costs = UNIT) -> float:
    return simulate(schedule, costs).makespan


def assert_at_least_equal(ours: Schedule, other: Schedule) -> None:
    """Ours ends no later, and keeps no more in flight where a stage keeps the most."""
    assert makespan(ours) <= makespan(other)
    assert max(peak_in_flight(ours)) <= max(peak_in_flight(other))


def interleaved_in_pytorch(p: int, m: int, v: int) -> Schedule | None:
    """What PyTorch's ScheduleInterleavedZeroBubble runs; None if it refuses the shape.

    Microbatches go in equal rounds. Stage d starts with (v-1) rounds and one forward per stage
    behind it, then runs F and B in turn, and W from the d-th B on.
    """
    rounds = max(1, m // p)
    if m % rounds:
        return None
    size = m // rounds
    passes = [
        (chunk, i)
        for first in range(0, m, size)
        for chunk in range(v)
        for i in range(first, first + size)
    ]
    orders = []
    for d in range(p):
        forwards = [Action(chunk * p + d, Kind.F, i) for chunk, i in passes]
        backwards = [Action((v - 1 - chunk) * p + d, Kind.B, i) for chunk, i in passes]
        order = [forwards.pop(0) for _ in range(min(m * v, (v - 1) * size + p - 1 - d))]
        deferred: list[Action] = []
        for number, backward in enumerate(backwards):
            order += [forwards.pop(0)] if forwards else []
            order.append(backward)
            deferred.append(dataclasses.replace(backward, kind=Kind.W))
            if number >= d:
                order.append(deferred.pop(0))
        orders.append((*order, *deferred))
    return Schedule("pytorch", looped(p, num_chunks=v), m, tuple(orders))


@grids
def test_interleaved_schedules_are_as_good_as_pytorchs(grid):
    for (p, m), v in itertools.product(grid, (1, 2, 4)):
        if (other := interleaved_in_pytorch(p, m, v)) is not None:
            ours = catalog.build("interleaved-zb", stages=p, microbatches=m, chunks=v)
            assert_at_least_equal(ours, other)


@pytest.mark.parametrize(
    "grid",
    [((2, 7), (3, 2), (3, 17), (5, 14)), pytest.param(GRID, marks=pytest.mark.slow)],
    ids=["sample", "grid"],
)
def test_no_group_of_fused_interleaving_ends_before_the_usual_one(grid):
    for (p, m), v in itertools.product(grid, (2, 3)):
        shape = {"stages": p, "microbatches": m, "chunks": v}
        usual = catalog.build("interleaved-fused", **shape)
        for group in range(p, max(p, m) + 1):
            other = catalog.build("interleaved-fused", **shape, group=group)
            assert makespan(usual) <= makespan(other)
            if makespan(usual) == makespan(other):
                assert max(peak_in_flight(usual)) <= max(peak_in_flight(other))


@grids
def test_zb_h2_never_ends_after_zb_h1(grid):
    for p, m in grid:
        first, second = (catalog.build(f"zb-h{n}", stages=p, microbatches=m) for n in (1, 2))
        assert makespan(second) <= makespan(first)


def test_groups_smaller_than_the_pipeline():
    # The published group schedule of the controllable-memory paper's authors.
    schedule = catalog.build("interleaved", stages=4, microbatches=8, chunks=2, group=2)
    assert (makespan(schedule) / 2, max(peak_in_flight(schedule)) / 2) == (28, 3)


def test_v_min_of_two_stages_is_v_half():
    for m in range(1, 12):
        least, half = (catalog.build(n, stages=2, microbatches=m) for n in ("v-min", "v-half"))
        assert least == dataclasses.replace(half, name="v-min")


REORDERED = [entry.name for entry in catalog.entries() if entry.reordered]
COSTS = (Costs(1, 1, 1, 0.1), Costs(1, 1.2, 0.8, 0.5), Costs(1, 2, 1), Costs(3, 4, 2, 1))
COVERING = [(shape, COSTS[n % len(COSTS)]) for n, shape in enumerate(SAMPLE[:-2])]
"""Shapes of the sample, each with one of the costs."""


@pytest.mark.parametrize(
    "grid",
    [COVERING, pytest.param([*itertools.product(GRID, COSTS)], marks=pytest.mark.slow)],
    ids=["sample", "grid"],
)
@pytest.mark.parametrize("name", REORDERED)
def test_orders_for_real_costs_are_never_behind_the_published_ones(name, grid):
    for (p, m), costs in grid:
        shape = {"stages": p, "microbatches": m, "costs": costs}
        published = catalog.build(f"{name}-published", **shape)
        assert published.orders == catalog.build(name, stages=p, microbatches=m).orders
        ours = catalog.build(name, **shape)
        validate(ours)
        assert makespan(ours, costs) <= makespan(published, costs)
        assert max(peak_in_flight(ours)) <= max(published.peak_in_flight)


MESSAGES = Costs(1, 1, 1, 0.1)


@pytest.mark.parametrize(
    ("name", "p", "m", "chunks", "costs", "published", "ours"),
    [
        # What the controllable-memory paper's authors' published code gives, which we never exceed.
        ("1f1b-v", 4, 8, 2, UNIT, None, 63),
        ("1f1b-v", 8, 11, 2, Costs(3, 4, 2, 1), None, 347),
        ("1f1b-v", 6, 13, 2, Costs(1.3, 0.9, 1.1, 0.25), None, 121.2),
        ("zb-v", 3, 9, 2, MESSAGES, None, 56.8),
        ("zb-v", 8, 16, 2, MESSAGES, None, 106.3),
        # Messages of .1 of a full stage's F; fused 1F1B takes 123.8 and ZB-H1 105.8.
        ("hanayo-fused", 8, 32, 2, Costs(0.5, 0.5, 0.5, 0.1), 117.2, 114.0),
        ("hanayo", 8, 32, 2, Costs(0.5, 0.5, 0.5, 0.1), 113.5, 102.8),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("hanayo-fused", 8, 32, 4, Costs(0.25, 0.25, 0.25, 0.1), 124.5, 113.45),
                ("hanayo-fused", 8, 32, 8, Costs(0.125, 0.125, 0.125, 0.1), 139.3, 122.95),
                ("hanayo", 8, 32, 4, Costs(0.25, 0.25, 0.25, 0.1), 125.1, 103.1),
            )
        ),
        # At the same memory the search over all blocks finds 61.1, 67.7 and 44.5.
        ("v-half", 8, 16, 2, Costs(0.5, 0.5, 0.5, 0.1), 62.7, 61.1),
        ("v-min", 8, 16, 2, Costs(0.5, 0.5, 0.5, 0.1), 71.9, 67.3),
        ("v-half", 6, 12, 2, Costs(0.5, 0.5, 0.5, 0.1), 45.9, 44.5),
        ("v-min", 5, 10, 2, Costs(0.5, 0.5, 0.5, 0.2), 48.7, 40.6),
        ("v-min", 2, 6, 2, Costs(0.5, 0.5, 0.5, 0.2), 19.5, 19.1),
        ("zb-v", 5, 10, 2, Costs(0.5, 0.5, 0.5, 0.1), 34.0, 33.6),
    ],
)
def test_orders_for_real_costs_end_as_early_as_stated(name, p, m, chunks, costs, published, ours):
    shape = {"stages": p, "microbatches": m, "chunks": chunks, "costs": costs}
    schedule = catalog.build(name, **shape)
    validate(schedule)
    if published is None:
        assert makespan(schedule, costs) <= ours + 1e-9
    else:
        found = makespan(catalog.build(f"{name}-published", **shape), costs)
        assert (found, makespan(schedule, costs)) == pytest.approx((published, ours), abs=0.05)
