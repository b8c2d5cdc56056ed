"""GPT: a decoder-only transformer that covers several families from its config alone.

    x = lookup(table, tokens) [+ positions]
    x = x + attention(norm(x)), x = x + mlp(norm(x))       num_layers times
    loss = cross_entropy(norm(x) @ table.T, next tokens)

With ``config.mtp_loss`` a further layer follows, which predicts the tokens after the next.

Weights are float32; matmuls run in ``config.dtype``. Dimension suffixes: B rows, S sequence, T a
device's part of it, E width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe import Appended, Model, Weighted, vocabulary
from jaxpipe.nnx import functional, stateful
from models import experts, gpt_split, linear_attention, streams, validation
from models.adapters import adapted_names, attach, linear_maps
from models.attention import Cache, empty_cache
from models.block_attention import document_starts
from models.blocks import (
    GATED,
    INIT_STDDEV,
    function_of,
    soft_capped,
)
from models.context import Context
from models.gpt_block import make_block, make_norm, scaled
from models.gpt_config import GPTConfig, LayerKind
from models.sharing import WHOLE, Sharing
from models.tensor import Tensor
from models.types import Batch, Key, PyTree

ConfigT = TypeVar("ConfigT", bound=GPTConfig)


def init(config: GPTConfig, rng: jax.Array) -> PyTree:
    """Initial parameters; works under `jax.jit` and `jax.eval_shape`.

    Returns:
      ``{"embed", "layers", "head"}``, float32. If all layers are alike, the leaves of "layers" are
      [num_layers, ...]; if not, "layers" is a tuple with a tree for each layer.
    """
    layers_rng = jax.random.split(rng, 4)[2]
    return {**_init_outer(config, rng), "layers": _init_layers(config, layers_rng)}


def init_state(config: GPTConfig) -> tuple[PyTree, ...] | None:
    """Biases and counts of the routers, and largest scores of heads, before the first step, all 0.

    Returns:
      One tree per layer, float32; ``{}`` for a layer that keeps nothing. None without
      ``bias_speed`` and ``qk_clip``.
    """
    if not config.has_states:
        return None
    shapes = tuple(_functions(config, kind)[2] for kind in config.layer_kinds)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)


def end_step(config: GPTConfig, state: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """Moves the routers' biases by the counts of a step's microbatches, and begins anew.

    Args:
      state: canonical states after the step, the mean over data shards.
    """

    def of_layer(layer: PyTree) -> PyTree:
        ended = jax.tree.map(jnp.zeros_like, layer)
        if "mlp" in layer:
            selection = layer["mlp"]["router"]["selection"]
            assert config.bias_speed is not None
            moved = experts.moved_bias(selection["bias"], selection["counts"], config.bias_speed)
            ended["mlp"]["router"]["selection"]["bias"] = moved
        return ended

    return tuple(map(of_layer, state))


def max_logits(state: tuple[PyTree, ...]) -> tuple[jax.Array, ...]:
    """Takes the largest scores of every layer's heads, float32 [heads], from canonical states."""
    return tuple(layer["attention"]["max_logits"] for layer in state)


