"""What does a balanced partition gain, in simulated and in executed time?

Sleeping layers with very different times are split over stages by number and by cost. Both splits
run under the same schedule with one whole action per tick.

    python -m benchmarks.partition [--stages 4] [--names 1f1b zb-v interleaved]
"""

from __future__ import annotations

import itertools

import tyro

from benchmarks import bubble, harness
from jaxpipe.schedule import catalog
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.simulate import Costs, lock_step, simulate

LAYERS = (0.5,) * 10 + (1.0,) * 6 + (2.5,) * 4
"""Costs of the layers, like those of a network whose last layers are wide."""


def main(
    stages: int = 4,
    microbatches: int | None = None,
    costs: tuple[float, float, float] = (1.0, 1.2, 0.8),
    layer_seconds: float = 0.02,
    names: tuple[str, ...] = ("1f1b", "interleaved", "zb-v"),
) -> None:
    """Prints the table and writes it.

    Args:
      stages: p, at most 8.
      microbatches: m; 2 p by default.
      costs: of F, B and W of a layer of cost 1, relative.
      layer_seconds: the time of one unit of the costs.
      names: schedules to run.
    """
    harness.simulate(8)
    layers = [Costs(*(layer_seconds * part * cost for part in costs)) for cost in LAYERS]
    rows, m = [], microbatches or 2 * stages
    for name in names:
        order = catalog.build(name, stages=stages, microbatches=m)
        splits = {"equal": [1] * len(LAYERS), "balanced": LAYERS}
        for label, by in splits.items():
            harness.note(f"{name}, {label}")
            counts = partition(by, order.placement)
            ends = list(itertools.accumulate(counts, initial=0))
            chunks = [_total(layers[a:b]) for a, b in itertools.pairwise(ends)]
            executed, _ = bubble.execute(order, layers, layer_counts=counts)
            rows.append(
                {
                    "schedule": name,
                    "partition": label,
                    "layers": " ".join(map(str, counts)),
                    "free-running s": simulate(order, chunks).makespan,
                    "lock-step s": lock_step(order, chunks).makespan,
                    "executed s": executed,
                }
            )
    harness.report(
        "partition",
        rows,
        title=f"p={stages} m={m} (F, B, W)={costs}, {len(LAYERS)} layers of cost {min(LAYERS)} to "
        f"{max(LAYERS)}, a unit is {layer_seconds:g} s",
        label=["schedule", "partition"],
        bars=["free-running s", "lock-step s", "executed s"],
        axis="s",
    )


def _total(layers: list[Costs]) -> Costs:
    return Costs(*(sum(getattr(layer, kind) for layer in layers) for kind in ("f", "b", "w")))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
