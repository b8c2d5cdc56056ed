"""Where parameters live: canonical layer order outside, placed order on the devices.

A placed layer leaf has shape ``[stages, chunks * layers_per_chunk, ...]``: stage d holds its chunks
one after the other, each padded with zeros to the largest. A placed outer leaf is padded so that
its split dimension divides by the number of stages. Sharding over data takes one further dimension
of each leaf.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.mesh import DATA, STAGE
from jaxpipe.schedule.table import TickTable

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How one parameter is laid out.

    Args:
      shape: canonical shape (of one layer, for layer parameters).
      dtype: its dtype.
      stage_dim: dimension split over stages, or None.
      data_dim: dimension split over data shards when sharded, or None where none divides.
    """

    shape: tuple[int, ...]
    dtype: Any
    stage_dim: int | None
    data_dim: int | None


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of every parameter of a model on a mesh.

    Args:
      layers: a tree of `Leaf`, one layer.
      outer: a tree of `Leaf`, ``{"embed", "head"}``.
      mesh: the device mesh.
      table: the schedule's tick table, for the placement and the layer counts.
    """

    layers: PyTree
    outer: PyTree
    mesh: Mesh
    table: TickTable

    @property
    def num_stages(self) -> int:
        return self.mesh.shape[STAGE]

    @property
    def first_layers(self) -> np.ndarray:
        """int32 ``[stages, chunks]``: the canonical number of each chunk's first layer."""
        starts = np.cumsum([0, *self.table.layer_counts[:-1]])
        held = self.table.schedule.placement.virtual_stages
        return np.asarray([[starts[s] for s in row] for row in held], np.int32)

    def _rows(self) -> np.ndarray:
        """Canonical layer of every placed row, ``[stages * rows]``; -1 for padding."""
        held = self.table.schedule.placement.virtual_stages
        room, counts = self.table.layers_per_chunk, self.table.layer_counts
        rows = np.full((len(held), len(held[0]), room), -1, np.int64)
        for d, chunks in enumerate(held):
            for c, s in enumerate(chunks):
                rows[d, c, : counts[s]] = self.first_layers[d, c] + np.arange(counts[s])
        return rows.reshape(-1)

    def place(self, params: PyTree) -> PyTree:
        """Canonical parameters, or anything shaped like them, in placed order."""
        rows = self._rows()

        def layer(w):
            placed = jnp.where(
                (rows >= 0).reshape(-1, *[1] * (w.ndim - 1)), w[np.maximum(rows, 0)], 0
            ).astype(w.dtype)
            return placed.reshape(self.num_stages, -1, *w.shape[1:])

        def outer(w, leaf: Leaf):
            if leaf.stage_dim is None:
                return w
            pads = [(0, 0)] * w.ndim
            pads[leaf.stage_dim] = (0, -w.shape[leaf.stage_dim] % self.num_stages)
            return jnp.pad(w, pads)

        ends = {name: params[name] for name in ("embed", "head")}
        return {
            "layers": jax.tree.map(layer, params["layers"]),
            **jax.tree.map(outer, ends, self.outer),
        }

    def unplace(self, placed: PyTree) -> PyTree:
        """Undoes `place`."""
        rows = self._rows()
        order = np.argsort(rows[rows >= 0])
        kept = np.flatnonzero(rows >= 0)[order]

        def layer(w):
            return w.reshape(-1, *w.shape[2:])[kept]

        def outer(w, leaf: Leaf):
            if leaf.stage_dim is None:
                return w
            return jax.lax.slice_in_dim(w, 0, leaf.shape[leaf.stage_dim], axis=leaf.stage_dim)

        ends = {name: placed[name] for name in ("embed", "head")}
        return {
            "layers": jax.tree.map(layer, placed["layers"]),
            **jax.tree.map(outer, ends, self.outer),
        }

    @property
    def shards(self) -> PyTree:
        """One data shard's part of every layer parameter, a tree of `jax.ShapeDtypeStruct`."""

        def shard(leaf: Leaf) -> jax.ShapeDtypeStruct:
            shape = list(leaf.shape)
            if leaf.data_dim is not None:
                shape[leaf.data_dim] //= self.mesh.shape[DATA]
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        return jax.tree.map(shard, self.layers)

    def placed_shapes(self) -> PyTree:
        """Shapes of the placed parameters."""

        def stacked(leaf: Leaf):
            rows = self.table.schedule.num_chunks * self.table.layers_per_chunk
            return jax.ShapeDtypeStruct((self.num_stages, rows, *leaf.shape), leaf.dtype)

        def outer(leaf: Leaf):
            shape = list(leaf.shape)
            if leaf.stage_dim is not None:
                shape[leaf.stage_dim] += -shape[leaf.stage_dim] % self.num_stages
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        return {
            "layers": jax.tree.map(stacked, self.layers),
            **jax.tree.map(outer, self.outer),
        }

    def specs(self, *, sharded: bool) -> PyTree:
        """Partition specs of the placed parameters, with the data axis used (ZeRO) or not."""

        def spec(leaf: Leaf, lead: tuple) -> P:
            dims: list[str | None] = [None] * len(leaf.shape)
            if leaf.stage_dim is not None:
                dims[leaf.stage_dim] = STAGE
            if sharded and leaf.data_dim is not None:
                dims[leaf.data_dim] = DATA
            return P(*lead, *dims)

        return {
            "layers": jax.tree.map(lambda leaf: spec(leaf, (STAGE, None)), self.layers),
            **jax.tree.map(lambda leaf: spec(leaf, ()), self.outer),
        }

    def canonical_specs(self) -> PyTree:
        """Partition specs of the canonical parameters, over all devices wherever a size divides."""

        def layer(leaf: Leaf) -> P:
            dims = [DATA if d == leaf.data_dim else None for d in range(len(leaf.shape))]
            return P(STAGE if sum(self.table.layer_counts) % self.num_stages == 0 else None, *dims)

        def outer(leaf: Leaf) -> P:
            dims: list[str | None] = [None] * len(leaf.shape)
            if leaf.stage_dim is not None and leaf.shape[leaf.stage_dim] % self.num_stages == 0:
                dims[leaf.stage_dim] = STAGE
            if leaf.data_dim is not None:
                dims[leaf.data_dim] = DATA
            return P(*dims)

        return {
            "layers": jax.tree.map(layer, self.layers),
            **jax.tree.map(outer, self.outer),
        }

    def shardings(self, *, sharded: bool) -> PyTree:
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), self.specs(sharded=sharded)
        )


