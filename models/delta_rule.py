"""The gated delta rule over chunks of a sequence (Yang et al. 2024, "Gated Delta Networks").

A head keeps a matrix, from keys to values. Each token lets it decay, and moves what it holds for
the token's key towards the token's value:

    S = exp(decay) S
    S = S + k (rate (v - S^T k))^T
    y = S^T q / sqrt(K)

with queries and keys of length 1. The tokens of a chunk are computed together (Yang et al. 2024,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length"): what each of them
adds solves a triangular system, for all chunks at once, and only the states between chunks follow
one another. The results are those of the recurrence but for rounding in float32.

Forward and backward are an operation each in a program (`jax.lax.composite`), as in
`models.block_attention`. The backward computes the states between chunks again.

Dimension suffixes: B rows, T tokens, G key heads, R value heads per key head, K width of keys, V of
values, N chunks, C and D tokens of a chunk.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64
"""Tokens of a chunk."""
_EPSILON = 1e-6
"""Added to the squared length of queries and keys."""


@jax.custom_vjp
def delta_rule(
    q_BTGK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGRV: jax.Array,
    decay_BTGR: jax.Array,
    rate_BTGR: jax.Array,
    state_BGRKV: jax.Array,
    documents_BU: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Mixes values by the gated delta rule.

    Args:
      q_BTGK, k_BTGK, v_BTGRV: queries, keys and values; queries and keys have any length.
      decay_BTGR: logarithm of what a state is multiplied by at each token, at most 0, float32.
      rate_BTGR: share of the difference that a token removes, float32.
      state_BGRKV: the state before the first token, float32.
      documents_BU: number of the document of the token before the first and of all tokens, [B,
        1 + T], which does not decrease along a row; a state ends with its document. None for one
        document.

    Returns:
      float32 [B, T, G, R, V], and the state behind the last token.

    Example:
      >>> q = k = jnp.ones((1, 2, 1, 4))
      >>> v = jnp.arange(2.0).reshape(1, 2, 1, 1, 1)
      >>> decay, rate = jnp.zeros((1, 2, 1, 1)), jnp.ones((1, 2, 1, 1))
      >>> mixed, state = delta_rule(q, k, v, decay, rate, jnp.zeros((1, 1, 1, 4, 1)))
      >>> mixed.round(3).reshape(-1).tolist(), state.round(3).reshape(-1).tolist()
      ([0.0, 0.5], [0.5, 0.5, 0.5, 0.5])
    """
    inputs = q_BTGK, k_BTGK, v_BTGRV, decay_BTGR, rate_BTGR, state_BGRKV
    mixed_BTGRV, state_BGRKV = _forward(*inputs, documents_BU, flops=_flops(q_BTGK, v_BTGRV))
    return mixed_BTGRV, state_BGRKV


def _gradients(
    kept: tuple[Any, ...], given: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    return *_backward(*kept, *given, flops=3 * _flops(kept[0], kept[2])), None


delta_rule.defvjp(lambda *given: (delta_rule(*given), given), _gradients)


def _flops(q_BTGK: jax.Array, v_BTGRV: jax.Array) -> float:
    """FLOPs of the forward's matmuls; a triangular system takes half of one."""
    keys, values, group = q_BTGK.shape[-1], v_BTGRV.shape[-1], v_BTGRV.shape[-2]
    within = min(CHUNK, q_BTGK.shape[1]) * (2 * keys / group + (keys + values) / 2 + values)
    return 2.0 * v_BTGRV.size / values * (within + 3 * keys * values)


@functools.partial(lax.composite, name="jaxpipe.delta_rule")
def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, rate: jax.Array, state: jax.Array,
    documents: jax.Array | None, /, *, flops: float,
) -> list[jax.Array]:  # fmt: skip
    del flops
    return [*_chunked(q, k, v, decay, rate, state, documents)]


@functools.partial(lax.composite, name="jaxpipe.delta_rule_gradients")
def _backward(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, rate: jax.Array, state: jax.Array,
    documents: jax.Array | None, dmixed: jax.Array, dstate: jax.Array, /, *, flops: float,
) -> list[jax.Array]:  # fmt: skip
    del flops
    mix = functools.partial(_chunked, documents=documents)
    _, pull = jax.vjp(mix, q, k, v, decay, rate, state)
    return [*pull((dmixed, dstate))]


