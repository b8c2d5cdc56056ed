"""Schedules on devices, by the cost model of `jaxpipe plan`: seconds and bytes by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxpipe.commands.options import message
from jaxpipe.planning import step
from jaxpipe.planning.calibration import find
from jaxpipe.planning.devices import cluster
from jaxpipe.planning.found import Found
from jaxpipe.planning.plans import UNROLLED_LAYERS, Placed, Plan
from jaxpipe.planning.search import exact
from jaxpipe.planning.sizes import ModelSizes, Variant
from jaxpipe.schedule import catalog
from jaxpipe.schedule.problems import ArgumentError, Problem, below_one, refuse


def read_sizes(path: Path, *, option: str) -> ModelSizes:
    """Reads a file that ``jaxpipe plan --write-sizes`` wrote, the value of an option."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        refuse([Problem(option, str(path), f"is not text: {error}")])
        raise AssertionError from error  # refused
    return ModelSizes.from_json(text, source=str(path))


@dataclasses.dataclass(frozen=True)
class OnDevices:
    """A model on devices.

    Args:
      layer_model: what `jaxpipe plan --write-sizes` wrote of a model; the others are for it.
      batch: rows of a step; the configuration's without it.
      data: data shards.
      tensor: devices that share a layer.
      zero: level at which parameters, gradients and optimizer state are sharded over data.
      remat: none, dots or full.
      device: v100, a100, h100, h200, b200, cpu, or what `jaxpipe measure` wrote.
      link: within hosts and between them, as for `plan`.
    """

    layer_model: Path | None = None
    batch: int | None = None
    data: int = 1
    tensor: int = 1
    zero: int = 0
    remat: str = "none"
    device: str = "h100"
    link: str = "nvlink:8,ib:400"

    def problems(self, model: ModelSizes, rows: int, microbatches: int) -> list[Problem]:
        """What does not fit the model, or the microbatches of so many rows."""
        found = below_one(data=self.data, tensor=self.tensor)
        least = microbatches * self.data
        if not found and (rows < 1 or rows % least):
            rule = f"must be rows for $microbatches on $data shards, a multiple of {least}"
            others = {"microbatches": microbatches, "data": self.data}
            nearest = (max(1, rows // least) * least,)
            found.append(Problem("batch", rows, rule, nearest, others))
        if self.zero not in range(4):
            found.append(Problem("zero", self.zero, "is no level of ZeRO", (0, 1, 2, 3)))
        if Variant(1, self.tensor, self.remat) not in model.variants:
            known = ", ".join(
                f"{one.tensor} with {one.remat}"
                for one in model.variants
                if one.context == one.expert == 1
            )
            rule = f"with $remat was not counted; the file has {known}"
            found.append(Problem("tensor", self.tensor, rule, (), {"remat": self.remat}))
        return found


def of_schedules(
    names: Sequence[str], on: OnDevices, *, stages: int, microbatches: int
) -> tuple[dict[str, Found], dict[str, str]]:
    """What each of the schedules takes on one mesh, as it would run, and why others do not fit it.

    Args:
      names: of schedules, with their own default of chunks.
      on: a model, and the rest of the mesh.
      stages, microbatches: of the schedules.

    Raises:
      ArgumentError: the options do not fit each other.
    """
    assert on.layer_model is not None
    model = read_sizes(on.layer_model, option="layer_model")
    rows = model.batch_rows if on.batch is None else on.batch
    refuse(on.problems(model, rows, microbatches))
    devices = cluster(find(on.device), stages * on.data * on.tensor, link=on.link)
    few = model.num_layers <= UNROLLED_LAYERS * stages
    shape: dict[str, Any] = {
        "stage": stages, "data": on.data, "context": 1, "tensor": on.tensor, "replica": 1,
        "microbatches": microbatches, "rows": rows // (microbatches * on.data), "remat": on.remat,
        "zero": on.zero if on.data > 1 else 0, "weights": "unrolled" if few else "stacked",
    }  # fmt: skip
    found: dict[str, Found] = {}
    reasons: dict[str, str] = {}
    entries = {entry.name: entry for entry in catalog.entries()}
    for name in names:
        chunks = entries[name].default_chunks if name in entries else 1
        slots = 2 if on.zero >= 2 and chunks > 1 else 1
        plan = Plan(schedule=name, chunks=chunks, weight_slots=slots, **shape)
        if stages * chunks > model.num_layers:
            reasons[name] = f"{stages * chunks} chunks need as many layers"
            continue
        try:
            found[name] = exact(Found(Placed(plan, model, devices), {}, {}, 1.0, exact=False))
        except ArgumentError as error:
            reasons[name] = message(error)
    return found, reasons


def parts_table(
    title: str, label: str, found: Sequence[tuple[str, Found]], which: str, scale: float
) -> Table:
    """Seconds or bytes by part, and all of them.

    Args:
      title: of the table.
      label: what the first column names.
      found: by name.
      which: "seconds" or "bytes".
      scale: of the unit that is shown.
    """
    table = Table(label, *getattr(found[0][1], which), "all", title=title)
    compiles = which == "bytes" and any(one.compiled_bytes is not None for _, one in found)
    if compiles:
        table.add_column("compiled")
    for name, one in found:
        parts = getattr(one, which)
        values = [*parts.values(), step.total(parts)]
        if compiles:
            values.append(one.compiled_bytes)
        table.add_row(name, *(f"{scale * value:.4g}" for value in values))
    return table
