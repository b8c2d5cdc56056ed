"""Text from a trained GPT: one token at a time, from the model's own distribution."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models import gpt
from models.gpt_config import GPTConfig
from models.types import PyTree


def sample(
    config: GPTConfig,
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

    As long as all tokens fit ``config.sequence_length``, each runs through the model once, and its
    keys and values are kept. Beyond it the model sees a window of the last tokens, whose positions
    move, and is run in full for every token; so is a model with ``bias_speed``.

    Args:
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
    draw, keys = _Draw(temperature, top_k), jax.random.split(rng, num_tokens)
    config, params, state = gpt.main_model(config, params, state)
    fits = prompt.shape[1] + num_tokens <= config.sequence_length
    if fits and config.bias_speed is None:
        return _sample_with_caches(config, draw, params, prompt, keys)
    return _sample_from_window(config, draw, params, prompt, keys, state)


class _Draw(NamedTuple):
    """Draws one token per row from float32 [rows, vocab] scores."""

    temperature: float
    top_k: int | None

    def __call__(self, key: jax.Array, scores: jax.Array) -> jax.Array:
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            smallest = jax.lax.top_k(scores, self.top_k)[0][:, -1:]
            scores = jnp.where(scores < smallest, -jnp.inf, scores)
        if self.temperature == 0:
            return scores.argmax(axis=-1).astype(jnp.int32)
        return jax.random.categorical(key, scores / self.temperature).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sample_with_caches(
    config: GPTConfig, draw: _Draw, params: PyTree, prompt: jax.Array, keys: jax.Array
) -> jax.Array:
    num_rows, length = prompt.shape
    caches = gpt.empty_caches(config, num_rows, length + len(keys))

    def step(carry: tuple[Any, ...], key: jax.Array) -> tuple[tuple[Any, ...], jax.Array]:
        token, caches, place = carry
        scores, caches = gpt.next_logits(config, params, token[:, None], caches, place)
        token = draw(key, scores)
        return (token, caches, place + 1), token

    scores, caches = gpt.next_logits(config, params, prompt, caches, 0)
    first = draw(keys[0], scores)
    _, drawn = jax.lax.scan(step, (first, caches, length), keys[1:])
    return jnp.concatenate([first[None], drawn]).T


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sample_from_window(
    config: GPTConfig, draw: _Draw, params: PyTree, prompt: jax.Array, keys: jax.Array,
    state: PyTree,
) -> jax.Array:  # fmt: skip
    window = config.sequence_length
    seen = prompt[:, -window:]
    num_rows, num_seen = seen.shape
    tokens = jnp.zeros((num_rows, window), jnp.int32).at[:, :num_seen].set(seen)

    def step(carry: tuple[Any, ...], key: jax.Array) -> tuple[tuple[Any, ...], jax.Array]:
        tokens, num_seen = carry
        scores = gpt.logits(config, params, tokens, state)
        last = jax.lax.dynamic_index_in_dim(scores, num_seen - 1, axis=1, keepdims=False)
        token = draw(key, last)
        # A full window moves on by one token; causality hides the rest of an unfilled one.
        full = num_seen == window
        tokens = jnp.where(full, jnp.roll(tokens, -1, axis=1), tokens)
        place = jnp.where(full, window - 1, num_seen)
        tokens = jax.lax.dynamic_update_slice(tokens, token[:, None], (0, place))
        return (tokens, place + 1), token

    _, drawn = jax.lax.scan(step, (tokens, num_seen), keys)
    return drawn.T
