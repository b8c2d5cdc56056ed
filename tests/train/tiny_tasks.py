"""Small configurations of every task, rows for them, and what their first step must equal."""

import jax
import numpy as np

from train.config import Config
from train.step import Setup

TINY = {
    "gpt": {"vocab_size": 50, "sequence_length": 8, "num_layers": 3, "width": 8, "num_heads": 2},
    "bert": {"vocab_size": 40, "sequence_length": 8, "num_layers": 4, "width": 8, "num_heads": 2},
    "transformer": {
        "vocab_size": 40, "sequence_length": 8, "num_encoder_layers": 2, "num_decoder_layers": 2,
        "width": 8, "num_heads": 2, "dropout": 0.0,
    },
    "resnet": {"depth": 8, "width": 4, "norm": "batch"},
    "vision_language": {
        "num_layers": 2, "num_encoder_layers": 1, "width": 8, "num_heads": 2, "encoder_width": 8,
        "encoder_heads": 2, "patch_size": 1,
    },
    "toy_family:Toy": {"num_layers": 4, "width": 3},
    "toy_family:Running": {"num_layers": 3, "width": 4},
    "toy_family:Uneven": {"num_layers": 4, "width": 3},
}  # fmt: skip


def config(task: str = "toy_family:Toy", **sections: dict) -> Config:
    """A configuration of a small model; ``sections`` add to the fields that are here."""
    base = {
        "model": TINY[task],
        "mesh": {"stage": 2, "data": 2},
        "pipeline": {"schedule": "1f1b", "microbatches": 2, "vocabulary": "split"},
        "optimizer": {"warmup_steps": 0},
        "train": {"batch_size": 8, "steps": 20, "eval_batches": 1},
    }
    return Config(task=task, **base | {n: base.get(n, {}) | own for n, own in sections.items()})


def rows(setup: Setup) -> dict:
    rng = np.random.default_rng(0)

    def fill(leaf):
        if leaf.dtype == np.int32:
            return rng.integers(3, 10, leaf.shape).astype(np.int32)
        return rng.normal(size=leaf.shape).astype(np.float32)

    return jax.tree.map(fill, setup.batch_shapes)


def layer_by_layer(params):
    """Parameters with one tree per layer, as an optimizer sees them."""
    layers = jax.device_get(params["layers"])
    if isinstance(layers, tuple):
        return params
    depth = jax.tree.leaves(layers)[0].shape[0]
    one = [jax.tree.map(lambda w, n=n: w[n], layers) for n in range(depth)]
    return params | {"layers": tuple(one)}


def assert_same_first_step(got, want, gradients) -> None:
    """Parameters after one step of Adam are equal where more than rounding decides them.

    Args:
      got, want: parameters.
      gradients: of that step, up to a factor.
    """
    # As arrays of jax, every shape would compile its own selection.
    got, want, gradients = jax.tree.map(np.asarray, (got, want, gradients))
    for (path, leaf), expected, gradient in zip(
        jax.tree.leaves_with_path(got),
        jax.tree.leaves(want),
        jax.tree.leaves(gradients),
        strict=True,
    ):
        # Adam's first step is the gradient's sign: nothing is known where that is noise.
        counts = np.abs(gradient) > 1e-4 * np.abs(gradient).max()
        np.testing.assert_allclose(
            leaf[counts], expected[counts], atol=5e-5, err_msg=jax.tree_util.keystr(path)
        )
