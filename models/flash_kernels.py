"""Kernels of `models.block_attention` for GPUs, in Pallas through Triton (Dao 2023).

Each program of a kernel has a block of queries, or of keys, of one row and one head, and goes
through the blocks of the other that are seen. Scores stay in registers.

Dimension suffixes are those of `models.block_attention`; q and k in shapes are a block's queries
and keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

Arrays = Sequence[jax.Array]

BLOCK = 128, 64
"""Queries and keys of a block."""
UNSEEN = -1e30
"""Score of what is not seen: finite, since a block may show a query nothing."""


def fits(q_BTNH: jax.Array, k_BSKH: jax.Array) -> bool:
    """Whether the kernels take such arrays, on GPUs."""
    divides = q_BTNH.shape[1] % BLOCK[0] == 0 and k_BSKH.shape[1] % BLOCK[1] == 0
    return q_BTNH.dtype == jnp.bfloat16 and divides and q_BTNH.shape[-1] <= 256


def _scores(
    q: jax.Array, k: jax.Array, seen: jax.Array, scale: float, soft_cap: float
) -> tuple[jax.Array, jax.Array | None]:
    """Scores of a block's queries and keys, float32 [q, k], and the slope of their cap."""
    scores, slope = scale * plgpu.dot(q, k.T), None
    if soft_cap:
        capped = jnp.tanh(scores / soft_cap)
        scores, slope = soft_cap * capped, 1 - capped * capped
    return jnp.where(seen, scores, UNSEEN), slope


def _seen(
    positions: jax.Array, own: jax.Array, documents: jax.Array, start: jax.Array, window: int
) -> jax.Array:
    """Marks the keys from ``start`` that queries see, bool [q, k]."""
    distance = positions[:, None] - (start + jnp.arange(documents.shape[0]))[None]
    return (distance >= 0) & (distance < window) & (own[:, None] == documents[None])


