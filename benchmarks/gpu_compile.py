"""What does XLA compile the training step to on H100s? Needs no GPU, and runs nothing.

GPT, width 2048, 4 layers per chunk, bfloat16 compute, on 8 GPUs of one host and on 2 hosts of 8.
The scheduled program and its launch sequence (thunks) show, for one tick:

- messages: how many layer loops run between the start and the end of a late one, and how many sets
  of edges ticks choose from for the others; below the table stand the edges themselves;
- data axis: the same loops for gathers and reductions; one "in a loop" leaves only in gated ticks;
- copies: whole buffers copied or written anew;
- branches: what else than messages is computed in the conditional that sends them;
- weights: bytes of weights and of their gradient sums that a layer copies, and that it casts;
- host waits: for loops outside CUDA graphs, and for conditionals;
- memory: temporaries, with an update by plain SGD, against
  `jaxpipe.measure.predicted_bytes`.

The edges have to be those of the tick table, and with fp8 all operands of matmuls of weights 8-bit.
MXFP8 is compiled for B200s.

Kernels are not tuned without a GPU: nothing here is a speed. Attention is XLA's, not cuDNN's.

    make gpu-compile
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jaxpipe
from benchmarks.compiled_ticks import (
    bodies_by_place,
    buffer_shapes,
    check_edges,
    collectives,
    edges_of_stages,
    ends_tick,
    fused,
    loop_bodies,
    squeezed,
    transfers,
    whole_buffers,
)
from benchmarks.hlo import HloProgram, Instruction, layers_of
from jaxpipe.planning.without_devices import (
    GPUS_PER_HOST,
    attention_of_gpus,
    gpus,
    use_gpu_flags,
)
from jaxpipe.runtime.memory import PLAIN_UPDATES, bytes_beside_arguments, compiled, predicted_bytes
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.device_clock import cuts
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.simulate import Costs
from models import gpt

RESULTS = Path(__file__).parent / "results" / "gpu_compile.json"
LAYERS_PER_CHUNK, ROWS, DATA = 4, 2, 2
# No two of rows x sequence, width, hidden and qkv width are equal: shapes identify arrays.
CONFIG = gpt.GPTConfig(
    vocab_size=32768, sequence_length=1536, num_layers=16, width=2048, num_heads=16,
    dtype="bfloat16",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled step: hosts of 8 GPUs, a schedule, a ZeRO level, the layout of the weights,
    layers per chunk, the dtype of the copies that layers read, what is recomputed, chunks per
    stage, where the vocabulary lies (split over all stages, at the ends of the pipeline, there
    beside "equal" chunks, or where the trainer puts it, "auto"), the recipe of 8-bit matmuls of
    weights, data shards, and the kinds of layers: one; two of equal work in turn; linear
    attention, as Qwen3-Next has it; that and full attention in every fourth layer, "hybrid";
    mixtures of experts, of which the first three layers may be dense.
    """

    hosts: int
    schedule: str
    zero: int = 0
    weights: str = "stacked"
    layers: int = LAYERS_PER_CHUNK
    compute_dtype: str | None = None
    remat: str = "dots"
    chunks: int | None = None
    vocabulary: str = "split"
    fp8: str | None = None
    data: int = DATA
    kinds: str = "one"

    @property
    def config(self) -> gpt.GPTConfig:
        """The model, but for its depth."""
        if self.kinds in ("one", "two"):
            return CONFIG
        if self.kinds.startswith("experts"):
            dense = 3 if self.kinds.endswith("dense first") else None
            return dataclasses.replace(
                CONFIG, num_experts=32, expert_width=2048, capacity_factor=1.25, dense_layers=dense
            )
        every = 4 if self.kinds == "hybrid" else None
        return dataclasses.replace(
            CONFIG, linear_heads=16, linear_value_heads=32, global_every=every
        )

    @property
    def stages(self) -> int:
        return 8 * self.hosts // self.data

    @property
    def device(self) -> str:
        return "b200" if self.fp8 == "mxfp8" else "h100"

    def __str__(self) -> str:
        name = self.schedule
        name += f", ZeRO-{self.zero}" if self.zero else ""
        name += "" if self.chunks is None else f", {self.chunks} chunks"
        name += ", vocabulary at the ends" if self.vocabulary == "ends" else ""
        name = f"{self.hosts} x 8, {name}, {self.layers} layers, {self.weights}"
        name += f", {self.fp8} fp8" if self.fp8 else ""
        return name if self.compute_dtype is None else f"{name}, {self.compute_dtype}"


