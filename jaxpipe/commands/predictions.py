"""Schedules on devices, by the cost model of `jaxpipe plan`: seconds and bytes by part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxpipe.commands.options import message
from jaxpipe.commands.printing import print_table
from jaxpipe.files import read_bytes
from jaxpipe.planning.cost import Prediction
from jaxpipe.planning.devices import cluster, find
from jaxpipe.planning.plans import (
    UNROLLED_LAYERS,
    Offload,
    PlacedPlan,
    Plan,
    who_computes_ends,
)
from jaxpipe.planning.search import fits, predicted
from jaxpipe.planning.sizes import ModelSizes, Variant
from jaxpipe.schedule import catalog
from jaxpipe.schedule.problems import ArgumentError, Problem, below_one, refuse

_DECIMALS = 2
"""Decimals of a part's number, or more where the largest sum would have fewer than three digits."""


def read_sizes(path: Path, *, option: str) -> ModelSizes:
    """Reads a file that ``jaxpipe plan --write-sizes`` wrote, the value of an option."""
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        refuse([Problem(option, str(path), f"is not text: {error}")])
        raise AssertionError from error  # refused
    return ModelSizes.from_json(text, source=str(path))


@dataclasses.dataclass(frozen=True)
class OnDevices:
    """A model on devices.

    Args:
      layer_model: file that `jaxpipe plan --write-sizes` wrote of a model; the others need it.
      batch: rows of a step; by default those of the configuration.
      data: data shards.
      replica: groups of data shards that hold the same parts.
      expert: data shards that have some of a layer's experts each.
      context: devices that share a layer's sequence.
      tensor: devices that share a layer's weights.
      zero: level at which parameters, gradients and optimizer state are sharded over data.
      remat: none, dots (the default of training on GPUs) or full.
      on_host: what lies in the host's memory: state (the optimizer's), residuals, or
        state,residuals.
      device: v100, a100, h100, h200, b200, cpu, or a file that `jaxpipe measure` wrote.
      link: links within hosts and between them, as for `plan`.
      exposed: share of the collectives within layers that nothing hides; 1 for jaxpipe's programs,
        about 0.1 for systems that run them beside matmuls.
    """

    layer_model: Path | None = None
    batch: int | None = None
    data: int = 1
    replica: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    zero: int = 0
    remat: str = "dots"
    on_host: str = ""
    device: str = "h100"
    link: str = "nvlink:8,ib:400"
    exposed: float = 1.0

    def problems(self, model: ModelSizes, rows: int, microbatches: int) -> list[Problem]:
        """Lists what does not fit the model, or the microbatches of so many rows."""
        axes = {"replica": self.replica, "expert": self.expert}
        if problems := below_one(data=self.data, context=self.context, tensor=self.tensor, **axes):
            return problems
        least = microbatches * self.data
        if rows < 1 or rows % least:
            rule = f"must be rows for $microbatches on $data shards, a multiple of {least}"
            others: dict[str, object] = {"microbatches": microbatches, "data": self.data}
            nearest = (max(1, rows // least) * least,)
            problems.append(Problem("batch", rows, rule, nearest, others))
        if self.data % (self.replica * self.expert):
            rule = "and $expert must divide $data shards together"
            others = {"expert": self.expert, "data": self.data}
            problems.append(Problem("replica", self.replica, rule, (1,), others))
        if unknown := [name for name in self.host_names if name not in Offload._fields]:
            rule = f"has {', '.join(unknown)}, which cannot lie there"
            places = (*Offload._fields, ",".join(Offload._fields))
            problems.append(Problem("on_host", self.on_host, rule, places))
        if not 0 <= self.exposed <= 1:
            problems.append(Problem("exposed", self.exposed, "must be a share, 0 to 1", (0.1, 1)))
        if self.zero not in range(4):
            problems.append(Problem("zero", self.zero, "is no level of ZeRO", (0, 1, 2, 3)))
        return problems

    def uncounted(self, model: ModelSizes, slices: int) -> list[Problem]:
        """Lists what the file of sizes does not know, of sequences in so many slices."""
        problems = []
        if self.variant(slices) not in model.variants:
            known = "; ".join(
                f"--{name} {', '.join(map(str, dict.fromkeys(values)))}"
                for name, values in zip(
                    Variant._fields, zip(*sorted(model.variants), strict=True), strict=True
                )
            )
            own = {"context": self.context, "expert": self.expert, "remat": self.remat}
            others = own | {"slices": slices}
            rule = "with $context, $expert, $remat and $slices was not counted; the file knows "
            rule += known
            problems.append(Problem("tensor", self.tensor, rule, (), others))
        return problems

    def variant(self, slices: int) -> Variant:
        """The options that decide the sizes of the model's layers."""
        return Variant(self.context, self.tensor, self.remat, self.expert, slices)

    @property
    def host_names(self) -> list[str]:
        """The names of what lies on the host."""
        return self.on_host.split(",") if self.on_host else []


def of_schedules(
    options: Mapping[str, Mapping[str, int]],
    on: OnDevices,
    *,
    stages: int,
    microbatches: int,
) -> tuple[dict[str, Prediction], dict[str, str]]:
    """Predicts what each schedule takes on one mesh, and says why the others do not fit it.

    Args:
      options: names of schedules, each with its "chunks" and "slices" where these are given.
      on: a model, and the other axes of the mesh.
      stages, microbatches: shape of the schedules.

    Raises:
      ArgumentError: the options do not fit each other.
    """
    assert on.layer_model is not None
    model = read_sizes(on.layer_model, option="layer_model")
    rows = model.batch_rows if on.batch is None else on.batch
    refuse(on.problems(model, rows, microbatches))
    count = stages * on.data * on.context * on.tensor
    attained = cluster(find(on.device), count, link=on.link)
    devices = dataclasses.replace(attained, exposed=on.exposed)
    few = model.num_layers <= UNROLLED_LAYERS * stages
    shape: dict[str, Any] = {
        "stage": stages, "data": on.data, "replica": on.replica, "expert": on.expert,
        "context": on.context, "tensor": on.tensor,
        "on_host": Offload(**dict.fromkeys(on.host_names, True)),
        "microbatches": microbatches, "rows": rows // (microbatches * on.data), "remat": on.remat,
        "zero": on.zero if on.data > 1 else 0, "weights": "unrolled" if few else "stacked",
    }  # fmt: skip
    predictions: dict[str, Prediction] = {}
    reasons: dict[str, str] = {}
    entries = {entry.name: entry for entry in catalog.entries()}
    for name, given in options.items():
        default = entries[name].default_chunks if name in entries else 1
        chunks, slices = given.get("chunks", default), given.get("slices", 1)
        refuse(on.uncounted(model, slices))
        slots = 2 if on.zero >= 2 and chunks > 1 else 1
        plan = Plan(schedule=name, chunks=chunks, weight_slots=slots, slices=slices, **shape)
        if stages * chunks > model.num_layers:
            reasons[name] = f"{stages * chunks} chunks need as many layers"
            continue
        try:
            choices = [
                predicted(PlacedPlan(plan._replace(ends=ends), model, devices))
                for ends in who_computes_ends(model, on.variant(slices), stages)
            ]
        except ArgumentError as error:
            reasons[name] = message(error)
            continue
        predictions[name] = min(choices, key=lambda one: (not fits(one), one.step_seconds))
    return predictions, reasons


def print_parts(
    console: Console,
    title: str,
    label: str,
    plans: Sequence[tuple[str, Prediction]],
    which: str,
    scale: float,
) -> None:
    """Prints seconds or bytes by part, and all of them.

    Args:
      console: console to print on.
      title: title of the table.
      label: heading of the first column.
      plans: name and plan of each row.
      which: "seconds" or "bytes".
      scale: factor to the unit that is shown.
    """
    parts = [
        {**getattr(plan, which), "all": sum(getattr(plan, which).values())} for _, plan in plans
    ]
    if which == "bytes" and any(plan.compiled_bytes is not None for _, plan in plans):
        for row, (_, plan) in zip(parts, plans, strict=True):
            row["compiled"] = plan.device_bytes
    largest = scale * max(row["all"] for row in parts)
    decimals = max(_DECIMALS, _DECIMALS - math.floor(math.log10(largest)))
    least = 0.5 * 10.0**-decimals
    shown = [name for name in parts[0] if any(scale * row[name] >= least for row in parts)]
    rows = [
        (name, *(_rounded(scale * row[part], decimals) for part in shown))
        for (name, _), row in zip(plans, parts, strict=True)
    ]
    print_table(console, [label, *shown], rows, title=title)


def _rounded(value: float, decimals: int) -> str:
    """Writes three digits or all before the point, and at most so many decimals: 15910, 22.8, 0."""
    if value < 0.5 * 10.0**-decimals:
        return "0"
    return f"{value:.{min(decimals, max(0, 2 - math.floor(math.log10(value))))}f}"
