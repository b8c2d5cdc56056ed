"""Several residual streams: manifold-constrained hyper-connections (Xie et al. 2025, section 4).

A token has n residual streams, the rows of X. A branch of a layer, attention or the MLP, reads one
mixture of them; its output is written to all of them, which are mixed with one another:

    m_read, m_write, m_mix = vec(X) / rms(vec(X)) @ kernel
    read  = sigmoid(scale[0] m_read + b_read)
    write = 2 sigmoid(scale[1] m_write + b_write)
    mix   = sinkhorn(exp(scale[2] m_mix + b_mix))
    X     = mix X + write branch(read X)

The rows and columns of ``mix`` sum to 1, so that no number of layers makes streams grow or vanish.

Dimension suffixes: B rows, T a device's part of the sequence, N and M streams, E width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from models.blocks import INIT_STDDEV, einsum

_ITERATIONS = 20
"""Iterations of Sinkhorn and Knopp's algorithm (appendix A.1)."""
_INITIAL_SCALE = 0.01
"""Initial factor of what depends on the token (appendix A.1)."""
_INITIAL_DIAGONAL = 4.0
"""Initial logit by which streams stay themselves: of four, each keeps 0.95 (our choice)."""
_EPSILON = 1e-12
"""Added to the sums of rows and columns, in which all numbers may be too small for float32."""


def spread(x_BTE: jax.Array, num_streams: int) -> jax.Array:
    """Copies an embedding to all streams: [B, T, N, E]."""
    shape = *x_BTE.shape[:-1], num_streams, x_BTE.shape[-1]
    return jnp.broadcast_to(x_BTE[..., None, :], shape)


def merge(x_BTNE: jax.Array) -> jax.Array:
    """Averages the streams for the head: [B, T, E]."""
    return x_BTNE.mean(axis=-2)


def doubly_stochastic(logits_NM: jax.Array) -> jax.Array:
    """Divides exp(logits) by the sums of columns and of rows in turn (Sinkhorn and Knopp 1967).

    Args:
      logits_NM: float [..., n, n].

    Example:
      >>> doubly_stochastic(jnp.zeros((2, 2))).tolist()
      [[0.5, 0.5], [0.5, 0.5]]
    """

    def iteration(matrix_NM: jax.Array, _: None) -> tuple[jax.Array, None]:
        for axis in (-2, -1):
            matrix_NM = matrix_NM / (matrix_NM.sum(axis=axis, keepdims=True) + _EPSILON)
        return matrix_NM, None

    # The result does not depend on it, and has no gradient by it but that of rounding.
    largest = jax.lax.stop_gradient(logits_NM.max(axis=(-2, -1), keepdims=True))
    matrix_NM = jnp.exp(logits_NM - largest)
    return jax.lax.scan(iteration, matrix_NM, length=_ITERATIONS)[0]


class Streams(nnx.Module):
    """The connection of one branch of a layer to the streams.

    At first it reads the streams' mean and writes to all alike, so that up to what depends on the
    token, a model begins as one with a single stream.

    Args:
      num_streams: number of streams, at least 2.
      width: size of a stream.
      epsilon: number added to the mean of squares.
      rngs: draws the kernel from its ``params`` stream.
    """

    def __init__(self, num_streams: int, width: int, *, epsilon: float, rngs: nnx.Rngs):
        self.epsilon = epsilon
        shape = num_streams * width, num_streams * (2 + num_streams)
        self.kernel = nnx.Param(INIT_STDDEV * jax.random.normal(rngs.params(), shape))
        self.scale = nnx.Param(jnp.full(3, _INITIAL_SCALE))
        read, write = jnp.full(num_streams, -math.log(num_streams - 1)), jnp.zeros(num_streams)
        mix = _INITIAL_DIAGONAL * jnp.eye(num_streams)
        self.bias = nnx.Param(jnp.concatenate((read, write, mix.reshape(-1))))

    def __call__(self, x_BTNE: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """Returns what the branch reads [B, T, E], and the function of its output [B, T, E] that
        makes the new streams [B, T, N, E]."""
        kernel = self.kernel[...].reshape(*x_BTNE.shape[2:], -1)
        logits = einsum("btne,neo->bto", x_BTNE, kernel)
        maps = _maps(logits, x_BTNE, self.scale[...], self.bias[...], self.epsilon)
        return _read(maps[0], x_BTNE), lambda y_BTE: _written(*maps[1:], x_BTNE, y_BTE)


# What a layer keeps for its backward is streams, in their own dtype, and logits.


@functools.partial(jax.checkpoint, static_argnums=4)
def _maps(
    logits: jax.Array, x_BTNE: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Makes read and write [B, T, N] and mix [B, T, N, M], float32."""
    squares = jnp.square(x_BTNE.astype(jnp.float32)).mean(axis=(-2, -1))
    logits = logits * jax.lax.rsqrt(squares + epsilon)[..., None]
    count = x_BTNE.shape[-2]
    ends = count, 2 * count
    read, write, mix = (
        factor * part + own
        for factor, part, own in zip(
            scale, jnp.split(logits, ends, axis=-1), jnp.split(bias, ends), strict=True
        )
    )
    mix = doubly_stochastic(mix.reshape(*mix.shape[:-1], count, count))
    return jax.nn.sigmoid(read), 2 * jax.nn.sigmoid(write), mix


@jax.checkpoint
def _read(read_BTN: jax.Array, x_BTNE: jax.Array) -> jax.Array:
    return (read_BTN[..., None] * x_BTNE).sum(axis=-2).astype(x_BTNE.dtype)


@jax.checkpoint
def _written(
    write_BTN: jax.Array, mix_BTNM: jax.Array, x_BTME: jax.Array, y_BTE: jax.Array
) -> jax.Array:
    mixed = (mix_BTNM[..., None] * x_BTME[..., None, :, :]).sum(axis=-2)
    return (mixed + write_BTN[..., None] * y_BTE[..., None, :]).astype(x_BTME.dtype)
