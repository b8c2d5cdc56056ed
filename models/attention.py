"""Causal self-attention of a decoder, whose heads and sequence several devices may share.

Dimension suffixes: B rows, S the whole sequence, T a device's part of it, N heads, K key/value
heads, G query heads per key head, H head width, E width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpipe import Appended
from models import rotary
from models.block_attention import BLOCK, Scores, block_attention, largest_scores
from models.blocks import INIT_STDDEV, Linear, Norm, attention_kernel, layer_norm, rms_norm
from models.context import Context
from models.gpt_config import GPTConfig, LayerKind
from models.sharing import Sharing
from models.types import Batch


class MaxLogits(nnx.Variable[jax.Array]):
    """The largest score of every head since a step began, [N]; 0 without any."""


def add_scores(
    attention: Any, q_BTNH: jax.Array, k_BSKH: jax.Array, documents_BS: jax.Array | None
) -> None:
    """Renews ``max_logits`` of a module, over all data shards, by the scores of whole sequences."""
    config, axes = attention.config, attention.sharing.data_axes
    window = config.window if attention.is_local else None
    largest_N = largest_scores(
        q_BTNH, k_BSKH, Scores(config.score_scale, window or 0), documents_BS
    )
    largest_N = lax.pmax(largest_N, axes) if axes else largest_N
    attention.max_logits[...] = jnp.maximum(attention.max_logits[...], largest_N)


class Attention(nnx.Module):
    """Causal self-attention with grouped queries (Ainslie et al. 2023)."""

    def __init__(self, config: GPTConfig, kind: LayerKind, *, sharing: Sharing, rngs: nnx.Rngs):
        self.config, self.sharing = config, sharing
        self.is_local, self.is_rotated = kind.is_local, kind.is_rotated
        self.qkv = Linear(
            config.width, sum(config.qkv_widths.values()), bias=config.has_bias("qkv"),
            stddev=INIT_STDDEV, rngs=rngs,
        )  # fmt: skip
        self.out = Linear(
            config.num_heads * config.head_width, config.width, bias=config.has_bias("out"),
            stddev=config.residual_stddev, rngs=rngs,
        )  # fmt: skip
        if config.attention_sinks:
            self.sinks = nnx.Param(jnp.zeros(config.num_heads))
        if config.qk_clip is not None:
            self.max_logits = MaxLogits(jnp.zeros(config.num_heads))
        if config.qk_norm:
            self.query_norm, self.key_norm = (
                _heads_norm(config, heads, sharing, rngs)
                for heads in (config.num_heads, config.kv_heads)
            )

    def __call__(
        self, x_BTE: jax.Array, documents_BS: jax.Array | None = None, cache: Cache | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, Cache | None]:  # fmt: skip
        """Mixes the tokens of whole sequences, or of slices from ``start``: see `attend`."""
        tensor = self.sharing.tensor
        mixed_BTE, cache = self.mix(self.qkv(tensor.gather(x_BTE)), documents_BS, cache, start)
        return self.out(mixed_BTE, tensor.scatter), cache

    def mix(
        self, qkv_BTE: jax.Array, documents_BS: jax.Array | None, cache: Cache | None,
        start: jax.Array | int,
    ) -> tuple[jax.Array, Cache | None]:  # fmt: skip
        """Mixes the values of this device's heads, given its columns of queries, keys and values.

        Returns what ``out`` multiplies, and the cache.
        """
        config, tensor, context = self.config, self.sharing.tensor, self.sharing.context
        num_rows, length, _ = qkv_BTE.shape
        queries = tensor.part(config.num_heads, "num_heads")
        if config.attention_gate:  # which lie behind the queries
            queries *= 2
        q_BTNH, k_BTKH, v_BTKH = tensor.heads(qkv_BTE, queries, config.head_width)
        if config.attention_gate:
            q_BTNH, gates_BTNH = jnp.split(q_BTNH, 2, axis=2)
        is_last = config.qk_norm_scope == "rotated"
        if config.qk_norm and not is_last:
            q_BTNH, k_BTKH = self.query_norm(q_BTNH), self.key_norm(k_BTKH)
        if config.positions == "rotary" and self.is_rotated:
            whole = whole_length(context, length, cache)
            turns_H = rotary.frequencies(config, is_local=self.is_local, length=whole)
            positions_T = start + context.own(jnp.arange(length * context.size), 0)
            has_own = self.is_local and config.local_rope_theta is not None
            magnitude = 1.0 if has_own else config.rope_magnitude
            q_BTNH, k_BTKH = (
                rotary.rotate(w, turns_H, positions_T, magnitude) for w in (q_BTNH, k_BTKH)
            )
        if config.query_growth:
            q_BTNH = q_BTNH * rotary.growth(config, positions_T).astype(q_BTNH.dtype)
        if config.qk_norm and is_last:
            q_BTNH, k_BTKH = self.query_norm(q_BTNH), self.key_norm(k_BTKH)
        if config.qk_clip is not None:
            add_scores(self, q_BTNH, k_BTKH, documents_BS)
        mixed_BTNH, cache = attend(
            context,
            configured(config, self.is_local),
            (q_BTNH, k_BTKH, v_BTKH),
            documents_BS,
            cache,
            start,
            sinks_N=self.sinks[...] if config.attention_sinks else None,
        )
        if config.attention_gate:
            mixed_BTNH = mixed_BTNH * jax.nn.sigmoid(gates_BTNH)
        return mixed_BTNH.reshape(num_rows, length, -1), cache


def _heads_norm(config: GPTConfig, heads: int, sharing: Sharing, rngs: nnx.Rngs) -> nnx.Module:
    """Makes the norm of queries or keys [B, T, heads, width]."""
    width, dtype, scope = config.head_width, config.compute_dtype, config.qk_norm_scope
    options: dict[str, Any] = {"epsilon": config.norm_epsilon, "dtype": dtype}
    is_layer, of_all = config.norm == "layer", scope == "all"
    if scope in ("each", "all") or config.norms_from_zero:
        shapes = {"each": (heads, width), "all": (heads * width,)}
        return Norm(
            shapes.get(scope, (width,)),
            num_dims=2 if of_all else 1,
            layer=is_layer,
            from_zero=config.norms_from_zero,
            tensor=sharing.tensor,
            **options,
        )
    return (layer_norm if is_layer else rms_norm)(width, rngs=rngs, **options)


def whole_length(context: Context, length: int, cache: Cache | None) -> int:
    """Returns the number of tokens of whole sequences, some or all of which are ``length`` here."""
    return length * context.size if cache is None else cache["keys"].shape[1]


def configured(config: GPTConfig, is_local: bool) -> Callable[..., jax.Array]:
    """Makes `causal_attention` of a layer."""
    return functools.partial(
        causal_attention,
        scale=config.score_scale,
        window=config.window if is_local else None,
        soft_cap=config.attention_soft_cap,
    )


Cache = dict[str, jax.Array]
"""Keys and values [B, S, K, H] of whole sequences and, where these hold documents, their numbers
[B, S], in floating point: what attention hands from slice to slice."""


def empty_cache(
    config: GPTConfig, sharing: Sharing, x_BTE: jax.Array, microbatch: Batch, num_slices: int
) -> dict[str, Appended]:
    """Makes the cache of a first slice, as `jaxpipe.Model.carry`."""
    size, context = sharing.tensor.size, sharing.context
    length = num_slices * x_BTE.shape[1] * size * context.size
    queries, heads, width = config.num_heads // size, config.kv_heads // size, config.head_width
    if config.kv_rank is not None:
        heads, width = queries, config.score_width
    heads = max(heads, 1)
    if context.exchanges_heads(queries, heads):
        heads //= context.size
    shape = x_BTE.shape[0], length, heads, width
    kept_BSKH = Appended(jnp.zeros(shape, config.compute_dtype))
    cache = {"keys": kept_BSKH, "values": kept_BSKH}
    if "documents" in microbatch:
        cache["documents"] = Appended(jnp.zeros(shape[:2]))
    return cache


def attend(
    context: Context,
    attention: Callable[..., jax.Array],
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    documents_BS: jax.Array | None,
    cache: Cache | None,
    start: jax.Array | int,
    *,
    sinks_N: jax.Array | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Runs causal attention for a device's queries, over whole sequences or slices of them.

    Args:
      context: the devices that share a sequence.
      attention: `causal_attention`, as configured.
      qkv: queries, keys and values of this device's tokens.
      documents_BS: numbers of the documents of all tokens; None for one document per row.
      cache: what the slices before have left; None for whole sequences.
      start: position of the slice's first token.
      sinks_N: as of `causal_attention`, for all heads.

    Returns:
      The mixed values, and the cache with the slice's part.
    """
    q_BTNH, *keys_values = qkv
    by_heads = context.exchanges_heads(q_BTNH.shape[2], keys_values[0].shape[2])
    keys_values = list(map(context.by_heads if by_heads else context.gather, keys_values))
    positions_T = None
    if by_heads:
        q_BTNH = context.by_heads(q_BTNH)
        sinks_N = None if sinks_N is None else context.own_heads(sinks_N)
    elif context.axis is not None:
        positions_T = context.own(jnp.arange(keys_values[0].shape[1]), 0)
    if cache is not None:
        new = dict(zip(("keys", "values"), keys_values, strict=True))
        if documents_BS is not None:
            new["documents"] = documents_BS.astype(jnp.float32)
        cache = {
            name: jax.lax.dynamic_update_slice_in_dim(cache[name], part, start, axis=1)
            for name, part in new.items()
        }
        positions_T = start + (jnp.arange(q_BTNH.shape[1]) if positions_T is None else positions_T)
        keys_values = [cache["keys"], cache["values"]]
        documents_BS = None if documents_BS is None else cache["documents"].astype(jnp.int32)
    mixed_BTNH = attention(
        q_BTNH, *keys_values, positions_T, documents_BS=documents_BS, sinks_N=sinks_N
    )
    return (context.by_tokens(mixed_BTNH) if by_heads else mixed_BTNH), cache


