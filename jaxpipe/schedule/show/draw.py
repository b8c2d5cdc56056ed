"""Pictures of a timeline: text for a terminal, and SVG in the style of the papers' figures.

SVG is written element by element: the same picture gives the same bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import html
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxpipe.schedule.actions import Action, Kind
from jaxpipe.schedule.check import Results
from jaxpipe.schedule.problems import counted, plain
from jaxpipe.schedule.simulate import TimedAction, Timeline, in_flight, kind_durations


class Look(NamedTuple):
    """Look of a kind of action: its colour on a stage's first chunk and on its last, backgrounds of
    the 256-colour palette for first and other chunks, both with dark text, and its meaning."""

    light: str
    dark: str
    shades: tuple[int, int]
    meaning: str


LOOKS = {
    Kind.F: Look("#9dbdf0", "#27518f", (111, 68), "forward"),
    Kind.B: Look("#8fdcd2", "#1b7468", (116, 73), "backward, input"),
    Kind.W: Look("#c3e2ad", "#4f7f30", (150, 107), "backward, weights"),
    Kind.BW: Look("#f2d38a", "#8f6414", (222, 179), "backward (B and W)"),
}

MESSAGE, LATE, PAIR = "#555555", "#d1661b", "#222222"
"""Colours of messages, late ones, and frames of overlapped pairs."""


def chunk_of(action: Action, timeline: Timeline) -> int:
    """Number of the chunk, on its stage, that an action runs."""
    return timeline.schedule.placement.chunks[action.virtual_stage]


def fill(action: Action, timeline: Timeline) -> str:
    """The color of an action in hexadecimal, from light on the first chunk to dark on the last."""
    depth = chunk_of(action, timeline) / max(timeline.schedule.num_chunks - 1, 1)
    return _mixed(LOOKS[action.kind].light, LOOKS[action.kind].dark, depth)


def _mixed(light: str, dark: str, depth: float) -> str:
    channels = (
        [int(colour[place : place + 2], 16) for colour in (light, dark)] for place in (1, 3, 5)
    )
    return "#" + "".join(f"{round(x + depth * (y - x)):02x}" for x, y in channels)


def pairs(timeline: Timeline, stage: int) -> list[tuple[float, float]]:
    """Finds start and end of a stage's overlapped pairs: a forward, and the part that follows it,
    or all of its tick, where our program runs a full backward as B and W."""
    together, row = frozenset(timeline.schedule.overlapped), timeline.rows[stage]
    spans = []
    for k, forward in enumerate(row):
        if forward.action not in together:
            continue
        last, tick = k + 1, forward.tick
        while tick is not None and last + 1 < len(row) and row[last + 1].tick == tick:
            last += 1
        spans.append((forward.start, row[last].end))
    return spans


def stage_colors(num_stages: int) -> list[str]:
    """The colors of the stages' curves of memory, from violet over green to ochre."""
    low, middle, high = "#46327e", "#1fa187", "#d0b400"
    places = (2 * d / num_stages for d in range(num_stages))
    return [_mixed(low, middle, x) if x < 1 else _mixed(middle, high, x - 1) for x in places]


def shortest(timeline: Timeline) -> float:
    """A time that no action of a timeline undercuts, and the shortest takes or nearly takes."""
    # Late in a long timeline an action's end minus its start may round to nothing.
    durations = kind_durations(timeline.costs)
    actions = (timed.action for row in timeline.rows for timed in row)
    least = min(durations[action.virtual_stage][action.kind] for action in actions)
    # Those of a pair that saves time take at least half as long.
    return least / 2 if timeline.schedule.overlapped else least


