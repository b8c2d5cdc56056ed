"""Rotary positions (Su et al. 2021), and how models stretch them for longer texts.

Dimension suffixes: B rows, T tokens, N heads, H head width.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from models.gpt_config import GPTConfig


def frequencies(config: GPTConfig, *, is_local: bool = False) -> jax.Array:
    """Computes the radians per token of each pair of a head's numbers, float32 [rotated width / 2].

    Layers without a base of their own stretch wavelengths by ``rope_factor``: all of them, or only
    those that fit a few times into ``rope_original_length``, with a linear transition: by how often
    they fit, as in Llama 3, or by their number (YaRN).
    """
    own = config.local_rope_theta if is_local else None
    theta = config.rope_theta if own is None else own
    half = config.rotated_width // 2
    plain = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    if own is not None or config.rope_factor == 1:
        return plain
    stretched = plain / config.rope_factor
    if config.rope_original_length is None:
        return stretched
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    length = config.rope_original_length / (2 * math.pi)
    if config.rope_ramp == "llama3":
        kept = jnp.clip((length * plain - low) / (high - low), 0, 1)
    else:
        first, last = (half * math.log(length / fits, theta) for fits in (high, low))
        if config.rope_ramp == "yarn_whole":
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        kept = 1 - jnp.clip((jnp.arange(half) - first) / max(last - first, 0.001), 0, 1)
    return (1 - kept) * stretched + kept * plain


def rotate(x_BTNH: jax.Array, frequencies_H: jax.Array, positions_T: jax.Array) -> jax.Array:
    """Rotates the two halves of every head against each other, by position."""
    angles_TH = positions_T.astype(jnp.float32)[:, None] * frequencies_H
    cos, sin = jnp.cos(angles_TH)[:, None], jnp.sin(angles_TH)[:, None]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return rotated.astype(x_BTNH.dtype)
