"""Sources of a microbatch's rows and key."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
from jax import lax

from jaxpipe.runtime.types import Batch, Index, Key


class Microbatches(Protocol):
    """Sources of a microbatch's rows and key."""

    def at(self, i: Index) -> tuple[Batch, Key, Index]:
        """A microbatch's rows, the key of its step, and its number within the step."""

    def scale_of(self, i: Index) -> jax.Array | None:
        """One over the weights of a microbatch's step, if its loss is weighted; see
        `jaxpipe.runtime.tick.fixed.Fixed.weighed`."""


def split_rows(batch: Batch, num_microbatches: int) -> Batch:
    """One data shard's leaves ``[rows, ...]`` as ``[rows of a microbatch, m, ...]``: a view."""
    return jax.tree.map(lambda w: w.reshape(-1, num_microbatches, *w.shape[1:]), batch)


class StepMicrobatches(NamedTuple):
    """The microbatches of one step: leaves ``[rows, m, ...]``, the step's key, or None, and the
    scale of weighted losses."""

    rows: Batch
    rng: Key
    scale: jax.Array | None = None

    def at(self, i: Index) -> tuple[Batch, Key, Index]:
        """Implements `Microbatches`."""

        def row(leaf: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(leaf, i, 1, keepdims=False)

        return jax.tree.map(row, self.rows), self.rng, i

    def scale_of(self, i: Index) -> jax.Array | None:
        """Implements `Microbatches`."""
        return self.scale
