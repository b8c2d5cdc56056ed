"""Tensors in 8-bit floats, with scales (Micikevicius et al. 2022, FP8 formats, section 3).

Scales are powers of two, so that multiplying by them rounds nothing. They are current: found from
the tensor itself, not from earlier steps, so that there is no state to keep.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
"""Dtype of weights and activations: 3 bits of mantissa, at most 448."""
E5M2 = jnp.dtype(jnp.float8_e5m2)
"""Dtype of gradients at a matmul's output: 2 bits of mantissa, at most 57344."""
BLOCK = 32
"""Values that share a scale in MXFP8 (OCP Microscaling Formats 1.0, table 1)."""
_SMALLEST = 2.0**-100
"""Scales are made for values of this size at least: a product of two scales is a float32."""


class Quantized(NamedTuple):
    """A tensor as ``values * scale``.

    Args:
      values: `E4M3` or `E5M2`.
      scale: float32 scalar; or one power of two in 8 bits for each `BLOCK` of the last dimension.
    """

    values: jax.Array
    scale: jax.Array

    def widened(self, dtype: DTypeLike) -> jax.Array:
        return self.values.astype(dtype) * self.scale.astype(dtype)


def scale_for(largest: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Finds the scale of tensors from the largest of their absolute values, which becomes 3/4 to
    3/2 of the dtype's largest power of two: nothing overflows."""
    wide = jnp.maximum(largest.astype(jnp.float32), _SMALLEST)
    share = wide * 2.0 ** (1 - jnp.finfo(dtype).maxexp)  # first, since rounding could overflow
    return lax.reduce_precision(share, exponent_bits=8, mantissa_bits=0)


def rounded_to(x: jax.Array, dtype: DTypeLike, scale: jax.Array) -> jax.Array:
    """Rounds ``x / scale``; a scale with dimensions belongs to the first ones of x."""
    scale = scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim))
    return (x.astype(jnp.float32) / scale).astype(dtype)


def quantize(x: jax.Array, dtype: DTypeLike) -> Quantized:
    """Quantizes a tensor with its current scale.

    Example:
      >>> values, scale = quantize(jnp.array([0.1, -1.0]), E4M3)
      >>> (values.astype("float32") * scale).tolist()
      [0.1015625, -1.0]
    """
    scale = scale_for(jnp.abs(x).max(), dtype)
    return Quantized(rounded_to(x, dtype, scale), scale)


def quantize_blocks(x: jax.Array) -> Quantized:
    """Quantizes a tensor to `E4M3` with a scale for each `BLOCK` of its last dimension (MXFP8),
    which zeros extend to whole blocks.

    Example:
      >>> values, scale = quantize_blocks(jnp.array([[0.1] * 32 + [-1000.0] * 32]))
      >>> values.dtype.name, scale.astype("float32").tolist()
      ('float8_e4m3fn', [[0.00048828125, 4.0]])
    """
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)])
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    scale = scale_for(jnp.abs(blocks).max(-1), E4M3)
    values = rounded_to(blocks, E4M3, scale).reshape(x.shape)
    return Quantized(values, scale.astype(jnp.float8_e8m0fnu))
