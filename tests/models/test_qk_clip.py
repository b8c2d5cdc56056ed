"""QK-clip: largest scores of heads, and weights after a step, against one device."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batches import batch_of

import jaxpipe
from models import gpt
from models.block_attention import Scores, largest_scores
from models.gpt import GPTConfig
from models.qk_clip import qk_clip

SHAPE = {"vocab_size": 19, "sequence_length": 8, "width": 16, "num_heads": 4, "mlp_width": 12}
GROUPED = GPTConfig(**SHAPE, num_layers=2, num_kv_heads=2, qk_clip=1e-3, window=3)
LATENT = GPTConfig(
    **SHAPE, num_layers=2, kv_rank=8, query_rank=6, head_size=4, rotary_size=4, value_size=6,
    qk_clip=1e-3,
)  # fmt: skip


def scores_of(q, k, scale, *, window, documents):
    """Scores of all pairs, [B, N, T, S], and which are seen."""
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    distance = np.subtract.outer(np.arange(q.shape[1]), np.arange(k.shape[1]))
    seen = (distance >= 0) & (distance < window)
    seen = seen & (documents[:, :, None] == documents[:, None])
    return scale * np.einsum("btnh,bsnh->bnts", q, k), seen[:, None]


def test_largest_scores_are_those_of_the_pairs_that_are_seen():
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((2, 300, n, 8)).astype(np.float32) for n in (4, 2))
    q[0, 100] *= 9  # the largest lies in the second block of another row for other heads
    documents = np.sort(rng.integers(0, 3, (2, 300)), axis=1).astype(np.int32)
    scores, seen = scores_of(q, k, 0.3, window=40, documents=documents)
    expected = np.where(seen, scores, 0).max(axis=(0, 2, 3))
    found = jax.jit(largest_scores, static_argnums=2)(q, k, Scores(0.3, 40), documents)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("config", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_clipped_weights_give_scores_at_the_threshold(config):
    """An update of 0 is clipped; the largest scores then are the smaller of both."""
    config = dataclasses.replace(config, num_layers=1, window=None)
    model, tokens = gpt.model(config), batch_of(config, 4)
    params = jax.jit(gpt.init, static_argnums=0)(config, jax.random.key(0))
    own = jax.tree.map(lambda w: w[0], params["layers"])

    @jax.jit
    def largest(own):
        (state,), x = gpt.init_state(config), model.embed(params, tokens, None)
        _, state = model.layer(own, x, tokens, None, state)
        return gpt.max_logits([state])

    before = largest(own)
    threshold = float(np.median(before[0]))
    clipped = qk_clip(dataclasses.replace(config, qk_clip=threshold))
    trees = ({"layers": (w,)} for w in (jax.tree.map(jnp.zeros_like, own), own))
    zeros, params_of_layers = trees
    updates, _ = clipped.update(zeros, (), params_of_layers, max_logits=before)
    after = largest(optax.apply_updates(own, updates["layers"][0]))
    np.testing.assert_allclose(after[0], np.minimum(before[0], threshold), rtol=1e-5)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("config", "optimizer", "schedule", "zero"),
    [
        pytest.param(LATENT, optax.contrib.muon(0.02), "zb-h1", 3, marks=pytest.mark.slow),
        (GROUPED, optax.adamw(0.02), "1f1b-fused", 1),
    ],
    ids=["latent-muon", "grouped-adamw"],
)
def test_a_step_is_that_of_one_device(config, optimizer, schedule, zero):
    """The largest scores are those of all microbatches and data shards."""
    optimizer = optax.chain(optimizer, qk_clip(config))
    params = jax.jit(functools.partial(gpt.init, config))(jax.random.key(0))
    states, batch = gpt.init_state(config), batch_of(config, 8)
    pipe = jaxpipe.Pipeline(
        gpt.model(config, vocabulary_axis="stage", data_axes=("data",)),
        jax.eval_shape(lambda: params),
        schedule=schedule,
        microbatches=2,
        mesh=jaxpipe.make_mesh(stage=2, data=2),
        zero=zero,
        states=states,
    )

    @jax.jit
    def step(params, states, optimizer_state, batch):
        (_, states), grads = pipe.value_and_grad(params, batch, states=states)
        largest = gpt.max_logits(pipe.unplace_states(states))
        new, _ = pipe.update(optimizer, grads, optimizer_state, params, max_logits=largest)
        return new, largest

    placed = pipe.place(params)
    new, largest = step(placed, pipe.place_states(states), pipe.init(optimizer, placed), batch)

    def by_layer(tree):
        if not config.layers_are_alike:
            return tree
        count = range(config.num_layers)
        return tree | {
            "layers": tuple(jax.tree.map(lambda w, n=n: w[n], tree["layers"]) for n in count)
        }

    @jax.jit
    def step_of_one_device(params):
        (_, after), grads = jaxpipe.unpipelined.value_and_grad(
            gpt.model(config), params, batch, num_microbatches=4, states=states
        )
        expected, given = gpt.max_logits(after), by_layer(params)
        updates, _ = optimizer.update(
            by_layer(grads), optimizer.init(given), given, max_logits=expected
        )
        return optax.apply_updates(given, updates), expected

    reference, expected = step_of_one_device(params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), largest, expected)
    found = by_layer(pipe.unplace(new))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), found, reference
    )
    assert (np.asarray(largest) > config.qk_clip).any()
