"""Work of a tick: its actions, and the layers of each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

import jax

from jaxpipe.runtime.barriers import Carry, tie
from jaxpipe.runtime.defaults import RESIDUALS_OF
from jaxpipe.runtime.float8 import E4M3
from jaxpipe.runtime.layers.kinds import LayerKind
from jaxpipe.runtime.layout.buffers import KnownSlots, Piece, at_slot
from jaxpipe.runtime.layout.whole_model import SHARED
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.microbatches import Microbatches
from jaxpipe.runtime.tick.setup import CARRY, INBOX
from jaxpipe.runtime.tick.values import Carried, LayerPlace
from jaxpipe.runtime.trees import combine
from jaxpipe.runtime.types import Index, LayerParams, Message, Stored, Tree
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import Cell, Moved

Weights: TypeAlias = tuple[list[Stored], list[Stored], Tree]
"""A layer's weights as they are stored, scales of those that are quantized, and what it shares with
others, if anything."""


@dataclasses.dataclass(frozen=True)
class Work:
    """An action of a tick.

    Args:
      beside_forward: whether a layer of F runs beside each of its layers.
    """

    fixed: Fixed
    batch: Microbatches
    held: Tree
    action: Kind
    cell: Cell
    beside_forward: bool = False

    def begins(self, layer: Index) -> bool:
        """Whether a layer is the first of a cell that the program knows."""
        return bool(layer == (0 if self.action.is_forward else self.cell.layers - 1))

    def part_of(self, carried: Carried, places: Collection[tuple[Cell, Iterable[int]]]) -> Carried:
        """Leaves of known residuals only those that some layers of some cells of the action read or
        write."""
        fixed, residuals = self.fixed, {}
        for name, buffers in carried.residuals.items():
            kept = fixed.residuals[name]
            if not isinstance(kept, KnownSlots):
                residuals[name] = buffers
            elif name in RESIDUALS_OF[self.action]:
                slots = [(getattr(cell, name), layers) for cell, layers in places]
                residuals[name] = kept.part(buffers, slots)
        return carried.but(residuals=residuals)

    def with_part(self, carried: Carried, part: Carried) -> Carried:
        """A copy of ``part`` with the residuals that `part_of` has left out."""
        before, kept = carried.residuals, self.fixed.residuals
        new = {name: kept[name].with_part(before[name], w) for name, w in part.residuals.items()}
        return part.but(residuals=before | new)

    def of_layer(self, chunk: Index, layer: Index, kind: LayerKind) -> LayerWork:
        """The part of a layer of this kind, counted within its chunk."""
        place = self.action, dataclasses.replace(self.cell, chunk=chunk), layer, kind
        return LayerWork(self.fixed, *place, self.batch, self.held, self.beside_forward)


@dataclasses.dataclass(frozen=True)
class LayerWork(Work, LayerPlace):
    """One layer of an action, and what it may read."""

    def context(self) -> tuple[Tree, ...]:
        """The microbatch's rows, the layer's key and, of a slice, its place in the sequence."""
        layer = self.fixed.first_layer[self.cell.chunk] + self.layer
        context = self.fixed.context(self.batch, self.cell.microbatch, layer)
        if self.kind.carry is None:
            return context
        length = next(w.shape[1] for w in jax.tree.leaves(context[0]) if w.ndim > 1)
        return *context, self.slice_number * length

    @property
    def slice_number(self) -> Index:
        return self.cell.microbatch % self.fixed.setup.num_slices

    def source(self, carried: Carried) -> Message:
        """The arrays that the message for the layer is `taken` from. The first layer's is in an
        inbox: XLA for GPUs would copy it for a barrier, but does not copy an inbox."""
        if self._reads_inbox:
            return carried.inboxes[INBOX[self.action]]
        return carried.messages[self.fixed.outbox(self.action)]

    def taken(self, source: Message) -> Message:
        return at_slot(source, self.cell.inbox) if self._reads_inbox else source

    @property
    def _reads_inbox(self) -> bool:
        fixed = self.fixed
        known = fixed.setup.knows_chunks and not fixed.loops_in_chunk and self.cell.moved is None
        return known and self.begins(self.layer)

    def weights(self, carried: Carry) -> tuple[Weights, Carry]:
        """The layer's weights and a value that the loop carries, tied to each other.

        A slice behind a barrier would be copied. Slices that a loop of known trips reads need none:
        they depend on its number, and the stacks are tied to the loop around it.
        """
        fixed, setup = self.fixed, self.fixed.setup
        shared = self.held.outer[SHARED] if setup.shares else None
        scales = self.read(self.held.scales) if setup.options.stores_fp8 else []
        weights = fixed.weights.layer(self.held, self), scales, shared
        return (weights, carried) if fixed.loops_in_chunk else tie(weights, carried)

    def params(self, weights: Weights) -> LayerParams:
        """Makes what the layer's function is given as its parameters, from its weights.

        They have the parameters' dtypes, whatever the weights' are: a layer that casts them to what
        it computes in compiles to no cast. Quantized ones stay so, and all come with the scales.
        """
        stored, scales, shared = weights
        example, parts = self.kind.example, []
        for layout, one in zip(self.fixed.setup.layer_layouts, stored, strict=True):
            leaves = layout.leaves_of(example)
            whole = jax.tree.map(
                lambda w, leaf: w if w.dtype == E4M3 else w.astype(leaf.dtype), one, leaves
            )
            parts.append(layout.unpack(whole, example))
        own = functools.reduce(combine, parts)
        params = (own, shared) if self.fixed.setup.shares else own
        return (params, jax.tree.leaves(functools.reduce(combine, scales))) if scales else params

    def read_slot(self, carried: Carried, name: str) -> list[jax.Array]:
        """Values of the layer that wait in their slot of this name."""
        kept, slot = self.fixed.residuals[name], getattr(self.cell, name)
        return kept.read(carried.residuals[name], self.kind.number, slot, self.at)

    def residuals(self, carried: Carried, *names: str) -> list[list[jax.Array]]:
        """Residuals of the layer, by these names, as `Split` takes them."""
        values = {name: self.read_slot(carried, name) for name in names}
        if self.kind.carry is not None and any(self.kind.carry.appended):
            pairs = zip(self.read_slot(carried, CARRY), self.kind.carry.appended, strict=True)
            values["until_w"] += [value for value, is_appended in pairs if is_appended]
        return list(values.values())

    def save(self, carried: Carried, **values: list[jax.Array]) -> Carried:
        """Writes residuals of the layer into their slots, in place, by name."""
        residuals, number = dict(carried.residuals), self.kind.number
        for name, own in values.items():
            shared, slot = self.fixed.residuals[name], getattr(self.cell, name)
            residuals[name] = shared.write(residuals[name], number, slot, self.at, own)
        return carried.but(residuals=residuals)

    def cut(self, carried: Carried, name: str, moved: Moved) -> list[jax.Array]:
        """Reads the part of residuals of this name that moves beside the layer."""
        return self.fixed.shared(name).cut(carried.residuals[name], self._piece(name, moved))

    def put(self, carried: Carried, name: str, moved: Moved, values: list[jax.Array]) -> Carried:
        """Writes it, in place."""
        buffers, piece = carried.residuals[name], self._piece(name, moved)
        written = self.fixed.shared(name).put(buffers, piece, values)
        return carried.but(residuals=carried.residuals | {name: written})

    def _piece(self, name: str, moved: Moved) -> Piece:
        slot, parts = getattr(moved, name), self.fixed.table.residual_parts
        return Piece(slot, self.layer, moved.part, parts)

    def look(
        self, run: Callable[..., Tree], args: tuple[Tree, ...], *, given: Tree, made: Tree
    ) -> None:
        """Lets `Setup.watch`, if there is one, see what ``run(*args)`` has made of what the layer
        was given."""
        fixed, chunk = self.fixed, self.cell.chunk
        if fixed.setup.watch is None:
            return
        number = fixed.first_layer[chunk] + self.layer
        first = 0 if self.action.is_forward else fixed.num_layers - 1
        fixed.setup.watch.look(
            self.action,
            (fixed.stage, chunk, number, self.cell.microbatch, fixed.shard),
            None if fixed.setup.model.uses_axes else run,  # it needs the mesh
            args,
            given=given,
            made=made,
            begins=number == first,
        )

    def carry(self, carried: Carried, name: str) -> Tree:
        """The carry that the slice before has left, or its cotangent, by name."""
        assert self.kind.carry is not None
        structure = jax.tree.structure(self.kind.carry.shapes)
        return jax.tree.unflatten(structure, self.read_slot(carried, name))
