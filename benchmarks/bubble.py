"""Do simulated devices take the time that their ticks say?

Simulated devices of one process wait for each other wherever one of them sends a message: in every
tick. A tick lasts as long as its slowest stage there, and a step as long as all its ticks
(`tick_by_tick`), which is more than the device clock says. `benchmarks.processes` runs stages that
wait for nothing but their inputs.

A layer that sleeps takes wall time without a core, so the bubble of 16 stages shows on 2 cores. F,
B and W sleep their own times; the layer is an ordinary one with a custom derivative.

    python -m benchmarks.bubble [--names 1f1b auto] [--stages 4 8]
    python -m benchmarks.bubble --names all --costs 1 1 1 1 1.2 0.8 1 2 1
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import tyro

import jaxpipe
from benchmarks import harness
from benchmarks.processes import sleeping_model
from jaxpipe.schedule import Costs, Schedule, build, lower, simulate
from jaxpipe.schedule.device_clock import work_of

NAMES = ("1f1b", "interleaved", "breadth-first", "hanayo", "zb-v", "v-half", "auto")
WIDTH = 8


def tick_by_tick(schedule: Schedule, costs: Sequence[Costs]) -> float:
    """Seconds of a step whose stages all wait for each other in every tick.

    Args:
      costs: of every virtual stage, in seconds.
    """
    table = lower(schedule, [1] * len(costs))
    return float(sum(work_of(table, costs).values()).max(axis=1).sum())


class Step(NamedTuple):
    """A compiled step of sleeping layers.

    Args:
      run: runs it once, and returns the seconds that it took.
      ticks: of its table.
    """

    run: Callable[[], float]
    ticks: int


def compiled(
    schedule: Schedule, layers: Sequence[Costs], *, layer_counts: Sequence[int] | None = None
) -> Step:
    """Compiles a schedule with layers that take these seconds."""
    model, params = sleeping_model(layers)
    mesh = jaxpipe.make_mesh(stage=schedule.num_stages)
    pipe = jaxpipe.Pipeline(model, params, schedule=schedule, mesh=mesh, layer_counts=layer_counts)
    placed, batch = pipe.place(params), {"x": jnp.ones((schedule.num_microbatches, WIDTH))}
    step = jax.jit(pipe.value_and_grad).lower(placed, batch).compile()
    return Step(lambda: harness.seconds(lambda: step(placed, batch))[0], pipe.table.num_ticks)


def measure(schedule: Schedule, chunk: Costs, rounds: int) -> dict[str, float]:
    """Executes a schedule of equal chunks of one layer each; times in seconds."""
    layers = [chunk] * schedule.placement.num_virtual_stages
    step = compiled(schedule, layers)
    executed = statistics.median(step.run() for _ in range(rounds))
    together = tick_by_tick(schedule, layers)
    work = schedule.num_microbatches * schedule.num_chunks * (chunk.f + chunk.b + chunk.w)
    return {
        "ticks": step.ticks,
        "tick by tick s": together,
        "executed s": executed,
        "executed / tick by tick": executed / together,
        "excess ms per tick": 1e3 * (executed - together) / step.ticks,
        "free-running bubble": simulate(schedule, chunk).bubble_ratio,
        "tick-by-tick bubble": 1 - work / together,
        "executed bubble": 1 - work / executed,
    }


def main(
    names: tuple[str, ...] = NAMES,
    stages: tuple[int, ...] = (8,),
    costs: tuple[tuple[float, float, float], ...] = ((1.0, 1.2, 0.8),),
    microbatches: int | None = None,
    stage_seconds: float = 0.4,
    rounds: int = 2,
) -> None:
    """Prints a table for each number of stages, and writes it.

    Args:
      names: schedules to run; "all" is every one that can be executed.
      stages: p.
      costs: of F, B and W, relative; three numbers or a multiple of three.
      microbatches: m; 2 p by default.
      stage_seconds: the time of one unit of the costs, for all chunks of a stage together.
      rounds: steps of which the median is taken.
    """
    harness.simulate(max(stages))
    for p in stages:
        m = microbatches or 2 * p
        rows = []
        for price, name in itertools.product(costs, harness.chosen(names)):
            schedule = build(name, stages=p, microbatches=m, costs=Costs(*price))
            chunk = Costs(*(stage_seconds * cost / schedule.num_chunks for cost in price))
            case = {"F, B, W": ", ".join(f"{cost:g}" for cost in price), "schedule": name}
            harness.note(f"p={p} m={m}: {case}")
            rows.append(case | measure(schedule, chunk, rounds))
        harness.report(
            f"bubble-p{p}",
            rows,
            title=f"p={p} m={m}, a unit is {stage_seconds:g} s",
            label=["F, B, W", "schedule"],
            bars=[f"{clock} bubble" for clock in ("free-running", "tick-by-tick", "executed")],
            axis="bubble ratio",
        )


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
