"""How much faster are waves? The comparison of Liu et al. (2023), modelled.

Every method chooses its pipeline and data parallelism (P x D), its chunks or waves, and the rows of
a microbatch, on 8 to 32 devices, for a batch that grows with the devices and for a fixed one.
Orders are timed on the free-running clock with messages; gradients are summed after the step.

    python -m benchmarks.studies.hanayo
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import tyro

from benchmarks import harness
from benchmarks.studies import chimera, common
from jaxpipe.planning import cost, devices
from jaxpipe.planning.plans import PlacedPlan, Plan
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.runtime.zero import Zero
from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.simulate import UNIT, simulate

MODEL = common.gpt_of(layers=64, width=2560, heads=64, length=1024)
CLUSTERS = {
    "A100, NVLink, 200 Gb/s": ("a100", "nvlink:8,ib:200"),
    "V100, PCIe, 50 Gb/s": ("v100", "pcie:8,ib:50"),
}
METHODS = {
    "GPipe": ("gpipe-fused", (1,)),
    "1F1B": ("1f1b-fused", (1,)),
    "interleaved": ("interleaved-fused", (2, 4)),
    "Chimera": ("chimera", (1,)),
    "Hanayo": ("hanayo-fused", (2, 4, 8)),
}
"""Names and chunks per stage; Hanayo has half as many waves. All backwards are fused."""
STATE_BYTES = 4 + 2 + 4 + 8
"""Bytes per parameter: itself, its copy in 16 bits, its gradient, and Adam's moments."""
ROWS = (1, 2, 4, 8)
PER_DEVICE, FIXED = 4, 64
"""Rows of a step: for every device, and of all."""


@lru_cache(maxsize=512)
def order_of(name: str, stages: int, chunks: int, microbatches: int) -> Schedule:
    """The published order."""
    return catalog.build(name, stages=stages, microbatches=microbatches, chunks=chunks)


@dataclasses.dataclass(frozen=True)
class Timed:
    """A choice with its time.

    Args:
      placed: the mesh, the chunks and the microbatches.
      seconds: of a step.
      sums: of these, seconds in which gradients are summed.
      memory: bytes on the device that holds the most.
    """

    placed: PlacedPlan
    seconds: float
    sums: float
    memory: float

    @property
    def with_sums_hidden(self) -> float:
        """Seconds of a step that sums gradients while stages compute."""
        return self.seconds - self.sums


def timed(placed: PlacedPlan) -> Timed:
    """Layers, messages and sums of gradients; embedding and head, equal for all, are left out."""
    plan, copies = placed.plan, 2 if placed.plan.schedule == "chimera" else 1
    layer, layers = cost.layer_costs(placed), placed.model.num_layers / plan.num_chunks
    costs = layer.times(layers)
    if copies == 2:
        peak = chimera.peak(plan.stage, plan.microbatches)
        makespan = chimera.makespan(plan.stage, plan.microbatches, costs)
    else:
        order = order_of(plan.schedule, plan.stage, plan.chunks, plan.microbatches)
        assert order.peak_in_flight is not None
        peak, makespan = max(order.peak_in_flight), simulate(order, costs).makespan
    sharers = plan.data * copies
    moved = 2 * (sharers - 1) / sharers * 4 * copies * placed.stage_parameters
    # The copies of a stage lie p / 2 stages apart.
    sums = moved / (placed.data_link if copies == 1 else min(placed.data_link, placed.stage_link))
    kept = placed.mean("until_b") + placed.mean("until_w")
    return Timed(
        placed,
        makespan + sums,
        sums,
        STATE_BYTES * copies * placed.stage_parameters + peak * layers * kept + placed.mean("live"),
    )


def choices(
    method: str, model: ModelSizes, cluster: devices.Cluster, batch: int
) -> Iterator[PlacedPlan]:
    """Every mesh, number of chunks and microbatch of a method."""
    name, all_chunks = METHODS[method]
    stages = [2**n for n in range(1, 6) if 2**n <= cluster.count]
    for p, chunks, rows in itertools.product(stages, all_chunks, ROWS):
        data = cluster.count // p
        if batch % (data * rows) or p * chunks > model.num_layers:
            continue
        m = batch // (data * rows)
        if method == "Chimera" and m % 2:
            continue
        plan = Plan(
            stage=p, data=data, context=1, tensor=1, replica=1, schedule=name, chunks=chunks,
            microbatches=m, rows=rows, remat="none", zero=Zero.NOTHING,
            weight_slots=1, weights="unrolled",
        )  # fmt: skip
        yield PlacedPlan(plan, model, cluster)


