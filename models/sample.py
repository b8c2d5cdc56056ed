"""Text from a trained GPT: one token at a time, from the model's own distribution."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from models import gpt

PyTree = Any


def sample(
    config: gpt.GPTConfig,
    params: PyTree,
    prompt_ids: jax.Array,
    *,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    rng: jax.Array,
    state: PyTree = None,
) -> jax.Array:
    """Continues prompts by sampling.

    The model sees a window of the last ``config.sequence_length`` tokens and is run in full for
    every token: simple, compiled once, and right for any model that `models.gpt.logits` runs.

    Args:
      config: the model's shape.
      params: canonical parameters.
      prompt_ids: integers [rows, length], length at least 1; if a prompt is longer than the window,
        only its end is seen.
      num_tokens: number of tokens to add, at least 1.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: sample among the k likeliest tokens only; None among all, as does a k above the
        vocabulary's size.
      rng: one key; the same key gives the same tokens.
      state: states of the layers, as of `models.gpt.logits`.

    Returns:
      int32 [rows, num_tokens], the new tokens.

    Raises:
      ValueError: an empty prompt, or a number outside its range.
    """
    prompt = jnp.asarray(prompt_ids, jnp.int32)
    failures = []
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        failures.append(
            f"prompt_ids has shape {list(prompt.shape)}: it must be [rows, length >= 1]."
        )
    if num_tokens < 1:
        failures.append(f"num_tokens={num_tokens} must be at least 1. Nearest valid: 1.")
    if temperature < 0:
        failures.append(f"temperature={temperature} must not be negative. Nearest valid: 0.")
    if top_k is not None and top_k < 1:
        failures.append(f"top_k={top_k} must be at least 1, or None for all. Nearest valid: 1.")
    if failures:
        raise ValueError("\n".join(failures))
    return _sample(config, num_tokens, top_k, params, prompt, temperature, rng, state)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _sample(config, num_tokens, top_k, params, prompt, temperature, rng, state):
    window = config.sequence_length
    seen = prompt[:, -window:]
    num_rows, num_seen = seen.shape
    tokens = jnp.zeros((num_rows, window), jnp.int32).at[:, :num_seen].set(seen)

    def step(carry, key):
        tokens, num_seen = carry
        scores = gpt.logits(config, params, tokens, state)
        last = jax.lax.dynamic_index_in_dim(scores, num_seen - 1, axis=1, keepdims=False)
        token = _draw(key, last, temperature, top_k).astype(jnp.int32)
        # A full window moves on by one token; causality hides the rest of an unfilled one.
        full = num_seen == window
        tokens = jnp.where(full, jnp.roll(tokens, -1, axis=1), tokens)
        place = jnp.where(full, window - 1, num_seen)
        tokens = jax.lax.dynamic_update_slice(tokens, token[:, None], (0, place))
        return (tokens, place + 1), token

    keys = jax.random.split(rng, num_tokens)
    _, drawn = jax.lax.scan(step, (tokens, num_seen), keys)
    return drawn.T


def _draw(key, scores, temperature, top_k):
    """Draws one token per row from [rows, vocab] scores."""
    if top_k is not None and top_k < scores.shape[-1]:
        smallest = jax.lax.top_k(scores, top_k)[0][:, -1:]
        scores = jnp.where(scores < smallest, -jnp.inf, scores)
    # Any positive number avoids 0/0 where the argmax is taken anyway.
    safe = jnp.where(temperature > 0, temperature, 1.0)
    drawn = jax.random.categorical(key, scores / safe)
    return jnp.where(temperature > 0, drawn, scores.argmax(axis=-1))
