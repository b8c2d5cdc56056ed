"""A small model that is split over model axes: columns and rows of matmuls over "tensor", one of
them two in one, the vocabulary, and between layers the sequence."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe import vocabulary

VOCAB, WIDTH, LENGTH, HIDDEN = 7, 4, 6, 8
GATES = HIDDEN // 2
LAYERS = {
    "up": jaxpipe.Joined(P(None, "tensor"), (HIDDEN, GATES)),
    "bias": jaxpipe.Joined(P("tensor"), (HIDDEN, GATES)),
    "down": P("tensor", None),
    "scale": None,
}


def model(*, split: bool, differ: int = 0, ends: bool = False) -> jaxpipe.Model:
    """The toy on its mesh, or whole on one device; ``differ`` layers of their own, if any; tables
    at the ends of the pipeline, or split over stages, too."""
    over = {"axis": None if ends else "stage", "sequence_axis": "tensor"} if split else {}

    def part(x, dim):
        """This device's part of what every device along the axis has whole."""
        if not split:
            return x
        size = x.shape[dim] // lax.axis_size("tensor")
        return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * size, size, dim)

    def embed(outer, batch, rng):
        rows = vocabulary.lookup(outer["embed"]["table"], batch["tokens"][:, :-1], **over)
        return rows + part(outer["embed"]["positions"], 0)

    def layer(w, x, batch, rng):
        h = x * w["scale"]
        if split:
            h = lax.all_gather(h, "tensor", axis=1, tiled=True)
        h = h @ w["up"] + w["bias"]
        cut = h.shape[-1] * HIDDEN // (HIDDEN + GATES)
        h = jnp.tanh(h[..., :cut]) * jnp.repeat(h[..., cut:], 2, axis=-1)
        if rng is not None:
            keep = jax.random.bernoulli(rng, 0.8, (*h.shape[:2], HIDDEN))
            h = jnp.where(part(keep, 2), h / 0.8, 0)
        y = h @ w["down"]
        if split:
            y = lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)
        return x + y

    def head_loss(outer, x, batch, rng):
        table, targets = outer["head"]["table"], batch["tokens"][:, 1:]
        return vocabulary.cross_entropy(x, table, targets, vocab_size=VOCAB, **over)

    return jaxpipe.Model(
        embed,
        (layer,) * differ if differ else layer,
        head_loss,
        stage_split={"embed": {"positions": None, "table": 0}, "head": {"table": 0}}
        if split and not ends
        else None,
        axes=("tensor",) if split else (),
        axis_split={
            "embed": {"positions": None, "table": P("tensor")},
            "layers": (LAYERS,) * differ if differ else LAYERS,
            "head": P("tensor"),
        }
        if split
        else None,
    )


def params(num_layers: int, *, differ: bool = False) -> dict:
    draw = np.random.default_rng(0).normal
    layers = {
        "up": 0.5 * draw(size=(num_layers, WIDTH, HIDDEN + GATES)),
        "bias": 0.1 * draw(size=(num_layers, HIDDEN + GATES)),
        "down": 0.5 * draw(size=(num_layers, HIDDEN, WIDTH)),
        "scale": np.linspace(0.5, 1.5, num_layers * WIDTH).reshape(num_layers, WIDTH),
    }
    if differ:
        layers = tuple({name: w[n] for name, w in layers.items()} for n in range(num_layers))
    table = {"table": draw(size=(VOCAB, WIDTH))}
    embed = table | {"positions": draw(size=(LENGTH, WIDTH))}
    return jax.tree.map(np.float32, {"embed": embed, "layers": layers, "head": table})


def batch(rows: int) -> dict:
    tokens = np.random.default_rng(1).integers(VOCAB, size=(rows, LENGTH + 1), dtype=np.int32)
    return {"tokens": tokens}
