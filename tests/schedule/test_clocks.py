"""The clocks: free-running as papers draw it, and that of devices, beside what one would count."""

import dataclasses
import itertools

import pytest
from any_schedule import built
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import dependencies, split_action
from jaxpipe.schedule.check import ScheduleError
from jaxpipe.schedule.device_clock import cuts, device_clock, timelines
from jaxpipe.schedule.show.draw import exchanges
from jaxpipe.schedule.simulate import UNIT, Costs, makespan, simulate, ticks

COSTS = Costs(1, 1.2, 0.8)
costs = st.builds(Costs, *(st.integers(1, 9) for _ in range(3)))


@given(built(), costs, st.integers(0, 3))
@settings(max_examples=50)
def test_times_respect_dependencies_and_exclude_each_other(schedule, costs, message):
    costs = Costs(costs.f, costs.b, costs.w, message)
    placement = schedule.placement
    free, device = timelines(schedule, costs)
    assert device.makespan >= free.makespan
    for timeline in (free, device):
        ends = {timed.action: timed.end for row in timeline.rows for timed in row}
        # A fused backward gives what its B would.
        ends |= {split_action(action)[0]: end for action, end in ends.items()}
        for d, row in enumerate(timeline.rows):
            for earlier, later in itertools.pairwise(row):
                assert earlier.end <= later.start
            for timed in row:
                for needed in dependencies(timed.action, num_virtual_stages=len(placement.stages)):
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


def test_ticks_and_spans_by_hand():
    """Spans leave out the wait for the first action, and after the last."""
    schedule = catalog.build("1f1b-fused", stages=2, microbatches=2)
    assert [[str(action) for action in order] for order in schedule.orders] == [
        ["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"],
    ]  # fmt: skip
    assert ticks(schedule) == [[0, 1, 3, 5], [1, 2, 3, 4]]
    timeline = simulate(catalog.build("1f1b-fused", stages=4, microbatches=8), UNIT)
    assert timeline.makespan == 33
    assert timeline.stage_spans == (33, 30, 27, 24)


def test_costs_report_every_problem_at_once():
    with pytest.raises(ValueError, match=r"(?s)costs\.f=0 .*costs\.w=nan .*costs\.message=-1 "):
        Costs(0, 1, float("nan"), -1)


def test_schedules_that_cannot_run_are_refused_by_both_clocks():
    schedule = catalog.build("1f1b", stages=2, microbatches=2)
    orders = schedule.orders[0][::-1], schedule.orders[1]
    for clock in (simulate, device_clock):
        with pytest.raises(ScheduleError, match="Deadlock"):
            clock(dataclasses.replace(schedule, orders=orders), UNIT)


NAMES = ("1f1b", "zb-v", "breadth-first", "interleaved")


@pytest.mark.parametrize(
    ("name", "message", "most"),
    [*itertools.product(NAMES, [0.0, 0.1], [1.04]), ("zb-v", 0.0, 1.005)],
)
def test_devices_run_every_order_and_come_near_to_the_free_running_clock(name, message, most):
    schedule = catalog.build(name, stages=4, microbatches=16)
    costs = Costs(1, 1.2, 0.8, message)
    free, device = simulate(schedule, costs), device_clock(schedule, costs)
    assert free.makespan - 1e-9 <= device.makespan <= most * free.makespan
    assert [tuple(timed.action for timed in row) for row in device.rows] == [*schedule.orders]
    for timed in itertools.chain(*device.rows):
        assert timed.end - timed.start == pytest.approx(costs.of(timed.action.kind))


def test_one_stage_waits_for_nobody_and_chunks_may_cost_differently():
    timeline = device_clock(catalog.build("1f1b", stages=1, microbatches=3), Costs(1, 1, 1, 5))
    assert timeline.makespan == 9
    schedule = catalog.build("gpipe", stages=2, microbatches=1)
    timeline = device_clock(schedule, [Costs(1, 2, 3), Costs(10, 20, 30)])
    lengths = {str(t.action): t.end - t.start for row in timeline.rows for t in row}
    assert lengths == {"0F0": 1, "0B0": 2, "0W0": 3, "1F0": 10, "1B0": 20, "1W0": 30}
    assert timeline.bubble_ratio == pytest.approx(1 - (6 + 60) / (2 * timeline.makespan))


def test_costs_of_each_virtual_stage_give_the_times_one_would_count():
    schedule = catalog.build("1f1b", stages=2, microbatches=2)
    costs = [Costs(1, 1, 1), Costs(3, 2, 4, message=5)]
    # Stage 1 runs F0 from 1, B0, W0, F1 and B1 until 15; then stage 0, after a message, B1 and W1.
    assert simulate(schedule, costs).makespan == 1 + (3 + 2 + 4 + 3 + 2) + 5 + (1 + 1)
    same = [Costs(2, 3, 1, 0.5)] * 2
    for clock in (simulate, device_clock):
        assert clock(schedule, same).rows == clock(schedule, same[0]).rows
    with pytest.raises(ValueError, match="There are 1 costs for 2 virtual stages"):
        simulate(schedule, same[:1])


