"""Embedding lookup and cross-entropy with the vocabulary split over a mesh axis.

Every device of the axis holds a slice of the table, [vocab / p, width], and all of them compute
every microbatch together, so no stage is heavier than another and no table is stored twice. The
collectives are written out, forward and backward, because the pipeline runs under
``shard_map(check_vma=False)``, where transposing a ``psum`` would multiply gradients by p. What the
two functions promise instead: gradients of what is replicated over the axis are complete and equal
on every device, gradients of slices are the slice's own.

A model axis (``sequence_axis``) may split tables, too. Along it the sequence is split outside these
functions, and cotangents are partial, as `jaxpipe.Model` has them.

Dimension suffixes: N tokens, E width, V rows of the local slice.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike


def lookup(
    table: Array,
    ids: Array,
    *,
    axis: str | None = None,
    sequence_axis: str | None = None,
    by_width: bool = False,
    dtype: DTypeLike | None = None,
) -> Array:
    """Returns rows of an embedding table that may be split over a mesh axis.

    Args:
      table: float [vocab, width]; with ``axis`` the local slice [vocab / p, width], slices in axis
        order.
      ids: int [...], each in [0, vocab), the same on every device of the axis.
      axis: the mesh axis that splits the table, inside `jax.shard_map`; None for a whole table.
      sequence_axis: a model axis that also splits the table, as the outer axis of the two, and the
        last dimension of the ids; None for none.
      by_width: whether that axis splits the table's width, [vocab / p, width / t]. Devices then
        exchange their columns of all rows, 1 / t of the bytes that a sum over them takes. A table
        that is also the head's is split by its rows.
      dtype: dtype of the rows, which devices exchange; None for the table's.

    Returns:
      Rows [..., width], the same on every device of the axis; with ``sequence_axis``, the device's
      part of the sequence. The backward expects the complete cotangent on every device of the axis.

    Example:
      >>> lookup(jnp.arange(6.0).reshape(3, 2), jnp.array([2, 0])).tolist()
      [[4.0, 5.0], [0.0, 1.0]]
    """
    names = _names(axis, None if by_width else sequence_axis)
    local, held = _local(ids, table.shape[0], names)
    # Clipped rather than filled: ids out of the slice are zeroed below, which also keeps their
    # gradients out.
    rows = jnp.take(table, local, axis=0, mode="clip").astype(dtype or table.dtype)
    if names:
        rows = jnp.where(held[..., None], rows, 0)
    if sequence_axis is not None:
        dim = ids.ndim - 1
        if by_width:
            rows = lax.all_to_all(rows, sequence_axis, dim, dim + 1, tiled=True)
        else:
            rows = lax.psum_scatter(rows, sequence_axis, scatter_dimension=dim, tiled=True)
    return rows if axis is None else _sum_replicated(rows, axis)


def cross_entropy(
    x: Array,
    table: Array,
    targets: Array,
    *,
    vocab_size: int,
    bias: Array | None = None,
    weights: Array | None = None,
    label_smoothing: float = 0.0,
    soft_cap: float | None = None,
    axis: str | None = None,
    sequence_axis: str | None = None,
) -> Array:
    """Mean cross-entropy of ``softmax(x @ table.T + bias)``, the table possibly split over an axis.

    The loss of one token is ``logsumexp(z) - sum(q * z)`` with ``z = table @ x + bias`` and ``q``
    the target's one-hot vector, or with label smoothing s (Szegedy et al. 2016, section 7)
    ``(1 - s) onehot + s / vocab_size``. One pass computes the loss and ``softmax(z) - q``, which is
    the only residual as large as the logits. For narrower dtypes of ``x``, matmuls accumulate in
    float32, and the gradients of table and bias are not rounded. The gradient of ``x`` is summed
    over devices in its own dtype.

    Args:
      x: float [..., width], the same on every device of the axis; its dtype is the matmuls' input
        dtype.
      table: as for `lookup`. Rows from ``vocab_size`` on are padding: they get no probability and
        no gradient.
      targets: int [...], each in [0, vocab_size); any number where the weight is 0.
      vocab_size: the number of real rows of the whole table.
      bias: float [vocab], with ``axis`` the local slice; or None.
      weights: float [...], the weight of each token in the mean, without gradient; None for equal
        weights. If they sum to 0, the loss is 0.
      label_smoothing: s, in [0, 1).
      soft_cap: c, which turns logits z into ``c tanh(z / c)``; None for no cap.
      axis: as for `lookup`.
      sequence_axis: as for `lookup`. x is then the device's part of the sequence; targets and
        weights are whole.

    Returns:
      ``sum(weights * losses) / sum(weights)`` in float32, or float64 if x is, the same on every
      device of the axis.

    Example:
      >>> float(cross_entropy(jnp.zeros((5, 2)), jnp.ones((4, 2)), jnp.zeros(5, int), vocab_size=4))
      1.3862943649291992
    """
    rows = _whole(x, axis, sequence_axis).reshape(-1, x.shape[-1])
    if weights is not None:
        weights = weights.reshape(-1).astype(_wide(x.dtype))
    return _cross_entropy(
        _Head(axis, sequence_axis, vocab_size, label_smoothing, soft_cap),
        rows,
        table,
        bias,
        targets.reshape(-1),
        weights,
    )


class _Head(NamedTuple):
    """Arguments of a cross-entropy that are known before it is traced."""

    axis: str | None
    sequence_axis: str | None
    vocab_size: int
    smoothing: float
    soft_cap: float | None


def _names(axis: str | None, sequence_axis: str | None) -> tuple[str, ...]:
    """The mesh axes that split a table, the outer one first."""
    return tuple(name for name in (sequence_axis, axis) if name is not None)


def _local(ids: Array, size: int, names: tuple[str, ...]) -> tuple[Array, Array]:
    """Ids as row numbers of the local slice of ``size`` rows, and which of them it holds."""
    local = ids - _offset(size, names)
    return local, (local >= 0) & (local < size)


def _offset(size: int, names: tuple[str, ...]) -> Array | int:
    """The row of the whole table at which the local slice of ``size`` rows begins."""
    return lax.axis_index(names) * size if names else 0


def _wide(dtype: DTypeLike) -> DTypeLike:
    """The dtype in which matmuls of this dtype accumulate."""
    return jnp.promote_types(dtype, jnp.float32)


def _sum(x: Array, names: tuple[str, ...]) -> Array:
    return lax.psum(x, names) if names else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_replicated(x: Array, axis: str) -> Array:
    """Sum over the axis; the backward is the identity, since the cotangent arrives complete."""
    return lax.psum(x, axis)


_sum_replicated.defvjp(
    lambda x, axis: (lax.psum(x, axis), None),
    lambda axis, _, cotangent: (cotangent,),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _whole(x: Array, axis: str | None, sequence_axis: str | None) -> Array:
    """Gathers the whole sequence. The backward sums along ``sequence_axis`` first, so that only a
    part of the sequence is summed along ``axis``."""
    if sequence_axis is None:
        return x
    return lax.all_gather(x, sequence_axis, axis=x.ndim - 2, tiled=True)


def _cotangent_of_whole(
    axis: str | None, sequence_axis: str | None, _: None, cotangent: Array
) -> tuple[Array]:
    if sequence_axis is not None:
        cotangent = lax.psum_scatter(
            cotangent, sequence_axis, scatter_dimension=cotangent.ndim - 2, tiled=True
        )
    return (cotangent if axis is None else lax.psum(cotangent, axis),)


_whole.defvjp(lambda *args: (_whole(*args), None), _cotangent_of_whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(head: _Head, *arrays: Array) -> Array:
    return _cross_entropy_forward(head, *arrays)[0]


def _cross_entropy_forward(
    head: _Head,
    x_NE: Array,
    table_VE: Array,
    bias_V: Array | None,
    targets_N: Array,
    weights_N: Array | None,
) -> tuple[Array, tuple[Array | None, ...]]:
    """Loss, and as residual its gradient with respect to the local logits, times ``1 / scale``."""
    axis, sequence_axis, vocab_size, smoothing, soft_cap = head
    names, size = _names(axis, sequence_axis), table_VE.shape[0]
    logits_NV = jnp.einsum(
        "ne,ve->nv", x_NE, table_VE.astype(x_NE.dtype), preferred_element_type=_wide(x_NE.dtype)
    )
    if bias_V is not None:
        logits_NV += bias_V
    if soft_cap is not None:
        logits_NV = soft_cap * jnp.tanh(logits_NV / soft_cap)
        slope_NV = 1 - (logits_NV / soft_cap) ** 2
    rows_V = jnp.arange(size, dtype=jnp.int32)
    real_V = rows_V + _offset(size, names) < vocab_size
    logits_NV = jnp.where(real_V, logits_NV, -jnp.inf)
    largest_N = logits_NV.max(axis=-1)
    if names:
        largest_N = lax.pmax(largest_N, names)
    exp_NV = jnp.exp(logits_NV - largest_N[:, None])
    total_N = _sum(exp_NV.sum(axis=-1), names)

    local_N, held_N = _local(targets_N, size, names)
    picked_N1 = jnp.take_along_axis(logits_NV, local_N[:, None], axis=-1, mode="clip")
    expected_logit_N = jnp.where(held_N, picked_N1[:, 0], 0.0)
    target_NV = local_N[:, None] == rows_V
    if smoothing:
        uniform_V = jnp.where(real_V, smoothing / vocab_size, 0.0)
        spread_N = jnp.where(real_V, uniform_V * logits_NV, 0.0).sum(axis=-1)
        expected_logit_N = (1 - smoothing) * expected_logit_N + spread_N
        target_NV = (1 - smoothing) * target_NV + uniform_V
    losses_N = jnp.log(total_N) + largest_N - _sum(expected_logit_N, names)
    dlogits_NV = exp_NV / total_N[:, None] - target_NV
    if soft_cap is not None:
        dlogits_NV *= slope_NV

    if weights_N is None:
        scale = jnp.asarray(1 / len(losses_N), losses_N.dtype)
    else:
        # Weighted before it is rounded. A target of weight 0 may be a row that does not exist.
        losses_N = jnp.where(weights_N == 0, 0.0, weights_N * losses_N)
        dlogits_NV *= weights_N[:, None]
        scale = 1 / jnp.where(weights_N.sum() == 0, 1.0, weights_N.sum())
    return losses_N.sum() * scale, (dlogits_NV.astype(x_NE.dtype), x_NE, table_VE, bias_V, scale)


def _cross_entropy_backward(
    head: _Head, residuals: tuple[Array, ...], cotangent: Array
) -> tuple[Array | None, ...]:
    dlogits_NV, x_NE, table_VE, bias_V, scale = residuals
    if head.sequence_axis is not None:  # along which cotangents are partial
        cotangent = lax.psum(cotangent, head.sequence_axis)  # of all devices' losses, which are one
    scale, wide = cotangent * scale, _wide(x_NE.dtype)
    dx_NE = jnp.einsum(
        "nv,ve->ne", dlogits_NV, table_VE.astype(x_NE.dtype), preferred_element_type=wide
    )
    dx_NE = (dx_NE * scale).astype(x_NE.dtype)  # as large as a message: summed in its dtype
    dtable_VE = jnp.einsum("nv,ne->ve", dlogits_NV, x_NE, preferred_element_type=wide)
    dbias_V = None
    if bias_V is not None:
        dbias_V = (dlogits_NV.sum(axis=0, dtype=wide) * scale).astype(bias_V.dtype)
    return dx_NE, (dtable_VE * scale).astype(table_VE.dtype), dbias_V, None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
