"""The encoder-decoder Transformer of Vaswani et al. 2017, for translation.

    source = sqrt(E) lookup(table, source tokens) + positions, target likewise
    source = norm(source + attention(source)), source = norm(source + mlp(source))   encoder layers
    target = norm(target + attention(target up to here)),
    target = norm(target + attention(source)), target = norm(target + mlp(target))   decoder layers
    loss = cross_entropy(target @ table.T, next target tokens), smoothed

One table serves source, target and output. ``{"source", "target"}`` travels between layers: an
encoder layer leaves the target unchanged, a decoder layer the source. Weights are float32; matmuls
run in ``config.dtype``. Dimension suffixes: B rows, S source length, T target length, E width, V
vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpipe import Model, Weighted, vocabulary
from jaxpipe.errors import Problem
from jaxpipe.nnx import functional
from models import validation
from models.blocks import MLP, Attention, EncoderLayer, function_of, stream_norm
from models.context import Context
from models.sharing import WHOLE, Sharing
from models.tensor import Tensor, axis_split
from models.types import Batch, Key, PyTree

Ends = dict[str, jax.Array]
"""``{"source", "target"}``, which travels between layers."""
KeysValues = tuple[jax.Array, ...]
_encoder_layer = functools.partial(EncoderLayer, activation=nnx.relu, stddev=None)


@dataclasses.dataclass(frozen=True)
class TransformerConfig(validation.Validated):
    """The shape of an encoder-decoder Transformer.

    Args:
      vocab_size: rows of the table that both languages and the output share.
      sequence_length: the longest source and the longest target, in tokens.
      num_encoder_layers: encoder layers.
      num_decoder_layers: decoder layers.
      width: size of the residual streams, even and a multiple of ``num_heads``.
      num_heads: attention heads.
      mlp_width: hidden size of the MLPs; None for 4 width.
      dropout: probability, in [0, 1), for both embeddings and every residual branch. Attention
        weights are never dropped, since flash attention does not store them.
      label_smoothing: share of the target's probability spread evenly over the vocabulary, in [0,
        1) (section 5.4).
      pad_id: fills rows up to a common length; never attended to, never a target.
      begin_id: begins every target.
      end_id: ends every target.
      dtype: compute dtype, "float32" or "bfloat16".
      norm_epsilon: added to the variance.

    Raises:
      ValueError: values that do not fit together, all of them in one message.
    """

    vocab_size: int
    sequence_length: int
    num_encoder_layers: int
    num_decoder_layers: int
    width: int
    num_heads: int
    mlp_width: int | None = None
    dropout: float = 0.0
    label_smoothing: float = 0.1
    pad_id: int = 0
    begin_id: int = 1
    end_id: int = 2
    dtype: Literal["float32", "bfloat16"] = "float32"
    norm_epsilon: float = 1e-5

    def problems(self) -> Iterator[Problem]:
        counts = ("vocab_size", "sequence_length", "num_encoder_layers", "num_decoder_layers")
        small = validation.small_counts(self, *counts, "width", "num_heads", "mlp_width")
        yield from small
        yield from validation.wrong_choices(self)
        yield from validation.not_positive(self, "norm_epsilon")
        yield from validation.wrong_probability(self, "dropout")
        yield from validation.wrong_probability(self, "label_smoothing")
        marks = {name: getattr(self, name) for name in ("pad_id", "begin_id", "end_id")}
        for name, value in marks.items():
            if not 0 <= value < self.vocab_size:
                others = {"vocab_size": self.vocab_size}
                yield Problem(name, value, "must be in [0, $vocab_size)", (), others)
        if len(set(marks.values())) < len(marks):
            pad_id = marks.pop("pad_id")
            yield Problem("pad_id", pad_id, "and $begin_id and $end_id must all differ", (), marks)
        if small:
            return
        if self.width % 2:
            nearest = self.width - 1 or 2, self.width + 1
            yield Problem("width", self.width, "must be even, for sines and cosines", nearest)
        if self.width % self.num_heads:
            yield validation.not_a_divisor("num_heads", self.num_heads, "width", self.width)

    @property
    def num_layers(self) -> int:
        """Layers of the pipeline: the encoder's, then the decoder's."""
        return self.num_encoder_layers + self.num_decoder_layers

    @property
    def hidden_width(self) -> int:
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    @classmethod
    def base(cls, **fields: Any) -> TransformerConfig:
        """The base model (table 3), with its vocabulary of 37,000 (section 5.1): 63M parameters."""
        shape = {"num_encoder_layers": 6, "num_decoder_layers": 6, "width": 512, "num_heads": 8}
        return cls(
            **{"vocab_size": 37000, "sequence_length": 256, "dropout": 0.1, **shape, **fields}
        )

    @classmethod
    def big(cls, **fields: Any) -> TransformerConfig:
        """The big model (table 3): 214M parameters."""
        return cls.base(**{"width": 1024, "num_heads": 16, "dropout": 0.3, **fields})


class DecoderLayer(nnx.Module):
    """Causal self-attention, attention to the source, then an MLP; norms after the sums."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, *, sharing: Sharing = WHOLE):
        self.sharing = sharing
        shared: dict[str, Any] = {"stddev": None, "tensor": sharing.tensor, "rngs": rngs}
        self.attention, self.source_attention = (
            Attention(config.width, config.num_heads, **shared) for _ in range(2)
        )
        self.mlp = MLP(config.width, config.hidden_width, activation=nnx.relu, **shared)
        self.attention_norm, self.source_norm, self.mlp_norm = (
            stream_norm(config, rngs) for _ in range(3)
        )
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(
        self, target_BTE: jax.Array, source_BSE: jax.Array, source_mask_BS: jax.Array | None
    ) -> jax.Array:
        whole = self.sharing.tensor.gather(target_BTE)
        attended_BTE = self.attention(whole, whole, is_causal=True)
        source = self.source_attention.keys_values(self.sharing.tensor.gather(source_BSE))
        return self._rest(target_BTE, attended_BTE, source, source_mask_BS)

    def step(
        self, target_B1E: jax.Array, position: jax.Array, past: KeysValues, source: KeysValues,
        source_mask_BS: jax.Array | None,
    ) -> tuple[jax.Array, KeysValues]:  # fmt: skip
        """Runs the layer for one position, given keys and values of earlier ones and the source.

        Returns its output and ``past`` with this position's keys and values written into it.
        """
        new = self.attention.keys_values(target_B1E)
        past = tuple(
            jax.lax.dynamic_update_slice_in_dim(all_BTNH, one_B1NH, position, axis=1)
            for all_BTNH, one_B1NH in zip(past, new, strict=True)
        )
        seen_BT = jnp.broadcast_to(jnp.arange(past[0].shape[1]) <= position, past[0].shape[:2])
        attended_B1E = self.attention.attend(target_B1E, *past, mask=seen_BT)
        return self._rest(target_B1E, attended_B1E, source, source_mask_BS), past

    def _rest(
        self, target_BTE: jax.Array, attended_BTE: jax.Array, source: KeysValues,
        source_mask_BS: jax.Array | None,
    ) -> jax.Array:  # fmt: skip
        dropout = functools.partial(self.sharing.dropout, self.dropout)
        target_BTE = self.attention_norm(target_BTE + dropout(attended_BTE))
        whole = self.sharing.tensor.gather(target_BTE)
        attended_BTE = self.source_attention.attend(whole, *source, mask=source_mask_BS)
        target_BTE = self.source_norm(target_BTE + dropout(attended_BTE))
        return self.mlp_norm(target_BTE + dropout(self.mlp(target_BTE)))


