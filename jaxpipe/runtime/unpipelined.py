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
    outer, layers = outer_of(params), _layers(model, params["layers"])

    def one(shard: int, states: tuple[States, ...], of_microbatch: tuple[Index, Batch]) -> Any:
        microbatch, rows = of_microbatch

        def key(layer: int) -> Key:
            return layer_key(rng, microbatch=microbatch, shard=shard, layer=layer)

        x = model.embed(outer, rows, key(embed_layer(len(layers))))
        renewed = []
        for n, (function, layer_params) in enumerate(layers):
            if states:
                x, state = function(layer_params, x, rows, key(n), states[n])
                renewed.append(state)
            else:
                x = function(layer_params, x, rows, key(n))
        return tuple(renewed), model.head_loss(outer, x, rows, key(head_layer(len(layers))))

    def rows_of(leaf: jax.Array, shard: int) -> jax.Array:
        """``[num_microbatches, rows, ...]``."""
        split = leaf.reshape(data_shards, -1, num_microbatches, *leaf.shape[1:])
        return jnp.moveaxis(split, 2, 1)[shard]

    # A loop, so that a layer is compiled once and not once per microbatch.
    held, losses = [], []
    for d in range(data_shards):
        rows = jax.tree.map(functools.partial(rows_of, shard=d), batch)
        last, of_shard = jax.lax.scan(
            functools.partial(one, d), tuple(states or ()), (jnp.arange(num_microbatches), rows)
        )
        held.append(last)
        losses.append(of_shard)
    mean, averaged = jnp.mean(jnp.stack(losses)), jax.tree.map(lambda *w: sum(w) / len(w), *held)
    return mean if states is None else (mean, averaged)


def _layers(model: Model, layers: Params) -> list[tuple[Callable[..., Any], LayerParams]]:
    """Function and parameters of every layer, whether the layers are alike or not."""
    if model.layers_are_alike:
        depth = jax.tree.leaves(layers)[0].shape[0]
        layers = [jax.tree.map(lambda w, n=n: w[n], layers) for n in range(depth)]
    return [(model.layer_function(n), params) for n, params in enumerate(layers)]
