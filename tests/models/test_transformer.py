"""The encoder-decoder: shapes, masks, sizes, the loss, and decoding against brute force."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from models import transformer
from models.transformer import TransformerConfig
from models.translate import beam_search, greedy

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
    loss = jaxpipe.unpipelined.loss(transformer.model(TINY), params, batch)
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
    params = transformer.init(SHORT, jax.random.key(4))
    return jax.tree.map(lambda leaf: 2 * leaf if leaf.ndim > 1 else leaf, params)


@pytest.fixture(scope="module")
def source():
    return jnp.array([[3, 4, 5, 5], [5, 3, 0, 0], [4, 4, 4, 0]])


def scored_hypotheses(params, source_row, *, max_length, length_penalty):
    """Every translation of one row with its worth, best first, from plain logits."""
    config = SHORT
    letters = [t for t in range(config.vocab_size) if t not in (config.pad_id, config.begin_id)]
    full = [
        row
        for row in itertools.product(letters, repeat=max_length)
        # After the end mark everything is the same hypothesis.
        if config.end_id not in row or set(row[row.index(config.end_id) :]) == {config.end_id}
    ]
    targets = jnp.array([[config.begin_id, *row[:-1]] for row in full])
    sources = jnp.broadcast_to(source_row, (len(full), len(source_row)))
    log_probs = np.asarray(jax.nn.log_softmax(logits(config, params, sources, targets)))
    found = []
    for row, scores in zip(full, log_probs, strict=True):
        length = row.index(config.end_id) + 1 if config.end_id in row else max_length
        total = sum(scores[i, row[i]] for i in range(length))
        padded = row[:length] + (config.pad_id,) * (max_length - length)
        found.append((total / ((5 + length) / 6) ** length_penalty, padded))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
def test_a_wide_beam_finds_the_best_of_all_translations(sharp, source, length_penalty):
    options = {"max_length": 4, "length_penalty": length_penalty}
    # 4 letters at 4 places: no more than 256 hypotheses exist, so nothing is ever dropped.
    found = beam_search(SHORT, sharp, source, num_beams=256, **options)
    for row in range(len(source)):
        expected = scored_hypotheses(sharp, source[row], **options)
        count = len(expected)
        np.testing.assert_allclose(
            found.scores[row, :count], [score for score, _ in expected], rtol=1e-4
        )
        assert (found.scores[row, count:] == -jnp.inf).all()
        assert tuple(found.tokens[row, 0].tolist()) == expected[0][1]


def test_width_one_is_greedy(sharp, source):
    beams = beam_search(SHORT, sharp, source, max_length=8, num_beams=1)
    np.testing.assert_array_equal(beams.tokens[:, 0], greedy(SHORT, sharp, source, max_length=8))


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


def test_scores_of_a_narrow_beam_are_those_of_its_tokens(sharp, source):
    wide = beam_search(SHORT, sharp, source, max_length=4, num_beams=4)
    assert (jnp.diff(wide.scores, axis=1) <= 0).all()
    for row in range(len(source)):
        known = {
            tokens: score
            for score, tokens in scored_hypotheses(
                sharp, source[row], max_length=4, length_penalty=0.6
            )
        }
        for tokens, score in zip(wide.tokens[row].tolist(), wide.scores[row], strict=True):
            np.testing.assert_allclose(score, known[tuple(tokens)], rtol=1e-4)
