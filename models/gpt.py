"""GPT: a decoder-only transformer that covers GPT-2 and Llama shapes from its config alone.

    x = lookup(table, tokens) [+ positions]
    x = x + attention(norm(x)), x = x + mlp(norm(x))       num_layers times
    loss = cross_entropy(norm(x) @ table.T, next tokens)

Weights are float32; matmuls run in ``config.dtype``. Dimension suffixes: B rows, S sequence, E
width, N heads, K key/value heads, H head width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe import Model, vocabulary
from jaxpipe.errors import Problem
from jaxpipe.nnx import functional, stack
from models import validation
from models.blocks import INIT_STDDEV, Linear, attention_kernel

PyTree = Any


@dataclasses.dataclass(frozen=True)
class GPTConfig(validation.Validated):
    """The shape of a GPT.

    Args:
      vocab_size: rows of the embedding table.
      sequence_length: the longest input, in tokens.
      num_layers: transformer blocks.
      width: size of the residual stream, a multiple of ``num_heads``.
      num_heads: query heads.
      num_kv_heads: key and value heads, a divisor of ``num_heads``; None means ``num_heads``.
      mlp_width: hidden size of the MLP; None means 4 width for gelu, and for swiglu 8/3 width
        rounded up to a multiple of 64 (equal parameters: Shazeer 2020, section 2).
      positions: "rotary" (Su et al. 2021; the two halves of a head are rotated against each other)
        or "learned".
      norm: "rms" or "layer".
      activation: "gelu" (tanh approximation, as GPT-2) or "swiglu".
      tied: one table for embedding and unembedding.
      bias: biases in linear layers and in LayerNorm.
      dropout: probability, in [0, 1), for the embedding and for both residual branches. Attention
        weights are never dropped, since flash attention does not store them.
      dtype: compute dtype, "float32" or "bfloat16".
      rope_theta: base of the rotary wavelengths.
      norm_epsilon: added to the variance.

    Raises:
      ValueError: values that do not fit together, all of them in one message.
    """

    vocab_size: int
    sequence_length: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int | None = None
    mlp_width: int | None = None
    positions: Literal["rotary", "learned"] = "rotary"
    norm: Literal["rms", "layer"] = "rms"
    activation: Literal["gelu", "swiglu"] = "swiglu"
    tied: bool = True
    bias: bool = False
    dropout: float = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5

    def problems(self) -> Iterator[Problem]:
        counts = ("vocab_size", "sequence_length", "num_layers", "width", "num_heads")
        small = validation.small_counts(self, *counts, "num_kv_heads", "mlp_width")
        yield from small
        yield from validation.wrong_choices(self)
        yield from validation.not_positive(self, "rope_theta", "norm_epsilon")
        yield from validation.wrong_probability(self, "dropout")
        if small:
            return
        if self.width % self.num_heads:
            yield validation.not_a_divisor("num_heads", self.num_heads, "width", self.width)
        elif self.positions == "rotary" and self.head_width % 2:
            heads, width = self.num_heads, self.width
            rule = (
                f"with $num_heads gives heads of {self.head_width}, but rotary positions need an "
                "even size"
            )
            nearest = [w for w in (width - heads, width + heads) if w > 0]
            yield Problem("width", width, rule, nearest, {"num_heads": heads})
        if self.num_heads % self.kv_heads:
            yield validation.not_a_divisor(
                "num_kv_heads", self.kv_heads, "num_heads", self.num_heads
            )

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def hidden_width(self) -> int:
        if self.mlp_width is not None:
            return self.mlp_width
        return 4 * self.width if self.activation == "gelu" else math.ceil(self.width / 24) * 64

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    @classmethod
    def gpt2_124m(cls) -> GPTConfig:
        """GPT-2 small (Radford et al. 2019, table 2), without dropout: 124,439,808 parameters."""
        return cls(
            vocab_size=50257, sequence_length=1024, num_layers=12, width=768, num_heads=12,
            positions="learned", norm="layer", activation="gelu", tied=True, bias=True,
        )  # fmt: skip

    @classmethod
    def llama_7b(cls) -> GPTConfig:
        """Llama 7B (Touvron et al. 2023, table 2): 6,738,415,616 parameters."""
        return cls(
            vocab_size=32000, sequence_length=2048, num_layers=32, width=4096, num_heads=32,
            mlp_width=11008, tied=False, norm_epsilon=1e-6,
        )  # fmt: skip


class Attention(nnx.Module):
    """Causal self-attention with grouped queries (Ainslie et al. 2023)."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        qkv_width = (config.num_heads + 2 * config.kv_heads) * config.head_width
        self.qkv = Linear(config.width, qkv_width, bias=config.bias, stddev=INIT_STDDEV, rngs=rngs)
        self.out = Linear(
            config.width, config.width, bias=config.bias, stddev=_residual_stddev(config), rngs=rngs
        )

    def __call__(self, x_BSE, documents_BS=None):
        config = self.config
        num_rows, length, _ = x_BSE.shape
        heads = self.qkv(x_BSE).reshape(num_rows, length, -1, config.head_width)
        cuts = (config.num_heads, config.num_heads + config.kv_heads)
        q_BSNH, k_BSKH, v_BSKH = jnp.split(heads, cuts, axis=2)
        if config.positions == "rotary":
            q_BSNH, k_BSKH = (_rotate(heads, theta=config.rope_theta) for heads in (q_BSNH, k_BSKH))
        mixed_BSNH = jax.nn.dot_product_attention(
            q_BSNH,
            k_BSKH,
            v_BSKH,
            mask=None if documents_BS is None else _same_document(documents_BS),
            is_causal=True,
            implementation=attention_kernel(q_BSNH),
        )
        return self.out(mixed_BSNH.reshape(x_BSE.shape))