def caption(timeline: Timeline) -> str:
    r"""One line that describes a timeline and names its clock.

    Example:
      >>> from jaxpipe.schedule.generators.breadth_first import gpipe
      >>> from jaxpipe.schedule.simulate import Costs, simulate
      >>> print(*caption(simulate(gpipe(2, 2), Costs(1, 1, 1))).split("; "), sep="\n")
      gpipe, 2 stages, 2 microbatches
      F, B, W take 1, 1, 1
      free-running clock: makespan 8, bubble 25.0%
    """
    schedule = timeline.schedule
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    shape = f"{counted(stages, 'stage')}, "
    if schedule.num_chunks > 1:
        shape += f"{schedule.num_chunks} chunks each, "
    shape += f"{microbatches} microbatch{'es' * (microbatches > 1)}"
    if schedule.num_slices > 1:
        shape += f" of {schedule.num_slices} slices"
    costs = "chunks differ"
    if len(set(timeline.costs)) == 1:
        of_chunk = timeline.costs[0]
        chunk = " of a chunk" if schedule.num_chunks > 1 else ""
        costs = f"F, B, W{chunk} take {of_chunk.f:g}, {of_chunk.b:g}, {of_chunk.w:g}"
        costs += f", a message {of_chunk.message:g}" if of_chunk.message else ""
        costs += ", senders wait" if of_chunk.rendezvous else ""
        costs += f", attention {of_chunk.attention:g} of F and B" if of_chunk.attention else ""
    return (
        f"{schedule.name}, {shape}; {costs}; {timeline.clock} clock: "
        f"makespan {plain(timeline.makespan)}, bubble {timeline.bubble_ratio:.1%}"
    )


# Messages between stages.


class Exchange(NamedTuple):
    """A result on its way from one stage to another.

    Args:
      action: the action whose result it is; B if that is a fused backward.
      reader: the action that it is for.
      sent: when the action ends.
      arrives: when the receiver may read it: on the clocks that have ticks, at the start of one.
      read: when its reader starts.
      tick: tick in which it is sent; None on the free-running clock.
      late: whether it travels under the layers of the tick after the one that sends it.
    """

    action: Action
    reader: Action
    sender: int
    receiver: int
    sent: float
    arrives: float
    read: float
    tick: int | None
    late: bool


def exchanges(timeline: Timeline) -> list[Exchange]:
    """Finds the messages of a timeline, by time of arrival."""
    return sorted(_messages(timeline), key=lambda message: message.arrives)


def _messages(timeline: Timeline) -> Iterator[Exchange]:
    """Yields every result that another stage reads. Results are found by their number (`Results`),
    which a fused backward shares with the B it stands for; nothing reads W's."""
    results = Results(timeline.schedule)
    finished = _finished(timeline, results)
    for stage, row in enumerate(timeline.rows):
        for timed in row:
            for needed in results.inputs(timed.action):
                if (sender := results.stage(needed)) == stage:
                    continue
                source = finished[needed]
                if source.tick is None or timed.tick is None:
                    late = False
                    arrives = source.end + timeline.costs[source.action.virtual_stage].message
                else:
                    late = timed.tick > source.tick + 1
                    # A late message travels under the layers of the tick after its sender's.
                    arrival_tick = source.tick + (2 if late else 1)
                    arrives = timeline.ticks[arrival_tick][stage]
                yield Exchange(
                    results.action(needed),
                    timed.action,
                    sender,
                    stage,
                    sent=source.end,
                    arrives=arrives,
                    read=timed.start,
                    tick=source.tick,
                    late=late,
                )


def _finished(timeline: Timeline, results: Results) -> dict[int, TimedAction]:
    """Timed actions by the number of their result; each ends when its result is there."""
    finished = {}
    for row in timeline.rows:
        for k, timed in enumerate(row):
            # An overlapped pair gives both results when it ends.
            last = row[k + 1] if timed.action in timeline.schedule.overlapped else timed
            if timed.action.kind is not Kind.W:
                number = results.number(timed.action)
                finished[number] = dataclasses.replace(timed, end=last.end)
    return finished


__all__ = ["Picture", "TooWideError", "caption", "figure", "text"]

_MAX_COLUMNS = 200_000
"""Longest row of text that shows anything; with very different costs it could be any length."""
_IN_PROPORTION, _LONGEST = 5000, 24
"""Longest row whose columns are in proportion to times; in longer ones, most columns in which no
action starts or ends."""
_LEGEND_WIDTH = 100
_MARKS = {
    ">": "> sends to a later stage",
    "<": "< to an earlier one",
    "}": "} to a later one, which receives it a tick late",
    "{": "{ to an earlier one, which receives it a tick late",
    "+": "+ runs together with the backward that follows",
}

