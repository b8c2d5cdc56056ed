"""How long would a training step take on H100s if every kernel ran at the roofline? Needs no GPU.

Compiles the GPT of `benchmarks/gpu_compile.py` (width 2048, 3072 tokens per microbatch, bfloat16,
cuDNN's attention) for H100s that need not exist, costs every kernel and transfer as
`benchmarks/roofline.py` says, and adds them up with the trips that the tick table gives. Beside it
stand a plain jitted step of one GPU and a step with data shards alone, of the same model.

    make gpu-roofline [ARGS='--cases "1f1b, unrolled"']
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import topologies
from rich.console import Console
from rich.table import Table

from benchmarks import gpu_compile, plain_steps
from benchmarks.gpu_compile import CONFIG, DATA, ROWS, Case
from benchmarks.hlo import HloProgram, Instruction
from benchmarks.kernels import Use
from benchmarks.roofline import (
    GPUS_PER_HOST,
    LAUNCH,
    PEAKS,
    WAIT,
    Roofline,
    Spent,
    known_trips,
    scaled,
    total,
)
from jaxpipe import gpu_flags
from jaxpipe.runtime.measure.memory import compiled
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import NONE, TickTable
from models import gpt

RESULTS = Path(__file__).parent / "results" / "gpu_roofline.json"
LAYERS, REMAT = 4, "none"
PASSES = ("F", "B", "BW", "W", "R")
_LOOP = re.compile(
    r"/(F|BW|B|W|R|enter|leave|embed_gradient|gather|reduce|meet)"
    r'(?:/chunk(\d+)(?:_layer(\d+))?)?/while"'
)
COLUMNS = {
    Use.MATMUL: "matmul", Use.ATTENTION: "attention", Use.OTHER: "other", Use.SUMS: "sums",
    Use.WEIGHTS: "weights", Use.VALUES: "values", Use.TRANSFERS: "exposed",
    Use.LAUNCHES: "launches", Use.WAITS: "waits",
}  # fmt: skip


def cases() -> list[Case]:
    """The cases of the report."""

    def case(hosts: int, schedule: str, zero: int, weights: str) -> Case:
        return Case(
            hosts, schedule, zero=zero, weights=weights, layers=LAYERS, compute_dtype="bfloat16",
            remat=REMAT,
        )  # fmt: skip

    return [
        case(1, schedule, 0, weights)
        for schedule in ("1f1b-fused", "1f1b")
        for weights in ("stacked", "unrolled")
    ] + [
        case(1, schedule, zero, "unrolled")
        for zero in (2, 3)
        for schedule in ("breadth-first", "modular", "1f1b", "zb-v")
    ]


def pretend_cudnn() -> None:
    """Lets jax lower cuDNN's attention with no GPU to ask for its version and capability."""
    cudnn.check_cudnn_version = lambda: 91100
    cudnn.check_compute_capability = lambda capability: True
    gpt.attention_kernel = lambda query: "cudnn"


def devices(hosts: int) -> Any:
    """H100s that need not exist."""
    target = gpu_compile.TARGET.read_text("utf-8")
    return topologies.get_topology_desc(
        platform="cuda", topology=f"1x{hosts}x{GPUS_PER_HOST}", target_config=target
    ).devices


