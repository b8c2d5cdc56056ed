"""The layers of a ResNet: the stem, and blocks beside a shortcut (He et al. 2016)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

if TYPE_CHECKING:
    from models.resnet import ResNetConfig


class ConvNorm(nnx.Module):
    """A convolution without bias, padded to keep its size at stride 1, then its norm."""

    def __init__(
        self, config: ResNetConfig, in_channels: int, out_channels: int, *, size: int,
        stride: int = 1, rngs: nnx.Rngs,
    ):  # fmt: skip
        self.conv = nnx.Conv(
            in_channels,
            out_channels,
            (size, size),
            strides=stride,
            padding=[((size - 1) // 2,) * 2] * 2,  # "SAME" would pad strided ones on one side only
            use_bias=False,
            dtype=config.compute_dtype,
            # He et al. 2015, equation 14.
            kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
            rngs=rngs,
        )
        self.norm = _norm(config, out_channels, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class Stem(nnx.Module):
    """The first layer, from images to the first group's channels."""

    def __init__(
        self, config: ResNetConfig, in_channels: int, channels: int, *, stride: int, rngs: nnx.Rngs
    ):
        self.pool = stride > 1
        size = 7 if self.pool else 3
        self.conv = ConvNorm(config, in_channels, channels, size=size, stride=stride, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.conv(x))
        if self.pool:
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        return x


class Block(nnx.Module):
    """Convolutions with a ReLU between each two, beside a shortcut.

    The first convolution of 3x3 has the stride; the last has ``expansion`` times the channels.
    """

    sizes: ClassVar[tuple[int, ...]]
    expansion: ClassVar[int]

    def __init__(
        self, config: ResNetConfig, in_channels: int, channels: int, *, stride: int, rngs: nnx.Rngs
    ):
        out_channels = self.expansion * channels
        widths = [in_channels, *[channels] * (len(self.sizes) - 1), out_channels]
        strides = [stride if n == self.sizes.index(3) else 1 for n in range(len(self.sizes))]
        self.convs = nnx.List(
            ConvNorm(config, ins, outs, size=size, stride=own, rngs=rngs)
            for ins, outs, size, own in zip(widths, widths[1:], self.sizes, strides, strict=False)
        )
        self.shortcut = Shortcut(config, in_channels, out_channels, stride=stride, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.convs[0](x)
        for conv in self.convs[1:]:
            y = conv(nnx.relu(y))
        return nnx.relu(y + self.shortcut(x))


class Basic(Block):
    """Two 3x3 convolutions beside a shortcut."""

    sizes, expansion = (3, 3), 1


class Bottleneck(Block):
    """Convolutions 1x1, 3x3, 1x1 beside a shortcut; the last has four times the channels."""

    sizes, expansion = (1, 3, 1), 4


class Shortcut(nnx.Module):
    """The identity if a block keeps its shape, else a map of x to the new shape."""

    def __init__(
        self, config: ResNetConfig, in_channels: int, out_channels: int, *, stride: int,
        rngs: nnx.Rngs,
    ):  # fmt: skip
        self.stride, self.new_channels = stride, out_channels - in_channels
        same = stride == 1 and self.new_channels == 0
        self.conv = (
            nnx.data(None)
            if same or config.style == "cifar"
            else ConvNorm(config, in_channels, out_channels, size=1, stride=stride, rngs=rngs)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.conv is not None:
            return self.conv(x)
        x = x[:, :: self.stride, :: self.stride]
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, self.new_channels)))


def _norm(config: ResNetConfig, channels: int, rngs: nnx.Rngs) -> nnx.BatchNorm | nnx.GroupNorm:
    dtype = config.compute_dtype
    if config.norm == "batch":
        return nnx.BatchNorm(
            channels, momentum=0.9, dtype=dtype, rngs=rngs, use_fast_variance=False
        )
    return nnx.GroupNorm(
        channels, num_groups=config.groups, epsilon=1e-5, dtype=dtype, rngs=rngs,
        use_fast_variance=False,
    )  # fmt: skip
