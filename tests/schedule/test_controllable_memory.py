"""The controllable-memory family: the paper's table, and the frontier of the search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.check.validate import validate
from jaxpipe.schedule.generators.v_schedules import (
    one_f_one_b_v,
    v_half,
    v_min,
    v_zb,
    zb_v,
)
from jaxpipe.schedule.search import controllable_memory
from jaxpipe.schedule.simulate import Costs, simulate

UNIT = Costs(1, 1, 1)
NAMED = (v_min, v_half, v_zb, zb_v, one_f_one_b_v)
SPLIT = (v_min, v_half, v_zb)


def search(p, m, k, costs=UNIT):
    return controllable_memory.controllable_memory(p, m, memory_limit=k / 2, costs=costs)


def excess(schedule, costs=UNIT):
    """Longest span of a stage and makespan, less a stage's own work."""
    timeline = simulate(schedule, costs)
    work = 2 * schedule.num_microbatches * (costs.f + costs.b + costs.w)
    return max(timeline.stage_spans) - work, timeline.makespan - work


def peak(schedule):
    return max(simulate(schedule, UNIT).peak_in_flight)


@pytest.mark.parametrize(
    ("p", "table"),
    [
        (4, {v_min: (11, 4), v_half: (5, 6), v_zb: (0, 8), zb_v: (0, 8)}),
        (5, {v_min: (15, 6), v_half: (11, 6), v_zb: (0, 10), zb_v: (0, 10)}),
        (6, {v_min: (17, 6), v_half: (11, 8), v_zb: (0, 12), zb_v: (0, 12)}),
        (8, {v_min: (27, 8), v_half: (17, 10), v_zb: (0, 16), zb_v: (0, 16)}),
    ],
)
def test_bubble_and_peak_of_the_papers_table(p, table):
    for generate, (bubble, k) in table.items():
        for extra in (0, 1, 13):
            schedule = generate(p, 2 * p + extra)
            assert (excess(schedule)[0], peak(schedule)) == (bubble, k)


@settings(max_examples=30)
@given(generate=st.sampled_from(NAMED), p=st.integers(1, 9), m=st.integers(1, 24))
def test_every_action_once_in_order_and_within_the_promise(generate, p, m):
    schedule = generate(p, m)
    validate(schedule)
    assert all(promised <= 2 * m for promised in schedule.peak_in_flight)
    backward = {Kind.BW} if generate is one_f_one_b_v else {Kind.B, Kind.W}
    assert {a.kind for order in schedule.orders for a in order} == {Kind.F, *backward}
    assert schedule.placement.stages == (*range(p), *reversed(range(p)))


@pytest.mark.parametrize("generate", NAMED)
def test_weight_gradients_are_computed_first_in_first_out(generate):
    for order in generate(4, 9).orders:
        of = {kind: [(a.virtual_stage, a.microbatch) for a in order if a.kind is kind]
              for kind in (Kind.B, Kind.W)}  # fmt: skip
        assert of[Kind.B] == of[Kind.W]


FRONTIER = {(p, k): 6 * p - 1 - 3 * k for p in range(4, 13) for k in range(max(p, 6), 2 * p - 1)}
FRONTIER |= {(p, 2 * p - 1): 3 for p in range(4, 13)} | {(p, 2 * p): 0 for p in range(4, 13)}
FRONTIER[4, 4], FRONTIER[4, 5] = 11, 8


@pytest.mark.parametrize(
    "stages", [(4,), pytest.param(range(4, 13), marks=pytest.mark.slow)], ids=["sample", "all"]
)
def test_search_reaches_the_frontier(stages):
    for p, k in sorted(FRONTIER):
        if p in stages:
            schedule = search(p, 2 * p, k)
            validate(schedule)
            assert peak(schedule) <= k
            assert schedule.peak_in_flight == (k,) * p
            assert excess(schedule)[0] == FRONTIER[p, k]


def test_search_beats_v_min_at_its_memory():
    assert excess(search(8, 32, 8)) < excess(v_min(8, 32))


@pytest.mark.parametrize("costs", [Costs(1, 1.2, 0.8), Costs(1, 1, 1, 0.5)])
@pytest.mark.parametrize("generate", SPLIT)
def test_search_is_never_worse_than_the_named_schedules(generate, costs):
    named = generate(4, 14)
    found = search(4, 14, peak(named), costs)
    assert simulate(found, costs).makespan <= simulate(named, costs).makespan


def test_search_uses_the_costs():
    # Twice the backward, as without recomputation: the order for equal costs is far worse.
    costs = Costs(1, 2, 1)
    assert excess(search(4, 24, 6, costs), costs)[1] <= 13
    assert excess(search(4, 24, 6), costs)[1] > 13


@settings(max_examples=8)
@given(p=st.integers(1, 5), m=st.integers(1, 9), halves=st.integers(0, 8))
def test_search_with_few_microbatches_and_any_limit_that_fits(p, m, halves):
    k = min(peak(v_min(p, 2 * p)), 2 * m) + halves
    schedule = search(p, m, k)
    validate(schedule)
    assert peak(schedule) <= min(k, 2 * m)


def test_no_limit_means_all_microbatches():
    assert search(2, 4, float("inf")).peak_in_flight == (8, 8)


@pytest.mark.parametrize("limit", [0, -1, 1.5, 3.9, float("nan")])
def test_limits_below_every_block_get_the_nearest(limit):
    with pytest.raises(ValueError, match=r"^memory_limit=.*num_stages=8 .*\nNearest valid: 4\.$"):
        controllable_memory.controllable_memory(8, 32, memory_limit=limit)
