"""Pictures of a timeline: text for a terminal, SVG and PNG in the style of the papers' figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpipe.schedule.show.exchanges import Exchanges, exchanges
from jaxpipe.schedule.show.looks import (
    LATE,
    LOOKS,
    MESSAGE,
    MOVE,
    PAIR,
    caption,
    chunk_of,
    fill,
    pairs,
    shortest,
    stage_colors,
)
from jaxpipe.schedule.show.text_draw import TooWideError, text
from jaxpipe.schedule.simulate import Timeline, in_flight

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FORMATS", "TooWideError", "caption", "figure", "save", "text"]

FORMATS = ("svg", "png")
"""The file formats `save` writes."""
_NUMBERED_ACTIONS = 6000
"""Number of boxes beyond which nobody can read the numbers, and writing them takes seconds."""
_NAMED_CURVES = 16
"""Number of stages beyond which a list of their names is taller than the curves."""
_MAX_WIDTH, _MAX_HEIGHT = 14.0, 30.0
"""Size of a picture in inches. Longer timelines continue in further rows, then shrink."""
_MEMORY_HEIGHT, _ROW_GAP = 1.2, 0.6


def figure(timeline: Timeline) -> Figure:
    """Draws a timeline as a figure, and the activations in flight beneath it.

    Boxes are numbered by microbatch and coloured by kind; later chunks are darker. Lines are
    messages, from the end of the action to the moment they can be read; triangles are gathers and
    reductions. Long timelines continue in further rows. The curves count microbatches of a full
    stage. Only matplotlib's object interface is used, with an Agg canvas: no global state, no
    display.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    least = shortest(timeline)
    height = min(max(0.32 * len(timeline.rows), 1.0), _MAX_HEIGHT - 3)
    wanted = 0.24 * timeline.makespan / least
    most = max(1, int(_MAX_HEIGHT / (height + _MEMORY_HEIGHT + _ROW_GAP)))
    num_rows = min(math.ceil(wanted / _MAX_WIDTH), most)
    width = min(max(wanted / num_rows, 6.0), _MAX_WIDTH)
    size = width, num_rows * (height + _MEMORY_HEIGHT + _ROW_GAP) + 0.8
    drawn = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(drawn)
    ratios = (height, _MEMORY_HEIGHT) * num_rows
    axes = drawn.subplots(2 * num_rows, height_ratios=ratios)
    exchanged, span = exchanges(timeline), timeline.makespan / num_rows
    points = _points(width, span, timeline, least)
    for row in range(num_rows):
        boxes, memory = axes[2 * row : 2 * row + 2]
        _draw_boxes(boxes, timeline, points, row * span, (row + 1) * span)
        _draw_exchanges(boxes, timeline, exchanged, row * span, (row + 1) * span)
        _draw_memory(memory, timeline, named=row == 0)
        boxes.tick_params(labelbottom=False)
        for panel in (boxes, memory):
            panel.set_xlim(row * span, (row + 1) * span)
            panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_title(caption(timeline), fontsize=9, loc="left")
    axes[-1].set_xlabel("time, in the unit of the costs")
    _add_legend(drawn, timeline, exchanged)
    return drawn


def _has_details(timeline: Timeline) -> bool:
    """Whether numbers, messages and transfers are drawn."""
    return sum(map(len, timeline.rows)) <= _NUMBERED_ACTIONS


def _draw_boxes(axes: Axes, timeline: Timeline, points: float, first: float, end: float) -> None:
    """Draws boxes between two times, with numbers of this font size unless there are too many."""
    numbered = _has_details(timeline)
    num_chunks = timeline.schedule.num_chunks
    for d, row in enumerate(timeline.rows):
        shown = [timed for timed in row if timed.start < end and timed.end > first]
        axes.broken_barh(
            [(timed.start, timed.end - timed.start) for timed in shown],
            (d - 0.45, 0.9),
            facecolors=[fill(timed.action, timeline) for timed in shown],
            edgecolors="white",
            linewidth=0.8,
            zorder=2,
        )
        axes.broken_barh(
            [(start, stop - start) for start, stop in pairs(timeline, d)],
            (d - 0.45, 0.9),
            facecolors="none",
            edgecolors=PAIR,
            linewidth=1.0,
            zorder=3,
        )
        for timed in shown if numbered else ():
            middle = (timed.start + timed.end) / 2
            if not first <= middle < end:
                continue
            axes.text(
                middle,
                d,
                str(timed.action.microbatch),
                ha="center",
                va="center",
                fontsize=points,
                # Only the darker half of the shades needs white numbers.
                color="white" if 2 * chunk_of(timed.action, timeline) >= num_chunks else "black",
                clip_on=True,
            )
    num_stages = len(timeline.rows)
    axes.set_yticks(range(num_stages), [f"stage {d}" for d in range(num_stages)])
    axes.set_ylim(num_stages - 0.5, -0.5)


