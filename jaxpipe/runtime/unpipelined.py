"""The same model and loss without a pipeline: what every schedule must agree with."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxpipe.runtime.filters import Filter, split_trainable
from jaxpipe.runtime.layers import losses
from jaxpipe.runtime.layers.model import Model, embed_layer, head_layer, layer_key
from jaxpipe.runtime.layout.whole_model import SHARED, outer_of
from jaxpipe.runtime.trees import combine, rounded, widened
from jaxpipe.runtime.types import (
    Activation,
    Batch,
    Gradients,
    Index,
    Key,
    LayerParams,
    Params,
    States,
    Tree,
)

_OfLayers: TypeAlias = tuple[Tree, jax.Array]
"""The sums of losses and metrics of layers, None for none, and how many layers have them."""


def loss(
    model: Model,
    params: Params,
    batch: Batch,
    rng: Key = None,
    *,
    num_microbatches: int = 1,
    data_shards: int = 1,
    states: Sequence[States] | None = None,
) -> Tree:
    """Loss of a batch on one device, microbatch by microbatch, layer by layer.

    Args:
      model: a model whose functions use no mesh axis (for the GPT: ``vocabulary_axis=None``).
      params: canonical parameters.
      batch: leaves ``[rows, ...]``; within a data shard, row r belongs to microbatch ``r % m``.
      rng: the step's key, or None.
      num_microbatches, data_shards: the pipeline's, for the random keys and the mean.
      states: one tree per layer, for a stateful model.

    Returns:
      The loss, a float32 scalar, as `Pipeline.value_and_grad` defines it. With metrics or
      ``states``, ``(loss, aux)``: ``aux`` is the metrics, the states, or both in a tuple. Each data
      shard updates the states in microbatch order; then they are averaged.
    """

    def head(*args: Tree) -> Tree:
        return losses.addable(jax.tree.map(jnp.asarray, model.head_loss(*args)))

    split = {"num_microbatches": num_microbatches, "data_shards": data_shards}
    *found, last = _run(model, head, params, batch, rng, **split, states=states)
    sums, (of_layers, num_layers) = jax.tree.map(lambda w: w.sum((0, 1)), found)
    reduced = functools.partial(losses.reduced, mean=lambda w: w, total=lambda w: w)
    count = num_microbatches * data_shards
    result = reduced(sums, count)
    if of_layers is not None:
        own, metrics = losses.parts(of_layers)
        result = losses.with_metrics(result, own / count, reduced(metrics, num_layers))
    return losses.with_aux(losses.values(result), last)


def value_and_grad(
    model: Model,
    params: Params,
    batch: Batch,
    rng: Key = None,
    *,
    trainable: Filter | None = None,
    **others: Any,
) -> tuple[Tree, Gradients]:
    """Computes what `Pipeline.value_and_grad` returns, canonical, on one device.

    Args:
      model, params, batch, rng: as of `loss`.
      trainable: as of `Pipeline`. Gradients have None in place of parameters that are not trained.
      **others: ``num_microbatches``, ``data_shards`` and ``states``, as of `loss`.
    """
    trained, frozen = split_trainable(params, trainable)

    def of_trained(trained: Params) -> tuple[jax.Array, Tree]:
        result = loss(model, combine(trained, frozen), batch, rng, **others)
        return losses.parts(result)[0], result

    (_, result), gradients = jax.value_and_grad(of_trained, has_aux=True)(trained)
    return result, gradients


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
    """Computes `Model.output` for a batch, in the order of its rows; arguments as of `loss`."""
    split = {"num_microbatches": num_microbatches, "data_shards": data_shards}
    found, *_ = _run(model, model.output, params, batch, rng, **split, states=states)
    return jax.tree.map(lambda w: jnp.moveaxis(w, 1, 2).reshape(-1, *w.shape[3:]), found)


def _run(
    model: Model,
    head: Callable[..., Tree],
    params: Params,
    batch: Batch,
    rng: Key,
    *,
    num_microbatches: int,
    data_shards: int,
    states: Sequence[States] | None,
) -> tuple[Tree, _OfLayers, States]:
    """Runs all microbatches, with ``head`` after the last layer.

    Returns:
      What the head returns, and what layers add, leaves ``[data shards, microbatches, ...]``; and
      the states, or None.
    """
    params = jax.tree.map(jnp.asarray, params)
    wide = widened(params)

    # Loops over layers, microbatches and shards, so that a layer is compiled once.
    def one(shard: Index, states: tuple[States, ...], of_microbatch: tuple[Index, Batch]) -> Tree:
        microbatch, rows = of_microbatch

        def key(layer: Index) -> Key:
            return layer_key(rng, microbatch=microbatch, shard=shard, layer=layer)

        result, of_layers, renewed = _microbatch(
            model, head, wide, params, rows, key=key, states=states
        )
        return renewed, (result, of_layers)

    def of_shard(shard_rows: tuple[Index, Batch]) -> tuple[tuple[States, ...], Tree]:
        shard, rows = shard_rows
        microbatches = jnp.arange(num_microbatches), rows
        return jax.lax.scan(functools.partial(one, shard), tuple(states or ()), microbatches)

    def split(leaf: jax.Array) -> jax.Array:
        """``[data_shards, num_microbatches, rows, ...]``."""
        rows = leaf.reshape(data_shards, -1, num_microbatches, *leaf.shape[1:])
        return jnp.moveaxis(rows, 2, 1)

    shards = jnp.arange(data_shards), jax.tree.map(split, batch)
    held, found = jax.lax.map(of_shard, shards)
    return *found, None if states is None else jax.tree.map(lambda w: w.mean(0), held)


def _microbatch(
    model: Model,
    head: Callable[..., Tree],
    params: Params,
    like: Params,
    rows: Batch,
    *,
    key: Callable[[Index], Key],
    states: tuple[States, ...],
) -> tuple[Tree, _OfLayers, tuple[States, ...]]:
    """Computes what the head returns for a microbatch, its layers' losses, and new states.

    Parameters are `widened` so that their gradients are summed wide; each function reads them
    rounded to the dtypes of ``like``.
    """
    outer, layers, own = outer_of(params), params["layers"], like["layers"]
    shared = outer.get(SHARED)
    depth = jax.tree.leaves(layers)[0].shape[0] if model.layers_are_alike else len(layers)

    def run(function: Callable[..., Tree], n: Index, x: Activation, *args: Tree) -> Tree:
        """A layer's output, its loss and metrics if it has any, and its new state."""
        params, *state = args
        params = rounded(params, own if model.layers_are_alike else own[n])
        params = params if shared is None else (params, rounded(shared, like[SHARED]))
        result = function(params, x, rows, key(n), *state)
        x, *state = result if state else (result,)
        if isinstance(x, losses.WithLoss):
            return x.x, losses.addable(jax.tree.map(jnp.asarray, x.loss)), *state
        return x, None, *state

    def numbered(x: Activation, layer: tuple[Index, LayerParams]) -> tuple[Activation, Tree]:
        return run(model.layer_function(0), layer[0], x, layer[1])

    x = model.spread(model.embed(rounded(outer, outer_of(like)), rows, key(embed_layer(depth))))
    found, renewed = [], []
    if model.layers_are_alike and not states:
        x, of_layers = jax.lax.scan(numbered, x, (jnp.arange(depth), layers))
        num_losses = depth
    else:
        if model.layers_are_alike:
            layers = [jax.tree.map(lambda w, n=n: w[n], layers) for n in range(depth)]
        for n, layer_params in enumerate(layers):
            x, loss, *state = run(model.layer_function(n), n, x, layer_params, *states[n : n + 1])
            found += [] if loss is None else [loss]
            renewed += state
        of_layers = jax.tree.map(lambda *w: jnp.stack(w), *found) if found else None
        num_losses = len(found)
    of_layers = jax.tree.map(lambda w: w.sum(0), of_layers)
    result = head(rounded(outer, outer_of(like)), model.merge(x), rows, key(head_layer(depth)))
    return result, (of_layers, jnp.asarray(num_losses)), tuple(renewed)
