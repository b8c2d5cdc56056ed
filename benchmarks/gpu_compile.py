"""What does XLA compile the training step to on H100s? Needs no GPU, and runs nothing.

GPT, width 2048, 4 layers per chunk, bfloat16 compute, on 8 GPUs of one host and on 2 hosts of 8.
The scheduled program and its launch sequence (thunks) show, for one tick:

- messages: how many layer loops run between a transfer's start and its end; 0 is a transfer that
  overlaps with no computation, one "in a loop" leaves only in gated ticks;
- copies: whole buffers copied or written anew;
- weights: bytes of weights and of their gradient sums that a layer copies, and that it casts;
- host: loops outside CUDA graphs, each of which the host waits for;
- memory: temporaries, with an update by plain SGD, against
  `jaxpipe.runtime.measure.memory.predicted_bytes`.

Kernels are not tuned without a GPU: nothing here is a speed. Attention is XLA's, not cuDNN's.

    make gpu-compile
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import jaxpipe
from benchmarks.hlo import HloProgram, Instruction, pass_of
from jaxpipe.planning.without_devices import GPUS_PER_HOST, h100s, use_gpu_flags
from jaxpipe.runtime.measure import traced
from jaxpipe.runtime.measure.memory import compiled, predicted_bytes
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.search.slices import slice_ticks
from jaxpipe.schedule.simulate import Costs
from models import gpt

RESULTS = Path(__file__).parent / "results" / "gpu_compile.json"
LAYERS_PER_CHUNK, ROWS, DATA = 4, 2, 2
COSTS = Costs(1, 1.2, 0.8)
# No two of rows x sequence, width, hidden and qkv width are equal: shapes identify arrays.
CONFIG = gpt.GPTConfig(
    vocab_size=32768, sequence_length=1536, num_layers=16, width=2048, num_heads=16,
    dtype="bfloat16",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled step: hosts of 8 GPUs, a schedule, in slices or not, a ZeRO level, the layout of
    the weights, layers per chunk, the dtype of the copies that layers read, what is recomputed, and
    chunks per stage."""

    hosts: int
    schedule: str
    sliced: bool = False
    zero: int = 0
    weights: str = "stacked"
    layers: int = LAYERS_PER_CHUNK
    compute_dtype: str | None = None
    remat: str = "dots"
    chunks: int | None = None

    @property
    def stages(self) -> int:
        return 8 * self.hosts // DATA

    def __str__(self) -> str:
        name = f"{self.schedule}{', sliced' if self.sliced else ''}"
        name += f", ZeRO-{self.zero}" if self.zero else ""
        name += "" if self.chunks is None else f", {self.chunks} chunks"
        name = f"{self.hosts} x 8, {name}, {self.layers} layers, {self.weights}"
        return name if self.compute_dtype is None else f"{name}, {self.compute_dtype}"


CASES = [
    Case(hosts, *case)
    for hosts in (1, 2)
    for case in (
        ("1f1b",), ("1f1b", True), ("zb-v",), ("zb-v", True),
        ("breadth-first", False, 3), ("zb-v", True, 3),
    )
] + [
    Case(1, "breadth-first", zero=zero, remat="full", compute_dtype="bfloat16", chunks=4)
    for zero in (0, 2, 3)
] + [
    Case(1, "1f1b", zero=zero, weights=weights, compute_dtype="bfloat16")
    for zero in (0, 3)
    for weights in ("stacked", "unrolled")
] + [
    Case(1, *case, layers=layers)
    for layers, *case in (
        (4, "1f1b", False, 0, "unrolled"), (4, "1f1b", False, 1, "unrolled"),
        (4, "1f1b", False, 2, "stacked"), (4, "1f1b", False, 2, "unrolled"),
        (4, "1f1b", False, 3, "stacked"), (4, "1f1b", False, 3, "unrolled"),
        (4, "zb-v", True, 0, "unrolled"), (4, "zb-v", True, 3, "unrolled"),
        (16, "1f1b", False, 0, "stacked"), (16, "1f1b", False, 0, "unrolled"),
        (32, "1f1b", False, 0, "stacked"), (32, "1f1b", False, 0, "unrolled"),
    )
]  # fmt: skip


