"""BERT: a bidirectional transformer encoder trained to fill in masked tokens (Devlin et al. 2019).

    x = norm(lookup(table, tokens) + positions + segment)
    x = norm(x + attention(x)), x = norm(x + mlp(x))       num_layers times
    loss = cross_entropy(norm(gelu(x @ kernel)) @ table.T + bias, targets), over masked tokens
           [+ cross_entropy(tanh(x[first] @ kernel) @ kernel, is the second part the next one)]

Weights are float32; matmuls run in ``config.dtype``. Dimension suffixes: B rows, S sequence, E
width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpipe import Model, Weighted, vocabulary
from jaxpipe.errors import Problem
from jaxpipe.nnx import functional, stack
from models import validation
from models.blocks import INIT_STDDEV, EncoderLayer, Linear, function_of, stream_norm
from models.context import Context
from models.sharing import WHOLE, Sharing
from models.tensor import Tensor, axis_split
from models.types import Batch, Key, PyTree

_gelu = functools.partial(jax.nn.gelu, approximate=False)
_layer = functools.partial(EncoderLayer, activation=_gelu, stddev=INIT_STDDEV)


@dataclasses.dataclass(frozen=True)
class BERTConfig(validation.Validated):
    """The shape of a BERT.

    Args:
      vocab_size: rows of the embedding table, which is also the output table.
      sequence_length: the longest input, in tokens.
      num_layers: encoder layers.
      width: size of the residual stream, a multiple of ``num_heads``.
      num_heads: attention heads.
      mlp_width: hidden size of the MLP; None for 4 width.
      num_segments: segments a token can belong to.
      next_sentence: also predict whether the second segment follows the first.
      dropout: probability, in [0, 1), for the embedding and for both residual branches. Attention
        weights are never dropped, since flash attention does not store them.
      dtype: compute dtype, "float32" or "bfloat16".
      norm_epsilon: added to the variance.

    Raises:
      ValueError: values that do not fit together, all of them in one message.
    """

    vocab_size: int
    sequence_length: int
    num_layers: int
    width: int
    num_heads: int
    mlp_width: int | None = None
    num_segments: int = 2
    next_sentence: bool = False
    dropout: float = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    norm_epsilon: float = 1e-12

    def problems(self) -> Iterator[Problem]:
        counts = ("vocab_size", "sequence_length", "num_layers", "width", "num_heads")
        small = validation.small_counts(self, *counts, "num_segments", "mlp_width")
        yield from small
        yield from validation.wrong_choices(self)
        yield from validation.not_positive(self, "norm_epsilon")
        yield from validation.wrong_probability(self, "dropout")
        if not small and self.width % self.num_heads:
            yield validation.not_a_divisor("num_heads", self.num_heads, "width", self.width)

    @property
    def hidden_width(self) -> int:
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    @classmethod
    def base(cls, **fields: Any) -> BERTConfig:
        """BERT-base (section 3): 110M parameters with both heads."""
        shape = {"num_layers": 12, "width": 768, "num_heads": 12, "next_sentence": True}
        return cls(**{"vocab_size": 30522, "sequence_length": 512, **shape, **fields})

    @classmethod
    def large(cls, **fields: Any) -> BERTConfig:
        """BERT-large (section 3): 340M parameters with both heads."""
        return cls.base(**{"num_layers": 24, "width": 1024, "num_heads": 16, **fields})


class Transform(nnx.Module):
    """The layers between the last encoder layer and the output table."""

    def __init__(self, config: BERTConfig, rngs: nnx.Rngs):
        self.linear = Linear(config.width, config.width, stddev=INIT_STDDEV, rngs=rngs)
        self.norm = stream_norm(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(_gelu(self.linear(x)))


class NextSentence(nnx.Module):
    """Scores of "is the next sentence" and "is not", from the first position [B, E]."""

    def __init__(self, config: BERTConfig, rngs: nnx.Rngs):
        self.pooler = Linear(config.width, config.width, stddev=INIT_STDDEV, rngs=rngs)
        self.classifier = Linear(config.width, 2, stddev=INIT_STDDEV, rngs=rngs)

    def __call__(self, x_BE: jax.Array) -> jax.Array:
        return self.classifier(jnp.tanh(self.pooler(x_BE))).astype(jnp.float32)


def init(config: BERTConfig, rng: jax.Array) -> PyTree:
    """Initial parameters; works under `jax.jit` and `jax.eval_shape`.

    Returns:
      ``{"embed", "layers", "head"}``, float32, with the leaves of "layers" [num_layers, ...].
    """
    table_rng, positions_rng, segments_rng, layers_rng, head_rng = jax.random.split(rng, 5)

    def normal(key: jax.Array, num_rows: int) -> jax.Array:
        return INIT_STDDEV * jax.random.normal(key, (num_rows, config.width))

    embed = {
        "table": normal(table_rng, config.vocab_size),
        "positions": normal(positions_rng, config.sequence_length),
        "segments": normal(segments_rng, config.num_segments),
        "norm": functional(stream_norm(config, nnx.Rngs(0)))[1],
    }
    _, layers = stack(
        functools.partial(_layer, config), num_layers=config.num_layers, rngs=nnx.Rngs(layers_rng)
    )
    rngs = nnx.Rngs(head_rng)
    head = {
        "transform": functional(Transform(config, rngs))[1],
        "bias": jnp.zeros(config.vocab_size),
    }
    if config.next_sentence:
        head["next_sentence"] = functional(NextSentence(config, rngs))[1]
    return {"embed": embed, "layers": layers, "head": head}


def model(
    config: BERTConfig, *, vocabulary_axis: str | None = None, tensor_axis: str | None = None
) -> Model:
    """Makes the BERT as the three functions that a pipeline runs.

    A microbatch is a dict of integers:

    - ``tokens`` [rows, S]: the input, with some tokens masked; S at most ``sequence_length``;
    - ``targets`` [rows, S]: the tokens to predict, or anything below 0 if there is none;
    - ``mask`` [rows, S], optional: 0 for padding, which nothing attends to;
    - ``segments`` [rows, S], optional: 0 to ``num_segments`` - 1; all 0 if omitted;
    - ``next_sentence`` [rows], with ``config.next_sentence``: 0 if the second segment follows the
      first, else 1.

    The loss is the mean over the tokens to predict of the whole batch, plus the mean over its rows
    of the next-sentence loss, in which microbatches weigh as much as their tokens to predict.

    Args:
      vocabulary_axis: mesh axis over which the vocabulary table is split ("stage" in a pipeline);
        None for a whole table and no collectives.
      tensor_axis: model axis whose devices share every layer: heads and hidden units, between these
        the sequence, and with stages the vocabulary; None for layers that are not shared.

    Returns:
      The model; with ``vocabulary_axis`` its ``stage_split`` names dimension 0 of table and bias,
      with ``tensor_axis`` its ``axis_split`` what that splits.

    Example:
      >>> config = BERTConfig(
      ...     vocab_size=64, sequence_length=8, num_layers=2, width=16, num_heads=2
      ... )
      >>> params = init(config, jax.random.key(0))
      >>> outer = {"embed": params["embed"], "head": params["head"]}
      >>> model(config).embed(outer, {"tokens": jnp.zeros((3, 8), int)}, None).shape
      (3, 8, 16)
    """
    sharing = Sharing(Tensor(tensor_axis), Context())
    apply_layer = function_of(functools.partial(_layer, sharing=sharing), config)
    over = {"axis": vocabulary_axis, "sequence_axis": tensor_axis}

    def embed(outer: PyTree, microbatch: Batch, rng: Key) -> jax.Array:
        return _embed(config, outer, microbatch, rng, sharing, **over)

    def layer(params: PyTree, x: jax.Array, microbatch: Batch, rng: Key) -> jax.Array:
        mask = microbatch.get("mask")
        return apply_layer(params, x, None if mask is None else mask > 0, rng=rng)

    def head_loss(outer: PyTree, x: jax.Array, microbatch: Batch, rng: Key) -> Weighted:
        del rng
        return _loss(config, outer, x, microbatch, sharing, **over)

    split = None if vocabulary_axis is None else _table_split(config, 0)
    own = None
    if tensor_axis is not None:
        one_layer = jax.eval_shape(lambda: functional(_layer(config, nnx.Rngs(0)))[1])
        own = {"layers": axis_split(one_layer, tensor_axis)} | _table_split(config, P(tensor_axis))
    return Model(embed, layer, head_loss, stage_split=split, axes=sharing.axes, axis_split=own)


def logits(config: BERTConfig, params: PyTree, batch: PyTree) -> jax.Array:
    """Plain forward pass on one device, without dropout: scores of the token at each position.

    Args:
      batch: as `model` describes a microbatch; targets and labels are not read.

    Returns:
      float32 [rows, S, vocab_size].
    """
    x = _transform(config, params, _encode(config, params, batch))
    table = params["embed"]["table"].astype(x.dtype)
    scores = jnp.einsum("bse,ve->bsv", x, table, preferred_element_type=jnp.float32)
    return scores + params["head"]["bias"]


def next_sentence_logits(config: BERTConfig, params: PyTree, batch: PyTree) -> jax.Array:
    """Scores of "the second segment follows the first" and "it does not", float32 [rows, 2].

    Args: as for `logits`; ``config.next_sentence`` must be set.
    """
    return _next_sentence(config, params, _encode(config, params, batch)[:, 0])


def num_parameters(config: BERTConfig) -> int:
    """Parameters of the whole model; the tied table counts once.

    Example:
      >>> num_parameters(BERTConfig.base())
      110106428
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(_shapes(config)))


