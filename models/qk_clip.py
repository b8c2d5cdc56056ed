"""QK-clip: weights of queries and keys are scaled down where scores became too large.

A head whose largest score in a step, S, is above a threshold t gets a factor of t / S for its
scores, after the optimizer's update (Kimi Team 2025, "Kimi K2", section 2.1). Queries and keys take
its square root each. Where several heads share a key, that key takes the root of the smallest of
their factors, and each query what is left of its own. Of latent attention the part of keys with
rotary positions belongs to all heads, so that the queries' part takes the whole factor.

Dimension suffixes: N heads, K key heads, H width of a head, R of what is rotated, V of values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.gpt_config import GPTConfig
from models.types import PyTree


def qk_clip(config: GPTConfig) -> optax.GradientTransformationExtraArgs:
    """Makes the last transformation of an optimizer, for parameters with one tree per layer.

    Its update takes ``max_logits``: for each layer the largest scores of its heads, float32 [N],
    before which weights are as they were.

    Args:
      config: the model's shape, with ``qk_clip``.

    Example:
      >>> optimizer = optax.chain(optax.adamw(1e-3), qk_clip(config))  # doctest: +SKIP
      >>> pipe.update(optimizer, grads, state, params, max_logits=largest)  # doctest: +SKIP
    """

    def update(
        updates: PyTree, state: optax.EmptyState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, optax.EmptyState]:
        def of_layer(updates: PyTree, params: PyTree, max_logits_N: jax.Array) -> PyTree:
            attention = dict(updates["attention"])
            for name, factors in _column_factors(config, max_logits_N).items():
                attention[name] = jax.tree.map(
                    lambda u, w, f=factors: u + (w + u) * (f - 1).astype(w.dtype),
                    attention[name],
                    params["attention"][name],
                )
            return {**updates, "attention": attention}

        layers = map(of_layer, updates["layers"], params["layers"], extra["max_logits"])
        return {**updates, "layers": tuple(layers)}, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _column_factors(config: GPTConfig, max_logits_N: jax.Array) -> dict[str, jax.Array]:
    """Makes the factors of the columns of each linear map that makes queries or keys."""
    assert config.qk_clip is not None
    factors_N = jnp.minimum(1.0, config.qk_clip / max_logits_N)
    width = config.head_width
    if config.kv_rank is not None:
        root_NH = jnp.repeat(jnp.sqrt(factors_N)[:, None], width, axis=1)
        turned_NR = jnp.repeat(factors_N[:, None], config.rotated_width, axis=1)
        assert config.value_size is not None
        values_NV = jnp.ones((config.num_heads, config.value_size))
        return {
            "query": jnp.concatenate((root_NH, turned_NR), axis=1).reshape(-1),
            "key_value": jnp.concatenate((root_NH, values_NV), axis=1).reshape(-1),
        }
    keys_K = jnp.sqrt(factors_N.reshape(config.kv_heads, -1).min(axis=1))
    queries_N = factors_N / jnp.repeat(keys_K, config.num_heads // config.kv_heads)
    by_head = jnp.concatenate((queries_N, keys_K, jnp.ones_like(keys_K)))
    return {"qkv": jnp.repeat(by_head, width)}
