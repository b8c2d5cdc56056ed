"""Random keys that depend on (step, microbatch, layer) and the data shard, never on stage or tick.

The same run draws the same numbers whatever its schedule, number of stages or rematerialisation.
"""

from __future__ import annotations

import jax

from jaxpipe.runtime.types import Index, Key


def layer_key(rng: Key, *, microbatch: Index, shard: Index, layer: Index) -> Key:
    """The key one layer gets for one microbatch.

    Args:
      rng: the step's key, or None for a model without randomness.
      microbatch: 0..m-1.
      shard: data shard, 0..data-1; each holds other rows of the microbatch.
      layer: canonical layer number; `embed_layer` and `head_layer` for the ends.

    Returns:
      The key, or None.
    """
    if rng is None:
        return None
    for value in (microbatch, shard, layer):
        rng = jax.random.fold_in(rng, value)
    return rng


def embed_layer(num_layers: int) -> int:
    """The layer number that stands for the embedding in `layer_key`."""
    return num_layers


def head_layer(num_layers: int) -> int:
    """The layer number that stands for the head in `layer_key`."""
    return num_layers + 1