def _encode(config: BERTConfig, params: PyTree, batch: Batch) -> jax.Array:
    layer = model(config).layer
    x = _embed(config, params, batch, None, WHOLE)
    x, _ = jax.lax.scan(
        lambda x, layer_params: (layer(layer_params, x, batch, None), None), x, params["layers"]
    )
    return x


def _embed(
    config: BERTConfig, outer: PyTree, microbatch: Batch, rng: Key, sharing: Sharing, **over: Any
) -> jax.Array:
    tokens_BS = microbatch["tokens"]
    length = tokens_BS.shape[1]
    validation.check_length(config, "tokens hold", length)
    embed = outer["embed"]
    positions_TE = sharing.own(embed["positions"][:length], 0)
    segments_BS = microbatch.get("segments", jnp.zeros_like(tokens_BS))
    x_BTE = vocabulary.lookup(embed["table"], tokens_BS, dtype=config.compute_dtype, **over)
    x_BTE = x_BTE + positions_TE + embed["segments"][sharing.own(segments_BS, 1)]
    x_BTE = function_of(stream_norm, config)(embed["norm"], x_BTE)
    if rng is None:
        return x_BTE
    return sharing.dropout(functools.partial(nnx.Dropout(config.dropout), rngs=rng), x_BTE)


def _transform(config: BERTConfig, outer: PyTree, x: jax.Array) -> jax.Array:
    return function_of(Transform, config)(outer["head"]["transform"], x)


