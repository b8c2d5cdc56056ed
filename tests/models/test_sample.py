"""Sampling: the tokens come from the model's distribution, whatever the window holds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import gpt
from models.sample import sample

pytestmark = pytest.mark.pipeline

CONFIG = gpt.GPTConfig(vocab_size=17, sequence_length=6, num_layers=1, width=16, num_heads=2)


logits = jax.jit(gpt.logits, static_argnums=0)


@pytest.fixture(scope="module")
def params():
    # Far from uniform, so that the likeliest token is no tie.
    params = gpt.init(CONFIG, jax.random.key(0))
    return jax.tree.map(lambda leaf: 5 * leaf if leaf.ndim > 1 else leaf, params)


def test_greedy_tokens_are_the_likeliest_after_each_prefix(params):
    """Also past the window's end, where the model sees the last tokens only."""
    prompt = jnp.array([[1, 2, 3], [4, 5, 6]])
    drawn = sample(CONFIG, params, prompt, num_tokens=7, temperature=0, rng=jax.random.key(0))
    text = np.concatenate([prompt, drawn], axis=1)
    for end in range(3, 10):
        seen = text[:, max(0, end - CONFIG.sequence_length) : end]
        scores = logits(CONFIG, params, seen)[:, -1]
        np.testing.assert_array_equal(text[:, end], scores.argmax(axis=-1))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"positions": "learned"}, id="layers alike"),
        pytest.param(
            {"window": 2, "global_every": 2, "num_kv_heads": 1, "attention_sinks": True,
             "num_experts": 4, "capacity_factor": 0.5},
            id="windows and experts",
        ),
        pytest.param(
            {"kv_rank": 4, "head_size": 4, "rotary_size": 4, "value_size": 6}, id="latent attention"
        ),
    ],
)  # fmt: skip
def test_keys_and_values_that_are_kept_change_no_token(options):
    """While the window is not full, every token is run once; the whole model says the same."""
    config = dataclasses.replace(CONFIG, sequence_length=12, num_layers=2, **options)
    params = gpt.init(config, jax.random.key(0))
    params = jax.tree.map(lambda leaf: 5 * leaf if leaf.ndim > 1 else leaf, params)
    prompt = jnp.array([[1, 2, 3], [4, 5, 6]])
    drawn = sample(config, params, prompt, num_tokens=9, temperature=0, rng=jax.random.key(0))
    text = np.concatenate([prompt, drawn], axis=1)
    scores = logits(config, params, text)
    np.testing.assert_array_equal(text[:, 3:], scores[:, 2:-1].argmax(axis=-1))


def test_of_a_long_prompt_the_end_counts(params):
    prompt = jnp.arange(10)[None]
    options = {"num_tokens": 4, "rng": jax.random.key(0)}
    np.testing.assert_array_equal(
        sample(CONFIG, params, prompt, **options), sample(CONFIG, params, prompt[:, -6:], **options)
    )


def test_same_key_same_tokens(params):
    prompt = jnp.zeros((4, 1), jnp.int32)
    first, again, other = (
        sample(CONFIG, params, prompt, num_tokens=20, rng=jax.random.key(key)) for key in (0, 0, 1)
    )
    assert first.shape == (4, 20)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_frequencies_follow_the_softmax(params):
    prompt = jnp.zeros((4000, 1), jnp.int32)
    drawn = sample(CONFIG, params, prompt, num_tokens=1, temperature=2.0, rng=jax.random.key(0))
    counts = np.bincount(drawn[:, 0], minlength=CONFIG.vocab_size) / len(prompt)
    expected = jax.nn.softmax(logits(CONFIG, params, prompt[:1])[0, 0] / 2)
    # Four standard deviations of a frequency near 1/2.
    np.testing.assert_allclose(counts, expected, atol=0.032)


def test_top_k_leaves_out_the_rest(params):
    prompt = jnp.zeros((500, 1), jnp.int32)
    drawn = sample(
        CONFIG, params, prompt, num_tokens=1, temperature=10.0, top_k=3, rng=jax.random.key(0)
    )
    likeliest = jax.lax.top_k(logits(CONFIG, params, prompt[:1])[0, 0], 3)[1]
    assert set(drawn[:, 0].tolist()) == set(likeliest.tolist())


def test_top_k_of_one_is_greedy_and_beyond_the_vocabulary_is_everything(params):
    prompt = jnp.array([[3]])
    options = {"num_tokens": 5, "rng": jax.random.key(0)}
    np.testing.assert_array_equal(
        sample(CONFIG, params, prompt, top_k=1, **options),
        sample(CONFIG, params, prompt, temperature=0, **options),
    )
    np.testing.assert_array_equal(
        sample(CONFIG, params, prompt, top_k=100, **options),
        sample(CONFIG, params, prompt, **options),
    )


def test_bad_values_are_refused_together(params):
    with pytest.raises(ValueError, match="prompt_ids has shape") as error:
        sample(
            CONFIG, params, jnp.zeros((1, 0), int), num_tokens=0, temperature=-1, top_k=0,
            rng=jax.random.key(0),
        )  # fmt: skip
    for name in ("num_tokens=0", "temperature=-1", "top_k=0"):
        assert name in str(error.value)
