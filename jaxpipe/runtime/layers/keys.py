"""Random keys that depend on (step, microbatch, layer) and the data shard, never on stage or tick.

The same run draws the same numbers whatever its schedule, number of stages or rematerialization.
"""

from __future__ import annotations

import jax

from jaxpipe.runtime.types import Index, Key


def layer_key(rng: Key, *, microbatch: Index, shard: Index, layer: Index) -> Key:
    """Makes a layer's key for a microbatch, or None; ``shard`` is the data shard's number."""
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
