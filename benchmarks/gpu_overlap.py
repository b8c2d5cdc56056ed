"""How much of what layers communicate do matmuls hide, in pairs and one after the other?

Compiles a step whose schedule overlaps forwards with backwards, for 8 layers on 2 stages of the
meshes of `benchmarks/gpu_large.py`, without a GPU, and runs nothing. For every loop over layers of
a tick it prints the modelled time of one layer, and how much of it only waits for collectives.
Memory is what the step takes beside its arguments.

    .venv-gpu/bin/python benchmarks/gpu_overlap.py --model llama-70b --remat dots
    .venv-gpu/bin/python benchmarks/gpu_overlap.py --model mixture-67b --fused --weights unrolled
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from benchmarks import gpu_large
from benchmarks.hlo import HloProgram, scope_of
from benchmarks.kernels import Use
from benchmarks.roofline import Roofline, total
from jaxpipe import schedules
from jaxpipe.planning.without_devices import use_gpu_flags
from jaxpipe.runtime.measure import (
    PLAIN_UPDATES,
    bytes_beside_arguments,
    compiled,
    predicted_bytes,
)
from jaxpipe.schedule.actions import Kind, Schedule
from jaxpipe.schedule.generators.depth_first import depth_first
from jaxpipe.schedule.placement import linear

STAGES, MICROBATCHES, LAYERS = 2, 8, 8


def overlapped_one_f_one_b(stages: int, microbatches: int, *, fused: bool) -> Schedule:
    """1F1B with each forward overlapped with the backward after it.

    A microbatch goes on when a pair has ended, so stages warm up with twice as many forwards.
    """
    schedule = depth_first(
        "1f1b-overlapped-fused" if fused else "1f1b-overlapped",
        linear(stages),
        microbatches,
        warm_ups=range(2 * stages - 1, 0, -2),
        delays=None if fused else (0,) * stages,
    )
    after = itertools.chain.from_iterable(map(itertools.pairwise, schedule.orders))
    forwards = (a for a, b in after if a.kind is Kind.F and b.kind in (Kind.B, Kind.BW))
    return dataclasses.replace(schedule, overlapped=tuple(forwards))


def waits(program: HloProgram) -> dict[str, tuple[float, float]]:
    """The modelled milliseconds of a layer by loop, and of them those that wait for collectives.

    Loops of the same actions, such as those of several chunks, count by their mean.
    """
    roofline, by_loop = Roofline(program, set()), dict[str, list[tuple[float, float]]]()
    for body in program.tick_bodies().values():
        for loop in program.loops(body):
            spent = roofline.body(loop.calls["body"])
            if (scope := scope_of(loop)) and scope.name.isupper():
                times = 1e3 * total(spent), 1e3 * spent[Use.TRANSFERS]
                by_loop.setdefault(scope.name, []).append(times)
    return {name: tuple(np.mean(times, axis=0)) for name, times in by_loop.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=gpu_large.MODELS, default="llama-70b")
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--weights", default="stacked")
    parser.add_argument("--fused", action="store_true", help="1F1B in place of DualPipe-V")
    args = parser.parse_args()
    use_gpu_flags()
    config, sizes = gpu_large.MODELS[args.model]
    config = dataclasses.replace(config, num_layers=LAYERS)
    sizes = sizes | {"stage": STAGES} | ({"data": 1} if "expert" not in sizes else {})
    schedule = schedules.build("dualpipe-v-published", stages=STAGES, microbatches=MICROBATCHES)
    if args.fused:
        schedule = overlapped_one_f_one_b(STAGES, MICROBATCHES, fused=True)
    tokens = sizes["data"] * MICROBATCHES, config.sequence_length + 1
    batch = {"tokens": jax.ShapeDtypeStruct(tokens, "int32")}
    for pair_layers in (False, True):
        options = {"remat": args.remat, "weights": args.weights, "pair_layers": pair_layers}
        pipe = gpu_large.pipeline(config, sizes, schedule=schedule, zero=0, **options)
        began = time.process_time()
        step = compiled(pipe, batch, updates=PLAIN_UPDATES)
        seconds, size = time.process_time() - began, bytes_beside_arguments(step)
        predicted = sum(predicted_bytes(pipe, batch).values())
        print(
            f"{'in pairs' if pair_layers else 'one after the other'}: {size / 1e9:.2f} GB, "
            f"predicted {predicted / 1e9:.2f} GB, compiled in {seconds:.0f} CPU s",
            flush=True,
        )
        for name, (layer, waiting) in waits(HloProgram(step.as_text())).items():
            print(f"  {name}: {layer:.2f} ms per layer, {waiting:.2f} of them wait", flush=True)


if __name__ == "__main__":
    main()
