"""Low-rank adapters on frozen linear maps, whose weights may be rounded to 8 or 4 bits.

    y = x @ kernel + alpha / rank * (dropout(x) @ lora_a) @ lora_b

(LoRA: Hu et al. 2021, section 4.1; on rounded weights QLoRA: Dettmers et al. 2023.) `attach` puts
adapters on the linear maps of a layer, `merged` adds them to the weights that they adapt.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.blocks import Linear, matmul
from models.types import PyTree

if TYPE_CHECKING:
    from models.gpt_config import GPTConfig

TRAINED = "*/lora_[ab]"
"""Paths of the parameters of adapters."""
BLOCK = 64
"""Inputs of a map whose 4-bit weights for an output share a scale, or as many of them as divide
the number of inputs."""
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
], np.float32)  # fmt: skip
"""The numbers of 4-bit NormalFloat (Dettmers et al. 2023, appendix E)."""
_JOINED = ("qkv", "qkv_proj", "c_attn", "query_key_value")
THEIRS = {
    "query": ("q_proj", "q_b_proj", *_JOINED),
    "key": ("k_proj", *_JOINED),
    "value": ("v_proj", *_JOINED),
    "query_down": ("q_a_proj",),
    "latent": ("kv_a_proj_with_mqa",),
    "key_value": ("kv_b_proj",),
    "out": ("o_proj", "out_proj", "dense", "c_proj"),
    "gate": ("gate_proj", "gate_up_proj"),
    "up": ("up_proj", "gate_up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h"),
    "down": ("down_proj", "fc2", "fc_out", "c_proj", "dense_4h_to_h"),
    "shared_gate": ("shared_expert_gate",),
    "projection": ("eh_proj",),
    "qkvz": ("in_proj_qkvz",),
    "ba": ("in_proj_ba",),
}
"""Names of linear maps in the transformers library, by the ends of their paths here."""


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of a model's layers.

    Args:
      rank: columns of ``lora_a`` and rows of ``lora_b``, at least 1.
      alpha: ``alpha / rank`` multiplies what an adapter adds; 0 turns adapters off.
      targets: patterns of the linear maps that are adapted: of their paths in a layer, such as
        "attention/qkv/query", of what these end with, such as "query", or of their names in the
        transformers library, such as "q_proj".
      dropout: probability with which an adapter drops a number of its input.
      base: form of the kernels of all linear maps: "float32", "int8" with a scale per output, or
        "nf4" with a scale per output and `BLOCK` of inputs.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("*",)
    dropout: float = 0.0
    base: Literal["float32", "int8", "nf4"] = "float32"

    def adapts(self, name: str) -> bool:
        """Whether a linear map of that path in a layer is adapted."""
        names = (name, *THEIRS.get(name.rpartition("/")[2], ()))
        return any(
            fnmatch.fnmatchcase(f"/{name}", f"*/{target}")
            for name in names
            for target in self.targets
        )


class Adapter(nnx.Module):
    """A low-rank term that is added to a linear map."""

    def __init__(self, in_width: int, out_width: int, adapters: Adapters, *, rngs: nnx.Rngs):
        drawn = jax.random.uniform(rngs.params(), (in_width, adapters.rank), minval=-1)
        self.lora_a = nnx.Param(drawn / math.sqrt(in_width))
        self.lora_b = nnx.Param(jnp.zeros((adapters.rank, out_width)))
        self.dropout = nnx.Dropout(adapters.dropout, rngs=rngs)

    def low_rank(self, x: jax.Array) -> jax.Array:
        """Returns ``dropout(x) @ lora_a @ lora_b``."""
        return matmul(matmul(self.dropout(x), self.lora_a[...]), self.lora_b[...])


class AdaptedLinear(Linear, Adapter):
    """A linear map with frozen weights, and an adapter if it is one of the targets.

    Maps that are joined in one kernel have adapters of their own, under their names.

    Args:
      widths: outputs of each map that the kernel joins, by name; one, "", is the whole map.
      targets: the names of those that are adapted.
    """

    def __init__(
        self, linear: Linear, adapters: Adapters, widths: dict[str, int], targets: list[str], *,
        rngs: nnx.Rngs,
    ):  # fmt: skip
        self.adapters, self.widths, self.targets = adapters, (*widths.items(),), (*targets,)
        kernel, self.bias = linear.kernel[...], linear.bias
        parts = rounded(kernel, adapters.base)
        self.kernel = nnx.Param(parts["kernel"])
        if "kernel_scale" in parts:
            self.kernel_scale = nnx.Param(parts["kernel_scale"])
        for name in targets:
            shape = kernel.shape[0], widths[name]
            if name:
                setattr(self, name, Adapter(*shape, adapters, rngs=rngs))
            else:
                Adapter.__init__(self, *shape, adapters, rngs=rngs)

    def __call__(
        self, x: jax.Array, total: Callable[[jax.Array], jax.Array] = lambda y: y
    ) -> jax.Array:
        scale = self.kernel_scale[...] if self.adapters.base != "float32" else None
        y = matmul(x, whole(self.kernel[...], scale))
        if self.targets and self.adapters.alpha:
            y = self._adapted(x, y)
        y = total(y)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)

    def _adapted(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Adds the adapters' outputs to those of the kernel, or of this device's columns of it."""
        names, widths = zip(*self.widths, strict=True)
        parts = jnp.split(y, np.cumsum(widths)[:-1] * y.shape[-1] // sum(widths), axis=-1)
        scale = self.adapters.alpha / self.adapters.rank
        for n, name in enumerate(names):
            if name in self.targets:
                adapter = getattr(self, name) if name else self
                parts[n] = parts[n] + scale * adapter.low_rank(x)
        return jnp.concatenate(parts, axis=-1)


def linear_maps(module: nnx.Module) -> Iterator[tuple[str, nnx.Module, str]]:
    """Yields the path of every linear map in a layer, the module that has it, and its name there.

    Routers and experts are none of them.
    """
    for path, owner in nnx.iter_modules(module):
        for name, part in vars(owner).items():
            if isinstance(part, Linear):
                yield "/".join(map(str, (*path, name))), owner, name


def adapted_names(config: GPTConfig, path: str) -> dict[str, str]:
    """Names the maps that the kernel of a path joins, with their paths in a layer."""
    joined = config.qkv_widths if path.endswith("/qkv") else [""]
    return {name: f"{path}/{name}".removesuffix("/") for name in joined}


def attach(layer: nnx.Module, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
    """Puts `AdaptedLinear` in place of every linear map of a layer."""
    adapters = config.adapters
    assert adapters is not None
    for path, owner, name in [*linear_maps(layer)]:
        linear = getattr(owner, name)
        names = adapted_names(config, path)
        widths = config.qkv_widths if len(names) > 1 else {"": linear.kernel.shape[-1]}
        targets = [part for part, own in names.items() if adapters.adapts(own)]
        setattr(owner, name, AdaptedLinear(linear, adapters, widths, targets, rngs=rngs))


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


def merged(config: GPTConfig, layers: PyTree) -> PyTree:
    """Makes the parameters of layers without adapters, which are added to float32 kernels.

    Args:
      config: the model's shape, with adapters.
      layers: parameters of one layer, of all stacked, or of all in a tuple.
    """
    if isinstance(layers, tuple):
        return tuple(merged(config, layer) for layer in layers)
    if not isinstance(layers, dict):
        return layers
    adapted = [name for name in ("", *config.qkv_widths)
               if "lora_b" in (layers.get(name, {}) if name else layers)]  # fmt: skip
    if "kernel" not in layers or not ("kernel_scale" in layers or adapted):
        return {name: merged(config, part) for name, part in layers.items()}
    kernel = np.array(whole(layers["kernel"], layers.get("kernel_scale")), np.float32)
    adapters = config.adapters
    assert adapters is not None
    for name in adapted:
        adapter = layers[name] if name else layers
        low = adapters.alpha / adapters.rank * np.asarray(adapter["lora_a"])
        kernel[..., columns(config, name)] += low @ np.asarray(adapter["lora_b"])
    return {name: part for name, part in layers.items() if name == "bias"} | {"kernel": kernel}


def columns(config: GPTConfig, name: str) -> slice:
    """The columns of a map in the kernel that joins it with others; all for ""."""
    if not name:
        return slice(None)
    names, widths = [*config.qkv_widths], [*config.qkv_widths.values()]
    first = sum(widths[: names.index(name)])
    return slice(first, first + config.qkv_widths[name])


def beside(params: PyTree, leaves: Mapping[str, np.ndarray]) -> PyTree:
    """Returns parameters with others by their paths, such as "layers/attention/out/lora_a".

    Args:
      leaves: arrays by path; numbers in paths are places in tuples.
    """
    for path, leaf in leaves.items():
        key, _, rest = path.partition("/")
        if isinstance(params, tuple):
            number = int(key)
            own = beside(params[number], {rest: leaf})
            params = (*params[:number], own, *params[number + 1 :])
        else:
            own = beside(params.get(key, {}), {rest: leaf}) if rest else leaf
            params = {**params, key: own}
    return params
