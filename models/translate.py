"""Greedy translations from a trained Transformer.

Tokens come one at a time; keys and values of earlier tokens and of the source are kept, so that one
step costs one position. Padding and the begin mark are never drawn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from models import transformer
from models.blocks import function_of
from models.transformer import DecoderLayer, KeysValues, TransformerConfig
from models.types import PyTree

_Cache = list[KeysValues]
"""Keys and values of every decoder layer."""
_Step = Callable[[jax.Array, jax.Array, _Cache], tuple[jax.Array, _Cache]]
_Greedy = tuple[jax.Array, _Cache, jax.Array]
"""Newest tokens, cache, and which rows are finished."""


def greedy(
    config: TransformerConfig, params: PyTree, source: jax.Array, *, max_length: int
) -> jax.Array:
    """Translates by taking the likeliest token each time.

    Args:
      source: int32 [rows, S], ``pad_id`` at the end of short ones.
      max_length: most tokens of a translation, the end mark included; at most
        ``config.sequence_length``.

    Returns:
      int32 [rows, max_length]: tokens, ``end_id`` unless cut short, then ``pad_id``.

    Raises:
      ValueError: a ``max_length`` outside its range.
    """
    if not 1 <= max_length <= config.sequence_length:
        nearest = min(max(max_length, 1), config.sequence_length)
        raise ValueError(
            f"max_length={max_length} must be in [1, sequence_length={config.sequence_length}]. "
            f"Nearest valid: {nearest}."
        )
    return _greedy(config, max_length, params, source)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _greedy(
    config: TransformerConfig, max_length: int, params: PyTree, source_BS: jax.Array
) -> jax.Array:
    step, cache = _start(config, params, source_BS, max_length)
    num_rows = source_BS.shape[0]

    def extend(carry: _Greedy, position: jax.Array) -> tuple[_Greedy, jax.Array]:
        token_B, cache, finished_B = carry
        scores_BV, cache = step(token_B, position, cache)
        token_B = jnp.where(finished_B, config.pad_id, scores_BV.argmax(axis=-1))
        return (token_B, cache, finished_B | (token_B == config.end_id)), token_B

    begin_B = jnp.full(num_rows, config.begin_id)
    carry = (begin_B, cache, jnp.zeros(num_rows, bool))
    _, tokens_TB = jax.lax.scan(extend, carry, jnp.arange(max_length))
    return tokens_TB.T


def _start(
    config: TransformerConfig, params: PyTree, source_BS: jax.Array, max_length: int
) -> tuple[_Step, _Cache]:
    """Encodes the source; returns a function that decodes one position, and its empty cache.

    ``step(tokens [B], position, cache)`` returns log-probabilities [B, vocab_size] and the cache.
    """
    memory_BSE = _encode(config, params, source_BS)
    mask_BS = source_BS != config.pad_id
    decoder_params = params["layers"][config.num_encoder_layers :]
    run = function_of(DecoderLayer, config, method=DecoderLayer.step)
    read = function_of(
        DecoderLayer, config, method=lambda layer, x: layer.source_attention.keys_values(x)
    )
    sources = [read(layer_params, memory_BSE) for layer_params in decoder_params]
    table, places = params["embed"]["table"], transformer.positions(max_length, config.width)

    def step(tokens_B: jax.Array, position: jax.Array, cache: _Cache) -> tuple[jax.Array, _Cache]:
        x_B1E = (math.sqrt(config.width) * table[tokens_B] + places[position])[:, None]
        x_B1E = x_B1E.astype(config.compute_dtype)
        new_cache = []
        for layer_params, source, past in zip(decoder_params, sources, cache, strict=True):
            x_B1E, past = run(layer_params, x_B1E, position, past, source, mask_BS)
            new_cache.append(past)
        scores_BV = jax.nn.log_softmax(transformer.scores(params, x_B1E[:, 0]))
        never = jnp.array([config.pad_id, config.begin_id])
        return scores_BV.at[:, never].set(-jnp.inf), new_cache

    shape = (len(source_BS), max_length, config.num_heads, config.width // config.num_heads)
    empty = jnp.zeros(shape, config.compute_dtype)
    return step, [(empty, empty) for _ in decoder_params]


def _encode(config: TransformerConfig, params: PyTree, source_BS: jax.Array) -> jax.Array:
    plain = transformer.model(config)
    batch = {"source": source_BS, "target": jnp.full((len(source_BS), 2), config.begin_id)}
    x = plain.embed(params, batch, None)
    for i in range(config.num_encoder_layers):
        x = plain.layer[i](params["layers"][i], x, batch, None)
    return x["source"]
