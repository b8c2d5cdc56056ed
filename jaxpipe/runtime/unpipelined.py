"""The same model and loss without a pipeline: what every schedule must agree with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.runtime.keys import embed_layer, head_layer, layer_key
from jaxpipe.runtime.model import Model

PyTree = Any


def loss(
    model: Model,
    params: PyTree,
    batch: PyTree,
    rng: jax.Array | None = None,
    *,
    num_microbatches: int = 1,
    data_shards: int = 1,
) -> jax.Array:
    """Mean loss of a batch on one device, microbatch by microbatch, layer by layer.

    Args:
      model: its functions must not use a mesh axis (for the GPT: ``vocabulary_axis=None``).
      params: canonical parameters.
      batch: leaves ``[rows, ...]``; within a data shard, row r belongs to microbatch ``r % m``.
      rng: the step's key, or None.
      num_microbatches: m, for the random keys and the mean.
      data_shards: number of data shards, likewise.

    Returns:
      float32 scalar.
    """
    outer = {name: params[name] for name in ("embed", "head")}
    num_layers = jax.tree.leaves(params["layers"])[0].shape[0]

    def one(rows: PyTree, microbatch: int, shard: int) -> jax.Array:
        def key(layer):
            return layer_key(rng, microbatch=microbatch, shard=shard, layer=layer)

        x = model.embed(outer, rows, key(embed_layer(num_layers)))
        for layer in range(num_layers):
            x = model.layer(jax.tree.map(lambda w, n=layer: w[n], params["layers"]), x, key(layer))
        return model.head_loss(outer, x, rows, key(head_layer(num_layers)))

    def rows_of(microbatch: int, shard: int) -> PyTree:
        def rows(leaf):
            size = leaf.shape[0] // data_shards
            return leaf[shard * size : (shard + 1) * size][microbatch::num_microbatches]

        return jax.tree.map(rows, batch)

    losses = [one(rows_of(i, d), i, d) for i in range(num_microbatches) for d in range(data_shards)]
    return jnp.mean(jnp.stack(losses))
