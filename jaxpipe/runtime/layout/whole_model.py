"""Layout of all parameters: canonical layer order outside, placed order on the devices.

A placed leaf of embedding or head is padded so that its split dimension divides by the number of
stages. Sharding over data splits one further dimension of each leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import DictKey

from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layout.alike import Stacked, Unrolled
from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.runtime.layout.leaf import Leaf, MeshLayout
from jaxpipe.runtime.layout.moving import LayersOnMesh
from jaxpipe.runtime.layout.packed import Packed
from jaxpipe.runtime.layout.splits import read_splits
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.trees import combine, is_sequence, select
from jaxpipe.runtime.types import Leaves, OuterParams, Params, Path, Placed, Tree
from jaxpipe.schedule.placement import Placement

LAYOUTS: dict[str, type[LayerLayout]] = {"stacked": Stacked, "unrolled": Unrolled}
"""Layouts of layers that are alike, by name."""


def layer_layout(layers: Params, weights: str) -> type[LayerLayout]:
    """Chooses the layout of canonical layers: packed for a sequence of trees, else by name."""
    return Packed if is_sequence(layers) else LAYOUTS[weights]


SHARED = "shared"
"""The entry of parameters that all layers read, if there is one."""
FROZEN = "frozen"
"""The entry of placed parameters with those that are not trained, if there are any."""


def outer_of(params: Params) -> OuterParams:
    """Takes the part of a tree that belongs to no one layer: embedding, head, shared parameters."""
    return {name: tree for name, tree in params.items() if name not in ("layers", FROZEN)}


def trained_part(placed: Placed) -> Placed:
    """Leaves out the placed parameters that are not trained."""
    return {name: tree for name, tree in placed.items() if name != FROZEN}


def frozen_part(placed: Placed) -> Placed:
    """Undoes `trained_part`, with `|`."""
    return {FROZEN: placed[FROZEN]} if FROZEN in placed else {}


@dataclasses.dataclass(frozen=True)
class Layout(MeshLayout):
    """The layout of every parameter of a model on a mesh.

    Args:
      layers: layout of the layers.
      outer: embedding, head and the parameters that layers share, every array a `Leaf`.
      mesh: the mesh.
      axes: names of its axes.
    """

    layers: LayerLayout
    outer: OuterParams
    mesh: Mesh
    axes: Axes

    @property
    def num_layers(self) -> int:
        return int(self.layers.rows.max()) + 1

    @property
    def canonical(self) -> Leaves:
        return {"layers": self.layers.canonical, **self.outer}

    @property
    def placed(self) -> Leaves:
        outer = jax.tree.map(lambda leaf: leaf.padded(self.num_stages), self.outer)
        return {"layers": self._layers_on_mesh.placed, **outer}

    @property
    def _layers_on_mesh(self) -> LayersOnMesh:
        return LayersOnMesh(self.layers, self.mesh, self.axes)

    def place(self, tree: Params) -> Placed:
        """Places parameters, or anything shaped like them."""

        def pad(w: jax.Array, leaf: Leaf) -> jax.Array:
            if leaf.stage_dim is None:
                return w
            padded = leaf.padded(self.num_stages).shape
            return jnp.pad(w, [(0, after - n) for n, after in zip(w.shape, padded, strict=True)])

        layers = self._layers_on_mesh.place(tree["layers"])
        return {"layers": layers, **jax.tree.map(pad, outer_of(tree), self.outer)}

    def unplace(self, tree: Placed) -> Params:
        outer = jax.tree.map(
            lambda w, leaf: w[tuple(map(slice, leaf.shape))], outer_of(tree), self.outer
        )
        return {"layers": self._layers_on_mesh.unplace(tree["layers"]), **outer}

    @property
    def whole_outer(self) -> Layout:
        """The layout with all of embedding and head on every stage."""
        whole = partial(dataclasses.replace, stage_dim=None)
        return dataclasses.replace(self, outer=jax.tree.map(whole, self.outer))

    @property
    def local(self) -> Layout:
        """The layout of a device's parts of arrays that model axes split."""
        outer = jax.tree.map(lambda leaf: leaf.local, self.outer)
        return dataclasses.replace(self, layers=self.layers.local, outer=outer)


class WithFrozen(MeshLayout):
    """The layout of all parameters where some are not trained.

    Args:
      trained: layout of the parameters that are trained.
      frozen: layout of the others, which lie in an entry of their own.
    """

    def __init__(self, trained: Layout, frozen: Layout) -> None:
        self.mesh, self.axes = trained.mesh, trained.axes
        self.trained, self.frozen = trained, frozen

    @property
    def canonical(self) -> Leaves:
        return combine(self.trained.canonical, self.frozen.canonical)

    @property
    def placed(self) -> Leaves:
        return {**self.trained.placed, FROZEN: self.frozen.placed}

    def place(self, tree: Params) -> Placed:
        trained, frozen = (select(tree, part.canonical) for part in (self.trained, self.frozen))
        return {**self.trained.place(trained), FROZEN: self.frozen.place(frozen)}

    def unplace(self, tree: Placed) -> Params:
        trained = self.trained.unplace(trained_part(tree))
        return combine(trained, self.frozen.unplace(tree[FROZEN]))


def layer_rows(placement: Placement, layer_counts: Sequence[int]) -> np.ndarray:
    """Computes the canonical number of every layer of every chunk, int32
    ``[stages, chunks, layers]``; -1 where a chunk has fewer layers than the largest.
    """
    virtual_stages, counts = np.asarray(placement.virtual_stages), np.asarray(layer_counts)
    first = (np.cumsum(counts) - counts)[virtual_stages][..., None]
    layer = np.arange(counts.max())
    return np.where(layer < counts[virtual_stages][..., None], first + layer, -1).astype(np.int32)


def make_layouts(
    trained: Params,
    frozen: Params,
    model: Model,
    *,
    mesh: Mesh,
    axes: Axes,
    rows: np.ndarray,
    weights: str,
    together: bool,
) -> tuple[Layout, Layout | None]:
    """Makes the layouts of the parameters that are trained, and of the others, if there are any.

    The two trees have None where the other has an array; ``rows`` are as of `layer_rows`, and
    ``weights`` is for layers that are alike. If stages compute embedding and head together, they
    have the parts that `Model.stage_split` names. If the ends compute them, stages keep a part of
    every matrix between steps.
    """
    params, dims = combine(trained, frozen), dict(jax.tree.leaves_with_path(model.stage_split))
    splits, stages = read_splits(model.axis_split, params, mesh, axes), axes.num_stages(mesh)

    def leaf(path: Path, w: Tree) -> Leaf:
        leaf = splits.leaf(path, w, stage_dim=dims.get(path))
        return leaf if together or w.ndim < 2 else leaf.kept_by(stages)

    outer = jax.tree.map_with_path(leaf, outer_of(params))

    def layout(params: Params) -> Layout:
        of_layers = splits.part(DictKey("layers"))
        layers = layer_layout(params["layers"], weights)(params["layers"], rows, of_layers)
        return Layout(layers, select(outer, outer_of(params)), mesh, axes)

    return layout(trained), layout(frozen) if jax.tree.leaves(frozen) else None