CASES = list(dict.fromkeys([
    Case(hosts, name, zero=zero, weights="unrolled")
    for hosts in (1, 2)
    for name in ("1f1b", "1f1b-fused", "zb-v", "breadth-first")
    for zero in (0, 3)
] + [
    Case(1, name, weights="unrolled", vocabulary="ends") for name in ("1f1b-fused", "zb-v")
] + [
    Case(1, "breadth-first", zero=zero, remat="full", compute_dtype="bfloat16", chunks=4)
    for zero in (0, 2, 3)
] + [
    Case(1, "1f1b", zero=zero, weights=weights, compute_dtype="bfloat16")
    for zero in (0, 3)
    for weights in ("stacked", "unrolled")
] + [
    Case(1, name, zero=3, weights="unrolled", compute_dtype="bfloat16", fp8="tensorwise")
    for name in ("1f1b", "zb-v", "breadth-first")
] + [
    Case(1, name, zero=3, weights="unrolled", compute_dtype="bfloat16", fp8="mxfp8")
    for name in ("1f1b", "zb-v")
] + [
    Case(1, name, zero=zero, weights=weights, layers=layers)
    for layers, name, zero, weights in (
        (4, "1f1b", 0, "stacked"), (4, "zb-v", 0, "stacked"), (4, "zb-v", 3, "stacked"),
        (4, "1f1b", 1, "unrolled"), (4, "1f1b", 2, "stacked"), (4, "1f1b", 2, "unrolled"),
        (4, "1f1b", 3, "stacked"),
        (16, "1f1b", 0, "stacked"), (16, "1f1b", 0, "unrolled"),
        (16, "1f1b", 3, "unrolled"), (8, "zb-v", 3, "unrolled"),
        (32, "1f1b", 0, "stacked"), (32, "1f1b", 0, "unrolled"),
    )
]))  # fmt: skip


# The program as text.


_PLUMBING = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant")


def beside_messages(program: HloProgram) -> list[Instruction]:
    """Lists what branches of ticks compute from their operands, messages apart."""
    return [
        row
        for tick in program.tick_bodies().values()
        for place, body in bodies_by_place(program, tick)
        if place.startswith("branch")
        for row in program.computations[body]
        if row.opcode not in _PLUMBING
        and not row.opcode.startswith("collective-permute")
        and any(one.opcode == "parameter" for one in program.before(body, row))
    ]


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
        [_traffic(program, loop, shapes) for loop in loops]
        for loops in program.layer_loops().values()
    ]
    return [
        WeightTraffic(max(one.copied for one in loops), max(one.cast for one in loops))
        for loops in passes
    ]


