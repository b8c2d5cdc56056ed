"""Every registered schedule: complete, in order, and with the bubble and peak of its own row."""

from __future__ import annotations

import collections
import inspect
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import (
    Kind,
    Schedule,
    dependencies,
    split_action,
    split_backwards,
)
from jaxpipe.schedule.check.validate import ScheduleError, peak_in_flight, validate
from jaxpipe.schedule.device_clock import device_clock, timelines
from jaxpipe.schedule.show.exchanges import exchanges
from jaxpipe.schedule.simulate import Costs, makespan, simulate, ticks

ENTRIES = {entry.name: entry for entry in catalog.entries()}
NAMES = [name for name in ENTRIES if name not in ("auto", "controllable-memory")]
"""Searches take a second or more, and have tests of their own."""
LINEAR = ["gpipe", "gpipe-fused", "1f1b", "1f1b-fused", "zb-h1", "zb-h2"]
stages = st.integers(1, 9)
microbatches = st.integers(1, 14)
costs = st.builds(Costs, *(st.integers(1, 9) for _ in range(3)))
STAGES = (*range(2, 10), 12, 16)


@st.composite
def built(draw, names=NAMES) -> Schedule:
    """Any schedule of the registry, at any shape that fits it."""
    entry = ENTRIES[draw(st.sampled_from(names))]
    numbers = {"stages": draw(stages), "microbatches": draw(microbatches)}
    if "num_chunks" in entry.defaults:
        numbers["chunks"] = draw(st.integers(1, 4)) * (2 if "hanayo" in entry.name else 1)
    if "group" in entry.defaults and draw(st.booleans()):
        least = -(-numbers["stages"] // 2) if "interleaved" in entry.name else 1
        numbers["group"] = least + draw(st.integers(0, 8))
    needed = entry.defaults.get("memory_limit") is inspect.Parameter.empty
    if needed or ("memory_limit" in entry.defaults and draw(st.booleans())):
        numbers["memory_limit"] = numbers["stages"] + draw(st.integers(0, 3))
    return catalog.build(entry.name, **numbers)


def full_stage(schedule: Schedule, costs: Costs) -> Costs:
    """The costs of one chunk when ``costs`` are those of a full stage."""
    v = schedule.num_chunks
    return Costs(costs.f / v, costs.b / v, costs.w / v)


def excess(schedule: Schedule, costs: Costs) -> float:
    """Makespan beyond a stage's own work, costs of a full stage."""
    work = schedule.num_microbatches * (costs.f + costs.b + costs.w)
    return simulate(schedule, full_stage(schedule, costs)).makespan - work


def fused(schedule: Schedule) -> bool:
    return any(action.kind is Kind.BW for action in schedule.orders[0])


@given(built())
@settings(max_examples=100)
def test_every_virtual_stage_and_microbatch_once_within_the_promised_memory(schedule):
    validate(schedule)
    if schedule.mixes_backwards:
        schedule = split_backwards(schedule)
    backward = [Kind.BW] if fused(schedule) else [Kind.B, Kind.W]
    ran = sorted(
        (action.virtual_stage, action.kind, action.microbatch)
        for order in schedule.orders
        for action in order
    )
    placement = schedule.placement
    assert ran == sorted(
        (s, kind, i)
        for s in range(placement.num_virtual_stages)
        for kind in [Kind.F, *backward]
        for i in range(schedule.num_microbatches)
    )
    assert all(
        placement.stages[action.virtual_stage] == d
        for d, order in enumerate(schedule.orders)
        for action in order
    )
    assert schedule.peak_in_flight is not None


@given(built(), costs, st.integers(0, 3))
@settings(max_examples=50)
def test_times_respect_dependencies_and_exclude_each_other(schedule, costs, message):
    costs = Costs(costs.f, costs.b, costs.w, message)
    placement = schedule.placement
    for timeline in timelines(schedule, costs)[:2]:
        ends = {timed.action: timed.end for row in timeline.rows for timed in row}
        # A fused backward gives what its B would.
        ends |= {split_action(action)[0]: end for action, end in ends.items()}
        for d, row in enumerate(timeline.rows):
            for earlier, later in itertools.pairwise(row):
                assert earlier.end <= later.start
            for timed in row:
                for needed in dependencies(
                    timed.action, num_virtual_stages=placement.num_virtual_stages
                ):
                    travel = message if placement.stages[needed.virtual_stage] != d else 0
                    assert ends[needed] + travel <= timed.start
        assert max(ends.values()) <= timeline.makespan


@given(built(), costs, st.sampled_from([0, 0.1, 3]), st.floats(1, 2))
def test_the_makespan_alone_is_that_of_the_timeline(schedule, costs, message, growth):
    number = schedule.placement.num_virtual_stages
    prices = [
        Costs(costs.f * growth**s, costs.b / growth**s, costs.w, message) for s in range(number)
    ]
    assert makespan(schedule, prices) == simulate(schedule, prices).makespan


@given(built(), costs)
def test_devices_are_never_faster_than_free_running(schedule, costs):
    free, device, _ = timelines(schedule, costs)
    assert device.makespan >= free.makespan


@given(built())
def test_messages_cross_every_boundary_between_stages_once_a_microbatch_and_direction(schedule):
    placement, expected = schedule.placement, collections.Counter()
    for here, there in itertools.pairwise(placement.stages):
        if here != there:
            expected[here, there] += schedule.num_microbatches
            expected[there, here] += schedule.num_microbatches
    sent = exchanges(simulate(schedule, Costs(1, 1, 1)))
    assert collections.Counter((message.sender, message.receiver) for message in sent) == expected


@given(st.sampled_from(["gpipe", "1f1b"]), st.booleans(), stages, microbatches, costs)
def test_bubble_of_gpipe_and_1f1b(name, is_fused, p, m, costs):
    schedule = catalog.build(name + "-fused" * is_fused, stages=p, microbatches=m)
    bubble = (p - 1) * (costs.f + costs.b + is_fused * costs.w)
    assert excess(schedule, costs) == bubble
    work = m * (costs.f + costs.b + costs.w)
    ratios = simulate(schedule, costs).stage_bubble_ratios
    assert ratios == pytest.approx([bubble / (work + bubble)] * p, abs=1e-12)


@given(
    st.sampled_from(["interleaved", "breadth-first", "breadth-first-descending", "modular"]),
    stages,
    st.integers(1, 3),
    st.integers(1, 4),
    costs,
)
def test_bubble_shrinks_with_the_chunks_of_looped_schedules(name, p, k, v, costs):
    # Interleaved with split backwards must not let a long W hold up the next B.
    costs = Costs(costs.f, costs.b, min(costs.f, costs.w))
    variants = {name: 0.0, f"{name}-fused": costs.w}
    for variant in variants.keys() & ENTRIES:
        schedule = catalog.build(variant, stages=p, microbatches=k * p, chunks=v)
        bubble = (p - 1) * (costs.f + costs.b + variants[variant]) / v
        assert excess(schedule, costs) == pytest.approx(bubble)


PEAKS = {
    "gpipe": lambda p, d: 3 * p,
    "1f1b": lambda p, d: p - d,
    "interleaved": lambda p, d: 2 * (p - d - 1) + p + 1,
    "breadth-first": lambda p, d: 6 * p,
    "modular": lambda p, d: 6 * p,
    "hanayo": lambda p, d: 2 * p,
    "hanayo-fused": lambda p, d: 2 * p,
    "zb-h1": lambda p, d: p,
    "zb-h2": lambda p, d: 2 * p - 1,
    "interleaved-zb": lambda p, d: 2 * p,
    "dualpipe-v": lambda p, d: 2 * p + 1,
}
"""In chunks on stage d, for 3p microbatches."""


@pytest.mark.parametrize("name", PEAKS)
def test_peak_of_the_closed_form(name):
    for p in STAGES:
        schedule = catalog.build(name, stages=p, microbatches=3 * p)
        expected = tuple(PEAKS[name](p, d) for d in range(p))
        assert schedule.peak_in_flight == peak_in_flight(schedule) == expected


@pytest.mark.parametrize(("waves", "ratio"), [(1, 0.368), (2, 0.238), (4, 0.135)])
def test_bubble_of_hanayo(waves, ratio):
    schedule = catalog.build("hanayo-fused", stages=8, microbatches=8, chunks=2 * waves)
    timeline = simulate(schedule, Costs(1, 1, 1))
    assert timeline.bubble_ratio == pytest.approx(ratio, abs=5e-4)
    assert max(timeline.peak_in_flight) == 2 * waves * 8


@given(stages, microbatches, st.integers(1, 3), st.sampled_from([1, 1.5, 2, 5]), st.booleans())
def test_hanayo_runs_under_any_cap_that_holds_a_microbatch(p, m, waves, memory_limit, is_fused):
    name = "hanayo" + "-fused" * is_fused
    shape = {"stages": p, "microbatches": m, "chunks": 2 * waves}
    schedule = catalog.build(name, **shape, memory_limit=memory_limit)
    validate(schedule)
    assert schedule.peak_in_flight == (int(2 * waves * min(memory_limit, m)),) * p


def test_ticks_by_hand():
    schedule = catalog.build("1f1b-fused", stages=2, microbatches=2)
    assert [[str(action) for action in order] for order in schedule.orders] == [
        ["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"],
    ]  # fmt: skip
    assert ticks(schedule) == [[0, 1, 3, 5], [1, 2, 3, 4]]


def test_spans_leave_out_the_wait_for_the_first_and_after_the_last_action():
    timeline = simulate(catalog.build("1f1b-fused", stages=4, microbatches=8), Costs(1, 1, 1))
    assert timeline.makespan == 33
    assert timeline.stage_spans == (33, 30, 27, 24)


def test_costs_report_every_problem_at_once():
    with pytest.raises(ValueError, match=r"(?s)costs\.f=0 .*costs\.w=nan .*costs\.message=-1 "):
        Costs(0, 1, float("nan"), -1)


def test_schedules_that_cannot_run_are_refused_by_both_clocks():
    schedule = catalog.build("1f1b", stages=2, microbatches=2)
    stuck = type(schedule)(
        schedule.name,
        schedule.placement,
        2,
        (schedule.orders[0][::-1], schedule.orders[1]),
    )
    for clock in (simulate, device_clock):
        with pytest.raises(ScheduleError, match="Deadlock"):
            clock(stuck, Costs(1, 1, 1))
