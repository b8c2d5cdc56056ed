"""Do stages wait for nothing but their inputs?

One process per stage on this machine (gloo), with layers that sleep: unlike simulated devices of
one process, which all wait for each other in every tick, these wait only where the program says so,
as GPUs do. The same program runs with layers that return at once, and the time of that is
subtracted: it is what ticks cost on a CPU.

XLA for CPUs runs transfers and layers one after the other, so its tick table has no late messages,
and gloo's sender waits for its receiver. "program" is the clock of that: both ends meet for every
message, at the end of its tick. "device" is the device clock, whose late messages travel under
layers and whose senders go on.

    python -m benchmarks.processes [--names 1f1b zb-v] [--stages 4] [--microbatches 16]
    python -m benchmarks.processes --ends --message-megabytes 4
    python -m benchmarks.processes --names 1f1b zb-h1 --microbatches 4 --slices 4
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import multihost_utils

import jaxpipe
from benchmarks import harness
from jaxpipe.schedule import Costs, Schedule, build, device_clock, simulate
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.device_clock import work_of
from jaxpipe.schedule.lowering.lower import lower

NAMES = (
    *("1f1b", "1f1b-fused", "interleaved", "breadth-first", "hanayo", "zb-h1", "zb-h2"),
    *("zb-v", "v-half", "dualpipe-v", "interleaved-zb", "auto"),
)
END = 0.1
"""Time that the embedding and the head each take, as a share of a stage's layers."""

_FLAGS = "--xla_cpu_multi_thread_eigen=false"
_THREADS = "2"
"""XLA's threads in each process: one waits for a message or sleeps."""
_IDLE_RUNS = 4
"""Without sleep, for each with sleep: they are short, and other work on the machine disturbs them
most."""
_at_once = False
"""Whether layers return at once in this process."""


def nap(value: jax.Array, seconds: float) -> jax.Array:
    """A zero that is there so long after the value."""

    def wait(value):
        if not _at_once:
            time.sleep(seconds)
        return np.float32(0)

    scalar = value.reshape(-1)[0]
    return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), scalar)


@functools.cache
def napping(f: float, b: float, w: float):
    """``(w, x) -> x`` that takes these times for F, B and W; equal times give the same function."""

    @jax.custom_vjp
    def function(weight, x):
        return x + nap(x, f) + 0 * weight

    def backward(weight, dy):
        return nap(dy, w) + 0 * weight, dy + nap(dy, b)

    function.defvjp(lambda weight, x: (function(weight, x), weight), backward)
    return function


def run_layer(function, w, x, batch, rng, carry=None, start=0):
    """Runs a layer that mixes no tokens: slices of a sequence hand nothing to each other."""
    return function(w, x) if carry is None else (function(w, x), carry)


def sleeping_model(
    layers: Sequence[Costs], *, end: float = 0.0
) -> tuple[jaxpipe.Model, dict[str, Any]]:
    """A model whose layers take these seconds, and its parameters.

    Args:
      end: seconds of its embedding, of which the forward takes a third, and of its head; 0 for a
        model without.
    """
    functions = [napping(cost.f, cost.b, cost.w) for cost in layers]
    tree = [functools.partial(run_layer, layer) for layer in functions]
    alike = len(set(layers)) == 1
    # The gradient of the table takes the embedding's other two thirds, and that of x the head's.
    embed, head = napping(end / 3, 0.0, end * 2 / 3), napping(end / 3, end * 2 / 3, 0.0)

    def embedded(outer, batch, rng):
        return embed(outer["embed"], batch["x"]) if end else batch["x"]

    def loss(outer, x, batch, rng):
        return jnp.mean((head(outer["head"], x) if end else x) ** 2)

    model = jaxpipe.Model(
        embed=embedded,
        layer=tree[0] if alike else tuple(tree),
        head_loss=loss,
        carry=lambda x, batch, num_slices: (),
    )
    weights = jnp.ones(len(layers))
    outer = {name: jnp.ones(()) if end else {} for name in ("embed", "head")}
    return model, outer | {"layers": weights if alike else tuple(weights)}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program.

    Args:
      schedule: what runs.
      layers: the times of every chunk, each of one layer.
      end: as of `sleeping_model`.
      width: numbers in a message.
    """

    schedule: Schedule
    layers: tuple[Costs, ...]
    end: float = 0.0
    width: int = 1

    @property
    def costs(self) -> list[Costs]:
        """Costs of every virtual stage, the first with the embedding and the last with the head."""
        found = list(self.layers)
        first, embed = found[0], self.end / 3
        found[0] = dataclasses.replace(first, f=first.f + embed, b=first.b + 2 * embed)
        found[-1] = dataclasses.replace(found[-1], f=found[-1].f + self.end)
        return found


def run(case: Case, rounds: int) -> tuple[int, list[float], list[float]]:
    """Runs a program in this process and all others.

    Returns:
      Its ticks, and the seconds of every round until the last process is done: without and with
      sleep.
    """
    global _at_once
    model, params = sleeping_model(case.layers, end=case.end)
    mesh = jaxpipe.make_mesh(stage=case.schedule.num_stages)
    pipe = jaxpipe.Pipeline(model, params, schedule=case.schedule, mesh=mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, pipe.placed_params)
    placed = jax.jit(pipe.place, out_shardings=shardings)(params)
    schedule = case.schedule
    rows = np.ones((schedule.num_microbatches, schedule.num_slices * case.width), np.float32)
    batch = {
        "x": jax.make_array_from_callback(rows.shape, pipe.batch_sharding, lambda at: rows[at])
    }
    step = jax.jit(pipe.value_and_grad).lower(placed, batch).compile()
    times: tuple[list[float], list[float]] = ([], [])
    turns = [*[(True, times[0])] * _IDLE_RUNS, (False, times[1])]
    # The first run connects the processes.
    for _at_once, found in [(True, []), *turns * rounds]:
        multihost_utils.sync_global_devices(case.schedule.name)
        own = harness.seconds(lambda: step(placed, batch))[0]
        found.append(float(np.max(multihost_utils.process_allgather(np.float32(own)))))
    return pipe.table.num_ticks, *times


def work(number: int, port: int, cases: Sequence[Case], rounds: int, results: Connection) -> None:
    """One process, that of a stage: runs all cases; the first one sends what it measured."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    stages = cases[0].schedule.num_stages
    jax.distributed.initialize(f"127.0.0.1:{port}", stages, number)
    for case in cases:
        found = run(case, rounds)
        if number == 0:
            results.send(found)
    jax.distributed.shutdown()


