"""Causal attention over blocks of keys (Dao 2023, FlashAttention-2), for masks of any kind.

No array holds a score for every query and key: each block of queries goes through the blocks of
keys that any of its tokens sees, with a running softmax, and the backward computes each block's
weights again from the logarithm of their sum. Blocks that are not seen cost nothing: those behind
the last query, before the window, and before the first document. So a causal sequence computes half
of all pairs, a row of packed documents those within documents, and a slice of queries the keys
before it, whatever lies in the rest of a longer buffer.

On GPUs, bfloat16 arrays whose lengths the blocks divide run `models.flash_kernels`; elsewhere a
loop over blocks multiplies matrices. Forward and backward are an operation each in a program
(`jax.lax.composite`), so that jaxpipe keeps their results under the policy "dots" and counts the
FLOPs that they state.

Dimension suffixes: B rows, S keys, T queries, N heads, K key/value heads, G query heads per key
head, H head width, t and s queries and keys of a block, Q and R blocks of queries and of keys.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from models import flash_kernels
from models.flash_kernels import UNSEEN

BLOCK = 256
"""Most queries, and keys, of a block of the loop."""


class Scores(NamedTuple):
    """The scores of queries and keys.

    Args:
      scale: their factor.
      window: number of tokens that a position sees, its own included; 0 for all before it.
      soft_cap: scores s become ``soft_cap * tanh(s / soft_cap)``; 0 for none.
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0