def _forward_kernel(
    q_ref: Ref, k_ref: Ref, v_ref: Ref, positions_ref: Ref, own_ref: Ref, documents_ref: Ref,
    lo_ref: Ref, hi_ref: Ref, mixed_ref: Ref, sums_ref: Ref,
    *, scale: float, window: int, soft_cap: float,
) -> None:  # fmt: skip
    q, positions, own = q_ref[...], positions_ref[...], own_ref[...]

    def add(number: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, mixed = sums
        start = number * BLOCK[1]
        keys = pl.ds(start, BLOCK[1])
        seen = _seen(positions, own, documents_ref[keys], start, window)
        scores, _ = _scores(q, k_ref[keys, :], seen, scale, soft_cap)
        new = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.where(seen, jnp.exp(scores - new[:, None]), 0.0)
        old, values = jnp.exp(largest - new), v_ref[keys, :]
        mixed = old[:, None] * mixed + plgpu.dot(weights.astype(values.dtype), values)
        return new, old * total + jnp.sum(weights, axis=1), mixed

    empty = jnp.full(BLOCK[0], UNSEEN), jnp.zeros(BLOCK[0]), jnp.zeros(q.shape, jnp.float32)
    largest, total, mixed = lax.fori_loop(lo_ref[0], hi_ref[0], add, empty)
    mixed_ref[...] = (mixed / total[:, None]).astype(mixed_ref.dtype)
    sums_ref[...] = largest + jnp.log(total)


def _query_kernel(
    q_ref: Ref, k_ref: Ref, v_ref: Ref, positions_ref: Ref, own_ref: Ref, documents_ref: Ref,
    lo_ref: Ref, hi_ref: Ref, sums_ref: Ref, dmixed_ref: Ref, products_ref: Ref, dq_ref: Ref,
    *, scale: float, window: int, soft_cap: float,
) -> None:  # fmt: skip
    q, positions, own, dmixed = q_ref[...], positions_ref[...], own_ref[...], dmixed_ref[...]
    sums, products = sums_ref[...], products_ref[...]

    def add(number: jax.Array, dq: jax.Array) -> jax.Array:
        start = number * BLOCK[1]
        keys = pl.ds(start, BLOCK[1])
        k, seen = k_ref[keys, :], _seen(positions, own, documents_ref[keys], start, window)
        scores, slope = _scores(q, k, seen, scale, soft_cap)
        weights = jnp.exp(scores - sums[:, None])
        dscores = weights * (plgpu.dot(dmixed, v_ref[keys, :].T) - products[:, None])
        dscores = dscores if slope is None else dscores * slope
        return dq + plgpu.dot((scale * dscores).astype(k.dtype), k)

    dq = lax.fori_loop(lo_ref[0], hi_ref[0], add, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = dq.astype(dq_ref.dtype)


def _key_kernel(
    q_ref: Ref, k_ref: Ref, v_ref: Ref, positions_ref: Ref, own_ref: Ref, documents_ref: Ref,
    lo_ref: Ref, hi_ref: Ref, sums_ref: Ref, dmixed_ref: Ref, products_ref: Ref, dk_ref: Ref,
    dv_ref: Ref, *, scale: float, window: int, soft_cap: float,
) -> None:  # fmt: skip
    k, v, documents = k_ref[...], v_ref[...], documents_ref[...]
    start, groups = pl.program_id(0) * BLOCK[1], q_ref.shape[1]
    lo, count = lo_ref[0], jnp.maximum(hi_ref[0] - lo_ref[0], 1)

    def add(turn: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        dk, dv = sums
        group = lax.div(turn, count)
        queries = pl.ds((lo + lax.rem(turn, count)) * BLOCK[0], BLOCK[0])
        q, dmixed = q_ref[queries, group, :], dmixed_ref[queries, group, :]
        seen = _seen(positions_ref[queries], own_ref[queries], documents, start, window)
        scores, slope = _scores(q, k, seen, scale, soft_cap)
        weights = jnp.exp(scores - sums_ref[group, queries][:, None])
        dscores = weights * (plgpu.dot(dmixed, v.T) - products_ref[group, queries][:, None])
        dscores = dscores if slope is None else dscores * slope
        dv = dv + plgpu.dot(weights.astype(k.dtype).T, dmixed)
        return dk + plgpu.dot((scale * dscores).astype(k.dtype).T, q), dv

    empty = (jnp.zeros(k.shape, jnp.float32),) * 2
    dk, dv = lax.fori_loop(0, groups * (hi_ref[0] - lo), add, empty)
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)


class _Call:
    """Calls of the kernels for arrays of these shapes."""

    def __init__(self, q_BTNH: jax.Array, k_BSKH: jax.Array, options: Mapping[str, float]) -> None:
        self.rows, self.queries, self.heads, self.width = q_BTNH.shape
        self.keys, self.key_heads = k_BSKH.shape[1:3]
        self.groups = self.heads // self.key_heads
        self.options = options

    def per_queries(
        self, kernel: Callable[..., None], arrays: Arrays, outputs: Sequence[jax.ShapeDtypeStruct]
    ) -> list[jax.Array]:
        """Runs a kernel for every block of queries; ``arrays`` are those of `_forward_kernel`, then
        some like queries."""
        q, k = BLOCK[0], self.keys
        whole = pl.BlockSpec((None, k, None, self.width), lambda t, b, n: (b, 0, self._of(n), 0))
        own = pl.BlockSpec((None, q, None, self.width), lambda t, b, n: (b, t, n, 0))
        number = pl.BlockSpec((None, 1), lambda t, b, n: (b, t))
        of_queries = pl.BlockSpec((None, None, q), lambda t, b, n: (b, n, t))
        specs = [
            own,
            whole,
            whole,
            pl.BlockSpec((q,), lambda t, b, n: (t,)),
            pl.BlockSpec((None, q), lambda t, b, n: (b, t)),
            pl.BlockSpec((None, k), lambda t, b, n: (b, 0)),
            number,
            number,
        ]
        like = {4: own, 3: of_queries}
        specs += [like[w.ndim] for w in arrays[len(specs) :]]
        grid = self.queries // q, self.rows, self.heads
        return self._run(kernel, grid, specs, arrays, outputs, [like[w.ndim] for w in outputs])

    def per_keys(self, arrays: Arrays, outputs: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Runs `_key_kernel` for every block of keys."""
        k, t = BLOCK[1], self.queries
        own = pl.BlockSpec((None, k, None, self.width), lambda s, b, n: (b, s, n, 0))
        whole = pl.BlockSpec((None, t, self.groups, self.width), lambda s, b, n: (b, 0, n, 0))
        number = pl.BlockSpec((None, 1), lambda s, b, n: (b, s))
        of_queries = pl.BlockSpec((None, self.groups, t), lambda s, b, n: (b, n, 0))
        specs = [
            whole,
            own,
            own,
            pl.BlockSpec((t,), lambda s, b, n: (0,)),
            pl.BlockSpec((None, t), lambda s, b, n: (b, 0)),
            pl.BlockSpec((None, k), lambda s, b, n: (b, s)),
            number,
            number,
            of_queries,
            whole,
            of_queries,
        ]
        grid = self.keys // k, self.rows, self.key_heads
        return self._run(_key_kernel, grid, specs, arrays, outputs, [own, own])

    def _of(self, head: jax.Array) -> jax.Array:
        return lax.div(head, jnp.int32(self.groups))

    def _run(
        self, kernel: Callable[..., None], grid: tuple[int, ...], specs: Sequence[pl.BlockSpec],
        arrays: Arrays, outputs: Sequence[jax.ShapeDtypeStruct],
        output_specs: Sequence[pl.BlockSpec],
    ) -> list[jax.Array]:  # fmt: skip
        return pl.pallas_call(
            functools.partial(kernel, **self.options),
            grid=grid,
            in_specs=specs,
            out_specs=output_specs,
            out_shape=outputs,
            compiler_params=plgpu.CompilerParams(
                num_warps=4 if self.width <= 64 else 8, num_stages=2 if self.width <= 128 else 1
            ),
            interpret=jax.default_backend() != "gpu",
        )(*arrays)


def forward(qkv: Arrays, visibility: Arrays, options: Mapping[str, float]) -> list[jax.Array]:
    """Mixes values, and computes the logarithms of the sums of weights, float32 [B, N, T].

    Args:
      qkv: queries [B, T, N, H], keys and values [B, S, K, H].
      visibility: positions [T], documents of queries [B, T] and of keys [B, S], and for each row
        and block of queries the first and the end of the blocks of keys that it sees.
      options: scale, window and soft_cap.
    """
    width, qkv = qkv[0].shape[-1], [*map(_padded, qkv)]
    q_BTNH, k_BSKH, _ = qkv
    call = _Call(q_BTNH, k_BSKH, options)
    outputs = [_like(q_BTNH), _float(call.rows, call.heads, call.queries)]
    mixed, sums = call.per_queries(_forward_kernel, (*qkv, *visibility), outputs)
    return [mixed[..., :width], sums]


def backward(
    qkv: Arrays, visibility: Arrays, seeing: Arrays, kept: Arrays, options: Mapping[str, float]
) -> list[jax.Array]:
    """Computes the gradients of queries, keys and values.

    Args:
      qkv, visibility, options: as for `forward`.
      seeing: for each row and block of keys, the first and the end of the blocks of queries that
        see it.
      kept: logarithms of sums [B, N, T], gradients of the mixed values [B, T, N, H], and products
        of both for each query [B, N, T].
    """
    width, qkv = qkv[0].shape[-1], [*map(_padded, qkv)]
    q_BTNH, k_BSKH, v_BSKH = qkv
    call = _Call(q_BTNH, k_BSKH, options)
    sums, dmixed, products = kept
    kept = sums, _padded(dmixed), products
    (dq,) = call.per_queries(_query_kernel, (*qkv, *visibility, *kept), [_like(q_BTNH)])
    arrays = *qkv, *visibility[:3], *seeing, *kept
    dk, dv = call.per_keys(arrays, [_like(k_BSKH), _like(v_BSKH)])
    return [w[..., :width] for w in (dq, dk, dv)]


def _padded(w: jax.Array) -> jax.Array:
    """Pads heads to a width that Triton has: a power of two, from 16."""
    more = max(16, pl.next_power_of_2(w.shape[-1])) - w.shape[-1]
    return jnp.pad(w, ((0, 0),) * 3 + ((0, more),))


def _like(w: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(w.shape, w.dtype)


def _float(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
