"""Timelines as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

import itertools
from collections.abc import Iterator

from jaxpipe.schedule.show.draw import chunk_of, exchanges
from jaxpipe.schedule.simulate import TimedAction, Timeline, in_flight


def trace(*timelines: Timeline, unit_seconds: float = 1e-3) -> dict[str, object]:
    """Writes timelines in the Trace Event Format: one process for each, in which every stage has a
    thread and a memory counter.

    Args:
      timelines: such as one that was predicted and one that was measured, in the same unit.
      unit_seconds: seconds as which one unit of the costs is shown; 1 for what was measured.

    Returns:
      A tree of plain values for `json.dump`: complete events ("X") with the action's parts as
      arguments, arrows for messages ("s" to "f"), and counter events ("C") with the microbatches of
      a full stage in flight.

    Example:
      >>> from jaxpipe.schedule.generators.breadth_first import gpipe
      >>> from jaxpipe.schedule.simulate import Costs, simulate
      >>> events = trace(simulate(gpipe(1, 1), Costs(1, 1, 1)))["traceEvents"]
      >>> [(event["name"], event["ts"]) for event in events if event["ph"] == "X"]
      [('0F0', 0.0), ('0B0', 1000.0), ('0W0', 2000.0)]
    """
    numbers, unit = itertools.count(), 1e6 * unit_seconds
    events: list[dict[str, object]] = []
    for process, timeline in enumerate(timelines):
        events += _process(timeline, process, unit, numbers)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(
    timeline: Timeline, process: int, unit: float, numbers: Iterator[int]
) -> Iterator[dict[str, object]]:
    """Yields the events of one timeline, with a unit in microseconds; arrows take numbers."""
    name = f"{timeline.schedule.name}, {timeline.clock}"
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for d, parts in enumerate(timeline.rows):
        thread = {"pid": process, "tid": d}
        yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": f"stage {d}"}}
        for part in parts:
            yield _complete(part, timeline, thread, unit)
        for time, chunks in in_flight(timeline.rows[d]):
            yield {
                "ph": "C",
                "name": f"in flight, stage {d}",
                "pid": process,
                "ts": time * unit,
                "args": {"microbatches": timeline.in_full_stages(chunks)},
            }
    for event in _arrows(timeline, unit, numbers):
        yield event | {"pid": process}


def _complete(
    part: TimedAction, timeline: Timeline, thread: dict[str, int], unit: float
) -> dict[str, object]:
    return {
        "ph": "X",
        "name": str(part.action),
        "cat": part.action.kind.value,
        **thread,
        "ts": part.start * unit,
        "dur": (part.end - part.start) * unit,
        "args": {
            "chunk": chunk_of(part.action, timeline),
            "virtual_stage": part.action.virtual_stage,
            "microbatch": part.action.microbatch,
        },
    }


def _arrows(timeline: Timeline, unit: float, numbers: Iterator[int]) -> Iterator[dict[str, object]]:
    """Yields both ends of every arrow, in the middle of the actions that viewers attach them to."""
    ends = {(d, part.end): part for d, row in enumerate(timeline.rows) for part in row}
    starts = {(d, part.start): part for d, row in enumerate(timeline.rows) for part in row}
    for message, number in zip(exchanges(timeline), numbers, strict=False):
        what = "late message" if message.late else "message"
        sends, reads = ends[message.sender, message.sent], starts[message.receiver, message.read]
        for phase, stage, part in (
            ({"ph": "s"}, message.sender, sends),
            ({"ph": "f", "bp": "e"}, message.receiver, reads),
        ):
            middle = (part.start + part.end) / 2 * unit
            own = {"name": what, "cat": "message", "id": number}
            yield {**phase, **own, "tid": stage, "ts": middle}
