"""Small models of every task but the GPT, and rows for them."""

from __future__ import annotations

import jax
import numpy as np

from train.step import Program

TINY = {
    "bert": {"vocab_size": 40, "sequence_length": 8, "num_layers": 4, "width": 8, "num_heads": 2},
    "transformer": {
        "vocab_size": 40, "sequence_length": 8, "num_encoder_layers": 2, "num_decoder_layers": 2,
        "width": 8, "num_heads": 2, "dropout": 0.0,
    },
    "resnet": {"depth": 8, "width": 4, "norm": "batch"},
}  # fmt: skip


def rows(program: Program) -> dict:
    rng = np.random.default_rng(0)

    def fill(leaf):
        if leaf.dtype == np.int32:
            return rng.integers(3, 10, leaf.shape).astype(np.int32)
        return rng.normal(size=leaf.shape).astype(np.float32)

    return jax.tree.map(fill, program.batch_shapes)