# The program as text.


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the tick loop.

    Args:
      opcode: what it does.
      bytes: of its largest array.
      in_loop: within a gated loop: it runs only in some ticks.
      hidden_by: loops over layers between its start and its end; 0 if it is synchronous.
    """

    opcode: str
    bytes: int
    in_loop: bool
    hidden_by: int


def collectives(program: HloProgram) -> list[Collective]:
    """The collectives of one tick of every kind, at any depth."""
    ticks = program.tick_bodies().values()
    found = []
    for body in (body for tick in ticks for body in _loop_bodies(program, tick)):
        rows = program.computations[body]
        for position, row in enumerate(rows):
            opcode = row.opcode.removesuffix("-start")
            if opcode not in ("collective-permute", "all-gather", "all-reduce", "reduce-scatter"):
                continue
            hidden_by = 0
            if row.opcode != opcode and '"is_sync":true' not in row.text:
                ends = [i for i, later in enumerate(rows) if row.name in later.operands]
                between = rows[position : min(i for i in ends if i > position)]
                hidden_by = sum(pass_of(later) is not None for later in between)
            found.append(Collective(opcode, max(row.bytes), body not in ticks, hidden_by))
    return found


def whole_buffers(program: HloProgram, shapes: set[tuple[int, ...]]) -> list[Instruction]:
    """The operations that copy, transpose or write a whole buffer in the tick loop."""
    found = []
    loops = (body for loop in program.tick_loops() for body in _loop_bodies(program, loop))
    for body in loops:
        for row in program.computations[body]:
            inside = {i.opcode for i in _inside(program, row)}
            in_place = row.opcode == "fusion" and "dynamic-update-slice" in inside
            writes = row.opcode in ("copy", "copy-start", "transpose", "fusion") and not in_place
            if writes and any(_squeezed(shape) in shapes for shape in row.shapes):
                found.append(row)
    return found


@dataclasses.dataclass(frozen=True)
class WeightTraffic:
    """The writes of one layer beside its matmuls, in arrays as large as one of its weights.

    Args:
      copied: bytes of unchanged weights or gradient sums.
      cast: bytes of weights in another dtype.
    """

    copied: int
    cast: int


def weight_traffic(program: HloProgram, shapes: set[tuple[int, ...]]) -> list[WeightTraffic]:
    """The traffic of a layer in F, B and W: the most that any of a pass's loops over layers writes.

    Args:
      program: the compiled step.
      shapes: of weights that are matrices, each sorted.
    """
    passes = [
        [_traffic(program, loop.calls["body"], shapes) for loop in loops]
        for loops in program.layer_loops().values()
    ]
    return [
        WeightTraffic(max(one.copied for one in loops), max(one.cast for one in loops))
        for loops in passes
    ]


def _traffic(program: HloProgram, loop: str, shapes: set[tuple[int, ...]]) -> WeightTraffic:
    copied = cast = 0
    for body in _loop_bodies(program, loop):
        for row in program.computations[body]:
            inside = {i.opcode for i in _inside(program, row)} | {row.opcode}
            # The layer's own gradient is added in place: a copy would be one more.
            moves = bool(inside & {"copy", "transpose", "slice", "dynamic-slice"})
            if "dot" in inside or not (moves or "convert" in inside):
                continue
            size = sum(
                size
                for shape, size in zip(row.shapes, row.bytes, strict=True)
                if tuple(sorted(_squeezed(shape))) in shapes
            )
            copied += size * moves
            cast += size * (not moves)
    return WeightTraffic(copied, cast)


def host_loops(thunks: str) -> int:
    """Loops of one tick that are in no CUDA graph: before each iteration the host waits for the
    device to say whether there is one. The most of any kind of tick."""
    rows = [
        (len(found[1]), found[2])
        for line in thunks.splitlines()
        if (found := re.match(r"(\s*)\d+: (k\w+)", line))
    ]
    counts = [0]
    path: list[tuple[int, str]] = []
    for depth, kind in rows:
        while path and path[-1][0] >= depth:
            path.pop()
        if kind == "kWhile" and not path:
            counts.append(0)
        # The tick loops are the entry's only loops with loops in them.
        counts[-1] += kind == "kWhile" and [name for _, name in path] == ["kWhile"]
        path.append((depth, kind))
    return max(counts)


def _loop_bodies(program: HloProgram, computation: str) -> list[str]:
    """A computation and the bodies of all loops in it."""
    found = [computation]
    for row in program.computations[computation]:
        for name, called in row.calls.items():
            if (row.opcode == "while" and name == "body") or row.opcode == "call":
                found += _loop_bodies(program, called)
    return found


def _inside(program: HloProgram, row: Instruction) -> list[Instruction]:
    """The operations in a fusion."""
    return [i for called in row.calls.values() for i in program.reached(called, into_loops=True)]


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


# One case.


def pipeline(case: Case) -> jaxpipe.Pipeline:
    """The case's pipeline over H100s that need not exist."""
    m = 4 * case.stages
    schedule = jaxpipe.schedules.build(
        case.schedule, stages=case.stages, microbatches=m, chunks=case.chunks
    )
    num_layers = case.layers * schedule.placement.num_virtual_stages
    config = dataclasses.replace(CONFIG, num_layers=num_layers)
    if case.sliced:
        counts = partition([1] * num_layers, schedule.placement)
        schedule = slice_ticks(schedule, COSTS, counts)
    devices = h100s(case.hosts * GPUS_PER_HOST)
    return jaxpipe.Pipeline(
        gpt.model(config, vocabulary_axis="stage"),
        jax.eval_shape(lambda: gpt.init(config, jax.random.key(0))),
        schedule=schedule,
        mesh=jaxpipe.make_mesh(stage=case.stages, data=DATA, devices=devices),
        remat=case.remat,
        zero=case.zero,
        weights=case.weights,
        weight_slots=2,  # the trainer's default on GPUs
        compute_dtype=case.compute_dtype,
    )


