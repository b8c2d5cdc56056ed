"""When is breadth-first the faster order? The comparison of Lamy-Poirier (2022), modelled.

A 52B and a 6.6B model on 64 V100s: throughput against the batch per GPU of breadth-first,
depth-first (interleaved), 1F1B and no pipeline, each with the mesh, the chunks, the microbatches,
the rematerialization and the sharding that are best for it; and the training time and cost on
larger clusters, where the critical batch limits the batch.

    python -m benchmarks.studies.breadth_first
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import tyro

from benchmarks import harness
from benchmarks.studies import common
from jaxpipe.planning import devices
from jaxpipe.planning.cost import Prediction
from jaxpipe.planning.search import Goal
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.schedule.simulate import Costs

MODELS = {
    "52B": common.gpt_of(layers=64, width=8192, heads=64, length=1024),
    "6.6B": common.gpt_of(layers=32, width=4096, heads=32, length=1024),
}
DEVICES = 64
LINK = "nvlink:8,ib:50"
"""DGX-1: eight GPUs share four InfiniBand ports of 100 Gb/s (NVIDIA's DGX-1 architecture paper)."""
REMATS = (("none", "full"), ("full",))
"""Policies that plans may choose from: any, or the checkpoints of layer inputs that were usual."""
TOKENS_PER_PARAMETER = 20
"""Length of the training: Hoffmann et al. 2022."""


def exposed(found: Prediction, *, whole: bool = False) -> Mapping[str, float]:
    """Seconds by part if no message is hidden: each occupies the stage that sends it.

    Args:
      whole: every device that shares a layer sends the whole activation, not its part.
    """
    times = found.plan.tensor if whole else 1

    def chunk(layers: int, layer: Costs) -> Costs:
        sent = times * layer.message
        return Costs(layers * layer.f + sent, layers * layer.b, layers * layer.w + sent)

    return common.on_free_clock(found, chunk)


@dataclasses.dataclass(frozen=True)
class Method:
    """A line of the plots.

    Args:
      schedules: that it may take.
      most_zero: the highest level of sharding.
      timed: what a plan's messages cost.
    """

    schedules: tuple[str, ...]
    most_zero: int = 3
    timed: common.Timed = common.hidden

    def best(
        self,
        model: ModelSizes,
        cluster: devices.Cluster,
        batches: Sequence[int],
        goal: Goal = common.ONE_STEP,
        remats: Sequence[str] = ("none", "full"),
    ) -> Prediction | None:
        """Its best plan with one of these policies of rematerialization."""
        return common.best(
            model,
            cluster,
            batches,
            lambda plan: (
                plan.schedule in self.schedules
                and plan.remat in remats
                and plan.zero <= self.most_zero
                and (plan.stage == 1) == (self is METHODS["no pipeline"])
            ),
            goal=goal,
            timed=self.timed,
        )


_DEPTH_FIRST = ("interleaved-fused", "1f1b-fused")
METHODS = {
    "breadth-first": Method(("breadth-first-fused",)),
    "depth-first": Method(("interleaved-fused",)),
    "1F1B": Method(("1f1b-fused",)),
    "no pipeline": Method(("breadth-first-fused", "1f1b-fused")),
    "nothing hidden": Method(_DEPTH_FIRST, most_zero=1, timed=exposed),
    "whole messages": Method(_DEPTH_FIRST, most_zero=1, timed=partial(exposed, whole=True)),
}
"""The last two bound what the paper compares with: depth-first or 1F1B, whichever is faster, with
replicated weights and gradients, and messages that occupy the stages."""
BASELINES = ("nothing hidden", "whole messages")


def throughput(
    name: str,
    model: ModelSizes,
    cluster: devices.Cluster,
    batches: Sequence[int],
    remats: Sequence[str],
) -> list[dict[str, Any]]:
    """A row per batch: the share of the peak that each method attains, and the gains."""
    rows = []
    for batch in batches:
        found = {
            key: method.best(model, cluster, [batch], remats=remats)
            for key, method in METHODS.items()
        }
        share = {key: one.model_flops_share if one else 0.0 for key, one in found.items()}
        ours = share["breadth-first"]
        pipelines = max(share["depth-first"], share["1F1B"])
        rows.append(
            {"model": name, "remat": " or ".join(remats)}
            | {"batch": batch, "per GPU": batch / cluster.count}
            | {key: f"{value:.1%}" for key, value in share.items()}
            | {
                "gain": f"{ours / pipelines - 1:+z.0%}",
            }
            | {f"gain, {key}": f"{ours / share[key] - 1:+z.0%}" for key in BASELINES}
            | {
                "best breadth-first plan": common.in_words(found["breadth-first"].plan),
            }
        )
        harness.note(f"{name}, batch {batch}: {rows[-1]}")
    return rows


def training(
    name: str, model: ModelSizes, counts: Sequence[int], link: str, flops: float
) -> list[dict[str, Any]]:
    """A row per cluster and method: days and dollars of the fastest training."""
    tokens = TOKENS_PER_PARAMETER * model.num_parameters
    critical = common.critical_tokens(model.num_parameters)
    rows = []
    for count in counts:
        cluster = common.with_peak(devices.cluster("v100", count, link=link), flops)
        # From an eighth of a row per GPU to the critical batch and somewhat beyond.
        most = 2 * critical / model.tokens_per_row
        batches = [2**n for n in range(3, 20) if count / 8 <= 2**n <= max(most, count / 8)]
        goal = Goal(tokens, tuple(batches), critical_tokens=critical)
        for key, method in METHODS.items():
            if key in BASELINES:
                continue
            found = method.best(model, cluster, batches, goal)
            if found is None:
                continue
            rows.append(
                {
                    "model": name,
                    "GPUs": count,
                    "method": key,
                    "days": found.train_seconds / 86400,
                    "million $": found.dollars / 1e6,
                    "batch, million tokens": found.plan.batch_rows * model.tokens_per_row / 1e6,
                    "of the peak": f"{found.model_flops_share:.1%}",
                    "plan": common.in_words(found.plan),
                }
            )
            harness.note(f"{rows[-1]}")
    return rows


def picture(curves: Sequence[dict[str, Any]], trainings: Sequence[dict[str, Any]]) -> Any:
    """Throughput by batch per GPU of both models, and cost by training time of the larger."""
    drawn, (*plots, last) = common.figure(columns=3)
    for axes, name in zip(plots, MODELS, strict=True):
        rows = [row for row in curves if (row["model"], row["remat"]) == (name, "full")]
        for key in METHODS:
            values = [float(row[key].rstrip("%")) for row in rows]
            axes.plot([row["per GPU"] for row in rows], values, ".-", label=key)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("batch per GPU, rows of 1024 tokens", fontsize=8)
        axes.set_ylabel("% of the peak", fontsize=8)
        axes.set_title(f"{name} on {DEVICES} V100s, full remat", fontsize=9)
    plots[0].legend(frameon=False, fontsize=7)
    for key in dict.fromkeys(row["method"] for row in trainings):
        rows = [r for r in trainings if r["method"] == key and r["model"] == "52B"]
        last.plot([r["days"] for r in rows], [r["million $"] for r in rows], ".-", label=key)
    last.set_xlabel("days", fontsize=8)
    last.set_ylabel("million $", fontsize=8)
    last.set_title("52B, 1e12 tokens, 256 to 4096 V100s", fontsize=9)
    return drawn


def main(
    batches: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512),
    clusters: tuple[int, ...] = (256, 1024, 4096),
    link: str = LINK,
    flops: float = 0.81,
) -> None:
    """Prints the tables of the page and draws its picture.

    Args:
      batches: rows of a step on 64 GPUs.
      clusters: numbers of GPUs for which a training is planned.
      link: of the devices, as `jaxpipe plan` takes it.
      flops: share of the peak that matmuls attain.
    """
    harness.simulate(common.MOST_SHARING)
    curves, trainings = [], []
    cluster = common.with_peak(devices.cluster("v100", DEVICES, link=link), flops)
    for name, config in MODELS.items():
        model = common.sizes(name, config)
        for remats in REMATS:
            curves += throughput(name, model, cluster, batches, remats)
        if name == "52B":
            trainings = training(name, model, clusters, link, flops)
    common.publish(
        "breadth-first",
        {
            f"share of the peak, {DEVICES} V100s, {link}, matmuls at {flops:.0%}": curves,
            "training": trainings,
        },
        picture(curves, trainings),
    )


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
