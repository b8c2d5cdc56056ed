"""A decoder in the style of flax's Gemma: grouped queries, rotary positions, a gated MLP."""

import jax
import jax.numpy as jnp
from flax import nnx


def rotate(x, positions):
    """Rotary position embedding of x [rows, length, heads, head_dim]."""
    frequencies = 1e4 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    angles = positions[..., None, None] * frequencies
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, width, num_heads, num_kv_heads, head_dim, *, rngs):
        def linear(heads):
            return nnx.LinearGeneral(width, (heads, head_dim), use_bias=False, rngs=rngs)

        self.query, self.key, self.value = (
            linear(num_heads),
            linear(num_kv_heads),
            linear(num_kv_heads),
        )
        self.out = nnx.LinearGeneral(
            (num_heads, head_dim), width, axis=(-2, -1), use_bias=False, rngs=rngs
        )

    def __call__(self, x, positions, mask):
        query, key = rotate(self.query(x), positions), rotate(self.key(x), positions)
        return self.out(jax.nn.dot_product_attention(query, key, self.value(x), mask=mask[:, None]))


class FeedForward(nnx.Module):
    def __init__(self, width, hidden, *, rngs):
        self.gate = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, width, num_heads, num_kv_heads, head_dim, dropout, *, rngs):
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = Attention(width, num_heads, num_kv_heads, head_dim, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.mlp = FeedForward(width, 2 * width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, positions, mask):
        x = x + self.dropout(self.attention(self.attention_norm(x), positions, mask))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Decoder(nnx.Module):
    def __init__(
        self, *, vocab_size, width, num_layers, num_heads, num_kv_heads, head_dim, dropout, rngs
    ):
        self.embedder = nnx.Embed(vocab_size, width, rngs=rngs)
        self.layers = nnx.List(
            Block(width, num_heads, num_kv_heads, head_dim, dropout, rngs=rngs)
            for _ in range(num_layers)
        )
        self.final_norm = nnx.RMSNorm(width, rngs=rngs)
        self.soft_cap = 30.0

    def __call__(self, tokens, positions, mask):
        x = self.encode(tokens)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.decode(x)

    def encode(self, tokens):
        return self.embedder(tokens) * self.embedder.features**0.5

    def decode(self, x):
        logits = self.embedder.attend(self.final_norm(x))
        return self.soft_cap * jnp.tanh(logits / self.soft_cap)


def packed_mask(segments):
    """A token sees those before it of its own segment [rows, length, length]."""
    same = segments[:, :, None] == segments[:, None, :]
    return jnp.tril(jnp.ones(same.shape[1:], bool)) & same