def weight_shapes(num_layers: int) -> set[tuple[int, ...]]:
    """Shapes of a layer's matrices, also of several layers stacked and of data shards, sorted."""
    layers = jax.eval_shape(lambda: gpt.init(CONFIG, jax.random.key(0)))["layers"]
    shapes = [leaf.shape[1:] for leaf in jax.tree.leaves(layers) if leaf.ndim > 2]
    whole = [(rows // n, columns) for n in (1, DATA, GPUS_PER_HOST) for rows, columns in shapes]
    return {tuple(sorted(shape)) for cut in whole for shape in (cut, (num_layers, *cut))}


# A plain step.


def plain(microbatches: int) -> dict[str, Any]:
    """A layer of a plain step of one GPU: its loops, and the sum of its gradients."""
    config = dataclasses.replace(CONFIG, num_layers=LAYERS)
    tokens = (microbatches, ROWS, CONFIG.sequence_length + 1)
    step = plain_steps.plain_step(config, REMAT, devices(1)[0], tokens)
    roofline = Roofline(HloProgram(step.as_text()), weight_shapes(LAYERS))
    program = roofline.program
    (loop,) = (row for row in program.computations[program.entry] if row.opcode == "while")
    body = loop.calls["body"]
    loops = [row for row in program.computations[body] if row.opcode == "while"]
    passes = {
        name: roofline.body(row.calls["body"])
        for name, row in zip(
            ("F", "BW"), (r for r in loops if known_trips(r) == LAYERS), strict=True
        )
    }
    # What else the program does with layers outside their loops, it could do without: it clears
    # the stacks of residuals and of gradients for every microbatch.
    passes["sums"] = Counter({Use.SUMS: roofline.run(body, lambda row: 0)[Use.SUMS] / LAYERS})
    return {"passes": passes, "step": roofline.body(program.entry)}


def sharded(case: Case) -> Spent:
    """The step of as many GPUs as a case has, all of them data shards, and of the same batch."""
    gpus = GPUS_PER_HOST * case.hosts
    pipe = gpu_compile.pipeline(case)
    num_layers = sum(pipe.table.layer_counts)
    config = dataclasses.replace(CONFIG, num_layers=num_layers)
    microbatches = pipe.schedule.num_microbatches * DATA // gpus
    tokens = (microbatches, ROWS * gpus, CONFIG.sequence_length + 1)
    step = plain_steps.sharded_step(config, REMAT, devices(case.hosts), tokens)
    roofline = Roofline(HloProgram(step.as_text()), weight_shapes(num_layers))
    return roofline.body(roofline.program.entry)


# A pipeline's step.


@dataclasses.dataclass(frozen=True)
class Step:
    """The modelled step of a pipeline.

    Args:
      passes: one layer and microbatch, by kind of action.
      spent: of the stage that is slowest in each tick, and before and after the ticks.
      busy: what the stages spend, their mean.
    """

    passes: dict[str, Spent]
    spent: Spent
    busy: Spent


def pipeline_step(case: Case) -> Step:
    """Compiles a case and models it."""
    pipe = gpu_compile.pipeline(case)
    rows = ROWS * DATA * pipe.schedule.num_microbatches
    batch = {"tokens": jax.ShapeDtypeStruct((rows, CONFIG.sequence_length + 1), jnp.int32)}
    program = HloProgram(compiled(pipe, batch).as_text())
    roofline = Roofline(program, weight_shapes(case.layers))
    tick = program.tick_loop()
    spent = roofline.run(
        program.entry, lambda row: 0 if row.calls["body"] == tick else known_trips(row)
    )
    busy = Counter(spent)
    for n in range(pipe.table.num_ticks):
        of_stages = [
            roofline.run(tick, lambda row, n=n, s=s: trips(pipe.table, row, n, s))
            for s in range(case.stages)
        ]
        spent += max(of_stages, key=total)
        for one in of_stages:
            busy += scaled(one, 1 / case.stages)
    return Step(layer_passes(roofline, tick), spent, busy)


def layer_passes(roofline: Roofline, tick: str) -> dict[str, Spent]:
    """One layer and microbatch by kind of action, the mean over its loops."""
    found: dict[str, list[Spent]] = {}
    for row in roofline.program.computations[tick]:
        loop = _LOOP.search(row.text) if row.opcode == "while" else None
        if loop and loop[1] in PASSES:
            found.setdefault(loop[1], []).append(roofline.body(row.calls["body"]))
    return {name: scaled(sum(bodies, Counter()), 1 / len(bodies)) for name, bodies in found.items()}


def trips(table: TickTable, loop: Instruction, tick: int, stage: int) -> float:
    """How often a loop of the tick's body runs.

    Raises:
      ValueError: the loop has no name that says so.
    """
    found = _LOOP.search(loop.text)
    if found is None:
        raise ValueError(f"how often does this loop run? {loop.text[:2000]}")
    name, chunk, layer = found[1], found[2], found[3]
    if name in PASSES:
        cell = table.passes[Kind[name]]
        lo, hi = cell.lo[tick, stage], cell.hi[tick, stage]
        if layer is None:
            return int(hi - lo)
        return int(cell.chunk[tick, stage] == int(chunk) and lo <= int(layer) < hi)
    if name in ("gather", "reduce"):
        transfers = table.gathers if name == "gather" else table.reduces
        own = transfers.chunk[tick, stage]
        if chunk is None:
            return 0 if own == NONE else table.layers_per_chunk
        return int(own == int(chunk))
    if name == "meet":
        return int(table.meets[tick])
    column = {"enter": table.embed, "leave": table.head, "embed_gradient": table.embed_gradient}
    return int(column[name][tick] != NONE)


# The report.


def peaks_table() -> Table:
    table = Table("what", "per second", "source", title="peaks")
    for peak in PEAKS.values():
        table.add_row(peak.name, f"{peak.value:.3g}", peak.source)
    for peak in (LAUNCH, WAIT):
        table.add_row(peak.name, f"{peak.value * 1e6:.0f} us each", peak.source)
    return table


def layer_row(name: str, passes: dict[str, Spent], of: float) -> tuple[str, ...]:
    whole = sum(passes.values(), Counter())
    times = (f"{total(passes[n]) * 1e3:.2f}" if n in passes else "" for n in ("F", "B", "BW", "W"))
    parts = (f"{whole[use] * 1e3:.2f}" for use in COLUMNS if use not in (Use.TRANSFERS, Use.WAITS))
    return name, *times, f"{total(whole) * 1e3:.2f}", f"{total(whole) / of:.2f}", *parts


def step_row(name: str, step: Step, ideal: float, fsdp: float) -> tuple[str, ...]:
    whole = total(step.spent)
    waits = whole - total(step.busy)
    parts = (f"{step.spent[use] / whole:.1%}" for use in COLUMNS)
    return (
        name, f"{whole * 1e3:.0f}", f"{ideal / whole:.2f}", f"{whole / fsdp:.2f}",
        f"{waits / whole:.1%}", *parts,
    )  # fmt: skip


def main() -> None:
    """Prints the tables and writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[""], help="parts of names; default all")
    options = parser.parse_args()
    variables = os.environ | {"JAX_PLATFORMS": "cuda"}
    gpu_flags.apply(variables)
    os.environ["XLA_FLAGS"] = variables["XLA_FLAGS"]
    pretend_cudnn()
    console = Console(width=150)
    console.print(peaks_table())
    uses = [name for use, name in COLUMNS.items() if use not in (Use.TRANSFERS, Use.WAITS)]
    layers = Table("ms per layer and microbatch", *("F", "B", "BW", "W"), "all", "of plain", *uses)
    steps = Table("step", "ms", "ideal", "of FSDP", "bubble", *COLUMNS.values())
    baseline = plain(16)
    of = total(sum(baseline["passes"].values(), Counter()))
    layers.add_row(*layer_row("plain step", baseline["passes"], of))
    results = {}
    fsdp: dict[tuple[int, int], Spent] = {}
    for case in cases():
        if not any(part in str(case) for part in options.cases):
            continue
        with console.status(f"compiling {case}"):
            step = pipeline_step(case)
            pipe = gpu_compile.pipeline(case)
            size = case.hosts, sum(pipe.table.layer_counts)
            if size not in fsdp:
                fsdp[size] = sharded(case)
                steps.add_row(
                    f"FSDP, {size[1]} layers",
                    f"{total(fsdp[size]) * 1e3:.0f}",
                    "",
                    "1",
                    "",
                    *(f"{fsdp[size][use] / total(fsdp[size]):.1%}" for use in COLUMNS),
                )
        chunks = len(pipe.table.layer_counts) // case.stages
        ideal = of * case.layers * chunks * pipe.schedule.num_microbatches
        layers.add_row(*layer_row(str(case), step.passes, of))
        steps.add_row(*step_row(str(case), step, ideal, total(fsdp[size])))
        results[str(case)] = {
            "layer": {
                name: {u.name: v for u, v in one.items()} for name, one in step.passes.items()
            },
            "step": {u.name: v for u, v in step.spent.items()},
        }
    console.print(layers)
    console.print(steps)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
