"""Pictures of a timeline: text for a terminal, SVG and PNG in the style of the papers' figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxpipe.schedule.actions import Action, Kind
from jaxpipe.schedule.simulate import TimedAction, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")
"""The file formats `save` writes."""

_ANSI = {
    Kind.F: "\x1b[44;97m",
    Kind.B: "\x1b[46;30m",
    Kind.W: "\x1b[42;30m",
    Kind.BW: "\x1b[46;30m",
}
_RESET = "\x1b[0m"
_FILL = {Kind.F: "#7ea6e0", Kind.B: "#7fd1c7", Kind.W: "#b5d99c", Kind.BW: "#7fd1c7"}
_MEANING = {Kind.F: "forward", Kind.B: "backward, input", Kind.W: "backward, weights"}
_DARKER = "#4a6fa5"
_NUMBERED_ACTIONS = 6000
"""Beyond this many boxes nobody can read the numbers and writing them takes seconds."""


def text(timeline: Timeline, *, colour: bool = False) -> str:
    """Draws a timeline as text: one row a stage, time to the right, "." where a stage waits.

    A cell is as wide as its action is long; the shortest action is just wide enough for its label.
    With more than one chunk a stage the label is the action's own name, such as "2F0".

    Args:
      timeline: what to draw.
      colour: write ANSI colours, for a terminal.

    Returns:
      The drawing, one line a stage, no newline at the end.

    Example:
      >>> from jaxpipe.schedule.gpipe import gpipe
      >>> from jaxpipe.schedule.simulate import Costs, simulate
      >>> print(text(simulate(gpipe(2, 2, fused=True), Costs(1, 1, 1))))
      stage 0 |F0- F1- ............BW0---- BW1---- |
      stage 1 |....F0- F1- BW0---- BW1---- ........|
    """
    cells = max(len(_label(timed.action, timeline)) for row in timeline.rows for timed in row) + 1
    shortest = min(timed.end - timed.start for row in timeline.rows for timed in row)
    scale = cells / shortest
    margin = len(f"stage {len(timeline.rows) - 1}")
    return "\n".join(
        f"{f'stage {d}'.ljust(margin)} |{_row(row, timeline, scale, colour)}|"
        for d, row in enumerate(timeline.rows)
    )


def _label(action: Action, timeline: Timeline) -> str:
    if timeline.schedule.num_chunks > 1:
        return str(action)
    return f"{action.kind}{action.microbatch}"


def _row(row: tuple[TimedAction, ...], timeline: Timeline, scale: float, colour: bool) -> str:
    parts, column = [], 0
    for timed in row:
        start, end = round(timed.start * scale), round(timed.end * scale)
        label = _label(timed.action, timeline)
        # Rounding both ends may cost a cell its last column, never a letter of its label.
        cell = label.ljust(end - start - 1, "-").ljust(end - start)
        if colour:
            cell = f"{_ANSI[timed.action.kind]}{cell.rstrip()}{_RESET}{cell[len(cell.rstrip()) :]}"
        parts += ["." * (start - column), cell]
        column = end
    return "".join([*parts, "." * (round(timeline.makespan * scale) - column)])


def figure(timeline: Timeline) -> Figure:
    """Draws a timeline as a figure: boxes coloured by kind, numbered by microbatch.

    Chunks after a stage's first have a darker edge and white numbers. Uses matplotlib's object
    interface only: no global state, no display.

    Args:
      timeline: what to draw.

    Returns:
      A matplotlib figure with an Agg canvas.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    num_stages = len(timeline.rows)
    shortest = min(timed.end - timed.start for row in timeline.rows for timed in row)
    width = min(max(0.24 * timeline.makespan / shortest, 6.0), 60.0)
    height = min(max(0.32 * num_stages, 1.0), 30.0) + 1.1
    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.add_subplot()
    for d, row in enumerate(timeline.rows):
        for kind in Kind:
            boxes = [timed for timed in row if timed.action.kind is kind]
            chunks = [timeline.schedule.placement.chunks[t.action.virtual_stage] for t in boxes]
            axes.broken_barh(
                [(timed.start, timed.end - timed.start) for timed in boxes],
                (d - 0.45, 0.9),
                facecolors=_FILL[kind],
                edgecolors=[_DARKER if chunk else "white" for chunk in chunks] or "white",
                linewidth=0.8,
            )
    if sum(len(row) for row in timeline.rows) <= _NUMBERED_ACTIONS:
        _number(axes, timeline, points=_points(width, timeline))
    axes.set_yticks(range(num_stages), [f"stage {d}" for d in range(num_stages)])
    axes.set_ylim(num_stages - 0.5, -0.5)
    axes.set_xlim(0, timeline.makespan)
    axes.set_xlabel("time, in the unit of the costs")
    axes.set_title(caption(timeline), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    used = {timed.action.kind for row in timeline.rows for timed in row}
    meaning = {**_MEANING, Kind.BW: "backward (B and W)"}
    axes.legend(
        handles=[Patch(color=_FILL[kind], label=meaning[kind]) for kind in Kind if kind in used],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.5 / height - 0.15),
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    return drawn


def _number(axes, timeline: Timeline, *, points: float) -> None:
    for d, row in enumerate(timeline.rows):
        for timed in row:
            chunk = timeline.schedule.placement.chunks[timed.action.virtual_stage]
            axes.text(
                (timed.start + timed.end) / 2,
                d,
                str(timed.action.microbatch),
                ha="center",
                va="center",
                fontsize=points,
                color="white" if chunk else "black",
                clip_on=True,
            )


def _points(width: float, timeline: Timeline) -> float:
    """A font size at which the longest microbatch number fits the shortest box."""
    digits = len(str(timeline.schedule.num_microbatches - 1))
    shortest = min(timed.end - timed.start for row in timeline.rows for timed in row)
    box_points = 72 * 0.85 * width * shortest / timeline.makespan
    # A digit of matplotlib's default font is about 0.65 of the font size wide.
    return max(min(8.0, box_points / (0.65 * digits)), 1.0)


def caption(timeline: Timeline) -> str:
    """One line that says what a timeline shows, with its clock.

    Example:
      >>> from jaxpipe.schedule.gpipe import gpipe
      >>> from jaxpipe.schedule.simulate import Costs, simulate
      >>> caption(simulate(gpipe(2, 2), Costs(1, 1, 1)))
      'gpipe, p=2 v=1 m=2, (F, B, W)=(1, 1, 1), free-running: makespan 8, bubble 25.0%'
    """
    schedule, costs = timeline.schedule, timeline.costs
    message = f", message {costs.message:g}" if costs.message else ""
    return (
        f"{schedule.name}, p={schedule.num_stages} v={schedule.num_chunks} "
        f"m={schedule.num_microbatches}, "
        f"(F, B, W)=({costs.f:g}, {costs.b:g}, {costs.w:g}){message}, "
        f"{timeline.clock}: makespan {timeline.makespan:g}, bubble {timeline.bubble_ratio:.1%}"
    )


def save(timeline: Timeline, path: str | Path) -> Path:
    """Draws a timeline into a file; the ending, .svg or .png, chooses the format.

    The same timeline gives the same bytes.

    Args:
      timeline: what to draw.
      path: the file to write.

    Returns:
      The path.

    Raises:
      ValueError: the ending is neither .svg nor .png.
      OSError: the file cannot be written.
    """
    import matplotlib

    path = Path(path)
    if path.suffix.lower().lstrip(".") not in FORMATS:
        raise ValueError(
            f"{str(path)!r} does not end in a picture format. Nearest valid: .svg, .png."
        )
    # Without a fixed salt and date every SVG differs from the last.
    with matplotlib.rc_context({"svg.hashsalt": "jaxpipe"}):
        figure(timeline).savefig(
            path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None
        )
    return path
