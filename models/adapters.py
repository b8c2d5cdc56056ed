"""Low-rank adapters on frozen linear maps, whose weights may be rounded to 8 or 4 bits.

    y = x @ kernel + alpha / rank * (dropout(x) @ lora_a) @ lora_b

(LoRA: Hu et al. 2021, section 4.1; on rounded weights QLoRA: Dettmers et al. 2023.) `attach` puts
adapters on the linear maps of a layer, `merged` adds them to the weights that they adapt.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.blocks import Linear, matmul
from models.types import PyTree

TRAINED = "*/lora_[ab]"
"""Paths of the parameters of adapters."""
BLOCK = 64
"""Inputs of a map whose 4-bit weights for an output share a factor, or as many of them as divide
the number of inputs."""
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
], np.float32)  # fmt: skip
"""The numbers of 4-bit NormalFloat (Dettmers et al. 2023, appendix E)."""


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of a model's layers.

    Args:
      rank: columns of ``lora_a`` and rows of ``lora_b``, at least 1.
      alpha: ``alpha / rank`` multiplies what an adapter adds; 0 turns adapters off.
      targets: patterns of the linear maps that are adapted: of their paths in a layer, such as
        "attention/qkv", or of what these end with, such as "qkv".
      dropout: probability with which an adapter drops a number of its input.
      base: form of the kernels of all linear maps: "float32", "int8" with a factor per output, or
        "nf4" with a factor per output and `BLOCK` of inputs.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("*",)
    dropout: float = 0.0
    base: Literal["float32", "int8", "nf4"] = "float32"

    def adapts(self, name: str) -> bool:
        """Whether a linear map of that path in a layer is adapted."""
        return any(fnmatch.fnmatchcase(f"/{name}", f"*/{target}") for target in self.targets)


class AdaptedLinear(Linear):
    """A linear map with frozen weights, and an adapter if it is one of the targets.

    Args:
      linear: the map.
      adapters: the adapters of its model.
      has_adapter: whether it is a target.
      rngs: draws ``lora_a``; ``lora_b`` begins at zero.
    """

    def __init__(self, linear: Linear, adapters: Adapters, has_adapter: bool, *, rngs: nnx.Rngs):
        self.adapters, self.has_adapter = adapters, has_adapter
        kernel, self.bias = linear.kernel[...], linear.bias
        parts = rounded(kernel, adapters.base)
        self.kernel = nnx.Param(parts["kernel"])
        if "kernel_scale" in parts:
            self.kernel_scale = nnx.Param(parts["kernel_scale"])
        if has_adapter:
            inputs, outputs = kernel.shape
            drawn = jax.random.uniform(rngs.params(), (inputs, adapters.rank), minval=-1)
            self.lora_a = nnx.Param(drawn / math.sqrt(inputs))
            self.lora_b = nnx.Param(jnp.zeros((adapters.rank, outputs)))
            self.dropout = nnx.Dropout(adapters.dropout, rngs=rngs)

    def __call__(
        self, x: jax.Array, total: Callable[[jax.Array], jax.Array] = lambda y: y
    ) -> jax.Array:
        scale = self.kernel_scale[...] if self.adapters.base != "float32" else None
        y = matmul(x, whole(self.kernel[...], scale))
        if self.has_adapter and self.adapters.alpha:
            low = matmul(self.dropout(x), self.lora_a[...])
            y = y + self.adapters.alpha / self.adapters.rank * matmul(low, self.lora_b[...])
        y = total(y)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


def linear_maps(module: nnx.Module) -> Iterator[tuple[str, nnx.Module, str]]:
    """Yields the path of every linear map in a layer, the module that has it, and its name there.

    Routers and experts are none of them.
    """
    for path, owner in nnx.iter_modules(module):
        for name, part in vars(owner).items():
            if isinstance(part, Linear):
                yield "/".join(map(str, (*path, name))), owner, name


def attach(layer: nnx.Module, adapters: Adapters, *, rngs: nnx.Rngs) -> None:
    """Puts `AdaptedLinear` in place of every linear map of a layer."""
    for path, owner, name in [*linear_maps(layer)]:
        has_adapter = adapters.adapts(path)
        linear = AdaptedLinear(getattr(owner, name), adapters, has_adapter, rngs=rngs)
        setattr(owner, name, linear)


def rounded(kernel: jax.Array, base: str) -> dict[str, jax.Array]:
    """Rounds a kernel [in, out] to ``kernel`` and ``kernel_scale``, which `whole` undoes.

    For "nf4" a byte has two inputs of an output, the first in its lower half.
    """
    inputs, outputs = kernel.shape
    if base == "float32":
        return {"kernel": kernel}
    if base == "int8":
        scale = jnp.abs(kernel).max(axis=0, keepdims=True) / 127
        return {"kernel": _ratio(kernel, scale).round().astype(jnp.int8), "kernel_scale": scale}
    blocks = kernel.reshape(-1, math.gcd(inputs, BLOCK), outputs)
    scale = jnp.abs(blocks).max(axis=1, keepdims=True)
    middles = (NF4[1:] + NF4[:-1]) / 2
    codes = jnp.searchsorted(middles, _ratio(blocks, scale)).astype(jnp.uint8)
    codes = codes.reshape(inputs // 2, 2, outputs)
    return {"kernel": codes[:, 0] | codes[:, 1] << 4, "kernel_scale": scale[:, 0]}


def _ratio(kernel: jax.Array, scale: jax.Array) -> jax.Array:
    return kernel / jnp.where(scale == 0, 1, scale)


def whole(kernel: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Undoes `rounded` for kernels [..., in, out]; ``scale`` is None for float32."""
    if scale is None:
        return kernel
    if kernel.dtype == jnp.int8:
        return kernel.astype(scale.dtype) * scale
    codes = jnp.stack((kernel & 15, kernel >> 4), axis=-2)
    *rest, blocks, outputs = scale.shape
    numbers = jnp.asarray(NF4, scale.dtype)[codes].reshape(*rest, blocks, -1, outputs)
    return (numbers * scale[..., None, :]).reshape(*rest, -1, outputs)


def merged(layers: PyTree, adapters: Adapters) -> PyTree:
    """Makes the parameters of layers without adapters, which are added to float32 kernels.

    Args:
      layers: parameters of one layer, of all stacked, or of all in a tuple.
      adapters: their adapters.
    """
    if isinstance(layers, tuple):
        return tuple(merged(layer, adapters) for layer in layers)
    if not isinstance(layers, dict):
        return layers
    if not {"lora_a", "kernel_scale"} & layers.keys():
        return {name: merged(part, adapters) for name, part in layers.items()}
    kernel = np.asarray(whole(layers["kernel"], layers.get("kernel_scale")), np.float32)
    if "lora_a" in layers:
        low = adapters.alpha / adapters.rank * np.asarray(layers["lora_a"])
        kernel = kernel + low @ np.asarray(layers["lora_b"])
    return {name: part for name, part in layers.items() if name == "bias"} | {"kernel": kernel}