_NUMBERED_ACTIONS = 6000
"""Number of boxes beyond which nobody can read the numbers, and the file takes seconds to show."""
_MAX_WIDTH, _MAX_HEIGHT = 770.0, 2000.0
"""Size of a timeline in pixels, so that a page shows the picture as wide as it is. Longer timelines
continue in further rows, then shrink."""
_BOX, _MEMORY, _GAP = 26.0, 80.0, 42.0
"""Heights of a stage, of the curves of memory and of the gap below them, with the axis of time."""
_LEFT, _RIGHT = 60.0, 10.0
"""Margins."""
_SHORTEST = 15.0
"""Width of the shortest box, if there is room."""
_FONT = 11.0
"""Size of all text but the numbers of microbatches."""
_TICK_WIDTH = 60.0
"""Least distance of two numbers on the axis of time."""
_GREY = "#555555"
_DIGIT = 0.6
"""Width of a digit, as a share of the font size."""


# Text.


class TooWideError(ValueError):
    """A drawing in text with more columns than anyone could read."""


def check_width(columns: float, remedy: str) -> None:
    """Raises `TooWideError`, with what the user can do, if the longest row is too long."""
    if columns > _MAX_COLUMNS:
        raise TooWideError(
            f"A drawing in text needs {columns:.3g} columns, beyond {_MAX_COLUMNS}: {remedy}."
        )


class _Cell(NamedTuple):
    """Columns ``start`` to ``end`` of a row; ``fixed`` of them must stand in one line."""

    start: int
    end: int
    text: str
    fixed: int
    shade: int | None


def text(timeline: Timeline, *, colour: bool = False, width: int | None = None) -> str:
    """Draws a timeline as text: one row per stage, time to the right, "." where a stage waits.

    A cell is as wide as its action is long; the shortest is just wide enough for its label. Rows
    that would be thousands of columns long cut long waits and actions short, and say so. With
    several chunks per stage the label is the action's own name, such as "2F0".

    On the device clock, a row of marks under each stage shows at the end of every tick what the
    stage sends; a line at the end says what they mean.

    Args:
      colour: whether to draw in ANSI colours, for a terminal.
      width: break rows that are longer than so many columns; None for rows of any length.

    Returns:
      Lines without a newline at the end.

    Raises:
      TooWideError: rows in which the shortest action fits its label are longer than anyone reads.

    Example:
      >>> from jaxpipe.schedule.generators.breadth_first import gpipe
      >>> from jaxpipe.schedule.device_clock import device_clock
      >>> from jaxpipe.schedule.simulate import Costs, simulate
      >>> print(text(simulate(gpipe(2, 2, fused=True), Costs(1, 1, 1))))
      stage 0 |F0- F1- ............BW0---- BW1---- |
      stage 1 |....F0- F1- BW0---- BW1---- ........|
      >>> print("\\n".join(text(device_clock(gpipe(2, 1), Costs(1, 1, 1))).splitlines()[:4]))
      stage 0 |F0 ......B0 W0 |
              |  >            |
      stage 1 |...F0 B0 W0 ...|
              |        <      |
    """
    names = max(len(_name(timed.action, timeline)) for row in timeline.rows for timed in row)
    # A mark stands behind a pair's forward, and rounding may take one column.
    room = names + (2 if timeline.schedule.overlapped else 1)
    column_of, is_cut = _columns_of(timeline, room / shortest(timeline))
    columns = column_of(timeline.makespan)
    heads = [f"stage {d}" for d in range(len(timeline.rows))]
    rows: list[tuple[str, list[_Cell]]] = []
    marks = _text_marks(timeline)
    for d, head in enumerate(heads):
        rows.append((head, [*_text_cells(timeline, d, column_of)]))
        if timeline.ticks:
            ends = [column_of(tick[d]) for tick in timeline.ticks[1:]]
            rows.append(("", _under(ends, marks[d])))
    margin = max(len(head) for head, _ in rows)
    page = columns if width is None else max(width - margin - 3, room)
    lines = []
    for first, end in itertools.pairwise(_page_ends(rows, columns, page)):
        for head, cells in rows:
            filler = "." if head.startswith("stage") else " "
            shown = _between(cells, first, end, filler, colour)
            lines.append(f"{head.ljust(margin)} |{shown}|")
        lines.append("")
    used = {mark for stage in marks for tick in stage.values() for mark in tick}
    used |= {"+"} if timeline.schedule.overlapped else set()
    meanings = "; ".join(meaning for mark, meaning in _MARKS.items() if mark in used)
    legend = textwrap.wrap(f"marks: {meanings}", width or _LEGEND_WIDTH) if used else []
    legend += ["not to scale: long waits and actions are cut short"] if is_cut else []
    return "\n".join([*lines[:-1], *legend])


