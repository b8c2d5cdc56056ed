"""Turning trees from canonical to placed and back, checked."""

from __future__ import annotations

import jax

from jaxpipe.runtime import checks
from jaxpipe.runtime.layout.whole_model import Layout, StateLayout
from jaxpipe.runtime.mesh import explicit_context
from jaxpipe.runtime.trees import strongly_typed
from jaxpipe.runtime.types import Tree
from jaxpipe.schedule.problems import refuse


class Placing:
    """Places and unplaces trees of one kind: parameters, or states.

    Args:
      layout: where such a tree lies.
      sharded: whether it is split over data (ZeRO-3).
      method: the method of `Pipeline` that places it, for errors.
    """

    def __init__(self, layout: Layout | StateLayout, *, sharded: bool, method: str) -> None:
        def place(tree: Tree) -> Tree:
            return strongly_typed(layout.place(tree))

        self.canonical, self.placed = layout.canonical_shapes(), layout.placed_shapes()
        self.shardings = layout.shardings(sharded=sharded)
        self.canonical_shardings = layout.canonical_shardings()
        self._method = method
        self._place = jax.jit(place, out_shardings=self.shardings)
        self._unplace = jax.jit(layout.unplace, out_shardings=self.canonical_shardings)

    def place(self, name: str, tree: Tree, *, dtypes: bool = True) -> Tree:
        """A canonical tree, placed; ``dtypes`` says whether dtypes must agree, too."""
        shapes = self.canonical, self.placed
        problems = checks.canonical(name, tree, *shapes, dtypes=dtypes)
        refuse([*explicit_context(), *problems])
        return self._place(tree)

    def unplace(self, tree: Tree, *, dtypes: bool = True) -> Tree:
        """Undoes `place`."""
        refuse(self.problems("placed", tree, dtypes=dtypes))
        return self._unplace(tree)

    def problems(self, name: str, tree: Tree, *, dtypes: bool = True) -> list[str]:
        """What is wrong with a placed tree, or with the place where it is used."""
        shapes = self.placed, self.canonical
        wrong = checks.placed(name, tree, *shapes, method=self._method, dtypes=dtypes)
        return [*explicit_context(), *wrong]
