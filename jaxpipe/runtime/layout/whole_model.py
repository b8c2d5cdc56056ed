"""Layout of all parameters: canonical layer order outside, placed order on the devices.

A placed layer array has shape ``[stages, ...]``, with a stage's part as a `LayerLayout` describes
it. A placed leaf of embedding or head is padded so that its split dimension divides by the number
of stages. Sharding over data splits one further dimension of each leaf.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey

from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.layout.moving import Moving, canonical_spec
from jaxpipe.runtime.layout.packed import Packed
from jaxpipe.runtime.layout.splits import Splits
from jaxpipe.runtime.layout.stacked import Stacked
from jaxpipe.runtime.layout.unrolled import Unrolled
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.trees import combine, is_sequence, select
from jaxpipe.runtime.types import Leaves, OuterParams, Params, Path, Placed, Shapes, States, Tree
from jaxpipe.schedule.lowering.table import TickTable

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
class Layout:
    """The layout of every parameter of a model on a mesh.

    Args:
      layers: layout of the layers.
      outer: embedding, head and the parameters that layers share, every array a `Leaf`.
      mesh: the mesh.
      axes: names of its axes.
      rows: canonical layer of every row, from `layer_rows`.
    """

    layers: LayerLayout
    outer: OuterParams
    mesh: Mesh
    axes: Axes
    rows: np.ndarray

    @property
    def num_layers(self) -> int:
        return int(self.rows.max()) + 1

    @property
    def num_stages(self) -> int:
        return self.axes.num_stages(self.mesh)

    def place(self, params: Params) -> Placed:
        """Brings canonical parameters, or anything shaped like them, into placed order."""

        def pad(w: jax.Array, leaf: Leaf) -> jax.Array:
            if leaf.stage_dim is None:
                return w
            padded = leaf.padded(self.num_stages).shape
            return jnp.pad(w, [(0, after - n) for n, after in zip(w.shape, padded, strict=True)])

        layers = self._moving.place(params["layers"])
        return {"layers": layers, **jax.tree.map(pad, outer_of(params), self.outer)}

    def unplace(self, placed: Placed) -> Params:
        """Undoes `place`."""
        outer = jax.tree.map(
            lambda w, leaf: w[tuple(map(slice, leaf.shape))], outer_of(placed), self.outer
        )
        return {"layers": self._moving.unplace(placed["layers"]), **outer}

    @property
    def _moving(self) -> Moving:
        return Moving(self.layers, self.rows, self.mesh, self.axes)

    def placed_shapes(self) -> Shapes:
        """Shapes of the placed parameters."""
        n = self.num_stages
        layers = jax.tree.map(lambda leaf: leaf.behind(n).struct(), self.layers.placed)
        outer = jax.tree.map(lambda leaf: leaf.padded(n).struct(), self.outer)
        return {"layers": layers, **outer}

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

    @property
    def canonical(self) -> Leaves:
        """The canonical parameters, every array a `Leaf`."""
        return {"layers": self.layers.canonical, **self.outer}

    def canonical_shapes(self) -> Shapes:
        """Shapes of the canonical parameters."""
        return jax.tree.map(Leaf.struct, self.canonical)

    def specs(self, *, sharded: bool) -> Tree:
        """Partition specs of the placed parameters, with the data axis used (ZeRO) or not."""

        def spec(leaf: Leaf, *lead: str) -> P:
            names = leaf.names(self.axes, sharded=sharded)
            return P(*lead, *[names.get(d) for d in range(len(leaf.shape))])

        layers = jax.tree.map(lambda leaf: spec(leaf, self.axes.stage), self.layers.placed)
        return {"layers": layers, **jax.tree.map(spec, self.outer)}

    def shardings(self, *, sharded: bool) -> Tree:
        """Shardings of the placed parameters, for `specs`."""
        return _shardings(self.mesh, self.specs(sharded=sharded))

    def canonical_shardings(self) -> Tree:
        """Shardings of canonical parameters, over all devices wherever a size divides."""
        spec = partial(canonical_spec, axes=self.axes, num_stages=self.num_stages)
        return _shardings(self.mesh, jax.tree.map(spec, self.canonical))


@dataclasses.dataclass(frozen=True)
class WithFrozen:
    """The layout of all parameters where some are not trained; its methods are those of `Layout`.

    Args:
      trained: layout of the parameters that are trained.
      frozen: layout of the others, which lie in an entry of their own.
    """

    trained: Layout
    frozen: Layout

    def place(self, params: Params) -> Placed:
        parts = [select(params, layout.canonical) for layout in (self.trained, self.frozen)]
        return {**self.trained.place(parts[0]), FROZEN: self.frozen.place(parts[1])}

    def unplace(self, placed: Placed) -> Params:
        trained = self.trained.unplace(trained_part(placed))
        return combine(trained, self.frozen.unplace(placed[FROZEN]))

    def placed_shapes(self) -> Shapes:
        return {**self.trained.placed_shapes(), FROZEN: self.frozen.placed_shapes()}

    def canonical_shapes(self) -> Shapes:
        return combine(self.trained.canonical_shapes(), self.frozen.canonical_shapes())

    def specs(self, *, sharded: bool) -> Tree:
        frozen = self.frozen.specs(sharded=sharded)
        return {**self.trained.specs(sharded=sharded), FROZEN: frozen}

    def shardings(self, *, sharded: bool) -> Tree:
        frozen = self.frozen.shardings(sharded=sharded)
        return {**self.trained.shardings(sharded=sharded), FROZEN: frozen}

    def canonical_shardings(self) -> Tree:
        return combine(self.trained.canonical_shardings(), self.frozen.canonical_shardings())


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The layout of the states of a model's layers; its methods are those of `Layout`."""

    layers: LayerLayout
    mesh: Mesh
    axes: Axes
    rows: np.ndarray

    @classmethod
    def of(cls, states: States, params: Layout) -> StateLayout:
        """Makes the layout of the layers' states from the layout of the parameters."""
        layers = layer_layout(states, weights="stacked")(states, params.rows, Splits())
        return cls(layers, params.mesh, params.axes, params.rows)

    def place(self, states: States) -> States:
        return self._moving.place(states)

    def unplace(self, placed: States) -> States:
        return self._moving.unplace(placed)

    @property
    def _moving(self) -> Moving:
        return Moving(self.layers, self.rows, self.mesh, self.axes)

    def placed_shapes(self) -> Shapes:
        """Shapes of the placed states."""
        stages = self.axes.num_stages(self.mesh)
        return jax.tree.map(lambda leaf: leaf.behind(stages).struct(), self.layers.placed)

    def canonical_shapes(self) -> Shapes:
        return jax.tree.map(Leaf.struct, self.layers.canonical)

    def specs(self, *, sharded: bool) -> Tree:
        """Partition specs over stages; states are never split over data."""
        return jax.tree.map(lambda _: P(self.axes.stage), self.layers.placed)

    def shardings(self, *, sharded: bool) -> Tree:
        """Shardings of the placed states, for `specs`."""
        return _shardings(self.mesh, self.specs(sharded=sharded))

    def canonical_shardings(self) -> Tree:
        """Shardings of canonical states, over stages wherever a size divides."""
        return _shardings(self.mesh, self._moving.canonical_specs)


