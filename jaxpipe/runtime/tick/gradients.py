"""What becomes of gradients: `Kept` until the step ends, or `Reduced` chunk by chunk."""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.barriers import tie
from jaxpipe.runtime.layout.data_axis import reduce_gradients
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.layout.whole_model import SHARED
from jaxpipe.runtime.tick.carried import Carried
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.work import LayerWork
from jaxpipe.runtime.types import Arrays, Gradients, Index, Shapes, Stored, Tree
from jaxpipe.schedule.lowering.table import Outer, Row, Transfer


class GradientSink(abc.ABC):
    """What becomes of gradients."""

    @abc.abstractmethod
    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        """Shapes of its buffers, by name: "gradients", the sums of layers, and what they become."""

    def finished(self, buffers: dict[str, Arrays]) -> Tree:
        """What finished gradients have become when nothing has run; ``buffers`` of zeros."""
        return buffers.get("reduced")

    def add(self, work: LayerWork, sums: Arrays, stored: Stored) -> Arrays:
        """The sums of the chunk in a slot with the gradient of a layer, for one microbatch.

        The first one of a stay overwrites: clearing a slot after its reduction would copy it.
        """
        params, place, fresh = work.fixed.params, work.place(work.cell.gradient), work.cell.fresh
        total = jax.tree.map(
            lambda old, new: jnp.where(fresh == 1, new, old + new),
            params.read(sums, place),
            stored,
        )
        return params.write(sums, place, total)

    def add_outer(self, sums: Gradients, new: Gradients, phase: str, row: Outer) -> Gradients:
        """The sums of embedding and head with a microbatch's share of a phase."""
        return jax.tree.map(jnp.add, sums, new)

    def chunk(self, fixed: Fixed, carried: Carried, transfer: Transfer) -> Carried:
        """What the layers' part of a tick ends with: the chunk whose sums leave their slot."""
        return carried

    def tick(self, fixed: Fixed, carried: Carried, row: Row) -> Carried:
        """What a tick ends with."""
        return carried


class Kept(GradientSink):
    """Gradients of all layers are summed, and reduced over data when the step ends (ZeRO 0, 1)."""

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        whole = {"gradients": jax.tree.map(Leaf.struct, fixed.params.placed)}
        return whole | (_reduced_shapes(fixed) if fixed.setup.zero else {})

    def add(self, work: LayerWork, sums: Arrays, stored: Stored) -> Arrays:
        return work.fixed.params.add(sums, work.place(), stored)

    def result(self, fixed: Fixed, carried: Carried) -> Gradients:
        """Gradients like the placed parameters."""
        if lax.axis_size(fixed.axes.data) == 1:
            return _with_outer(fixed, carried, carried.gradients)
        params, in_place = fixed.params, fixed.setup.zero == 0

        # Piece by piece: no second copy of all of it.
        def body(chunk: Index, number: Index, kept: Arrays) -> Arrays:
            place = params.piece_at((fixed.stage, chunk, number))
            total = params.read(kept if in_place else carried.gradients, place)
            shards = reduce_gradients(total, params.piece, fixed.axes, zero=fixed.setup.zero)
            return params.write(kept, place, shards)

        sums = carried.gradients if in_place else carried.finished
        layers = params.every_piece(body, sums, in_place=in_place)
        return _with_outer(fixed, carried, layers)


class Reduced(GradientSink):
    """A chunk's sums are reduced over data when they leave their slot (ZeRO 2, 3)."""

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        slots = fixed.params.slot_shapes(fixed.table.reduces.num_slots)
        return {"gradients": slots} | _reduced_shapes(fixed)

    @jax.named_scope("reduce")
    def chunk(self, fixed: Fixed, carried: Carried, transfer: Transfer) -> Carried:
        params = fixed.params

        def body(chunk: Index, number: Index, reduced: Arrays) -> Arrays:
            here = params.piece_at((fixed.stage, chunk, number), slot=transfer.slot)
            total, reduced = tie(params.read(carried.gradients, here), reduced)
            shards = reduce_gradients(total, params.piece, fixed.axes, zero=fixed.setup.zero)
            there = params.piece_at((fixed.stage, chunk, number))
            return params.add(reduced, there, shards)

        return carried.but(finished=params.loop_pieces(transfer.chunk, body, carried.finished))

    def result(self, fixed: Fixed, carried: Carried) -> Gradients:
        """Gradients like the placed parameters, this data shard's part."""
        return _with_outer(fixed, carried, carried.finished)


def reduced_outer(fixed: Fixed, carried: Carried) -> Gradients:
    """The finished gradients of what belongs to no single layer."""
    outer, setup = carried.outer_gradients, fixed.setup
    if setup.shares:
        of_layers = lax.psum(carried.shared_gradients, fixed.axes.stage)
        outer = outer | {SHARED: jax.tree.map(jnp.add, outer[SHARED], of_layers)}
    return reduce_gradients(outer, setup.layout.outer, fixed.axes, zero=setup.zero)


def _reduced_shapes(fixed: Fixed) -> dict[str, Shapes]:
    parts = lax.axis_size(fixed.axes.split)
    return {"reduced": jax.tree.map(lambda leaf: leaf.struct(parts=parts), fixed.params.placed)}


def _with_outer(fixed: Fixed, carried: Carried, layers: Arrays) -> Gradients:
    """The finished gradients of this device, shaped like its placed parameters."""
    return {"layers": jax.tree.map(lambda w: w[None], layers), **reduced_outer(fixed, carried)}
