"""Rotary positions (Su et al. 2021), and how models stretch them for longer texts.

Dimension suffixes: B rows, T tokens, N heads, H head width.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from models.gpt_config import GPTConfig


def frequencies(config: GPTConfig, *, is_local: bool = False, length: int = 0) -> jax.Array:
    """Computes the radians per token of each pair of a head's numbers, float32 [rotated width / 2].

    ``length`` is that of whole sequences, by which LongRoPE chooses its factors.

    Layers without a base of their own stretch wavelengths by ``rope_factor``: all of them, or only
    those that fit a few times into ``rope_original_length``, with a linear transition: by how often
    they fit, as in Llama 3, or by their number (YaRN).
    """
    own = config.local_rope_theta if is_local else None
    theta = config.rope_theta if own is None else own
    half = config.rotated_width // 2
    plain = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    if own is not None or config.rope_ramp == "dynamic":
        return plain
    if config.rope_short_factors is not None:
        is_long = length > (config.rope_original_length or length)
        factors = config.rope_long_factors if is_long else config.rope_short_factors
        return plain / jnp.array(factors, jnp.float32)
    if config.rope_factor == 1:
        return plain
    stretched = plain / config.rope_factor
    if config.rope_original_length is None:
        return stretched
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    radians = config.rope_original_length / (2 * math.pi)
    if config.rope_ramp == "llama3":
        kept = jnp.clip((radians * plain - low) / (high - low), 0, 1)
    else:
        first, last = (half * math.log(radians / fits, theta) for fits in (high, low))
        if config.rope_ramp == "yarn_whole":
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        kept = 1 - jnp.clip((jnp.arange(half) - first) / max(last - first, 0.001), 0, 1)
    return (1 - kept) * stretched + kept * plain


def rotate(
    x_BTNH: jax.Array, frequencies_H: jax.Array, positions_T: jax.Array, magnitude: float = 1.0
) -> jax.Array:
    """Rotates two halves of every head against each other, by position.

    With fewer frequencies than half a head has numbers, its last numbers stay as they are; those
    that are rotated are multiplied by ``magnitude``.
    """
    angles_TH = positions_T.astype(jnp.float32)[:, None] * frequencies_H
    cos, sin = jnp.cos(angles_TH)[:, None], jnp.sin(angles_TH)[:, None]
    if magnitude != 1:
        cos, sin = magnitude * cos, magnitude * sin
    half = len(frequencies_H)
    first, second, *rest = jnp.split(x_BTNH.astype(jnp.float32), (half, 2 * half), axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin, *rest)
    return jnp.concatenate(rotated, axis=-1).astype(x_BTNH.dtype)


def growth(config: GPTConfig, positions_T: jax.Array) -> jax.Array:
    """Computes the factors of queries behind the original length, float32 [T, 1, 1]."""
    assert config.rope_original_length is not None
    times = jnp.floor(positions_T / config.rope_original_length)
    return (1 + config.query_growth * jnp.log1p(times))[:, None, None]
