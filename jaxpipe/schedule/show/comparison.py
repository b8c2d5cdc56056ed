"""Schedules side by side at one shape: bubble on both clocks against peak in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxpipe.schedule.simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Summary:
    """One schedule of a comparison: its bubble ratios on both clocks, and the peak in flight of the
    stage that keeps the most, in microbatches of a full stage."""

    name: str
    num_chunks: int
    peak_in_flight: float
    free_running: float
    lock_step: float


def row(free: Timeline, locked: Timeline) -> Summary:
    """Makes a schedule's row from its timelines on the two clocks."""
    schedule = free.schedule
    return Summary(
        schedule.name,
        schedule.num_chunks,
        free.in_full_stages(max(free.peak_in_flight)),
        free.bubble_ratio,
        locked.bubble_ratio,
    )


def figure(rows: Sequence[Summary], title: str) -> Figure:
    """Draws schedules, from top to bottom, as bars: bubble ratios left, peak in flight right.

    Example:
      >>> figure([Summary("1f1b", 1, 4, 0.2, 0.3)], "p=4, m=8").axes[0].get_xlabel()
      'bubble ratio, %'
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8.5, 1.4 + 0.34 * len(rows)), layout="constrained")
    FigureCanvasAgg(drawn)
    bubbles, peaks = drawn.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    places = range(len(rows))
    for clock, colour, shift in (("free_running", "#9dbdf0", -0.2), ("lock_step", "#27518f", 0.2)):
        bars = bubbles.barh(
            [place + shift for place in places],
            [100 * getattr(row, clock) for row in rows],
            height=0.38,
            color=colour,
            label=clock.replace("_", "-"),
        )
        bubbles.bar_label(bars, fmt="%.1f", fontsize=6, padding=2)
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
    drawn.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return drawn
