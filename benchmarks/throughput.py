"""How long is a step, against what a JAX user would write instead?

One small model, all contenders in one process, rounds interleaved so that a busy machine slows all
of them: 8 GPT layers of width 256, 4 heads, sequence 128, 4 rows a microbatch, float32, SGD, no
embedding, no head, 4 simulated stages. Prints median step time, compile time and temporaries per
device.

    python benchmarks/throughput.py [--microbatches 8] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jaxpipe
from models import gpt

RESULTS = Path(__file__).parent / "results"
STAGES, ROWS = 4, 4
CONFIG = gpt.GPTConfig(
    vocab_size=64, sequence_length=128, num_layers=8, width=256, num_heads=4, dtype="float32"
)
OPTIMIZER = optax.sgd(1e-3)
LAYER = gpt.model(CONFIG).layer
MODEL = jaxpipe.Model(
    embed=lambda outer, batch, rng: batch["x"],
    layer=LAYER,
    head_loss=lambda outer, x, batch, rng: jnp.mean((x - batch["y"]) ** 2),
)


def init() -> dict[str, Any]:
    return {"embed": {}, "layers": gpt.init(CONFIG, jax.random.key(0))["layers"], "head": {}}


def make_batch(microbatches: int) -> dict[str, jax.Array]:
    shape = (ROWS * microbatches, CONFIG.sequence_length, CONFIG.width)
    keys = jax.random.split(jax.random.key(1))
    return {"x": jax.random.normal(keys[0], shape), "y": jax.random.normal(keys[1], shape)}


def training_step(value_and_grad: Callable[..., Any]) -> Callable[..., Any]:
    def step(params, batch):
        loss, grads = value_and_grad(params, batch)
        updates, _ = OPTIMIZER.update(grads, OPTIMIZER.init(params), params)
        return optax.apply_updates(params, updates), loss

    return jax.jit(step, donate_argnums=0)


def pipelined(name: str, remat: str, microbatches: int):
    """This project's step."""
    schedule = jaxpipe.schedules.build(name, stages=STAGES, microbatches=microbatches)
    mesh = jaxpipe.make_mesh(stage=STAGES)
    pipe = jaxpipe.Pipeline(MODEL, init(), schedule=schedule, mesh=mesh, remat=remat)
    batch = jax.device_put(make_batch(microbatches), pipe.batch_sharding)
    return training_step(pipe.value_and_grad), pipe.place(init()), batch


def accumulated(microbatches: int):
    """One device that runs microbatch after microbatch and adds up gradients."""

    def loss(layers, x, y):
        def layer(x, w):
            return LAYER(w, x, None, None), None

        return jnp.mean((jax.lax.scan(layer, x, layers)[0] - y) ** 2)

    def value_and_grad(params, batch):
        def add(total, rows):
            value, grads = jax.value_and_grad(loss)(params["layers"], *rows)
            return jax.tree.map(jnp.add, total, (value, grads)), None

        rows = [batch[k].reshape(microbatches, ROWS, *batch[k].shape[1:]) for k in ("x", "y")]
        start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params["layers"])
        (value, grads), _ = jax.lax.scan(add, start, rows)
        mean = jax.tree.map(lambda g: g / microbatches, grads)
        return value / microbatches, {"embed": {}, "layers": mean, "head": {}}

    return training_step(value_and_grad), init(), make_batch(microbatches)