def init(config: TransformerConfig, rng: jax.Array) -> PyTree:
    """Initial parameters; works under `jax.jit` and `jax.eval_shape`.

    Returns:
      ``{"embed", "layers", "head": {}}``, float32; "layers" is a tuple, the encoder's layers before
      the decoder's.
    """
    table_rng, *keys = jax.random.split(rng, config.num_layers + 1)
    # Embedding multiplies by sqrt(width) (section 3.4), so that embeddings begin with variance 1,
    # and logits too.
    shape = (config.vocab_size, config.width)
    table = jax.random.normal(table_rng, shape) / math.sqrt(config.width)
    layers = tuple(
        functional(make(config, nnx.Rngs(key)))[1]
        for make, key in zip(_layer_modules(config), keys, strict=True)
    )
    return {"embed": {"table": table}, "layers": layers, "head": {}}


def model(
    config: TransformerConfig,
    *,
    vocabulary_axis: str | None = None,
    tensor_axis: str | None = None,
) -> Model:
    """Makes the Transformer as the functions that a pipeline runs.

    A microbatch is ``{"source": int32 [rows, S], "target": int32 [rows, T + 1]}``, both filled up
    with ``pad_id`` at the end; targets are ``begin_id``, tokens, ``end_id``. The decoder reads
    ``target[:, :-1]`` and predicts ``target[:, 1:]``.

    The loss is the mean over the tokens to predict of the whole batch.

    Args:
      vocabulary_axis: mesh axis over which the vocabulary table is split ("stage" in a pipeline);
        None for a whole table and no collectives.
      tensor_axis: model axis whose devices share every layer: heads and hidden units, between these
        both sequences, and with stages the vocabulary; None for layers that are not shared.

    Returns:
      The model; its layers are a tuple of two functions, one for every encoder layer and one for
      every decoder layer. With ``vocabulary_axis`` its ``stage_split`` names dimension 0 of the
      table, with ``tensor_axis`` its ``axis_split`` what that splits.

    Example:
      >>> config = TransformerConfig(
      ...     vocab_size=64, sequence_length=8, num_encoder_layers=1, num_decoder_layers=1,
      ...     width=16, num_heads=2,
      ... )
      >>> params = init(config, jax.random.key(0))
      >>> batch = {"source": jnp.ones((3, 5), int), "target": jnp.ones((3, 7), int)}
      >>> x = model(config).embed({"embed": params["embed"], "head": {}}, batch, None)
      >>> jax.tree.map(jnp.shape, x)
      {'source': (3, 5, 16), 'target': (3, 6, 16)}
    """
    sharing = Sharing(Tensor(tensor_axis), Context())
    apply_encoder, apply_decoder = (
        function_of(functools.partial(make, sharing=sharing), config)
        for make in (_encoder_layer, DecoderLayer)
    )
    over = {"axis": vocabulary_axis, "sequence_axis": tensor_axis}

    def embed(outer: PyTree, microbatch: Batch, rng: Key) -> Ends:
        ends = {"source": microbatch["source"], "target": microbatch["target"][:, :-1]}
        keys = (None, None) if rng is None else jax.random.split(rng)
        return {
            name: _embed(config, outer, tokens, key, sharing, name=name, **over)
            for (name, tokens), key in zip(ends.items(), keys, strict=True)
        }

    def encoder(params: PyTree, x: Ends, microbatch: Batch, rng: Key) -> Ends:
        mask = microbatch["source"] != config.pad_id
        return x | {"source": apply_encoder(params, x["source"], mask, rng=rng)}

    def decoder(params: PyTree, x: Ends, microbatch: Batch, rng: Key) -> Ends:
        # Padding ends a target, so causality hides it from every position that counts.
        mask = microbatch["source"] != config.pad_id
        return x | {"target": apply_decoder(params, x["target"], x["source"], mask, rng=rng)}

    def head_loss(outer: PyTree, x: Ends, microbatch: Batch, rng: Key) -> Weighted:
        del rng
        return _loss(config, outer, x["target"], microbatch["target"][:, 1:], **over)

    layers = (encoder,) * config.num_encoder_layers + (decoder,) * config.num_decoder_layers
    split = None if vocabulary_axis is None else {"embed": {"table": 0}, "head": {}}
    own = None
    if tensor_axis is not None:
        shapes = jax.eval_shape(functools.partial(init, config), jax.random.key(0))["layers"]
        own = {"embed": {"table": P(tensor_axis)}, "layers": axis_split(shapes, tensor_axis)}
    return Model(embed, layers, head_loss, stage_split=split, axes=sharing.axes, axis_split=own)