def block_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    positions_T: jax.Array,
    scores: Scores,
    *,
    documents_BS: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Mixes the values of the keys that queries see: up to their own position, in their document.

    Args:
      q_BTNH, k_BSKH, v_BSKH: queries, keys and values of one dtype; K divides N. Keys behind the
        last query have no influence, and zero gradients, whatever finite numbers they hold.
      positions_T: int32, positions of the queries among the keys. In any order, but blocks are left
        out by the first and the last position of a block of queries.
      scores: the scores.
      documents_BS: number of every key's document, int32, which does not decrease along a row; None
        for one document per row.
      sinks_N: a logit per head in the denominator of the softmax; None for none.

    Returns:
      [B, T, N, H], in the dtype of the queries.

    Example:
      >>> q, k = jnp.ones((1, 2, 2, 4)), jnp.ones((1, 2, 1, 4))
      >>> v = jnp.arange(8.0).reshape(1, 2, 1, 4)
      >>> block_attention(q, k, v, jnp.arange(2), Scores(0.5))[0, :, 0].tolist()
      [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]]
    """
    return _attend(q_BTNH, k_BSKH, v_BSKH, sinks_N, positions_T, documents_BS, scores)


def largest_scores(
    q_BTNH: jax.Array, k_BSKH: jax.Array, scores: Scores, documents_BS: jax.Array | None = None
) -> jax.Array:
    """Finds the largest score of each head that is at least 0, among those that attention uses.

    Args:
      q_BTNH, k_BSKH, documents_BS: as of `block_attention`, of whole sequences.
      scores: the scores.

    Returns:
      float32 [N], without a gradient.

    Example:
      >>> q, k = jnp.ones((1, 2, 2, 4)), jnp.ones((1, 2, 1, 4))
      >>> largest_scores(q, k, Scores(0.5)).tolist()
      [2.0, 2.0]
    """
    q_BTNH, k_BSKH = map(lax.stop_gradient, (q_BTNH, k_BSKH))
    positions, window = jnp.arange(k_BSKH.shape[1]), scores.window or k_BSKH.shape[1]
    options: dict[str, Any] = {"scale": scores.scale, "window": window, "soft_cap": 0.0}
    blocks = _Blocks(q_BTNH, k_BSKH, k_BSKH, positions, documents_BS, **options)

    def of_block(block: jax.Array) -> jax.Array:
        def larger(number: jax.Array, largest_KG: jax.Array) -> jax.Array:
            _, scores_BKGts, _ = blocks.scores(block, number)
            return jnp.maximum(largest_KG, scores_BKGts.max(axis=(0, 3, 4)))

        nothing = jnp.zeros(blocks.q.shape[3:5])
        return lax.fori_loop(blocks.lo[block], blocks.hi[block], larger, nothing)

    return lax.map(of_block, jnp.arange(len(blocks.q))).max(axis=0).reshape(-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, sinks_N: jax.Array | None,
    positions_T: jax.Array, documents_BS: jax.Array | None, scores: Scores,
) -> jax.Array:  # fmt: skip
    return _attend_and_keep(q_BTNH, k_BSKH, v_BSKH, sinks_N, positions_T, documents_BS, scores)[0]


def _attend_and_keep(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, sinks_N: jax.Array | None,
    positions_T: jax.Array, documents_BS: jax.Array | None, scores: Scores,
) -> tuple[jax.Array, tuple[Any, ...]]:  # fmt: skip
    options = scores._asdict() | {"flops": _flops(q_BTNH, k_BSKH, scores, matmuls=2)}
    mixed_BTNH, sums_BNT = _forward(q_BTNH, k_BSKH, v_BSKH, positions_T, documents_BS, **options)
    if sinks_N is not None:  # they only add to the sums
        with_sinks_BNT = jnp.logaddexp(sums_BNT, sinks_N.astype(jnp.float32)[:, None])
        factor_BNT = jnp.exp(sums_BNT - with_sinks_BNT)
        mixed_BTNH = (mixed_BTNH * factor_BNT.swapaxes(1, 2)[..., None]).astype(mixed_BTNH.dtype)
        sums_BNT = with_sinks_BNT
    kept = q_BTNH, k_BSKH, v_BSKH, sinks_N, positions_T, documents_BS, mixed_BTNH, sums_BNT
    return mixed_BTNH, kept


def _gradients(
    scores: Scores, kept: tuple[Any, ...], dmixed_BTNH: jax.Array
) -> tuple[jax.Array | None, ...]:
    q_BTNH, k_BSKH, v_BSKH, sinks_N, positions_T, documents_BS, mixed_BTNH, sums_BNT = kept
    products_BTN = jnp.sum(dmixed_BTNH.astype(jnp.float32) * mixed_BTNH, axis=-1)
    products_BNT = products_BTN.swapaxes(1, 2)
    options = scores._asdict() | {"flops": _flops(q_BTNH, k_BSKH, scores, matmuls=5)}
    qkv, seen = (q_BTNH, k_BSKH, v_BSKH), (positions_T, documents_BS)
    dqkv = _backward(*qkv, *seen, sums_BNT, dmixed_BTNH, products_BNT, **options)
    dsinks_N = None
    if sinks_N is not None:
        weights_BNT = jnp.exp(sinks_N[:, None] - sums_BNT)
        dsinks_N = -jnp.sum(weights_BNT * products_BNT, axis=(0, 2)).astype(sinks_N.dtype)
    return *dqkv, dsinks_N, None, None


_attend.defvjp(_attend_and_keep, _gradients)


def _flops(q_BTNH: jax.Array, k_BSKH: jax.Array, scores: Scores, matmuls: int) -> float:
    """FLOPs of so many matmuls, where tokens see half of the keys on average, or their window."""
    num_keys = k_BSKH.shape[1]
    per_query = min(scores.window or num_keys, num_keys / 2)
    return 2.0 * matmuls * q_BTNH.size * per_query


def document_starts(documents_BS: jax.Array) -> jax.Array:
    """Finds the position of the first token of each token's document, int32 [B, S]."""
    begins = jnp.diff(documents_BS, axis=1, prepend=documents_BS[:, :1]) != 0
    begins_BS = jnp.where(begins, jnp.arange(documents_BS.shape[1]), 0)
    return lax.associative_scan(jnp.maximum, begins_BS, axis=1)


class _Seen(NamedTuple):
    """The keys that queries see, and the blocks of keys that hold any of them.

    Args:
      positions: of the queries, int32 [T].
      own, documents: documents of queries [B, T] and of keys [B, S].
      lo, hi: for each block of queries the first block of keys and the end, int32 [B, Q].
    """

    positions: jax.Array
    own: jax.Array
    documents: jax.Array
    lo: jax.Array
    hi: jax.Array

    @classmethod
    def of(
        cls, positions_T: jax.Array, documents_BS: jax.Array | None, keys: tuple[int, ...],
        window: int, block: tuple[int, int],
    ) -> _Seen:  # fmt: skip
        """Finds the blocks, of so many queries and keys; ``keys`` are rows and their keys."""
        t, s = block
        if documents_BS is None:
            documents_BS = jnp.zeros(keys, jnp.int32)
            own_BT = first_BT = jnp.zeros((keys[0], len(positions_T)), jnp.int32)
        else:
            own_BT = jnp.take(documents_BS, positions_T, axis=1)
            first_BT = jnp.take(document_starts(documents_BS), positions_T, axis=1)
        if window:
            first_BT = jnp.maximum(first_BT, positions_T - window + 1)
        lo_BQ = first_BT.reshape(len(first_BT), -1, t).min(axis=-1) // s
        hi_Q = positions_T.reshape(-1, t).max(axis=-1) // s + 1
        hi_BQ = jnp.broadcast_to(hi_Q, lo_BQ.shape)
        return cls(positions_T, own_BT, documents_BS, lo_BQ, hi_BQ)

    def seeing(self, num_blocks: int) -> tuple[jax.Array, jax.Array]:
        """For every block of keys, the first block of queries that see it and the end, int32
        [B, R]."""
        blocks_R1 = jnp.arange(num_blocks)[:, None]
        sees_BRQ = (self.lo[:, None] <= blocks_R1) & (blocks_R1 < self.hi[:, None])
        some_BR = sees_BRQ.any(axis=-1)
        first_BR = jnp.argmax(sees_BRQ, axis=-1).astype(jnp.int32)
        behind_BR = jnp.argmax(sees_BRQ[..., ::-1], axis=-1).astype(jnp.int32)
        end_BR = sees_BRQ.shape[-1] - behind_BR
        return jnp.where(some_BR, first_BR, 0), jnp.where(some_BR, end_BR, 0)


