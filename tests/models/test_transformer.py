"""The encoder-decoder: shapes, masks, sizes, the loss, and greedy decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from models import transformer
from models.transformer import TransformerConfig
from models.translate import greedy

pytestmark = pytest.mark.pipeline

TINY = TransformerConfig(
    vocab_size=13, sequence_length=8, num_encoder_layers=2, num_decoder_layers=2, width=16,
    num_heads=2, mlp_width=32,
)  # fmt: skip

logits = jax.jit(transformer.logits, static_argnums=0)


@pytest.fixture(scope="module")
def params():
    return jax.jit(transformer.init, static_argnums=0)(TINY, jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    """Four rows, two of them with padding on either side."""
    source, target = jax.random.randint(jax.random.key(1), (2, 4, 7), 3, TINY.vocab_size)
    pad = TINY.pad_id
    return {
        "source": source.at[1, 5:].set(pad).at[2, 3:].set(pad),
        "target": target.at[:, 0].set(TINY.begin_id).at[0, 4:].set(pad).at[2, 6:].set(pad),
    }


def test_a_layer_returns_what_it_does_not_touch(params, batch):
    model = transformer.model(TINY)

    def run(params, batch):
        x = model.embed(params, batch, None)
        encoded = model.layer[0](params["layers"][0], x, batch, None)
        decoded = model.layer[2](params["layers"][2], encoded, batch, None)
        assert encoded["target"] is x["target"]
        assert decoded["source"] is encoded["source"]

    jax.eval_shape(run, params, batch)


def test_a_target_sees_no_later_token_but_all_of_its_source(params, batch):
    source, target = batch["source"][3:], batch["target"][3:]
    before = logits(TINY, params, source, target)
    later = logits(TINY, params, source, target.at[:, 4].set(5 + target[:, 4] % 3))
    np.testing.assert_array_equal(before[:, :4], later[:, :4])
    assert not np.allclose(before[:, 4:], later[:, 4:])
    other = logits(TINY, params, source.at[:, 6].set(5 + source[:, 6] % 3), target)
    assert (np.abs(before - other).max(axis=-1) > 1e-6).all()


def test_padding_of_the_source_changes_nothing(params, batch):
    row = batch["source"][1:2, :5], batch["target"][1:2]
    padded = logits(TINY, params, jnp.pad(row[0], ((0, 0), (0, 3))), row[1])
    np.testing.assert_allclose(logits(TINY, params, *row), padded, rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_smoothed_mean_over_tokens_that_are_no_padding(params, batch):
    scores = logits(TINY, params, batch["source"], batch["target"][:, :-1])
    targets, smoothing = batch["target"][:, 1:], TINY.label_smoothing
    wanted = optax.smooth_labels(jax.nn.one_hot(targets, TINY.vocab_size), smoothing)
    losses = optax.softmax_cross_entropy(scores, wanted)
    real = targets != TINY.pad_id
    assert 0 < real.sum() < real.size
    expected = losses[real].mean()
    of_model = functools.partial(jaxpipe.unpipelined.loss, transformer.model(TINY))
    loss = jax.jit(of_model)(params, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_parameters_count_as_the_paper_describes_them():
    """One table; 4 or 8 projections, 2 MLP matrices, 2 or 3 norms a layer, all with biases."""
    width, hidden = TINY.width, TINY.hidden_width
    projection, norm = width * width + width, 2 * width
    mlp = 2 * width * hidden + hidden + width
    encoder, decoder = 4 * projection + mlp + 2 * norm, 8 * projection + mlp + 3 * norm
    expected = TINY.vocab_size * width + 2 * encoder + 2 * decoder
    assert transformer.num_parameters(TINY) == expected


def test_positions_differ_by_a_rotation():
    """Vaswani et al., section 3.5: the encoding of t + k is a linear function of that of t."""
    places = transformer.positions(20, 16)
    np.testing.assert_allclose(places @ places.T, jnp.array(places[:1] @ places.T)[
        0, np.abs(np.subtract.outer(np.arange(20), np.arange(20)))
    ], rtol=1e-4, atol=1e-4)  # fmt: skip


# Decoding. Weights are larger than at the start, so that hypotheses differ clearly.

SHORT = dataclasses.replace(TINY, vocab_size=6)


@pytest.fixture(scope="module")
def sharp():
    params = jax.jit(transformer.init, static_argnums=0)(SHORT, jax.random.key(4))
    return jax.tree.map(lambda leaf: 2 * leaf if leaf.ndim > 1 else leaf, params)


@pytest.fixture(scope="module")
def source():
    return jnp.array([[3, 4, 5, 5], [5, 3, 0, 0], [4, 4, 4, 0]])


def test_greedy_tokens_are_the_likeliest_after_each_prefix(sharp, source):
    tokens = np.asarray(greedy(SHORT, sharp, source, max_length=8))
    begun = np.concatenate([np.full((len(source), 1), SHORT.begin_id), tokens], axis=1)
    scores = np.array(logits(SHORT, sharp, source, begun[:, :-1]))
    scores[..., [SHORT.pad_id, SHORT.begin_id]] = -np.inf
    for row, likeliest in zip(tokens, scores.argmax(axis=-1), strict=True):
        ends = np.flatnonzero(row == SHORT.end_id)
        length = ends[0] + 1 if len(ends) else len(row)
        np.testing.assert_array_equal(row[:length], likeliest[:length])
        assert (row[length:] == SHORT.pad_id).all()
