"""The report and the trace say what the timeline says; transfer counts are those of the paper."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.placement import looped
from jaxpipe.schedule.show.exchanges import exchanges
from jaxpipe.schedule.show.report import report, timelines, transfers
from jaxpipe.schedule.show.trace import trace
from jaxpipe.schedule.simulate import Costs, simulate

# No test may depend on how fast the machine is.
settings.register_profile("jaxpipe", deadline=None)
settings.load_profile("jaxpipe")

NAMES = ["1f1b", "interleaved-fused", "zb-v", "dualpipe-v-published", "chimera"]
"""One of every kind: whole and split backwards, one and several chunks, pairs, copies."""
costs = st.builds(Costs, *(st.integers(1, 9) for _ in range(4)))


def looped_breadth_first(p: int, v: int, m: int) -> Schedule:
    """Per stage: chunk by chunk all forwards, then back through the chunks all backwards."""
    orders = tuple(
        tuple(Action(c * p + d, Kind.F, i) for c in range(v) for i in range(m))
        + tuple(Action(c * p + d, Kind.BW, i) for c in reversed(range(v)) for i in range(m))
        for d in range(p)
    )
    return Schedule("by hand", looped(p, num_chunks=v), m, orders)


@settings(max_examples=60)
@given(name=st.sampled_from(NAMES), p=st.integers(1, 4), m=st.sampled_from([2, 4, 6]), costs=costs)
def test_actions_are_the_timeline_with_fused_backwards_taken_apart(name, p, m, costs):
    schedule = catalog.build(name, stages=p, microbatches=m)
    shown = report(schedule, costs, clock="free")
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


def test_breadth_first_moves_every_chunk_as_often_as_the_paper_says():
    everything, weights = tuple(Kind), (Kind.W, Kind.BW)
    for p, v in itertools.product(range(2, 9), range(1, 9)):
        schedule = looped_breadth_first(p, v, 2 * p)
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


@pytest.mark.parametrize("name", NAMES[:-1])
def test_messages_arrive_in_time_and_lie_in_their_ticks(name):
    costs = Costs(1, 1.2, 0.8, 0.1)
    schedule = catalog.build(name, stages=3, microbatches=4, costs=costs)
    crossings = sum(a != b for a, b in itertools.pairwise(schedule.placement.stages))
    for timeline in filter(None, timelines(schedule, costs)):
        messages, moves = exchanges(timeline)
        assert len(messages) == 2 * 4 * crossings
        assert bool(moves) == bool(timeline.ticks)
        ends = {(d, part.end): part for d, row in enumerate(timeline.rows) for part in row}
        starts = {(d, part.start): part for d, row in enumerate(timeline.rows) for part in row}
        for message in messages:
            assert message.sent <= message.arrives <= message.read + 1e-9
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


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_holds_every_action_and_the_memory_curve(name):
    timeline = simulate(catalog.build(name, stages=3, microbatches=6), Costs(1, 1.2, 0.8))
    events = json.loads(json.dumps(trace(timeline)))["traceEvents"]
    for d, row in enumerate(timeline.rows):
        drawn = [event for event in events if event["ph"] == "X" and event["tid"] == d]
        assert [event["name"] for event in drawn] == [str(timed.action) for timed in row]
        assert [event["ts"] for event in drawn] == [1000 * timed.start for timed in row]
        assert {event["args"]["microbatch"]: event["cname"] for event in drawn}.keys() == set(
            range(timeline.schedule.num_microbatches)
        )
        curve = [
            event["args"]["microbatches"]
            for event in events
            if event["ph"] == "C" and event["name"] == f"in flight, stage {d}"
        ]
        assert max(curve) == timeline.in_full_stages(timeline.peak_in_flight[d])
        assert curve[-1] == 0


@pytest.mark.parametrize("clock", [simulate, device_clock])
def test_arrows_of_the_trace_start_and_end_within_the_actions_of_their_messages(clock):
    timeline = clock(catalog.build("v-half", stages=3, microbatches=4), Costs(1, 1.2, 0.8, 0.3))
    events = trace(timeline)["traceEvents"]
    actions = [event for event in events if event["ph"] == "X"]

    def holds(event: dict) -> str:
        (name,) = (
            a["name"]
            for a in actions
            if a["tid"] == event["tid"] and a["ts"] < event["ts"] < a["ts"] + a["dur"]
        )
        return name

    arrows = {
        phase: {event["id"]: holds(event) for event in events if event["ph"] == phase}
        for phase in "sf"
    }
    messages = exchanges(timeline).messages
    sent = [(str(message.action), str(message.reader)) for message in messages]
    assert [(arrows["s"][k], arrows["f"][k]) for k in range(len(messages))] == sent
    marks = [event for event in events if event["ph"] == "i"]
    assert len(marks) == len(exchanges(timeline).moves)
