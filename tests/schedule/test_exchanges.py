"""Messages and the trace say what the timeline says; transfers are those of the paper."""

from __future__ import annotations

import itertools
import json

import pytest

from jaxpipe.schedule import catalog
from jaxpipe.schedule.device_clock import device_clock, timelines
from jaxpipe.schedule.show.exchanges import exchanges
from jaxpipe.schedule.show.trace import trace
from jaxpipe.schedule.simulate import Costs, simulate

NAMES = ["1f1b", "interleaved-fused", "zb-v", "dualpipe-v-published"]
"""One of every kind: whole and split backwards, one and several chunks, pairs."""


@pytest.mark.parametrize("name", NAMES)
def test_messages_arrive_in_time_and_lie_in_their_ticks(name):
    costs = Costs(1, 1.2, 0.8, 0.1)
    schedule = catalog.build(name, stages=3, microbatches=4, costs=costs)
    crossings = sum(a != b for a, b in itertools.pairwise(schedule.placement.stages))
    for timeline in timelines(schedule, costs)[:2]:
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
    messages = exchanges(timeline)
    sent = [(str(message.action), str(message.reader)) for message in messages]
    assert [(arrows["s"][k], arrows["f"][k]) for k in range(len(messages))] == sent
