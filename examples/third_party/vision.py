"""A vision transformer in the style of google-research's, in flax linen."""

import jax.numpy as jnp
from flax import linen as nn


class MlpBlock(nn.Module):
    hidden: int
    dropout_rate: float

    @nn.compact
    def __call__(self, x, *, deterministic):
        y = nn.gelu(nn.Dense(self.hidden)(x))
        y = nn.Dropout(self.dropout_rate)(y, deterministic=deterministic)
        return nn.Dense(x.shape[-1])(y)


class EncoderBlock(nn.Module):
    num_heads: int
    hidden: int
    dropout_rate: float

    @nn.compact
    def __call__(self, x, *, deterministic):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(self.num_heads, deterministic=deterministic)(y, y)
        x = x + nn.Dropout(self.dropout_rate)(y, deterministic=deterministic)
        y = nn.LayerNorm()(x)
        return x + MlpBlock(self.hidden, self.dropout_rate)(y, deterministic=deterministic)


class Patches(nn.Module):
    """Images as a class token and their patches, with learned positions."""

    patch: int
    width: int

    @nn.compact
    def __call__(self, images):
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, strides=size, padding="VALID", name="embedding")(images)
        x = x.reshape(len(x), -1, self.width)
        token = self.param("cls", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate([jnp.tile(token, (len(x), 1, 1)), x], axis=1)
        return x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))


class Head(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(nn.LayerNorm(name="norm")(x)[:, 0])


class VisionTransformer(nn.Module):
    patch: int
    width: int
    num_layers: int
    num_heads: int
    num_classes: int
    dropout_rate: float = 0.1

    @nn.compact
    def __call__(self, images, *, train):
        x = Patches(self.patch, self.width, name="patches")(images)
        for n in range(self.num_layers):
            block = EncoderBlock(
                self.num_heads, 2 * self.width, self.dropout_rate, name=f"encoderblock_{n}"
            )
            x = block(x, deterministic=not train)
        return Head(self.num_classes, name="head")(x)
