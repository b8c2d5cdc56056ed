"""Do the claims about schedules hold at costs that were measured? Needs no device.

The other studies take costs from traces at a roofline. Qi et al., "Zero Bubble Pipeline
Parallelism", arXiv 2401.10241, table 6, have F, B, W and messages of stages on A100s, measured at
four widths. Orders are timed with these on the free-running clock, beside equal costs and those of
a trace. A chunk costs its share of a stage, and a message what it did.

    python -m benchmarks.studies.measured_costs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tyro

from benchmarks.studies.common import markdown
from benchmarks.studies.controllable_memory import makespan
from jaxpipe.schedule import catalog
from jaxpipe.schedule.simulate import UNIT, Costs, simulate

STAGES = {
    "equal": UNIT,
    "traced, width 5120": Costs(1, 0.889, 0.844),
    "measured, width 2304": Costs(18.522, 18.086, 9.337, 0.601),
    "measured, width 4096": Costs(29.718, 29.444, 19.927, 0.527),
    "measured, width 5120": Costs(11.347, 11.248, 8.132, 0.377),
    "measured, width 6144": Costs(10.419, 10.207, 7.715, 0.408),
}
"""Costs of a stage in any unit."""
ORDERS = {
    "1F1B": ("1f1b-fused", 1),
    "depth-first, 4": ("interleaved-fused", 4),
    "breadth-first, 4": ("breadth-first-fused", 4),
    "Chimera": ("chimera-fused", 1),
    "1 wave": ("hanayo-fused", 2),
    "2 waves": ("hanayo-fused", 4),
    "4 waves": ("hanayo-fused", 8),
    "ZB-H1": ("zb-h1-published", 1),
    "ZB-H2": ("zb-h2-published", 1),
}
"""Published orders, with their chunks per stage."""
SEARCHED = ("v-min", "v-half", "v-zb")
"""Schedules whose orders are made for the costs."""


def of_chunk(stage: Costs, chunks: int) -> Costs:
    """Costs of a chunk, of so many on a stage."""
    return Costs(stage.f / chunks, stage.b / chunks, stage.w / chunks, stage.message)


def bubbles(stages: int, microbatches: int) -> list[dict[str, Any]]:
    """Bubble ratios of published orders, a row per costs."""
    rows = []
    for label, stage in STAGES.items():
        row: dict[str, Any] = {"F, B, W": label}
        for name, (schedule, chunks) in ORDERS.items():
            order = catalog.build(schedule, stages=stages, microbatches=microbatches, chunks=chunks)
            row[name] = simulate(order, of_chunk(stage, chunks)).bubble_ratio
        rows.append(row)
    return rows


def throughput(stages: int, microbatches: Sequence[int]) -> list[dict[str, Any]]:
    """Throughput over 1F1B's of the schedules for less memory, a row per costs."""
    rows = []
    for label, stage in STAGES.items():
        row: dict[str, Any] = {"F, B, W": label}
        for name in SEARCHED:
            gains = [
                makespan("1f1b-fused", stages, m, stage) / makespan(name, stages, m, stage)
                for m in microbatches
            ]
            row[name] = ", ".join(f"{gain - 1:+z.0%}" for gain in gains)
        rows.append(row)
    return rows


def main(stages: int = 8) -> None:
    """Prints the tables of the page.

    Args:
      stages: p.
    """
    for periods in (1, 4):
        print(f"\nbubble ratio, {stages} stages, {periods * stages} microbatches\n")
        print(markdown(bubbles(stages, periods * stages)))
    periods = (2, 8)
    counts = [n * stages for n in periods]
    print(f"\nthroughput over 1F1B's, {stages} stages, m = {counts}\n")
    print(markdown(throughput(stages, counts)))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
