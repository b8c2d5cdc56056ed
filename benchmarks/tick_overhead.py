"""What does a tick cost beside its layers?

With layers that multiply 8 numbers, on 8 simulated stages, nearly all of a step is the overhead of
its ticks. The same with layers that call back to Python, as those of `benchmarks.bubble` do to
sleep, but return at once, shows the part of that benchmark's excess that the callbacks cause.

    python -m benchmarks.tick_overhead [--stages 8] [--microbatches 32] [--names 1f1b zb-v]
"""

from __future__ import annotations

import dataclasses
import os
import statistics

import jax
import jax.numpy as jnp
import tyro

import jaxpipe
from benchmarks import bubble, harness
from jaxpipe.schedule import Costs, build

ROUNDS = 9
AT_ONCE = Costs(1e-9, 1e-9, 1e-9)


def measure(name: str, layers: str, layers_per_chunk: int, stages: int, m: int) -> dict:
    """Median times of a step, divided by its ticks."""
    schedule = build(name, stages=stages, microbatches=m)
    num_layers = layers_per_chunk * schedule.placement.num_virtual_stages
    model, params = bubble.sleeping_model([AT_ONCE] * num_layers)
    if layers == "plain":
        model = dataclasses.replace(model, layer=lambda w, x, batch, rng: w * x, carry=None)
    mesh = jaxpipe.make_mesh(stage=stages)
    pipe = jaxpipe.Pipeline(model, params, schedule=schedule, mesh=mesh)
    placed, batch = pipe.place(params), {"x": jnp.ones((m, bubble.WIDTH))}
    step = jax.jit(pipe.value_and_grad).lower(placed, batch).compile()
    times = [harness.seconds(lambda: step(placed, batch)) for _ in range(ROUNDS)]
    wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
    ticks = pipe.table.num_ticks
    return {
        "schedule": name,
        "layers": layers,
        "layers per chunk": layers_per_chunk,
        "ticks": ticks,
        "ms per tick": 1e3 * wall / ticks,
        "CPU ms per tick": 1e3 * cpu / ticks,
        "CPU ms per tick and core": 1e3 * cpu / ticks / min(stages, os.cpu_count() or 1),
    }


def main(
    stages: int = 8,
    microbatches: int = 32,
    names: tuple[str, ...] = ("1f1b", "1f1b-fused", "zb-v"),
) -> None:
    """Prints the table and writes it.

    Args:
      stages: p.
      microbatches: m.
      names: schedules to run.
    """
    harness.simulate(stages)
    rows = []
    for name in names:
        for layers, layers_per_chunk in (("plain", 1), ("calling", 1), ("calling", 4)):
            harness.note(f"{name}, {layers} layers")
            rows.append(measure(name, layers, layers_per_chunk, stages, microbatches))
    harness.report(
        "tick_overhead",
        rows,
        title=f"a tick with almost no work, p={stages} m={microbatches}",
        label=["schedule", "layers", "layers per chunk"],
        bars=["ms per tick", "CPU ms per tick and core"],
        axis="ms",
    )


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