def model(
    config: GPTConfig,
    *,
    vocabulary_axis: str | None = None,
    tensor_axis: str | None = None,
    context_axis: str | None = None,
    expert_axis: str | None = None,
    data_axes: tuple[str, ...] = (),
) -> Model:
    """Makes the GPT as the three functions that a pipeline runs.

    A microbatch is ``{"tokens": int32 [rows, S + 1]}``: inputs are ``tokens[:, :-1]``, targets
    ``tokens[:, 1:]``, S at most ``sequence_length``; or, as slices of sequences and packed
    documents need it, ``{"tokens", "targets"}``, both [rows, S], with ``positions`` if these are
    learned; targets below 0 are not predicted. With ``documents``, int32 [rows, S], a token only
    sees tokens of its own document, and learned positions begin anew with each document. With
    ``bias_speed`` or ``qk_clip`` the model is stateful: `init_state` makes its state, and
    `end_step` ends a step. With ``mtp_loss`` the loss has a metric "mtp", the mean loss of the
    tokens after the next; as section 2.2 has it, their sum divided by the number of next tokens is
    added to the loss.

    Args:
      vocabulary_axis: mesh axis over which the vocabulary tables are split ("stage" in a pipeline);
        None for whole tables and no collectives.
      tensor_axis: model axis whose devices share every layer: heads and hidden units, between these
        the sequence, and with stages the vocabulary; None for layers that are not shared.
      context_axis: model axis whose devices share the sequence; None for whole sequences.
      expert_axis: axis of data shards that have some of a layer's experts each; None for all.
      data_axes: all axes of data shards, as ``qk_clip`` needs them.

    Returns:
      The model; with ``vocabulary_axis`` its ``stage_split`` names dimension 0 of every table, with
      the others its ``axis_split`` what these axes split.

    Example:
      >>> config = GPTConfig(vocab_size=64, sequence_length=8, num_layers=2, width=16, num_heads=2)
      >>> params = init(config, jax.random.key(0))
      >>> outer = {"embed": params["embed"], "head": params["head"]}
      >>> model(config).embed(outer, {"tokens": jnp.zeros((3, 9), int)}, None).shape
      (3, 8, 16)
    """

    sharing = Sharing(Tensor(tensor_axis), Context(context_axis), expert_axis, data_axes)
    over: dict[str, Any] = {"axis": vocabulary_axis, "sequence_axis": tensor_axis}
    of_lookup = over | {"by_width": not config.tied}

    def embed(outer: PyTree, microbatch: Batch, rng: Key) -> PyTree:
        x = _embed(config, outer, microbatch, rng, sharing, of_lookup)
        if config.mtp_loss is None:
            return x
        next_ids = sharing.context.own(jnp.roll(_inputs(microbatch), -1, axis=1), 1)
        table = outer["embed"]["table"]
        return x, vocabulary.lookup(table, next_ids, dtype=x.dtype, **of_lookup)

    def head_loss(outer: PyTree, x: PyTree, microbatch: Batch, rng: Key) -> PyTree:
        del rng

        def mean_loss(x: jax.Array, targets: jax.Array, weights: jax.Array | None) -> jax.Array:
            return vocabulary.cross_entropy(
                scaled(x, config.logit_scale),
                _head_table(config, outer),
                targets,
                bias=outer["head"]["bias"] if config.head_bias else None,
                weights=weights,
                vocab_size=config.vocab_size,
                soft_cap=config.logit_soft_cap,
                **over,
            )

        targets = sharing.context.own(_targets(microbatch), 1)
        weights = targets >= 0 if "targets" in microbatch else None
        x, *further = (_final_norm(config, outer, x),) if config.mtp_loss is None else x
        mean, mtp = mean_loss(x, targets, weights), None
        num_predicted = (targets >= 0).sum(dtype=jnp.float32)
        if config.mtp_loss:
            after, is_predicted = (sharing.context.own(w, 1) for w in _further_targets(microbatch))
            num_further = is_predicted.sum(dtype=jnp.float32)
            total = mean_loss(further[0], after, is_predicted) * num_further
            mean += config.mtp_loss * total / jnp.maximum(num_predicted, 1)
            mtp = {"mtp": Weighted(total, num_further)}
        loss = mean if weights is None else Weighted(mean * num_predicted, num_predicted)
        return loss if mtp is None else (loss, mtp)

    def output(outer: PyTree, x: PyTree, microbatch: Batch, rng: Key) -> jax.Array:
        del outer, microbatch, rng
        return sharing.whole(x if config.mtp_loss is None else x[0])

    def check_slices(microbatch: Batch, num_slices: int) -> None:
        needed = ["targets", *(["positions"] if config.positions == "learned" else [])]
        if missing := [name for name in needed if name not in microbatch]:
            raise ValueError(
                f"Slices of sequences need {missing} in the batch, int32 [rows, S]: a slice does "
                "not hold the token after its last, nor know its place."
            )
        validation.check_length(config, "tokens hold", num_slices * microbatch["tokens"].shape[1])

    def carry(x: jax.Array, microbatch: Batch, num_slices: int) -> dict[str, Appended]:
        check_slices(microbatch, num_slices)
        return empty_cache(config, sharing, x, microbatch, num_slices)

    def linear_carry(x: jax.Array, microbatch: Batch, num_slices: int) -> linear_attention.Cache:
        check_slices(microbatch, num_slices)
        has_documents = "documents" in microbatch
        return linear_attention.empty_cache(config, sharing, len(x), has_documents=has_documents)

    def by_layer(make: Callable[[LayerKind], Any]) -> Any:
        """Makes what layers of a kind share: one for all if they are alike, or one for each."""
        made = {kind: make(kind) for kind in set(config.layer_kinds)}
        of_layers = tuple(made[kind] for kind in config.layer_kinds)
        return of_layers[0] if config.layers_are_alike else of_layers

    merging: dict[str, Any] = {}
    if config.residual_streams > 1:
        spread = functools.partial(streams.spread, num_streams=config.residual_streams)
        merging = {"spread": spread, "merge": streams.merge}
    paired_layer: Any = None
    if tensor_axis is not None:
        whole = dataclasses.replace(sharing, tensor=Tensor(tensor_axis, in_pieces=False))
        paired_layer = by_layer(lambda kind: _layer(config, kind, whole))
    outer = _outer_shapes(config)
    split = None if vocabulary_axis is None else gpt_split.of_tables(outer, 0)
    shapes = [_layer_shapes(config, kind) for kind in config.layer_kinds]
    own = gpt_split.of_parameters(config, outer, shapes, sharing)
    carries = by_layer(lambda kind: linear_carry if kind.is_linear else carry)
    return Model(
        embed,
        by_layer(lambda kind: _layer(config, kind, sharing)),
        head_loss,
        stateful=config.has_states,
        stage_split=split,
        axes=sharing.axes,
        axis_split=own,
        carry=None if config.has_states or config.mtp_loss is not None else carries,
        output=output,
        paired_layer=paired_layer,
        **merging,
    )


