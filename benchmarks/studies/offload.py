"""Claims of Wan et al. (2025) on what offload by lifetime saves, with modelled costs.

How long the bus takes for what F keeps, by model, length and rematerialization; what devices must
keep, by schedule and stages; and the soonest step under a memory limit, with and without offload.

    python -m benchmarks.studies.offload
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tyro

from benchmarks import harness
from benchmarks.studies import common
from jaxpipe.planning import cost, devices
from jaxpipe.planning.memory import RESIDUALS_KEPT
from jaxpipe.planning.plans import PlacedPlan, Plan
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.runtime.zero import Zero
from jaxpipe.schedule import catalog
from jaxpipe.schedule.check import peak_in_flight
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.offload import kept_on_devices
from jaxpipe.schedule.simulate import Costs

SHAPES = {"width 2048": (2048, 16), "width 5120": (5120, 40), "width 8192": (8192, 64)}
LENGTHS = (2048, 8192, 32768)
KEPT = ("1f1b-fused", "interleaved-fused", "1f1b-v", "v-half", "zb-v", "breadth-first-fused")
COSTS = Costs(1, 1.2, 0.8, 0.05)


def share_of_bus(model: ModelSizes, remat: str, device: str) -> float:
    """Time in which what F of a layer keeps moves to the host, as a share of F."""
    plan = Plan(
        stage=8, data=1, context=1, tensor=1, replica=1, schedule="1f1b-fused", chunks=1,
        microbatches=8, rows=1, remat=remat, zero=Zero.NOTHING, weight_slots=1, weights="unrolled",
    )  # fmt: skip
    placed = PlacedPlan(plan, model, devices.cluster(device, 8))
    moved = sum(placed.mean(name) for name in RESIDUALS_KEPT) / placed.cluster.bus
    return moved / cost.layer_costs(placed).f


def shares(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """`share_of_bus` on H100s and A100s."""
    rows = []
    for (label, (width, heads)), length in ((s, n) for s in SHAPES.items() for n in lengths):
        config = common.gpt_of(layers=8, width=width, heads=heads, length=length)
        remats = ("none", "dots", "full")
        model = common.sizes(label, config, tensors=(1,), remats=remats)
        row: dict[str, Any] = {"model": label, "tokens": length}
        for device in ("h100", "a100"):
            for remat in remats:
                row[f"{device}, {remat}"] = f"{share_of_bus(model, remat, device):.2f}"
        harness.note(f"{row}")
        rows.append(row)
    return rows


def kept(stages: Sequence[int]) -> list[dict[str, Any]]:
    """Peaks in flight, and what devices must keep if one action, or two, move what one keeps."""
    rows = []
    for name in KEPT:
        row: dict[str, Any] = {"schedule": name}
        for p in stages:
            chunks = {"chunks": 2} if name.startswith(("interleaved", "breadth")) else {}
            schedule = catalog.build(name, stages=p, microbatches=3 * p, **chunks)
            counts = peak_in_flight(schedule), *(kept_on_devices(schedule, n) for n in (1, 2))
            row[f"p={p}"] = ", ".join(f"{max(count) / schedule.num_chunks:g}" for count in counts)
        harness.note(f"{row}")
        rows.append(row)
    return rows


def soonest(stages: Sequence[int], limits: Sequence[float]) -> list[dict[str, Any]]:
    """Time over work of `auto` on the device clock, by its limit, without offload, and where what F
    keeps moves in 0.8 and in 1.6 of its time."""
    rows = []
    for p in stages:
        m = 4 * p
        work = 2 * m * (COSTS.f + COSTS.b + COSTS.w)
        for limit in (*limits, p):
            row: dict[str, Any] = {"p": p, "limit": limit}
            for label, share in (("none", None), ("0.8", 0.8), ("1.6", 1.6)):
                found = catalog.build(
                    "auto",
                    stages=p,
                    microbatches=m,
                    memory_limit=limit,
                    offload=share,
                    costs=COSTS,
                )
                row[label] = f"{device_clock(found, COSTS).makespan / work:.3f}"
            harness.note(f"{row}")
            rows.append(row)
    return rows


def main(
    stages: tuple[int, ...] = (4, 8, 16),
    searched: tuple[int, ...] = (4, 8),
    limits: tuple[float, ...] = (1.5, 2, 3),
) -> None:
    """Prints the tables of the page.

    Args:
      stages: p of the second table.
      searched: p of the third.
      limits: its limits, in microbatches of a full stage, beside p.
    """
    harness.simulate(common.MOST_SHARING)
    tables = {
        "time of the bus as a share of F": shares(LENGTHS),
        "in flight, and kept if one or two actions move it": kept(stages),
        "time over work under a limit": soonest(searched, limits),
    }
    for title, rows in tables.items():
        print(f"\n{title}\n\n{common.markdown(rows)}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
