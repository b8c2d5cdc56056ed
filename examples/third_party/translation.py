"""An encoder-decoder in the style of flax's wmt example, in flax nnx."""

import jax.numpy as jnp
from flax import nnx


class Mlp(nnx.Module):
    def __init__(self, width, *, rngs):
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def attention(width, num_heads, rngs):
    return nnx.MultiHeadAttention(num_heads, width, use_bias=False, decode=False, rngs=rngs)


class EncoderBlock(nnx.Module):
    def __init__(self, width, num_heads, *, rngs):
        self.norms = nnx.List(nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.attention = attention(width, num_heads, rngs)
        self.mlp = Mlp(width, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.mlp(self.norms[1](x))


class DecoderBlock(nnx.Module):
    def __init__(self, width, num_heads, *, rngs):
        self.norms = nnx.List(nnx.LayerNorm(width, rngs=rngs) for _ in range(3))
        self.attention = attention(width, num_heads, rngs)
        self.cross_attention = attention(width, num_heads, rngs)
        self.mlp = Mlp(width, rngs=rngs)

    def __call__(self, x, encoded, mask, cross_mask):
        x = x + self.attention(self.norms[0](x), mask=mask)
        x = x + self.cross_attention(self.norms[1](x), encoded, mask=cross_mask)
        return x + self.mlp(self.norms[2](x))


class Encoder(nnx.Module):
    def __init__(self, width, num_layers, num_heads, *, rngs):
        self.blocks = nnx.List(EncoderBlock(width, num_heads, rngs=rngs) for _ in range(num_layers))
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x, mask):
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


class Decoder(nnx.Module):
    def __init__(self, width, num_layers, num_heads, *, rngs):
        self.blocks = nnx.List(DecoderBlock(width, num_heads, rngs=rngs) for _ in range(num_layers))
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x, encoded, mask, cross_mask):
        for block in self.blocks:
            x = block(x, encoded, mask, cross_mask)
        return self.norm(x)


class Translator(nnx.Module):
    """Source, target and logits share a table; token 0 is padding and begins a sentence."""

    def __init__(self, *, vocab_size, max_length, width, num_layers, num_heads, rngs):
        self.table = nnx.Embed(vocab_size, width, rngs=rngs)
        self.positions = nnx.Embed(max_length, width, rngs=rngs)
        self.encoder = Encoder(width, num_layers, num_heads, rngs=rngs)
        self.decoder = Decoder(width, num_layers, num_heads, rngs=rngs)

    def __call__(self, source, target):
        """The logits of every token of the target, from those before it."""
        encoded = self.encoder(self.embed(source), source_mask(source))
        masks = target_mask(target), source_mask(source)
        return self.table.attend(self.decoder(self.embed(shifted(target)), encoded, *masks))

    def embed(self, tokens):
        return self.table(tokens) + self.positions(jnp.arange(tokens.shape[1]))


def shifted(target):
    return jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]


def source_mask(source):
    return (source > 0)[:, None, None, :]


def target_mask(target):
    return nnx.make_causal_mask(target, dtype=bool)