def _loss(
    config: BERTConfig, outer: PyTree, x: jax.Array, microbatch: Batch, sharing: Sharing,
    **over: Any,
) -> Weighted:  # fmt: skip
    targets = microbatch["targets"]
    num_targets = (targets >= 0).sum(dtype=jnp.float32)
    loss = vocabulary.cross_entropy(
        _transform(config, outer, x),
        outer["embed"]["table"],
        targets,
        vocab_size=config.vocab_size,
        bias=outer["head"]["bias"],
        weights=targets >= 0,
        **over,
    )
    if not config.next_sentence:
        return Weighted(loss * num_targets, num_targets)
    first_BE = sharing.tensor.gather(x[:, :1])[:, 0]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        _next_sentence(config, outer, first_BE), microbatch["next_sentence"]
    )
    weight = jnp.maximum(num_targets, 1)  # rows without a token to predict have a next sentence
    return Weighted((loss + losses.mean()) * weight, weight)


def _next_sentence(config: BERTConfig, outer: PyTree, x_BE: jax.Array) -> jax.Array:
    return function_of(NextSentence, config)(outer["head"]["next_sentence"], x_BE)


def _table_split(config: BERTConfig, of_table: int | P) -> dict[str, PyTree]:
    """Makes a tree with ``of_table`` for table and bias, None for all else of the ends."""
    shapes = _shapes(config)
    split = jax.tree.map(lambda _: None, {"embed": shapes["embed"], "head": shapes["head"]})
    split["embed"]["table"] = split["head"]["bias"] = of_table
    return split


@functools.cache
def _shapes(config: BERTConfig) -> dict[str, PyTree]:
    return jax.eval_shape(lambda rng: init(config, rng), jax.random.key(0))
