"""A small model with low-rank adapters on int8 weights, and a table that all layers share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe

DEPTH, WIDTH, RANK, CLASSES = 5, 8, 2, 3
TRAINABLE = ("layers/*lora_*", "head", "shared/gain")


def layer(params, x, batch, rng):
    """An adapted matmul; reads what all layers share."""
    w, shared = params
    kernel = w["base"].astype(x.dtype) * w["scale"]
    y = x @ kernel + (x @ w["lora_a"]) @ w["lora_b"]
    y = y * shared["gain"] + shared["table"][batch["place"]]
    if rng is not None:
        y = jnp.where(jax.random.bernoulli(rng, 0.9, y.shape), y / 0.9, 0)
    return x + jnp.tanh(y)


def plain(params, x, batch, rng):
    """Nothing of its own is trained."""
    w, shared = params
    return x + jnp.tanh(x @ w["base"]) * shared["gain"]


def head_loss(outer, x, batch, rng):
    """Reads what layers share, too."""
    logits = (x * outer["shared"]["gain"]) @ outer["head"]
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(x)), batch["y"]])


def model(*, differ: bool) -> jaxpipe.Model:
    return jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"] @ outer["embed"],
        layer=(layer, plain, layer, layer, plain) if differ else layer,
        head_loss=head_loss,
    )


@functools.cache
def params(*, differ: bool) -> dict:
    rng = np.random.default_rng(0)

    def normal(*shape):
        return np.float32(rng.normal(size=shape) / np.sqrt(WIDTH))

    def adapted(*lead):
        base = rng.integers(-100, 100, (*lead, WIDTH, WIDTH))
        return {
            "base": np.int8(base),
            "scale": np.full((*lead, 1), 0.005, np.float32),
            "lora_a": normal(*lead, WIDTH, RANK),
            "lora_b": normal(*lead, RANK, WIDTH),
        }

    layers = adapted(DEPTH)
    if differ:
        base = {"base": normal(WIDTH, WIDTH)}
        layers = (adapted(), base, adapted(), adapted(), base)
    return {
        "embed": normal(WIDTH, WIDTH),
        "layers": layers,
        "head": normal(WIDTH, CLASSES),
        "shared": {"gain": 1 + normal(WIDTH), "table": normal(4, WIDTH)},
    }


def batch(rows: int) -> dict:
    rng = np.random.default_rng(1)
    return {
        "x": np.float32(rng.normal(size=(rows, WIDTH))),
        "y": np.int32(rng.integers(0, CLASSES, rows)),
        "place": np.int32(rng.integers(0, 4, rows)),
    }