def make_layout(params: PyTree, stage_split: PyTree, mesh: Mesh, table: TickTable) -> Layout:
    """Decides the layout of every parameter.

    Args:
      params: canonical parameters or their shapes.
      stage_split: `Model.stage_split`.
      mesh: the device mesh.
      table: the tick table.
    """
    data = mesh.shape[DATA]

    def leaf(shape: tuple[int, ...], dtype, stage_dim: int | None) -> Leaf:
        dims = [d for d, n in enumerate(shape) if d != stage_dim and n % data == 0 and n > 0]
        # The leading one: gathered along any other, XLA transposes whole weight buffers on GPUs.
        data_dim = dims[0] if dims and data > 1 else None
        return Leaf(tuple(shape), dtype, stage_dim, data_dim)

    ends = {name: params[name] for name in ("embed", "head")}
    leaves, tree = jax.tree.flatten(ends)
    none = [None] * len(leaves)
    dims = (
        none if stage_split is None else jax.tree.leaves(stage_split, is_leaf=lambda x: x is None)
    )
    outer = [leaf(w.shape, w.dtype, dim) for w, dim in zip(leaves, dims, strict=True)]
    return Layout(
        layers=jax.tree.map(lambda w: leaf(w.shape[1:], w.dtype, None), params["layers"]),
        outer=jax.tree.unflatten(tree, outer),
        mesh=mesh,
        table=table,
    )
