"""What a user hands to the pipeline: three pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as pure functions over ``{"embed", "layers", "head"}`` parameters.

    ``outer`` below is ``{"embed": ..., "head": ...}``: both outer functions see both, so tied
    embeddings are one array read twice. ``microbatch`` is the batch's rows of one microbatch; every
    stage has them, so masks, positions and targets are read where they are used and never sent.
    ``rng`` is one key that depends on (step, microbatch, layer) and on the data shard, or None
    where the caller gave none.

    An activation ``x`` is an array or a tree of arrays, all floating point. What a layer does not
    touch it returns as it came: an encoder's output travels so past every decoder layer.

    Args:
      embed: ``embed(outer, microbatch, rng) -> x``, the input of the first layer. All stages
        compute it together, so expensive first layers (a convolution) belong among the layers.
      layer: ``layer(layer_params, x, microbatch, rng) -> x``. If all layers are alike, one
        function; ``params["layers"]`` then stacks ``layer_params`` on a leading layer dimension,
        and x stays the same in structure, shape and dtype. If they differ, a tuple of functions,
        one a layer; ``params["layers"]`` is then a tuple of trees. Layers that share the function
        and all shapes share the compiled code.
      head_loss: ``head_loss(outer, x, microbatch, rng) -> loss``, a float32 scalar: the mean loss
        of one microbatch.
      stage_split: a tree like ``outer`` whose leaves are the dimension of that parameter that is
        split over the ``stage`` axis, or None where it is replicated. Functions that use a split
        leaf receive the stage's own slice and communicate by name (see
        `jaxpipe.runtime.vocabulary`). None splits nothing.
      stateful: layers also take a state and return it renewed, ``layer(layer_params, x, microbatch,
        rng, state) -> (x, state)``: running statistics, which nobody differentiates. `Pipeline`
        then takes and returns a tuple of states, one tree a layer.

    Example:
      >>> import jax.numpy as jnp
      >>> Model(
      ...     embed=lambda outer, batch, rng: batch["x"] @ outer["embed"],
      ...     layer=lambda w, x, batch, rng: x + jnp.tanh(x @ w),
      ...     head_loss=lambda outer, x, batch, rng: jnp.mean((x - batch["y"]) ** 2),
      ... ).stage_split is None
      True
    """

    embed: Callable[[PyTree, PyTree, jax.Array | None], PyTree]
    layer: Any  # a function or a tuple of them: a model's author knows which, a type checker not
    head_loss: Callable[[PyTree, PyTree, PyTree, jax.Array | None], jax.Array]
    stage_split: PyTree = None
    stateful: bool = False
