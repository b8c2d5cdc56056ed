"""How long would a training step take on H100s if every kernel ran at the roofline? Needs no GPU.

Compiles the GPT of `benchmarks/gpu_compile.py` (width 2048, 3072 tokens per microbatch, bfloat16,
cuDNN's attention) for H100s that need not exist, costs every kernel and transfer as
`benchmarks/roofline.py` says, and adds them up with the trips that the tick table gives. Beside it
stand two plain jitted steps of one GPU (`benchmarks/plain_steps.py`) and a step with data shards
alone, of the same model. "plain scan" scans over stacked float32 weights, which layers cast;
"plain loop" is a Python loop over layers with arrays of their own, cast once per step. Ratios are
to the faster one.

The exit status is 1 if a figure is worse than its limit in `LIMITS`.

    make gpu-roofline [ARGS='--cases "1f1b, unrolled"']
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

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
    Step,
    batch_rows,
    pipeline_step,
    plain_layer,
    plain_layer_of_arrays,
    sharded_step,
)
from benchmarks.roofline import LAUNCH, PEAKS, WAIT, Spent, total
from jaxpipe.planning.without_devices import attention_of_gpus, use_gpu_flags

RESULTS = Path(__file__).parent / "results" / "gpu_roofline.json"
WIDTH = 170
_ROUNDING = 1e-6
COLUMNS = {
    Use.MATMUL: "matmul",
    Use.ATTENTION: "attn",
    Use.OTHER: "other",
    Use.SUMS: "sums",
    Use.VALUES: "values",
    Use.WEIGHTS: "weights",
    Use.LAUNCHES: "launch",
}


class Limits(NamedTuple):
    """What a case may not exceed.

    Args:
      layer: time of one layer and microbatch, of the faster plain step's.
      weights_mb: copies and casts of weights and gradient sums, per layer and microbatch.
      exposed: share of a step in which a stage waits for a transfer.
    """

    layer: float
    weights_mb: float
    exposed: float


# What is found today, rounded up.
LIMITS = {
    "1x8 1f1b-fused, unrolled": Limits(1.32, 0, 0.033),
    "1x8 1f1b-fused, stacked": Limits(1.55, 405, 0.024),
    "1x8 1f1b, unrolled": Limits(1.45, 0, 0.026),
    "1x8 1f1b, stacked": Limits(1.69, 405, 0.021),
    "1x8 1f1b-fused, unrolled, dots": Limits(1.03, 0, 0.035),
    "1x8 1f1b-fused, stacked, dots": Limits(1.25, 405, 0.026),
    "1x8 1f1b, unrolled, dots": Limits(1.2, 0, 0.026),
    "1x8 1f1b, stacked, dots": Limits(1.42, 405, 0.021),
    "1x8 1f1b-fused, unrolled, full": Limits(0.96, 0, 0.029),
    "1x8 1f1b-fused, stacked, full": Limits(1.13, 405, 0.022),
    "1x8 1f1b, unrolled, full": Limits(1.1, 0, 0.02),
    "1x8 1f1b, stacked, full": Limits(1.27, 405, 0.016),
    "1x8 gpipe, ZeRO-2, unrolled": Limits(1.46, 0, 0.023),
    "1x8 1f1b, ZeRO-2, unrolled": Limits(1.45, 0, 0.02),
    "1x8 gpipe, ZeRO-3, unrolled": Limits(1.46, 0, 0.025),
    "1x8 1f1b, ZeRO-3, unrolled": Limits(1.45, 0, 0.022),
    "1x8 breadth-first, ZeRO-2, unrolled": Limits(1.46, 0, 0.019),
    "1x8 zb-v, ZeRO-2, unrolled": Limits(1.46, 0, 0.038),
    "1x8 breadth-first, ZeRO-3, unrolled": Limits(1.46, 0, 0.021),
    "1x8 zb-v, ZeRO-3, unrolled": Limits(1.46, 0, 0.04),
    "2x8 breadth-first, ZeRO-2, unrolled": Limits(1.68, 0, 0.05),
    "2x8 1f1b, ZeRO-2, unrolled": Limits(1.46, 0, 0.046),
    "2x8 zb-v, ZeRO-2, unrolled": Limits(1.46, 0, 0.083),
    "2x8 breadth-first, ZeRO-3, unrolled": Limits(1.8, 0, 0.047),
    "2x8 1f1b, ZeRO-3, unrolled": Limits(1.46, 0, 0.047),
    "2x8 zb-v, ZeRO-3, unrolled": Limits(1.46, 0, 0.083),
    "1x8 1f1b-fused, ZeRO-2, unrolled, dots": Limits(1.03, 0, 0.028),
    "1x8 1f1b, ZeRO-2, unrolled, dots": Limits(1.2, 0, 0.02),
    "1x8 zb-v, ZeRO-3, unrolled, vocabulary at the ends": Limits(1.46, 0, 0.038),
    "1x8 1f1b, ZeRO-3, unrolled, vocabulary at the ends": Limits(1.45, 0, 0.013),
    "1x8 breadth-first, ZeRO-3, unrolled, vocabulary at the ends": Limits(1.46, 0, 0.016),
    "2x8 zb-v, ZeRO-3, unrolled, vocabulary at the ends": Limits(1.46, 0, 0.075),
    "2x8 1f1b, ZeRO-3, unrolled, vocabulary at the ends": Limits(1.46, 0, 0.026),
    "2x8 breadth-first, ZeRO-3, unrolled, vocabulary at the ends": Limits(1.8, 0, 0.033),
    "1x8 1f1b-fused, unrolled, dots, vocabulary at the ends": Limits(1.03, 0, 0.027),
}


def cases() -> list[Case]:
    """The cases of the report."""
    case = dataclasses.replace(
        Case(1, "1f1b"), weights="unrolled", compute_dtype="bfloat16", remat="none"
    )
    change = dataclasses.replace
    plain = [
        change(case, schedule=name, weights=weights, remat=remat)
        for remat in ("none", "dots", "full")
        for name in ("1f1b-fused", "1f1b")
        for weights in ("unrolled", "stacked")
    ]
    sharded = [
        change(case, hosts=hosts, schedule=name, zero=zero)
        for hosts in (1, 2)
        for zero in (2, 3)
        for name in ("gpipe", "breadth-first", "1f1b", "zb-v")
    ]
    recomputing = [
        change(case, schedule=name, zero=2, remat="dots") for name in ("1f1b-fused", "1f1b")
    ]
    at_ends = [change(case, schedule="1f1b-fused", remat="dots", vocabulary="ends")] + [
        change(case, hosts=hosts, schedule=name, zero=3, vocabulary="ends")
        for hosts in (1, 2)
        for name in ("breadth-first", "1f1b", "zb-v")
    ]
    return plain + sharded + recomputing + at_ends


def label(case: Case) -> str:
    zero = f", ZeRO-{case.zero}" if case.zero else ""
    remat = f", {case.remat}" if case.remat != "none" else ""
    ends = "" if case.vocabulary == "split" else f", vocabulary at the {case.vocabulary}"
    return f"{case.hosts}x8 {case.schedule}{zero}, {case.weights}{remat}{ends}"


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
    row = [name, *("" if seconds is None else f"{seconds * 1e3:.2f}" for seconds in shown)]
    return [*row[:5], f"{total(whole) / of:.2f}", *row[5:], f"{weights_mb(passes):.0f}"]


def weights_mb(passes: dict[str, Spent]) -> float:
    """MB of copies and casts of weights and gradient sums."""
    seconds = sum(spent[Use.WEIGHTS] for spent in passes.values())
    return seconds * PEAKS["memory"].value / 1e6


def step_row(name: str, step: Step, ideal: float, fsdp: float) -> list[str]:
    exposed, waits = step.spent[Use.TRANSFERS], step.spent[Use.WAITS]
    shares = (step.seconds - total(step.spent), exposed, waits, step.spent[Use.LAUNCHES])
    return [
        name, f"{step.seconds * 1e3:.0f}", f"{ideal / step.seconds:.2f}",
        f"{step.seconds / fsdp:.2f}", *(f"{one / step.seconds:.1%}" for one in shares),
    ]  # fmt: skip


def exceeded(name: str, found: Limits) -> list[str]:
    """What is worse than the limits of a case."""
    limits = LIMITS.get(name)
    return [
        f"{name}: {field} is {value:.3f}, more than {limit:.3f}"
        for field, value, limit in zip(Limits._fields, found, limits or found, strict=True)
        if value > limit + _ROUNDING
    ]


@attention_of_gpus()
def main() -> None:
    """Prints the tables and writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[""], help="parts of names; default all")
    options = parser.parse_args()
    use_gpu_flags()
    console = Console(width=WIDTH)
    console.print(peaks_table())
    layers = table_of(
        "ms per layer and microbatch; MB of copies and casts of weights and gradient sums",
        *("layer", "F", "B", "W", "all", "of plain", *COLUMNS.values(), "MB"),
    )
    steps = table_of(
        "step, and the shares of it in which a stage waits or launches",
        *("step", "ms", "ideal", "of FSDP", "other stages", "exposed", "host", "launch"),
    )
    results, worse = {}, []
    for case in cases():
        name = label(case)
        if not any(part in name for part in options.cases):
            continue
        with console.status(f"compiling {name}"):
            pipe = gpu_compile.pipeline(case)
            plain = {
                f"plain scan, {case.remat}": plain_layer(case.layers, case.remat),
                f"plain loop, {case.remat}": {
                    "all": plain_layer_of_arrays(case.layers, case.remat)
                },
            }
            num_layers = sum(pipe.table.layer_counts)
            fsdp = sharded_step(case.hosts, num_layers, batch_rows(pipe), case.remat)
            step = pipeline_step(pipe, batch_rows(pipe))
        seconds = {one: total(sum(passes.values(), Counter())) for one, passes in plain.items()}
        of = min(seconds.values())
        ideal = of * num_layers / case.stages * pipe.schedule.num_microbatches
        if not seconds.keys() & results.keys():
            results |= seconds
            for one, passes in plain.items():
                layers.add_row(*layer_row(one, passes, of))
        layers.add_row(*layer_row(name, step.passes, of))
        steps.add_row(*step_row(name, step, ideal, total(fsdp)))
        layer = total(sum(step.passes.values(), Counter())) / of
        exposed = step.spent[Use.TRANSFERS] / step.seconds
        found = Limits(layer, weights_mb(step.passes), exposed)
        worse += exceeded(name, found)
        results[name] = found._asdict() | {"seconds": step.seconds, "fsdp": total(fsdp)}
    console.print(layers)
    console.print(steps)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {RESULTS}")
    if worse:
        sys.exit("\n".join(worse))


if __name__ == "__main__":
    main()
