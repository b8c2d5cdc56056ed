"""How much of what layers communicate do matmuls hide, in pairs, in pieces and without?

Compiles a step for 8 layers on 2 stages of the meshes of `benchmarks/gpu_large.py`, without a GPU,
and runs nothing. If the schedule overlaps forwards with backwards, layers run one after the other
and in pairs; with any other schedule whole, and in pieces of the sequence (`models.pieces`). For
every loop over layers of a tick it prints the modelled time of one layer, how long its collectives
take, how much of that no computation hides, and how many collectives of more than 1 MB have a
matmul between start and end. Memory is what the step takes beside its arguments.

    .venv-gpu/bin/python benchmarks/gpu_overlap.py --model llama-70b --remat dots
    .venv-gpu/bin/python benchmarks/gpu_overlap.py --schedule zb-v --tensor 4 --weights unrolled
    .venv-gpu/bin/python benchmarks/gpu_overlap.py --model mixture-67b --weights unrolled \\
        --schedule interleaved-overlapped-fused --chunks 1
    .venv-gpu/bin/python benchmarks/gpu_overlap.py --model mixture-67b --remat full --zero 3 \\
        --stages 8 --layers 32
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from benchmarks import gpu_large
from benchmarks.hlo import HloProgram, layers_of, scope_of
from benchmarks.kernels import Use, is_kernel, kernel
from benchmarks.roofline import Roofline, total
from jaxpipe import schedules
from jaxpipe.planning.without_devices import attention_of_gpus, use_gpu_flags
from jaxpipe.runtime.memory import PLAIN_UPDATES, bytes_beside_arguments, compiled, predicted_bytes
from models import gpt_block

_COLLECTIVES = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")


class Loop(NamedTuple):
    """A loop over layers of a tick.

    Args:
      layer, communicates, waits: modelled milliseconds of a layer, those of its collectives, and
        those that wait for them.
      collectives, hidden: those above 1 MB, and how many have a matmul between start and end.
    """

    layer: float
    communicates: float
    waits: float
    collectives: float
    hidden: float


def loops(program: HloProgram) -> dict[str, Loop]:
    """The loops by name; those of the same actions, as of several chunks, by their mean."""
    roofline, by_name = Roofline(program, set()), dict[str, list[Loop]]()
    for body in program.tick_bodies().values():
        for loop in program.loops(body):
            if (scope := scope_of(loop)) and scope.name.isupper():
                name = loop.calls["body"]
                spent = roofline.body(name)
                seconds = total(spent), roofline.transfers(name), spent[Use.TRANSFERS]
                found = *seconds, *hidden(program, name)
                scale = [1e3, 1e3, 1e3, 1, 1]
                by_name.setdefault(scope.name, []).append(
                    Loop(*np.multiply(found, scale) / layers_of(loop))
                )
    return {name: Loop(*np.mean(found, axis=0)) for name, found in by_name.items()}


def hidden(program: HloProgram, body: str) -> tuple[int, int]:
    """Counts collectives above 1 MB, and those with a matmul between start and end."""
    rows = program.computations[body]
    numbers = {row.name: number for number, row in enumerate(rows)}
    is_matmul = [is_kernel(row) and kernel(program, body, row, ()).flops > 0 for row in rows]
    count = beside = 0
    for end, row in enumerate(rows):
        starts = row.operands[:1] if row.opcode.endswith("-done") else [row.name]
        start = numbers[starts[0]]
        opcode = rows[start].opcode.removesuffix("-start")
        named = rows[start].text if opcode == "async" else opcode
        is_one = any(name in named for name in _COLLECTIVES)
        if row.opcode.endswith("-start") or not is_one or max(rows[start].bytes) <= 1e6:
            continue
        count += 1
        beside += any(is_matmul[start + 1 : end])
    return count, beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=gpu_large.MODELS, default="llama-70b")
    parser.add_argument("--schedule", default="dualpipe-v-published")
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--weights", default="stacked")
    parser.add_argument("--chunks", type=int, help="default: the schedule's")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--tensor", type=int, help="devices that share a layer; default: the mesh's"
    )
    parser.add_argument("--zero", type=int, default=0)
    args = parser.parse_args()
    use_gpu_flags()
    config, sizes = gpu_large.MODELS[args.model]
    config = dataclasses.replace(config, num_layers=args.layers)
    stages, microbatches = args.stages, 4 * args.stages
    sizes = sizes | {"stage": stages} | ({"data": 1} if "expert" not in sizes else {})
    sizes |= {} if args.tensor is None else {"tensor": args.tensor}
    shape = {"stages": stages, "microbatches": microbatches, "chunks": args.chunks}
    schedule = schedules.build(args.schedule, **shape)
    tokens = sizes["data"] * microbatches, config.sequence_length + 1
    batch = {"tokens": jax.ShapeDtypeStruct(tokens, "int32")}
    options = {"remat": args.remat, "weights": args.weights, "zero": args.zero}
    whole = mock.patch.object(gpt_block, "num_pieces", return_value=1)
    for hides in (False, True):
        if schedule.overlapped:
            options["pair_layers"] = hides
        with attention_of_gpus(), contextlib.nullcontext() if hides else whole:
            pipe = gpu_large.pipeline(config, sizes, schedule=schedule, **options)
            began = time.process_time()
            step = compiled(pipe, batch, updates=PLAIN_UPDATES)
            seconds, size = time.process_time() - began, bytes_beside_arguments(step)
            predicted = sum(predicted_bytes(pipe, batch).values())
        how = "in pairs" if schedule.overlapped else "in pieces"
        print(
            f"{how if hides else 'without'}: {size / 1e9:.2f} GB, "
            f"predicted {predicted / 1e9:.2f} GB, compiled in {seconds:.0f} CPU s",
            flush=True,
        )
        for name, loop in loops(HloProgram(step.as_text())).items():
            print(
                f"  {name}: {loop.layer:.2f} ms per layer, {loop.communicates:.2f} of "
                f"collectives, {loop.waits:.2f} exposed; "
                f"{loop.hidden:g} of {loop.collectives:g} collectives have a matmul beside",
                flush=True,
            )


if __name__ == "__main__":
    main()