def _columns_of(timeline: Timeline, scale: float) -> tuple[Callable[[float], int], bool]:
    """Finds the columns of a timeline's times; says whether long spans of time are cut short."""
    remedy = (
        "draw a picture (jaxpipe show --format svg), or use fewer microbatches or more even costs"
    )
    check_width(timeline.makespan * scale, remedy)
    actions = itertools.chain(*timeline.rows)
    ends = (time for timed in actions for time in (timed.start, timed.end))
    times = sorted({0.0, timeline.makespan, *ends, *itertools.chain(*timeline.ticks)})
    spans = [scale * (end - start) for start, end in itertools.pairwise(times)]
    if timeline.makespan * scale <= _IN_PROPORTION or max(spans) <= _LONGEST:
        return lambda time: round(time * scale), False
    columns = itertools.accumulate((min(span, _LONGEST) for span in spans), initial=0.0)
    return dict(zip(times, map(round, columns), strict=True)).__getitem__, True


def _name(action: Action, timeline: Timeline) -> str:
    if timeline.schedule.num_chunks > 1:
        return str(action)
    return f"{action.kind}{action.microbatch}"


def _text_cells(
    timeline: Timeline, stage: int, column_of: Callable[[float], int]
) -> Iterator[_Cell]:
    together = frozenset(timeline.schedule.overlapped)
    for timed in timeline.rows[stage]:
        start, end = column_of(timed.start), column_of(timed.end)
        label = _name(timed.action, timeline)
        # Rounding both ends may cost a cell its last column, never a letter of its label.
        apart = end - start > len(label) and timed.action not in together
        room = end - start - apart
        body = label[:room].ljust(room, "-" if apart else "+")
        shade = LOOKS[timed.action.kind].shades[min(chunk_of(timed.action, timeline), 1)]
        yield _Cell(start, end, body.ljust(end - start), len(label), shade)


def _text_marks(timeline: Timeline) -> list[dict[int, str]]:
    """Writes one mark for each thing that a stage sends, by stage and tick."""
    letters: list[dict[int, str]] = [collections.defaultdict(str) for _ in timeline.rows]
    if timeline.ticks:
        for message in exchanges(timeline):
            marks = "}{" if message.late else "><"
            assert message.tick is not None
            letters[message.sender][message.tick] += marks[message.sender > message.receiver]
    return letters


def _under(ends: Sequence[int], marks: dict[int, str]) -> list[_Cell]:
    """Places marks at the ends of ticks, further left where the next tick's marks take the room."""
    cells, free = [], ends[-1]
    for tick in sorted(marks, reverse=True):
        end = min(ends[tick], free)
        free = end - len(marks[tick])
        cells.append(_Cell(free, end, marks[tick], len(marks[tick]), None))
    return cells[::-1]


def _page_ends(rows: list[tuple[str, list[_Cell]]], columns: int, room: int) -> list[int]:
    """Chooses the columns at which lines end, from 0: never within a label."""
    inside = {
        column
        for _, cells in rows
        for cell in cells
        for column in range(cell.start + 1, cell.start + cell.fixed)
    }
    ends = [0]
    while columns - ends[-1] > room:
        end = ends[-1] + room
        ends.append(next((c for c in range(end, ends[-1], -1) if c not in inside), end))
    return [*ends, columns]


def _between(cells: Sequence[_Cell], first: int, end: int, filler: str, colour: bool) -> str:
    """Writes columns ``first`` to before ``end`` of a row."""
    parts, column = [], first
    for cell in cells:
        start, stop = max(cell.start, first), min(cell.end, end)
        if start >= stop:
            continue
        shown = cell.text[start - cell.start : stop - cell.start]
        if colour and cell.shade is not None:
            body = shown.rstrip(" ")
            blank = shown[len(body) :]
            shown = f"\x1b[48;5;{cell.shade};30m{body}\x1b[0m{blank}" if body else shown
        parts += [filler * (start - column), shown]
        column = stop
    return "".join([*parts, filler * (end - column)])


