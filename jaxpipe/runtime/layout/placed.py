"""Trees that lie on the devices of a pipeline, each with the order in which stages hold its layers.

Two pipelines of one model may have placed arrays of the same shapes and yet hold other layers in
them: 1F1B gives stage 0 of four the first two of eight layers, ZB-V the first and the last. So a
placed tree carries its order as a part of its structure, where `jax.tree.map`, `jax.jit` and optax
keep it, and a pipeline refuses trees in an order that is not its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import numpy as np
from jax.tree_util import DictKey, keystr

from jaxpipe.runtime.layout.leaf import AxisSplit
from jaxpipe.runtime.types import Leaves, Tree

_MOST_LAYERS = 8
"""Number of a stage's layers that a message names."""


@dataclasses.dataclass(frozen=True)
class Order:
    """The order in which stages hold the layers of a tree; equal orders hold the same elements at
    the same indices of arrays of one shape.

    Args:
      layers: canonical numbers of every stage's layers, -1 where a row holds none.
      splits: for every array, how devices along model axes share it, where that moves elements.
    """

    layers: tuple[tuple[int, ...], ...]
    splits: tuple[tuple[AxisSplit, ...], ...] = ()

    @classmethod
    def of_rows(
        cls, rows: np.ndarray, canonical: Leaves, moves: Callable[[AxisSplit], bool]
    ) -> Order:
        """Makes the order of ``rows`` ``[stages, chunks, layers]`` of canonical layers.

        Args:
          moves: whether the number of devices along a split changes where elements lie.
        """
        leaves = jax.tree.leaves(canonical)
        splits = tuple(tuple(s for s in leaf.splits if s.size > 1 and moves(s)) for leaf in leaves)
        stages = rows.reshape(len(rows), -1).tolist()
        return cls(tuple(map(tuple, stages)), splits if any(splits) else ())

    def difference(self, expected: Order) -> str:
        """Says in which stage, or in what else, another order differs."""
        for stage, (here, there) in enumerate(zip(self.layers, expected.layers, strict=False)):
            if here != there:
                return f"stage {stage} holds {_named(here)}; expected {_named(there)}"
        if len(self.layers) != len(expected.layers):
            return f"it lies on {len(self.layers)} stages; expected {len(expected.layers)}"
        return "the mesh's model axes share its arrays in other parts"


def _named(layers: tuple[int, ...]) -> str:
    held = [str(n) for n in layers if n >= 0]
    more = ", ..." if len(held) > _MOST_LAYERS else ""
    return f"layers {', '.join(held[:_MOST_LAYERS])}{more}" if held else "no layers"


class Placed(Mapping[str, Tree]):
    """Parameters, or what is shaped like them, as they lie on the devices.

    It is a mapping of "layers", "embed", "head" and the like to trees of arrays, and a pytree whose
    structure holds the order of its layers. ``placed | {"head": head}`` replaces parts.

    Args:
      parts: trees by name.
      order: the order in which stages hold the layers of ``parts["layers"]``.
    """

    def __init__(self, parts: Mapping[str, Tree], order: Order) -> None:
        self._parts, self.order = dict(parts), order

    def __getitem__(self, name: str) -> Tree:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __or__(self, other: Mapping[str, Tree]) -> Placed:
        return Placed({**self._parts, **other}, self.order)

    def __repr__(self) -> str:
        return f"Placed({self._parts!r})"


def _flatten(placed: Placed) -> tuple[list[tuple[DictKey, Tree]], tuple[tuple[str, ...], Order]]:
    names = tuple(sorted(placed))
    return [(DictKey(name), placed[name]) for name in names], (names, placed.order)


def _unflatten(structure: tuple[tuple[str, ...], Order], parts: Iterable[Tree]) -> Placed:
    names, order = structure
    return Placed(dict(zip(names, parts, strict=True)), order)


jax.tree_util.register_pytree_with_keys(Placed, _flatten, _unflatten)


def orders(tree: Tree) -> dict[str, Order]:
    """The orders of the placed trees within a tree, by path."""
    nodes = jax.tree.leaves_with_path(tree, is_leaf=lambda node: isinstance(node, Placed))
    return {keystr(path): node.order for path, node in nodes if isinstance(node, Placed)}


def other_orders(name: str, tree: Tree, expected: Tree) -> Iterator[str]:
    """Says which placed trees within a tree hold their layers in another order than expected."""
    held = orders(tree)
    for path, order in orders(expected).items():
        if path in held and held[path] != order:
            yield f"{name}{path} was placed in another order: {held[path].difference(order)}."
