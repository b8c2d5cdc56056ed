"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxpipe.schedule.show.exchanges import Message, exchanges
from jaxpipe.schedule.show.report import place_of
from jaxpipe.schedule.simulate import TimedAction, Timeline, in_flight

_MICROSECONDS = 1000.0
"""A trace counts in microseconds: one unit of the costs shows as a millisecond."""


_COLOURS = (
    *("thread_state_running", "rail_response", "rail_animation", "rail_idle", "rail_load"),
    *("cq_build_passed", "cq_build_failed", "thread_state_iowait", "good", "bad"),
)
"""Reserved names of colours; chrome://tracing shows a microbatch's actions in one of them."""


def trace(timeline: Timeline) -> dict[str, Any]:
    """Writes a timeline in the Trace Event Format: one thread and one memory counter per stage.

    Returns:
      A tree of plain values for `json.dump`: complete events ("X") with the action's parts as
      arguments, arrows for messages ("s" to "f"), marks for gathers and reductions ("i"), and
      counter events ("C") with the microbatches of a full stage in flight.

    Example:
      >>> from jaxpipe.schedule.generators.gpipe import gpipe
      >>> from jaxpipe.schedule.simulate import Costs, simulate
      >>> events = trace(simulate(gpipe(1, 1), Costs(1, 1, 1)))["traceEvents"]
      >>> [(event["name"], event["ts"]) for event in events if event["ph"] == "X"]
      [('0F0', 0.0), ('0B0', 1000.0), ('0W0', 2000.0)]
    """
    name = f"{timeline.schedule.name}, {timeline.clock}"
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": name}}
    ]
    for d, parts in enumerate(timeline.parts):
        thread = {"pid": 0, "tid": d}
        events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": f"stage {d}"}})
        events += [_complete(part, timeline, thread) for part in parts]
        events += [
            {
                "ph": "C",
                "name": f"in flight, stage {d}",
                "pid": 0,
                "ts": time * _MICROSECONDS,
                "args": {"microbatches": timeline.in_full_stages(chunks)},
            }
            for time, chunks in in_flight(timeline.rows[d])
        ]
    messages, moves = exchanges(timeline)
    events += _arrows(messages, timeline)
    events += [
        {
            "ph": "i",
            "s": "t",
            "name": f"{move.what} chunk {move.chunk}",
            "cat": move.what,
            "pid": 0,
            "tid": move.stage,
            "ts": move.time * _MICROSECONDS,
        }
        for move in moves
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _complete(part: TimedAction, timeline: Timeline, thread: dict[str, int]) -> dict[str, Any]:
    place: dict[str, Any] = {**place_of(part.action, timeline.schedule)}
    if part.layers is not None:
        place["layers"] = "{} to {}".format(*part.layers)
    return {
        "ph": "X",
        "name": str(part.action),
        "cat": part.action.kind.value,
        "cname": _COLOURS[part.action.microbatch % len(_COLOURS)],
        **thread,
        "ts": part.start * _MICROSECONDS,
        "dur": (part.end - part.start) * _MICROSECONDS,
        "args": place,
    }


def _arrows(messages: Sequence[Message], timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Both ends of every arrow: viewers look for the event of the thread that they lie in."""
    ends = {(d, part.end): part for d, row in enumerate(timeline.parts) for part in row}
    starts = {(d, part.start): part for d, row in enumerate(timeline.parts) for part in row}
    for number, message in enumerate(messages):
        what = "late message" if message.late else "message"
        sends, reads = ends[message.sender, message.sent], starts[message.receiver, message.read]
        for phase, stage, part in (
            ({"ph": "s"}, message.sender, sends),
            ({"ph": "f", "bp": "e"}, message.receiver, reads),
        ):
            middle = (part.start + part.end) / 2 * _MICROSECONDS
            own = {"name": what, "cat": "message", "id": number}
            yield {**phase, **own, "pid": 0, "tid": stage, "ts": middle}