def _chunked(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, rate: jax.Array, state: jax.Array,
    documents: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    num_rows, length, width = *k.shape[:2], k.shape[-1]
    size = min(CHUNK, length)

    def chunks(x_BT: jax.Array, *, mode: str = "constant") -> jax.Array:
        """Cuts [B, T, ...] into chunks [N, B, C, ...]; padding moves no state."""
        padding = ((0, 0), (0, -length % size), *((0, 0),) * (x_BT.ndim - 2))
        padded = jnp.pad(x_BT, padding, mode=mode)
        return padded.reshape(num_rows, -1, size, *x_BT.shape[2:]).swapaxes(0, 1)

    q_NBGCK, k_NBGCK = (jnp.moveaxis(chunks(_unit(x)), 2, 3) for x in (q, k))
    q_NBGCK = width**-0.5 * q_NBGCK
    v_NBGRCV, decay_NBGRC, rate_NBGRC = (
        jnp.moveaxis(chunks(x.astype(jnp.float32)), 2, 4) for x in (v, decay, rate)
    )
    # What a token leaves of each earlier one of its chunk, and of the state before the chunk. The
    # sums have no other terms: a difference of large sums would not be exact.
    seen = jnp.tril(jnp.ones((size, size), bool))
    terms_NBGRCD = jnp.where(jnp.tril(seen, -1), decay_NBGRC[..., None], 0)
    between_NBGRCD = jnp.matmul(seen.astype(jnp.float32), terms_NBGRCD, precision="highest")
    sums_NBGRC = between_NBGRCD[..., 0] + decay_NBGRC[..., :1]
    if documents is not None:
        before_NBC, own_NBC = (
            chunks(x, mode="edge") for x in (documents[:, :-1], documents[:, 1:])
        )
        seen = seen & (own_NBC[:, :, :, None] == own_NBC[:, :, None])[:, :, None, None]
        is_first_NBC = own_NBC == before_NBC[:, :, :1]
        sums_NBGRC = jnp.where(is_first_NBC[:, :, None, None], sums_NBGRC, -jnp.inf)
    left_NBGRCD = jnp.exp(jnp.where(seen, between_NBGRCD, -jnp.inf))
    left_NBGRC1 = jnp.exp(sums_NBGRC)[..., None]

    keys_NBG1CK, queries_NBG1CK = k_NBGCK[:, :, :, None], q_NBGCK[:, :, :, None]
    rate_NBGRC1 = rate_NBGRC[..., None]
    of_keys_NBG1CD = (k_NBGCK @ k_NBGCK.mT)[:, :, :, None]
    scores_NBGRCD = left_NBGRCD * (q_NBGCK @ k_NBGCK.mT)[:, :, :, None]
    system_NBGRCD = rate_NBGRC1 * left_NBGRCD * of_keys_NBG1CD
    added = jnp.concatenate((v_NBGRCV, left_NBGRC1 * keys_NBG1CK), axis=-1)
    solved = lax.linalg.triangular_solve(
        system_NBGRCD, rate_NBGRC1 * added, left_side=True, lower=True, unit_diagonal=True
    )
    values_NBGRCV, of_state_NBGRCK = jnp.split(solved, (v.shape[-1],), axis=-1)
    of_last_NBGRC1 = left_NBGRCD[..., -1, :, None]

    def step(state_BGRKV: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        values, of_state, scores, reads, writes, left = chunk
        values = values - of_state @ state_BGRKV
        mixed = reads @ state_BGRKV + scores @ values
        return left * state_BGRKV + writes.mT @ values, mixed

    state, mixed_NBGRCV = lax.scan(
        step,
        state,
        (
            values_NBGRCV, of_state_NBGRCK, scores_NBGRCD, left_NBGRC1 * queries_NBG1CK,
            of_last_NBGRC1 * keys_NBG1CK, left_NBGRC1[..., -1:, :],
        ),
    )  # fmt: skip
    mixed_BNCGRV = jnp.moveaxis(mixed_NBGRCV, (1, 4), (0, 2))
    mixed_BTGRV = mixed_BNCGRV.reshape(num_rows, -1, *v.shape[2:])
    return mixed_BTGRV[:, :length], state


def _unit(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPSILON)
