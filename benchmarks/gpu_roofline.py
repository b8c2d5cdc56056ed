"""How long would a training step take on H100s if every kernel ran at the roofline? Needs no GPU.

Compiles the GPT of `benchmarks/gpu_compile.py` (width 2048, 3072 tokens per microbatch, bfloat16,
cuDNN's attention) for H100s that need not exist, costs every kernel and transfer as
`benchmarks/roofline.py` says, and adds them up with the trips that the tick table gives. Beside it
stand steps as a careful user writes them in plain JAX (`benchmarks/plain_steps.py`), on one GPU and
with data shards alone (FSDP). Ratios are to the fastest of them with any policy of
rematerialization; FSDP's step has to fit into 80 GB.

The cases with 8 stages are one model and batch under many schedules: the table of schedules in
docs/benchmarks.md. The exit status is 1 if a figure is worse than its limit in `LIMITS`.

    make gpu-roofline [ARGS='--cases "1f1b, unrolled"']
    make gpu-roofline ARGS='--cases "8 stages"'
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ["JAX_PLATFORMS"] = "cpu"

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import gpu_compile
from benchmarks.gpu_compile import Case
from benchmarks.kernels import Use
from benchmarks.modelled_steps import (
    Rival,
    Step,
    batch_rows,
    pipeline_step,
    plain_layer,
    sharded_step,
)
from benchmarks.roofline import LAUNCH, PEAKS, WAIT, Spent, total
from jaxpipe.planning.without_devices import attention_of_gpus, use_gpu_flags
from jaxpipe.runtime.layers.split import REMAT_POLICIES
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.simulate import Costs

RESULTS = Path(__file__).parent / "results" / "gpu_roofline.json"
WIDTH = 190
_ROUNDING = 1e-6
MOVED = Use.OTHER, Use.WEIGHTS, Use.WRITES, Use.READS
COLUMNS = {
    Use.MATMUL: "matmul",
    Use.ATTENTION: "attn",
    Use.OTHER: "other",
    Use.SUMS: "sums",
    Use.COPIES: "copies",
    Use.WEIGHTS: "weights",
    Use.WRITES: "writes",
    Use.READS: "reads",
    Use.LAUNCHES: "launch",
}


class Limits(NamedTuple):
    """What a case may not exceed.

    Args:
      layer: time of one layer and microbatch, of the best plain step's.
      weights_mb: copies and casts of weights and gradient sums, per layer and microbatch.
      exposed: share of a step in which a stage waits for a transfer.
    """

    layer: float
    weights_mb: float
    exposed: float


# What is found today, rounded up.
LIMITS = {
    "1x8 1f1b-fused, unrolled": Limits(1.05, 0, 0.035),
    "1x8 1f1b-fused, unrolled, dots": Limits(1.05, 0, 0.035),
    "1x8 1f1b-fused, unrolled, full": Limits(1.3, 0, 0.03),
    "1x8 1f1b-fused, unrolled, dots, layers of two": Limits(1.05, 0, 0.035),
    "1x8 1f1b-fused, unrolled, dots, layers of two, in threes": Limits(1.08, 0, 0.035),
    "1x8 1f1b-fused, stacked, dots": Limits(1.38, 405, 0.03),
    "1x8 1f1b, unrolled": Limits(1.05, 0, 0.03),
    "1x8 1f1b, unrolled, dots": Limits(1.05, 0, 0.03),
    "1x8 1f1b, unrolled, full": Limits(1.3, 0, 0.02),
    "1x8 1f1b, stacked, dots": Limits(1.57, 405, 0.025),
    "1x8 breadth-first, ZeRO-3, unrolled, dots, partition chosen": Limits(1.05, 0, 0.025),
    "1x8 zb-v, ZeRO-3, unrolled, dots, partition chosen": Limits(1.05, 0, 0.04),
    "1x8 zb-v, ZeRO-3, unrolled, dots, equal chunks, vocabulary at the ends": Limits(1.05, 0, 0.01),
}


def cases() -> list[Case]:
    """The cases of the report."""
    case = dataclasses.replace(
        Case(1, "1f1b"), weights="unrolled", compute_dtype="bfloat16", remat="dots"
    )
    change = dataclasses.replace
    layers = [
        change(case, schedule=name, weights=weights, remat=remat)
        for name, weights, remat in (
            ("1f1b-fused", "unrolled", "none"), ("1f1b-fused", "unrolled", "dots"),
            ("1f1b-fused", "unrolled", "full"), ("1f1b-fused", "stacked", "dots"),
            ("1f1b", "unrolled", "none"), ("1f1b", "unrolled", "dots"),
            ("1f1b", "unrolled", "full"), ("1f1b", "stacked", "dots"),
        )
    ]  # fmt: skip
    steps = (
        [change(case, schedule="1f1b-fused", vocabulary="auto")]
        + [
            change(case, hosts=hosts, schedule=name, zero=3, vocabulary="auto")
            for hosts in (1, 2)
            for name in ("1f1b-fused", "breadth-first", "zb-v", "dualpipe-v")
        ]
        + [change(case, schedule="zb-v", zero=3, vocabulary="equal")]
        + [change(case, schedule="zb-v", zero=3, vocabulary="auto", remat="none")]
    )
    # One model of 32 layers under schedules with 1, 2 and 4 chunks per stage.
    schedules = [
        change(
            case, schedule=name, data=1, layers=4 // (chunks or 2), chunks=chunks, vocabulary="auto"
        )
        for chunks, names in (
            (1, ("gpipe-fused", "1f1b-fused", "1f1b", "zb-h1", "zb-h2")),
            (None, ("interleaved-fused", "1f1b-v", "dualpipe-v", "zb-v", "v-half")),
            (4, ("breadth-first-fused",)),
        )
        for name in names
    ]
    # Stacked layers that differ are packed. Ratios are to the GPT with full attention alone.
    differ = [
        change(case, schedule="1f1b-fused", kinds=kinds, layers=count, weights=weights)
        for kinds, count, layouts in (
            ("two", 4, ("stacked", "unrolled")), ("two", 3, ("unrolled",)),
            ("linear", 4, ("unrolled",)),
            ("hybrid", 4, ("stacked", "unrolled")), ("hybrid", 3, ("unrolled",)),
            ("experts", 4, ("unrolled",)), ("experts, dense first", 4, ("stacked", "unrolled")),
        )
        for weights in layouts
    ]  # fmt: skip
    return layers + steps + schedules + differ


def label(case: Case) -> str:
    zero = f", ZeRO-{case.zero}" if case.zero else ""
    remat = f", {case.remat}" if case.remat != "none" else ""
    chosen = {"auto": ", partition chosen", "equal": ", equal chunks, vocabulary at the ends"}
    ends = chosen.get(case.vocabulary, "")
    gpus = f"{case.hosts}x8" if case.data > 1 else f"{case.stages} stages"
    kinds = f", layers of {case.kinds}" if case.kinds != "one" else ""
    kinds += ", in threes" if kinds and case.layers == 3 else ""
    return f"{gpus} {case.schedule}{zero}, {case.weights}{remat}{ends}{kinds}"


def table_of(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def peaks_table() -> Table:
    table = Table("what", "per second", "source", title="peaks")
    for peak in PEAKS.values():
        table.add_row(peak.name, f"{peak.value:.3g}", peak.source)
    for peak in (LAUNCH, WAIT):
        table.add_row(peak.name, f"{peak.value * 1e6:.0f} us each", peak.source)
    return table


def layer_row(name: str, passes: dict[str, Spent], of: float) -> list[str]:
    """A row of the table of layers; passes that are not told apart have one name."""
    whole = sum(passes.values(), Counter())
    columns = ("F",), ("B", "BW"), ("W",)
    times = [
        next((total(passes[kind]) for kind in kinds if kind in passes), None) for kinds in columns
    ]
    parts = [whole[use] for use in COLUMNS]
    shown = [*times, total(whole), *parts]
    row = [name, *("" if seconds is None else f"{seconds * 1e3:.3f}" for seconds in shown)]
    moved = (megabytes(passes, use) for use in MOVED)
    kernels = whole[Use.LAUNCHES] / LAUNCH.value
    return [*row[:5], f"{total(whole) / of:.3f}", *row[5:], f"{kernels:.0f}",
            *(f"{size:.0f}" for size in moved)]  # fmt: skip


def megabytes(passes: dict[str, Spent], use: Use) -> float:
    """MB that kernels for one use read and write, if their bytes are what takes the time."""
    return sum(spent[use] for spent in passes.values()) * PEAKS["memory"].value / 1e6


def step_row(name: str, step: Step, ideal: float, fsdp: Rival, bubble: float) -> list[str]:
    exposed, waits = step.spent[Use.TRANSFERS], step.spent[Use.WAITS]
    shares = (step.seconds - total(step.spent), exposed, waits, step.spent[Use.LAUNCHES])
    return [
        name, f"{step.seconds * 1e3:.0f}", f"{ideal / step.seconds:.2f}",
        f"{step.seconds / total(fsdp.spent):.2f}", f"{bubble:.3f}",
        f"{total(sum(step.passes.values(), Counter())) * 1e3:.3f}",
        f"{step.bytes / 1e9:.1f}", f"{fsdp.bytes / 1e9:.1f}",
        *(f"{one / step.seconds:.1%}" for one in shares),
    ]  # fmt: skip


def bubble_of(schedule: Schedule, passes: dict[str, Spent]) -> float:
    """The schedule's bubble ratio on the device clock, if its layers cost what they do here."""
    f, *backward = (total(passes[kind]) for kind in ("F", "B", "BW", "W") if kind in passes)
    b, w = backward if len(backward) == 2 else (backward[0] / 2, backward[0] / 2)
    return device_clock(schedule, Costs(f, b, w)).bubble_ratio


