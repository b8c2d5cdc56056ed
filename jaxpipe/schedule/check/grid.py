"""The error text for a schedule that cannot run: its problems, and the grid around the first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxpipe.schedule.actions import Action, Schedule

SHOWN_PROBLEMS = 8
MAX_MISSING = 1000
"""Number beyond which missing actions are not counted, as m may be any number."""
_GRID_TICKS = 12
"""Ticks of the grid: enough to see a pattern, narrow enough for a terminal."""
_GRID_STAGES = 10


@dataclasses.dataclass
class Fault:
    """A fault of a schedule, and its position in the order of a stage.

    The stage is None for the whole schedule, the position for an action that is ``absent``.
    """

    text: str
    stage: int | None = None
    position: int | None = None
    absent: Action | None = None


def message(
    schedule: Schedule,
    problems: list[Fault],
    ticks: list[list[int]],
    spell: Callable[[Action], str],
) -> str:
    """Writes the problems, at least one, and the stage x tick grid around the first with a place.

    In the grid ``>2F0<`` offends and ``>2F0?`` is missing; ``ticks`` says how far each stage gets
    (`jaxpipe.schedule.check.walk.Walk`).
    """
    p, m = len(set(schedule.placement.stages)), schedule.num_microbatches
    lines = [f"Schedule {schedule.name!r} ({p} stages, {m} microbatches) cannot run:"]
    lines += [f"  {problem.text}" for problem in problems[:SHOWN_PROBLEMS]]
    if len(problems) > SHOWN_PROBLEMS:
        least = "at least " if len(problems) >= MAX_MISSING else ""
        lines.append(f"  ... and {least}{len(problems) - SHOWN_PROBLEMS} more.")
    marks = {(q.stage, q.position) for q in problems}
    cells: list[dict[int, str]] = []
    places: dict[tuple[int | None, int | None], int] = {}
    for d, order in enumerate(schedule.orders):
        row, tick = {}, -1
        for k, action in enumerate(order):
            # Once a stage stops there is no true tick: show the rest in its order.
            tick = ticks[d][k] if k < len(ticks[d]) else tick + 1
            row[tick] = f">{spell(action)}<" if (d, k) in marks else f" {spell(action)} "
            places[d, k] = tick
        places[d, None] = tick + 1
        absent = [q.absent for q in problems if q.stage == d and q.absent is not None]
        row |= {tick + 1 + j: f">{spell(action)}?" for j, action in enumerate(absent)}
        cells.append(row)
    first = next((problem for problem in problems if problem.stage is not None), problems[0])
    stage = first.stage or 0
    tick = places.get((first.stage, first.position), 0)
    top = max(0, min(stage - _GRID_STAGES // 2, len(cells) - _GRID_STAGES))
    left = max(0, tick - _GRID_TICKS // 2)
    columns = range(left, left + _GRID_TICKS)
    shown = [[row.get(t, " . ") for t in columns] for row in cells[top : top + _GRID_STAGES]]
    width = max((len(cell) for row in shown for cell in row), default=3)
    header = "tick".ljust(9) + "".join(f" {t}".ljust(width) for t in columns)
    lines.append(header.rstrip())
    for d, line in enumerate(shown, start=top):
        lines.append((f"stage {d}".ljust(9) + "".join(c.ljust(width) for c in line)).rstrip())
    return "\n".join(lines)