def fitting(
    method: str, model: ModelSizes, cluster: devices.Cluster, batch: int, stages: int | None = None
) -> list[Timed]:
    """The choices that fit the memory, of those with so many stages."""
    found = (
        timed(one)
        for one in choices(method, model, cluster, batch)
        if stages in (None, one.plan.stage)
    )
    return [one for one in found if one.memory <= cluster.memory_bytes]


def scaling(
    model: ModelSizes, counts: Sequence[int], stages: int | None = None
) -> list[dict[str, Any]]:
    """A row per cluster, scaling and number of devices: rows per second of every method."""
    rows = []
    for (name, (device, link)), weak, count in itertools.product(
        CLUSTERS.items(), (True, False), counts
    ):
        cluster = devices.cluster(device, count, link=link)
        batch = PER_DEVICE * count if weak else FIXED
        found = {key: fitting(key, model, cluster, batch, stages) for key in METHODS}
        speed = {
            key: batch / min(one.seconds for one in some) if some else 0.0
            for key, some in found.items()
        }
        hidden = {
            key: batch / min(one.with_sums_hidden for one in some) if some else 0.0
            for key, some in found.items()
        }
        plan = min(found["Hanayo"], key=lambda one: one.seconds).placed.plan
        rows.append(
            {"cluster": name, "scaling": "weak" if weak else "strong", "devices": count}
            | speed
            | {
                "over Chimera": _gain(speed, ("Chimera",)),
                "sums hidden": _gain(hidden, ("Chimera",)),
                "over all others": _gain(speed, tuple(METHODS)[:-1]),
                "P, D, W, m x rows": f"{plan.stage}, {plan.data}, {plan.chunks // 2}, "
                f"{plan.microbatches} x {plan.rows}",
            }
        )
    return rows


def _gain(speed: dict[str, float], others: Sequence[str]) -> str:
    """Speedup of Hanayo over the fastest of the others."""
    most = max(speed[other] for other in others)
    return f"{speed['Hanayo'] / most - 1:+z.0%}" if most else "does not fit"


def bubbles(stages: int = 8) -> list[dict[str, Any]]:
    """Bubble ratios at m = p and equal F, B and W, beside the formula quoted of the paper."""
    order = order_of("1f1b-fused", stages, 1, stages)
    rows = [{"order": "1F1B", "simulated": simulate(order, UNIT).bubble_ratio, "formula": ""}]
    for waves in (1, 2, 4):
        order = order_of("hanayo-fused", stages, 2 * waves, stages)
        formula = (2 * stages - 2) / (3 * stages * waves + stages - 1)
        rows.append(
            {
                "order": f"{waves} waves",
                "simulated": simulate(order, UNIT).bubble_ratio,
                "formula": f"{formula:.3f}",
            }
        )
    ratio = 1 - 3 * stages / chimera.makespan(stages, stages, UNIT)
    return [*rows, {"order": "Chimera", "simulated": ratio, "formula": ""}]


def picture(rows: Sequence[dict[str, Any]]) -> Any:
    """Rows per second of every method, a plot for each cluster and scaling."""
    drawn, plots = common.figure(columns=4, height=3.0)
    for axes, (name, scaling) in zip(
        plots, itertools.product(CLUSTERS, ("weak", "strong")), strict=True
    ):
        some = [row for row in rows if (row["cluster"], row["scaling"]) == (name, scaling)]
        for number, method in enumerate(METHODS):
            places = [place + 0.16 * (number - 2) for place in range(len(some))]
            axes.bar(places, [row[method] for row in some], width=0.15, label=method)
            for place, row in zip(places, some, strict=True):
                if not row[method]:
                    axes.text(place, 0, " does not fit", rotation=90, ha="center", fontsize=5)
        axes.set_xticks(range(len(some)), [str(row["devices"]) for row in some])
        axes.set_title(f"{name}\n{scaling} scaling", fontsize=8)
        axes.set_xlabel("devices", fontsize=8)
    plots[0].set_ylabel("rows of 1024 tokens per second", fontsize=8)
    plots[0].legend(frameon=False, fontsize=7)
    return drawn


def main(counts: tuple[int, ...] = (8, 16, 32)) -> None:
    """Prints the tables of the page and draws its picture.

    Args:
      counts: numbers of devices.
    """
    harness.simulate(1)
    model = common.sizes("5B", MODEL, tensors=(1,), remats=("none",))
    found = scaling(model, counts)
    common.publish(
        "hanayo",
        {
            "bubble ratio, 8 stages, 8 microbatches": bubbles(),
            "rows per second": found,
            "rows per second, 8 stages": scaling(model, counts, stages=8),
        },
        picture(found),
    )


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
