"""Ticks of schedules for the clock of devices, and orders that end first on it."""

import dataclasses
import json

import pytest
from any_schedule import built
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.check import ScheduleError, validate
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.formats import from_json, to_json
from jaxpipe.schedule.lowering.lower import forward_only, lower
from jaxpipe.schedule.pacing import soonest_on_devices
from jaxpipe.schedule.placement import linear
from jaxpipe.schedule.simulate import UNIT, Costs, simulate, ticks


@given(built(), *(st.integers(1, 9) for _ in range(3)), st.sampled_from([0, 0.7, 4]), st.booleans())
# A W that shares a tick may end after those that read what was sent before it.
@example(catalog.build("zb-v", stages=2, microbatches=3), 1, 1, 7, 2, False)
@settings(max_examples=40, deadline=None)
def test_any_schedule_is_paced_without_a_loss(schedule, f, b, w, message, rendezvous):
    costs = Costs(f, b, w, message, rendezvous=rendezvous)
    found, ends = soonest_on_devices([schedule], costs)
    validate(found)
    assert found.orders == schedule.orders
    assert ends == pytest.approx(device_clock(found, costs).makespan)
    earliest = device_clock(schedule, costs).makespan
    assert simulate(schedule, costs).makespan - 1e-9 <= ends <= earliest * 1.002 + 1e-9
    assert from_json(json.loads(json.dumps(to_json(found)))) == found
    lower(forward_only(found), [1] * found.placement.num_virtual_stages)


@pytest.mark.parametrize(
    ("name", "options", "costs", "before", "most"),
    [
        # Stages with short actions counted ticks faster than their neighbors.
        ("interleaved-fused", {"chunks": 2}, Costs(1, 1.3, 0.9), 1.03, 1.03),
        ("1f1b-v-published", {}, Costs(1, 1.3, 0.7, 0.1), 1.04, 1.025),
        # Each hop put the next stage behind by the time of a message.
        ("breadth-first", {"chunks": 3}, Costs(1, 1.1, 0.9, 0.4), 1.25, 1.01),
        ("interleaved", {"chunks": 2}, Costs(0.9, 1.4, 1, 0.5), 1.18, 1.04),
    ],
)
def test_ticks_of_equal_times_come_near_to_the_free_running_clock(
    name, options, costs, before, most
):
    shape = {"stages": 6, "microbatches": 18} | options
    plain = catalog.build(name, **shape)
    paced = catalog.build(name, **shape, costs=costs)
    free = simulate(plain, costs).makespan
    assert paced.orders == plain.orders
    assert device_clock(plain, costs).makespan > before * free
    assert device_clock(paced, costs).makespan <= most * free


@pytest.mark.parametrize(
    ("name", "p", "m", "costs"),
    [
        ("interleaved-zb", 6, 13, Costs(1, 1.5, 0.5, 0.1)),
        ("interleaved-zb", 5, 11, Costs(1, 1.8, 0.6, 0.2)),
        ("zb-v", 8, 8, Costs(0.75, 1.5, 0.75, 0.6)),
        ("hanayo-fused", 4, 12, Costs(1, 1.4, 0.8, 0.3)),
        ("zb-h1", 6, 18, Costs(0.8, 1.3, 0.9, 0.3)),
    ],
)
def test_no_order_for_costs_ends_after_the_published_one_on_devices(name, p, m, costs):
    shape = {"stages": p, "microbatches": m}
    published = catalog.build(f"{name}-published", **shape)
    for other in (published, catalog.build(f"{name}-published", **shape, costs=costs)):
        chosen = catalog.build(name, **shape, costs=costs)
        ends = device_clock(chosen, costs).makespan
        assert ends <= device_clock(other, costs).makespan + 1e-9


def test_ticks_that_no_stage_can_keep_are_refused():
    two = catalog.build("gpipe-fused", stages=2, microbatches=1)
    in_step = dataclasses.replace(two, ticks=((0, 5), (2, 3)))
    validate(in_step)
    assert ticks(in_step) == [[0, 5], [2, 3]]
    for wrong, says in (
        (((0, 3), (0, 2)), "1F0 on stage 1 is in tick 0, and can run from tick 1 on"),
        (((0, 3), (2, 2)), "1BW0 on stage 1 is in tick 2, and can run from tick 3 on"),
        (((-1, 3), (1, 2)), "0F0 on stage 0 is in tick -1, and can run from tick 0 on"),
        (((0,), (1, 2)), "ticks must have one number for every action"),
        (((0, 3.5), (1, 2)), "ticks is tuple, and must be a tuple of one tuple of int"),
    ):
        with pytest.raises(ScheduleError, match=says):
            validate(dataclasses.replace(two, ticks=wrong))


def test_a_weight_gradient_shares_the_tick_of_the_action_before_it():
    """A tick takes as long as a message that takes longer than its actions."""
    shape, costs = {"stages": 3, "microbatches": 12, "chunks": 3}, Costs(0.5, 0.8, 0.4, 0.9)
    plain, paced = (catalog.build("breadth-first", **shape, **c) for c in ({}, {"costs": costs}))
    assert any(len(set(row)) < len(row) for row in paced.ticks)
    table = lower(paced, [1] * 9)
    assert table.gathers.num_slots == 1
    assert table.num_ticks < lower(plain, [1] * 9).num_ticks
    assert device_clock(paced, costs).makespan < 0.75 * device_clock(plain, costs).makespan

    two = catalog.build("1f1b", stages=2, microbatches=1)
    validate(dataclasses.replace(two, ticks=((0, 3, 3), (1, 2, 2))))
    looped = catalog.build("interleaved", stages=1, microbatches=1, chunks=2)
    for schedule, wrong in ((two, ((0, 3, 3), (1, 1, 2))), (looped, ((0, 1, 2, 2, 2, 3),))):
        with pytest.raises(ScheduleError, match="can run from tick"):
            validate(dataclasses.replace(schedule, ticks=wrong))


def test_a_sender_may_wait_for_its_receiver():
    """The first stage until F's message has arrived, and the second until that of B has."""
    two = catalog.build("1f1b-fused", stages=2, microbatches=2)
    goes_on, waits = Costs(1, 2, 2, 0.5), Costs(1, 2, 2, 0.5, rendezvous=True)
    for costs, starts in ((goes_on, [0, 1, 7, 12]), (waits, [0, 1.5, 7, 12.5])):
        timeline = device_clock(two, costs)
        assert [part.start for part in timeline.rows[0]] == starts
    for name in ("interleaved-fused", "1f1b-v"):
        shape, costs = {"stages": 6, "microbatches": 24}, Costs(1, 1.2, 0.8, 0.2, rendezvous=True)
        plain, paced = (catalog.build(name, **shape, **c) for c in ({}, {"costs": costs}))
        ends = [device_clock(schedule, costs).makespan for schedule in (paced, plain)]
        assert ends[0] < 0.9 * ends[1]


def test_one_stage_has_nobody_to_keep_step_with():
    alone = Schedule("alone", linear(1), 2, catalog.build("1f1b", stages=1, microbatches=2).orders)
    assert soonest_on_devices([alone], UNIT) == (alone, 6)
