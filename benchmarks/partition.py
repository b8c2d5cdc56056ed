"""What does a balanced partition gain, in simulated and in executed time?

Sleeping layers with very different times are split over stages by number and by cost. Both splits
run under the same schedule with one process per stage, as in `benchmarks.processes`.

    python -m benchmarks.partition [--stages 4] [--names 1f1b zb-v interleaved]
"""

from __future__ import annotations

import itertools

import tyro

from benchmarks import harness
from benchmarks.processes import Case, measured, row
from jaxpipe.schedule import Costs, build, partition

CLOCKS = ("free-running", "device", "executed")
LAYERS = (0.5,) * 10 + (1.0,) * 6 + (2.5,) * 4
"""Costs of the layers, like those of a network whose last layers are wide."""


def main(
    stages: int = 4,
    microbatches: int | None = None,
    costs: tuple[float, float, float] = (1.0, 1.2, 0.8),
    layer_seconds: float = 0.02,
    names: tuple[str, ...] = ("1f1b", "interleaved", "zb-v"),
    rounds: int = 2,
) -> None:
    """Prints the table and writes it.

    Args:
      stages: p.
      microbatches: m; 2 p by default.
      costs: of F, B and W of a layer of cost 1, relative.
      layer_seconds: the time of one unit of the costs.
      names: schedules to run.
      rounds: of which the shortest counts.
    """
    m, cases = microbatches or 2 * stages, []
    for name in names:
        order = build(name, stages=stages, microbatches=m)
        for label, by in {"equal": [1.0] * len(LAYERS), "balanced": LAYERS}.items():
            counts = partition(by, order.placement)
            ends = itertools.pairwise(itertools.accumulate(counts, initial=0))
            # A chunk sleeps once, for all its layers.
            parts = [layer_seconds * sum(LAYERS[a:b]) for a, b in ends]
            chunks = tuple(Costs(*(part * cost for cost in costs)) for part in parts)
            cases.append((label, counts, Case(order, chunks)))
    rows = []
    found = measured([case for _, _, case in cases], rounds)
    for (label, counts, case), times in zip(cases, found, strict=True):
        took = row(case, *times)
        harness.note(f"{case.schedule.name}, {label}: {took['executed s']:.3g} s")
        rows.append(
            {
                "schedule": case.schedule.name,
                "partition": label,
                "layers": " ".join(map(str, counts)),
                **{f"{clock} s": took[f"{clock} s"] for clock in CLOCKS},
            }
        )
    harness.report(
        "partition",
        rows,
        title=f"p={stages} m={m} (F, B, W)={costs}, {len(LAYERS)} layers of cost {min(LAYERS)} to "
        f"{max(LAYERS)}, a unit is {layer_seconds:g} s",
        label=["schedule", "partition"],
        bars=[f"{clock} s" for clock in CLOCKS],
        axis="s",
    )


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
