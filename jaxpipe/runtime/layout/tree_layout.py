"""Layout of a tree that holds something for every parameter, such as an optimizer's state.

A *component* of such a tree is shaped like the parameters that are trained, with one tree per
layer. Its leaves may have other shapes and dtypes than the parameters they belong to, or
be absent. Leaves that belong to no parameter, such as a count, are replicated.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpipe.runtime.layout.alike import Stacked
from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.runtime.layout.leaf import Leaf, MeshLayout
from jaxpipe.runtime.layout.packed import Packed
from jaxpipe.runtime.layout.splits import Splits
from jaxpipe.runtime.layout.whole_model import Layout, outer_of
from jaxpipe.runtime.types import Leaves, Path, Shapes, Tree, Unit


def layer_by_layer(params: Layout) -> Shapes:
    """Shapes of the parameters with one tree per layer."""
    layers = tuple(params.layers.shape_of(n) for n in range(params.num_layers))
    return {**params.canonical_shapes(), "layers": layers}


class TreeLayout(MeshLayout):
    """Layout of a tree of components.

    Args:
      shapes: shapes of the tree, with one tree per layer in each component.
      params: layout of the parameters.

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
    if like is Packed or any(_key(layer) != _key(layers[0]) for layer in layers):
        return Packed(layers, rows, _splits(layers, own, params))

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


def _key(tree: Shapes) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves]
