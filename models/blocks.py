"""Building blocks of several models: linear layers, attention, the post-norm transformer layer.

Dimension suffixes: B rows, S length of the sequence, T of a device's part of it, M length of the
attended memory, E width, N heads, H head width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.nnx import functional
from models.sharing import WHOLE, Sharing
from models.tensor import Tensor

if TYPE_CHECKING:
    from models.bert import BERTConfig
    from models.transformer import TransformerConfig

INIT_STDDEV = 0.02
"""Standard deviation of initial matrices in GPT (Radford et al. 2018, section 4.1) and BERT."""


def clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SwiGLU of GPT-OSS: both branches are clamped at 7, and ``up`` counts from -1."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


GATED: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
    "geglu": lambda gate, up: jax.nn.gelu(gate) * up,
    "clamped_swiglu": clamped_swiglu,
}
"""The hidden values of an MLP with a gate, by both its branches."""
UNGATED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": jax.nn.gelu,
    "exact_gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "relu2": lambda x: jax.nn.relu(x) ** 2,
}
"""The hidden values of an MLP without a gate."""
XIELU = {"beta": 0.5, "eps": -1e-6}
"""Constants of `xielu`."""


def xielu(x: jax.Array, positive: jax.Array, negative: jax.Array) -> jax.Array:
    """xIELU (Huang and Schlag 2024): a parabola above 0, an ELU below, each plus ``x / 2``.

    The curvatures are the softplus of ``positive``, and that of ``negative`` plus 1/2.
    """
    beta, eps = XIELU["beta"], XIELU["eps"]
    up, down = jax.nn.softplus(positive), beta + jax.nn.softplus(negative)
    below = jnp.expm1(jnp.minimum(x, eps)) - x
    return jnp.where(x > 0, up * x * x, down * below).astype(x.dtype) + beta * x


class Linear(nnx.Module):
    """``x @ kernel + bias`` in the dtype of x, over a float32 kernel.

    Args:
      in_width: size of the last dimension of x.
      out_width: size of the last dimension of the result.
      bias: whether there is a bias; it starts at zero.
      stddev: standard deviation of the initial kernel; None for sqrt(2 / (in_width + out_width))
        (Glorot and Bengio 2010, equation 12).
      rngs: draws the kernel from its ``params`` stream.
    """

    def __init__(
        self,
        in_width: int,
        out_width: int,
        *,
        bias: bool = True,
        stddev: float | None,
        rngs: nnx.Rngs,
    ):
        if stddev is None:
            stddev = math.sqrt(2 / (in_width + out_width))
        kernel = stddev * jax.random.normal(rngs.params(), (in_width, out_width))
        self.kernel = nnx.Param(kernel)
        self.bias = nnx.Param(jnp.zeros(out_width)) if bias else nnx.data(None)

    def __call__(
        self, x: jax.Array, total: Callable[[jax.Array], jax.Array] = lambda y: y
    ) -> jax.Array:
        """Maps x; ``total`` sums up over devices that have some of the kernel's rows each."""
        y = total(matmul(x, self.kernel[...]))
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class Attention(nnx.Module):
    """Attention with several heads, from a sequence to itself or to another one.

    Args:
      width: size of both sequences' vectors, a multiple of ``num_heads``.
      num_heads: heads.
      stddev: standard deviation of the initial kernels, as in `Linear`.
      tensor: the devices that have some of the heads each.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        stddev: float | None,
        tensor: Tensor = WHOLE.tensor,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.tensor = num_heads, tensor
        self.query, self.key, self.value, self.out = (
            Linear(width, width, stddev=stddev, rngs=rngs) for _ in range(4)
        )

    def __call__(
        self, x_BSE: jax.Array, memory_BME: jax.Array, *, mask: jax.Array | None = None,
        is_causal: bool = False,
    ) -> jax.Array:  # fmt: skip
        """Mixes the values of ``memory`` for every position of x; both are whole sequences.

        ``mask`` is bool, true where a position may be seen: [B, M], or None. Each device returns
        its part of the sequence.
        """
        return self.attend(x_BSE, *self.keys_values(memory_BME), mask=mask, is_causal=is_causal)

    def keys_values(self, memory_BME: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes keys and values, [B, M, N, H]; a decoder keeps them from token to token."""
        return self._heads(self.key(memory_BME)), self._heads(self.value(memory_BME))

    def attend(
        self, x_BSE: jax.Array, key_BMNH: jax.Array, value_BMNH: jax.Array, *,
        mask: jax.Array | None = None, is_causal: bool = False,
    ) -> jax.Array:  # fmt: skip
        """Lets x attend to given keys and values."""
        query_BSNH = self._heads(self.query(x_BSE))
        mixed_BSNH = jax.nn.dot_product_attention(
            query_BSNH,
            key_BMNH,
            value_BMNH,
            mask=None if mask is None else mask[:, None, None, :],
            is_causal=is_causal,
            implementation=attention_kernel(query_BSNH),
        )
        return self.out(mixed_BSNH.reshape(*x_BSE.shape[:2], -1), self.tensor.scatter)

    def _heads(self, x_BSE: jax.Array) -> jax.Array:
        num_heads = self.tensor.part(self.num_heads, "num_heads")
        return x_BSE.reshape(*x_BSE.shape[:2], num_heads, -1)


