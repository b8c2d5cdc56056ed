"""A timeline as text for a terminal."""

from __future__ import annotations

import collections
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxpipe.schedule.actions import Action
from jaxpipe.schedule.show.exchanges import exchanges
from jaxpipe.schedule.show.looks import LOOKS, chunk_of, shortest
from jaxpipe.schedule.simulate import Timeline

_MAX_COLUMNS = 200_000
"""Longest row of text that shows anything; with very different costs it could be any length."""
_LEGEND_WIDTH = 100
_MARKS = {
    ">": "> sends to a later stage",
    "<": "< to an earlier one",
    "}": "} to a later one, which receives it a tick late",
    "{": "{ to an earlier one, which receives it a tick late",
    "+": "+ runs together with the backward that follows",
}


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

    A cell is as wide as its action is long; the shortest is just wide enough for its label. With
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
      >>> from jaxpipe.schedule.generators.gpipe import gpipe
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
    names = max(len(_label(timed.action, timeline)) for row in timeline.rows for timed in row)
    # A mark stands behind a pair's forward, and rounding may take one column.
    room = names + (2 if timeline.schedule.overlapped else 1)
    scale = room / shortest(timeline)
    remedy = (
        "draw a picture (jaxpipe show --format svg), or use fewer microbatches or more even costs"
    )
    check_width(timeline.makespan * scale, remedy)
    columns = round(timeline.makespan * scale)
    heads = [f"stage {d}" for d in range(len(timeline.rows))]
    rows: list[tuple[str, list[_Cell]]] = []
    marks = _marks(timeline)
    for d, head in enumerate(heads):
        rows.append((head, [*_cells(timeline, d, scale)]))
        if timeline.ticks:
            ends = [round(tick[d] * scale) for tick in timeline.ticks[1:]]
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
    return "\n".join([*lines[:-1], *legend])


def _label(action: Action, timeline: Timeline) -> str:
    if timeline.schedule.num_chunks > 1:
        return str(action)
    return f"{action.kind}{action.microbatch}"


def _cells(timeline: Timeline, stage: int, scale: float) -> Iterator[_Cell]:
    together = frozenset(timeline.schedule.overlapped)
    for timed in timeline.rows[stage]:
        start, end = round(timed.start * scale), round(timed.end * scale)
        label = _label(timed.action, timeline)
        # Rounding both ends may cost a cell its last column, never a letter of its label.
        apart = end - start > len(label) and timed.action not in together
        room = end - start - apart
        body = label[:room].ljust(room, "-" if apart else "+")
        shade = LOOKS[timed.action.kind].shades[min(chunk_of(timed.action, timeline), 1)]
        yield _Cell(start, end, body.ljust(end - start), len(label), shade)


def _marks(timeline: Timeline) -> list[dict[int, str]]:
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
