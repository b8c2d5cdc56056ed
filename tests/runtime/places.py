"""A small model of two kinds of layers in turn: chunks that begin with the first kind have the same
kinds, with the same parameters, at the same places."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe

WIDTH, HIDDEN, CLASSES = 6, 10, 3


def plain(w, x, batch, rng):
    hidden = jnp.tanh(x @ w["kernel"] + batch["shift"])
    if rng is not None:
        hidden = jnp.where(jax.random.bernoulli(rng, 0.8, hidden.shape), hidden / 0.8, 0)
    return x + hidden


def gated(w, x, batch, rng):
    return x + w["gain"] * (jnp.tanh(x @ w["up"]) @ w["down"])


def model(num_layers: int) -> jaxpipe.Model:
    return jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"] @ outer["embed"],
        layer=tuple((plain, gated)[n % 2] for n in range(num_layers)),
        head_loss=lambda outer, x, batch, rng: jnp.mean((x @ outer["head"] - batch["y"]) ** 2),
    )


def params(num_layers: int) -> dict:
    draw = np.random.default_rng(0).normal

    def normal(*shape):
        return np.float32(0.5 * draw(size=shape))

    def layer(n):
        if n % 2:
            return {"up": normal(WIDTH, HIDDEN), "down": normal(HIDDEN, WIDTH), "gain": normal(1)}
        return {"kernel": normal(WIDTH, WIDTH)}

    layers = tuple(map(layer, range(num_layers)))
    return {"embed": normal(4, WIDTH), "layers": layers, "head": normal(WIDTH, CLASSES)}


def batch(rows: int) -> dict:
    draw = np.random.default_rng(1).normal
    shapes = {"x": (rows, 4), "shift": (rows, WIDTH), "y": (rows, CLASSES)}
    return {name: np.float32(draw(size=shape)) for name, shape in shapes.items()}