class EncoderLayer(nnx.Module):
    """A layer of an encoder: self-attention, then an MLP, each normalised after its residual sum.

    The layer of Vaswani et al. 2017 (section 3.1), and with GELU that of BERT. Dropout falls on
    both branches; attention weights are never dropped, since flash attention does not store them.
    """

    def __init__(
        self,
        config: BERTConfig | TransformerConfig,
        rngs: nnx.Rngs,
        *,
        activation: Callable[[jax.Array], jax.Array],
        stddev: float | None,
        sharing: Sharing = WHOLE,
    ):
        self.sharing, width, hidden = sharing, config.width, config.hidden_width
        shared: dict[str, Any] = {"stddev": stddev, "tensor": sharing.tensor, "rngs": rngs}
        self.attention = Attention(width, config.num_heads, **shared)
        self.attention_dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.attention_norm = stream_norm(config, rngs)
        self.mlp = MLP(width, hidden, activation=activation, **shared)
        self.mlp_dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.mlp_norm = stream_norm(config, rngs)

    def __call__(self, x_BTE: jax.Array, mask_BS: jax.Array | None = None) -> jax.Array:
        dropout = self.sharing.dropout
        x_BSE = self.sharing.tensor.gather(x_BTE)
        attended_BTE = self.attention(x_BSE, x_BSE, mask=mask_BS)
        x_BTE = self.attention_norm(x_BTE + dropout(self.attention_dropout, attended_BTE))
        return self.mlp_norm(x_BTE + dropout(self.mlp_dropout, self.mlp(x_BTE)))


class MLP(nnx.Module):
    """Two linear layers with an activation between them, whose hidden units devices may share."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: Callable[[jax.Array], jax.Array],
        stddev: float | None,
        tensor: Tensor = WHOLE.tensor,
        rngs: nnx.Rngs,
    ):
        self.activation, self.tensor = activation, tensor
        self.up = Linear(width, hidden, stddev=stddev, rngs=rngs)
        self.down = Linear(hidden, width, stddev=stddev, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.activation(self.up(self.tensor.gather(x)))
        return self.down(hidden, self.tensor.scatter)


def layer_norm(width: int, *, rngs: nnx.Rngs, **options: Any) -> nnx.LayerNorm:
    """A LayerNorm that computes its variance from the centred values.

    E[x^2] - E[x]^2, flax's default, cancels badly once the residual stream has a mean.
    """
    return nnx.LayerNorm(width, rngs=rngs, use_fast_variance=False, **options)


def stream_norm(config: BERTConfig | TransformerConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """The LayerNorm of a model's residual stream."""
    epsilon, dtype = config.norm_epsilon, config.compute_dtype
    return layer_norm(config.width, epsilon=epsilon, dtype=dtype, rngs=rngs)


