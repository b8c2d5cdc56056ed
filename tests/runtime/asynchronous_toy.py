"""The reference's model as a `jaxpipe.Model`, and small runs of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from asynchronous_reference import Settings

import jaxpipe
from jaxpipe.runtime.asynchronous import AsyncPipeline

WIDTH = 4


def params(*, layers: int, tied: bool, seed: int = 0) -> dict:
    draw = np.random.default_rng(seed).normal
    head = {} if tied else {"readout": draw(size=(WIDTH, 3))}
    drawn = {
        "embed": {"table": draw(size=(3, WIDTH))},
        "layers": {
            "up": 0.5 * draw(size=(layers, WIDTH, 2 * WIDTH)),
            "bias": 0.1 * draw(size=(layers, 2 * WIDTH)),
            "down": 0.5 * draw(size=(layers, 2 * WIDTH, WIDTH)),
        },
        "head": head,
    }
    return jax.tree.map(np.float32, drawn)


def minibatches(count: int, rows: int, seed: int = 1) -> list[dict]:
    draw = np.random.default_rng(seed).normal
    return [
        {name: np.float32(draw(size=(rows, 3))) for name in ("inputs", "targets")}
        for _ in range(count)
    ]


def model(*, tied: bool) -> jaxpipe.Model:
    def embed(outer, batch, rng):
        return batch["inputs"] @ outer["embed"]["table"]

    def layer(w, x, batch, rng):
        return x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"]

    def head_loss(outer, x, batch, rng):
        readout = outer["embed"]["table"].T if tied else outer["head"]["readout"]
        return jnp.mean((x @ readout - batch["targets"]) ** 2)

    return jaxpipe.Model(embed, layer, head_loss)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.02),
    "momentum": lambda: optax.sgd(0.01, momentum=0.9),
    "adam": lambda: optax.adam(0.01, b1=0.9, b2=0.95, eps=1e-6),
    "adamw": lambda: optax.adamw(
        lambda count: 0.02 / (count + 1), b1=0.9, b2=0.95, eps=1e-6, weight_decay=0.1
    ),
}


def pipeline(settings: Settings, start: dict, *, data=1, zero=0, fused=False) -> AsyncPipeline:
    pipe = jaxpipe.Pipeline(
        model(tied=not start["head"]),
        start,
        schedule=jaxpipe.schedules.build(
            "1f1b-fused" if fused else "1f1b",
            stages=settings.stages,
            microbatches=settings.microbatches,
        ),
        mesh=jaxpipe.make_mesh(stage=settings.stages, data=data),
        remat=settings.remat,
        zero=zero,
        poison=True,
    )
    return AsyncPipeline(
        pipe,
        OPTIMIZERS[settings.optimizer](),
        method=settings.method,
        rescheduling_steps=settings.rescheduling_steps,
        discrepancy_decay=settings.discrepancy_decay,
        clip_norm=settings.clip_norm,
    )


def train(training: AsyncPipeline, start: dict, batches: list[dict]) -> tuple[list[float], dict]:
    """Losses of all minibatches, drained at the end, and canonical parameters."""
    pipe = training.pipe
    placed = pipe.place(start)
    state = training.init(placed, training.optimizer.init(placed), batches[0])
    step = jax.jit(training.step, donate_argnums=0)
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(loss)
    state, rest = jax.jit(training.drain)(state)
    losses = np.asarray([*losses, *rest])
    assert np.isnan(losses).sum() == len(losses) - len(batches)
    end, _ = training.finish(state)
    return losses[~np.isnan(losses)].tolist(), pipe.unplace(end)