def logits(
    config: TransformerConfig, params: PyTree, source: jax.Array, target: jax.Array
) -> jax.Array:
    """Plain forward pass on one device, without dropout.

    Args:
      source: int32 [rows, S].
      target: int32 [rows, T], beginning with ``begin_id``.

    Returns:
      float32 [rows, T, vocab_size]: scores of the token after each position.
    """
    plain = model(config)
    # `embed` takes a target with one more token than it reads.
    batch = {"source": source, "target": jnp.pad(target, ((0, 0), (0, 1)))}
    x = plain.embed(params, batch, None)
    for layer, layer_params in zip(plain.layer, params["layers"], strict=True):
        x = layer(layer_params, x, batch, None)
    return scores(params, x["target"])


def num_parameters(config: TransformerConfig) -> int:
    """Parameters of the whole model; the shared table counts once.

    Example:
      >>> num_parameters(TransformerConfig.base())
      63082496
    """
    shapes = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def scores(outer: PyTree, x: jax.Array) -> jax.Array:
    """Logits of a decoder's output: float32 [..., vocab_size] of x [..., width]."""
    table = outer["embed"]["table"].astype(x.dtype)
    return jnp.einsum("...e,ve->...v", x, table, preferred_element_type=jnp.float32)


def _loss(
    config: TransformerConfig, outer: PyTree, x_BTE: jax.Array, targets_BT: jax.Array, **over: Any
) -> Weighted:
    is_token_BT = targets_BT != config.pad_id
    num_tokens = is_token_BT.sum(dtype=jnp.float32)
    mean = vocabulary.cross_entropy(
        x_BTE,
        outer["embed"]["table"],
        targets_BT,
        vocab_size=config.vocab_size,
        weights=is_token_BT,
        label_smoothing=config.label_smoothing,
        **over,
    )
    return Weighted(mean * num_tokens, num_tokens)


