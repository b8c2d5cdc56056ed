"""A small mixture of experts: a balance loss, a token-weighted loss, metrics of every kind."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe

VOCAB, WIDTH, LENGTH, EXPERTS = 7, 6, 4, 3


def layer(w, x, batch, rng):
    """Routes every token to its likeliest expert, and returns balance loss and metrics beside x."""
    del batch
    probabilities = jax.nn.softmax(x @ w["router"])
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, -1), EXPERTS)
    hidden = jnp.tanh(jnp.einsum("rlw,ewh->rleh", x, w["up"]))
    if rng is not None:
        hidden = jnp.where(jax.random.bernoulli(rng, 0.8, hidden.shape), hidden / 0.8, 0)
    gates = chosen * probabilities
    y = x + jnp.einsum("rleh,ehw,rle->rlw", hidden, w["down"], gates)
    balance = EXPERTS * jnp.sum(chosen.mean((0, 1)) * probabilities.mean((0, 1)))
    metrics = {
        "confidence": probabilities.max(-1).mean(),
        "use": jaxpipe.Sum(chosen.sum((0, 1)).astype(jnp.int32)),
    }
    return jaxpipe.WithLoss(y, (0.3 * balance, metrics))


def dense(w, x, batch, rng):
    """A layer without a loss of its own."""
    del batch, rng
    return x + jnp.tanh(x @ w["kernel"])


def centered(function):
    """The layer with its input centered, and a running mean of it as its state."""

    def stateful(w, x, batch, rng, state):
        mean = x.mean((0, 1))
        y = function(w, x - 0.5 * mean - 0.5 * state["mean"], batch, rng)
        return y, {"mean": 0.9 * state["mean"] + 0.1 * jax.lax.stop_gradient(mean)}

    return stateful


DIFFERENT = (layer, dense, layer, dense, dense, layer)
CENTERED = {function: centered(function) for function in (layer, dense)}


def losses_of(outer, x, batch):
    """The loss of every token, and whether it is predicted."""
    logits = x @ outer["head"]["table"].T
    log_probabilities = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probabilities, batch["targets"][..., None], -1)[..., 0]
    return -picked, jnp.argmax(logits, -1) == batch["targets"]


def head_loss(outer, x, batch, rng):
    del rng
    losses, right = losses_of(outer, x, batch)
    mask = batch["mask"]
    loss = jaxpipe.Weighted((mask * losses).sum(), mask.sum())
    metrics = {
        "cross entropy": loss,
        "accuracy": jaxpipe.Weighted((mask * right).sum(), mask.sum()),
        "tokens": jaxpipe.Sum((mask > 0).sum()),
        "right by target": jaxpipe.Sum(
            jnp.zeros(VOCAB, jnp.int32).at[batch["targets"]].add(right & (mask > 0))
        ),
        "largest": {"activation": jnp.abs(x).max(), "token": jnp.abs(x).max((0, 1))},
    }
    return loss, metrics


def mean_loss(outer, x, batch, rng):
    """The mean over the tokens of a microbatch."""
    del rng
    return losses_of(outer, x, batch)[0].mean()


def model(head=head_loss, *, differ: bool = False, stateful: bool = False) -> jaxpipe.Model:
    functions = tuple(CENTERED[f] if stateful else f for f in DIFFERENT)
    return jaxpipe.Model(
        embed=lambda outer, batch, rng: outer["embed"]["table"][batch["tokens"]],
        layer=functions if differ else layer,
        head_loss=head,
        stateful=stateful,
    )


def params(*, differ: bool = False) -> dict:
    draw = np.random.default_rng(0).normal

    def normal(*shape):
        return np.float32(0.6 * draw(size=shape))

    def experts():
        return {
            "router": normal(WIDTH, EXPERTS),
            "up": normal(EXPERTS, WIDTH, 8),
            "down": normal(EXPERTS, 8, WIDTH),
        }

    trees = [
        experts() if function is layer or not differ else {"kernel": normal(WIDTH, WIDTH)}
        for function in DIFFERENT
    ]
    return {
        "embed": {"table": normal(VOCAB, WIDTH)},
        "layers": tuple(trees) if differ else jax.tree.map(lambda *w: np.stack(w), *trees),
        "head": {"table": normal(VOCAB, WIDTH)},
    }


def states() -> tuple:
    return tuple({"mean": np.full(WIDTH, 0.1 * n, np.float32)} for n in range(len(DIFFERENT)))


def batch(rows: int) -> dict:
    """Some rows have all of their tokens, most have one, and some have none."""
    rng = np.random.default_rng(1)
    valid = rng.choice([0, 1, 1, 1, LENGTH], (rows, 1))
    return {
        "tokens": rng.integers(VOCAB, size=(rows, LENGTH), dtype=np.int32),
        "targets": rng.integers(VOCAB, size=(rows, LENGTH), dtype=np.int32),
        "mask": np.float32(np.arange(LENGTH) < valid),
    }
