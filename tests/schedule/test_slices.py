"""Schedules that cut sequences into slices: order, bubbles, peaks, and what cannot be sliced."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.check.validate import ScheduleError, peak_in_flight, validate
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.formats.csv_format import write_csv
from jaxpipe.schedule.formats.json_format import from_json, to_json
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.placement import linear
from jaxpipe.schedule.simulate import UNIT, Costs, simulate

NAMES = ("1f1b", "1f1b-fused", "interleaved", "interleaved-fused", "zb-h1", "interleaved-zb")
SHAPES = [*itertools.product((2, 4, 8), (1, 3, 8), (2, 4)), (3, 5, 3), (8, 4, 16)]
"""p, m and k."""


def sliced(name: str, p: int, m: int, k: int) -> Schedule:
    return catalog.build(name, stages=p, microbatches=m, slices=k)


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 9), st.integers(1, 7))
def test_every_slice_runs_once_and_in_its_order(name, p, m, k):
    schedule = sliced(name, p, m, k)
    validate(schedule)
    assert (schedule.num_microbatches, schedule.num_slices) == (m, k)
    assert from_json(to_json(schedule)) == schedule
    # Keys and values of a sequence keep their place until its last reader is done.
    table = lower(schedule, [1] * schedule.placement.num_virtual_stages)
    if k > 1:
        for order in schedule.orders:
            assert table.num_slots["carry"] >= max(sequences_in_flight(order, k))


def sequences_in_flight(order: tuple[Action, ...], k: int) -> list[int]:
    """How many sequences have begun, and not ended, after each action of a stage."""
    left: dict[tuple[int, int], int] = {}
    counts = []
    for action in order:
        place = action.virtual_stage, action.microbatch // k
        if action.kind in (Kind.W, Kind.BW):
            left[place] -= 1
        elif action.kind is Kind.F:
            left.setdefault(place, k)
        counts.append(sum(n > 0 for n in left.values()))
    return counts


@pytest.mark.parametrize(("p", "m", "k"), SHAPES)
def test_bubbles_shrink_with_slices(p, m, k):
    costs = Costs(1, 1.2, 0.8)
    work, in_w = m * k * (costs.f + costs.b + costs.w), costs.f + costs.b
    bubbles = {
        "1f1b-fused": in_w + costs.w,
        "1f1b": in_w,
        "zb-h1": in_w - costs.w if (m - 1) * k >= p - 1 else None,
    }
    for name, per_stage in bubbles.items():
        schedule = sliced(name, p, m, k)
        if per_stage is not None:
            makespan = simulate(schedule, costs).makespan
            assert makespan == pytest.approx(work + (p - 1) * per_stage)
        assert max(peak_in_flight(schedule)) == min(m * k, p + k - 1)
    if m * k % p == 0 and p % k == 0:
        schedule = sliced("interleaved-fused", p, m, k)
        chunk = sum((costs.f, costs.b, costs.w))
        assert simulate(schedule, costs).makespan == pytest.approx(2 * work + (p - 1) * chunk)


@pytest.mark.parametrize(("p", "m", "k"), SHAPES)
def test_1f1b_is_the_order_that_megatron_runs_in_slices(p, m, k):
    """As in the scheduler of sail-sg's zero-bubble-pipeline-parallelism, seq1f1b: warm-up forwards,
    then one forward and one backward in turn, slices of a backward from the last to the first."""
    orders = []
    for d in range(p):
        warm_up = min(p - d - 2 + k, m * k)
        forwards = [Action(d, Kind.F, i) for i in range(m * k)]
        backwards = [Action(d, Kind.BW, i // k * k + k - 1 - i % k) for i in range(m * k)]
        pairs = zip(forwards[warm_up:], backwards, strict=False)
        steady = [action for pair in pairs for action in pair]
        orders.append((*forwards[:warm_up], *steady, *backwards[m * k - warm_up :]))
    theirs = Schedule("seq1f1b", linear(p), m, tuple(orders), num_slices=k)
    validate(theirs)
    assert sliced("1f1b-fused", p, m, k).orders == theirs.orders


@pytest.mark.parametrize(
    ("position", "says"),
    [(0, r"0F1 on stage 0 comes before 0F0"), (-2, r"0B2 on stage 0 comes before 0B3")],
)
def test_slices_in_a_wrong_order_are_refused(position, says):
    schedule = sliced("1f1b", 2, 2, 2)
    order = [action for action in schedule.orders[0] if action.kind is not Kind.W]
    order[position], order[position + 1] = order[position + 1], order[position]
    order += [action for action in schedule.orders[0] if action.kind is Kind.W]
    wrong = dataclasses.replace(
        schedule, orders=(tuple(order), *schedule.orders[1:]), peak_in_flight=None
    )
    with pytest.raises(ScheduleError, match=says):
        validate(wrong)


@pytest.mark.parametrize("name", ["gpipe", "zb-v", "auto", "hanayo"])
def test_schedules_that_read_no_slices_refuse_them(name):
    with pytest.raises(ValueError, match=rf"slices=4 does not fit schedule '{name}'"):
        sliced(name, 4, 4, 4)


def test_the_device_clock_runs_slices_like_microbatches():
    schedule = sliced("zb-h1", 4, 4, 4)
    whole = dataclasses.replace(schedule, num_microbatches=16, num_slices=1)
    assert device_clock(schedule, UNIT).makespan == device_clock(whole, UNIT).makespan


@pytest.mark.parametrize("name", ["1f1b-fused", "zb-h1"])
def test_later_slices_take_longer(name):
    """All attention: slice j of 4 takes 1, 3, 5, 7 quarters of the average, W aside."""
    schedule, costs = sliced(name, 1, 1, 4), Costs(1, 2, 1, attention=1.0)
    for clock in (simulate, device_clock):
        timeline = clock(schedule, costs)
        lengths = {str(part.action): part.end - part.start for part in timeline.rows[0]}
        assert [lengths[f"0F{j}"] for j in range(4)] == [0.25, 0.75, 1.25, 1.75]
        assert timeline.makespan == 4 * (1 + 2 + 1)
        assert timeline.bubble_ratio == 0


def test_csv_of_slices_is_refused():
    with pytest.raises(ScheduleError, match="cuts sequences into 4 slices, and PyTorch's format"):
        write_csv(sliced("1f1b", 2, 2, 4))
