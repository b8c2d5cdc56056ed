"""Pictures of a timeline: text for a terminal, SVG and PNG in the style of the papers' figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxpipe.schedule.actions import Action, Kind
from jaxpipe.schedule.simulate import TimedAction, Timeline, in_flight

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")
"""The file formats `save` writes."""


class _Look(NamedTuple):
    """How a kind is drawn: its colour on a stage's first chunk and on its last, backgrounds of the
    256-colour palette for first and other chunks, dark text on both, and what it means."""

    light: str
    dark: str
    shades: tuple[int, int]
    meaning: str


_LOOKS = {
    Kind.F: _Look("#9dbdf0", "#27518f", (111, 68), "forward"),
    Kind.B: _Look("#8fdcd2", "#1b7468", (116, 73), "backward, input"),
    Kind.W: _Look("#c3e2ad", "#4f7f30", (150, 107), "backward, weights"),
    Kind.BW: _Look("#8fdcd2", "#1b7468", (116, 73), "backward (B and W)"),
    Kind.R: _Look("#d6c3f0", "#6b4c9a", (183, 140), "recomputed"),
}
_MAX_COLUMNS = 200_000
"""A longer row of text would show nothing; with very different costs it could be any length."""
_NUMBERED_ACTIONS = 6000
"""Beyond this many boxes nobody can read the numbers, and writing them takes seconds."""
_NAMED_CURVES = 16
"""With more stages than this a list of their names is taller than the curves."""


class TooWideError(ValueError):
    """A drawing in text with more columns than anyone could read."""


def check_width(columns: float, remedy: str) -> None:
    """Raises `TooWideError`, with what the user can do, if the longest row is too long."""
    if columns > _MAX_COLUMNS:
        raise TooWideError(
            f"A drawing in text needs {columns:.3g} columns, beyond {_MAX_COLUMNS}: {remedy}."
        )


def text(timeline: Timeline, *, colour: bool = False) -> str:
    """Draws a timeline as text: one row per stage, time to the right, "." where a stage waits.

    A cell is as wide as its action is long; the shortest action is just wide enough for its label.
    With several chunks per stage the label is the action's own name, such as "2F0".

    With ``colour`` in ANSI colours, for a terminal. There is no newline at the end.

    Raises:
      TooWideError: rows in which the shortest action fits its label are longer than anyone reads.

    Example:
      >>> from jaxpipe.schedule.generators.gpipe import gpipe
      >>> from jaxpipe.schedule.simulate import Costs, simulate
      >>> print(text(simulate(gpipe(2, 2, fused=True), Costs(1, 1, 1))))
      stage 0 |F0- F1- ............BW0---- BW1---- |
      stage 1 |....F0- F1- BW0---- BW1---- ........|
    """
    cells = max(len(_label(timed.action, timeline)) for row in timeline.rows for timed in row) + 1
    scale = cells / _shortest(timeline)
    remedy = (
        "draw a picture (jaxpipe show --format svg), or use fewer microbatches or more even costs"
    )
    check_width(timeline.makespan * scale, remedy)
    margin = len(f"stage {len(timeline.rows) - 1}")
    return "\n".join(
        f"{f'stage {d}'.ljust(margin)} |{_row(row, timeline, scale, colour)}|"
        for d, row in enumerate(timeline.rows)
    )


def _row(row: tuple[TimedAction, ...], timeline: Timeline, scale: float, colour: bool) -> str:
    parts, column = [], 0
    for timed in row:
        start, end = round(timed.start * scale), round(timed.end * scale)
        # Rounding both ends may cost a cell its last column, never a letter of its label.
        body = _label(timed.action, timeline).ljust(end - start - 1, "-")
        gap, rest = "." * (start - column), " " * (end - start - len(body))
        if colour:
            shade = _LOOKS[timed.action.kind].shades[min(_chunk(timed.action, timeline), 1)]
            body = f"\x1b[48;5;{shade};30m{body}\x1b[0m"
        parts += [gap, body, rest]
        column = end
    return "".join([*parts, "." * (round(timeline.makespan * scale) - column)])


def _label(action: Action, timeline: Timeline) -> str:
    if timeline.schedule.num_chunks > 1:
        return str(action)
    return f"{action.kind}{action.microbatch}"


def _shortest(timeline: Timeline) -> float:
    # Late in a long timeline an action's end minus its start may round to nothing.
    used = {
        (timed.action.virtual_stage, timed.action.kind) for row in timeline.rows for timed in row
    }
    return min(timeline.costs[s].of(kind) for s, kind in used)


def _chunk(action: Action, timeline: Timeline) -> int:
    return timeline.schedule.placement.chunks[action.virtual_stage]


def figure(timeline: Timeline) -> Figure:
    """Draws a timeline as a figure, and the activations in flight beneath it.

    Boxes are numbered by microbatch and coloured by kind; later chunks are darker. The curves count
    microbatches of a full stage. Only matplotlib's object interface is used, with an Agg canvas: no
    global state, no display.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_stages = len(timeline.rows)
    width = min(max(0.24 * timeline.makespan / _shortest(timeline), 6.0), 60.0)
    height = min(max(0.32 * num_stages, 1.0), 30.0)
    drawn = Figure(figsize=(width, height + 2.6), layout="constrained")
    FigureCanvasAgg(drawn)
    boxes, memory = drawn.subplots(2, sharex=True, height_ratios=(height, 1.2))
    _draw_boxes(boxes, timeline, _points(width, timeline))
    _draw_memory(memory, timeline)
    boxes.set_title(caption(timeline), fontsize=9, loc="left")
    memory.set_xlim(0, timeline.makespan)
    memory.set_xlabel("time, in the unit of the costs")
    for axes in (boxes, memory):
        axes.spines[["top", "right"]].set_visible(False)
    _add_legend(drawn, timeline)
    return drawn


