"""One optimizer step through the pipeline against plain optax on the unpipelined model."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from tiny_tasks import layer_by_layer

import jaxpipe
from models import gpt
from train.config import Config
from train.step import Setup, make_optimizer

CONFIG = {
    "model": {"vocab_size": 50, "sequence_length": 8, "num_layers": 5, "width": 8, "num_heads": 2},
    "mesh": {"stage": 4, "data": 2},
    "pipeline": {"schedule": "1f1b", "microbatches": 3},
    "train": {"batch_size": 6, "steps": 20},
}


@jax.jit
def gradients(params, tokens):
    """Of the unpipelined model."""
    model = gpt.model(gpt.GPTConfig(**CONFIG["model"]))

    def loss(params):
        return jaxpipe.unpipelined.loss(
            model, params, {"tokens": tokens}, num_microbatches=3, data_shards=2
        )

    return jax.grad(loss)(params)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("zero", "weights"), [(0, "stacked"), (1, "stacked"), (3, "stacked"), (2, "unrolled")]
)
def test_a_step_is_adamw_on_the_canonical_parameters(zero, weights):
    sections = {name: dict(section) for name, section in CONFIG.items()}
    sections["pipeline"] |= {"zero": zero, "weights": weights}
    sections["optimizer"] = {"clip_norm": 0.05, "warmup_steps": 0, "weight_decay": 0.5}
    config = Config(**sections)
    setup = Setup(config)
    tokens = np.random.default_rng(3).integers(50, size=(6, 9), dtype=np.int32)
    state = setup.init()
    before = jax.tree.map(np.asarray, setup.to_canonical(state).params)
    state, metrics = setup.train_step(state, {"tokens": tokens}, None)

    grads = gradients(before, tokens)
    norm = optax.tree.norm(grads)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    optimizer = make_optimizer(config.optimizer, setup.learning_rate)
    before, grads = layer_by_layer(before), layer_by_layer(grads)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(before), before)
    expected = optax.apply_updates(before, updates)
    got = layer_by_layer(setup.to_canonical(state).params)
    for (path, leaf), want in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        # Adam's first step divides by the gradient's own size: its error there is the update's.
        np.testing.assert_allclose(leaf, want, atol=2e-5, err_msg=jax.tree_util.keystr(path))
