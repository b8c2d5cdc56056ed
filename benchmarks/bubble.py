"""Does a step take the time that the simulator says?

A layer that sleeps takes wall time without a core, so the bubble of 16 stages shows on 2 cores. F,
B and W sleep their own times; the layer is an ordinary one with a custom derivative. Every schedule
runs with one whole action per tick, where a chunk is one layer, and in slices.

    python -m benchmarks.bubble [--names 1f1b auto] [--stages 4 8] [--message 0 0.2]
    python -m benchmarks.bubble --names all --costs 1 1 1 1 1.2 0.8 1 2 1
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import tyro

import jaxpipe
from benchmarks import harness
from jaxpipe.runtime.tick import executor
from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.search.slices import slice_ticks
from jaxpipe.schedule.simulate import Costs, lock_step, simulate

NAMES = ("1f1b", "interleaved", "breadth-first", "hanayo", "zb-v", "v-half", "auto")
Form = Literal["whole", "sliced"]
"""One whole action per tick, or slices."""
WIDTH = 8


def sleep(value: jax.Array, seconds: float) -> jax.Array:
    """Returns the value after this time."""

    def wait(value):
        time.sleep(seconds)
        return value

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(value.shape, value.dtype), value)


@functools.cache
def sleeping_layer(seconds: Costs):
    """A layer that takes these times for F, B and W; equal times give the same function."""

    @jax.custom_vjp
    def layer(w, x):
        return sleep(x, seconds.f) + 0 * w

    def forward(w, x):
        return layer(w, x), x

    def backward(x, dy):
        return sleep(jnp.sum(dy * x, axis=0), seconds.w), sleep(dy, seconds.b)

    layer.defvjp(forward, backward)
    return lambda w, x, batch, rng: layer(w, x)


def sleeping_model(layers: Sequence[Costs]) -> tuple[jaxpipe.Model, dict[str, Any]]:
    """A model whose layers take these seconds, and its parameters."""
    alike = len(set(layers)) == 1
    functions = tuple(sleeping_layer(seconds) for seconds in layers)
    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=functions[0] if alike else functions,
        head_loss=lambda outer, x, batch, rng: jnp.mean(x**2),
    )
    weights = jnp.ones((len(layers), WIDTH))
    return model, {"embed": {}, "layers": weights if alike else tuple(weights), "head": {}}


@contextlib.contextmanager
def sleeping_messages(seconds: float) -> Iterator[None]:
    """Makes every exchange that stages wait for take time: its first transfer sleeps.

    No layer can do that, so the collective itself is replaced while the step is traced. Late
    messages travel while layers run, which a CPU's collectives cannot: they take no time here.
    """
    send, exchange = jax.lax.ppermute, executor.exchange

    def meeting(table, carried, row, outputs, *arguments):
        transfers = sum(not c.local for c in table.channels if c.kind in outputs)
        calls = itertools.count()  # jax may trace an exchange again

        def sleeping(x, axis, edges):
            message = send(x, axis, edges)
            return message if next(calls) % transfers else sleep(message, seconds)

        with mock.patch.object(jax.lax, "ppermute", sleeping if seconds else send):
            return exchange(table, carried, row, outputs, *arguments)

    with mock.patch.object(executor, "exchange", meeting):
        yield


class Step(NamedTuple):
    """A compiled step of sleeping layers.

    Args:
      run: runs it once, and returns the seconds that it took.
      ticks: of its table.
    """

    run: Callable[[], float]
    ticks: int


def compiled(
    schedule: Schedule,
    layers: Sequence[Costs],
    *,
    message: float = 0.0,
    layer_counts: Sequence[int] | None = None,
) -> Step:
    """Compiles a schedule with layers that take these seconds."""
    model, params = sleeping_model(layers)
    mesh = jaxpipe.make_mesh(stage=schedule.num_stages)
    pipe = jaxpipe.Pipeline(model, params, schedule=schedule, mesh=mesh, layer_counts=layer_counts)
    placed, batch = pipe.place(params), {"x": jnp.ones((schedule.num_microbatches, WIDTH))}
    with sleeping_messages(message):
        step = jax.jit(pipe.value_and_grad).lower(placed, batch).compile()
    return Step(lambda: harness.seconds(lambda: step(placed, batch))[0], pipe.table.num_ticks)


def execute(
    schedule: Schedule,
    layers: Sequence[Costs],
    *,
    message: float = 0.0,
    layer_counts: Sequence[int] | None = None,
    rounds: int = 2,
) -> tuple[float, int]:
    """Executes a schedule with layers that take these seconds.

    Returns:
      The median time of a step, in seconds, and its ticks.
    """
    step = compiled(schedule, layers, message=message, layer_counts=layer_counts)
    return statistics.median(step.run() for _ in range(rounds)), step.ticks


def measure(
    schedule: Schedule, seconds: Costs, layers_per_chunk: int, rounds: int
) -> dict[str, float]:
    """Executes a schedule of equal chunks; times in seconds."""
    m = schedule.num_microbatches
    num_layers = layers_per_chunk * schedule.placement.num_virtual_stages
    shares = {kind: getattr(seconds, kind) / layers_per_chunk for kind in ("f", "b", "w")}
    layers = [Costs(**shares)] * num_layers
    executed, ticks = execute(schedule, layers, message=seconds.message, rounds=rounds)
    work = m * schedule.num_chunks * (seconds.f + seconds.b + seconds.w)
    locked, free = lock_step(schedule, seconds), simulate(schedule, seconds)
    return {
        "ticks": ticks,
        "free-running s": free.makespan,
        "lock-step s": locked.makespan,
        "executed s": executed,
        "executed / lock-step": executed / locked.makespan,
        "excess ms per tick": 1e3 * (executed - locked.makespan) / ticks,
        "free-running bubble": free.bubble_ratio,
        "lock-step bubble": locked.bubble_ratio,
        "executed bubble": 1 - work / executed,
    }


def cases(
    name: str, forms: Sequence[Form], stages: int, m: int, seconds: Costs, layers: int
) -> Iterator[tuple[str, Schedule, int]]:
    """A schedule in each form: its label, and the layers of a chunk.

    A whole action is one sleeping layer: it takes the same time but calls back to Python less.
    """
    whole = catalog.build(
        name, stages=stages, microbatches=m, costs=seconds, layers_per_chunk=layers
    )
    if whole.slices is not None:
        if "sliced" in forms:
            yield name, whole, layers
        return
    if "whole" in forms:
        yield name, whole, 1
    if "sliced" in forms:
        counts = [layers] * whole.placement.num_virtual_stages
        yield f"{name}, sliced", slice_ticks(whole, seconds, counts), layers


def main(
    names: tuple[str, ...] = NAMES,
    stages: tuple[int, ...] = (8,),
    costs: tuple[tuple[float, float, float], ...] = ((1.0, 1.2, 0.8),),
    message: tuple[float, ...] = (0.0,),
    forms: tuple[Form, ...] = ("whole", "sliced"),
    microbatches: int | None = None,
    layers_per_chunk: int = 4,
    stage_seconds: float = 0.4,
    rounds: int = 2,
) -> None:
    """Prints a table for each number of stages, and writes it.

    Args:
      names: schedules to run; "all" is every one that can be executed.
      stages: p.
      costs: of F, B and W, relative; three numbers or a multiple of three.
      message: time of an exchange of messages, in the same unit.
      forms: one whole action per tick, or slices.
      microbatches: m; 2 p by default.
      layers_per_chunk: layers of every chunk in slices.
      stage_seconds: the time of one unit of the costs, for all chunks of a stage together.
      rounds: steps of which the median is taken.
    """
    harness.simulate(max(stages))
    for p in stages:
        m = microbatches or 2 * p
        rows = []
        for (f, b, w), t, name in itertools.product(costs, message, harness.chosen(names)):
            chunks = catalog.build(name, stages=2, microbatches=4).num_chunks
            times = (stage_seconds / chunks * cost for cost in (f, b, w))
            seconds = Costs(*times, message=stage_seconds * t)
            for label, schedule, layers in cases(name, forms, p, m, seconds, layers_per_chunk):
                case = {"F, B, W": f"{f:g}, {b:g}, {w:g}", "message": t, "schedule": label}
                harness.note(f"p={p} m={m}: {case}")
                rows.append(case | measure(schedule, seconds, layers, rounds))
        harness.report(
            f"bubble-p{p}-{'-'.join(forms)}",
            rows,
            title=f"p={p} m={m}, {layers_per_chunk} layers per chunk in slices, a unit is "
            f"{stage_seconds:g} s",
            label=["F, B, W", "message", "schedule"],
            bars=[f"{clock} bubble" for clock in ("free-running", "lock-step", "executed")],
            axis="bubble ratio",
        )


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
