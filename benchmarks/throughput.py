"""How long does a step take, compared with what a JAX user would write instead?

All contenders train one small model in one process. Their rounds are interleaved and ratios are
taken within a round, so that a busy machine slows all of them. The model has 8 GPT layers of width
256 with 4 heads, sequence 128, 4 rows per microbatch, float32, SGD, no embedding and no head, on 4
simulated stages. CPU seconds are summed over all threads: they show the cost of a step or a
compilation however busy the machine is.

    python -m benchmarks.throughput [--microbatches 8 32] [--rounds 7]
    python -m benchmarks.throughput --microbatches 8 32 128 --rounds 0   # compile only
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe
from benchmarks import harness
from models import gpt

STAGES, ROWS = 4, 4
CONFIG = gpt.GPTConfig(
    vocab_size=64, sequence_length=128, num_layers=8, width=256, num_heads=4, dtype="float32"
)
OPTIMIZER = optax.sgd(1e-3)
LAYER = cast(Callable[..., jax.Array], gpt.model(CONFIG).layer)
MODEL = jaxpipe.Model(
    embed=lambda outer, batch, rng: batch["x"],
    layer=LAYER,
    head_loss=lambda outer, x, batch, rng: jnp.mean((x - batch["y"]) ** 2),
)
REFERENCE, BASELINE = "one device, accumulation", "circular autodiff, v=1"
Case = tuple[Any, Any, Any]
"""A step, its parameters and its batch."""


def init() -> dict[str, Any]:
    return {"embed": {}, "layers": gpt.init(CONFIG, jax.random.key(0))["layers"], "head": {}}


def make_batch(microbatches: int) -> dict[str, jax.Array]:
    shape = (ROWS * microbatches, CONFIG.sequence_length, CONFIG.width)
    keys = jax.random.split(jax.random.key(1))
    return {"x": jax.random.normal(keys[0], shape), "y": jax.random.normal(keys[1], shape)}


def by_microbatch(batch: dict[str, jax.Array], microbatches: int) -> list[jax.Array]:
    """Inputs and targets, ``[m, rows, sequence, width]``."""
    return [batch[name].reshape(microbatches, ROWS, *batch[name].shape[1:]) for name in "xy"]


def training_step(value_and_grad: Callable[..., Any]):
    def step(params, batch):
        loss, grads = value_and_grad(params, batch)
        updates, _ = OPTIMIZER.update(grads, OPTIMIZER.init(params), params)
        return optax.apply_updates(params, updates), loss

    return jax.jit(step, donate_argnums=0)


def pipelined(name: str, remat: str, microbatches: int) -> Case:
    """This project's step."""
    schedule = jaxpipe.schedules.build(name, stages=STAGES, microbatches=microbatches)
    mesh = jaxpipe.make_mesh(stage=STAGES)
    pipe = jaxpipe.Pipeline(MODEL, init(), schedule=schedule, mesh=mesh, remat=remat)
    batch = jax.device_put(make_batch(microbatches), pipe.batch_sharding)
    return training_step(pipe.value_and_grad), pipe.place(init()), batch


def layer_scan(layers, x, y):
    """The loss of one microbatch by a plain scan over the layers."""
    out, _ = jax.lax.scan(lambda x, w: (LAYER(w, x, None, None), None), x, layers)
    return jnp.mean((out - y) ** 2)


def single() -> Case:
    """One device, one microbatch, no accumulation: the reference of compile times."""

    def value_and_grad(layers, batch):
        return jax.value_and_grad(layer_scan)(layers, batch["x"], batch["y"])

    return training_step(value_and_grad), init()["layers"], make_batch(1)


def accumulated(microbatches: int) -> Case:
    """One device that runs microbatch after microbatch and adds up gradients."""

    def value_and_grad(layers, batch):
        def add(total, rows):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(layer_scan)(layers, *rows)), None

        start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, layers)
        total, _ = jax.lax.scan(add, start, by_microbatch(batch, microbatches))
        return jax.tree.map(lambda leaf: leaf / microbatches, total)

    return training_step(value_and_grad), init()["layers"], make_batch(microbatches)


