"""Transfers of a training step on H100s that no computation hides. Needs no GPU, and runs nothing.

Compiles a step with Adam of the GPT of `benchmarks/gpu_compile.py`, or of Llama 70B where tensor
devices share its layers, models it as `benchmarks/gpu_roofline.py` does, and tells transfers apart
by the mesh axes that they connect. For each it prints the milliseconds that it takes in a step, the
mean over stages, and those of them in which nothing else runs; for each axis also how much shorter
the step would be without. A stage that waits for others, as for its first message, has nothing to
run beside its transfers, and the step is no longer for them.

    .venv-gpu/bin/python benchmarks/gpu_exposed.py --schedules 1f1b-fused interleaved-fused --data 4
    .venv-gpu/bin/python benchmarks/gpu_exposed.py --schedules zb-v --tensor 8 --hosts 2 --zero 0
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import jaxpipe
from benchmarks import gpu_compile, gpu_large
from benchmarks.hlo import Instruction
from benchmarks.modelled_steps import Step, modelled
from benchmarks.roofline import Roofline, Spent, device_groups, total
from jaxpipe.planning.without_devices import (
    GPUS_PER_HOST,
    attention_of_gpus,
    use_gpu_flags,
)
from jaxpipe.runtime.memory import compiled


class ByAxes(Roofline):
    """A roofline that counts what is exposed by mesh axes and operation: ("data", "all-gather").

    Args:
      mesh: the program's.
      alone: whether only transfers take time, one after the other, so that all of it is exposed.
      free: mesh axes whose transfers take no time, named as in `use_of`; None for none.
    """

    def __init__(
        self, *args: Any, mesh: Mesh, alone: bool = False, free: str | None = None
    ) -> None:
        super().__init__(*args)
        self._mesh, self._alone, self._free = mesh, alone, free
        self.overlaps = not alone
        if alone:
            self.launch = self.wait = 0.0

    def use_of(self, transfer: Instruction) -> tuple[str, str]:
        groups = device_groups(transfer.text)
        own = next((group for group in groups if self.device in group), groups[0])
        numbers = np.unravel_index(own, self._mesh.devices.shape)
        varied = zip(self._mesh.axis_names, map(np.ptp, numbers), strict=True)
        return "+".join(name for name, by in varied if by), transfer.opcode.removesuffix("-start")

    def _transfer_seconds(self, computation: str, row: Instruction) -> float:
        taken = self.use_of(row)[0] != self._free
        return taken * super()._transfer_seconds(computation, row)

    def _kernel(self, computation: str, row: Instruction) -> Spent:
        return Counter() if self._alone else super()._kernel(computation, row)


def rows_of(exposed: Spent, moved: Spent) -> list[tuple[str, float, float]]:
    """Names of transfers, their milliseconds in a step, and those that are exposed; last of each
    axis the sum."""
    uses = sorted(
        use for use, seconds in moved.items() if isinstance(use, tuple) and seconds > 1e-5
    )
    found = {use: [use] for use in uses}
    for axes, _ in uses:
        found[axes, "in all"] = [use for use in uses if use[0] == axes]
    return [
        (" ".join(name), *(1e3 * sum(spent[use] for use in of_name) for spent in (moved, exposed)))
        for name, of_name in found.items()
    ]


def measure(args: argparse.Namespace, name: str) -> None:
    """Compiles the step of one schedule, and prints what it moves."""
    large = args.tensor > 1
    config = gpu_large.LLAMA_70B if large else gpu_compile.CONFIG
    stages = args.hosts * GPUS_PER_HOST // (args.data * args.tensor)
    config = dataclasses.replace(config, num_layers=args.layers * stages)
    sizes = {"stage": stages, "data": args.data} | ({"tensor": args.tensor} if large else {})
    schedule = jaxpipe.schedules.build(
        name, stages=stages, microbatches=4 * stages, chunks=args.chunks
    )
    pipe = gpu_large.pipeline(
        config,
        sizes,
        remat="dots",
        schedule=schedule,
        zero=args.zero,
        weights="unrolled",
        weight_slots=args.slots or schedule.num_chunks,
    )
    rows = (1 if large else gpu_compile.ROWS) * args.data * schedule.num_microbatches
    batch = {"tokens": jax.ShapeDtypeStruct((rows, config.sequence_length + 1), "int32")}
    began = time.process_time()
    step = compiled(pipe, batch, updates=(optax.adam(1e-3), "step"))
    seconds = time.process_time() - began

    def model(**options: Any) -> Step:
        return modelled(pipe, step, config, partial(ByAxes, mesh=pipe.mesh, **options))

    found, moved = model(), model(alone=True)
    layer = sum(map(total, found.passes.values()))
    print(
        f"{name} on {sizes}: {found.seconds * 1e3:.1f} ms, {layer * 1e3:.3f} ms per layer, "
        f"{found.bytes / 1e9:.2f} GB, compiled in {seconds:.0f} CPU s"
    )
    for what, all_of_it, exposed in rows_of(found.spent, moved.spent):
        line = (
            f"  {what:32} {all_of_it:8.2f} ms, {exposed:8.2f} exposed ({exposed / all_of_it:.1%})"
        )
        if what.endswith(" in all"):
            without = model(free=what.removesuffix(" in all"))
            line += f", {1e3 * (found.seconds - without.seconds):.2f} of the step"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=["1f1b-fused"])
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--layers", type=int, default=4, help="on each stage")
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--slots", type=int, default=2, help="weight slots; 0 for all chunks")
    args = parser.parse_args()
    use_gpu_flags()
    with attention_of_gpus():
        for name in args.schedules:
            measure(args, name)


if __name__ == "__main__":
    main()
