"""Does a step take the time that the simulator says?

A layer that sleeps takes wall time without a core, so the bubble of 16 stages shows on 2 cores. F,
B and W sleep their own times; the layer is an ordinary one with a custom derivative. Every schedule
runs with one whole action a tick and in slices.

    python -m benchmarks.bubble [--stages 8] [--costs 1 1.2 0.8] [--message 0.2] [--names 1f1b auto]
    python -m benchmarks.bubble --all
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any
from unittest import mock

import jax
import jax.numpy as jnp
import tyro

import jaxpipe
from benchmarks import harness
from jaxpipe.runtime import executor
from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.simulate import Costs, lock_step, simulate
from jaxpipe.schedule.slices import slice_ticks

NAMES = ("1f1b", "interleaved", "breadth-first", "hanayo", "zb-v", "v-half", "auto")
ALL_STAGES = (4, 8, 16)
ALL_COSTS = ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 2.0, 1.0))
ALL_MESSAGES = (0.0, 0.2)
WIDTH = 8
ROUNDS = 2


def sleep(value: jax.Array, seconds: float) -> jax.Array:
    """The value, after a while."""

    def wait(value):
        time.sleep(seconds)
        return value

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(value.shape, value.dtype), value)


@functools.cache
def sleeping_layer(seconds: Costs):
    """A layer that takes these times for F, B and W; equal times are one function, and one kind."""

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
def sleeping_messages(pipe: jaxpipe.Pipeline, seconds: float) -> Iterator[None]:
    """Makes every exchange that stages wait for take a while: its first transfer sleeps.

    No layer can do that, so the collective itself is replaced while the step is traced. Late
    messages travel while layers run, which a CPU's collectives cannot: they take no time here.
    """
    send, calls = jax.lax.ppermute, itertools.count()
    send_late = executor.Run._late_messages
    transfers = sum(
        sender != receiver for c in pipe.table.channels for sender, receiver in c.edges[:1]
    )

    def sleeping(x, axis, edges):
        message = send(x, axis, edges)
        return message if next(calls) % transfers else sleep(message, seconds)

    def late(run, state):
        with mock.patch.object(jax.lax, "ppermute", send):
            return send_late(run, state)

    with (
        mock.patch.object(jax.lax, "ppermute", sleeping if seconds else send),
        mock.patch.object(executor.Run, "_late_messages", late),
    ):
        yield


def execute(
    schedule: Schedule,
    layers: Sequence[Costs],
    *,
    message: float = 0.0,
    layer_counts: Sequence[int] | None = None,
) -> tuple[float, int]:
    """Executes a schedule with layers that take these seconds.

    Returns:
      The median time of a step, in seconds, and its ticks.
    """
    model, params = sleeping_model(layers)
    mesh = jaxpipe.make_mesh(stage=schedule.num_stages)
    pipe = jaxpipe.Pipeline(model, params, schedule=schedule, mesh=mesh, layer_counts=layer_counts)
    placed, batch = pipe.place(params), {"x": jnp.ones((schedule.num_microbatches, WIDTH))}
    with sleeping_messages(pipe, message):
        step = jax.jit(pipe.value_and_grad).lower(placed, batch).compile()
    times = [harness.seconds(lambda: step(placed, batch))[0] for _ in range(ROUNDS)]
    return statistics.median(times), pipe.table.num_ticks


def measure(schedule: Schedule, seconds: Costs, layers_per_chunk: int) -> dict[str, float]:
    """Executes a schedule of equal chunks; times in seconds."""
    m = schedule.num_microbatches
    num_layers = layers_per_chunk * schedule.placement.num_virtual_stages
    shares = {kind: getattr(seconds, kind) / layers_per_chunk for kind in ("f", "b", "w")}
    executed, ticks = execute(schedule, [Costs(**shares)] * num_layers, message=seconds.message)
    work = m * schedule.num_chunks * (seconds.f + seconds.b + seconds.w)
    locked, free = lock_step(schedule, seconds), simulate(schedule, seconds)
    return {
        "ticks": ticks,
        "free-running s": free.makespan,
        "lock-step s": locked.makespan,
        "executed s": executed,
        "executed / lock-step": executed / locked.makespan,
        "excess ms a tick": 1e3 * (executed - locked.makespan) / ticks,
        "free-running bubble": free.bubble_ratio,
        "lock-step bubble": locked.bubble_ratio,
        "executed bubble": 1 - work / executed,
    }


def cases(name: str, stages: int, m: int, seconds: Costs, layers: int) -> dict[str, Schedule]:
    """A schedule with whole actions and in slices, by label."""
    whole = catalog.build(
        name, stages=stages, microbatches=m, costs=seconds, layers_per_chunk=layers
    )
    if whole.slices is not None:
        return {name: whole}
    sliced = slice_ticks(whole, seconds, [layers] * whole.placement.num_virtual_stages)
    return {name: whole, f"{name}, sliced": sliced}


def run(
    stages: int,
    microbatches: int,
    costs: Costs,
    layers_per_chunk: int,
    stage_seconds: float,
    names: Sequence[str],
) -> None:
    """One table."""
    title = (
        f"p={stages} m={microbatches} (F, B, W)=({costs.f:g}, {costs.b:g}, {costs.w:g}), message "
        f"{costs.message:g}, {layers_per_chunk} layers a chunk, a unit is {stage_seconds:g} s"
    )
    rows = []
    for name in names:
        chunks = catalog.build(name, stages=2, microbatches=4).num_chunks
        f, b, w = (stage_seconds / chunks * cost for cost in (costs.f, costs.b, costs.w))
        seconds = Costs(f, b, w, message=stage_seconds * costs.message)
        for label, schedule in cases(name, stages, microbatches, seconds, layers_per_chunk).items():
            harness.note(f"p={stages} {costs}: {label}")
            rows.append({"schedule": label, **measure(schedule, seconds, layers_per_chunk)})
    harness.report(
        f"bubble-p{stages}-{costs.f:g}-{costs.b:g}-{costs.w:g}-{costs.message:g}",
        rows,
        title=title,
        label=["schedule"],
        bars=[f"{clock} bubble" for clock in ("free-running", "lock-step", "executed")],
        axis="bubble ratio",
    )


def main(
    stages: int = 8,
    microbatches: int | None = None,
    costs: tuple[float, float, float] = (1.0, 1.2, 0.8),
    message: float = 0.0,
    layers_per_chunk: int = 4,
    stage_seconds: float = 0.4,
    names: tuple[str, ...] = NAMES,
    everything: Annotated[bool, tyro.conf.arg(name="all")] = False,
) -> None:
    """Prints the tables and writes them.

    Args:
      stages: p, at most 16.
      microbatches: m; 2 p without it.
      costs: of F, B and W, relative.
      message: time of an exchange of messages, in the same unit.
      layers_per_chunk: layers of every chunk.
      stage_seconds: what one unit of the costs takes, for all chunks of a stage together.
      names: schedules to run.
      everything: every schedule at 4, 8 and 16 stages and several costs, with and without a message
        time; takes hours.
    """
    harness.simulate(max(ALL_STAGES))
    shapes = [(stages, (*costs, message))]
    if everything:
        shapes = list(
            itertools.product(ALL_STAGES, ((*c, t) for c in ALL_COSTS for t in ALL_MESSAGES))
        )
        names = harness.executable()
    for p, (f, b, w, t) in shapes:
        m = microbatches or 2 * p
        run(p, m, Costs(f, b, w, t), layers_per_chunk, stage_seconds, names)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
