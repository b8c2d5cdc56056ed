"""The device clock: what a tick table waits for on devices."""

from __future__ import annotations

import pytest

from jaxpipe.schedule import catalog
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.simulate import Costs, in_flight, simulate

COSTS = Costs(1, 1.2, 0.8)
NAMES = ("1f1b", "zb-v", "breadth-first", "interleaved")


@pytest.mark.parametrize(("p", "most"), [(4, 0.005), (8, 0.01)])
def test_whole_actions_of_zb_v_come_near_to_the_free_running_clock(p, most):
    schedule = catalog.build("zb-v", stages=p, microbatches=4 * p)
    device, free = (clock(schedule, COSTS) for clock in (device_clock, simulate))
    assert device.bubble_ratio < free.bubble_ratio + most


@pytest.mark.parametrize("message", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_close_to_the_free_running_clock(name, message):
    schedule = catalog.build(name, stages=4, microbatches=16)
    costs = Costs(1, 1.2, 0.8, message)
    free, device = (clock(schedule, costs).makespan for clock in (simulate, device_clock))
    assert free - 1e-9 <= device <= 1.04 * free


@pytest.mark.parametrize("name", NAMES)
def test_actions_keep_their_order_and_their_length(name):
    schedule = catalog.build(name, stages=4, microbatches=8)
    timeline = device_clock(schedule, COSTS)
    assert [tuple(timed.action for timed in row) for row in timeline.rows] == list(schedule.orders)
    for row in timeline.rows:
        ends = [0.0, *(timed.end for timed in row)]
        assert all(timed.start >= end - 1e-9 for timed, end in zip(row, ends[:-1], strict=True))
        for timed in row:
            assert timed.end - timed.start == pytest.approx(COSTS.of(timed.action.kind))


def test_one_stage_waits_for_nobody():
    timeline = device_clock(catalog.build("1f1b", stages=1, microbatches=3), Costs(1, 1, 1, 5))
    assert timeline.makespan == 9


def test_chunks_may_cost_differently():
    schedule = catalog.build("gpipe", stages=2, microbatches=1)
    timeline = device_clock(schedule, [Costs(1, 2, 3), Costs(10, 20, 30)])
    lengths = {str(t.action): t.end - t.start for row in timeline.rows for t in row}
    assert lengths == {"0F0": 1, "0B0": 2, "0W0": 3, "1F0": 10, "1B0": 20, "1W0": 30}
    assert timeline.bubble_ratio == pytest.approx(1 - (6 + 60) / (2 * timeline.makespan))


def test_memory_never_goes_back_in_time():
    clock = device_clock(catalog.build("1f1b", stages=4, microbatches=8), COSTS)
    for row, peak in zip(clock.rows, clock.peak_in_flight, strict=True):
        moments, counts = zip(*in_flight(row), strict=True)
        assert list(moments) == sorted(moments)
        assert max(counts) == peak