def logits(
    config: GPTConfig,
    params: PyTree,
    tokens: jax.Array,
    state: tuple[PyTree, ...] | None = None,
) -> jax.Array:
    """Plain forward pass on one device, without dropout; experts drop no tokens.

    Args:
      tokens: int32 [rows, S], S at most ``sequence_length``.
      state: states of the layers, needed with ``bias_speed`` only.

    Returns:
      float32 [rows, S, vocab_size]: scores of the token after each position.
    """
    config, params, state = main_model(config, params, state)
    config = for_inference(config)
    x = _embed(config, params, {"tokens": tokens, "targets": tokens}, None, WHOLE, {})
    if config.bias_speed is not None:
        x = _with_state(config, params["layers"], x, state)
    else:
        x, _ = _run_layers(config, params["layers"], x)
    return scores(config, params, x)


def main_model(
    config: GPTConfig, params: PyTree, state: tuple[PyTree, ...] | None = None
) -> tuple[GPTConfig, PyTree, tuple[PyTree, ...] | None]:
    """Makes the model without what it has for training alone: ``mtp_loss`` and ``qk_clip``.

    Args:
      state: states of the layers, or None.
    """
    if config.qk_clip is not None:
        config = dataclasses.replace(config, qk_clip=None)
        if state is not None:
            state = tuple({k: v for k, v in own.items() if k != "attention"} for own in state)
    if config.mtp_loss is None:
        return config, params, state
    config = dataclasses.replace(config, mtp_loss=None)
    *layers, further = params["layers"]
    if config.layers_are_alike:
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    head = {**params["head"], "norm": further["final_norm"]}
    params = {**params, "layers": layers, "head": head}
    return config, params, None if state is None else state[:-1]


def for_inference(config: ConfigT) -> ConfigT:
    """Makes the shape of a model whose experts drop no tokens, and whose layers have no losses."""
    # With a capacity, a token's experts may depend on the tokens behind it.
    return dataclasses.replace(
        config.without_layer_losses(), capacity_factor=None, device_capacity_factor=None
    )


def scores(config: GPTConfig, params: PyTree, x: jax.Array) -> jax.Array:
    """Logits of the last layer's output: float32 [rows, S, vocab_size] of x [rows, S, width]."""
    x = scaled(_final_norm(config, params, x), config.logit_scale)
    table = _head_table(config, params).astype(x.dtype)
    scores = jnp.einsum("bse,ve->bsv", x, table, preferred_element_type=jnp.float32)
    if config.head_bias:
        scores = scores + params["head"]["bias"]
    return soft_capped(scores, config.logit_soft_cap)


