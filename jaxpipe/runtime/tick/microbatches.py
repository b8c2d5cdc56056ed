"""Microbatches: where their rows and keys come from, and gradients by the arrays that they cut.

Inputs are arrays of the batch whose gradients are wanted, each known by its number; only embedding
and head read them.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.types import Batch, Index, Key, Tree


class Microbatches(Protocol):
    """Sources of a microbatch's rows and key."""

    def at(self, i: Index) -> tuple[Batch, Key, Index]:
        """A microbatch's rows, the key of its step, and its number within the step."""

    def scale_of(self, i: Index) -> jax.Array | None:
        """One over the weights of a microbatch's step, if its loss is weighted; see
        `jaxpipe.runtime.tick.fixed.Fixed.weighed`."""


def split_rows(batch: Batch, num_microbatches: int, num_slices: int = 1) -> Batch:
    """One data shard's leaves ``[rows, ...]`` as ``[rows of a microbatch, m, ...]``: a view.

    With k slices, leaves ``[rows, sequence, ...]`` become ``[rows of a microbatch, m k, sequence /
    k, ...]``, also a view, and what has only rows is the same for all slices.
    """

    def split(w: jax.Array) -> jax.Array:
        if num_slices == 1:
            return w.reshape(-1, num_microbatches, *w.shape[1:])
        if w.ndim == 1:
            return jnp.repeat(w.reshape(-1, num_microbatches), num_slices, axis=1)
        length = w.shape[1] // num_slices
        return w.reshape(-1, num_microbatches * num_slices, length, *w.shape[2:])

    return jax.tree.map(split, batch)


def join_rows(parts: Tree, num_slices: int = 1) -> Tree:
    """Undoes `split_rows`; what has only rows is summed over the slices."""

    def join(w: jax.Array) -> jax.Array:
        if num_slices == 1:
            return w.reshape(-1, *w.shape[2:])
        if w.ndim == 2:
            return w.reshape(-1, num_slices).sum(axis=1)
        return w.reshape(-1, num_slices * w.shape[2], *w.shape[3:])

    return jax.tree.map(join, parts)


class StepMicrobatches(NamedTuple):
    """The microbatches of one step: leaves ``[rows, m, ...]``, the step's key, or None, and the
    scale of weighted losses."""

    rows: Batch
    rng: Key
    scale: jax.Array | None = None

    def at(self, i: Index) -> tuple[Batch, Key, Index]:
        def row(leaf: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(leaf, i, 1, keepdims=False)

        return jax.tree.map(row, self.rows), self.rng, i

    def scale_of(self, i: Index) -> jax.Array | None:
        return self.scale


def inputs_of(rows: Batch, numbers: tuple[int, ...]) -> list[jax.Array]:
    """The inputs among the rows of a microbatch, or of a batch."""
    leaves = jax.tree.leaves(rows)
    return [leaves[n] for n in numbers]


def with_inputs(rows: Batch, numbers: tuple[int, ...], values: list[jax.Array]) -> Batch:
    """The rows of a microbatch with other values as inputs."""
    leaves, structure = jax.tree.flatten(rows)
    for n, value in zip(numbers, values, strict=True):
        leaves[n] = value
    return jax.tree.unflatten(structure, leaves)


def add_input_gradients(sums: list[jax.Array], new: list[jax.Array], i: Index) -> list[jax.Array]:
    """The inputs' gradients ``[rows, m, ...]`` with a share of microbatch i added."""

    def add(total: jax.Array, gradient: jax.Array) -> jax.Array:
        old = lax.dynamic_index_in_dim(total, i, 1, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, old + gradient, i, 1)

    return list(map(add, sums, new))
