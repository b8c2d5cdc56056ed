"""Does a step take the time that the simulator says?

A layer that sleeps takes wall time without a core, so the bubble of 8 stages shows on 2 cores. F, B
and W sleep their own times; the layer is an ordinary one with a custom derivative. Every schedule
runs with one whole action a tick and in slices.

    python benchmarks/bubble.py [--stages 8] [--microbatches 16] [--costs 1 1.2 0.8]
        [--layers-per-chunk 4] [--chunk-seconds 0.04] [--names 1f1b zb-v auto]
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=16")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

import jaxpipe
from jaxpipe.schedule.simulate import Costs, lock_step, simulate
from jaxpipe.schedule.slices import slice_ticks

RESULTS = Path(__file__).parent / "results" / "bubble.json"
NAMES = (
    *("gpipe", "1f1b", "1f1b-fused", "interleaved", "breadth-first", "hanayo", "zb-h1"),
    *("zb-v", "v-half", "v-min", "auto"),
)
WIDTH = 8
ROUNDS = 3


def sleep(value: jax.Array, seconds: float) -> jax.Array:
    """The value, after a while."""

    def wait(value):
        time.sleep(seconds)
        return value

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(value.shape, value.dtype), value)


def sleeping_model(seconds: Costs) -> jaxpipe.Model:
    """A model whose layers take these times for F, B and W."""

    @jax.custom_vjp
    def layer(w, x):
        return sleep(x, seconds.f) + 0 * w

    def forward(w, x):
        return layer(w, x), x

    def backward(x, dy):
        return sleep(jnp.sum(dy * x, axis=0), seconds.w), sleep(dy, seconds.b)

    layer.defvjp(forward, backward)
    return jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=lambda w, x, batch, rng: layer(w, x),
        head_loss=lambda outer, x, batch, rng: jnp.mean(x**2),
    )


def measure(schedule, seconds: Costs, layers_per_chunk: int) -> dict[str, float]:
    """Executes a schedule; times in seconds."""
    stages, m = schedule.num_stages, schedule.num_microbatches
    num_layers = layers_per_chunk * schedule.placement.num_virtual_stages
    params = {"embed": {}, "layers": jnp.ones((num_layers, WIDTH)), "head": {}}
    a_layer = dataclasses.replace(
        seconds, **{kind: getattr(seconds, kind) / layers_per_chunk for kind in ("f", "b", "w")}
    )
    mesh = jaxpipe.make_mesh(stage=stages)
    pipe = jaxpipe.Pipeline(sleeping_model(a_layer), params, schedule=schedule, mesh=mesh)
    placed, batch = pipe.place(params), {"x": jnp.ones((m, WIDTH))}
    step = jax.jit(pipe.value_and_grad).lower(placed, batch).compile()
    times = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        jax.block_until_ready(step(placed, batch))
        times.append(time.perf_counter() - began)
    work = m * schedule.num_chunks * (seconds.f + seconds.b + seconds.w)
    executed, locked = statistics.median(times[1:]), lock_step(schedule, seconds)
    return {
        "ticks": pipe.table.num_ticks,
        "executed": executed,
        "lock_step": locked.makespan,
        "executed_bubble": 1 - work / executed,
        "lock_step_bubble": locked.bubble_ratio,
        "free_running_bubble": simulate(schedule, seconds).bubble_ratio,
    }


def main(
    stages: int = 8,
    microbatches: int = 16,
    costs: tuple[float, float, float] = (1.0, 1.2, 0.8),
    layers_per_chunk: int = 4,
    chunk_seconds: float = 0.04,
    names: tuple[str, ...] = NAMES,
) -> None:
    """Prints the table and writes it as JSON.

    Args:
      stages: p, at most 16.
      microbatches: m.
      costs: of F, B and W, relative.
      layers_per_chunk: layers of every chunk.
      chunk_seconds: what one unit of the costs takes, for all chunks of a stage together.
      names: schedules to run.
    """
    console = Console()
    columns = ("schedule", "ticks", "lock-step s", "executed s", "ratio")
    bubbles = ("bubble: free-running", "lock-step", "executed")
    table = Table(*columns, *bubbles, title=f"p={stages} m={microbatches} (F, B, W)={costs}")
    results = {}
    for name in names:
        unit = chunk_seconds
        whole = jaxpipe.schedules.build(
            name,
            stages=stages,
            microbatches=microbatches,
            costs=Costs(*costs),
            layers_per_chunk=layers_per_chunk,
        )
        seconds = Costs(*(unit / whole.num_chunks * cost for cost in costs))
        counts = [layers_per_chunk] * whole.placement.num_virtual_stages
        if whole.slices is None:
            cases = {name: whole, f"{name}, sliced": slice_ticks(whole, seconds, counts)}
        else:
            cases = {name: whole}
        for label, schedule in cases.items():
            console.print(f"running {label}")
            row = results[label] = measure(schedule, seconds, layers_per_chunk)
            table.add_row(
                *(label, str(row["ticks"]), f"{row['lock_step']:.3f}", f"{row['executed']:.3f}"),
                f"{row['executed'] / row['lock_step']:.3f}",
                *(f"{row[f'{clock}_bubble']:.3f}" for clock in ("free_running", "lock_step")),
                f"{row['executed_bubble']:.3f}",
            )
    console.print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {RESULTS}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