def causal_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    positions_T: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    documents_BS: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Causal attention whose keys and values may have fewer heads, K, than the queries.

    Args:
      q_BTNH, k_BSKH, v_BSKH: queries, keys and values; K divides N.
      positions_T: positions of the queries among the keys; None if both are of the same tokens.
      scale: factor by which scores are multiplied.
      window: number of tokens that a position sees, its own included; None for all before it.
      soft_cap: cap of the scores, as in `soft_capped`.
      documents_BS: number of the document of each token that has a key, which does not decrease
        along a row; a token sees only its own document. None for one document per row.
      sinks_N: a logit per head in the denominator of the softmax; None for none.
    """
    kernel = attention_kernel(q_BTNH)
    is_plain = all(given is None for given in (positions_T, soft_cap, documents_BS, sinks_N))
    if is_plain and (kernel or k_BSKH.shape[1] <= BLOCK):  # one block has no part to leave out
        return jax.nn.dot_product_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            is_causal=True,
            scale=scale,
            local_window_size=(window - 1, 0) if window else None,
            implementation=kernel,
        )
    if positions_T is None:
        positions_T = jnp.arange(k_BSKH.shape[1])
    return block_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        positions_T,
        Scores(scale, window or 0, soft_cap or 0.0),
        documents_BS=documents_BS,
        sinks_N=sinks_N,
    )
