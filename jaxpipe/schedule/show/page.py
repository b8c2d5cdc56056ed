"""Schedules as one page to look into with a browser: page.html with its data and scripts inside."""

import json
from collections.abc import Sequence
from importlib import resources

from jaxpipe.schedule.show import draw
from jaxpipe.schedule.show.draw import exchanges
from jaxpipe.schedule.simulate import TimedAction, Timeline, in_flight


def page(compared: Sequence[Sequence[Timeline]]) -> str:
    """Writes schedules, each on some clocks, as one HTML page that needs no network.

    Example:
      >>> from jaxpipe.schedule.generators.breadth_first import gpipe
      >>> from jaxpipe.schedule.device_clock import timelines
      >>> from jaxpipe.schedule.simulate import Costs
      >>> page([timelines(gpipe(2, 4), Costs(1, 1, 1))]).splitlines()[0]
      '<!doctype html>'
    """
    data = {
        "schedules": [_schedule(clocks) for clocks in compared],
        "meanings": {kind.value: look.meaning for kind, look in draw.LOOKS.items()},
        "exchangeColors": {"message": draw.MESSAGE, "late": draw.LATE, "pair": draw.PAIR},
    }
    # Nothing in a name can then end the script element that holds the data.
    written = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    text = _resource("page.html")
    for script in ("page_draw.js", "page.js"):
        text = text.replace(f"{{{{{script}}}}}", _resource(script))
    return text.replace("{{data}}", written)


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _schedule(clocks: Sequence[Timeline]) -> dict[str, object]:
    free, schedule = clocks[0], clocks[0].schedule
    actions = {timed.action for row in free.rows for timed in row}
    colors = {
        f"{action.kind.value}{draw.chunk_of(action, free)}": draw.fill(action, free)
        for action in sorted(actions, key=str)
    }
    return {
        "name": schedule.name,
        "stages": schedule.num_stages,
        "chunks": schedule.num_chunks,
        "colors": colors,
        "stageColors": draw.stage_colors(schedule.num_stages),
        "timelines": list(map(_timeline, clocks)),
    }


def _timeline(timeline: Timeline) -> dict[str, object]:
    """Writes rows of plain values: for some 100,000 parts of a page, names would be too long."""
    memory = [
        [(time, timeline.in_full_stages(count)) for time, count in in_flight(row)]
        for row in timeline.rows
    ]
    return {
        "clock": timeline.clock,
        "caption": draw.caption(timeline),
        "makespan": timeline.makespan,
        "parts": [[_part(part, timeline) for part in row] for row in timeline.rows],
        "pairs": [draw.pairs(timeline, stage) for stage in range(len(timeline.rows))],
        "ticks": timeline.ticks,
        "memory": memory,
        "messages": [
            (str(m.action), str(m.reader), m.sender, m.receiver, m.sent, m.arrives, m.late)
            for m in exchanges(timeline)
        ],
    }


def _part(part: TimedAction, timeline: Timeline) -> tuple[object, ...]:
    action, kind = part.action, part.action.kind.value
    place = action.virtual_stage, draw.chunk_of(action, timeline), action.microbatch
    return str(action), kind, *place, part.start, part.end, part.tick
