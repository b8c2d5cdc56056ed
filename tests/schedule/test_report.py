"""The report and the trace say what the timeline says; transfer counts are those of the paper."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.placement import looped
from jaxpipe.schedule.show.report import report, transfers
from jaxpipe.schedule.show.trace import trace
from jaxpipe.schedule.simulate import Costs, simulate

# No test may depend on how fast the machine is.
settings.register_profile("jaxpipe", deadline=None)
settings.load_profile("jaxpipe")

NAMES = [entry.name for entry in catalog.entries()]
costs = st.builds(Costs, *(st.integers(1, 9) for _ in range(4)))


def looped_breadth_first(p: int, v: int, m: int) -> Schedule:
    """Per stage: chunk by chunk all forwards, then back through the chunks all backwards."""
    orders = tuple(
        tuple(Action(c * p + d, Kind.F, i) for c in range(v) for i in range(m))
        + tuple(Action(c * p + d, Kind.BW, i) for c in reversed(range(v)) for i in range(m))
        for d in range(p)
    )
    return Schedule("by hand", looped(p, num_chunks=v), m, orders)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(p=st.integers(1, 4), m=st.sampled_from([2, 4, 6]), costs=costs)
def test_actions_are_the_timeline_with_fused_backwards_taken_apart(name, p, m, costs):
    schedule = catalog.build(name, stages=p, microbatches=m)
    shown = report(schedule, costs)
    assert json.loads(json.dumps(shown)) == shown
    for d, row in enumerate(shown["actions"]):
        held = schedule.placement.virtual_stages[d]
        assert len(row) == 3 * schedule.num_microbatches * len(held)
        assert {action["virtual_stage"] for action in row} == set(held)
        for action in row:
            cost = {"F": costs.f, "B": costs.b, "W": costs.w}[action["kind"]]
            assert action["end"] - action["start"] == cost
        for earlier, later in itertools.pairwise(row):
            assert earlier["end"] <= later["start"]
            if name.endswith("fused") and earlier["kind"] == "B":
                assert (later["kind"], later["start"]) == ("W", earlier["end"])
                assert later["microbatch"] == earlier["microbatch"]


@given(p=st.integers(1, 4), v=st.integers(1, 4), m=st.integers(1, 5))
def test_peak_is_in_microbatches_of_a_full_stage(p, v, m):
    assert report(looped_breadth_first(p, v, m), Costs(1, 1, 1))["peak_in_flight"] == [m] * p


@pytest.mark.parametrize("name", ["chimera", "chimera-fused"])
def test_two_copies_of_the_model_share_the_batch(name):
    shown = report(catalog.build(name, stages=4, microbatches=4), Costs(1, 1, 1))
    assert (shown["chunks"], shown["microbatches"]) == (1, 4)
    assert shown["peak_in_flight"] == [3, 4, 4, 3]
    assert {action["chunk"] for row in shown["actions"] for action in row} == {0}


def test_peak_in_bytes_where_the_size_is_given():
    schedule, same = catalog.build("1f1b", stages=3, microbatches=8), Costs(1, 1, 1)
    assert report(schedule, same, activation_bytes=100)["peak_in_flight_bytes"] == [300, 200, 100]
    assert "peak_in_flight_bytes" not in report(schedule, same)


@pytest.mark.parametrize("v", range(1, 9))
@pytest.mark.parametrize("p", range(2, 9))
def test_breadth_first_moves_every_chunk_as_often_as_the_paper_says(p, v):
    schedule = looped_breadth_first(p, v, 2 * p)
    everything, weights = tuple(Kind), (Kind.W, Kind.BW)
    assert transfers(schedule, kinds=everything, num_slots=1) == [2 * v - 1] * p
    assert transfers(schedule, kinds=everything, num_slots=2) == [max(2 * v - 2, 1)] * p
    assert transfers(schedule, kinds=weights, num_slots=1) == [v] * p


@given(p=st.integers(1, 4), v=st.integers(1, 4), m=st.integers(1, 4), slots=st.integers(1, 3))
def test_transfers_are_those_of_the_lowered_table(p, v, m, slots):
    schedule = looped_breadth_first(p, v, m)
    table = lower(schedule, (1,) * (p * v), weight_slots=slots)
    shown = report(schedule, Costs(1, 1, 1), weight_slots=slots)
    assert tuple(shown["gathers"]) == table.gathers.counts
    assert tuple(shown["reductions"]) == table.reduces.counts


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_holds_every_action_and_the_memory_curve(name):
    timeline = simulate(catalog.build(name, stages=3, microbatches=6), Costs(1, 1.2, 0.8))
    events = json.loads(json.dumps(trace(timeline)))["traceEvents"]
    for d, row in enumerate(timeline.rows):
        drawn = [event for event in events if event["ph"] == "X" and event["tid"] == d]
        assert [event["name"] for event in drawn] == [str(timed.action) for timed in row]
        assert [event["ts"] for event in drawn] == [1000 * timed.start for timed in row]
        curve = [
            event["args"]["microbatches"]
            for event in events
            if event["ph"] == "C" and event["name"] == f"in flight, stage {d}"
        ]
        assert max(curve) == timeline.in_full_stages(timeline.peak_in_flight[d])
        assert curve[-1] == 0
