"""Compiles the training step for TPUs, and reads the program. Needs no TPU, and runs nothing.

GPT, width 1024, 2 layers per chunk, bfloat16 compute, on 8 chips of TPU v5e, of one slice or of
two: 4 stages x 2 data shards, 16 microbatches of 2 rows. The scheduled program shows, for one tick:

- late messages and data axis: how many layer loops run between the start and the end of each
  transfer, 0 if it is synchronous; one "in a loop" leaves only in gated ticks;
- other sets: how many sets of edges ticks choose from for other messages;
- across slices: the loops that hide what goes over the data center's network;
- copies: whole buffers copied or written anew, and moves of small ones into the vector memory or
  back;
- memory: temporaries, with an update by plain SGD, against
  `jaxpipe.measure.predicted_bytes`;
- code: the size of the machine code, on which the seconds of CPU time depend.

In one slice the edges have to be those of the tick table. The first row is the training step of one
device, the same layers without a pipeline. Nothing here is a speed.

    make tpu-compile
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ["JAX_PLATFORMS"] = "cpu"
    # libtpu would ask the cloud which machine this is, and let no other process load it.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from rich.console import Console
from rich.table import Table

import jaxpipe
from benchmarks.compiled_ticks import (
    buffer_shapes,
    check_edges,
    collectives,
    edges_of_stages,
    ends_tick,
    transfers,
    whole_buffers,
)
from benchmarks.hlo import HloProgram
from benchmarks.plain_steps import plain_step
from jaxpipe.runtime.memory import PLAIN_UPDATES, bytes_beside_arguments, compiled, predicted_bytes
from models import gpt

RESULTS = Path(__file__).parent / "results" / "tpu_compile.json"
TOPOLOGIES = {
    1: {"topology_name": "v5e:2x4"},
    2: {"topology_name": "v5e:2x2", "num_slices": 2},
}
LAYERS_PER_CHUNK, ROWS, STAGES, DATA, MICROBATCHES = 2, 2, 4, 2, 16
# No two of rows x sequence, width, hidden and qkv width are equal: shapes identify arrays.
CONFIG = gpt.GPTConfig(
    vocab_size=32768, sequence_length=1280, num_layers=LAYERS_PER_CHUNK, width=1024, num_heads=8,
    dtype="bfloat16",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled step: a schedule, a ZeRO level, the layout of the weights, and slices."""

    schedule: str
    zero: int
    weights: str
    slices: int = 1

    def __str__(self) -> str:
        name = f"{self.schedule}, ZeRO-{self.zero}, {self.weights}"
        return name if self.slices == 1 else f"{name}, {self.slices} slices"


CASES = [
    Case(schedule, zero, weights)
    for schedule, weights in (
        ("1f1b", "stacked"), ("1f1b", "unrolled"), ("zb-v", "unrolled"),
        ("breadth-first", "unrolled"),
    )
    for zero in (0, 3)
] + [Case(schedule, 0, "unrolled", slices=2) for schedule in ("1f1b", "zb-v")]  # fmt: skip


def chips(slices: int) -> list[jax.Device]:
    """The chips of TPUs that need not exist."""
    return topologies.get_topology_desc(platform="tpu", **TOPOLOGIES[slices]).devices


def pipeline(case: Case) -> jaxpipe.Pipeline:
    """The case's pipeline over those chips."""
    schedule = jaxpipe.schedules.build(case.schedule, stages=STAGES, microbatches=MICROBATCHES)
    num_layers = LAYERS_PER_CHUNK * schedule.placement.num_virtual_stages
    config = dataclasses.replace(CONFIG, num_layers=num_layers)
    return jaxpipe.Pipeline(
        gpt.model(config, vocabulary_axis="stage"),
        jax.eval_shape(lambda: gpt.init(config, jax.random.key(0))),
        schedule=schedule,
        mesh=jaxpipe.make_mesh(stage=STAGES, data=DATA, devices=chips(case.slices)),
        remat="dots",
        zero=case.zero,
        weights=case.weights,
        weight_slots=2,
        compute_dtype="bfloat16",
    )


