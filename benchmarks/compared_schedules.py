"""Bubble and peak in flight of some schedules on one model: the picture of README.

python -m benchmarks.compared_schedules
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import harness
from jaxpipe.schedule import Costs, build, device_clock
from jaxpipe.schedule.partition import cut_layers

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "compare.svg"
STAGES, MICROBATCHES = 8, 32
LAYERS = [Costs(1, 1.2, 0.8)] * 64
NAMES = (
    *("gpipe-fused", "1f1b-fused", "interleaved-fused", "breadth-first-fused", "hanayo"),
    *("zb-h1", "zb-v", "v-half", "v-min", "auto"),
)


def main() -> None:
    names, bubbles, peaks = [], [], []
    for name in NAMES:
        shape = {"stages": STAGES, "microbatches": MICROBATCHES, "layer_costs": LAYERS}
        schedule = build(name, **shape)
        timeline = device_clock(schedule, cut_layers(LAYERS, schedule.placement)[1])
        names.append(f"{name}, v={schedule.num_chunks}")
        bubbles.append(100 * timeline.bubble_ratio)
        peaks.append(timeline.in_full_stages(max(timeline.peak_in_flight)))
    figure = Figure(figsize=(8.6, 0.34 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(5, 3))
    places = range(len(names))
    bars = left.barh(places, bubbles, 0.6, color="#27518f")
    left.bar_label(bars, fmt="{:.1f}", fontsize=9, padding=2)
    bars = right.barh(places, peaks, 0.6, color="#4f7f30")
    right.bar_label(bars, fmt="{:g}", fontsize=9, padding=2)
    left.set(xlabel="bubble, % of the step", yticks=places, yticklabels=names)
    left.margins(x=0.1, y=0.01)
    left.invert_yaxis()
    right.margins(x=0.12)
    right.set(xlabel="peak in flight, microbatches")
    harness.save(figure, PICTURE)


if __name__ == "__main__":
    main()
