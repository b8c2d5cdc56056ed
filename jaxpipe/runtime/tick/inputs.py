"""Gradients with respect to inputs: arrays of the batch that only embedding and head read.

An input is known by its number among the batch's arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.layers.kinds import Layers
from jaxpipe.runtime.tick.microbatches import Microbatches
from jaxpipe.runtime.types import Batch, Index, Key


@dataclasses.dataclass(frozen=True)
class WithInputs:
    """Microbatches with other values as inputs, so that a function of these can be differentiated.

    Args:
      batch: the microbatches.
      numbers: of the inputs.
      values: the inputs of the microbatch that is read.
    """

    batch: Microbatches
    numbers: tuple[int, ...]
    values: list[jax.Array]

    def at(self, i: Index) -> tuple[Batch, Key, Index]:
        """Implements `Microbatches`."""
        rows, rng, number = self.batch.at(i)
        leaves, structure = jax.tree.flatten(rows)
        for n, value in zip(self.numbers, self.values, strict=True):
            leaves[n] = value
        return jax.tree.unflatten(structure, leaves), rng, number

    def scale_of(self, i: Index) -> jax.Array | None:
        """Implements `Microbatches`."""
        return self.batch.scale_of(i)


def inputs_of(batch: Microbatches, numbers: tuple[int, ...], i: Index) -> list[jax.Array]:
    """The inputs of a microbatch; without any, nothing is read."""
    leaves = jax.tree.leaves(batch.at(i)[0]) if numbers else []
    return [leaves[n] for n in numbers]


def no_gradients(batch: Batch, numbers: tuple[int, ...]) -> list[jax.Array]:
    """The inputs' gradients ``[rows, m, ...]`` when nothing has run."""
    leaves = jax.tree.leaves(batch)
    return [jnp.zeros_like(leaves[n]) for n in numbers]


def add_gradients(sums: list[jax.Array], new: list[jax.Array], i: Index) -> list[jax.Array]:
    """The inputs' gradients with a share of microbatch i added."""

    def add(total: jax.Array, gradient: jax.Array) -> jax.Array:
        old = lax.dynamic_index_in_dim(total, i, 1, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, old + gradient, i, 1)

    return [add(*pair) for pair in zip(sums, new, strict=True)]


def read_by_layers(layers: Layers, batch: Batch, numbers: tuple[int, ...]) -> Iterator[str]:
    """Says which inputs are read by layers, whose backward has no part for the microbatch."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(batch)]
    for kind in layers.kinds:
        for n in kind.split.reads_of_context:
            if n in numbers:
                yield (
                    f"Pipeline.loss was differentiated with respect to batch{paths[n]}, which "
                    f"layer {kind.example} reads; only what the embedding and the head read has "
                    "a gradient. Let the embedding return it as a part of x."
                )
