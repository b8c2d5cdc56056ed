"""Every registered schedule: complete, in order, and with the bubble and peak of its own row."""

from __future__ import annotations

import doctest
import importlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Kind, dependencies
from jaxpipe.schedule.simulate import Costs, lock_step, simulate, ticks
from jaxpipe.schedule.validate import ScheduleError, validate

# No test may depend on how fast the machine is.
settings.register_profile("jaxpipe", deadline=None)
settings.load_profile("jaxpipe")

NAMES = [entry.name for entry in catalog.entries()]
stages = st.integers(1, 9)
microbatches = st.integers(1, 14)
costs = st.builds(Costs, *(st.integers(1, 9) for _ in range(3)))


@pytest.mark.parametrize("name", NAMES)
@given(p=stages, m=microbatches)
def test_every_virtual_stage_and_microbatch_once(name, p, m):
    schedule = catalog.build(name, stages=p, microbatches=m)
    validate(schedule)
    backward = [Kind.BW] if name.endswith("fused") else [Kind.B, Kind.W]
    ran = sorted(
        (action.virtual_stage, action.kind, action.microbatch)
        for order in schedule.orders
        for action in order
    )
    assert ran == sorted((s, k, i) for s in range(p) for k in [Kind.F, *backward] for i in range(m))


@pytest.mark.parametrize("name", NAMES)
@given(p=stages, m=microbatches)
def test_one_inbox_slot_is_enough(name, p, m):
    validate(catalog.build(name, stages=p, microbatches=m), inbox_slots=1)


@pytest.mark.parametrize("name", NAMES)
@given(p=stages, m=microbatches, costs=costs, message=st.integers(0, 3))
def test_times_respect_dependencies_and_exclude_each_other(name, p, m, costs, message):
    schedule = catalog.build(name, stages=p, microbatches=m)
    costs = Costs(costs.f, costs.b, costs.w, message)
    for timeline in (simulate(schedule, costs), lock_step(schedule, costs)):
        ends = {timed.action: timed.end for row in timeline.rows for timed in row}
        split = not name.endswith("fused")
        for row in timeline.rows:
            for earlier, later in itertools.pairwise(row):
                assert earlier.end <= later.start
            for timed in row:
                s = timed.action.virtual_stage
                for needed in dependencies(timed.action, num_virtual_stages=p, split=split):
                    travel = message if needed.virtual_stage != s else 0
                    assert ends[needed] + travel <= timed.start
        assert max(ends.values()) <= timeline.makespan


@pytest.mark.parametrize("name", NAMES)
@given(p=stages, m=microbatches, costs=costs)
def test_bubble_of_the_closed_form(name, p, m, costs):
    timeline = simulate(catalog.build(name, stages=p, microbatches=m), costs)
    work = m * (costs.f + costs.b + costs.w)
    fused = costs.w if name.endswith("fused") else 0
    excess = (p - 1) * (costs.f + costs.b + fused)
    assert timeline.makespan == work + excess
    assert timeline.bubble_ratio == pytest.approx(excess / (work + excess), abs=1e-12)
    assert timeline.stage_bubble_ratios == pytest.approx([timeline.bubble_ratio] * p, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@given(p=stages, m=microbatches)
def test_peak_of_the_closed_form(name, p, m):
    schedule = catalog.build(name, stages=p, microbatches=m)
    expected = [m if name.startswith("gpipe") else min(m, p - d) for d in range(p)]
    assert list(simulate(schedule, Costs(1, 1, 1)).peak_in_flight) == expected
    assert list(schedule.peak_in_flight) == expected


@pytest.mark.parametrize("name", NAMES)
@given(p=stages, m=microbatches)
def test_messages_cross_every_boundary_once_a_microbatch_and_direction(name, p, m):
    timeline = simulate(catalog.build(name, stages=p, microbatches=m), Costs(1, 1, 1))
    neighbours = [(d, d + 1) for d in range(p - 1)] + [(d + 1, d) for d in range(p - 1)]
    assert timeline.messages == dict.fromkeys(sorted(neighbours), m)


@pytest.mark.parametrize("name", NAMES)
@given(p=stages, m=microbatches, costs=costs)
def test_lock_step_is_never_faster_than_free_running(name, p, m, costs):
    schedule = catalog.build(name, stages=p, microbatches=m)
    assert lock_step(schedule, costs).makespan >= simulate(schedule, costs).makespan


@given(p=stages, m=microbatches, cost=st.integers(1, 5))
def test_both_clocks_agree_where_all_actions_cost_the_same(p, m, cost):
    same = Costs(cost, cost, cost)
    for name in ("gpipe", "1f1b"):
        schedule = catalog.build(name, stages=p, microbatches=m)
        assert lock_step(schedule, same).makespan == simulate(schedule, same).makespan


def test_lock_step_ticks_last_as_long_as_their_slowest_stage_and_the_exchange():
    schedule = catalog.build("1f1b-fused", stages=2, microbatches=2)
    # By hand: F0 | F1, F0 | BW0 | BW0, F1 | BW1 | BW1, with F=2, BW=3+4 and an exchange a tick.
    table = ticks(schedule)
    assert [(tick, str(action)) for tick, action in table[0]] == [
        (0, "0F0"), (1, "0F1"), (3, "0BW0"), (5, "0BW1"),
    ]  # fmt: skip
    assert [(tick, str(action)) for tick, action in table[1]] == [
        (1, "1F0"), (2, "1BW0"), (3, "1F1"), (4, "1BW1"),
    ]  # fmt: skip
    assert lock_step(schedule, Costs(2, 3, 4, 1)).makespan == 2 + 2 + 7 + 7 + 7 + 7 + 6


def test_spans_leave_out_the_wait_for_the_first_and_after_the_last_action():
    timeline = simulate(catalog.build("1f1b-fused", stages=4, microbatches=8), Costs(1, 1, 1))
    assert timeline.makespan == 33
    assert timeline.stage_spans == (33, 30, 27, 24)


def test_large_schedules_are_practical():
    schedule = catalog.build("1f1b", stages=64, microbatches=256)
    timeline = simulate(schedule, Costs(1, 1, 1))
    assert timeline.makespan == 3 * 256 + 2 * 63


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
    for clock in (simulate, lock_step):
        with pytest.raises(ScheduleError, match="Deadlock"):
            clock(stuck, Costs(1, 1, 1))


def test_unknown_names_get_the_nearest():
    with pytest.raises(ValueError, match=r"pipeline\.schedule='1f1d'.*\nNearest valid: '1f1b'\."):
        catalog.build("1f1d", stages=2, microbatches=2)
    with pytest.raises(ValueError, match="Nearest valid: 'gpipe'"):
        catalog.build("GPipe", stages=2, microbatches=2)


def test_all_failures_of_build_come_together():
    with pytest.raises(ValueError, match=r"(?s)mesh\.stage=0.*microbatches=-1.*chunks=2.*: 1\.$"):
        catalog.build("gpipe", stages=0, microbatches=-1, chunks=2)


@pytest.mark.parametrize(
    "module",
    ["placement", "actions", "gpipe", "one_f_one_b", "catalog", "validate", "simulate", "draw"],
)
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(f"jaxpipe.schedule.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