def _in_kernels(q_BTNH: jax.Array, k_BSKH: jax.Array) -> bool:
    return jax.default_backend() == "gpu" and flash_kernels.fits(q_BTNH, k_BSKH)


@functools.partial(lax.composite, name="jaxpipe.attention")
def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, documents: jax.Array | None, /,
    *, scale: float, window: int, soft_cap: float, flops: float,
) -> list[jax.Array]:  # fmt: skip
    """Mixes values; also returns the logarithms of the sums of weights, float32 [B, N, T]."""
    del flops
    options: dict[str, Any] = {"scale": scale, "window": window or k.shape[1], "soft_cap": soft_cap}
    if _in_kernels(q, k):
        seen = _Seen.of(positions, documents, k.shape[:2], window, flash_kernels.BLOCK)
        return flash_kernels.forward((q, k, v), seen, options)
    blocks = _Blocks(q, k, v, positions, documents, **options)
    shape_BKGt = blocks.q.shape[1:2] + blocks.q.shape[3:5] + blocks.q.shape[2:3]

    def of_block(block: jax.Array) -> tuple[jax.Array, jax.Array]:
        def add(number: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            largest, total, mixed = sums
            seen, scores, _ = blocks.scores(block, number)
            new = jnp.maximum(largest, scores.max(axis=-1))
            weights = jnp.where(seen, jnp.exp(scores - new[..., None]), 0)
            old, values = jnp.exp(largest - new), blocks.keys(blocks.v, number)
            product = _product("bkgts,bskh->bkgth", weights.astype(values.dtype), values)
            return new, old * total + weights.sum(axis=-1), old[..., None] * mixed + product

        nothing = jnp.zeros(shape_BKGt), jnp.zeros((*shape_BKGt, v.shape[-1]))
        start = jnp.full(shape_BKGt, UNSEEN), *nothing
        largest, total, mixed = lax.fori_loop(blocks.lo[block], blocks.hi[block], add, start)
        mixed = (mixed / total[..., None]).astype(q.dtype)
        return jnp.moveaxis(mixed, 3, 1), jnp.moveaxis(largest + jnp.log(total), 3, 1)

    mixed, sums = map(blocks.whole, lax.map(of_block, jnp.arange(len(blocks.q))))
    return [mixed.reshape(q.shape), sums.reshape(q.shape[:3]).swapaxes(1, 2)]


@functools.partial(lax.composite, name="jaxpipe.attention_gradients")
def _backward(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, documents: jax.Array | None,
    sums: jax.Array, dmixed: jax.Array, products: jax.Array, /, *, scale: float, window: int,
    soft_cap: float, flops: float,
) -> list[jax.Array]:  # fmt: skip
    """Computes the gradients of queries, keys and values."""
    del flops
    options: dict[str, Any] = {"scale": scale, "window": window or k.shape[1], "soft_cap": soft_cap}
    if _in_kernels(q, k):
        seen = _Seen.of(positions, documents, k.shape[:2], window, flash_kernels.BLOCK)
        seeing = seen.seeing(k.shape[1] // flash_kernels.BLOCK[1])
        return flash_kernels.backward((q, k, v), seen, seeing, (sums, dmixed, products), options)
    blocks = _Blocks(q, k, v, positions, documents, **options)
    by_token = (sums.swapaxes(1, 2), dmixed, products.swapaxes(1, 2))
    of_queries = (
        blocks.of_queries(w.reshape(*w.shape[:2], k.shape[2], -1, *w.shape[3:])) for w in by_token
    )
    sums, dmixed, products = (jnp.moveaxis(w, 2, 4) for w in of_queries)  # [Q, B, K, G, t, ...]

    def of_block(dkv: list[jax.Array], block: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        queries = jnp.moveaxis(blocks.q[block], 1, 3)

        def add(number: jax.Array, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq, *dkv = gradients
            _, scores, slope = blocks.scores(block, number)
            weights = jnp.exp(scores - sums[block][..., None])
            dweights = _product("bkgth,bskh->bkgts", dmixed[block], blocks.keys(blocks.v, number))
            dscores = weights * (dweights - products[block][..., None])
            dscores = dscores if slope is None else dscores * slope
            dscores = (scale * dscores).astype(q.dtype)
            dq = dq + _product("bkgts,bskh->bkgth", dscores, blocks.keys(blocks.k, number))
            new = (
                _product("bkgts,bkgth->bskh", dscores, queries),
                _product("bkgts,bkgth->bskh", weights.astype(q.dtype), dmixed[block]),
            )
            start = number * blocks.s
            return dq, *(
                lax.dynamic_update_slice_in_dim(w, blocks.keys(w, number) + more, start, axis=1)
                for w, more in zip(dkv, new, strict=True)
            )

        start = jnp.zeros(queries.shape), *dkv
        dq, *dkv = lax.fori_loop(blocks.lo[block], blocks.hi[block], add, start)
        return dkv, jnp.moveaxis(dq, 3, 1).astype(q.dtype)

    empty = [jnp.zeros(w.shape) for w in (blocks.k, blocks.v)]
    dkv, dq = lax.scan(of_block, empty, jnp.arange(len(blocks.q)))
    return [blocks.whole(dq).reshape(q.shape), *(w[:, : k.shape[1]].astype(k.dtype) for w in dkv)]


class _Blocks:
    """Queries and keys in blocks, padded."""

    def __init__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array,
        documents: jax.Array | None, *, scale: float, window: int, soft_cap: float,
    ) -> None:  # fmt: skip
        self.num_queries, self.options = q.shape[1], (scale, window, soft_cap)
        self.t, self.s = min(BLOCK, q.shape[1]), min(BLOCK, k.shape[1])
        self.q = self.of_queries(q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1]))
        self.k, self.v = (_padded(w, self.s) for w in (k, v))
        # Padded keys lie behind all queries, and padded queries see what the last one does.
        positions = jnp.pad(positions, (0, -q.shape[1] % self.t), mode="edge")
        documents = None if documents is None else _padded(documents, self.s)
        seen = _Seen.of(positions, documents, self.k.shape[:2], window, (self.t, self.s))
        self.seen, self.lo, self.hi = seen, seen.lo.min(axis=0), seen.hi.max(axis=0)

    def of_queries(self, w_BT: jax.Array) -> jax.Array:
        """Cuts [B, T, ...] into blocks, [Q, B, t, ...]."""
        padded = _padded(w_BT, self.t)
        return padded.reshape(len(w_BT), -1, self.t, *w_BT.shape[2:]).swapaxes(0, 1)

    def whole(self, blocks: jax.Array) -> jax.Array:
        """Undoes `of_queries`."""
        joined = blocks.swapaxes(0, 1)
        return joined.reshape(len(joined), -1, *joined.shape[3:])[:, : self.num_queries]

    def keys(self, w_BS: jax.Array, number: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(w_BS, number * self.s, self.s, axis=1)

    def scores(
        self, block: jax.Array, number: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The keys of a block that queries of a block see, bool [B, 1, 1, t, s], their scores,
        float32 [B, K, G, t, s], and the slope of the scores' cap."""
        scale, window, soft_cap = self.options
        positions, own = (
            lax.dynamic_slice_in_dim(w, block * self.t, self.t, axis=w.ndim - 1)
            for w in (self.seen.positions, self.seen.own)
        )
        distance = positions[:, None] - number * self.s - jnp.arange(self.s)
        seen = own[:, :, None] == self.keys(self.seen.documents, number)[:, None]
        seen = (seen & (distance >= 0) & (distance < window))[:, None, None]
        scores = scale * _product("btkgh,bskh->bkgts", self.q[block], self.keys(self.k, number))
        slope = None
        if soft_cap:
            capped = jnp.tanh(scores / soft_cap)
            scores, slope = soft_cap * capped, 1 - jnp.square(capped)
        return seen, jnp.where(seen, scores, UNSEEN), slope


def _padded(w_BT: jax.Array, block: int) -> jax.Array:
    rest = -w_BT.shape[1] % block
    return jnp.pad(w_BT, ((0, 0), (0, rest), *((0, 0),) * (w_BT.ndim - 2)))


def _product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)
