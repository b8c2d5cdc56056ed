"""Pictures of a timeline: text for a terminal, and SVG in the style of the papers' figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxpipe.schedule.show.exchanges import Exchange, exchanges
from jaxpipe.schedule.show.looks import (
    LATE,
    LOOKS,
    MESSAGE,
    PAIR,
    caption,
    chunk_of,
    fill,
    pairs,
    shortest,
    stage_colors,
)
from jaxpipe.schedule.show.svg import (
    DIGIT,
    GREY,
    Picture,
    document,
    element,
    inside,
    line,
    rectangle,
    save,
)
from jaxpipe.schedule.show.svg import text as label
from jaxpipe.schedule.show.text_draw import TooWideError, text
from jaxpipe.schedule.simulate import Timeline, in_flight

__all__ = ["TooWideError", "caption", "figure", "save", "text"]

_NUMBERED_ACTIONS = 6000
"""Number of boxes beyond which nobody can read the numbers, and the file takes seconds to show."""
_NAMED_CURVES = 16
"""Number of stages beyond which a list of their names is taller than the curves."""
_MAX_WIDTH, _MAX_HEIGHT = 1000.0, 2000.0
"""Size of a picture in pixels. Longer timelines continue in further rows, then shrink."""
_BOX, _MEMORY, _GAP, _MARGIN = 24.0, 80.0, 24.0, 60.0
"""Heights of a stage, of the curves of memory and of the gap below them; margins at the sides."""
_SHORTEST = 18.0
"""Width of the shortest box, if there is room."""
_ENTRY = 160.0
"""Width of the longest entry of the legend."""


class _Band(NamedTuple):
    """The part of a timeline that one row of the picture shows."""

    timeline: Timeline
    first: float
    span: float
    width: float

    def x(self, time: float) -> float:
        # Far outside it does not matter where: renderers read numbers of some length only.
        return min(max((time - self.first) / self.span, -1), 2) * self.width

    def shows(self, start: float, end: float) -> bool:
        return start < self.first + self.span and end > self.first


def figure(timeline: Timeline) -> Picture:
    """Draws a timeline as SVG, and the activations in flight beneath it.

    Boxes are numbered by microbatch and coloured by kind; later chunks are darker. Lines are
    messages, from the end of the action to the moment they can be read. Long timelines continue in
    further rows. The curves count microbatches of a full stage. A notebook shows the picture.

    Example:
      >>> from jaxpipe.schedule.generators.gpipe import gpipe
      >>> from jaxpipe.schedule.simulate import Costs, simulate
      >>> figure(simulate(gpipe(2, 4), Costs(1, 1, 1))).count('stroke="white"')
      24
    """
    least, num_stages = shortest(timeline), len(timeline.rows)
    height = min(_BOX * num_stages, _MAX_HEIGHT - 3 * _MEMORY)
    wanted = _SHORTEST * timeline.makespan / least
    most = max(1, int(_MAX_HEIGHT / (height + _MEMORY + _GAP)))
    num_rows = min(math.ceil(wanted / _MAX_WIDTH), most)
    width = min(max(wanted / num_rows, 420.0), _MAX_WIDTH)
    span, box = timeline.makespan / num_rows, height / num_stages
    exchanged = exchanges(timeline)
    detailed = sum(map(len, timeline.rows)) <= _NUMBERED_ACTIONS
    # A font size at which the longest microbatch number fits the shortest box.
    digits = len(str(timeline.schedule.num_passes - 1))
    size = max(min(9.0, 0.85 * width * least / span / (DIGIT * digits)), 1.0)
    drawn, top = [label(_MARGIN, 12, caption(timeline), size=10)], 24.0
    for number in range(num_rows):
        band = _Band(timeline, number * span, span, width)
        boxes = [*_boxes(band, box, size if detailed else None)]
        boxes += _exchanges(band, box, exchanged) if detailed else ()
        drawn += (
            label(_MARGIN - 4, top + (d + 0.5) * box, f"stage {d}", size=min(9, box), anchor="end")
            for d in range(num_stages)
        )
        drawn.append(inside(_MARGIN, top, width, height, boxes))
        drawn += _memory(band, top + height + 4, named=number == 0)
        top += height + _MEMORY + _GAP
    drawn.append(
        label(_MARGIN + width / 2, top - 8, "time, in the unit of the costs", anchor="middle")
    )
    entries = [*_legend(timeline, exchanged if detailed else None)]
    columns = min(4, int(width / _ENTRY))
    for k, (mark, meaning) in enumerate(entries):
        x, y = _MARGIN + k % columns * width / columns, top + 10 + 14 * (k // columns)
        drawn.append(inside(x, y - 5, 12, 10, [mark]))
        drawn.append(label(x + 16, y, meaning))
    height = top + 16 + 14 * -(-len(entries) // columns)
    return document(width + 2 * _MARGIN, height, drawn)


def _boxes(band: _Band, box: float, size: float | None) -> Iterator[str]:
    """Draws the boxes of a band, with numbers of this font size."""
    timeline = band.timeline
    for d, row in enumerate(timeline.rows):
        top, height = (d + 0.05) * box, 0.9 * box
        for timed in row:
            if not band.shows(timed.start, timed.end):
                continue
            left, right = band.x(timed.start), band.x(timed.end)
            colour = fill(timed.action, timeline)
            yield rectangle(left, top, right - left, height, colour, stroke="white")
            if size is not None:
                # Only the darker half of the shades needs white numbers.
                dark = 2 * chunk_of(timed.action, timeline) >= timeline.schedule.num_chunks
                number, middle = str(timed.action.microbatch), (left + right) / 2
                shade = "white" if dark else "black"
                yield label(middle, (d + 0.5) * box, number, size=size, anchor="middle", fill=shade)
        for start, end in pairs(timeline, d):
            if band.shows(start, end):
                left, right = band.x(start), band.x(end)
                yield rectangle(left, top, right - left, height, "none", stroke=PAIR)


def _exchanges(band: _Band, box: float, exchanged: Sequence[Exchange]) -> Iterator[str]:
    """Draws messages as lines that end in a dot."""
    for message in exchanged:
        if not band.shows(message.sent, message.arrives + band.span / band.width):
            continue
        towards = 0.45 if message.receiver > message.sender else -0.45
        colour = LATE if message.late else MESSAGE
        start = band.x(message.sent), (message.sender + 0.5 + towards) * box
        end = band.x(message.arrives), (message.receiver + 0.5 - towards) * box
        yield line([start, end], colour)
        yield element("circle", cx=end[0], cy=end[1], r=1.2, fill=colour)


def _memory(band: _Band, top: float, *, named: bool) -> Iterator[str]:
    """Draws what each stage keeps in flight over time."""
    timeline, right = band.timeline, _MARGIN + band.width
    most = timeline.in_full_stages(max(timeline.peak_in_flight))
    colours = stage_colors(len(timeline.rows))
    curves = []
    for d, row in enumerate(timeline.rows):
        points, before = list[tuple[float, float]](), _MEMORY
        for time, count in ((0.0, 0), *in_flight(row), (timeline.makespan, 0)):
            level = (1 - 0.95 * timeline.in_full_stages(count) / most) * _MEMORY
            points += [(band.x(time), before), (band.x(time), level)]
            before = level
        curves.append(line(points, colours[d], 1))
        if named and len(timeline.rows) <= _NAMED_CURVES:
            yield label(right + 6, top + 5 + d * 8, f"stage {d}", size=7, fill=colours[d])
    yield inside(_MARGIN, top, band.width, _MEMORY, curves)
    yield line([(_MARGIN, top), (_MARGIN, top + _MEMORY), (right, top + _MEMORY)], GREY)
    yield label(_MARGIN - 4, top + 0.05 * _MEMORY, f"{most:g}", anchor="end")
    yield label(_MARGIN - 4, top + 0.5 * _MEMORY, "in flight", anchor="end")
    yield label(_MARGIN - 4, top + _MEMORY, "0", anchor="end")


def _legend(timeline: Timeline, exchanged: Sequence[Exchange] | None) -> Iterator[tuple[str, str]]:
    """Yields every mark of the picture, 12 by 10 pixels, with its meaning."""
    used = {timed.action.kind for row in timeline.rows for timed in row}
    darker = "; later chunks are darker" if timeline.schedule.num_chunks > 1 else ""
    for kind, look in LOOKS.items():
        if kind in used:
            yield rectangle(0, 1, 12, 8, look.light), look.meaning + darker
            darker = ""
    if timeline.schedule.overlapped:
        yield rectangle(1, 1, 10, 8, "none", stroke=PAIR), "overlapped pair"
    if exchanged is None:
        return
    lates = {message.late for message in exchanged}
    meanings: Sequence[tuple[bool, str, str]] = (
        (False, MESSAGE, "message"),
        (True, LATE, "message received a tick late"),
    )
    for late, colour, meaning in meanings:
        if late in lates:
            yield line([(0, 5), (12, 5)], colour), meaning