@pytest.mark.parametrize("name", ["1f1b", "interleaved-fused", "zb-v", "dualpipe-v-published"])
def test_messages_arrive_in_time_and_lie_in_their_ticks(name):
    costs = Costs(1, 1.2, 0.8, 0.1)
    schedule = catalog.build(name, stages=3, microbatches=4, costs=costs)
    crossings = sum(a != b for a, b in itertools.pairwise(schedule.placement.stages))
    for timeline in timelines(schedule, costs):
        messages = exchanges(timeline)
        assert len(messages) == 2 * 4 * crossings
        ends = {(d, part.end): part for d, row in enumerate(timeline.rows) for part in row}
        starts = {(d, part.start): part for d, row in enumerate(timeline.rows) for part in row}
        for message in messages:
            assert message.sent + costs.message <= message.arrives + 1e-9
            assert message.arrives <= message.read + 1e-9
            assert ends[message.sender, message.sent].tick == message.tick
            reader = starts[message.receiver, message.read]
            assert reader.action == message.reader
            assert message.late == (message.tick is not None and reader.tick >= message.tick + 2)
        for stage, row in enumerate(timeline.rows):
            for earlier, later in itertools.pairwise(row):
                assert earlier.end <= later.start + 1e-9
            for part in row if timeline.ticks else ():
                start, end = (timeline.ticks[part.tick + k][stage] for k in (0, 1))
                assert start - 1e-9 <= part.start <= part.end <= end + 1e-9


# Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241: milliseconds of F, B, W and a
# message in table 6, bubble rates in table 5. A rate is that of the longest span of a stage, from
# its first action to its last: their optimizer steps stage by stage.
MEASURED = (  # stages, microbatches, (F, B, W, message), rates of 1F1B, ZB-H1 and ZB-H2
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444)),
    (8, 24, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.0698)),
    (8, 32, (29.802, 29.428, 19.530, 0.577), (0.1898, 0.1045, 0.0559)),
    (8, 64, (29.935, 29.621, 19.388, 0.535), (0.1091, 0.0554, 0.0294)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
    (16, 64, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088, 0.0516)),
    (16, 128, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576, 0.0266)),
    (32, 96, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421, 0.0641)),
    (32, 128, (10.408, 10.204, 7.703, 0.408), (0.2168, 0.1106, 0.0490)),
    (32, 256, (10.402, 10.248, 7.698, 0.460), (0.1352, 0.0594, 0.0257)),
)


@pytest.mark.parametrize(
    ("name", "column"), [("1f1b-fused", 0), ("zb-h1-published", 1), ("zb-h2-published", 2)]
)
def test_bubbles_at_measured_costs_are_those_that_the_authors_state(name, column):
    for stages, microbatches, measured, rates in MEASURED:
        *kinds, message = measured
        costs = Costs(*kinds, message=message)
        schedule = catalog.build(name, stages=stages, microbatches=microbatches)
        longest = max(simulate(schedule, costs).stage_spans)
        rate = 1 - microbatches * sum(kinds) / longest
        assert rate == pytest.approx(rates[column], abs=1e-4), (stages, microbatches)


def test_a_longer_warm_up_gives_slow_messages_time():
    """11.8% sooner than 1F1B on 8 stages, for 15 microbatches in flight in place of 8."""
    costs, shape = Costs(1, 1, 1, message=0.3), {"stages": 8, "microbatches": 32}
    ends, peaks = {}, {}
    for name in ("1f1b-fused", "eager-1f1b-fused"):
        schedule = catalog.build(name, **shape, costs=costs)
        free, device = timelines(schedule, costs)
        assert device.makespan <= 1.01 * free.makespan
        ends[name], peaks[name] = device.makespan, max(free.peak_in_flight)
    assert [*peaks.values()] == [8, 15]
    assert 1 - ends["eager-1f1b-fused"] / ends["1f1b-fused"] == pytest.approx(0.118, abs=5e-4)


@pytest.mark.parametrize(
    ("name", "stages", "together", "counts"),
    [
        ("zb-v", 4, True, (4,) * 8),
        ("1f1b-fused", 4, False, (5, 4, 4, 3)),
        ("hanayo-fused", 3, False, (4,) * 6),  # fewer layers at the end make (4, 5, 4, 4, 4, 3)
    ],
)
def test_each_cut_is_the_fastest_beside_some_head(name, stages, together, counts):
    """The head takes as long as 1.2 of four layers of a chunk."""
    schedule = catalog.build(name, stages=stages, microbatches=4 * stages)
    fastest, *others = cuts(schedule, Costs(4, 4, 4), [1.0] * sum(counts), 0.0, 1.2)
    assert (fastest.together, fastest.layer_counts) == (together, counts)
    assert len(others) == 2
    assert all(fastest.makespan < other.makespan for other in others)