class MLP(nnx.Module):
    """Two matmuls with a GELU between them, or three with a SwiGLU gate."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        width, hidden, bias = config.width, config.hidden_width, config.bias
        self.up = Linear(width, hidden, bias=bias, stddev=INIT_STDDEV, rngs=rngs)
        gated = config.activation == "swiglu"
        self.gate = (
            Linear(width, hidden, bias=bias, stddev=INIT_STDDEV, rngs=rngs)
            if gated
            else nnx.data(None)
        )
        self.down = Linear(hidden, width, bias=bias, stddev=_residual_stddev(config), rngs=rngs)

    def __call__(self, x):
        if self.gate is None:
            return self.down(jax.nn.gelu(self.up(x)))
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One layer: attention, then MLP, each on a normalised copy of the residual stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.attention_dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.mlp_dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x, documents=None):
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), documents))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))


def init(config: GPTConfig, rng: jax.Array) -> PyTree:
    """Initial parameters; works under `jax.jit` and `jax.eval_shape`.

    Args:
      config: the model's shape.
      rng: one key.

    Returns:
      ``{"embed", "layers", "head"}``, float32, with the leaves of "layers" [num_layers, ...].
    """
    table_rng, positions_rng, layers_rng, head_rng = jax.random.split(rng, 4)
    table_shape = (config.vocab_size, config.width)
    embed = {"table": INIT_STDDEV * jax.random.normal(table_rng, table_shape)}
    if config.positions == "learned":
        positions_shape = (config.sequence_length, config.width)
        embed["positions"] = INIT_STDDEV * jax.random.normal(positions_rng, positions_shape)
    _, layers = stack(
        lambda rngs: Block(config, rngs=rngs),
        num_layers=config.num_layers,
        rngs=nnx.Rngs(layers_rng),
    )
    head = {"norm": functional(_norm(config, nnx.Rngs(0)))[1]}
    if not config.tied:
        head["table"] = INIT_STDDEV * jax.random.normal(head_rng, table_shape)
    return {"embed": embed, "layers": layers, "head": head}


def model(config: GPTConfig, *, vocabulary_axis: str | None = None) -> Model:
    """The GPT as the three functions a pipeline runs.

    A microbatch is ``{"tokens": int32 [rows, S + 1]}``: inputs are ``tokens[:, :-1]``, targets
    ``tokens[:, 1:]``, S at most ``sequence_length``. With ``documents``, int32 [rows, S], a token
    sees those of its own document alone, and learned positions begin anew with each.

    Args:
      config: the model's shape.
      vocabulary_axis: mesh axis over which the vocabulary tables are split ("stage" in a pipeline);
        None for whole tables and no collectives.

    Returns:
      The model; with ``vocabulary_axis`` its ``stage_split`` names dimension 0 of every table.

    Example:
      >>> config = GPTConfig(vocab_size=64, sequence_length=8, num_layers=2, width=16, num_heads=2)
      >>> params = init(config, jax.random.key(0))
      >>> outer = {"embed": params["embed"], "head": params["head"]}
      >>> model(config).embed(outer, {"tokens": jnp.zeros((3, 9), int)}, None).shape
      (3, 8, 16)
    """
    apply_layer, _ = functional(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))

    def embed(outer, microbatch, rng):
        tokens, documents = microbatch["tokens"][:, :-1], microbatch.get("documents")
        return _embed(config, outer, tokens, rng, axis=vocabulary_axis, documents_BS=documents)

    def layer(params, x, microbatch, rng):
        documents = None if microbatch is None else microbatch.get("documents")
        return apply_layer(params, x, documents, rng=rng)

    def head_loss(outer, x, microbatch, rng):
        del rng
        return vocabulary.cross_entropy(
            _final_norm(config, outer, x),
            _head_table(config, outer),
            microbatch["tokens"][:, 1:],
            vocab_size=config.vocab_size,
            axis=vocabulary_axis,
        )

    split = None if vocabulary_axis is None else _stage_split(config)
    return Model(embed=embed, layer=layer, head_loss=head_loss, stage_split=split)


def logits(config: GPTConfig, params: PyTree, tokens: jax.Array) -> jax.Array:
    """Plain forward pass on one device, without dropout.

    Args:
      config: the model's shape.
      params: canonical parameters, as `init` returns them.
      tokens: int32 [rows, S], S at most ``sequence_length``.

    Returns:
      float32 [rows, S, vocab_size]: scores of the token after each position.
    """
    layer = model(config).layer
    x = _embed(config, params, tokens, None, axis=None)
    x, _ = jax.lax.scan(
        lambda x, layer_params: (layer(layer_params, x, None, None), None), x, params["layers"]
    )
    x = _final_norm(config, params, x)
    table = _head_table(config, params).astype(x.dtype)
    return jnp.einsum("bse,ve->bsv", x, table, preferred_element_type=jnp.float32)


def num_parameters(config: GPTConfig) -> int:
    """Parameters of the whole model; a tied table counts once.

    Example:
      >>> num_parameters(GPTConfig.gpt2_124m())
      124439808
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(_shapes(config)))


