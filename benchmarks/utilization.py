"""How busy are the stages when the pipeline never drains?

Layers sleep, on 8 simulated stages. Utilization is the time that a stage's F, B and W sleep divided
by the time of a step: of GPipe and 1F1B with N microbatches, and of a full asynchronous pipeline,
where a step is N ticks. Simulated stages wait for each other in every tick, as in
`benchmarks.bubble`.

    python -m benchmarks.utilization [--stages 8] [--microbatches 8]
"""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
import optax
import tyro

import jaxpipe
from benchmarks import bubble, harness
from jaxpipe.schedule import Costs, build, simulate

ROUNDS = 3


def synchronous(name: str, stages: int, microbatches: int, seconds: Costs) -> dict:
    """A schedule's utilization as simulated and as executed, one layer per stage."""
    schedule = build(name, stages=stages, microbatches=microbatches)
    layers = [seconds] * stages
    step = bubble.compiled(schedule, layers)
    executed = statistics.median(step.run() for _ in range(ROUNDS))
    work = microbatches * (seconds.f + seconds.b + seconds.w)
    return {
        "schedule": name,
        "free-running": work / simulate(schedule, seconds).makespan,
        "tick by tick": work / bubble.tick_by_tick(schedule, layers),
        "executed": work / executed,
    }


def asynchronous(stages: int, microbatches: int, seconds: Costs) -> dict:
    """PipeMare's, once the pipeline is full."""
    model, params = bubble.sleeping_model([seconds] * stages)
    pipe = jaxpipe.Pipeline(
        model,
        params,
        schedule=build("1f1b", stages=stages, microbatches=microbatches),
        mesh=jaxpipe.make_mesh(stage=stages),
    )
    optimizer = optax.sgd(1e-3)
    training = jaxpipe.AsyncPipeline(pipe, optimizer)
    batch = {"x": jnp.ones((microbatches, bubble.WIDTH))}
    placed = pipe.place(params)
    state = training.init(placed, optimizer.init(placed), batch)
    step = jax.jit(training.step, donate_argnums=0).lower(state, batch).compile()
    fill = -(-training.steady.drain_ticks // microbatches)
    times = []
    for _ in range(fill + ROUNDS):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        times.append(time.perf_counter() - began)
    work = microbatches * (seconds.f + seconds.b + seconds.w)
    return {
        "schedule": "pipemare",
        "free-running": 1.0,
        "tick by tick": 1.0,
        "executed": work / statistics.median(times[fill:]),
    }


def main(
    stages: int = 8,
    microbatches: int = 8,
    costs: tuple[float, float, float] = (1.0, 1.2, 0.8),
    unit_seconds: float = 0.2,
) -> None:
    """Prints the table and writes it.

    Args:
      stages: P.
      microbatches: N.
      costs: of F, B and W, relative.
      unit_seconds: the time of one unit of them.
    """
    harness.simulate(stages)
    seconds = Costs(*(unit_seconds * cost for cost in costs))
    rows = []
    for name in ("gpipe", "1f1b"):
        harness.note(name)
        rows.append(synchronous(name, stages, microbatches, seconds))
    harness.note("pipemare")
    rows.append(asynchronous(stages, microbatches, seconds))
    harness.report(
        "utilization",
        rows,
        title=f"utilization, p={stages} N={microbatches}, a unit is {unit_seconds:g} s",
        label=["schedule"],
        bars=["free-running", "tick by tick", "executed"],
        axis="share of a step in which a stage works",
    )


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
