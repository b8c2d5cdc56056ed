"""Sampling: the tokens come from the model's distribution, whatever the window holds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import gpt
from models.sample import sample

pytestmark = pytest.mark.pipeline

CONFIG = gpt.GPTConfig(vocab_size=17, sequence_length=6, num_layers=1, width=16, num_heads=2)

logits = jax.jit(gpt.logits, static_argnums=0)


def far_from_uniform(config):
    """Parameters with which the likeliest token is no tie."""
    params = jax.jit(gpt.init, static_argnums=0)(config, jax.random.key(0))
    return jax.tree.map(lambda leaf: 5 * leaf if leaf.ndim > 1 else leaf, params)


@pytest.fixture(scope="module")
def params():
    return far_from_uniform(CONFIG)


@pytest.fixture(scope="module")
def drawn(params):
    """Draws tokens after a prompt."""
    return functools.partial(sample, CONFIG, params, rng=jax.random.key(0))


def test_greedy_tokens_are_the_likeliest_after_each_prefix(params, drawn):
    """Also past the window's end, where the model sees the last tokens only."""
    prompt, length = jnp.array([[1, 2, 3], [4, 5, 6]]), CONFIG.sequence_length
    found = drawn(prompt, num_tokens=7, temperature=0)
    text = np.concatenate([prompt, found], axis=1)
    likeliest = [logits(CONFIG, params, text[:, n : n + length]).argmax(-1) for n in range(4)]
    np.testing.assert_array_equal(text[:, 3:6], likeliest[0][:, 2:-1])
    np.testing.assert_array_equal(text[:, 6:], np.stack([row[:, -1] for row in likeliest], 1))
    np.testing.assert_array_equal(found, drawn(prompt, num_tokens=7, top_k=1))


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "learned"},
        {"window": 2, "global_every": 2, "num_kv_heads": 1, "attention_sinks": True}
        | {"num_experts": 4, "capacity_factor": 0.5},
        {"kv_rank": 4, "head_size": 4, "rotary_size": 4, "value_size": 6},
        {"linear_heads": 1, "linear_value_heads": 2, "linear_key_size": 6, "global_every": 2},
        {"residual_streams": 2},
    ],
    ids=["layers alike", "windows and experts", "latent attention", "linear attention", "streams"],
)
def test_keys_and_values_that_are_kept_change_no_token(options):
    """While the window is not full, every token is run once; the whole model says the same."""
    config = dataclasses.replace(CONFIG, sequence_length=12, num_layers=2, **options)
    params = far_from_uniform(config)
    prompt = jnp.array([[1, 2, 3], [4, 5, 6]])
    drawn = sample(config, params, prompt, num_tokens=9, temperature=0, rng=jax.random.key(0))
    text = np.concatenate([prompt, drawn], axis=1)
    scores = logits(config, params, text)
    np.testing.assert_array_equal(text[:, 3:], scores[:, 2:-1].argmax(axis=-1))


def test_the_key_and_the_end_of_a_long_prompt_decide(drawn):
    prompt = jnp.tile(jnp.arange(10), (4, 1))
    found = drawn(prompt, num_tokens=20)
    assert found.shape == (4, 20)
    np.testing.assert_array_equal(found, drawn(prompt[:, -6:], num_tokens=20))
    np.testing.assert_array_equal(found, drawn(prompt, num_tokens=20, top_k=100))
    other = drawn(prompt, num_tokens=20, rng=jax.random.key(1))
    assert not np.array_equal(found, other)


def test_frequencies_follow_the_softmax_and_top_k_leaves_out_the_rest(params, drawn):
    prompt = jnp.zeros((4000, 1), jnp.int32)
    scores = logits(CONFIG, params, prompt[:1])[0, 0]
    found = drawn(prompt, num_tokens=1, temperature=2.0)
    counts = np.bincount(found[:, 0], minlength=CONFIG.vocab_size) / len(prompt)
    # Four standard deviations of a frequency near 1/2.
    np.testing.assert_allclose(counts, jax.nn.softmax(scores / 2), atol=0.032)
    few = drawn(prompt, num_tokens=1, temperature=10.0, top_k=3)
    assert set(few[:, 0].tolist()) == set(jax.lax.top_k(scores, 3)[1].tolist())


def test_bad_values_are_refused_together(drawn):
    with pytest.raises(ValueError, match="prompt_ids has shape") as error:
        drawn(jnp.zeros((1, 0), int), num_tokens=0, temperature=-1, top_k=0)
    for name in ("num_tokens=0", "temperature=-1", "top_k=0"):
        assert name in str(error.value)
