"""Schedules side by side at one shape: bubble on both clocks against peak in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxpipe.schedule.show.report import Timelines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


class Sizes(NamedTuple):
    """Bytes of a full stage: one copy of its weights with gradients and optimizer state, and what
    one microbatch keeps."""

    weight_bytes: float
    activation_bytes: float


def row(clocks: Timelines, sizes: Sizes | None = None) -> Summary:
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


def figure(rows: Sequence[Summary], title: str) -> Figure:
    """Draws schedules, from top to bottom, as bars: bubble ratios left, peak in flight right.

    Example:
      >>> figure([Summary("1f1b", 1, 4, 0.2, 0.25, 10)], "p=4, m=8").axes[0].get_xlabel()
      'bubble ratio, %'
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8.5, 1.4 + 0.4 * len(rows)), layout="constrained")
    FigureCanvasAgg(drawn)
    bubbles, peaks = drawn.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    places = range(len(rows))
    for clock, (colour, shift) in _BARS.items():
        known = [
            (n, 100 * ratio) for n, r in enumerate(rows) if (ratio := getattr(r, clock)) is not None
        ]
        bars = bubbles.barh(
            [place + shift for place, _ in known],
            [ratio for _, ratio in known],
            height=0.38,
            color=colour,
            label=clock.replace("_", "-"),
        )
        bubbles.bar_label(bars, fmt="%.1f", fontsize=5, padding=2)
    bars = peaks.barh(places, [r.peak_in_flight for r in rows], height=0.6, color="#4f7f30")
    peaks.bar_label(bars, fmt="%g", fontsize=6, padding=2)
    bubbles.set_yticks(places, [f"{r.name}, v={r.num_chunks}" for r in rows], fontsize=8)
    bubbles.set_ylim(len(rows) - 0.5, -0.5)
    bubbles.set_xlabel("bubble ratio, %", fontsize=8)
    peaks.set_xlabel("peak in flight, microbatches of a full stage", fontsize=8)
    for axes in (bubbles, peaks):
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
    drawn.suptitle(title, fontsize=9)
    drawn.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return drawn
