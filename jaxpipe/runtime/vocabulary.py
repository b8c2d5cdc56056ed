"""Embedding lookup and cross-entropy with the vocabulary split over a mesh axis.

Every device of the axis holds a slice of the table, [vocab / p, width], and all of them compute
every microbatch together, so no stage is heavier than another and no table is stored twice. The
collectives are written out, forward and backward, because the pipeline runs under
``shard_map(check_vma=False)``, where transposing a ``psum`` would multiply gradients by p. What the
two functions promise instead: gradients of what is replicated over the axis are complete and equal
on every device, gradients of slices are the slice's own.

Dimension suffixes: N tokens, E width, V rows of the local slice.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax


def lookup(table: jax.Array, ids: jax.Array, *, axis: str | None = None) -> jax.Array:
    """Returns rows of an embedding table that may be split over a mesh axis.

    Args:
      table: [vocab, width]; with ``axis`` the local slice [vocab / p, width], slices in axis order.
      ids: integers [...], each in [0, vocab), the same on every device of the axis.
      axis: name of the mesh axis the table is split over, inside `jax.shard_map`; None for a whole
        table.

    Returns:
      [..., width] in the table's dtype, the same on every device of the axis. The backward expects
      the complete cotangent on every device.

    Example:
      >>> lookup(jnp.arange(6.0).reshape(3, 2), jnp.array([2, 0])).tolist()
      [[4.0, 5.0], [0.0, 1.0]]
    """
    local, held = _local(ids, table.shape[0], axis)
    # Clipped rather than filled: ids out of the slice are zeroed below, which also keeps their
    # gradients out.
    rows = jnp.take(table, local, axis=0, mode="clip")
    if axis is None:
        return rows
    return _sum_replicated(jnp.where(held[..., None], rows, 0), axis)


def cross_entropy(
    x: jax.Array, table: jax.Array, targets: jax.Array, *, vocab_size: int, axis: str | None = None
) -> jax.Array:
    """Mean cross-entropy of ``softmax(x @ table.T)``, the table possibly split over a mesh axis.

    The loss of one token is ``logsumexp(z) - z[target]`` with ``z = table @ x``. Loss and
    ``softmax(z) - onehot(target)`` come out of one pass, and the latter is the only residual as
    large as the logits. Matmuls accumulate in float32 whatever the dtype of ``x``, and the table's
    gradient is never rounded to it.

    Args:
      x: [..., width], the same on every device of the axis; its dtype is the matmuls' input dtype.
      table: [vocab, width]; with ``axis`` the local slice [vocab / p, width], slices in axis order.
        Rows from ``vocab_size`` on are padding: they get no probability and no gradient.
      targets: integers [...], each in [0, vocab_size).
      vocab_size: the number of real rows of the whole table.
      axis: name of the mesh axis the table is split over, inside `jax.shard_map`; None for a whole
        table.

    Returns:
      The mean loss, a float32 scalar, the same on every device of the axis.

    Example:
      >>> float(cross_entropy(jnp.zeros((5, 2)), jnp.ones((4, 2)), jnp.zeros(5, int), vocab_size=4))
      1.3862943649291992
    """
    rows = x.reshape(-1, x.shape[-1])
    return _cross_entropy(axis, vocab_size, rows, table, targets.reshape(-1))


def _local(ids: jax.Array, size: int, axis: str | None) -> tuple[jax.Array, jax.Array]:
    """Ids as row numbers of the local slice of ``size`` rows, and which of them it holds."""
    local = ids - _offset(size, axis)
    return local, (local >= 0) & (local < size)


def _offset(size: int, axis: str | None) -> jax.Array | int:
    """The row of the whole table at which the local slice of ``size`` rows begins."""
    return 0 if axis is None else lax.axis_index(axis) * size


def _sum(x: jax.Array, axis: str | None) -> jax.Array:
    return x if axis is None else lax.psum(x, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_replicated(x: jax.Array, axis: str) -> jax.Array:
    """Sum over the axis; the backward is the identity, since the cotangent arrives complete."""
    return lax.psum(x, axis)


_sum_replicated.defvjp(
    lambda x, axis: (lax.psum(x, axis), None),
    lambda axis, _, cotangent: (cotangent,),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(axis, vocab_size, x_NE, table_VE, targets_N):
    return _cross_entropy_forward(axis, vocab_size, x_NE, table_VE, targets_N)[0]


def _cross_entropy_forward(axis, vocab_size, x_NE, table_VE, targets_N):
    """Loss, and as residual its gradient with respect to the local logits, times N."""
    size = table_VE.shape[0]
    logits_NV = jnp.einsum(
        "ne,ve->nv", x_NE, table_VE.astype(x_NE.dtype), preferred_element_type=jnp.float32
    )
    rows_V = jnp.arange(size)
    logits_NV = jnp.where(rows_V + _offset(size, axis) < vocab_size, logits_NV, -jnp.inf)
    largest_N = logits_NV.max(axis=-1)
    if axis is not None:
        largest_N = lax.pmax(largest_N, axis)
    exp_NV = jnp.exp(logits_NV - largest_N[:, None])
    total_N = _sum(exp_NV.sum(axis=-1), axis)

    local_N, held_N = _local(targets_N, size, axis)
    picked_N1 = jnp.take_along_axis(logits_NV, local_N[:, None], axis=-1, mode="clip")
    target_logit_N = _sum(jnp.where(held_N, picked_N1[:, 0], 0.0), axis)
    loss = jnp.mean(jnp.log(total_N) + largest_N - target_logit_N)

    onehot_NV = local_N[:, None] == rows_V
    dlogits_NV = (exp_NV / total_N[:, None] - onehot_NV).astype(x_NE.dtype)
    return loss, (dlogits_NV, x_NE, table_VE)


def _cross_entropy_backward(axis, vocab_size, residuals, cotangent):
    dlogits_NV, x_NE, table_VE = residuals
    scale = cotangent / x_NE.shape[0]
    dx_NE = jnp.einsum(
        "nv,ve->ne", dlogits_NV, table_VE.astype(x_NE.dtype), preferred_element_type=jnp.float32
    )
    dtable_VE = jnp.einsum("nv,ne->ve", dlogits_NV, x_NE, preferred_element_type=jnp.float32)
    dx_NE = _sum(dx_NE, axis) * scale
    return dx_NE.astype(x_NE.dtype), (dtable_VE * scale).astype(table_VE.dtype), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
