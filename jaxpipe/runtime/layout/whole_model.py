"""Layouts of all parameters, and of what belongs to them: canonical order, and placed order.

A placed leaf of embedding or head is padded so that its split dimension divides by the number of
stages. Sharding over data splits one further dimension of each leaf.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.tree_util import DictKey

from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layout.alike import ByPlace, Stacked, Unrolled
from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.runtime.layout.leaf import Leaf, MeshLayout
from jaxpipe.runtime.layout.moving import LayersOnMesh
from jaxpipe.runtime.layout.packed import Packed
from jaxpipe.runtime.layout.placed import Placed
from jaxpipe.runtime.layout.splits import Splits, read_splits
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.trees import combine, form_of, is_sequence, select
from jaxpipe.runtime.types import Leaves, OuterParams, Params, Path, Shapes, Tree, Unit
from jaxpipe.schedule.placement import Placement

LAYOUTS = {"stacked": (Stacked, Packed), "unrolled": (Unrolled, ByPlace)}
"""Layouts of layers that are alike, and of a sequence of trees, by name."""


def layer_layout(layers: Tree, weights: str) -> type[LayerLayout]:
    """Chooses the layout of canonical layers."""
    return LAYOUTS[weights][is_sequence(layers)]


SHARED = "shared"
"""The entry of parameters that all layers read, if there is one."""
FROZEN = "frozen"
"""The entry of placed parameters with those that are not trained, if there are any."""


def outer_of(params: Mapping[str, Tree]) -> OuterParams:
    """Takes the part of a tree that belongs to no one layer: embedding, head, shared parameters."""
    return {name: tree for name, tree in params.items() if name not in ("layers", FROZEN)}


def trained_part(placed: Placed) -> Placed:
    """Leaves out the placed parameters that are not trained."""
    trained = {name: tree for name, tree in placed.items() if name != FROZEN}
    return Placed(trained, placed.order)


def frozen_part(placed: Placed) -> dict[str, Placed]:
    """Undoes `trained_part`, with `|`."""
    return {FROZEN: placed[FROZEN]} if FROZEN in placed else {}


@dataclasses.dataclass(frozen=True)
class Layout(MeshLayout):
    """The layout of every parameter of a model on a mesh.

    Args:
      outer: embedding, head and the parameters that layers share, every array a `Leaf`.
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
        return self._layers_on_mesh.placed | outer

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

        outer = jax.tree.map(pad, outer_of(tree), self.outer)
        return self._layers_on_mesh.place(tree["layers"]) | outer

    def unplace(self, tree: Placed) -> Params:
        outer = jax.tree.map(
            lambda w, leaf: w[tuple(map(slice, leaf.shape))], outer_of(tree), self.outer
        )
        layers = Placed({"layers": tree["layers"]}, tree.order)
        return {"layers": self._layers_on_mesh.unplace(layers), **outer}

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
    """The layout of all parameters where some are not trained."""

    def __init__(self, trained: Layout, frozen: Layout) -> None:
        self.mesh, self.axes = trained.mesh, trained.axes
        self.trained, self.frozen = trained, frozen

    @property
    def canonical(self) -> Leaves:
        return combine(self.trained.canonical, self.frozen.canonical)

    @property
    def placed(self) -> Leaves:
        return self.trained.placed | {FROZEN: self.frozen.placed}

    def place(self, tree: Params) -> Placed:
        trained, frozen = (select(tree, part.canonical) for part in (self.trained, self.frozen))
        return self.trained.place(trained) | {FROZEN: self.frozen.place(frozen)}

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


def layer_by_layer(params: Layout) -> Shapes:
    """Shapes of the parameters with one tree per layer."""
    layers = tuple(params.layers.shape_of(n) for n in range(params.num_layers))
    return {**params.canonical_shapes(), "layers": layers}