def flops_per_token(config: GPTConfig) -> int:
    """Floating-point operations of one training step per token, forward and backward.

    6 N + 12 L E S (Chowdhery et al. 2022, appendix B): N counts the parameters that take part in a
    matmul, hence no position tables and no input table that is only looked up. The second term
    is the attention scores and their use, not halved for causality. Recomputation is not counted.
    """
    num_multiplied = num_parameters(config)
    if config.positions == "learned":
        num_multiplied -= config.sequence_length * config.width
    if not config.tied:
        num_multiplied -= config.vocab_size * config.width
    return 6 * num_multiplied + 12 * config.num_layers * config.width * config.sequence_length


def _embed(config, outer, tokens_BS, rng, *, axis, documents_BS=None):
    length = tokens_BS.shape[1]
    if length > config.sequence_length:
        raise ValueError(
            f"tokens hold {length} inputs per row, but sequence_length="
            f"{config.sequence_length}. Nearest valid: {config.sequence_length} or fewer."
        )
    x_BSE = vocabulary.lookup(outer["embed"]["table"], tokens_BS, axis=axis)
    if config.positions == "learned":
        positions = outer["embed"]["positions"]
        if documents_BS is None:
            x_BSE = x_BSE + positions[:length]
        else:
            x_BSE = x_BSE + positions[_positions(documents_BS)]
    x_BSE = x_BSE.astype(config.compute_dtype)
    return x_BSE if rng is None else nnx.Dropout(config.dropout)(x_BSE, rngs=rng)


def _same_document(documents_BS):
    """The mask [B, 1, S, S] of attention within documents."""
    return documents_BS[:, None, :, None] == documents_BS[:, None, None, :]


def _positions(documents_BS):
    """How far each token is from the first of its document."""
    return jnp.sum(jnp.tril(_same_document(documents_BS)[:, 0]), axis=-1) - 1


def _final_norm(config, outer, x):
    apply, _ = functional(nnx.eval_shape(lambda: _norm(config, nnx.Rngs(0))))
    return apply(outer["head"]["norm"], x)


def _head_table(config, outer):
    return outer["embed" if config.tied else "head"]["table"]


def _stage_split(config):
    shapes = _shapes(config)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: 0 if path[-1].key == "table" else None,
        {"embed": shapes["embed"], "head": shapes["head"]},
    )


@functools.cache
def _shapes(config):
    return jax.eval_shape(lambda rng: init(config, rng), jax.random.key(0))


def _norm(config, rngs):
    dtype = config.compute_dtype
    if config.norm == "rms":
        return nnx.RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
    return nnx.LayerNorm(
        config.width, epsilon=config.norm_epsilon, use_bias=config.bias, dtype=dtype, rngs=rngs,
        # E[x^2] - E[x]^2 cancels badly once the residual stream has a mean.
        use_fast_variance=False,
    )  # fmt: skip


def _residual_stddev(config: GPTConfig) -> float:
    """Two branches per layer add to the residual stream (Radford et al. 2019, section 2.3)."""
    return INIT_STDDEV / math.sqrt(2 * config.num_layers)


def _rotate(x_BSNH, *, theta):
    half = x_BSNH.shape[-1] // 2
    wavelengths = theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    angles_SH = jnp.arange(x_BSNH.shape[1], dtype=jnp.float32)[:, None] / wavelengths
    cos, sin = jnp.cos(angles_SH)[:, None], jnp.sin(angles_SH)[:, None]
    first, second = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return rotated.astype(x_BSNH.dtype)
