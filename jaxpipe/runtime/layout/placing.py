"""Turning trees from canonical to placed and back, checked."""

from __future__ import annotations

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime import checks
from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.layout.whole_model import (
    Layout,
    compiled_sharding,
    layer_layout,
    layer_rows,
)
from jaxpipe.runtime.mesh import STAGE
from jaxpipe.runtime.trees import strongly_typed
from jaxpipe.runtime.types import Params, Placed, States
from jaxpipe.schedule.lowering.table import TickTable
from jaxpipe.schedule.problems import refuse


class PlacedParams:
    """Parameters, and what is shaped like them.

    Args:
      layout: where they lie.
      sharded: whether placed parameters are split over data.
    """

    def __init__(self, layout: Layout, *, sharded: bool) -> None:
        def place(params: Params) -> Placed:
            return strongly_typed(layout.place(params))

        self.canonical, self.placed = layout.canonical_shapes(), layout.placed_shapes()
        self.shardings = layout.shardings(sharded=sharded)
        self.canonical_shardings = layout.canonical_shardings()
        self._place = jax.jit(place, out_shardings=self.shardings)
        self._unplace = jax.jit(layout.unplace, out_shardings=self.canonical_shardings)

    def place(self, params: Params, *, dtypes: bool) -> Placed:
        """Canonical parameters, placed; ``dtypes`` says whether theirs must be the model's."""
        shapes = self.canonical, self.placed
        refuse(checks.canonical("params", params, *shapes, dtypes=dtypes))
        return self._place(params)

    def unplace(self, placed: Placed) -> Params:
        """Undoes `place`."""
        refuse(self.problems("placed", placed, dtypes=False))
        return self._unplace(placed)

    def problems(self, name: str, tree: Placed, *, dtypes: bool = True) -> list[str]:
        """What is wrong with placed parameters."""
        shapes = self.placed, self.canonical
        return checks.placed(name, tree, *shapes, method="place", dtypes=dtypes)


class PlacedStates:
    """The states of a model's layers.

    Args:
      states: their shapes, canonical; None for a model without.
      table: the tick table, for the placement and the layer counts.
      mesh: the device mesh.

    Attributes:
      layout: where they lie, or None.
      canonical: their shapes, or None.
      placed: shapes and shardings of the placed states, or None.
    """

    def __init__(self, states: States, table: TickTable, mesh: Mesh) -> None:
        self.layout: LayerLayout | None = None
        self.canonical = self.placed = None
        if states is None:
            return
        layout = layer_layout(states, weights="stacked")(states, layer_rows(table), 1)
        sharding = compiled_sharding(mesh, P(STAGE))

        def placed(leaf: Leaf) -> jax.ShapeDtypeStruct:
            shape = mesh.shape[STAGE], *leaf.shape
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        def place(states: States) -> States:
            return strongly_typed(layout.place(states))

        self.layout = layout
        self.canonical = jax.tree.map(Leaf.struct, layout.canonical)
        self.placed = jax.tree.map(placed, layout.placed)
        shardings = jax.tree.map(lambda _: sharding, self.placed)
        self._place = jax.jit(place, out_shardings=shardings)
        self._unplace = jax.jit(layout.unplace)

    def place(self, states: States) -> States:
        """Canonical states, placed."""
        if self.layout is None:
            raise ValueError(_NO_STATES)
        refuse(checks.canonical("states", states, self.canonical, self.placed))
        return self._place(states)

    def unplace(self, placed: States) -> States:
        """Undoes `place`."""
        if self.layout is None:
            raise ValueError(_NO_STATES)
        refuse(self.problems("placed", placed))
        return self._unplace(placed)

    def problems(self, name: str, tree: States) -> list[str]:
        """What is wrong with placed states."""
        if self.layout is None:
            return [] if tree is None else [_NO_STATES]
        if tree is None:
            return [f"{name}=None, but this model's layers keep states: see `pipe.place_states`."]
        return checks.placed(name, tree, self.placed, self.canonical, method="place_states")


_NO_STATES = "This model's layers keep no state: Pipeline was given no states."