def _shardings(mesh: Mesh, specs: Tree) -> Tree:
    return jax.tree.map(lambda spec: compiled_sharding(mesh, spec), specs)


def compiled_sharding(mesh: Mesh, spec: P) -> NamedSharding:
    """Makes a sharding as compiled programs return it: without axes of one device and final Nones.

    `jax.jit` takes an array whose sharding is only written differently for a new kind of argument.
    """

    def without_singles(dim: Any) -> Any:
        names = (dim,) if isinstance(dim, str) else dim or ()
        kept = tuple(name for name in names if mesh.shape[name] > 1)
        return kept[0] if len(kept) == 1 else kept or None

    dims = [without_singles(dim) for dim in spec]
    while dims and dims[-1] is None:
        dims.pop()
    return NamedSharding(mesh, P(*dims))


def layer_rows(table: TickTable) -> np.ndarray:
    """Computes the canonical number of every layer of every chunk, int32
    ``[stages, chunks, layers]``; -1 where a chunk has fewer layers than the largest.
    """
    virtual_stages = np.asarray(table.schedule.placement.virtual_stages)
    counts = np.asarray(table.layer_counts)
    first = (np.cumsum(counts) - counts)[virtual_stages][..., None]
    layer = np.arange(table.layers_per_chunk)
    return np.where(layer < counts[virtual_stages][..., None], first + layer, -1).astype(np.int32)


def make_layouts(
    trained: Params,
    frozen: Params,
    stage_split: Tree,
    splits: Splits,
    *,
    mesh: Mesh,
    axes: Axes,
    table: TickTable,
    weights: str,
) -> tuple[Layout, Layout | None]:
    """Makes the layouts of the parameters that are trained, and of the others, if there are any.

    The two trees have None where the other has an array; ``weights`` is for layers that are alike.
    If stages compute embedding and head together, they have the parts that ``stage_split`` names.
    If the ends compute them, stages keep a part of every matrix between steps.
    """
    rows, dims = layer_rows(table), dict(jax.tree.leaves_with_path(stage_split))
    stages = axes.num_stages(mesh)

    def leaf(path: Path, w: Tree) -> Leaf:
        leaf = splits.leaf(path, w, stage_dim=dims.get(path))
        return leaf if table.together or w.ndim < 2 else leaf.kept_by(stages)

    outer = jax.tree.map_with_path(leaf, outer_of(combine(trained, frozen)))

    def layout(params: Params) -> Layout:
        of_layers = splits.part(DictKey("layers"))
        layers = layer_layout(params["layers"], weights)(params["layers"], rows, of_layers)
        return Layout(layers, select(outer, outer_of(params)), mesh, axes, rows)

    return layout(trained), layout(frozen) if jax.tree.leaves(frozen) else None