def measure(case: Case, options: dict[str, Any]) -> dict:
    """Compiles one case with these options of XLA, and reads its program."""
    pipe = pipeline(case)
    num_rows = ROWS * DATA * MICROBATCHES
    batch = {"tokens": jax.ShapeDtypeStruct((num_rows, CONFIG.sequence_length + 1), jnp.int32)}
    result = _compiled(
        str(case), lambda: compiled(pipe, batch, updates=PLAIN_UPDATES, options=options)
    )
    program = HloProgram(result.pop("text"))
    moved = [
        dataclasses.replace(one, pairs=edges_of_stages(one.pairs, pipe.mesh))
        for one in collectives(program)
    ]
    # What is left of a reduction whose parts do not fill tiles goes from data shard to data shard.
    moved = [
        one
        for one in moved
        if one.opcode != "collective-permute" or any(a != b for a, b in one.pairs)
    ]
    if case.slices == 1:
        check_edges([one for one in moved if one.opcode == "collective-permute"], pipe.table)
    # A copy with a start and an end is one between two memories.
    found = whole_buffers(program, buffer_shapes(pipe, batch))
    copies = [row.text[:200] for row in found if row.opcode != "copy-start"]
    return result | {
        "ticks": pipe.table.num_ticks,
        "collectives": [dataclasses.asdict(found) for found in moved],
        "whole_buffers": copies,
        "buffer_moves": len(found) - len(copies),
        "instructions": sum(map(len, program.computations.values())),
        "predicted_bytes": sum(predicted_bytes(pipe, batch).values()),
    }


def without_pipeline() -> dict:
    """Compiles the step of one chip for the layers of one stage."""
    tokens = MICROBATCHES, ROWS, CONFIG.sequence_length + 1
    result = _compiled(
        "1 chip, no pipeline", lambda: plain_step(CONFIG, "dots", chips(1)[0], tokens)
    )
    return result | {"instructions": result.pop("text").count(" = ")}


def _compiled(name: str, compile_step: Callable[[], jax.stages.Compiled]) -> dict:
    """A compiled step's name, text and size, and the CPU seconds that it took."""
    start = time.process_time()
    step = compile_step()
    seconds, memory = time.process_time() - start, step.memory_analysis()
    assert memory is not None  # every backend of jax has one
    return {
        "case": name,
        "text": step.as_text(),
        "compiled_bytes": bytes_beside_arguments(step),
        "code_bytes": memory.generated_code_size_in_bytes,
        "compile_cpu_seconds": seconds,
    }


def main() -> None:
    """Prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[""], help="parts of names; default all")
    parser.add_argument(
        "--options", type=json.loads, default={}, help='of XLA, such as {"xla_tpu_...": true}'
    )
    arguments = parser.parse_args()
    console = Console(width=160)
    results = [without_pipeline()]
    for case in CASES:
        if any(part in str(case) for part in arguments.cases):
            with console.status(f"compiling {case}"):
                results.append(measure(case, arguments.options))
    console.print(_table(results, arguments.options))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {RESULTS}")


def _table(results: list[dict], options: dict[str, Any]) -> Table:
    table = Table(
        *("case", "ticks", "late messages", "other sets", "across slices", "data axis"),
        *("copies", "instructions", "GB", "predicted", "MB of code", "CPU s"),
        title=f"one tick of the compiled step on TPUs v5e; XLA's options: {options}",
    )
    for result in results:
        found = result.get("collectives", [])
        table.add_row(
            result["case"],
            str(result.get("ticks", "")),
            transfers(found, ("collective-permute",)),
            str(len({(one["tick"], one["place"]) for one in found if ends_tick(one)})),
            transfers(found, ("send",)),
            transfers(found, ("all-gather", "reduce-scatter")),
            f"{len(result.get('whole_buffers', ()))} + {result.get('buffer_moves', 0)}",
            str(result["instructions"]),
            f"{result['compiled_bytes'] / 1e9:.2f}",
            f"{result.get('predicted_bytes', 0) / 1e9:.2f}",
            f"{result['code_bytes'] / 1e6:.0f}",
            f"{result['compile_cpu_seconds']:.0f}",
        )
    return table


if __name__ == "__main__":
    main()
