"""The same model and loss without a pipeline: what every schedule must agree with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.runtime.layers import losses
from jaxpipe.runtime.layers.keys import embed_layer, head_layer, layer_key
from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layout.whole_model import outer_of
from jaxpipe.runtime.types import Batch, Index, Key, LayerParams, Params, States, Tree


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
    """Loss of a batch on one device, microbatch by microbatch, layer by layer.

    Args:
      model: its functions must not use a mesh axis (for the GPT: ``vocabulary_axis=None``).
      params: canonical parameters.
      batch: leaves ``[rows, ...]``; within a data shard, row r belongs to microbatch ``r % m``.
      rng: the step's key, or None.
      num_microbatches, data_shards: as in the pipeline, for the random keys and the mean.
      states: a tree for each layer, for a stateful model.

    Returns:
      float32 scalar, as `Pipeline.value_and_grad` defines it. With metrics or ``states``
      ``(loss, aux)``, where ``aux`` is the metrics, the states, or both in a tuple; states are
      renewed by every data shard in microbatch order, then averaged.
    """

    def head(result: Tree, of_layers: jax.Array) -> Tree:
        return losses.addable(jax.tree.map(jnp.asarray, result)), of_layers

    shape = num_microbatches, data_shards
    (sums, of_layers), last = _run(model, model.head_loss, head, params, batch, rng, shape, states)
    count = num_microbatches * data_shards
    sums = jax.tree.map(lambda w: w.sum((0, 1)), sums)
    result = losses.combined(sums, count, mean=lambda w: w, total=lambda w: w)
    value, metrics = losses.parts(result)
    value = value + of_layers.mean()
    return losses.with_aux(value if metrics is None else (value, metrics), last)


def outputs(
    model: Model,
    params: Params,
    batch: Batch,
    rng: Key = None,
    *,
    num_microbatches: int = 1,
    data_shards: int = 1,
    states: Sequence[States] | None = None,
) -> Tree:
    """What `Model.output` returns for a batch, in the order of its rows; arguments as of `loss`."""
    shape = num_microbatches, data_shards
    args = params, batch, rng, shape, states
    found, _ = _run(model, model.output, lambda result, _: result, *args)
    return jax.tree.map(lambda w: jnp.moveaxis(w, 1, 2).reshape(-1, *w.shape[3:]), found)


def _run(
    model: Model,
    head: Callable[..., Tree],
    collect: Callable[[Tree, jax.Array], Tree],
    params: Params,
    batch: Batch,
    rng: Key,
    shape: tuple[int, int],
    states: Sequence[States] | None,
) -> tuple[Tree, States]:
    """Runs all microbatches.

    Args:
      head: what follows the last layer.
      collect: what to keep of what the head returns and of the sum of the layers' losses.
      shape: numbers of microbatches and of data shards.

    Returns:
      What is collected, leaves ``[data shards, microbatches, ...]``, and the states, or None.
    """
    outer, layers = outer_of(params), _layers(model, params["layers"])
    num_microbatches, data_shards = shape

    def one(shard: int, states: tuple[States, ...], of_microbatch: tuple[Index, Batch]) -> Any:
        microbatch, rows = of_microbatch

        def key(layer: int) -> Key:
            return layer_key(rng, microbatch=microbatch, shard=shard, layer=layer)

        x = model.embed(outer, rows, key(embed_layer(len(layers))))
        renewed, of_layers = [], jnp.zeros((), jnp.float32)
        for n, (function, layer_params) in enumerate(layers):
            if states:
                x, state = function(layer_params, x, rows, key(n), states[n])
                renewed.append(state)
            else:
                x = function(layer_params, x, rows, key(n))
            if isinstance(x, losses.WithLoss):
                x, of_layers = x.x, of_layers + x.loss
        result = head(outer, x, rows, key(head_layer(len(layers))))
        return tuple(renewed), collect(result, of_layers)

    def rows_of(leaf: jax.Array, shard: int) -> jax.Array:
        """``[num_microbatches, rows, ...]``."""
        split = leaf.reshape(data_shards, -1, num_microbatches, *leaf.shape[1:])
        return jnp.moveaxis(split, 2, 1)[shard]

    # A loop, so that a layer is compiled once and not once per microbatch.
    held, collected = [], []
    for d in range(data_shards):
        rows = jax.tree.map(functools.partial(rows_of, shard=d), batch)
        last, of_shard = jax.lax.scan(
            functools.partial(one, d), tuple(states or ()), (jnp.arange(num_microbatches), rows)
        )
        held.append(last)
        collected.append(of_shard)
    averaged = jax.tree.map(lambda *w: sum(w) / len(w), *held)
    stacked = jax.tree.map(lambda *w: jnp.stack(w), *collected)
    return stacked, None if states is None else averaged


def _layers(model: Model, layers: Params) -> list[tuple[Callable[..., Any], LayerParams]]:
    """Function and parameters of every layer, whether the layers are alike or not."""
    if model.layers_are_alike:
        depth = jax.tree.leaves(layers)[0].shape[0]
        layers = [jax.tree.map(lambda w, n=n: w[n], layers) for n in range(depth)]
    return [(model.layer_function(n), params) for n, params in enumerate(layers)]
