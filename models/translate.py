"""Translations from a trained Transformer: greedy, and by beam search.

Tokens come one at a time; keys and values of earlier tokens and of the source are kept, so that one
step costs one position. Padding and the begin mark are never drawn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models import transformer
from models.blocks import function_of
from models.transformer import DecoderLayer, KeysValues, TransformerConfig
from models.types import PyTree

_Cache = list[KeysValues]
"""Keys and values of every decoder layer."""
_Step = Callable[[jax.Array, jax.Array | int, _Cache], tuple[jax.Array, _Cache]]
_Greedy = tuple[jax.Array, _Cache, jax.Array]
"""Newest tokens, cache, and which rows are finished."""


class Translations(NamedTuple):
    """The result of beam search.

    Attributes:
      tokens: int32 [rows, num_beams, max_length], best first; ``pad_id`` after ``end_id``.
      scores: float32 [rows, num_beams], log-probability over the length penalty.
    """

    tokens: jax.Array
    scores: jax.Array


def greedy(
    config: TransformerConfig, params: PyTree, source: jax.Array, *, max_length: int
) -> jax.Array:
    """Translates by taking the likeliest token each time.

    Args:
      config: the model's shape.
      params: canonical parameters.
      source: int32 [rows, S], ``pad_id`` at the end of short ones.
      max_length: most tokens of a translation, the end mark included; at most
        ``config.sequence_length``.

    Returns:
      int32 [rows, max_length]: tokens, ``end_id`` unless cut short, then ``pad_id``.

    Raises:
      ValueError: a ``max_length`` outside its range.
    """
    _check(config, max_length, num_beams=1)
    return _greedy(config, max_length, params, source)


def beam_search(
    config: TransformerConfig,
    params: PyTree,
    source: jax.Array,
    *,
    max_length: int,
    num_beams: int = 4,
    length_penalty: float = 0.6,
) -> Translations:
    """Translates by keeping the ``num_beams`` best hypotheses at every length.

    A hypothesis is worth ``log p / ((5 + length) / 6) ** length_penalty`` (Wu et al. 2016, equation
    14). Finished hypotheses stay among the others for as long as they are worth enough, and the
    search ends when all that remain are finished or ``max_length`` is reached. One beam is
    `greedy`.

    Args:
      config: the model's shape.
      params: canonical parameters.
      source: int32 [rows, S], ``pad_id`` at the end of short ones.
      max_length: as in `greedy`.
      num_beams: hypotheses kept, at least 1. The defaults are those of Vaswani et al. 2017,
        section 6.1.
      length_penalty: 0 for plain log-probabilities; more favours longer translations.

    Returns:
      All remaining hypotheses, best first.

    Raises:
      ValueError: numbers outside their ranges.
    """
    _check(config, max_length, num_beams)
    return _beam_search(config, max_length, num_beams, params, source, length_penalty)


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


class _Beams(NamedTuple):
    """The hypotheses of every row; a log-probability of minus infinity marks an empty one."""

    tokens: jax.Array  # [B, K, max_length], padding where there is none yet
    log_probs: jax.Array  # [B, K]
    lengths: jax.Array  # [B, K], end mark included
    finished: jax.Array  # [B, K]
    last: jax.Array  # [B, K], the newest token
    cache: PyTree  # leaves [B K, max_length, ...]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _beam_search(
    config: TransformerConfig, max_length: int, num_beams: int, params: PyTree,
    source_BS: jax.Array, length_penalty: float,
) -> Translations:  # fmt: skip
    num_rows = source_BS.shape[0]
    # Every hypothesis of a row reads the same source.
    step, cache = _start(config, params, jnp.repeat(source_BS, num_beams, axis=0), max_length)

    def worth(log_probs: jax.Array, lengths: jax.Array) -> jax.Array:
        return log_probs / ((5 + lengths) / 6) ** length_penalty

    def extend(position: jax.Array | int, beams: _Beams) -> _Beams:
        scores_nV, cache = step(beams.last.reshape(-1), position, beams.cache)
        scores_BKV = scores_nV.reshape(num_rows, num_beams, -1)
        # A finished hypothesis continues with padding, at no cost.
        ends_V = jnp.where(jnp.arange(scores_BKV.shape[-1]) == config.pad_id, 0.0, -jnp.inf)
        scores_BKV = jnp.where(beams.finished[..., None], ends_V, scores_BKV)
        log_probs_BKV = beams.log_probs[..., None] + scores_BKV
        lengths_BK = beams.lengths + ~beams.finished
        worth_BKV = worth(log_probs_BKV, lengths_BK[..., None])

        _, best_BK = jax.lax.top_k(worth_BKV.reshape(num_rows, -1), num_beams)
        parent_BK, token_BK = jnp.divmod(best_BK, scores_BKV.shape[-1])

        def of_parent(leaf: jax.Array) -> jax.Array:
            return jnp.take_along_axis(
                leaf, parent_BK.reshape(*parent_BK.shape, *[1] * (leaf.ndim - 2)), axis=1
            )

        def cache_of_parent(leaf: jax.Array) -> jax.Array:
            return of_parent(leaf.reshape(num_rows, num_beams, *leaf.shape[1:])).reshape(leaf.shape)

        return _Beams(
            tokens=of_parent(beams.tokens).at[:, :, position].set(token_BK),
            log_probs=jnp.take_along_axis(log_probs_BKV.reshape(num_rows, -1), best_BK, axis=1),
            lengths=of_parent(lengths_BK),
            finished=of_parent(beams.finished) | (token_BK == config.end_id),
            last=token_BK,
            cache=jax.tree.map(cache_of_parent, cache),
        )

    shape = (num_rows, num_beams)
    first_K = jnp.where(jnp.arange(num_beams) == 0, 0.0, -jnp.inf)
    beams = _Beams(
        tokens=jnp.full((*shape, max_length), config.pad_id),
        log_probs=jnp.broadcast_to(first_K, shape),
        lengths=jnp.zeros(shape, int),
        finished=jnp.zeros(shape, bool),
        last=jnp.full(shape, config.begin_id),
        cache=cache,
    )
    _, beams = jax.lax.while_loop(
        lambda carry: (carry[0] < max_length) & ~carry[1].finished.all(),
        lambda carry: (carry[0] + 1, extend(*carry)),
        (0, beams),
    )
    # `top_k` has left them best first.
    return Translations(beams.tokens, worth(beams.log_probs, beams.lengths))


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

    def step(
        tokens_B: jax.Array, position: jax.Array | int, cache: _Cache
    ) -> tuple[jax.Array, _Cache]:
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


def _check(config: TransformerConfig, max_length: int, num_beams: int) -> None:
    failures = []
    if not 1 <= max_length <= config.sequence_length:
        failures.append(
            f"max_length={max_length} must be in [1, sequence_length="
            f"{config.sequence_length}]. Nearest valid: "
            f"{min(max(max_length, 1), config.sequence_length)}."
        )
    if num_beams < 1:
        failures.append(f"num_beams={num_beams} must be at least 1. Nearest valid: 1.")
    if failures:
        raise ValueError("\n".join(failures))