class TreeLayout(MeshLayout):
    """Layout of a tree that holds something for every parameter, such as an optimizer's state.

    A *component* of such a tree is shaped like the parameters that are trained, with one tree per
    layer. Its leaves may have other shapes and dtypes than the parameters they belong to, or be
    absent. Leaves that belong to no parameter, such as a count, are replicated.

    Args:
      shapes: shapes of the tree, with one tree per layer in each component.

    Attributes:
      components: layout of each component, in the order of the tree.
      rest: the leaves that belong to no parameter, each a `Leaf`.
      units: what each leaf belongs to: the number of a layer, the name of another part, such as
        "embed", or None.
    """

    def __init__(self, shapes: Shapes, params: Layout) -> None:
        self.mesh, self.axes = params.mesh, params.axes
        is_component = _component_test(params)
        self._tree: Tree
        nodes, self._tree = jax.tree.flatten(shapes, is_leaf=is_component)
        self._is_component = list(map(is_component, nodes))
        components, rest = self._divide(nodes)
        self.components = [_layout(node, params) for node in components]
        self.rest = [Leaf(leaf.shape, leaf.dtype, None, None) for leaf in rest]
        units = [_units(node) if is_component(node) else [None] for node in nodes]
        self.units = list(itertools.chain(*units))

    def split(self, tree: Tree) -> tuple[list[Tree], list[Tree]]:
        """Splits a tree into its components and its other leaves."""
        return self._divide(self._tree.flatten_up_to(tree))

    def _divide(self, nodes: Sequence[Tree]) -> tuple[list[Tree], list[Tree]]:
        pairs = list(zip(nodes, self._is_component, strict=True))
        components = [node for node, is_component in pairs if is_component]
        return components, [node for node, is_component in pairs if not is_component]

    def join(self, components: Sequence[Tree], rest: Sequence[Tree]) -> Tree:
        """Undoes `split`."""
        sources = iter(rest), iter(components)
        return jax.tree.unflatten(self._tree, [next(sources[n]) for n in self._is_component])

    @property
    def canonical(self) -> Leaves:
        """The canonical tree; layers that are alike are stacked if those of the parameters are."""
        return self.join([component.canonical for component in self.components], self.rest)

    @property
    def placed(self) -> Leaves:
        return self.join([component.placed for component in self.components], self.rest)

    def place(self, tree: Tree) -> Tree:
        components, rest = self.split(tree)
        return self.join(list(map(Layout.place, self.components, components)), rest)

    def unplace(self, tree: Tree) -> Tree:
        components, rest = self.split(tree)
        return self.join(list(map(Layout.unplace, self.components, components)), rest)


def _component_test(params: Layout) -> Callable[[Tree], bool]:
    names = {*params.outer, "layers"}

    def is_component(node: Tree) -> bool:
        if not isinstance(node, dict) or node.keys() != names:
            return False
        layers = node["layers"]
        return isinstance(layers, optax.MaskedNode) or (
            type(layers) is tuple and len(layers) == params.num_layers
        )

    return is_component


def _units(component: Shapes) -> list[Unit | None]:
    paths = [path for path, _ in jax.tree.leaves_with_path(component)]
    return [path[1].idx if path[0].key == "layers" else path[0].key for path in paths]


def _layout(component: Shapes, params: Layout) -> Layout:
    """Makes the layout of a component: that of the parameters, as far as its shapes are theirs."""
    whole, outer = outer_of(component), outer_of(params.outer)
    splits = _splits(whole, outer, params)
    alike = dict(_alike(whole, outer))

    def leaf(path: Path, shape: jax.ShapeDtypeStruct) -> Leaf:
        if path in alike:
            return dataclasses.replace(alike[path], dtype=shape.dtype)
        return splits.leaf(path, shape)

    layers = _layers(component["layers"], params)
    leaves = jax.tree.map_with_path(leaf, whole)
    return Layout(layers, leaves, params.mesh, params.axes)


def _layers(layers: Shapes, params: Layout) -> LayerLayout:
    like, rows = type(params.layers), params.layers.rows
    if isinstance(layers, optax.MaskedNode):
        return Stacked(layers, rows, _splits(layers, (), params))
    own = tuple(params.layers.canonical_of(n) for n in range(params.num_layers))
    forms = list(map(form_of, layers))
    if is_sequence(params.layers.canonical) or any(form != forms[0] for form in forms):
        differing = ByPlace if like.own_arrays else Packed
        return differing(layers, rows, _splits(layers, own, params))

    def stacked(w: Tree) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(layers), *w.shape), w.dtype)

    splits = _splits(layers[0], own[0], params)
    return like(jax.tree.map(stacked, layers[0]), rows, splits)


def _alike(shapes: Shapes, own: Leaves) -> Iterator[tuple[Path, Leaf]]:
    """Yields the parameters that have the shape of the component's array, by path."""
    shape_of = {path: w.shape for path, w in jax.tree.leaves_with_path(shapes)}
    for path, leaf in jax.tree.leaves_with_path(own):
        if shape_of.get(path) == leaf.shape:
            yield path, leaf


def _splits(shapes: Shapes, own: Leaves, params: Layout) -> Splits:
    """Makes the splits of a component's arrays; model axes split them like the parameters."""
    data = {name: params.mesh.shape[name] for name in params.axes.split}
    return Splits(data, {path: leaf.splits for path, leaf in _alike(shapes, own)})
