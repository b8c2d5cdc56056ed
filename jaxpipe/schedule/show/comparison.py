"""Schedules side by side at one shape: bubble on both clocks against peak in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxpipe.schedule.show.report import Timelines
from jaxpipe.schedule.show.svg import GREY, document, line, rectangle, text

_BARS = {
    "free_running": ("#9dbdf0", -0.2),
    "device": ("#27518f", 0.2),
}
"""Colour and place of the bars, by clock."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """One schedule of a comparison: its bubble ratios by clock, its makespan on devices, and the
    peak in flight of the stage that keeps the most, in microbatches of a full stage.

    ``device`` and ``makespan`` are None for a schedule that can only be simulated. ``stage_bytes``
    is that of the stage that needs the most; it is None without the sizes of a stage.
    """

    name: str
    num_chunks: int
    peak_in_flight: float
    free_running: float
    device: float | None
    makespan: float | None
    stage_bytes: float | None = None


class StageBytes(NamedTuple):
    """Bytes of a full stage: one copy of its weights with gradients and optimizer state, and what
    one microbatch keeps."""

    weight_bytes: float
    activation_bytes: float


def row(clocks: Timelines, sizes: StageBytes | None = None) -> Summary:
    """Makes a schedule's row from its timelines."""
    free, device, _ = clocks
    schedule = free.schedule
    needed = None if sizes is None else max(free.stage_bytes(**sizes._asdict()))
    return Summary(
        schedule.name,
        schedule.num_chunks,
        free.in_full_stages(max(free.peak_in_flight)),
        free.bubble_ratio,
        None if device is None else device.bubble_ratio,
        None if device is None else device.makespan,
        needed,
    )


def comparison_figure(rows: Sequence[Summary], title: str) -> str:
    """Draws schedules, from top to bottom, as bars: bubble ratios left, peak in flight right.

    Example:
      >>> comparison_figure([Summary("1f1b", 1, 4, 0.2, 0.25, 10)], "p=4, m=8").count("<rect")
      6
    """
    margin, bubbles, peaks, height = 190.0, 340.0, 200.0, 30.0
    bottom, right = 30 + height * len(rows), margin + bubbles + 60
    ratios = [r.device for r in rows if r.device is not None] + [r.free_running for r in rows]
    wide, tall = max(*ratios, 1e-9), max(row.peak_in_flight for row in rows)
    drawn = [text(margin, 12, title, size=10)]
    for n, row in enumerate(rows):
        middle = 30 + (n + 0.5) * height
        drawn.append(text(margin - 6, middle, f"{row.name}, v={row.num_chunks}", anchor="end"))
        for clock, (colour, shift) in _BARS.items():
            if (ratio := getattr(row, clock)) is not None:
                y, width = middle + shift * height, bubbles * ratio / wide
                drawn.append(rectangle(margin, y - 0.19 * height, width, 0.38 * height, colour))
                drawn.append(text(margin + width + 3, y, f"{100 * ratio:.1f}", size=6))
        width = peaks * row.peak_in_flight / tall
        drawn.append(rectangle(right, middle - 0.3 * height, width, 0.6 * height, "#4f7f30"))
        drawn.append(text(right + width + 3, middle, f"{row.peak_in_flight:g}", size=7))
    for x, width, meaning in (
        (margin, bubbles, "bubble ratio, %"),
        (right, peaks, "peak in flight, microbatches of a full stage"),
    ):
        drawn.append(line([(x, 30), (x, bottom), (x + width, bottom)], GREY))
        drawn.append(text(x + width / 2, bottom + 12, meaning, anchor="middle"))
    for n, (clock, (colour, _)) in enumerate(_BARS.items()):
        x = margin + 100 * n
        drawn.append(rectangle(x, bottom + 26, 12, 8, colour))
        drawn.append(text(x + 16, bottom + 30, clock.replace("_", "-")))
    return document(right + peaks + 40, bottom + 44, drawn)
