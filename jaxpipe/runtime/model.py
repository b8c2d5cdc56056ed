"""What a user hands to the pipeline: three pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as three pure functions over ``{"embed", "layers", "head"}`` parameters.

    ``outer`` below is ``{"embed": ..., "head": ...}``: both outer functions see both, so tied
    embeddings are one array read twice. ``rng`` is one key that depends on (step, microbatch,
    layer) and on the data shard, or None where the caller gave none.

    Args:
      embed: ``embed(outer, microbatch, rng) -> x``, the input of the first layer.
      layer: ``layer(layer_params, x, rng) -> x``; ``params["layers"]`` stacks ``layer_params`` on a
        leading layer dimension. Shape and dtype of ``x`` are the same in and out.
      head_loss: ``head_loss(outer, x, microbatch, rng) -> loss``, a float32 scalar: the mean loss
        of one microbatch.
      stage_split: a tree like ``outer`` whose leaves are the dimension of that parameter that is
        split over the ``stage`` axis, or None where it is replicated. Functions that use a split
        leaf receive the stage's own slice and communicate by name (see
        `jaxpipe.runtime.vocabulary`). None splits nothing.

    Example:
      >>> import jax.numpy as jnp
      >>> Model(
      ...     embed=lambda outer, batch, rng: batch["x"] @ outer["embed"],
      ...     layer=lambda w, x, rng: x + jnp.tanh(x @ w),
      ...     head_loss=lambda outer, x, batch, rng: jnp.mean((x @ outer["head"] - batch["y"]) **
      2), ... ).stage_split is None
      True
    """

    embed: Callable[[PyTree, PyTree, jax.Array | None], jax.Array]
    layer: Any
    head_loss: Callable[[PyTree, jax.Array, PyTree, jax.Array | None], jax.Array]
    stage_split: PyTree = None
    stateful: bool = False
