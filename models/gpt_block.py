"""Layers of a GPT: attention and an MLP or experts, on normalized copies of the residual stream.

    x = x + attention(norm(x)), x = x + mlp(norm(x))

Dimension suffixes: B rows, S sequence, T a device's part of it, E width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe import WithLoss
from models.adapters import attach
from models.attention import Attention, Cache
from models.blocks import (
    GATED,
    INIT_STDDEV,
    UNGATED,
    Linear,
    Norm,
    layer_norm,
    rms_norm,
    xielu,
)
from models.experts import Mixture
from models.gpt_config import GPTConfig, LayerKind
from models.latent_attention import LatentAttention
from models.linear_attention import LinearAttention
from models.pieces import Pieces, gathered_last, in_turn, num_pieces, staggered
from models.sharing import WHOLE, Sharing
from models.streams import Streams
from models.tensor import Tensor
from models.types import PyTree


class MLP(nnx.Module):
    """Two matmuls with an activation between them, or three with a gate."""

    def __init__(self, config: GPTConfig, hidden: int, *, tensor: Tensor, rngs: nnx.Rngs):
        self.config, self.tensor = config, tensor
        width, bias = config.width, config.has_bias("mlp")
        self.up = Linear(width, hidden, bias=bias, stddev=INIT_STDDEV, rngs=rngs)
        self.gate = (
            Linear(width, hidden, bias=bias, stddev=INIT_STDDEV, rngs=rngs)
            if config.activation in GATED
            else nnx.data(None)
        )
        self.down = Linear(hidden, width, bias=bias, stddev=config.residual_stddev, rngs=rngs)
        if config.activation == "xielu":  # curvatures of 0.8 at first
            self.positive, self.negative = (
                nnx.Param(jnp.log(jnp.expm1(jnp.full(1, start)))) for start in (0.8, 0.3)
            )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.tensor.gather(x)
        hidden = self.hidden(*(linear(x) for linear in self.ups))
        return self.down(hidden, self.tensor.scatter)

    @property
    def ups(self) -> list[Linear]:
        """The linear maps of the input, the gate first."""
        return [self.up] if self.gate is None else [self.gate, self.up]

    def hidden(self, *branches: jax.Array) -> jax.Array:
        """The values that ``down`` multiplies, by the results of `ups`."""
        activation = self.config.activation
        if self.gate is not None:
            return GATED[activation](*branches)
        if activation == "xielu":
            return xielu(branches[0], self.positive[...], self.negative[...])
        return UNGATED[activation](*branches)


class Block(nnx.Module):
    """One layer: attention and MLP, each on a normalised copy of the residual stream."""

    def __init__(
        self, config: GPTConfig, kind: LayerKind, *, sharing: Sharing = WHOLE, rngs: nnx.Rngs
    ):
        self.config, self.sharing, self.kind = config, sharing, kind
        if config.pre_norm:
            self.attention_norm = make_norm(config, rngs)
            if config.residual != "parallel":
                self.mlp_norm = make_norm(config, rngs)
        if config.post_norm:
            self.attention_post_norm, self.mlp_post_norm = (
                make_norm(config, rngs) for _ in range(2)
            )
        if config.residual_streams > 1:
            shape = config.residual_streams, config.width
            self.attention_streams, self.mlp_streams = (
                Streams(*shape, epsilon=config.norm_epsilon, rngs=rngs) for _ in range(2)
            )
        if kind.is_linear:
            self.linear_attention = LinearAttention(config, sharing=sharing, rngs=rngs)
        else:
            attention = Attention if config.kv_rank is None else LatentAttention
            self.attention = attention(config, kind, sharing=sharing, rngs=rngs)
        self.attention_dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.mlp = (
            make_mixture(config, rngs, sharing)
            if kind.has_experts
            else MLP(config, config.hidden_width, tensor=sharing.tensor, rngs=rngs)
        )
        self.mlp_dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(
        self, x: PyTree, documents: jax.Array | None = None, cache: Cache | None = None,
        start: jax.Array | int = 0,
    ) -> PyTree:  # fmt: skip
        x, loss, cache = self.run(x, documents, cache, start)
        x = x if loss is None else WithLoss(x, loss)
        return x if cache is None else (x, cache)

    def run(self, x: PyTree, *others: Any) -> tuple[PyTree, PyTree, Cache | None]:
        """Returns the new activation, the layer's loss or None, and the cache.

        With ``config.mtp_loss`` an activation is a pair, whose second part goes past the layer.
        """
        if self.config.mtp_loss is None:
            return self.mix(x, *others)
        x, ahead = x
        x, loss, cache = self.mix(x, *others)
        return (x, ahead), loss, cache

    def mix(
        self, x: jax.Array, documents: jax.Array | None, cache: Cache | None, start: jax.Array | int
    ) -> tuple[jax.Array, PyTree, Cache | None]:
        """Mixes tokens, and numbers of a token, of the residual stream or streams."""
        config, tensor = self.config, self.sharing.tensor
        if config.in_pieces(self.kind) and (count := num_pieces(x, tensor)) > 1:
            return self._mix_pieces(Pieces(tensor, count), x, documents, cache, start)
        seen, added = self._residual("attention_streams", x)
        normed = self.attention_norm(seen) if config.pre_norm else seen
        mixer = self.linear_attention if self.kind.is_linear else self.attention
        attended, cache = mixer(normed, documents, cache, start)
        if config.post_norm:
            attended = self.attention_post_norm(attended)
        x = added(self._branch(self.attention_dropout, attended))
        after, added = self._residual("mlp_streams", x)
        if config.residual == "sequential":
            seen = after
        if config.residual != "parallel":
            normed = self.mlp_norm(seen) if config.pre_norm else seen
        if isinstance(self.mlp, Mixture):
            y, loss = self.mlp(normed)
        else:
            y, loss = self.mlp(normed), None
        if config.post_norm:
            y = self.mlp_post_norm(y)
        return added(self._branch(self.mlp_dropout, y)), loss, cache

    def _residual(
        self, name: str, x: jax.Array
    ) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """Returns a branch's input, and a function that adds its output to the streams."""
        if self.config.residual_streams == 1:
            return x, lambda y: x + y
        return getattr(self, name)(x)

    def _branch(self, dropout: nnx.Dropout, y: jax.Array) -> jax.Array:
        return scaled(self.sharing.dropout(dropout, y), self.config.residual_scale)

    def _mix_pieces(
        self, pieces: Pieces, x: jax.Array, documents: jax.Array | None, cache: Cache | None,
        start: jax.Array | int,
    ) -> tuple[jax.Array, PyTree, Cache | None]:  # fmt: skip
        """`mix` with its collectives beside matmuls, of other pieces of the sequence."""
        tensor, attention, mlp = pieces.tensor, self.attention, self.mlp
        assert isinstance(attention, Attention)
        assert isinstance(mlp, MLP)
        qkv, ups = (pieces.columns(linears, x) for linears in ([attention.qkv], mlp.ups))
        out, down = pieces.rows(attention.out, x), pieces.last_rows(mlp.down, x)
        x, qkv, ups = gathered_last(x, qkv, ups)
        post_norms = [lambda y: y] * 2
        if self.config.post_norm:
            post_norms = [self.attention_post_norm, self.mlp_post_norm]

        def gather(n: int, own: jax.Array) -> jax.Array:
            return qkv.take(n, tensor.gather(own), own)

        def multiply(n: int, whole: jax.Array) -> jax.Array:
            (columns,) = qkv.finish(n, *qkv.products(whole))
            return columns

        def multiply_mixed(n: int, mixed: jax.Array) -> list[jax.Array]:
            return out.products(out.take(n, mixed, mixed))

        def exchange(
            n: int, value: tuple[jax.Array, list[jax.Array]]
        ) -> tuple[jax.Array, jax.Array]:
            x, (y,) = value
            (y,) = out.finish(n, tensor.scatter(y) if n else y)
            x = x + post_norms[0](y)
            own = self.mlp_norm(x)
            return x, ups.take(n, tensor.gather(own), own)

        def run_mlp(
            n: int, value: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, list[jax.Array]]:
            x, whole = value
            hidden = mlp.hidden(*ups.finish(n, *ups.products(whole)))
            return x, down.products(down.take(n, hidden, hidden))

        def end(n: int, value: tuple[jax.Array, list[jax.Array]]) -> jax.Array:
            x, (y,) = value
            (y,) = down.biased(*map(tensor.scatter, down.note(n, y)))
            return x + post_norms[1](y)

        columns = staggered([gather, multiply], pieces.split(self.attention_norm(x)))
        mixed, cache = attention.mix(pieces.whole(columns), documents, cache, start)
        # Beside these matmuls of the others, the first piece is scattered and then gathered again.
        products = in_turn(multiply_mixed, pieces.of_whole(mixed))
        products[0] = list(map(tensor.scatter, products[0]))
        products[:2] = jax.lax.optimization_barrier(products[:2])
        values = list(zip(pieces.split(x), products, strict=True))
        x = jnp.concatenate(staggered([exchange, run_mlp, end], values), axis=1)
        return x, None, cache