def circular(num_repeats: int, microbatches: int):
    """The usual JAX pipeline: a vmap over stages in a scan, shifted buffers, autodiff, remat.

    Stage s works on repeat ``(t - s) // m`` of microbatch ``(t - s) % m`` in iteration t; with more
    than one repeat the last stage's outputs wait in a buffer until the first stage takes them.
    """
    mesh = jax.make_mesh((STAGES,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    by_stage = NamedSharding(mesh, P("stage"))
    depth = CONFIG.num_layers // (STAGES * num_repeats)
    m = microbatches

    @jax.checkpoint
    def stage(weights, repeat, x):
        mine = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, repeat, 0, False), weights)
        return jax.lax.scan(lambda x, w: (LAYER(w, x, None, None), None), x, mine)[0]

    def run(layers, x, y):
        def iterate(carry, t):
            held, waiting, outputs = carry
            first = jnp.where(t < m, x[t % m], waiting[t % m])
            held = jax.lax.with_sharding_constraint(jnp.roll(held, 1, 0).at[0].set(first), by_stage)
            repeat = jnp.clip((t - jnp.arange(STAGES)) // m, 0, num_repeats - 1)
            held = jax.vmap(stage)(layers, repeat, held)
            done = (t - (STAGES - 1)) % m
            waiting = waiting.at[done].set(held[-1]) if num_repeats > 1 else waiting
            return (held, waiting, outputs.at[done].set(held[-1])), None

        start = jnp.zeros((STAGES, *x.shape[1:])), jnp.zeros_like(x), jnp.zeros_like(x)
        count = m * num_repeats + STAGES - 1
        (_, _, outputs), _ = jax.lax.scan(iterate, start, jnp.arange(count))
        return jnp.mean((outputs - y) ** 2)

    def value_and_grad(layers, batch):
        rows = [batch[k].reshape(m, ROWS, *batch[k].shape[1:]) for k in ("x", "y")]
        return jax.value_and_grad(run)(layers, *rows)

    def place(w):  # [layers, ...] -> [stages, repeats, layers of a repeat, ...]
        return w.reshape(num_repeats, STAGES, depth, *w.shape[1:]).swapaxes(0, 1)

    layers = jax.device_put(jax.tree.map(place, init()["layers"]), by_stage)
    batch = jax.device_put(make_batch(m), NamedSharding(mesh, P()))
    return training_step(value_and_grad), layers, batch


def contenders(microbatches: int) -> dict[str, Callable[[], tuple]]:
    made: dict[str, Callable[[], tuple]] = {
        "one device, accumulation": lambda: accumulated(microbatches),
        "circular autodiff, v=1": lambda: circular(1, microbatches),
        "circular autodiff, v=2": lambda: circular(2, microbatches),
    }
    for name, remat in (
        *(("1f1b", "none"), ("1f1b-fused", "none"), ("1f1b-fused", "full")),
        *(("zb-v", "none"), ("zb-v", "full")),
    ):
        made[f"{name}, remat {remat}"] = lambda n=name, r=remat: pipelined(n, r, microbatches)
    return made


def main() -> None:
    """Prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    console = Console()
    running, rows = {}, {}
    for name, make in contenders(options.microbatches).items():
        console.print(f"compiling {name}")
        step, params, batch = make()
        began = time.perf_counter()
        compiled = step.lower(params, batch).compile()
        seconds = time.perf_counter() - began
        params, loss = compiled(params, batch)
        running[name] = [compiled, params, batch]
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        rows[name] = {"compile_seconds": seconds, "bytes": temporaries, "loss": float(loss)}
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(options.rounds):
        for name, case in running.items():
            began = time.perf_counter()
            case[1], loss = case[0](case[1], case[2])
            jax.block_until_ready((case[1], loss))
            times[name].append(time.perf_counter() - began)
    table = Table("contender", "step s", "of one device", "compile s", "temporaries MB", "loss")
    base = statistics.median(times["one device, accumulation"])
    for name, row in rows.items():
        row["step_seconds"] = statistics.median(times[name])
        table.add_row(
            *(name, f"{row['step_seconds']:.3f}", f"{row['step_seconds'] / base:.2f}"),
            *(f"{row['compile_seconds']:.1f}", f"{row['bytes'] / 1e6:.1f}", f"{row['loss']:.6f}"),
        )
    console.print(table)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"throughput_{options.microbatches}.json"
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