# SVG.


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
      >>> from jaxpipe.schedule.generators.breadth_first import gpipe
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
    size = max(min(_FONT, 0.85 * width * least / span / (_DIGIT * digits)), 1.0)
    drawn, top = [_label(_LEFT, 14, caption(timeline))], 28.0
    for number in range(num_rows):
        band = _Band(timeline, number * span, span, width)
        boxes = [*_boxes(band, box, size if detailed else None)]
        boxes += _exchanges(band, box, exchanged) if detailed else ()
        for d, colour in enumerate(stage_colors(num_stages)):  # that of the curve of its memory
            place, size_of_name = top + (d + 0.5) * box, min(_FONT, box)
            drawn.append(
                _label(_LEFT - 4, place, f"stage {d}", size=size_of_name, anchor="end", fill=colour)
            )
        drawn.append(_inside(_LEFT, top, width, height, boxes))
        drawn += _memory(band, top + height + 6)
        drawn += _times(band, top + height + 6 + _MEMORY)
        top += height + _MEMORY + _GAP
    x, top = _LEFT, top + 2
    for mark, meaning in _legend(timeline, exchanged if detailed else None):
        entry = 34 + 0.9 * _DIGIT * _FONT * len(meaning)
        if x > _LEFT and x + entry > _LEFT + width:
            x, top = _LEFT, top + 18
        drawn.append(_inside(x, top - 5, 12, 10, [mark]))
        drawn.append(_label(x + 18, top, meaning))
        x += entry
    return _document(_LEFT + width + _RIGHT, top + 14, drawn)


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
            yield _rectangle(left, top, right - left, height, colour, stroke="white")
            if size is not None:
                # Only the darker half of the shades needs white numbers.
                dark = 2 * chunk_of(timed.action, timeline) >= timeline.schedule.num_chunks
                number, shade = str(timed.action.microbatch), "white" if dark else "black"
                # A box that the end of a row cuts has its number in the larger part.
                begins, ends = max(left, 0.0), min(right, band.width)
                fitting = min(size, 0.85 * (ends - begins) / (_DIGIT * len(number)))
                if 2 * (ends - begins) >= right - left:
                    middle, place = (begins + ends) / 2, (d + 0.5) * box
                    yield _label(middle, place, number, size=fitting, anchor="middle", fill=shade)
        for start, end in pairs(timeline, d):
            if band.shows(start, end):
                left, right = band.x(start), band.x(end)
                yield _rectangle(left, top, right - left, height, "none", stroke=PAIR)


def _exchanges(band: _Band, box: float, exchanged: Sequence[Exchange]) -> Iterator[str]:
    """Draws messages as lines that end in a dot."""
    for message in exchanged:
        if not band.shows(message.sent, message.arrives + band.span / band.width):
            continue
        towards = 0.45 if message.receiver > message.sender else -0.45
        colour = LATE if message.late else MESSAGE
        start = band.x(message.sent), (message.sender + 0.5 + towards) * box
        end = band.x(message.arrives), (message.receiver + 0.5 - towards) * box
        yield _line([start, end], colour)
        yield _element("circle", cx=end[0], cy=end[1], r=1.2, fill=colour)


def _memory(band: _Band, top: float) -> Iterator[str]:
    """Draws what each stage keeps in flight over time."""
    timeline, right = band.timeline, _LEFT + band.width
    most = timeline.in_full_stages(max(timeline.peak_in_flight))
    curves = []
    for colour, row in zip(stage_colors(len(timeline.rows)), timeline.rows, strict=True):
        points, before = list[tuple[float, float]](), _MEMORY
        for time, count in ((0.0, 0), *in_flight(row), (timeline.makespan, 0)):
            level = (1 - 0.95 * timeline.in_full_stages(count) / most) * _MEMORY
            points += [(band.x(time), before), (band.x(time), level)]
            before = level
        curves.append(_line(points, colour, 1.2))
    yield _inside(_LEFT, top, band.width, _MEMORY, curves)
    yield _line([(_LEFT, top), (_LEFT, top + _MEMORY), (right, top + _MEMORY)], _GREY)
    yield _label(_LEFT - 4, top + 0.05 * _MEMORY, f"{most:g}", anchor="end")
    yield _label(_LEFT - 4, top + 0.5 * _MEMORY, "in flight", anchor="end")
    yield _label(_LEFT - 4, top + _MEMORY, "0", anchor="end")