def rms_norm(width: int, *, epsilon: float, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """An RMSNorm of the last dimension."""
    return nnx.RMSNorm(width, epsilon=epsilon, dtype=dtype, rngs=rngs)


class Norm(nnx.Module):
    """RMSNorm or LayerNorm whose scale flax lacks: per head, or kept as its difference from 1.

    Args:
      shape: of the scale: of the last dimensions of x, joined if they are normalised together.
      num_dims: the last dimensions that are normalised together.
      layer: whether the mean is subtracted.
      bias: whether there is a bias.
      from_zero: whether the scale is kept as its difference from 1.
      epsilon: number added to the variance.
      dtype: dtype of the result.
      tensor: the devices that have some of the heads each, where the scale has heads.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        num_dims: int = 1,
        layer: bool = False,
        bias: bool = False,
        from_zero: bool = False,
        epsilon: float,
        dtype: jnp.dtype,
        tensor: Tensor = WHOLE.tensor,
    ):
        self.num_dims, self.layer, self.from_zero, self.tensor = num_dims, layer, from_zero, tensor
        self.epsilon, self.dtype = epsilon, dtype
        self.scale = nnx.Param(jnp.zeros(shape) if from_zero else jnp.ones(shape))
        self.bias = nnx.Param(jnp.zeros(shape)) if bias else nnx.data(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.layer:
            y = y - self._mean(y)
        y = y * jax.lax.rsqrt(self._mean(y * y) + self.epsilon)
        scale = self.scale[...]
        if self.num_dims > 1:
            scale = scale.reshape(-1, x.shape[-1])
        if scale.ndim > 1:
            scale = self.tensor.own_heads(scale, x.shape[-2])
        y = y * (1 + scale if self.from_zero else scale)
        if self.bias is not None:
            y = y + self.bias[...]
        return y.astype(self.dtype)

    def _mean(self, y: jax.Array) -> jax.Array:
        dims = tuple(range(-self.num_dims, 0))
        mean = y.mean(axis=dims, keepdims=True)
        return mean if self.num_dims == 1 else self.tensor.mean(mean)


def function_of(
    make: Callable[[Any, nnx.Rngs], nnx.Module],
    config: Any,
    *,
    method: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """`functional` of the module ``make(config, rngs)``, without drawing parameters."""
    return functional(nnx.eval_shape(lambda: make(config, nnx.Rngs(0))), method=method)[0]


def soft_capped(x: jax.Array, cap: float | None) -> jax.Array:
    """``cap * tanh(x / cap)``: about x where it is small, and never beyond the cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def attention_kernel(q_BSNH: jax.Array) -> Literal["cudnn"] | None:
    """Chooses cuDNN's flash attention on GPUs, for bfloat16 and heads of 8, 16, ..., 128.

    A single query, as in decoding, has no large matrix of scores to save.
    """
    _, num_queries, _, head_width = q_BSNH.shape
    fits = q_BSNH.dtype == jnp.bfloat16 and head_width % 8 == 0 and head_width <= 128
    return "cudnn" if fits and num_queries > 1 and jax.default_backend() == "gpu" else None


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """``x @ kernel`` in x's dtype; the kernel's gradient stays float32, never rounded.

    The forward matmul is a plain one, so that the rematerialization policies see it.
    """
    y = x @ jax.lax.stop_gradient(kernel.astype(x.dtype))
    return _with_kernel_gradient("...i,...o->io", y, x, kernel)


def einsum(spec: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`matmul` for kernels of any dimensions: ``jnp.einsum(spec, x, kernel)``."""
    y = jnp.einsum(spec, x, jax.lax.stop_gradient(kernel.astype(x.dtype)))
    inputs, of_y = spec.split("->")
    of_x, of_kernel = inputs.split(",")
    return _with_kernel_gradient(f"{of_x},{of_y}->{of_kernel}", y, x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_kernel_gradient(spec: str, y: jax.Array, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns ``y``, a product of x and kernel; its backward adds only the kernel's gradient.

    That gradient is ``jnp.einsum(spec, x, dy)``.
    """
    del spec, x, kernel
    return y


def _kernel_gradient(spec: str, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, None, jax.Array]:
    dkernel = jnp.einsum(spec, x, dy, preferred_element_type=jnp.float32)
    return dy, None, dkernel


_with_kernel_gradient.defvjp(lambda spec, y, x, kernel: (y, x), _kernel_gradient)
