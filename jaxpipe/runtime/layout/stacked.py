"""Layers that are alike, stacked: one array per parameter, one row per layer."""

from __future__ import annotations

import jax
import numpy as np
from jax import lax

from jaxpipe.runtime.layout.layer_layout import LayerLayout, alike
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.layout.splits import Splits
from jaxpipe.runtime.types import Arrays, At, Index, Leaves, Params, Shapes, Stored


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

    def layer_at(self, at: At, example: int, *, slot: Index = None) -> Index:
        return self.piece_at(at, slot=slot)

    def piece_at(self, at: At, *, slot: Index = None) -> Index:
        _, chunk, number = at
        return (chunk if slot is None else slot) * self.num_pieces + number

    def read(self, arrays: Arrays, place: Index) -> Stored:
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, place, keepdims=False), arrays)

    def write(self, arrays: Arrays, place: Index, values: Stored) -> Arrays:
        return jax.tree.map(
            lambda w, value: lax.dynamic_update_index_in_dim(w, value.astype(w.dtype), place, 0),
            arrays,
            values,
        )