class FurtherBlock(Block):
    """Predicts the token after the next (DeepSeek-AI 2024, section 2.2).

    Takes the last layer's output and the embeddings of the next tokens. Returns both outputs for
    the head, so that the model's last norm is here:

        x = final_norm(x)
        further = further_norm(block(projection(embedding_norm(embeddings), hidden_norm(x))))
    """

    def __init__(
        self, config: GPTConfig, kind: LayerKind, *, sharing: Sharing = WHOLE, rngs: nnx.Rngs
    ):
        super().__init__(config, kind, sharing=sharing, rngs=rngs)
        self.final_norm, self.hidden_norm, self.embedding_norm, self.further_norm = (
            make_norm(config, rngs) for _ in range(4)
        )
        self.projection = Linear(
            2 * config.width, config.width, bias=False, stddev=INIT_STDDEV, rngs=rngs
        )

    def run(self, x: PyTree, *others: Any) -> tuple[PyTree, PyTree, Cache | None]:
        x, ahead = x
        x = self.final_norm(x)
        both = jnp.concatenate((self.embedding_norm(ahead), self.hidden_norm(x)), axis=-1)
        further, loss, cache = self.mix(self.projection(both), *others)
        return (x, self.further_norm(further)), loss, cache


def make_block(config: GPTConfig, kind: LayerKind, *, rngs: nnx.Rngs, **options: Any) -> Block:
    """Makes a layer, with ``config.adapters``; ``options`` are those of `Block`."""
    block = (FurtherBlock if kind.is_further else Block)(config, kind, rngs=rngs, **options)
    if config.adapters is not None:
        attach(block, config, rngs=rngs)
    return block


def make_mixture(config: GPTConfig, rngs: nnx.Rngs, sharing: Sharing = WHOLE) -> Mixture:
    """Makes the experts of a layer, with the MLP that sees every token."""
    shared = None
    if config.shared_width is not None:
        shared = MLP(config, config.shared_width, tensor=sharing.tensor, rngs=rngs)
    return Mixture(config, shared, sharing, rngs=rngs)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiplies x, unless by 1, which would add an operation to the program."""
    return x if factor == 1 else factor * x


def make_norm(config: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm | Norm:
    """Makes a norm of the kind that ``config.norm`` names, over the width."""
    options: dict[str, Any] = {"epsilon": config.norm_epsilon, "dtype": config.compute_dtype}
    is_layer, bias = config.norm == "layer", config.has_bias("norm")
    if config.norms_from_zero:
        bias = is_layer and bias
        return Norm((config.width,), layer=is_layer, bias=bias, from_zero=True, **options)
    if not is_layer:
        return rms_norm(config.width, rngs=rngs, **options)
    options |= {"use_bias": bias, "use_scale": config.norm_scale}
    return layer_norm(config.width, rngs=rngs, **options)