def _draw_exchanges(
    axes: Axes, timeline: Timeline, exchanges: Exchanges, first: float, end: float
) -> None:
    """Draws messages as lines, and transfers over data as triangles, unless there are too many."""
    from matplotlib.collections import LineCollection

    if not _has_details(timeline):
        return
    shown = [m for m in exchanges.messages if m.sent <= end and m.arrives >= first]
    towards = [0.45 if message.receiver > message.sender else -0.45 for message in shown]
    lines = [
        ((message.sent, message.sender + toward), (message.arrives, message.receiver - toward))
        for message, toward in zip(shown, towards, strict=True)
    ]
    colours = [LATE if message.late else MESSAGE for message in shown]
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=0.7, zorder=3))
    times, stages = [line[1][0] for line in lines], [line[1][1] for line in lines]
    axes.scatter(times, stages, s=2, c=colours, zorder=3)
    for what, marker in (("gather", ">"), ("reduce", "<")):
        moves = [m for m in exchanges.moves if m.what == what and first <= m.time <= end]
        axes.scatter(
            [move.time for move in moves],
            [move.stage + 0.36 for move in moves],
            s=9,
            marker=marker,
            color=MOVE,
            zorder=4,
        )


def _points(width: float, span: float, timeline: Timeline, least: float) -> float:
    """A font size at which the longest microbatch number fits the shortest box."""
    digits = len(str(timeline.schedule.num_microbatches - 1))
    box_points = 72 * 0.85 * width * least / span
    # A digit of matplotlib's default font is about 0.65 of the font size wide.
    return max(min(8.0, box_points / (0.65 * digits)), 1.0)


def _draw_memory(axes: Axes, timeline: Timeline, *, named: bool) -> None:
    num_stages = len(timeline.rows)
    colours = stage_colors(num_stages)
    for d, row in enumerate(timeline.rows):
        times, counts = zip((0.0, 0), *in_flight(row), (timeline.makespan, 0), strict=True)
        full_stages = [timeline.in_full_stages(count) for count in counts]
        axes.step(
            times, full_stages, where="post", color=colours[d], linewidth=1, label=f"stage {d}"
        )
    axes.set_ylim(0, None)
    axes.set_ylabel("in flight", fontsize=8)
    if named and num_stages <= _NAMED_CURVES:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=6)


def _add_legend(drawn: Figure, timeline: Timeline, exchanges: Exchanges) -> None:
    drawn.legend(
        handles=[*_handles(timeline, exchanges)],
        title="later chunks are darker" if timeline.schedule.num_chunks > 1 else None,
        title_fontsize=8,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )


def _handles(timeline: Timeline, exchanges: Exchanges) -> Iterator[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = {timed.action.kind for row in timeline.rows for timed in row}
    for kind, look in LOOKS.items():
        if kind in used:
            yield Patch(color=look.light, label=look.meaning)
    if timeline.schedule.overlapped:
        yield Patch(facecolor="none", edgecolor=PAIR, label="overlapped pair")
    if not _has_details(timeline):
        return
    lates = {message.late for message in exchanges.messages}
    for late, colour, meaning in (
        (False, MESSAGE, "message"),
        (True, LATE, "message received a tick late"),
    ):
        if late in lates:
            yield Line2D(
                [], [], color=colour, linewidth=0.7, marker=".", markersize=3, label=meaning
            )
    for marker, meaning in ((">", "weights gathered"), ("<", "gradients reduced")):
        if exchanges.moves:
            yield Line2D([], [], color=MOVE, marker=marker, ls="", markersize=3, label=meaning)


def save(drawn: Figure, path: str | Path) -> Path:
    """Writes a figure to a file, whose ending chooses the format, and returns the path.

    The same figure gives the same bytes.

    Raises:
      ValueError: the ending is neither .svg nor .png.
      OSError: the file cannot be written.
    """
    import matplotlib

    path = Path(path)
    ending = path.suffix.lower().lstrip(".")
    if ending not in FORMATS:
        raise ValueError(
            f"{str(path)!r} does not end in a picture format. Nearest valid: .svg, .png."
        )
    # Without a fixed salt and date every SVG would differ.
    with matplotlib.rc_context({"svg.hashsalt": "jaxpipe"}):
        drawn.savefig(path, dpi=150, metadata={"Date": None} if ending == "svg" else None)
    return path