def empty_caches(config: GPTConfig, num_rows: int, length: int) -> PyTree:
    """Makes room for the keys and values of rows of so many tokens, for `next_logits`.

    Returns:
      Zeros [rows, length, heads, width] for the keys and the values of each layer, in the dtype of
      activations, or what linear attention keeps: stacked over layers if all are alike, else a list
      of them.
    """
    x = jnp.zeros((num_rows, 1, config.width), config.compute_dtype)
    buffers = empty_cache(config, WHOLE, x, {}, length)
    layer = {name: appended.array for name, appended in buffers.items()}
    layers = [layer] * config.num_layers
    if config.linear_heads is not None:
        linear = linear_attention.empty_cache(config, WHOLE, num_rows, has_documents=False)
        layers = [linear if kind.is_linear else layer for kind in config.layer_kinds]
    if config.layers_are_alike:
        return jax.tree.map(lambda *own: jnp.stack(own), *layers)
    return layers


def next_logits(
    config: GPTConfig, params: PyTree, tokens: jax.Array, caches: PyTree, start: jax.Array | int
) -> tuple[jax.Array, PyTree]:
    """Plain forward pass of some tokens, which reads the keys and values of those before.

    Args:
      config: the model's shape, without ``bias_speed`` and ``mtp_loss``.
      tokens: int32 [rows, T].
      caches: from `empty_caches`, or from the call for the tokens before.
      start: position of the first of the tokens; start + T is at most the length of the caches.

    Returns:
      float32 [rows, vocab_size]: scores of the token after the last one; and the caches with these
      tokens.
    """
    config = for_inference(config)
    positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
    microbatch = {"tokens": tokens, "targets": tokens, "positions": positions}
    x = _embed(config, params, microbatch, None, WHOLE, {})
    x, caches = _run_layers(config, params["layers"], x, caches, start)
    return scores(config, params, x[:, -1:])[:, 0], caches


def linear_map_names(config: GPTConfig) -> list[str]:
    """Lists the paths in a layer of all linear maps, such as "attention/out": see `Adapters`."""
    plain = dataclasses.replace(config, adapters=None)
    blocks = [nnx.eval_shape(lambda kind=kind: make_block(plain, kind, rngs=nnx.Rngs(0)))
              for kind in dict.fromkeys(config.layer_kinds)]  # fmt: skip
    paths = dict.fromkeys(path for block in blocks for path, *_ in linear_maps(block))
    return [name for path in paths for name in adapted_names(config, path).values()]


def with_adapters(config: GPTConfig, number: int, layer: PyTree, rng: jax.Array) -> PyTree:
    """Makes a layer's parameters of those that it has without ``config.adapters``."""
    return _with_adapters(config, config.layer_kinds[number])(layer, rng)


@functools.cache
def _with_adapters(config: GPTConfig, kind: LayerKind) -> Callable[[PyTree, jax.Array], PyTree]:
    def make(layer: PyTree, rng: jax.Array) -> PyTree:
        plain = dataclasses.replace(config, adapters=None)
        block = make_block(plain, kind, rngs=nnx.Rngs(rng))
        state = nnx.state(block, nnx.Param)
        nnx.replace_by_pure_dict(state, layer)
        nnx.update(block, state)
        attach(block, config, rngs=nnx.Rngs(rng))
        return stateful(block)[1]

    return jax.jit(make)


def num_parameters(config: GPTConfig) -> int:
    """Parameters of the whole model with its adapters; a tied table counts once.

    Example:
      >>> num_parameters(GPTConfig.gpt2_124m())
      124439808
    """
    plain = dataclasses.replace(config, adapters=None)
    parts = [_outer_shapes(plain), *(_layer_shapes(plain, kind) for kind in config.layer_kinds)]
    own = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parts))
    return own + num_adapter_parameters(config)


