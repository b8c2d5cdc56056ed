"""ResNet: the residual networks of He et al. 2016 for small images and for ImageNet.

    x = images
    x = relu(norm(conv(x))) [, max pool]                             the stem, layer 0
    x = relu(branch(x) + shortcut(x))                                once per block
    loss = cross_entropy(mean over height and width of x @ kernel + bias, labels)

The stem is a layer of the pipeline, not the embedding, since the embedding runs on every stage.
Convolutions run in ``config.dtype`` over float32 kernels. Images are [rows, height, width,
channels].
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxpipe import Model
from jaxpipe.errors import Problem
from jaxpipe.nnx import functional, stateful
from models import validation
from models.blocks import Linear, matmul
from models.resnet_blocks import Basic, Bottleneck, Stem
from models.types import Batch, Key, PyTree

IMAGENET_BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Blocks of each group by depth (He et al. 2016, table 1); from 50 on they are bottlenecks."""


@dataclasses.dataclass(frozen=True)
class ResNetConfig(validation.Validated):
    """The shape of a ResNet.

    Args:
      depth: layers with weights. Style "cifar": 6 n + 2 with n blocks in each of three groups (20,
        32, 44, 56; section 4.2). Style "imagenet": 18, 34, 50, 101 or 152 (section 4.1).
      num_classes: number of labels.
      style: "cifar" has a 3x3 stem and shortcuts without parameters (zeros for new channels);
        "imagenet" a 7x7 stem with a max pool, and 1x1 convolutions where the shape changes. The 3x3
        convolution of a bottleneck has the stride.
      channels: channels of the images.
      width: channels of the first group, doubled by each further one; None for 16 ("cifar") or 64
        ("imagenet").
      norm: "group" (Wu and He 2018), the same for every number of rows; or "batch", whose
        statistics are those of the rows of one microbatch on one data shard.
      num_groups: groups of GroupNorm, a divisor of ``width``; None for the largest one up to 32
        (section 4 there) with two channels per group. Channels per group double with the width.
      dtype: compute dtype, "float32" or "bfloat16".

    Raises:
      ValueError: values that do not fit together, all of them in one message.
    """

    depth: int
    num_classes: int
    style: Literal["cifar", "imagenet"] = "cifar"
    channels: int = 3
    width: int | None = None
    norm: Literal["group", "batch"] = "group"
    num_groups: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"

    def problems(self) -> Iterator[Problem]:
        counts = ("num_classes", "channels", "width", "num_groups")
        wrong = [*validation.small_counts(self, *counts), *validation.wrong_choices(self)]
        yield from wrong
        depth, style = self.depth, {"style": self.style}
        if self.style == "cifar" and (depth < 8 or depth % 6 != 2):
            below = (depth - 2) // 6 * 6 + 2
            nearest = [d for d in (below, below + 6) if d >= 8] or [8]
            rule = "must be 6 n + 2 for $style, with n >= 1"
            yield Problem("depth", depth, rule, nearest, style)
        if self.style == "imagenet" and depth not in IMAGENET_BLOCKS:
            rule = f"must be one of {', '.join(map(str, IMAGENET_BLOCKS))} for $style"
            yield Problem("depth", depth, rule, (), style)
        if not wrong and self.first_width % self.groups:
            yield validation.not_a_divisor("num_groups", self.groups, "width", self.first_width)

    @property
    def first_width(self) -> int:
        return self.width or (16 if self.style == "cifar" else 64)

    @property
    def groups(self) -> int:
        if self.num_groups is not None:
            return self.num_groups
        most = max(1, min(32, self.first_width // 2))
        return max(n for n in range(1, most + 1) if self.first_width % n == 0)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of each group."""
        if self.style == "cifar":
            return ((self.depth - 2) // 6,) * 3
        return IMAGENET_BLOCKS[self.depth]

    @property
    def bottleneck(self) -> bool:
        return self.style == "imagenet" and self.depth >= 50

    @property
    def group_channels(self) -> tuple[int, ...]:
        """Output channels of each group of blocks."""
        expansion = Bottleneck.expansion if self.bottleneck else Basic.expansion
        return tuple(expansion * self.first_width * 2**g for g in range(len(self.blocks)))

    @property
    def num_layers(self) -> int:
        """Layers of the pipeline: the stem and every block."""
        return 1 + sum(self.blocks)

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    @classmethod
    def resnet50(cls, **fields: Any) -> ResNetConfig:
        """ResNet-50 for ImageNet: 25,557,032 parameters."""
        return cls(depth=50, num_classes=1000, style="imagenet", **fields)


@dataclasses.dataclass(frozen=True)
class Kind:
    """The kind of one layer; layers of equal kind run the same function."""

    block: type[Any]
    in_channels: int
    channels: int
    stride: int

    def module(self, config: ResNetConfig, rngs: nnx.Rngs) -> nnx.Module:
        return self.block(config, self.in_channels, self.channels, stride=self.stride, rngs=rngs)


def kinds(config: ResNetConfig) -> tuple[Kind, ...]:
    """Lists the kind of every layer, in model order.

    Example:
      >>> [kind.stride for kind in kinds(ResNetConfig(depth=14, num_classes=10))]
      [1, 1, 1, 2, 1, 2, 1]
    """
    stem_stride = 1 if config.style == "cifar" else 2
    layers = [Kind(Stem, config.channels, config.first_width, stem_stride)]
    block = Bottleneck if config.bottleneck else Basic
    in_channels = config.first_width
    for group, num_blocks in enumerate(config.blocks):
        channels = config.first_width * 2**group
        for i in range(num_blocks):
            stride = 2 if group > 0 and i == 0 else 1
            layers.append(Kind(block, in_channels, channels, stride))
            in_channels = block.expansion * channels
    return tuple(layers)


def init(config: ResNetConfig, rng: jax.Array) -> PyTree:
    """Initial parameters; works under `jax.jit` and `jax.eval_shape`.

    Returns:
      ``{"embed": {}, "layers", "head"}``, float32; "layers" is a tuple, one tree per layer.
    """
    keys = jax.random.split(rng, config.num_layers + 1)
    layers = tuple(
        nnx.to_pure_dict(nnx.state(kind.module(config, nnx.Rngs(key)), nnx.Param))
        for kind, key in zip(kinds(config), keys[1:], strict=True)
    )
    head = Linear(
        config.group_channels[-1], config.num_classes, stddev=0.01, rngs=nnx.Rngs(keys[0])
    )
    return {"embed": {}, "layers": layers, "head": functional(head)[1]}


def init_state(config: ResNetConfig) -> tuple[PyTree, ...]:
    """Running statistics before the first microbatch: means 0 and variances 1.

    Returns:
      One tree per layer, float32; ``{}`` for every layer with ``norm="group"``.
    """
    shapes = tuple(_state_shapes(config, kind) for kind in kinds(config))
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.full(leaf.shape, 1.0 if path[-1].key == "var" else 0.0), shapes
    )


def model(config: ResNetConfig, *, train: bool = True, metrics: bool = False) -> Model:
    """Makes the ResNet as the functions that a pipeline runs.

    A microbatch is ``{"images": [rows, height, width, channels], "labels": int32 [rows]}``; images
    of any size and any float dtype, already normalised. With ``norm="batch"`` the model is stateful
    and `init_state` makes its state: training normalises with the statistics of the microbatch's
    rows on this data shard and moves the running ones towards them by a tenth.

    Args:
      train: False normalises with the running statistics and leaves them as they are. Without
        BatchNorm there is no difference.
      metrics: return "accuracy", the share of images whose likeliest class is their label, beside
        the loss.

    Returns:
      The model; its layers are a tuple of functions, the same one for layers of equal `Kind`.

    Example:
      >>> config = ResNetConfig(depth=8, num_classes=10)
      >>> params = init(config, jax.random.key(0))
      >>> x = jnp.ones((2, 8, 8, 3))
      >>> for layer, layer_params in zip(model(config).layer, params["layers"]):
      ...     x = layer(layer_params, x, None, None)
      >>> x.shape
      (2, 2, 2, 64)
    """
    layer = functools.cache(functools.partial(_layer, config, train=train))

    def embed(outer: PyTree, microbatch: Batch, rng: Key) -> jax.Array:
        del outer, rng
        return microbatch["images"].astype(config.compute_dtype)

    def head_loss(outer: PyTree, x: jax.Array, microbatch: Batch, rng: Key) -> PyTree:
        del rng
        logits, labels = _head(outer, x), microbatch["labels"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        if not metrics:
            return loss
        return loss, {"accuracy": (logits.argmax(-1) == labels).mean()}

    return Model(
        embed=embed,
        layer=tuple(layer(kind) for kind in kinds(config)),
        head_loss=head_loss,
        stateful=config.norm == "batch",
    )


def logits(
    config: ResNetConfig,
    params: PyTree,
    images: jax.Array,
    state: tuple[PyTree, ...] | None = None,
) -> jax.Array:
    """Plain forward pass on one device, with running statistics.

    Args:
      images: [rows, height, width, channels].
      state: running statistics, as `init_state` returns them; needed with ``norm="batch"`` only.

    Returns:
      float32 [rows, num_classes].

    Raises:
      ValueError: no state where BatchNorm needs one.
    """
    if config.norm == "batch" and state is None:
        raise ValueError(
            "norm='batch' normalises with running statistics here: pass state, as training "
            "left it or as init_state makes it."
        )
    x = images.astype(config.compute_dtype)
    for i, layer in enumerate(model(config, train=False).layer):
        if state is None:
            x = layer(params["layers"][i], x, None, None)
        else:
            x, _ = layer(params["layers"][i], x, None, None, state[i])
    return _head(params, x)


def num_parameters(config: ResNetConfig) -> int:
    """Parameters of the whole model, without running statistics.

    Example:
      >>> num_parameters(ResNetConfig.resnet50())
      25557032
    """
    shapes = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def _layer(config: ResNetConfig, kind: Kind, *, train: bool) -> Callable[..., Any]:
    apply, _, _ = stateful(_abstract(config, kind))

    def layer(params: PyTree, x: jax.Array, microbatch: Batch | None, rng: Key) -> jax.Array:
        del microbatch
        return apply(params, {}, x, rng=rng)[0]

    def layer_with_state(
        params: PyTree, x: jax.Array, microbatch: Batch | None, rng: Key, state: PyTree
    ) -> tuple[jax.Array, PyTree]:
        del microbatch
        return apply(params, state, x, rng=rng, train=train)

    return layer_with_state if config.norm == "batch" else layer


def _abstract(config: ResNetConfig, kind: Kind) -> nnx.Module:
    return nnx.eval_shape(lambda: kind.module(config, nnx.Rngs(0)))


@functools.cache
def _state_shapes(config: ResNetConfig, kind: Kind) -> PyTree:
    return nnx.to_pure_dict(nnx.state(_abstract(config, kind), nnx.BatchStat))


def _head(outer: PyTree, x_BHWC: jax.Array) -> jax.Array:
    pooled_BC = x_BHWC.astype(jnp.float32).mean(axis=(1, 2))
    return matmul(pooled_BC, outer["head"]["kernel"]) + outer["head"]["bias"]
