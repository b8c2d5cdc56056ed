"""Schedules that cut sequences into slices: order, bubbles, peaks, and what cannot be sliced."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.check import ScheduleError, peak_in_flight, validate
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.formats import from_json, to_json
from jaxpipe.schedule.generators.eager import in_time
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.placement import linear
from jaxpipe.schedule.simulate import UNIT, Costs, simulate

NAMES = (
    *("gpipe", "gpipe-fused", "breadth-first", "breadth-first-descending", "modular-fused"),
    *("1f1b", "1f1b-fused", "eager-1f1b", "interleaved", "interleaved-fused"),
    *("zb-h1", "zb-h2", "interleaved-zb"),
)
SHAPES = [*itertools.product((2, 4, 8), (1, 3, 8), (1, 2, 4)), (3, 5, 3), (8, 4, 16)]
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
    of_1f1b = min(m * k, p + k - 1)
    for name, per_stage, peak in (
        ("gpipe-fused", in_w + costs.w, m * k),
        ("gpipe", in_w, m * k),
        ("1f1b-fused", in_w + costs.w, of_1f1b),
        ("1f1b", in_w, of_1f1b),
        ("zb-h1", in_w - costs.w if (m - 1) * k >= p - 1 else None, of_1f1b),
    ):
        schedule = sliced(name, p, m, k)
        if per_stage is not None:
            makespan = simulate(schedule, costs).makespan
            assert makespan == pytest.approx(work + (p - 1) * per_stage)
        assert max(peak_in_flight(schedule)) == peak
    in_chunks = {
        "breadth-first-fused": m * k >= p,
        "interleaved-fused": m * k % p == 0 and p % k == 0,
    }
    for name in (name for name, holds in in_chunks.items() if holds):
        schedule = sliced(name, p, m, k)
        chunk = sum((costs.f, costs.b, costs.w))
        assert simulate(schedule, costs).makespan == pytest.approx(2 * work + (p - 1) * chunk)


@pytest.mark.parametrize(
    ("k", "bubble", "peak"), [(1, 0.467, 8), (4, 0.179, 2.75), (16, 0.052, 1.44)]
)
def test_seq1f1b_has_its_bubble_at_its_peak(k, bubble, peak):
    timeline = simulate(sliced("1f1b-fused", 8, 8, k), UNIT)
    assert timeline.bubble_ratio == pytest.approx(bubble, abs=5e-4)
    assert timeline.in_full_stages(max(timeline.peak_in_flight)) == pytest.approx(peak, abs=5e-3)


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


def test_the_longer_warm_up_of_zb_h2_is_slack_for_later_slices():
    """At equal memory it waits a third of what ZB-H1 waits, where attention is half of F and B."""
    costs = Costs(1, 1.2, 0.8, attention=0.5)
    first, second = sliced("zb-h1", 8, 8, 8), sliced("zb-h2", 8, 8, 16)
    peaks = [max(peak_in_flight(s)) / s.num_slices for s in (first, second)]
    bubbles = [device_clock(s, costs).makespan / (3 * s.num_passes) - 1 for s in (first, second)]
    assert peaks[1] <= peaks[0]
    assert bubbles[1] < bubbles[0] / 3


@pytest.mark.parametrize(
    ("name", "attention"),
    [("zb-h1", 0.0), ("zb-h1", 0.6), ("zb-h2", 0.6), ("interleaved-zb", 0.6)],
)
def test_orders_for_real_costs_keep_the_order_of_slices(name, attention):
    costs = Costs(1, 1.2, 0.8, 0.1, attention=attention)
    for p, m, k in ((2, 1, 3), (3, 2, 2), (4, 4, 4), (8, 3, 8)):
        published = sliced(name, p, m, k)
        reordered = in_time(published, costs)
        chosen = catalog.build(name, stages=p, microbatches=m, slices=k, costs=costs)
        for schedule in (reordered, chosen):
            validate(schedule)
            assert max(peak_in_flight(schedule)) <= max(published.peak_in_flight)
            assert simulate(schedule, costs).makespan <= simulate(published, costs).makespan
        assert device_clock(chosen, costs).makespan <= device_clock(published, costs).makespan


def test_other_orders_let_chunks_wait_less_for_later_slices():
    costs = Costs(1, 1.2, 0.8, attention=0.6)
    shape = {"stages": 8, "microbatches": 8, "slices": 8, "costs": costs}
    bubbles = [
        device_clock(catalog.build(name, **shape), costs).makespan / (2 * 3 * 8 * 8) - 1
        for name in ("interleaved-zb-published", "interleaved-zb")
    ]
    assert bubbles == pytest.approx([0.230, 0.183], abs=5e-4)
