"""Rotary positions (Su et al. 2021), and how models stretch them for longer texts.

Dimension suffixes: B rows, T tokens, N heads, H head width.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from models.gpt_config import GPTConfig


def frequencies(config: GPTConfig, *, is_local: bool = False) -> jax.Array:
    """Computes the radians per token of each pair of a head's numbers, float32 [head width / 2].

    Global layers stretch wavelengths by ``rope_factor``: all of them, or, as in Llama 3, only those
    that fit a few times into ``rope_original_length``, with a linear transition by that number.
    """
    theta = config.rope_theta
    if is_local and config.local_rope_theta is not None:
        theta = config.local_rope_theta
    half = config.head_width // 2
    plain = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    if is_local or config.rope_factor == 1:
        return plain
    stretched = plain / config.rope_factor
    if config.rope_original_length is None:
        return stretched
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    fits = config.rope_original_length * plain / (2 * math.pi)
    kept = jnp.clip((fits - low) / (high - low), 0, 1)
    return (1 - kept) * stretched + kept * plain


def rotate(x_BTNH: jax.Array, frequencies_H: jax.Array, positions_T: jax.Array) -> jax.Array:
    """Rotates the two halves of every head against each other, by position."""
    angles_TH = positions_T.astype(jnp.float32)[:, None] * frequencies_H
    cos, sin = jnp.cos(angles_TH)[:, None], jnp.sin(angles_TH)[:, None]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return rotated.astype(x_BTNH.dtype)
