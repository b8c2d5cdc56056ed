"""Conversion of trees from canonical to placed and back, with checks."""

import itertools
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import ArrayLike

from jaxpipe.runtime import host
from jaxpipe.runtime.layout.leaf import MeshLayout
from jaxpipe.runtime.layout.placed import Placed, other_orders
from jaxpipe.runtime.mesh import unusable_context
from jaxpipe.runtime.trees import (
    deleted,
    is_sequence,
    leaf_mismatches,
    mismatches,
    num_layers,
    shapes_of,
    strongly_typed,
)
from jaxpipe.runtime.types import Shapes, Shardings, Tree
from jaxpipe.schedule.problems import refuse

HOST_PARTS = 8
"""Number of parts in which a tree goes to the host; a few more where single leaves are larger."""
LEAST_PART = 2**26
"""Bytes below which a tree is not divided: every part is a program of its own to compile."""
METHODS = {
    "params": "pipe.place",
    "states": "pipe.place_states",
    "state": "pipe.optimizer_placing(optimizer).place",
}
"""Methods that place a tree, by the tree's name."""


class Placing:
    """Places and unplaces trees of one kind: parameters, states, or an optimizer's.

    Args:
      sharded: whether data shards split it.
      name: name of such a tree, for errors: "params", "states" or "state".
      on_host: whether both placed and canonical trees lie on the host.

    Attributes:
      placed: shapes and shardings of a placed tree.
      canonical: shapes and shardings of a canonical tree.
      specs: partition specs of a placed tree.
      shardings, canonical_shardings: shardings of both.
    """

    def __init__(
        self,
        layout: MeshLayout,
        *,
        sharded: bool,
        name: str,
        on_host: bool = False,
    ) -> None:
        # A canonical array is split over data, a placed one over stages: to go from one straight to
        # the other XLA would gather it whole on every device. In between it is split over both.
        between = layout.shardings(sharded=True)
        shapes = layout.placed_shapes(), layout.canonical_shapes()

        def place(tree: Tree) -> Tree:
            tree = host.to_devices(tree) if on_host else tree
            placed = strongly_typed(layout.place(tree))
            return jax.lax.with_sharding_constraint(placed, between)

        def unplace(tree: Tree) -> Tree:
            tree = host.to_devices(tree) if on_host else tree
            return layout.unplace(jax.lax.with_sharding_constraint(tree, between))

        self.specs = layout.specs(sharded=sharded)
        self.shardings = layout.shardings(sharded=sharded)
        self.canonical_shardings = layout.canonical_shardings()
        if on_host:
            self.shardings = host.shardings(shapes[0], self.shardings)
            self.canonical_shardings = host.shardings(shapes[1], self.canonical_shardings)
        self.placed = _lie(shapes[0], self.shardings)
        self.canonical = _lie(shapes[1], self.canonical_shardings)
        self._name = name
        self._place = jax.jit(place, out_shardings=self.shardings)
        self._unplace = jax.jit(unplace, out_shardings=self.canonical_shardings)
        self._undo = unplace

    def place(self, tree: Tree) -> Tree:
        """Places a canonical tree."""
        refuse(self.canonical_problems(self._name, tree))
        return self._place(_spread(tree, self.canonical_shardings))

    def unplace(self, tree: Tree, *, dtypes: bool = True) -> Tree:
        """Undoes `place`; ``dtypes`` says whether dtypes must agree, too."""
        refuse(self.problems("placed", tree, dtypes=dtypes))
        return self._unplace(tree)

    def settled(self, tree: Tree) -> Tree:
        """A placed tree in which numbers, and arrays that have been put nowhere, lie as the others
        do: a jitted function would take them for arguments of another kind, and compile again."""
        structures: list[Any] = [jax.tree.structure(each) for each in (tree, self.placed)]
        if structures[0] != structures[1]:
            return tree  # which is refused where it is compared

        def settle(leaf: object, expected: jax.ShapeDtypeStruct) -> object:
            if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
                return leaf
            if isinstance(leaf, jax.Array) and leaf.committed and not leaf.weak_type:
                return leaf  # as a program returns it
            fits = not mismatches("leaf", leaf, expected, dtypes=not isinstance(leaf, int))
            return _put(np.asarray(leaf, expected.dtype), expected.sharding) if fits else leaf

        return jax.tree.map(settle, tree, self.placed)

    def to_host(self, tree: Tree) -> Tree:
        """Unplaces a tree into the memory of the host, if devices have some, part by part: beside
        the placed tree they hold one part of the canonical tree at a time (`HOST_PARTS`), or all of
        a small one (`LEAST_PART`)."""
        refuse(self.problems("placed", tree))
        leaves: list[jax.Array] = []
        for part in self.parts:
            leaves += jax.block_until_ready(part(tree))
        return jax.tree.unflatten(jax.tree.structure(self.canonical), leaves)

    @cached_property
    def parts(self) -> list[jax.stages.Wrapped]:
        """Programs that each unplace some leaves, and together all of them."""
        shardings = jax.tree.leaves(host.shardings_if_any(self.canonical, self.canonical_shardings))
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.canonical)]
        numbers = np.ceil(np.cumsum(sizes) / max(sum(sizes) / HOST_PARTS, LEAST_PART)).tolist()

        def taking(first: int, last: int) -> jax.stages.Wrapped:
            def take(tree: Tree) -> list[jax.Array]:
                return jax.tree.leaves(self._undo(tree))[first:last]

            return jax.jit(take, out_shardings=shardings[first:last])

        cuts = [0, *(n for n in range(1, len(sizes)) if numbers[n] != numbers[n - 1]), len(sizes)]
        return [taking(first, last) for first, last in itertools.pairwise(cuts)]

    def problems(self, name: str, tree: Tree, *, dtypes: bool = True) -> list[str]:
        """Lists what is wrong with a placed tree, or with the place where it is used."""
        lines = mismatches(name, tree, self.placed, dtypes=dtypes)
        if lines:
            lines = self._explained(name, tree, lines)
        return [*unusable_context(), *deleted(**{name: tree}), *lines]

    def _explained(self, name: str, tree: Tree, lines: list[str]) -> list[str]:
        """Says what to do about mismatches of a placed tree, if need be in place of them."""
        method = METHODS[self._name]
        if not mismatches(name, tree, self.canonical, dtypes=False):
            return [f"{name} is in canonical order, not placed; call `{method}` first."]
        if orders := list(other_orders(name, tree, self.placed)):
            undo = method.replace("pipe", "other", 1).replace("place", "unplace")
            how = f"`{method}({undo}({name}))`"
            return [*orders, f"Give it to the pipeline that placed it, or move it: {how}."]
        if isinstance(self.placed, Placed) and isinstance(tree, dict):
            lines = list(leaf_mismatches(name, tree, self.placed)) or [
                f"{name} is a dict, which does not tell the order of its layers. Replace parts of "
                f"a placed tree by `{name} | {{...}}`, and save and restore canonical trees."
            ]
        is_cast = not mismatches(name, tree, self.placed, dtypes=False)
        must = f"{name} must be as `{method}` returns it."
        return [*lines, f"Cast {name} to these dtypes." if is_cast else must]

    def canonical_problems(self, name: str, tree: Tree) -> list[str]:
        """Lists what is wrong with a canonical tree, or with the place where it is used."""
        return [*unusable_context(), *self._other_than_canonical(name, tree)]

    def _other_than_canonical(self, name: str, tree: Tree) -> list[str]:
        tree = _contained_alike(tree, self.canonical)
        lines = mismatches(name, tree, self.canonical)
        if not lines:
            return []
        if not mismatches(name, tree, self.placed, dtypes=False):
            return [f"{name} is placed already."]
        if not mismatches(name, tree, self.canonical, dtypes=False):
            return [*lines, f"Cast {name} to these dtypes."]
        if isinstance(self.canonical, dict) and not isinstance(tree, dict):
            lines.append(f"The state of an optimizer is placed by `{METHODS['state']}`.")
        return [*_other_layers(name, tree, self.canonical), *lines]