def _embed(
    config: TransformerConfig, outer: PyTree, tokens_BT: jax.Array, rng: Key, sharing: Sharing, *,
    name: str, **over: Any,
) -> jax.Array:  # fmt: skip
    length = tokens_BT.shape[1]
    validation.check_length(config, f"{name} holds", length)
    positions_TE = sharing.own(positions(length, config.width), 0)
    table, dtype = outer["embed"]["table"], config.compute_dtype
    x_BTE = math.sqrt(config.width) * vocabulary.lookup(table, tokens_BT, dtype=dtype, **over)
    x_BTE = (x_BTE + positions_TE).astype(dtype)
    if rng is None:
        return x_BTE
    return sharing.dropout(functools.partial(nnx.Dropout(config.dropout), rngs=rng), x_BTE)


def positions(length: int, width: int) -> jax.Array:
    """Sinusoids of geometrically growing wavelength (section 3.5), float32 [length, width].

    The sines fill the first half of the width, the cosines the second.
    """
    half = width // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def _layer_modules(config: TransformerConfig) -> tuple[Callable[..., nnx.Module], ...]:
    """Lists the functions that make each layer's module, in model order."""
    encoder, decoder = config.num_encoder_layers, config.num_decoder_layers
    return (_encoder_layer,) * encoder + (DecoderLayer,) * decoder
