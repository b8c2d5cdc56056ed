"""A small model whose layers differ: shapes, kinds, a value that travels past layers, a state."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe

WIDE, NARROW, CLASSES, LENGTH = 8, 4, 3, 2


def mix(w, x, batch, rng):
    """Keeps its shape; reads the microbatch."""
    del rng
    return x | {"main": x["main"] + jnp.tanh(x["main"] @ w["kernel"] + batch["shift"][:, None, :1])}


def narrow(w, x, batch, rng):
    """Halves the width, keeps what came in for the last layers, and drops out."""
    del batch
    main = jnp.tanh(x["main"] @ w["kernel"] + w["bias"])
    if rng is not None:
        main = jnp.where(jax.random.bernoulli(rng, 0.8, main.shape), main / 0.8, 0)
    return {"main": main, "kept": x["main"]}


def join(w, x, batch, rng):
    """Reads what travelled past the layers between."""
    del rng
    joined = jnp.tanh(x["main"] @ w["main"] + x["kept"] @ w["kept"] + batch["shift"][:, None, :])
    return x | {"main": x["main"] + joined}


FUNCTIONS = (mix, mix, narrow, mix, mix, join, mix, join)


def centre(function):
    """The layer with its input centred, and a running mean of it as its state."""

    def layer(w, x, batch, rng, state):
        mean = x["main"].mean((0, 1))
        y = function(w, x | {"main": x["main"] - mean}, batch, rng)
        return y, {"mean": 0.9 * state["mean"] + 0.1 * jax.lax.stop_gradient(mean)}

    return layer


CENTRED = {function: centre(function) for function in set(FUNCTIONS)}


def model(*, stateful: bool = False) -> jaxpipe.Model:
    return jaxpipe.Model(
        embed=lambda outer, batch, rng: {"main": batch["x"] @ outer["embed"]},
        layer=tuple(CENTRED[f] if stateful else f for f in FUNCTIONS),
        head_loss=lambda outer, x, batch, rng: jnp.mean(
            (x["main"] @ outer["head"] - batch["y"]) ** 2
        ),
        stateful=stateful,
    )


def params() -> dict:
    draw = np.random.default_rng(0).normal

    def normal(*shape):
        return np.float32(0.5 * draw(size=shape))

    def layer(n, function):
        if function is narrow:
            return {"kernel": normal(WIDE, NARROW), "bias": normal(NARROW)}
        if function is join:
            return {"main": normal(NARROW, NARROW), "kept": normal(WIDE, NARROW)}
        width = WIDE if n < FUNCTIONS.index(narrow) else NARROW
        return {"kernel": normal(width, width)}

    return {
        "embed": normal(5, WIDE),
        "layers": tuple(layer(n, function) for n, function in enumerate(FUNCTIONS)),
        "head": normal(NARROW, CLASSES),
    }


def states() -> tuple:
    narrow_at = FUNCTIONS.index(narrow)
    return tuple(
        {"mean": np.ones(WIDE if n <= narrow_at else NARROW, np.float32)}
        for n in range(len(FUNCTIONS))
    )


def batch(rows: int) -> dict:
    draw = np.random.default_rng(1).normal
    shapes = {"x": (rows, LENGTH, 5), "y": (rows, LENGTH, CLASSES), "shift": (rows, NARROW)}
    return {name: np.float32(draw(size=shape)) for name, shape in shapes.items()}