def _contained_alike(tree: Tree, expected: Shapes) -> Tree:
    """The tree with its layers in a tuple or a list, as they are expected: both are as good."""
    if is_sequence(tree) and is_sequence(expected):
        return type(expected)(tree)
    if isinstance(tree, dict) and isinstance(expected, dict) and "layers" in tree:
        layers = _contained_alike(tree["layers"], expected["layers"])
        return tree | {"layers": layers}
    return tree


def _other_layers(name: str, tree: Tree, expected: Shapes) -> Iterator[str]:
    """Says it if layers are given in the other form, or too many or too few of them."""
    if not isinstance(tree, dict) or "layers" not in tree:
        return
    at, layers, depth = f"{name}['layers']", tree["layers"], num_layers(expected["layers"])
    if is_sequence(layers) != is_sequence(expected["layers"]):
        forms = "a tuple of one tree per layer", "one tree whose arrays stack all layers"
        found, wanted = forms if is_sequence(layers) else forms[::-1]
        yield f"{at} is {found}; expected {wanted}."
    elif is_sequence(layers):
        if len(layers) != depth:
            yield f"{at} holds {len(layers)} layers; expected {depth}."
    else:
        leading = {leaf.shape[:1] for leaf in jax.tree.leaves(shapes_of(layers))}
        if len(leading) == 1 and leading.isdisjoint({(), (depth,)}):
            yield f"{at} holds {leading.pop()[0]} layers; expected {depth}."


def _lie(shapes: Shapes, shardings: Shardings) -> Shapes:
    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings)


def _spread(tree: Tree, shardings: Shardings) -> Tree:
    """Splits every array of a tree as its sharding says, before a program needs it whole."""

    def spread(leaf: ArrayLike, sharding: Sharding) -> jax.Array:
        if isinstance(leaf, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(leaf, sharding)
        if isinstance(leaf, jax.Array) and (
            jax.process_count() == 1 or not leaf.is_fully_addressable
        ):
            return jax.device_put(leaf, sharding)
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
        return _put(np.asarray(leaf, dtype), sharding)

    arrays = map(spread, jax.tree.leaves(tree), jax.tree.leaves(shardings))
    return jax.tree.unflatten(jax.tree.structure(shardings), arrays)


def _put(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """Puts an array that every process has; jax would compare those of several processes."""
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
