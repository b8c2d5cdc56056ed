"""A small model with what a pipeline must get right: vocabulary, dropout, tied tables."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe
from jaxpipe import vocabulary

VOCAB, WIDTH, LENGTH = 11, 8, 5


def model(*, tied: bool, axis: str | None) -> jaxpipe.Model:
    """The toy with its tables split over ``axis``, or whole."""

    def table(outer):
        return outer["embed"]["table"] if tied else outer["head"]["table"]

    def embed(outer, batch, rng):
        rows = vocabulary.lookup(outer["embed"]["table"], batch["tokens"][:, :-1], axis=axis)
        return rows + outer["embed"]["positions"]

    def layer(w, x, batch, rng):
        hidden = jnp.tanh(x @ w["up"] + w["bias"])
        if rng is not None:
            hidden = jnp.where(jax.random.bernoulli(rng, 0.8, hidden.shape), hidden / 0.8, 0)
        return x + hidden @ w["down"]

    def head_loss(outer, x, batch, rng):
        targets = batch["tokens"][:, 1:]
        x = x * outer["head"]["scale"]
        return vocabulary.cross_entropy(x, table(outer), targets, vocab_size=VOCAB, axis=axis)

    head = {"scale": None} if tied else {"scale": None, "table": 0}
    split = {"embed": {"positions": None, "table": 0}, "head": head}
    return jaxpipe.Model(embed, layer, head_loss, stage_split=split if axis else None)


def params(*, tied: bool, num_layers: int) -> dict:
    draw = np.random.default_rng(0).normal
    head = {"scale": np.linspace(0.5, 1.5, WIDTH)}
    if not tied:
        head["table"] = draw(size=(VOCAB, WIDTH))
    drawn = {
        "embed": {"table": draw(size=(VOCAB, WIDTH)), "positions": draw(size=(LENGTH, WIDTH))},
        "layers": {
            "up": 0.3 * draw(size=(num_layers, WIDTH, 2 * WIDTH)),
            "down": 0.3 * draw(size=(num_layers, 2 * WIDTH, WIDTH)),
            "bias": np.full((num_layers, 2 * WIDTH), 0.1),
        },
        "head": head,
    }
    return jax.tree.map(np.float32, drawn)


def batch(rows: int) -> dict:
    tokens = np.random.default_rng(1).integers(VOCAB, size=(rows, LENGTH + 1), dtype=np.int32)
    return {"tokens": tokens}
