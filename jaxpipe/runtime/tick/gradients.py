"""What becomes of gradients: `Kept` until the step ends, or `Reduced` chunk by chunk."""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.barriers import tie
from jaxpipe.runtime.layout.data_axis import reduce_gradients
from jaxpipe.runtime.layout.parameters import Leaf
from jaxpipe.runtime.mesh import DATA
from jaxpipe.runtime.tick.carried import Carried
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.schedule.lowering.table import Cell, Outer, Row, Transfer

PyTree = Any


class GradientSink(abc.ABC):
    """What becomes of gradients."""

    @abc.abstractmethod
    def shapes(self, fixed: Fixed) -> dict[str, PyTree]:
        """Shapes of its buffers, by name: "gradients", the sums of layers, and what they become."""

    def finished(self, buffers: dict[str, PyTree]) -> PyTree:
        """What finished gradients have become when nothing has run; ``buffers`` of zeros."""
        return buffers.get("reduced")

    @abc.abstractmethod
    def add(
        self, fixed: Fixed, sums: PyTree, cell: Cell, layer, example: int, stored: PyTree
    ) -> PyTree:
        """The sums of layers with the gradient of one, for one microbatch."""

    def add_outer(self, sums: PyTree, new: PyTree, phase: str, row: Outer) -> PyTree:
        """The sums of embedding and head with a microbatch's share of a phase."""
        del phase, row
        return jax.tree.map(jnp.add, sums, new)

    def chunk(self, fixed: Fixed, carried: Carried, transfer: Transfer) -> Carried:
        """What follows a tick's layers: the chunk whose sums leave their slot, if any."""
        del fixed, transfer
        return carried

    def tick(self, fixed: Fixed, carried: Carried, row: Row) -> Carried:
        """What a tick ends with."""
        del fixed, row
        return carried


class Kept(GradientSink):
    """Gradients of all layers are summed, and reduced over data when the step ends (ZeRO 0, 1)."""

    def shapes(self, fixed: Fixed) -> dict[str, PyTree]:
        whole = {"gradients": jax.tree.map(Leaf.struct, fixed.params.placed)}
        return whole | (_reduced_shapes(fixed) if fixed.plan.zero else {})

    def add(self, fixed: Fixed, sums: PyTree, cell: Cell, layer, example: int, stored: PyTree):
        place = fixed.params.resident(fixed.stage, cell.chunk, layer, example)
        return fixed.params.add(sums, place, stored)

    def result(self, fixed: Fixed, carried: Carried) -> PyTree:
        """Gradients like the placed parameters."""
        if lax.axis_size(DATA) == 1:
            return _with_outer(fixed, carried, carried.gradients)
        params, in_place = fixed.params, fixed.plan.zero == 0

        # Piece by piece: no second copy of all of it.
        def body(chunk, number, kept):
            place = params.resident_piece(fixed.stage, chunk, number)
            total = params.read(kept if in_place else carried.gradients, place)
            shards = reduce_gradients(total, params.piece, zero=fixed.plan.zero)
            return params.write(kept, place, shards)

        sums = carried.gradients if in_place else carried.finished
        layers = params.every_piece(body, sums, in_place=in_place)
        return _with_outer(fixed, carried, layers)


class Reduced(GradientSink):
    """A chunk's sums are reduced over data when they leave their slot (ZeRO 2, 3)."""

    def shapes(self, fixed: Fixed) -> dict[str, PyTree]:
        slots = fixed.params.slots(fixed.table.reduces.num_slots)
        return {"gradients": slots} | _reduced_shapes(fixed)

    def add(self, fixed: Fixed, sums: PyTree, cell: Cell, layer, example: int, stored: PyTree):
        return sum_in_slot(fixed, sums, cell, layer, example, stored)

    def chunk(self, fixed: Fixed, carried: Carried, transfer: Transfer) -> Carried:
        params = fixed.params

        def body(chunk, number, reduced):
            here = params.piece_in_slot(transfer.slot, chunk, number)
            total, reduced = tie(params.read(carried.gradients, here), reduced)
            shards = reduce_gradients(total, params.piece, zero=fixed.plan.zero)
            there = params.resident_piece(fixed.stage, chunk, number)
            return params.add(reduced, there, shards)

        return carried.but(finished=params.loop_pieces(transfer.chunk, body, carried.finished))

    def result(self, fixed: Fixed, carried: Carried) -> PyTree:
        """Gradients like the placed parameters, this data shard's part."""
        return _with_outer(fixed, carried, carried.finished)


def sum_in_slot(
    fixed: Fixed, sums: PyTree, cell: Cell, layer, example: int, stored: PyTree
) -> PyTree:
    """Adds a layer's gradient to the sums of the chunk in a slot.

    The first one of a stay overwrites: clearing a slot after its reduction would copy it.
    """
    place = fixed.params.in_slot(cell.gradient, fixed.stage, cell.chunk, layer, example)
    total = jax.tree.map(
        lambda old, new: jnp.where(cell.fresh == 1, new, old + new),
        fixed.params.read(sums, place),
        stored,
    )
    return fixed.params.write(sums, place, total)


def reduced_outer(fixed: Fixed, carried: Carried) -> PyTree:
    """The finished gradients of embedding and head."""
    return reduce_gradients(carried.outer_gradients, fixed.plan.layout.outer, zero=fixed.plan.zero)


def _reduced_shapes(fixed: Fixed) -> dict[str, PyTree]:
    parts = lax.axis_size(DATA)
    return {"reduced": jax.tree.map(lambda leaf: leaf.struct(parts=parts), fixed.params.placed)}


def _with_outer(fixed: Fixed, carried: Carried, layers: PyTree) -> PyTree:
    """The finished gradients of this device, shaped like its placed parameters."""
    return {"layers": jax.tree.map(lambda w: w[None], layers), **reduced_outer(fixed, carried)}