def circular(num_repeats: int, microbatches: int) -> Case:
    """The usual JAX pipeline: a vmap over stages in a scan, shifted buffers, autodiff, remat.

    Stage s works on repeat ``(t - s) // m`` of microbatch ``(t - s) % m`` in iteration t. All
    buffers are split over stages and every stage writes its own rows, so that the shift is the only
    communication. Values that return from the last stage wait on the first until its next repeat.
    """
    mesh = jax.make_mesh((STAGES,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    by_stage = NamedSharding(mesh, P("stage"))
    depth = CONFIG.num_layers // (STAGES * num_repeats)
    m, stages = microbatches, jnp.arange(STAGES)
    is_first, is_last = ((stages == s).reshape(-1, 1, 1, 1) for s in (0, STAGES - 1))

    @jax.checkpoint
    def stage(weights, repeat, x):
        mine = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, repeat, 0, False), weights)
        return jax.lax.scan(lambda x, w: (LAYER(w, x, None, None), None), x, mine)[0]

    def run(layers, x, y):
        def iterate(carry, t):
            held, waiting, outputs = carry
            received = jnp.roll(held, 1, axis=0)
            entering = x[t % m]
            if num_repeats > 1:
                waiting = waiting.at[:, (t - STAGES) % m].set(received)
                entering = jnp.where(t < m, entering, waiting[:, t % m])
            held = jnp.where(is_first, entering, received)
            repeat = jnp.clip((t - stages) // m, 0, num_repeats - 1)
            held = jax.vmap(stage)(layers, repeat, jax.lax.with_sharding_constraint(held, by_stage))
            outputs = outputs.at[:, (t - (STAGES - 1)) % m].set(held)
            return (held, waiting, outputs), None

        def buffer(*shape):
            zeros = jnp.zeros((STAGES, *shape, *x.shape[1:]), x.dtype)
            return jax.lax.with_sharding_constraint(zeros, by_stage)

        start = buffer(), buffer(m if num_repeats > 1 else 0), buffer(m)
        iterations = jnp.arange(m * num_repeats + STAGES - 1)
        (_, _, outputs), _ = jax.lax.scan(iterate, start, iterations)
        return jnp.sum(jnp.where(is_last[..., None], (outputs - y) ** 2, 0)) / y.size

    def value_and_grad(layers, batch):
        return jax.value_and_grad(run)(layers, *by_microbatch(batch, m))

    def place(w):  # [layers, ...] -> [stages, repeats, layers of a repeat, ...]
        return w.reshape(num_repeats, STAGES, depth, *w.shape[1:]).swapaxes(0, 1)

    layers = jax.device_put(jax.tree.map(place, init()["layers"]), by_stage)
    batch = jax.device_put(make_batch(m), NamedSharding(mesh, P()))
    return training_step(value_and_grad), layers, batch


def contenders(microbatches: int, schedules: tuple[str, ...]) -> dict[str, Callable[[], Case]]:
    made: dict[str, Callable[[], Case]] = {
        REFERENCE: lambda: accumulated(microbatches),
        BASELINE: lambda: circular(1, microbatches),
        "circular autodiff, v=2": lambda: circular(2, microbatches),
    }
    for schedule in schedules:
        name, _, remat = schedule.partition("/")
        made[f"{name}, remat {remat}"] = functools.partial(pipelined, name, remat, microbatches)
    return made


def compile_case(case: Case):
    """The compiled step, and the wall and CPU seconds it took, tracing included."""
    step, params, batch = case
    made = []
    seconds = harness.seconds(lambda: made.append(step.lower(params, batch).compile()))
    return made[0], *seconds


def race(running: dict[str, list], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of every step, the contenders in turn."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in running}
    for number in range(rounds):
        # Every other round is reversed, so that no contender always follows the same one.
        for name in list(running)[:: 1 if number % 2 else -1]:
            case = running[name]

            def step(case=case):
                case[1], loss = case[0](case[1], case[2])
                return case[1], loss

            times[name].append(harness.seconds(step))
    return times


def run(microbatches: int, rounds: int, schedules: tuple[str, ...], single_seconds: float) -> None:
    """One table; ``single_seconds`` is the CPU time to compile `single`."""
    running, rows = {}, {}
    for name, make in contenders(microbatches, schedules).items():
        harness.note(f"m={microbatches}: compiling {name}")
        case = make()
        compiled, seconds, cpu_seconds = compile_case(case)
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        params, loss = compiled(*case[1:]) if rounds else (None, float("nan"))
        running[name] = [compiled, params, case[2]]
        rows[name] = {
            "contender": name,
            "compile s": seconds,
            "CPU of a layer scan's": cpu_seconds / single_seconds,
            "temporaries MB": temporaries / 1e6,
        }
        if rounds:
            rows[name]["loss"] = float(loss)
    times = race(running, rounds)

    def ratio(name: str, other: str, clock: int) -> float:
        pairs = zip(times[name], times[other], strict=True)
        return statistics.median(mine[clock] / theirs[clock] for mine, theirs in pairs)

    for name, row in rows.items() if rounds else ():
        wall, cpu = (statistics.median(column) for column in zip(*times[name], strict=True))
        row |= {"step s": wall, "of one device": ratio(name, REFERENCE, 0)}
        row |= {"of circular": ratio(name, BASELINE, 0)}
        row |= {"CPU s": cpu, "CPU of one device": ratio(name, REFERENCE, 1)}
        row |= {"CPU of circular": ratio(name, BASELINE, 1)}
    harness.report(
        f"throughput-m{microbatches}",
        list(rows.values()),
        title=f"a step of 8 layers, {STAGES} stages, m={microbatches}",
        label=["contender"],
        bars=["of one device", "CPU of one device"] if rounds else ["CPU of a layer scan's"],
        axis="step time, of one device with accumulation" if rounds else "compile time",
    )


def main(
    microbatches: tuple[int, ...] = (8, 32),
    rounds: int = 7,
    schedules: tuple[str, ...] = (
        *("1f1b/none", "1f1b-fused/none", "1f1b-fused/full", "zb-v/none", "zb-v/full"),
    ),
) -> None:
    """Prints the tables and writes them.

    Args:
      microbatches: m, one table each.
      rounds: steps of every contender; 0 only compiles.
      schedules: this project's contenders, as "schedule/remat".
    """
    harness.simulate(STAGES)
    compile_case(single())  # the first compilation of a process also loads the compiler
    _, _, single_seconds = compile_case(single())
    for m in microbatches:
        run(m, rounds, schedules, single_seconds)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