def _times(band: _Band, top: float) -> Iterator[str]:
    """Draws the axis of time below a row: numbers at round times, in the unit of the costs."""
    least = band.span * _TICK_WIDTH / band.width
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    end = band.first + band.span
    for number in range(math.ceil(band.first / step), math.floor(end / step) + 1):
        x = _LEFT + band.x(number * step)
        yield _line([(x, top), (x, top + 4)], _GREY)
        named = "time " if number == 0 else ""
        yield _label(x, top + 11, f"{named}{number * step:g}", anchor="middle")


def _legend(timeline: Timeline, exchanged: Sequence[Exchange] | None) -> Iterator[tuple[str, str]]:
    """Yields every mark of the picture, 12 by 10 pixels, with its meaning."""
    used = {timed.action.kind for row in timeline.rows for timed in row}
    darker = "; later chunks are darker" if timeline.schedule.num_chunks > 1 else ""
    for kind, look in LOOKS.items():
        if kind in used:
            yield _rectangle(0, 1, 12, 8, look.light), look.meaning + darker
            darker = ""
    if timeline.schedule.overlapped:
        yield _rectangle(1, 1, 10, 8, "none", stroke=PAIR), "overlapped pair"
    if exchanged is None:
        return
    lates = {message.late for message in exchanged}
    meanings: Sequence[tuple[bool, str, str]] = (
        (False, MESSAGE, "message"),
        (True, LATE, "message received a tick late"),
    )
    for late, colour, meaning in meanings:
        if late in lates:
            yield _line([(0, 5), (12, 5)], colour), meaning


def _element(name: str, content: str = "", **attributes: float | str) -> str:
    """Writes one element; an attribute's underscores stand for hyphens."""
    written = "".join(
        f' {key.replace("_", "-")}="{value if isinstance(value, str) else _number(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{html.escape(content)}</{name}>"


def _inside(x: float, y: float, width: float, height: float, elements: Iterable[str]) -> str:
    """Places elements in a window of the picture, which hides what goes beyond it."""
    name = f"window-{x:.0f}-{y:.0f}"
    window = f'<clipPath id="{name}">{_rectangle(0, 0, width, height, "none")}</clipPath>'
    place = f'transform="translate({_number(x)} {_number(y)})" clip-path="url(#{name})"'
    return f"{window}<g {place}>{''.join(elements)}</g>"


def _label(
    x: float,
    y: float,
    content: str,
    *,
    size: float = _FONT,
    anchor: str = "start",
    fill: str = "black",
) -> str:
    """Writes text whose middle line is at ``y``."""
    y += 0.35 * size
    return _element("text", content, x=x, y=y, font_size=size, text_anchor=anchor, fill=fill)


def _rectangle(
    x: float, y: float, width: float, height: float, fill: str, stroke: str = "none"
) -> str:
    return _element("rect", x=x, y=y, width=width, height=height, fill=fill, stroke=stroke)


def _line(points: Sequence[tuple[float, float]], stroke: str, width: float = 0.7) -> str:
    written = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
    return _element("polyline", points=written, fill="none", stroke=stroke, stroke_width=width)


class Picture(str):
    """An SVG document, which a notebook shows as a picture."""

    def __repr__(self) -> str:
        return f"<SVG of {len(self)} characters>"

    def _repr_svg_(self) -> str:
        return str(self)


def _document(width: float, height: float, elements: Iterable[str]) -> Picture:
    """Writes a picture of this size, in pixels, on white."""
    size = f'width="{_number(width)}" height="{_number(height)}"'
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
        _rectangle(0, 0, width, height, "white"),
        *elements,
    ]
    return Picture("\n".join([*lines, "</svg>"]) + "\n")


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