def _draw_boxes(axes: Axes, timeline: Timeline, points: float) -> None:
    """Boxes, with numbers of this font size unless there are too many."""
    numbered = sum(len(row) for row in timeline.rows) <= _NUMBERED_ACTIONS
    num_chunks = timeline.schedule.num_chunks
    for d, row in enumerate(timeline.rows):
        axes.broken_barh(
            [(timed.start, timed.end - timed.start) for timed in row],
            (d - 0.45, 0.9),
            facecolors=[_fill(timed.action, timeline) for timed in row],
            edgecolors="white",
            linewidth=0.8,
        )
        for timed in row if numbered else ():
            axes.text(
                (timed.start + timed.end) / 2,
                d,
                str(timed.action.microbatch),
                ha="center",
                va="center",
                fontsize=points,
                # Only the darker half of the shades needs white numbers.
                color="white" if 2 * _chunk(timed.action, timeline) >= num_chunks else "black",
                clip_on=True,
            )
    num_stages = len(timeline.rows)
    axes.set_yticks(range(num_stages), [f"stage {d}" for d in range(num_stages)])
    axes.set_ylim(num_stages - 0.5, -0.5)


def _fill(action: Action, timeline: Timeline) -> tuple[float, ...]:
    """A kind's colour, from light on the first chunk to dark on the last."""
    from matplotlib.colors import to_rgb

    light, dark = (to_rgb(colour) for colour in _LOOKS[action.kind][:2])
    depth = _chunk(action, timeline) / max(timeline.schedule.num_chunks - 1, 1)
    return tuple(x + depth * (y - x) for x, y in zip(light, dark, strict=True))


def _points(width: float, timeline: Timeline) -> float:
    """A font size at which the longest microbatch number fits the shortest box."""
    digits = len(str(timeline.schedule.num_microbatches - 1))
    box_points = 72 * 0.85 * width * _shortest(timeline) / timeline.makespan
    # A digit of matplotlib's default font is about 0.65 of the font size wide.
    return max(min(8.0, box_points / (0.65 * digits)), 1.0)


def _draw_memory(axes: Axes, timeline: Timeline) -> None:
    from matplotlib import colormaps

    num_stages = len(timeline.rows)
    shades = colormaps["viridis"].resampled(num_stages + 1)
    for d, row in enumerate(timeline.rows):
        times, counts = zip((0.0, 0), *in_flight(row), (timeline.makespan, 0), strict=True)
        held = [timeline.in_full_stages(count) for count in counts]
        axes.step(times, held, where="post", color=shades(d), linewidth=1, label=f"stage {d}")
    axes.set_ylim(0, None)
    axes.set_ylabel("in flight", fontsize=8)
    if num_stages <= _NAMED_CURVES:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=6)


def _add_legend(drawn: Figure, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    used = {timed.action.kind for row in timeline.rows for timed in row}
    drawn.legend(
        handles=[
            Patch(color=look.light, label=look.meaning)
            for kind, look in _LOOKS.items()
            if kind in used
        ],
        title="later chunks are darker" if timeline.schedule.num_chunks > 1 else None,
        title_fontsize=8,
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8,
    )


def caption(timeline: Timeline) -> str:
    """One line that describes a timeline and names its clock.

    Example:
      >>> from jaxpipe.schedule.generators.gpipe import gpipe
      >>> from jaxpipe.schedule.simulate import Costs, simulate
      >>> caption(simulate(gpipe(2, 2), Costs(1, 1, 1)))
      'gpipe, p=2 v=1 m=2, (F, B, W)=(1, 1, 1), free-running: makespan 8, bubble 25.0%'
    """
    schedule = timeline.schedule
    chunks = "chunks that differ"
    if len(set(timeline.costs)) == 1:
        costs = timeline.costs[0]
        message = f", message {costs.message:g}" if costs.message else ""
        chunks = f"(F, B, W)=({costs.f:g}, {costs.b:g}, {costs.w:g}){message}"
    return (
        f"{schedule.name}, p={schedule.num_stages} v={schedule.num_chunks} "
        f"m={schedule.batch_microbatches}, {chunks}, "
        f"{timeline.clock}: makespan {timeline.makespan:g}, bubble {timeline.bubble_ratio:.1%}"
    )


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