def num_adapter_parameters(config: GPTConfig) -> int:
    """Parameters of the adapters alone, which are trained."""
    if config.adapters is None:
        return 0
    layers = [_layer_shapes(config, kind) for kind in config.layer_kinds]
    return sum(
        math.prod(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(layers)
        if path[-1].key in ("lora_a", "lora_b")
    )


def flops_per_token(config: GPTConfig) -> int:
    """Floating-point operations of one training step per token, forward and backward.

    6 N + 12 A S for each layer (Chowdhery et al. 2022, appendix B): N counts the parameters that
    take part in a matmul, hence no position tables, no input table that is only looked up, and only
    as many experts as a token is sent to. The second term is the attention scores and their use,
    with A the width of all heads (the mean of keys' and values') and S the tokens that a position
    sees, not halved for causality. In linear attention it is 18 numbers of the state: that is read
    for the key and for the query, and written. Several residual streams add their mixing.
    Recomputation is not counted. With adapters, weights have no gradients: 4 N in place of 6 N, and
    6 for each parameter of an adapter.
    """
    num_adapting = num_adapter_parameters(config)
    num_multiplied = num_parameters(config) - num_adapting
    if config.positions == "learned":
        num_multiplied -= (config.first_position + config.sequence_length) * config.width
    if not config.tied:
        num_multiplied -= config.vocab_size * config.width
    if config.mtp_loss is not None:  # the table is used twice
        num_multiplied += config.vocab_size * config.width
    num_idle = (config.num_experts or 0) - config.experts_per_token
    per_expert = (3 if config.activation in GATED else 2) * config.width
    num_multiplied -= sum(kind.has_experts for kind in config.layer_kinds) * (
        num_idle * per_expert * config.expert_hidden_width
    )
    length = config.sequence_length
    widths = config.num_heads * (config.score_width + (config.value_size or config.head_width))
    seen = sum(
        min(config.window or length, length) if kind.is_local else length
        for kind in config.layer_kinds
        if not kind.is_linear
    )
    num_linear = sum(kind.is_linear for kind in config.layer_kinds)
    state = config.value_heads * config.linear_key_size * config.linear_value_size
    per_weight = 6 if config.adapters is None else 4
    products = 6 * widths * seen + 18 * num_linear * state
    if (count := config.residual_streams) > 1:  # each of two branches reads, mixes and writes
        products += 6 * 2 * len(config.layer_kinds) * count * (2 + count) * config.width
    return per_weight * num_multiplied + 6 * num_adapting + products


def _init_outer(config: GPTConfig, rng: jax.Array) -> dict[str, PyTree]:
    table_rng, positions_rng, _, head_rng = jax.random.split(rng, 4)
    table_shape = (config.vocab_size, config.width)
    embed = {"table": INIT_STDDEV * jax.random.normal(table_rng, table_shape)}
    if config.positions == "learned":
        positions_shape = (config.first_position + config.sequence_length, config.width)
        embed["positions"] = INIT_STDDEV * jax.random.normal(positions_rng, positions_shape)
    head = {}
    if config.mtp_loss is None:
        head["norm"] = functional(make_norm(config, nnx.Rngs(0)))[1]
    if not config.tied:
        head["table"] = INIT_STDDEV * jax.random.normal(head_rng, table_shape)
    if config.head_bias:
        head["bias"] = jnp.zeros(config.vocab_size)
    return {"embed": embed, "head": head}


def _init_layers(config: GPTConfig, rng: jax.Array) -> PyTree:
    def initial(key: jax.Array, kind: LayerKind) -> PyTree:
        return stateful(make_block(config, kind, rngs=nnx.Rngs(key)))[1]

    kinds = config.layer_kinds
    if config.layers_are_alike:
        keys = jax.random.split(nnx.Rngs(rng).params(), len(kinds))
        return jax.vmap(lambda key: initial(key, kinds[0]))(keys)
    return tuple(map(initial, jax.random.split(rng, len(kinds)), kinds))


def _layer(config: GPTConfig, kind: LayerKind, sharing: Sharing = WHOLE) -> Callable[..., PyTree]:
    """Makes the function of a layer, as a pipeline calls it."""
    apply, _, _ = _functions(config, kind, sharing)

    def stateful_layer(
        params: PyTree, x: PyTree, microbatch: Batch | None, rng: Key, state: PyTree
    ) -> tuple[PyTree, PyTree]:
        documents = None if microbatch is None else microbatch.get("documents")
        return apply(params, state, x, documents, rng=rng)

    def layer(
        params: PyTree, x: PyTree, microbatch: Batch | None, rng: Key, cache: Cache | None = None,
        start: jax.Array | int = 0,
    ) -> PyTree:  # fmt: skip
        documents = None if microbatch is None else microbatch.get("documents")
        return apply(params, {}, x, documents, cache, start, rng=rng)[0]

    return stateful_layer if config.has_states else layer


def _targets(microbatch: Batch) -> jax.Array:
    whole = microbatch["tokens"]
    return microbatch["targets"] if "targets" in microbatch else whole[:, 1:]


def _further_targets(microbatch: Batch) -> tuple[jax.Array, jax.Array]:
    """The tokens after the next, and which are predicted: those behind a token that is, too."""
    targets = _targets(microbatch)
    after = jnp.roll(targets, -1, axis=1).at[:, -1].set(-1)
    return after, (targets >= 0) & (after >= 0)


def _inputs(microbatch: Batch) -> jax.Array:
    whole = microbatch["tokens"]
    return whole if "targets" in microbatch else whole[:, :-1]


def _functions(
    config: GPTConfig, kind: LayerKind, sharing: Sharing = WHOLE
) -> tuple[Callable[..., PyTree], PyTree, PyTree]:
    """Converts a layer; its arrays are shapes."""
    return stateful(
        nnx.eval_shape(lambda: make_block(config, kind, sharing=sharing, rngs=nnx.Rngs(0)))
    )


def _with_state(
    config: GPTConfig, layers: PyTree, x: jax.Array, state: tuple[PyTree, ...] | None
) -> jax.Array:
    """Runs all layers that keep a state, or would."""
    if state is None:
        raise ValueError(
            f"bias_speed={config.bias_speed} keeps biases in the layers' states: pass state, as "
            "training left it or as init_state makes it."
        )
    whole = model(config)
    function, x = whole.layer, whole.spread(x)
    for n, own in enumerate(state):
        alike = config.layers_are_alike
        params = jax.tree.map(lambda w, n=n: w[n], layers) if alike else layers[n]
        x, _ = (function if alike else function[n])(params, x, None, None, own)
    return whole.merge(x)


def _run_layers(
    config: GPTConfig, layers: PyTree, x: jax.Array, caches: PyTree = None,
    start: jax.Array | int = 0,
) -> tuple[jax.Array, PyTree]:  # fmt: skip
    """Runs all layers over whole sequences or, with caches, over their tokens from ``start``."""

    def run(function: Callable[..., PyTree], x: jax.Array, layer: tuple[PyTree, PyTree]) -> PyTree:
        params, cache = layer
        y = function(params, x, None, None, cache, start)
        return (y, None) if cache is None else y

    whole, after = model(config), []
    function, x = whole.layer, whole.spread(x)
    if config.layers_are_alike:
        x, caches = jax.lax.scan(functools.partial(run, function), x, (layers, caches))
        return whole.merge(x), caches
    for own, *layer in zip(function, layers, caches or [None] * len(layers), strict=True):
        x, cache = run(own, x, tuple(layer))
        after.append(cache)
    return whole.merge(x), after


def _embed(
    config: GPTConfig, outer: PyTree, microbatch: Batch, rng: Key, sharing: Sharing,
    over: dict[str, Any],
) -> jax.Array:  # fmt: skip
    tokens_BS, documents_BS = _inputs(microbatch), microbatch.get("documents")
    length = tokens_BS.shape[1]
    validation.check_length(config, "tokens hold", length)
    ids_BT = sharing.context.own(tokens_BS, 1)
    sharing.tensor.part(ids_BT.shape[1], "sequence length")
    dtype = config.compute_dtype
    x_BTE = vocabulary.lookup(outer["embed"]["table"], ids_BT, dtype=dtype, **over)
    if config.positions == "learned":
        table = outer["embed"]["positions"][config.first_position :]
        if "positions" in microbatch:
            x_BTE = x_BTE + table[sharing.own(microbatch["positions"], 1)]
        elif documents_BS is None:
            x_BTE = x_BTE + sharing.own(table[:length], 0)
        else:  # how far each token is from the first of its document
            positions_BS = jnp.arange(length) - document_starts(documents_BS)
            x_BTE = x_BTE + table[sharing.own(positions_BS, 1)]
    if config.scaled_embedding:
        x_BTE = math.sqrt(config.width) * x_BTE
    x_BTE = scaled(x_BTE, config.embedding_scale)
    x_BTE = x_BTE.astype(dtype)
    if rng is None:
        return x_BTE
    drop = functools.partial(nnx.Dropout(config.dropout), rngs=rng)
    return sharing.dropout(drop, x_BTE)


def _final_norm(config: GPTConfig, outer: PyTree, x: jax.Array) -> jax.Array:
    return function_of(make_norm, config)(outer["head"]["norm"], x)


def _head_table(config: GPTConfig, outer: PyTree) -> jax.Array:
    return outer["embed" if config.tied else "head"]["table"]


@functools.cache
def _outer_shapes(config: GPTConfig) -> dict[str, PyTree]:
    return jax.eval_shape(lambda: _init_outer(config, jax.random.key(0)))


@functools.cache
def _layer_shapes(config: GPTConfig, kind: LayerKind) -> PyTree:
    return _functions(config, kind)[1]
