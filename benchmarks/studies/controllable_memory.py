"""Where do schedules for less memory win? The comparison of Qi et al. (2024), modelled.

V-Min, V-Half, V-ZB and searched schedules against 1F1B: at the same microbatch for several costs,
bubble against the memory limit, microbatches as large as the memory allows, and a grid search over
stages, data shards, tensor devices and rematerialization.

    python -m benchmarks.studies.controllable_memory
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tyro

from benchmarks import harness
from benchmarks.studies import common
from jaxpipe.planning import cost, devices
from jaxpipe.planning.plans import PlacedPlan, Plan
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.runtime.zero import Zero
from jaxpipe.schedule import catalog
from jaxpipe.schedule.simulate import UNIT, Costs, simulate

MODEL = common.gpt_of(layers=48, width=5120, heads=40, length=2048)
"""15B."""
LARGER = common.gpt_of(layers=48, width=8192, heads=64, length=2048)
"""39B."""
DEVICE, LINK = "a100", "nvlink:8,ib:200"
HARD = Costs(3, 4, 2)
"""At which the paper's V-Min gets worse with every microbatch."""
NAMED = ("v-min", "v-half", "v-zb")
SCHEDULES = {
    "1F1B": ("1f1b-fused",),
    "V-Min": ("v-min",),
    "V-Half": ("v-half",),
    "V-ZB": ("zb-v",),
    "any V": ("v-min", "v-half", "zb-v"),
}
"""By planner's names; zb-v and v-zb differ in their warm-up alone."""


def makespan(name: str, p: int, m: int, stage: Costs, limit: float | None = None) -> float:
    """Makespan of a schedule whose stages cost the same, on the free-running clock."""
    chunks = 1 if name.startswith("1f1b") else 2
    costs = Costs(*(getattr(stage, kind) / chunks for kind in "fbw"), stage.message)
    given: dict[str, Any] = {"memory_limit": limit} if limit else {}
    order = catalog.build(name, stages=p, microbatches=m, costs=costs, **given)
    return simulate(order, costs).makespan


