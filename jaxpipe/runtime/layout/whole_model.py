"""Where all parameters live: canonical layer order outside, placed order on the devices.

A placed layer array has shape ``[stages, ...]``, with a stage's part as
`jaxpipe.runtime.layout.parameters` describes it. A placed outer leaf is padded so that its split
dimension divides by the number of stages. Sharding over data takes one further dimension of each
leaf.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.layout.packed import Packed
from jaxpipe.runtime.layout.parameters import Leaf, Stacked, Unrolled, make_leaf
from jaxpipe.runtime.mesh import DATA, STAGE
from jaxpipe.schedule.lowering.table import TickTable

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of every parameter of a model on a mesh.

    Args:
      layers: of the layers' parameters.
      outer: a tree of `Leaf`, ``{"embed", "head"}``.
      mesh: the device mesh.
    """

    layers: Stacked | Unrolled | Packed
    outer: PyTree
    mesh: Mesh

    @property
    def num_stages(self) -> int:
        return self.mesh.shape[STAGE]

    def place(self, params: PyTree) -> PyTree:
        """Canonical parameters, or anything shaped like them, in placed order."""

        def outer(w, leaf: Leaf):
            if leaf.stage_dim is None:
                return w
            pads = [(0, 0)] * w.ndim
            pads[leaf.stage_dim] = (0, -w.shape[leaf.stage_dim] % self.num_stages)
            return jnp.pad(w, pads)

        ends = {name: params[name] for name in ("embed", "head")}
        layers = self.layers.place(params["layers"])
        return {"layers": layers, **jax.tree.map(outer, ends, self.outer)}

    def unplace(self, placed: PyTree) -> PyTree:
        """Undoes `place`."""

        def outer(w, leaf: Leaf):
            if leaf.stage_dim is None:
                return w
            return jax.lax.slice_in_dim(w, 0, leaf.shape[leaf.stage_dim], axis=leaf.stage_dim)

        ends = {name: placed[name] for name in ("embed", "head")}
        layers = self.layers.unplace(placed["layers"])
        return {"layers": layers, **jax.tree.map(outer, ends, self.outer)}

    @property
    def placed(self) -> PyTree:
        """Every placed array as a `Leaf`; a stage's arrays without the stage dimension."""

        def outer(leaf: Leaf) -> Leaf:
            shape = list(leaf.shape)
            if leaf.stage_dim is not None:
                shape[leaf.stage_dim] += -shape[leaf.stage_dim] % self.num_stages
            return dataclasses.replace(leaf, shape=tuple(shape))

        return {"layers": self.layers.placed, **jax.tree.map(outer, self.outer)}

    def placed_shapes(self) -> PyTree:
        """Shapes of the placed parameters."""
        placed = self.placed
        layers = jax.tree.map(lambda leaf: leaf.behind(self.num_stages), placed["layers"])
        return jax.tree.map(Leaf.struct, placed | {"layers": layers})

    def canonical_shapes(self) -> PyTree:
        """Shapes of the canonical parameters."""
        return jax.tree.map(Leaf.struct, {"layers": self.layers.canonical, **self.outer})

    def specs(self, *, sharded: bool) -> PyTree:
        """Partition specs of the placed parameters, with the data axis used (ZeRO) or not."""

        def spec(leaf: Leaf, *lead: str) -> P:
            dims: list[str | None] = [None] * len(leaf.shape)
            if leaf.stage_dim is not None:
                dims[leaf.stage_dim] = STAGE
            if sharded and leaf.data_dim is not None:
                dims[leaf.data_dim] = DATA
            return P(*lead, *dims)

        return {
            "layers": jax.tree.map(lambda leaf: spec(leaf, STAGE), self.layers.placed),
            **jax.tree.map(spec, self.outer),
        }

    def canonical_specs(self) -> PyTree:
        """Partition specs of the canonical parameters, over all devices wherever a size divides."""

        def spec(leaf: Leaf) -> P:
            dims: list[str | None] = [None] * len(leaf.shape)
            if leaf.stage_dim is not None and leaf.shape[leaf.stage_dim] % self.num_stages == 0:
                dims[leaf.stage_dim] = STAGE
            if leaf.data_dim is not None:
                dims[leaf.data_dim] = DATA
            return P(*dims)

        return jax.tree.map(spec, {"layers": self.layers.canonical, **self.outer})

    def shardings(self, *, sharded: bool) -> PyTree:
        return jax.tree.map(
            lambda spec: compiled_sharding(self.mesh, spec), self.specs(sharded=sharded)
        )


def compiled_sharding(mesh: Mesh, spec: P) -> NamedSharding:
    """A sharding as compiled programs return it: without axes of one device and final Nones.

    `jax.jit` takes an array whose sharding is only written differently for a new kind of argument.
    """
    dims = [None if dim is None or mesh.shape[dim] == 1 else dim for dim in spec]
    while dims and dims[-1] is None:
        dims.pop()
    return NamedSharding(mesh, P(*dims))


def layer_rows(table: TickTable) -> np.ndarray:
    """Canonical number of every layer of every chunk, int32 ``[stages, chunks, layers]``; -1 where
    a chunk has fewer layers than the largest.
    """
    held = table.schedule.placement.virtual_stages
    counts = np.asarray(table.layer_counts)
    first = (np.cumsum(counts) - counts)[np.asarray(held)][..., None]
    layer = np.arange(table.layers_per_chunk)
    return np.where(layer < counts[np.asarray(held)][..., None], first + layer, -1).astype(np.int32)


LAYOUTS: dict[str, type[Stacked] | type[Unrolled]] = {"stacked": Stacked, "unrolled": Unrolled}
"""How layers that are alike may lie, by name."""


def make_layers(
    layers: PyTree, table: TickTable, *, data: int, weights: str = "stacked"
) -> Stacked | Unrolled | Packed:
    """The layout of what every layer has; packed if ``layers`` is a tuple of trees.

    Args:
      layers: canonical, arrays or shapes.
      table: the tick table, for the placement and the layer counts.
      data: number of parts its arrays may be split into.
      weights: a name in `LAYOUTS`, for layers that are alike.
    """
    layout = Packed if isinstance(layers, tuple) else LAYOUTS[weights]
    return layout(layers, layer_rows(table), data)


def make_layout(
    params: PyTree, stage_split: PyTree, mesh: Mesh, table: TickTable, *, weights: str
) -> Layout:
    """Decides the layout of every parameter.

    Args:
      params: canonical parameters or their shapes.
      stage_split: `Model.stage_split`.
      mesh: the device mesh.
      table: the tick table.
      weights: as for `make_layers`.
    """
    data = mesh.shape[DATA]
    ends = {name: params[name] for name in ("embed", "head")}
    leaves, tree = jax.tree.flatten(ends)
    none = [None] * len(leaves)
    dims = (
        none if stage_split is None else jax.tree.leaves(stage_split, is_leaf=lambda x: x is None)
    )
    outer = [
        make_leaf(w.shape, w.dtype, data=data, stage_dim=dim)
        for w, dim in zip(leaves, dims, strict=True)
    ]
    layers = make_layers(params["layers"], table, data=data, weights=weights)
    return Layout(layers, jax.tree.unflatten(tree, outer), mesh)