def measured(cases: Sequence[Case], rounds: int) -> Iterator[tuple[int, list[float], list[float]]]:
    """Starts one process per stage, and yields what each case took there, as `run` does.

    Raises:
      RuntimeError: a process ended too early.
    """
    os.environ["XLA_FLAGS"] = f"{_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
    os.environ["PJRT_NPROC"] = _THREADS
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    processes = [
        context.Process(target=work, args=(number, port, cases, rounds, send), daemon=True)
        for number in range(cases[0].schedule.num_stages)
    ]
    for process in processes:
        process.start()
    try:
        for case in cases:
            while not receive.poll(1.0):
                if any(process.exitcode for process in processes):
                    raise RuntimeError(f"{case.schedule.name}: a process ended; see above.")
            yield receive.recv()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()


def meeting_clock(case: Case) -> float:
    """Computes when the last stage is done if both ends of a message wait for each other.

    The transfers of a tick run one after the other, and each of them along all of its edges at
    once.
    """
    table = lower(case.schedule, [1] * len(case.costs), overlaps=False)
    work = np.sum(list(work_of(table, case.costs).values()), axis=0)
    _, exchanges, numbers = table.branches(list(Kind))
    now = np.zeros(work.shape[1])
    for tick, seconds in enumerate(work):
        now = now + seconds
        for edges in itertools.chain(*exchanges[numbers[table.exchange[tick]]]):
            met = now.copy()
            for ends in map(list, edges):
                met[ends] = np.maximum(met[ends], now[ends].max())
            now = met
    return float(now.max())


def row(case: Case, ticks: int, idle: Sequence[float], slept: Sequence[float]) -> dict[str, Any]:
    """One row of the table: seconds, and their ratios."""
    executed = min(slept) - min(idle)
    free, device = (clock(case.schedule, case.costs).makespan for clock in (simulate, device_clock))
    program = meeting_clock(case)
    of_chunk = [cost.f + cost.b + cost.w for cost in case.costs]
    held = case.schedule.placement.virtual_stages
    busy = case.schedule.num_passes * max(sum(of_chunk[s] for s in own) for own in held)
    seconds = {
        "free-running": free, "device": device, "program": program, "executed": executed,
    }  # fmt: skip
    return {
        "schedule": case.schedule.name,
        "ticks": ticks,
        "without sleep s": min(idle),
        **{f"{clock} s": time for clock, time in seconds.items()},
        **{f"{clock} / work": time / busy for clock, time in seconds.items()},
        "executed / free-running": executed / free,
        "executed / device": executed / device,
        "executed / program": executed / program,
    }


def main(
    names: tuple[str, ...] = NAMES,
    stages: int = 4,
    microbatches: int | None = None,
    slices: int | None = None,
    costs: tuple[float, float, float] = (1.0, 1.2, 0.8),
    unit: float = 0.05,
    ends: bool = False,
    message_megabytes: float = 0.0,
    rounds: int = 2,
) -> None:
    """Prints the table and writes it.

    Args:
      names: schedules to run; "all" is every one that can be executed.
      stages: p, of which each is a process.
      microbatches: m; 4 p by default.
      slices: k, for schedules that cut sequences; the costs are those of a slice.
      costs: of F, B and W, relative.
      unit: seconds of one unit of the costs, for all chunks of a stage together.
      ends: whether there are an embedding and a head, each of a tenth of a stage's time.
      message_megabytes: size of a message; a few bytes by default.
      rounds: of which the shortest counts: other work on the machine only makes one longer.
    """
    m, cases = microbatches or 4 * stages, []
    for name in harness.chosen(names):
        schedule = build(name, stages=stages, microbatches=m, slices=slices, costs=Costs(*costs))
        layer = Costs(*(unit * cost / schedule.num_chunks for cost in costs))
        cases.append(
            Case(
                schedule,
                (layer,) * schedule.placement.num_virtual_stages,
                END * unit * sum(costs) if ends else 0.0,
                max(1, int(message_megabytes * 1e6 / 4)),
            )
        )
    rows = []
    for case, found in zip(cases, measured(cases, rounds), strict=True):
        rows.append(row(case, *found))
        harness.note(f"{case.schedule.name}: {rows[-1]}")
    title = f"p={stages} m={m}, one process per stage, a unit is {unit:g} s"
    title += ", embedding and head" if ends else ""
    title += f", messages of {message_megabytes:g} MB" if message_megabytes else ""
    harness.report(
        f"processes-p{stages}{'-ends' if ends else ''}{'-messages' if message_megabytes else ''}",
        rows,
        title=title,
        label=["schedule"],
        bars=["free-running / work", "device / work", "executed / work"],
        axis="time over a stage's work",
    )


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
