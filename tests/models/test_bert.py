"""BERT: attention in both directions, masks, segments, its two losses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe
from models import bert
from models.bert import BERTConfig

pytestmark = pytest.mark.pipeline

TINY = BERTConfig(
    vocab_size=61, sequence_length=12, num_layers=2, width=16, num_heads=4, mlp_width=32
)
NEXT = dataclasses.replace(TINY, next_sentence=True)

logits = functools.partial(jax.jit(bert.logits, static_argnums=0), TINY)


@functools.partial(jax.jit, static_argnums=0)
def loss_of(config, params, batch):
    return jaxpipe.unpipelined.loss(bert.model(config), params, batch)


@pytest.fixture(scope="module")
def params():
    """Of both heads, drawn large enough for differences to show."""
    params = jax.jit(bert.init, static_argnums=0)(NEXT, jax.random.key(0))
    return jax.tree.map(lambda leaf: 5 * leaf if leaf.ndim > 1 else leaf + 0.1, params)


@pytest.fixture(scope="module")
def batch():
    """Three rows; the second ends in padding, four tokens are to be predicted."""
    tokens = jax.random.randint(jax.random.key(9), (3, 12), 0, TINY.vocab_size)
    targets = jnp.full((3, 12), -1).at[0, 2].set(5).at[0, 3].set(7).at[1, 1].set(60)
    return {
        "tokens": tokens, "mask": jnp.ones((3, 12), int).at[1, 8:].set(0),
        "segments": jnp.zeros((3, 12), int).at[:, 6:].set(1),
        "targets": targets.at[2, 9].set(0), "next_sentence": jnp.array([0, 1, 1]),
    }  # fmt: skip


@pytest.mark.parametrize("place", [0, 11])
def test_every_position_sees_every_other(params, batch, place):
    before = logits(params, batch)
    after = logits(params, batch | {"tokens": batch["tokens"].at[:, place].add(1) % 61})
    assert (np.abs(before - after).max(axis=-1)[[0, 2]] > 1e-5).all()


def test_nothing_attends_to_padding(params, batch):
    before = logits(params, batch)[1, :8]
    changed = batch | {"tokens": batch["tokens"].at[1, 8:].set(3)}
    np.testing.assert_allclose(logits(params, changed)[1, :8], before, rtol=1e-5, atol=1e-5)
    short = {name: leaf[1:2, :8] for name, leaf in batch.items() if leaf.ndim == 2}
    np.testing.assert_allclose(logits(params, short)[0], before, rtol=1e-4, atol=1e-5)


def test_left_out_segments_and_mask_are_zeros_and_ones(params, batch):
    given = {"mask": jnp.ones((3, 12), int), "segments": jnp.zeros((3, 12), int)}
    plain = logits(params, {"tokens": batch["tokens"]})
    np.testing.assert_allclose(logits(params, batch | given), plain, rtol=1e-6, atol=1e-6)
    other = logits(params, batch | {"mask": given["mask"]})
    assert not np.allclose(other, plain)


def test_the_loss_is_the_mean_over_the_tokens_to_predict_and_of_the_next_sentence(params, batch):
    scores = jax.nn.log_softmax(logits(params, batch))
    wanted = batch["targets"] >= 0
    expected = -scores[wanted, batch["targets"][wanted]].mean()
    np.testing.assert_allclose(loss_of(TINY, params, batch), expected, rtol=1e-5)
    none = batch | {"targets": jnp.full((3, 12), -1)}
    assert loss_of(TINY, params, none) == 0
    scores = jax.nn.log_softmax(bert.next_sentence_logits(NEXT, params, batch))
    expected = -scores[jnp.arange(3), batch["next_sentence"]].mean()
    np.testing.assert_allclose(loss_of(NEXT, params, none), expected, rtol=1e-5)
