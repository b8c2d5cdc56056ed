"""Layers that are alike, stacked: one array per parameter, one row per layer."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.layout import shares
from jaxpipe.runtime.layout.layer_layout import Combine, LayerLayout, alike
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.layout.shares import Share
from jaxpipe.runtime.layout.splits import Splits
from jaxpipe.runtime.types import Arrays, At, Index, Leaves, Params, Shapes, Stored


class _Place(NamedTuple):
    """A place in stacked arrays: a row, or a share of it."""

    row: Index
    share: Share | None


class Stacked(LayerLayout):
    """Parameters of layers that are alike, in one array per parameter."""

    def __init__(self, layers: Params, rows: np.ndarray, splits: Splits) -> None:
        _, self.num_chunks, self.num_pieces = rows.shape
        self.piece, self.canonical = alike(layers, splits)
        self.placed = self._chunks(self.num_chunks)

    def _chunks(self, count: int) -> Leaves:
        return jax.tree.map(lambda leaf: leaf.behind(count * self.num_pieces), self.piece)

    def slot_shapes(self, count: int) -> Shapes:
        return jax.tree.map(Leaf.struct, self._chunks(count))

    def layer_at(self, at: At, example: int, *, slot: Index = None) -> _Place:
        return self.piece_at(at, slot=slot)

    def piece_at(self, at: At, *, slot: Index = None, share: Share | None = None) -> _Place:
        _, chunk, number = at
        return _Place((chunk if slot is None else slot) * self.num_pieces + number, share)

    def read(self, arrays: Arrays, place: _Place) -> Stored:
        row, share = place
        if share is not None:
            return jax.tree.map(
                lambda leaf, w: shares.read_share(leaf, w, (row,), share), self.piece, arrays
            )
        return jax.tree.map(
            lambda w: lax.dynamic_index_in_dim(
                w, row, keepdims=False, allow_negative_indices=False
            ),
            arrays,
        )

    def write(self, arrays: Arrays, place: _Place, values: Stored) -> Arrays:
        row, share = place
        if share is not None:
            return jax.tree.map(
                lambda leaf, w, value: shares.write_share(leaf, w, (row,), share, value),
                self.piece,
                arrays,
                values,
            )
        return jax.tree.map(
            lambda w, value: lax.dynamic_update_index_in_dim(
                w, value.astype(w.dtype), row, 0, allow_negative_indices=False
            ),
            arrays,
            values,
        )

    def update(
        self, arrays: Arrays, place: _Place, values: Stored, combine: Combine = jnp.add
    ) -> Arrays:
        if place.share is not None:
            return super().update(arrays, place, values, combine)
        # XLA for GPUs reads a row in the kernel that writes it only if nothing stands between the
        # two, no reshape and no choice of a row's number; otherwise it copies the row first.

        def update(w: jax.Array, value: jax.Array) -> jax.Array:
            old = lax.dynamic_slice_in_dim(w, place.row, 1, allow_negative_indices=False)
            new = combine(old, value[None]).astype(w.dtype)
            return lax.dynamic_update_slice_in_dim(
                w, new, place.row, 0, allow_negative_indices=False
            )

        return jax.tree.map(update, arrays, values)
