"""The reference's model as a `jaxpipe.Model`, and small runs of it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from asynchronous_reference import Settings

import jaxpipe
from jaxpipe import AsyncPipeline

WIDTH = 4


def packed(layers: int) -> dict:
    """Parameters of layers of two kinds, which take turns: 2 WIDTH and 3 WIDTH hidden units."""
    wide = params(layers=layers, tied=True)
    draw = np.random.default_rng(7).normal

    def layer(n: int) -> dict:
        hidden = (2 + n % 2) * WIDTH
        return {
            "up": np.float32(0.5 * draw(size=(WIDTH, hidden))),
            "bias": np.float32(0.1 * draw(size=hidden)),
            "down": np.float32(0.5 * draw(size=(hidden, WIDTH))),
        }

    return wide | {"layers": tuple(layer(n) for n in range(layers))}


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


def states(layers: int) -> tuple:
    """The initial means of the layers, for a model that is stateful."""
    draw = np.random.default_rng(3).normal
    return tuple({"mean": np.float32(draw(size=WIDTH))} for _ in range(layers))


def model(
    *, tied: bool, packed: int | None = None, stateful: bool = False, reads: bool = True
) -> jaxpipe.Model:
    """The reference's model.

    Args:
      tied: whether the head reads the embedding's table.
      packed: how many layers there are, if they differ.
      stateful: whether layers keep a mean.
      reads: whether they centre their input by it.
    """

    def embed(outer, batch, rng):
        return batch["inputs"] @ outer["embed"]["table"]

    def layer(w, x, batch, rng):
        return x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"]

    def stateful_layer(w, x, batch, rng, state):
        mean = state["mean"] if reads else 0
        y = mean + layer(w, x - mean, batch, rng)
        return y, {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0)}

    def head_loss(outer, x, batch, rng):
        readout = outer["embed"]["table"].T if tied else outer["head"]["readout"]
        return jnp.mean((x @ readout - batch["targets"]) ** 2)

    one = stateful_layer if stateful else layer
    layers = one if packed is None else (one,) * packed
    return jaxpipe.Model(embed, layers, head_loss, stateful=stateful)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.02),
    "momentum": lambda: optax.sgd(0.01, momentum=0.9),
    "adam": lambda: optax.adam(0.01, b1=0.9, b2=0.95, eps=1e-6),
    "adamw": lambda: optax.adamw(
        lambda count: 0.02 / (count + 1), b1=0.9, b2=0.95, eps=1e-6, weight_decay=0.1
    ),
}


def pipeline(
    settings: Settings, start: dict, *, data=1, zero=0, fused=False, states=None, reads=True
) -> AsyncPipeline:
    pipe = jaxpipe.Pipeline(
        model(
            tied=not start["head"],
            packed=len(start["layers"]) if isinstance(start["layers"], tuple) else None,
            stateful=states is not None,
            reads=reads,
        ),
        start,
        schedule=jaxpipe.schedules.build(
            "1f1b-fused" if fused else "1f1b",
            stages=settings.stages,
            microbatches=settings.microbatches,
        ),
        mesh=jaxpipe.make_mesh(stage=settings.stages, data=data),
        remat=settings.remat,
        zero=zero,
        states=states,
        poison=True,
    )
    return AsyncPipeline(
        pipe,
        OPTIMIZERS[settings.optimizer](),
        method=settings.method,
        rescheduling_steps=settings.rescheduling_steps,
        discrepancy_decay=settings.discrepancy_decay,
        recompute_segment=settings.recompute_segment,
        clip_norm=settings.clip_norm,
    )


def train(
    settings: Settings, training: AsyncPipeline, start: dict, batches: list[dict]
) -> tuple[list[float], dict, dict]:
    """Losses of all minibatches; canonical parameters and the optimizer's state at the end."""
    pipe, params = training.pipe, training.pipe.place(start)
    optimizer_state, losses = training.optimizer.init(params), []
    if settings.warm_up:
        synchronous = jax.jit(functools.partial(synchronous_step, training))
        for batch in batches[: settings.warm_up]:
            params, optimizer_state, loss = synchronous(params, optimizer_state, batch)
            losses.append(loss)
    state = training.init(params, optimizer_state, batches[0])
    step, drain = jax.jit(training.step, donate_argnums=0), jax.jit(training.drain)
    for number, batch in enumerate(batches[settings.warm_up :], start=settings.warm_up):
        if number in settings.drains:
            state, left = drain(state)
            losses.extend(left)
        state, loss = step(state, batch)
        losses.append(loss)
    state, left = drain(state)
    found = np.asarray([*losses, *left])
    found = found[~np.isnan(found)]
    assert len(found) == len(batches)
    params, optimizer_state = training.finish(state)
    return found.tolist(), pipe.unplace(params), optimizer_state


def synchronous_step(training: AsyncPipeline, params, optimizer_state, batch):
    loss, gradients = training.pipe.value_and_grad(params, batch)
    updates, optimizer_state = training.optimizer.update(gradients, optimizer_state, params)
    return optax.apply_updates(params, updates), optimizer_state, loss