def exceeded(name: str, found: Limits) -> list[str]:
    """Lists the figures that are worse than the limits of a case."""
    limits = LIMITS.get(name)
    return [
        f"{name}: {field} is {value:.3f}, more than {limit:.3f}"
        for field, value, limit in zip(Limits._fields, found, limits or found, strict=True)
        if value > limit + _ROUNDING
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[""], help="parts of names; default all")
    options = parser.parse_args()
    use_gpu_flags()
    tables(options.cases)


@attention_of_gpus()
def tables(chosen: Sequence[str]) -> None:
    """Prints the tables and writes the figures as JSON."""
    console = Console(width=WIDTH)
    console.print(peaks_table())
    layers = table_of(
        "ms per layer and microbatch; kernels; MB of other compute, weights, writes and reads",
        *("layer", "F", "B", "W", "all", "of plain", *COLUMNS.values()),
        *("kernels", "other", "weights", "writes", "reads"),
    )
    steps = table_of(
        "steps by time, FSDP's memory, and the shares in which a stage waits or launches",
        *("step", "ms", "ideal", "of FSDP", "bubble", "layer", "GB", "FSDP", "other stages"),
        *("exposed", "host", "launch"),
    )
    plain = {f"plain loop, {remat}": plain_layer(remat) for remat in REMAT_POLICIES}
    of = min(map(total, plain.values()))
    results: dict[str, Any] = {name: total(spent) for name, spent in plain.items()}
    for name, spent in plain.items():
        layers.add_row(*layer_row(name, {"all": spent}, of))
    worse, rows = [], []
    for case in cases():
        name = label(case)
        if not any(part in name for part in chosen):
            continue
        with console.status(f"compiling {name}"):
            pipe = gpu_compile.pipeline(case)
            num_layers = sum(pipe.table.layer_counts)
            fsdp = sharded_step(case.hosts, num_layers, batch_rows(pipe))
            step = pipeline_step(pipe, batch_rows(pipe), case.config)
        ideal = of * num_layers / case.stages * pipe.schedule.num_microbatches
        layers.add_row(*layer_row(name, step.passes, of))
        row = step_row(name, step, ideal, fsdp, bubble_of(pipe.schedule, step.passes))
        rows.append((case.data == 1, step.seconds, row))
        layer = total(sum(step.passes.values(), Counter())) / of
        exposed = step.spent[Use.TRANSFERS] / step.seconds
        found = Limits(layer, megabytes(step.passes, Use.WEIGHTS), exposed)
        worse += exceeded(name, found)
        results[name] = found._asdict() | {
            "seconds": step.seconds, "bytes": step.bytes,
            "fsdp seconds": total(fsdp.spent), "fsdp bytes": fsdp.bytes,
        }  # fmt: skip
    for _, _, row in sorted(rows):
        steps.add_row(*row)
    console.print(layers)
    console.print(steps)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {RESULTS}")
    if worse:
        sys.exit("\n".join(worse))


if __name__ == "__main__":
    main()
