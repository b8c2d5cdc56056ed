"""Bubble and peak in flight of every schedule on one model: the picture of README.

python -m benchmarks.compared_schedules
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import harness
from jaxpipe.schedule import Costs, build, timelines
from jaxpipe.schedule.catalog import entries
from jaxpipe.schedule.partition import cut_layers

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "compare.svg"
STAGES, MICROBATCHES = 8, 32
LAYERS = [Costs(1, 1.2, 0.8)] * 64


def main() -> None:
    names, bubbles, peaks = [], [], []
    for entry in entries():
        shape = {"stages": STAGES, "microbatches": MICROBATCHES, "layer_costs": LAYERS}
        schedule = build(entry.name, **shape)
        free, device = timelines(schedule, cut_layers(LAYERS, schedule.placement)[1])
        names.append(f"{entry.name}, v={schedule.num_chunks}")
        bubbles.append((100 * free.bubble_ratio, 100 * device.bubble_ratio))
        peaks.append(free.in_full_stages(max(free.peak_in_flight)))
    figure = Figure(figsize=(9, 0.28 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(5, 3))
    places = range(len(names))
    for shift, color, clock in ((-0.2, "#9dbdf0", "free-running"), (0.2, "#27518f", "device")):
        values = [pair[shift > 0] for pair in bubbles]
        bars = left.barh([n + shift for n in places], values, 0.38, color=color, label=clock)
        left.bar_label(bars, [f"{value:.1f}" for value in values], fontsize=6)
    right.bar_label(right.barh(places, peaks, 0.6, color="#4f7f30"), fmt="{:g}", fontsize=7)
    left.set(xlabel="bubble ratio, %", yticks=places, yticklabels=names)
    left.margins(x=0.05, y=0.01)
    left.invert_yaxis()
    left.legend(loc="lower right")
    right.margins(x=0.12)
    right.set(xlabel="peak in flight, full stages")
    figure.suptitle(f"p={STAGES}, m={MICROBATCHES}, (F, B, W) of a stage (1, 1.2, 0.8)", fontsize=9)
    harness.save(figure, PICTURE)


if __name__ == "__main__":
    main()
