"""The same model and loss without a pipeline: what every schedule must agree with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.runtime.layers.keys import embed_layer, head_layer, layer_key
from jaxpipe.runtime.layers.model import Model

PyTree = Any


def loss(
    model: Model,
    params: PyTree,
    batch: PyTree,
    rng: jax.Array | None = None,
    *,
    num_microbatches: int = 1,
    data_shards: int = 1,
    states: Sequence[PyTree] | None = None,
) -> Any:
    """Mean loss of a batch on one device, microbatch by microbatch, layer by layer.

    Args:
      model: its functions must not use a mesh axis (for the GPT: ``vocabulary_axis=None``).
      params: canonical parameters.
      batch: leaves ``[rows, ...]``; within a data shard, row r belongs to microbatch ``r % m``.
      rng: the step's key, or None.
      num_microbatches: m, for the random keys and the mean.
      data_shards: number of data shards, likewise.
      states: a tree for each layer, for a stateful model.

    Returns:
      float32 scalar; with ``states``, ``(loss, states)``, each data shard's renewed in microbatch
      order, then averaged.
    """
    outer = {name: params[name] for name in ("embed", "head")}
    layers = _layers(model, params["layers"])

    def one(shard: jax.Array, states: tuple, of_microbatch: tuple):
        microbatch, rows = of_microbatch

        def key(layer):
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

    def rows_of(leaf):
        """``[data_shards, num_microbatches, rows, ...]``."""
        split = leaf.reshape(data_shards, -1, num_microbatches, *leaf.shape[1:])
        return jnp.moveaxis(split, 2, 1)

    def of_shard(shard_and_rows: tuple):
        shard, rows = shard_and_rows
        microbatches = jnp.arange(num_microbatches), rows
        return jax.lax.scan(functools.partial(one, shard), tuple(states or ()), microbatches)

    # Loops, so that a layer is compiled once and not once per shard and microbatch.
    rows = jax.tree.map(rows_of, batch)
    held, losses = jax.lax.map(of_shard, (jnp.arange(data_shards), rows))
    mean = jnp.mean(losses)
    return mean if states is None else (mean, jax.tree.map(lambda w: w.mean(0), held))


def _layers(model: Model, layers: PyTree) -> list[tuple[Callable[..., Any], PyTree]]:
    """Function and parameters of every layer, of a model whose layers are alike or not."""
    if isinstance(model.layer, tuple):
        return list(zip(model.layer, layers, strict=True))
    depth = jax.tree.leaves(layers)[0].shape[0]
    return [(model.layer, jax.tree.map(lambda w, n=n: w[n], layers)) for n in range(depth)]
