"""How much does layered accumulation shorten training? Lamy-Poirier (2021), modelled.

The shortest training time by model size, from 10^9 to 10^13 parameters, at the critical batch:
1F1B against layered accumulation on a modular pipeline, each with its best number of A100s, mesh,
rematerialization and sharding, with and without InfiniBand.

    python -m benchmarks.studies.layered
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tyro

from benchmarks import harness
from benchmarks.studies import common
from jaxpipe.planning import devices
from jaxpipe.planning.cost import Prediction
from jaxpipe.planning.plans import Plan, Program, table_of
from jaxpipe.planning.search import Goal
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.schedule.lowering.table import NONE
from models import gpt

MODELS = {
    "1.7B": (32, 2048),
    "13B": (64, 4096),
    "103B": (128, 8192),
    "1.3T": (256, 20480),
    "10T": (512, 40960),
}
"""Layers and width; heads of 128."""
LENGTH = 2048
_FAST = "InfiniBand, 200 Gb/s"
NETWORKS = {_FAST: "nvlink:8,ib:200", "Ethernet, 25 Gb/s": "nvlink:8,eth:25"}
TOKENS_PER_PARAMETER = 20
"""Length of the training: Hoffmann et al. 2022. It cancels in every comparison."""
COUNTS = (256, 1024, 4096, 16384, 65536)
"""Numbers of devices."""
_TENTH = 8e9
"""Bytes of a device of 80 GB."""
_MOST_CHUNKS = 64
"""Limit on the chunks per stage that the planner considers."""


def baseline(plan: Plan, layers: int) -> bool:
    """1F1B of contiguous stages, or microbatch after microbatch without stages."""
    return plan.schedule == "1f1b-fused"


def improved(plan: Plan, layers: int) -> bool:
    """Layered accumulation, a layer per chunk as far as the planner goes."""
    chunks = min(_MOST_CHUNKS, layers // plan.stage)
    return plan.schedule == "breadth-first-fused" and plan.chunks == chunks


METHODS = {"baseline": baseline, "improved": improved}


def config_of(name: str) -> gpt.GPTConfig:
    layers, width = MODELS[name]
    return common.gpt_of(layers=layers, width=width, heads=width // 128, length=LENGTH)


def goal_of(model: ModelSizes) -> Goal:
    """A training at the critical batch, rounded down to a power of two rows."""
    critical = common.critical_tokens(model.num_parameters)
    rows = 2 ** int(math.log2(critical / model.tokens_per_row))
    tokens = TOKENS_PER_PARAMETER * model.num_parameters
    return Goal(tokens, (rows,), critical_tokens=critical)


def by_count(
    model: ModelSizes,
    link: str,
    method: str,
    counts: Sequence[int],
    limit_bytes: float | None = None,
) -> dict[int, Prediction | None]:
    """The plan of the shortest training on so many devices; None if none fits."""
    goal = goal_of(model)
    return {
        count: common.best(
            model,
            devices.cluster("a100", count, link=link, memory=limit_bytes),
            goal.batches,
            lambda plan: METHODS[method](plan, model.num_layers),
            goal=goal,
            timed=common.hidden,
        )
        for count in counts
    }


def row(
    name: str, network: str, found: Mapping[str, Mapping[int, Prediction | None]]
) -> dict[str, Any]:
    """The shortest training of both methods, and their times on as many devices each."""
    cells: dict[str, Any] = {"parameters": name, "network": network}
    for method, by_devices in found.items():
        fitting = [one for one in by_devices.values() if one]
        if not fitting:
            cells |= {f"{method}: days": math.nan, f"{method}: GPUs": "none fits"}
            continue
        one = min(fitting, key=lambda one: one.train_seconds)
        cells |= {
            f"{method}: days": one.train_seconds / 86400,
            f"{method}: GPUs": one.placed.cluster.count,
            f"{method}: GB": one.device_bytes / 1e9,
            f"{method}: plan": common.in_words(one.plan),
        }
    for count, first in found["baseline"].items():
        second = found["improved"][count]
        fits = f"{'' if first else 'only improved'}{'' if second else 'only baseline'}"
        ratio = second.train_seconds / first.train_seconds if first and second else fits
        cells[f"time at {count}"] = "none fits" if len(fits) > 15 else ratio
    return cells


def memory(
    name: str, network: str, found: Mapping[str, Mapping[int, Prediction | None]]
) -> list[dict[str, Any]]:
    """Days, memory and the share of the peak for every number of devices."""
    return [
        {
            "parameters": name,
            "network": network,
            "method": method,
            "GPUs": count,
            "days": one.train_seconds / 86400,
            "of the peak": f"{one.model_flops_share:.1%}",
            "GB": one.device_bytes / 1e9,
            "plan": common.in_words(one.plan),
        }
        for method, by_devices in found.items()
        for count, one in by_devices.items()
        if one
    ]


def lean(
    model: ModelSizes, link: str, found: Mapping[int, Prediction | None]
) -> list[dict[str, Any]]:
    """The improved method on a tenth of the memory, for the most devices that were tried."""
    count = max(found)
    small = by_count(model, link, "improved", (count,), _TENTH)[count]
    whole = found[count]
    if small is None or whole is None:
        return []
    return [
        {
            "parameters": model.name,
            "GPUs": count,
            "GB": small.device_bytes / 1e9,
            "time / that with all memory": small.train_seconds / whole.train_seconds,
            "plan": common.in_words(small.plan),
        }
    ]


def counts_of(stages: int, layers: int, microbatches: int) -> list[dict[str, Any]]:
    """Gathers and reductions of a layer's weights per step, of the tick tables that are executed,
    with weights sharded over data and two slots."""
    rows = []
    for label, p, name in (
        ("no pipeline, microbatch after microbatch", 1, "interleaved-fused"),
        ("no pipeline, layered", 1, "breadth-first-fused"),
        ("interleaved, one layer per chunk", stages, "interleaved-fused"),
        ("modular, layered", stages, "breadth-first-fused"),
    ):
        chunks = layers // p
        table = table_of(
            Program(name, p, chunks, microbatches, layers, None, 2, sums_in_slots=True)
        )
        gathers, sums = (
            float((moves.chunk != NONE).sum(axis=0).max()) + len(moves.edge.chunk)
            for moves in (table.gathers, table.reduces)
        )
        rows.append(
            {
                "order": label,
                "chunks gathered per step and stage": gathers,
                "reduced": sums,
                "chunks of a stage": chunks,
                "microbatches": microbatches,
            }
        )
    return rows


def picture(rows: Sequence[dict[str, Any]]) -> Any:
    """Days and memory by size."""
    drawn, (days, memory) = common.figure(columns=2)
    for network, line in zip(NETWORKS, ("-", ":"), strict=True):
        for method, color in (("baseline", "#888888"), ("improved", "#27518f")):
            some = [r for r in rows if r["network"] == network and f"{method}: GB" in r]
            sizes = [r["parameters"] for r in some]
            label = f"{method}, {network}"
            for axes, what in ((days, "days"), (memory, "GB")):
                values = [r[f"{method}: {what}"] for r in some]
                axes.plot(sizes, values, "." + line, color=color, label=label)
    days.set_yscale("log")
    days.set_ylabel("days of the shortest training", fontsize=8)
    memory.set_ylabel("GB of a device of 80 GB", fontsize=8)
    memory.set_ylim(bottom=0)
    for axes in (days, memory):
        axes.set_xlabel("parameters", fontsize=8)
    days.legend(frameon=False, fontsize=7)
    return drawn


def main(models: tuple[str, ...] = tuple(MODELS)) -> None:
    """Prints the tables of the page and draws its picture.

    Args:
      models: sizes, by name.
    """
    harness.simulate(common.MOST_SHARING)
    rows, plans, leans = [], [], []
    for name in models:
        model = common.sizes(name, config_of(name), tensors=(1, 8))
        for network, link in NETWORKS.items():
            found = {method: by_count(model, link, method, COUNTS) for method in METHODS}
            rows.append(row(name, network, found))
            plans += memory(name, network, found)
            if link == NETWORKS[_FAST]:
                leans += lean(model, link, found["improved"])
            harness.note(f"{rows[-1]} {plans[-2 * len(COUNTS) :]}")
    counts = counts_of(stages=4, layers=16, microbatches=16)
    tables = {
        "shortest training": rows,
        "by devices": plans,
        "lean": leans,
        "gathers and reductions": counts,
    }
    common.publish("layered", tables, picture(rows))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