def _traffic(program: HloProgram, loop: Instruction, shapes: set[tuple[int, ...]]) -> WeightTraffic:
    copied = cast = 0
    for body in loop_bodies(program, loop.calls["body"]):
        for row in program.computations[body]:
            inside = {i.opcode for i in fused(program, row)} | {row.opcode}
            # The layer's own gradient is added in place: a copy would be one more.
            moves = bool(inside & {"copy", "transpose", "slice", "dynamic-slice"})
            if "dot" in inside or not (moves or "convert" in inside):
                continue
            size = sum(
                size
                for shape, size in zip(row.shapes, row.bytes, strict=True)
                if tuple(sorted(squeezed(shape))) in shapes
            )
            copied += size * moves
            cast += size * (not moves)
    return WeightTraffic(copied // layers_of(loop), cast // layers_of(loop))


def weight_matmuls(program: HloProgram) -> dict[str, dict[str, int]]:
    """The dtypes of the operands of matmuls without batch dimensions in the loops over layers, and
    how many matmuls have them, by pass."""
    found: dict[str, Counter[str]] = {}
    for name, loops in program.layer_loops().items():
        counts = found.setdefault(name, Counter())
        for loop in loops:
            for computation in _computations(program, loop.calls["body"]):
                for row in program.computations[computation]:
                    of_weights = row.opcode == "dot" and "batch_dims" not in row.text
                    if of_weights or "blockScaledDot" in row.text:
                        read = program.operands(computation, row)[:2]
                        dtypes = (one.text.split(" = ")[1].partition("[")[0] for one in read)
                        counts[" x ".join(dtypes)] += 1
    return {name: dict(counts) for name, counts in found.items()}


def _computations(program: HloProgram, computation: str) -> Iterator[str]:
    """Yields a computation and all that it calls."""
    yield computation
    for row in program.computations[computation]:
        for called in row.calls.values():
            yield from _computations(program, called)


def host_waits(thunks: str) -> tuple[int, int]:
    """Loops and conditionals of one tick that are in no CUDA graph: before each iteration of a loop
    the host waits for the device to say whether there is one, and before a conditional for the
    branch. The most of any kind of tick."""
    rows = [
        (len(found[1]), found[2])
        for line in thunks.splitlines()
        if (found := re.match(r"(\s*)\d+: (k\w+)", line))
    ]
    counts = [Counter[str]()]
    path: list[tuple[int, str]] = []
    for depth, kind in rows:
        while path and path[-1][0] >= depth:
            path.pop()
        if kind == "kWhile" and not path:
            counts.append(Counter())
        # The tick loops are the entry's only loops with loops in them.
        counts[-1][kind] += [name for _, name in path] == ["kWhile"]
        path.append((depth, kind))
    most = max(counts, key=lambda count: count["kWhile"] + count["kConditional"])
    return most["kWhile"], most["kConditional"]


# One case.


def pipeline(case: Case) -> jaxpipe.Pipeline:
    """The case's pipeline over H100s that need not exist."""
    m = 4 * case.stages
    schedule = jaxpipe.schedules.build(
        case.schedule, stages=case.stages, microbatches=m, chunks=case.chunks
    )
    num_layers = case.layers * schedule.placement.num_virtual_stages
    config = dataclasses.replace(case.config, num_layers=num_layers)
    counts = {
        "auto": chosen_counts,
        "ends": _counts_beside_ends,
        "equal": lambda *_: partition([1.0] * num_layers, schedule.placement),
        "split": lambda *_: None,
    }
    layer_counts = counts[case.vocabulary](config, schedule)
    devices = gpus(case.device, case.hosts * GPUS_PER_HOST)
    model = gpt.model(config, vocabulary_axis="stage" if layer_counts is None else None)
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    if case.kinds == "two":
        functions = model.layer, functools.partial(model.layer)
        model = dataclasses.replace(model, layer=functions * (num_layers // 2))
        layer = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), params["layers"])
        params["layers"] = (layer,) * num_layers
    return jaxpipe.Pipeline(
        model,
        params,
        schedule=schedule,
        mesh=jaxpipe.make_mesh(stage=case.stages, data=case.data, devices=devices),
        remat=case.remat,
        zero=case.zero,
        weights=case.weights,
        weight_slots=2,  # the trainer's default on GPUs
        compute_dtype=case.compute_dtype,
        fp8="*kernel" if case.fp8 else (),
        fp8_recipe=case.fp8 or "tensorwise",
        layer_counts=layer_counts,
    )


def chosen_counts(config: gpt.GPTConfig, schedule: Schedule) -> tuple[int, ...] | None:
    """The layers of every chunk where the ends compute embedding and head, or None where all stages
    do: whatever takes less time on the device clock, as the trainer chooses."""
    even, head = [1.0] * config.num_layers, _head_layers(config)
    fastest, *_ = cuts(schedule, Costs(1, 1, 1), even, 0.0, head)
    return None if fastest.together else fastest.layer_counts


def _counts_beside_ends(config: gpt.GPTConfig, schedule: Schedule) -> tuple[int, ...]:
    loads = [1.0] * (config.num_layers - 1) + [1 + _head_layers(config)]
    return partition(loads, schedule.placement)


def _head_layers(config: gpt.GPTConfig) -> float:
    """How many layers the head stands for, by FLOPs."""
    one_more = dataclasses.replace(config, num_layers=config.num_layers + 1)
    layer = gpt.flops_per_token(one_more) - gpt.flops_per_token(config)
    return gpt.flops_per_token(config) / layer - config.num_layers


def measure(case: Case) -> dict:
    """Compiles one case and reads its program."""
    with attention_of_gpus(compute_capability="10.0" if case.device == "b200" else "9.0"):
        return _measure(case, pipeline(case))


def _measure(case: Case, pipe: jaxpipe.Pipeline) -> dict:
    num_rows = ROWS * DATA * pipe.schedule.num_microbatches
    batch = {"tokens": jax.ShapeDtypeStruct((num_rows, CONFIG.sequence_length + 1), jnp.int32)}
    start = sum(os.times()[:4])  # of this process and of those that it waits for
    with tempfile.TemporaryDirectory() as folder:
        step = compiled(pipe, batch, updates=PLAIN_UPDATES, options={"xla_dump_to": folder})
        (thunks,) = Path(folder).glob("*jit_step*thunk_sequence_after_thunk_passes.txt")
        loops, conditionals = host_waits(thunks.read_text("utf-8"))
    seconds = sum(os.times()[:4]) - start
    text = step.as_text()
    assert text is not None  # every backend of jax has it
    program = HloProgram(text)
    piece = jax.tree.leaves(pipe.layout.layers.piece)
    weights = {tuple(sorted(leaf.shape)) for leaf in piece if len(leaf.shape) > 1}
    moved = [
        dataclasses.replace(one, pairs=edges_of_stages(one.pairs, pipe.mesh))
        for one in collectives(program)
    ]
    check_edges([one for one in moved if one.opcode == "collective-permute"], pipe.table)
    buffers = buffer_shapes(pipe, batch)
    predicted, matmuls = predicted_bytes(pipe, batch), weight_matmuls(program)
    if case.fp8:
        operands = {dtype for by in matmuls.values() for pair in by for dtype in pair.split(" x ")}
        others = {"f8e5m2"} if case.fp8 == "tensorwise" else set()
        assert operands == {"f8e4m3fn"} | others, matmuls
    return {
        "case": str(case),
        "ticks": pipe.table.num_ticks,
        "slots": pipe.table.num_slots,
        "collectives": [dataclasses.asdict(found) for found in moved],
        "beside_messages": [row.text[:200] for row in beside_messages(program)],
        "whole_buffers": [row.text[:200] for row in whole_buffers(program, buffers)],
        "weight_matmuls": matmuls,
        "weight_traffic": [dataclasses.asdict(found) for found in weight_traffic(program, weights)],
        "instructions": sum(map(len, program.computations.values())),
        "host_loops": loops,
        "host_conditionals": conditionals,
        "compiled_bytes": bytes_beside_arguments(step),
        "predicted_bytes": sum(predicted.values()),
        "compile_cpu_seconds": seconds,
    }


def _edges(found: list[dict]) -> list[str]:
    """The edges of all messages, a line for each set that they leave in."""
    lines: dict[str, list[str]] = {}
    for one in found:
        if one["opcode"] == "collective-permute":
            late = f"late, under {one['hidden_by']} loops" if one["place"] == "tick" else ""
            pairs = " ".join(f"{sender}>{receiver}" for sender, receiver in one["pairs"])
            pairs += f" ({one['arrays']} messages)" if one["arrays"] > 1 else ""
            lines.setdefault(f"{one['tick']}, {late or one['place']}", []).append(pairs)
    return [f"{place}: {'; '.join(sets)}" for place, sets in lines.items()]


def main() -> None:
    """Prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[""], help="parts of names; default all")
    parser.add_argument("--no-flags", action="store_true", help="without jaxpipe's GPU flags")
    options = parser.parse_args()
    if not options.no_flags:
        use_gpu_flags()
    table = Table(
        *("case", "ticks", "late messages", "other sets", "data axis", "copies", "in branches"),
        *("MB of weights copied", "cast: F, B, W", "instructions", "host waits"),
        *("GB", "predicted", "CPU s"),
        title=f"one tick of the compiled step; XLA_FLAGS={os.environ.get('XLA_FLAGS', '')}",
    )
    results = []
    console = Console(width=200)
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
            transfers(found, ("collective-permute",)),
            str(len({(one["tick"], one["place"]) for one in found if ends_tick(one)})),
            transfers(found, ("all-gather", "reduce-scatter")),
            str(len(result["whole_buffers"])),
            str(len(result["beside_messages"])),
            *(
                ", ".join(f"{found[what] / 1e6:.0f}" for found in result["weight_traffic"])
                for what in ("copied", "cast")
            ),
            str(result["instructions"]),
            f"{result['host_loops']} + {result['host_conditionals']}",
            f"{result['compiled_bytes'] / 1e9:.2f}",
            f"{result['predicted_bytes'] / 1e9:.2f}",
            f"{result['compile_cpu_seconds']:.0f}",
        )
    console.print(table)
    for result in results:
        console.print(result["case"], *_edges(result["collectives"]), sep="\n  ", highlight=False)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
