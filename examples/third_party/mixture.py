"""A decoder whose layers mix experts, in flax nnx: every token's best two of them, none dropped."""

import jax
import jax.numpy as jnp
from flax import nnx


class Experts(nnx.Module):
    def __init__(self, width, hidden, num_experts, num_chosen, *, rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(width, num_experts, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (num_experts, width, hidden)))
        self.down = nnx.Param(init(rngs.params(), (num_experts, hidden, width)))
        self.num_chosen = num_chosen

    def __call__(self, x):
        """The mixture, and the balance loss of Switch Transformers over all tokens of x."""
        probabilities = jax.nn.softmax(self.router(x))
        best, chosen = jax.lax.top_k(probabilities, self.num_chosen)
        gates = best / best.sum(-1, keepdims=True)
        is_chosen = jax.nn.one_hot(chosen, probabilities.shape[-1])
        weights = (gates[..., None] * is_chosen).sum(-2)
        hidden = jax.nn.gelu(jnp.einsum("rlw,ewh->rleh", x, self.up[...]))
        y = jnp.einsum("rleh,ehw,rle->rlw", hidden, self.down[...], weights)
        share = is_chosen.sum(-2).mean((0, 1)) / self.num_chosen
        return y, len(share) * jnp.sum(share * probabilities.mean((0, 1)))


class Block(nnx.Module):
    def __init__(self, width, num_heads, num_experts, *, rngs):
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads, width, use_bias=False, decode=False, rngs=rngs
        )
        self.experts_norm = nnx.RMSNorm(width, rngs=rngs)
        self.experts = Experts(width, 2 * width, num_experts, num_chosen=2, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        y, balance = self.experts(self.experts_norm(x))
        return x + y, balance


class MixtureDecoder(nnx.Module):
    def __init__(self, *, vocab_size, length, width, num_layers, num_heads, num_experts, rngs):
        self.tokens = nnx.Embed(vocab_size, width, rngs=rngs)
        self.positions = nnx.Param(0.02 * rngs.params.normal((length, width)))
        self.blocks = nnx.List(
            Block(width, num_heads, num_experts, rngs=rngs) for _ in range(num_layers)
        )
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        """The logits, and the sum of the balance losses."""
        x, balance = self.embed(tokens), 0.0
        for block in self.blocks:
            x, of_block = block(x)
            balance += of_block
        return self.logits(x), balance

    def embed(self, tokens):
        return self.tokens(tokens) + self.positions

    def logits(self, x):
        return self.head(self.norm(x))
