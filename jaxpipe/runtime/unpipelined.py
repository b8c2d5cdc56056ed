"""The same model and loss without a pipeline: what every schedule must agree with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.runtime.layers.keys import embed_layer, head_layer, layer_key
from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layout.whole_model import outer_of
from jaxpipe.runtime.types import Batch, Index, Key, LayerParams, Params, States


def loss(
    model: Model,
    params: Params,
    batch: Batch,
    rng: Key = None,
    *,
    num_microbatches: int = 1,
    data_shards: int = 1,
    states: Sequence[States] | None = None,
) -> Any:
    """Mean loss of a batch on one device, microbatch by microbatch, layer by layer.

    Args:
      model: its functions must not use a mesh axis (for the GPT: ``vocabulary_axis=None``).
      params: canonical parameters.
      batch: leaves ``[rows, ...]``; within a data shard, row r belongs to microbatch ``r % m``.
      rng: the step's key, or None.
      num_microbatches, data_shards: as in the pipeline, for the random keys and the mean.
      states: a tree for each layer, for a stateful model.

    Returns:
      float32 scalar; with ``states`` ``(loss, states)``: renewed by every data shard in microbatch
      order, then averaged.
    """
    outer, layers = outer_of(params), params["layers"]
    depth = jax.tree.leaves(layers)[0].shape[0] if model.layers_are_alike else len(layers)

    # Loops over layers, microbatches and shards, so that a layer is compiled once.
    def one(shard: Index, states: tuple[States, ...], of_microbatch: tuple[Index, Batch]) -> Any:
        microbatch, rows = of_microbatch

        def key(layer: Index) -> Key:
            return layer_key(rng, microbatch=microbatch, shard=shard, layer=layer)

        def numbered(x: Any, layer: tuple[Index, LayerParams]) -> tuple[Any, None]:
            return model.layer_function(0)(layer[1], x, rows, key(layer[0])), None

        x = model.embed(outer, rows, key(embed_layer(depth)))
        renewed = []
        if model.layers_are_alike and not states:
            x, _ = jax.lax.scan(numbered, x, (jnp.arange(depth), layers))
        else:
            for n, (function, layer_params) in enumerate(_layers(model, layers)):
                if states:
                    x, state = function(layer_params, x, rows, key(n), states[n])
                    renewed.append(state)
                else:
                    x = function(layer_params, x, rows, key(n))
        return tuple(renewed), model.head_loss(outer, x, rows, key(head_layer(depth)))

    def of_shard(shard_rows: tuple[Index, Batch]) -> tuple[tuple[States, ...], Any]:
        shard, rows = shard_rows
        microbatches = jnp.arange(num_microbatches), rows
        return jax.lax.scan(functools.partial(one, shard), tuple(states or ()), microbatches)

    def split(leaf: jax.Array) -> jax.Array:
        """``[data_shards, num_microbatches, rows, ...]``."""
        rows = leaf.reshape(data_shards, -1, num_microbatches, *leaf.shape[1:])
        return jnp.moveaxis(rows, 2, 1)

    shards = jnp.arange(data_shards), jax.tree.map(split, batch)
    held, losses = jax.lax.map(of_shard, shards)
    mean = jnp.mean(losses)
    return mean if states is None else (mean, jax.tree.map(lambda w: w.mean(0), held))


def _layers(model: Model, layers: Params) -> list[tuple[Callable[..., Any], LayerParams]]:
    """Function and parameters of every layer, whether the layers are alike or not."""
    if model.layers_are_alike:
        depth = jax.tree.leaves(layers)[0].shape[0]
        layers = [jax.tree.map(lambda w, n=n: w[n], layers) for n in range(depth)]
    return [(model.layer_function(n), params) for n, params in enumerate(layers)]
