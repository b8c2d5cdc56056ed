"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from typing import Any

from jaxpipe.schedule.show.report import place_of
from jaxpipe.schedule.simulate import Timeline, in_flight

_MICROSECONDS = 1000.0
"""A trace counts in microseconds: one unit of the costs shows as a millisecond."""


def trace(timeline: Timeline) -> dict[str, Any]:
    """Writes a timeline in the Trace Event Format: one thread and one memory counter per stage.

    Returns:
      A tree of plain values for `json.dump`: complete events ("X") with the action's parts as
      arguments, and counter events ("C") with the microbatches of a full stage in flight.

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
    for d, row in enumerate(timeline.rows):
        thread = {"pid": 0, "tid": d}
        events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": f"stage {d}"}})
        events += [
            {
                "ph": "X",
                "name": str(timed.action),
                "cat": timed.action.kind.value,
                **thread,
                "ts": timed.start * _MICROSECONDS,
                "dur": (timed.end - timed.start) * _MICROSECONDS,
                "args": place_of(timed.action, timeline.schedule),
            }
            for timed in row
        ]
        events += [
            {
                "ph": "C",
                "name": f"in flight, stage {d}",
                "pid": 0,
                "ts": time * _MICROSECONDS,
                "args": {"microbatches": timeline.in_full_stages(chunks)},
            }
            for time, chunks in in_flight(row)
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