def gains(costs: dict[str, Costs], stages: Sequence[int]) -> list[dict[str, Any]]:
    """Throughput over 1F1B's at the same microbatch: published orders, ordered for their costs,
    and searched under V-Min's, V-Half's and 1F1B's memory."""
    rows = []
    for (label, stage), p, periods in itertools.product(costs.items(), stages, (2, 8)):
        m = periods * p
        base = makespan("1f1b-fused", p, m, stage)
        row: dict[str, Any] = {"F, B, W": label, "p": p, "m": m}
        for name in NAMED:
            for suffix in ("-published", ""):
                row[name + suffix] = base / makespan(name + suffix, p, m, stage)
        for share, limit in (("1/3", (p + 4) // 3), ("1/2", (p + 2) // 2), ("1", p)):
            row[f"searched, {share}"] = base / makespan("controllable-memory", p, m, stage, limit)
        harness.note(f"{row}")
        signed = {k: f"{v - 1:+z.0%}" if isinstance(v, float) else v for k, v in row.items()}
        rows.append(signed)
    return rows


def frontier(costs: dict[str, Costs], p: int, m: int) -> list[dict[str, Any]]:
    """Bubble ratio of searched schedules by their memory limit, and of 1F1B."""
    rows = []
    for k in range(2 * ((p + 4) // 3), 2 * p + 1):
        row: dict[str, Any] = {"limit": k / 2, "of 1F1B's": f"{k / (2 * p):.0%}"}
        for label, stage in costs.items():
            work = m * (stage.f + stage.b + stage.w)
            row[label] = 1 - work / makespan("controllable-memory", p, m, stage, k / 2)
            row[f"1F1B, {label}"] = 1 - work / makespan("1f1b-fused", p, m, stage)
        rows.append(row)
    return rows


def of_layer(model: ModelSizes, stages: int) -> Costs:
    """A stage's traced costs on the device, relative to its F."""
    plan = Plan(
        stage=stages, data=1, context=1, tensor=1, replica=1, schedule="1f1b-fused", chunks=1,
        microbatches=stages, rows=1, remat="none", zero=Zero.NOTHING,
        weight_slots=1, weights="unrolled",
    )  # fmt: skip
    placed = PlacedPlan(plan, model, devices.cluster(DEVICE, stages, link=LINK))
    layer, layers = cost.layer_costs(placed), model.num_layers / stages
    return Costs(1.0, layer.b / layer.f, layer.w / layer.f, layer.message / (layers * layer.f))


def searched(
    model: ModelSizes, count: int, batch: int, *, pure: bool, remats: Sequence[str], rows: int = 64
) -> dict[str, Any]:
    """A row of every schedule's best plan.

    Args:
      pure: stages alone share the model.
      remats: policies that may be taken.
      rows: of a microbatch, at most.
    """
    cluster = devices.cluster(DEVICE, count, link=LINK)
    row: dict[str, Any] = {
        "model": model.name, "devices": count, "batch": batch,
        "remat": " or ".join(remats), "rows at most": rows,
    }  # fmt: skip
    speed = {}
    for label, names in SCHEDULES.items():

        def allowed(plan: Plan, names: Sequence[str] = names) -> bool:
            alone = plan.stage == count if pure else plan.stage > 1
            fits = plan.schedule in names and plan.remat in remats and plan.rows <= rows
            return alone and fits

        found = common.best(model, cluster, [batch], allowed, timed=common.hidden)
        speed[label] = 1 / found.step_seconds if found else 0.0
        words = common.in_words(found.plan) if found else "does not fit"
        over = speed["1F1B"]
        gain = f"{speed[label] / over - 1:+z.0%}: " if over and found and label != "1F1B" else ""
        row[label] = gain + words
    harness.note(f"{row}")
    return row


def picture(rows: Sequence[dict[str, Any]], labels: Sequence[str], p: int) -> Any:
    """Bubble by memory limit."""
    drawn, plots = common.figure(columns=len(labels))
    for axes, label in zip(plots, labels, strict=True):
        limits = [row["limit"] for row in rows]
        axes.plot(limits, [row[label] for row in rows], ".-", label="searched")
        axes.plot([p], [rows[0][f"1F1B, {label}"]], "s", label="1F1B")
        for name, limit, line in (("V-Min", (p + 4) // 3, ":"), ("V-Half", (p + 2) // 2, "--")):
            axes.axvline(limit, color="#999999", linewidth=0.8, linestyle=line, label=name)
        axes.set_title(f"{p} stages, {label}", fontsize=9)
        axes.set_xlabel("memory limit, microbatches of a stage", fontsize=8)
        axes.set_ylim(bottom=0)
    plots[0].set_ylabel("bubble ratio", fontsize=8)
    plots[0].legend(frameon=False, fontsize=8)
    return drawn


def main(stages: tuple[int, ...] = (4, 8, 16), limits: int = 8) -> None:
    """Prints the tables of the page and draws its picture.

    Args:
      stages: p of the first table.
      limits: p of the second.
    """
    harness.simulate(common.MOST_SHARING)
    model = common.sizes("15B", MODEL)
    traced = of_layer(model, max(stages))
    name = f"traced ({traced.f:.3g}, {traced.b:.3g}, {traced.w:.3g})"
    costs = {"(1, 1, 1)": UNIT, name: traced, "(3, 4, 2)": HARD}
    curve = frontier(costs, limits, 4 * limits)
    larger = common.sizes("39B", LARGER)
    pure = [searched(model, 16, 64, pure=True, remats=("none",), rows=rows) for rows in (1, 64)] + [
        searched(model, 8, 32, pure=True, remats=("none",), rows=rows) for rows in (1, 64)
    ]
    grid = [
        searched(one, 32, batch, pure=False, remats=("none", "full"))
        for one, batch in itertools.product((model, larger), (32, 128))
    ]
    common.publish(
        "controllable-memory",
        {
            "throughput over 1F1B's, same microbatch": gains(costs, stages),
            f"bubble ratio by memory limit, {limits} stages, {4 * limits} microbatches": curve,
            "pipelines alone": pure,
            "grid search": grid,
        },
        picture(curve, list(costs), limits),
    )


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
