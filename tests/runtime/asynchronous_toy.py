"""The reference's model as a `jaxpipe.Model`, and small runs of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from asynchronous_reference import Settings

import jaxpipe
from jaxpipe import AsyncPipeline

WIDTH = 4


def params(*, layers: int, tied: bool = True, differ: bool = False) -> dict:
    """Parameters of layers of 2 WIDTH hidden units, or of 2 WIDTH and 3 WIDTH in turns."""
    draw = np.random.default_rng(0).normal
    head = {} if tied else {"readout": draw(size=(WIDTH, 3))}
    embed = {"table": draw(size=(3, WIDTH))}

    def layer(n: int) -> dict:
        hidden = (2 + n % 2 * differ) * WIDTH
        return {
            "up": 0.5 * draw(size=(WIDTH, hidden)),
            "bias": 0.1 * draw(size=hidden),
            "down": 0.5 * draw(size=(hidden, WIDTH)),
        }

    drawn = tuple(layer(n) for n in range(layers))
    stacked = drawn if differ else jax.tree.map(lambda *w: np.stack(w), *drawn)
    return jax.tree.map(np.float32, {"embed": embed, "layers": stacked, "head": head})


def minibatches(count: int, rows: int) -> list[dict]:
    draw = np.random.default_rng(1).normal
    return [
        {name: np.float32(draw(size=(rows, 3))) for name in ("inputs", "targets")}
        for _ in range(count)
    ]


def states(layers: int) -> tuple:
    """The initial means of the layers, for a model that is stateful."""
    draw = np.random.default_rng(3).normal
    return tuple({"mean": np.float32(draw(size=WIDTH))} for _ in range(layers))


def model(start: dict, *, stateful: bool = False, reads: bool = True) -> jaxpipe.Model:
    """The reference's model.

    Args:
      start: parameters for it.
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
        readout = outer["head"].get("readout", outer["embed"]["table"].T)
        return jnp.mean((x @ readout - batch["targets"]) ** 2)

    one, layers = stateful_layer if stateful else layer, start["layers"]
    layers = (one,) * len(layers) if isinstance(layers, tuple) else one
    return jaxpipe.Model(embed, layers, head_loss, stateful=stateful)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.02),
    "momentum": lambda: optax.sgd(0.01, momentum=0.9),
    "adam": lambda: optax.adam(0.01, b1=0.9, b2=0.95, eps=1e-6),
    "adamw": lambda: optax.adamw(
        lambda count: 0.02 / (count + 1), b1=0.9, b2=0.95, eps=1e-6, weight_decay=0.1
    ),
}
METHOD = ("method", "rescheduling_steps", "discrepancy_decay", "recompute_segment", "clip_norm")


def pipeline(
    settings: Settings, start: dict, *, data=1, schedule="1f1b", states=None, reads=True, **options
) -> AsyncPipeline:
    """A pipeline that never drains, as the settings say."""
    pipe = jaxpipe.Pipeline(
        model(start, stateful=states is not None, reads=reads),
        start,
        schedule=schedule,
        microbatches=settings.microbatches,
        mesh=jaxpipe.make_mesh(stage=settings.stages, data=data),
        remat=settings.remat,
        states=states,
        poison=True,
        **options,
    )
    method = {name: getattr(settings, name) for name in METHOD}
    return AsyncPipeline(pipe, OPTIMIZERS[settings.optimizer](), **method)


def train(
    settings: Settings, training: AsyncPipeline, start: dict, batches: list[dict], states=None
) -> tuple[list[float], dict, tuple]:
    """Losses of all minibatches, and canonical parameters and states at the end.

    Two minibatches enter in a call if layers keep states; a checkpoint follows every call.
    """
    pipe, optimizer, params = training.pipe, training.optimizer, training.pipe.place(start)
    optimizer_state, losses, entering = optimizer.init(params), [], 2 if states else 1
    if settings.warm_up:
        synchronous = jax.jit(functools.partial(synchronous_step, training))
        for batch in batches[: settings.warm_up]:
            params, optimizer_state, loss = synchronous(params, optimizer_state, batch)
            losses.append(loss)
    placed_states = pipe.place_states(states) if states else None
    state = training.init(params, optimizer_state, batches[0], states=placed_states)
    step = jax.jit(functools.partial(jax.lax.scan, training.step), donate_argnums=0)
    drain = jax.jit(training.drain)
    for number in range(settings.warm_up, len(batches), entering):
        if number in settings.drains:
            state, left = drain(state)
            losses.extend(left)
        call = jax.tree.map(lambda *w: np.stack(w), *batches[number : number + entering])
        state, new = step(state, call)
        losses.extend(new)
        state = jax.tree.map(lambda w: jax.device_put(np.asarray(w), w.sharding), state)
    state, left = drain(state)
    found = np.asarray([*losses, *left])
    found = found[~np.isnan(found)]
    assert len(found) == len(batches)
    end = pipe.unplace_states(state["states"]) if states else ()
    return found.tolist(), pipe.unplace(training.finish(state)[0]), end


def synchronous_step(training: AsyncPipeline, params, optimizer_state, batch):
    loss, gradients = training.pipe.value_and_grad(params, batch)
    updates, optimizer_state = training.optimizer.update(gradients, optimizer_state, params)
    return optax.apply_updates(params, updates), optimizer_state, loss