def measure(case: Case) -> dict:
    """Compiles one case and reads its program."""
    pipe = pipeline(case)
    num_rows = ROWS * DATA * pipe.schedule.num_microbatches
    batch = {"tokens": jax.ShapeDtypeStruct((num_rows, CONFIG.sequence_length + 1), jnp.int32)}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        updates = optax.sgd(1.0), "step"
        step = compiled(pipe, batch, updates=updates, options={"xla_dump_to": folder})
        (thunks,) = Path(folder).glob("*jit_step*thunk_sequence_after_thunk_passes.txt")
        loops = host_loops(thunks.read_text("utf-8"))
    seconds = time.perf_counter() - start
    text, memory = step.as_text(), step.memory_analysis()
    assert text is not None  # both exist for every backend of jax
    assert memory is not None
    program = HloProgram(text)
    piece = jax.tree.leaves(pipe.layout.layers.piece)
    weights = {tuple(sorted(leaf.shape)) for leaf in piece if len(leaf.shape) > 1}
    # A buffer holds more than one layer of one microbatch; one layer's values are not a buffer.
    leaves = jax.tree.leaves(traced.buffers(pipe, batch))
    buffers = {_squeezed(leaf.shape) for leaf in leaves if math.prod(leaf.shape[:-1]) > 1}
    buffers -= {_squeezed(leaf.struct(sharded=s).shape) for leaf in piece for s in (False, True)}
    predicted = predicted_bytes(pipe, batch)
    return {
        "case": str(case),
        "ticks": pipe.table.num_ticks,
        "slots": pipe.table.num_slots,
        "collectives": [dataclasses.asdict(found) for found in collectives(program)],
        "whole_buffers": [row.text[:200] for row in whole_buffers(program, buffers)],
        "weight_traffic": [dataclasses.asdict(found) for found in weight_traffic(program, weights)],
        "instructions": sum(map(len, program.computations.values())),
        "host_loops": loops,
        "compiled_bytes": memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "predicted_bytes": sum(predicted.values()),
        "compile_seconds": seconds,
    }


def _transfers(found: list[dict], opcodes: tuple[str, ...]) -> str:
    """How each is hidden: "2 in a loop" are two that nothing overlaps but most ticks skip."""
    rows = [row for row in found if row["opcode"] in opcodes]
    gated = sum(row["in_loop"] for row in rows)
    always = ", ".join(str(row["hidden_by"]) for row in rows if not row["in_loop"])
    return "; ".join(filter(None, (always, f"{gated} in a loop" if gated else "")))


def main() -> None:
    """Prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[""], help="parts of names; default all")
    parser.add_argument("--no-flags", action="store_true", help="without jaxpipe's GPU flags")
    options = parser.parse_args()
    if not options.no_flags:
        use_gpu_flags()
    table = Table(
        *("case", "ticks", "messages", "data axis", "copies"),
        *("MB of weights copied", "cast: F, B, W", "instructions", "host loops"),
        *("GB", "predicted", "compiled in"),
        title=f"one tick of the compiled step; XLA_FLAGS={os.environ.get('XLA_FLAGS', '')}",
    )
    results = []
    console = Console(width=160)
    for case in CASES:
        if not any(part in str(case) for part in options.cases):
            continue
        with console.status(f"compiling {case}"):
            result = measure(case)
        results.append(result)
        found = result["collectives"]
        table.add_row(
            str(case),
            str(result["ticks"]),
            _transfers(found, ("collective-permute",)),
            _transfers(found, ("all-gather", "reduce-scatter")),
            str(len(result["whole_buffers"])),
            *(
                ", ".join(f"{found[what] / 1e6:.0f}" for found in result["weight_traffic"])
                for what in ("copied", "cast")
            ),
            str(result["instructions"]),
            str(result["host_loops"]),
            f"{result['compiled_bytes'] / 1e9:.2f}",
            f"{result['predicted_bytes'] / 1e9:.2f}",
            f"{result['compile_seconds']:.0f} s",
        )
    console.print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
