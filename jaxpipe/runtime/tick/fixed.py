"""Inputs of ticks: values that no tick changes, those that each hands on, and its actions.

Three interfaces say what differs between programs: where weights come from (`WeightSource`), what
becomes of gradients (`GradientSink`), and of what the head returns (`Collector`).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.barriers import Carry, tie
from jaxpipe.runtime.float8 import E4M3
from jaxpipe.runtime.layers import losses
from jaxpipe.runtime.layers.kinds import LayerKind, Layers
from jaxpipe.runtime.layers.model import embed_layer, head_layer, layer_key
from jaxpipe.runtime.layout.buffers import KnownSlots, Piece, SharedBuffers, at_slot
from jaxpipe.runtime.layout.data_axis import Joined
from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.runtime.layout.whole_model import SHARED
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.tick.chunk_pieces import MovedPiece
from jaxpipe.runtime.tick.microbatches import Microbatches, StepMicrobatches
from jaxpipe.runtime.tick.setup import (
    CARRY,
    INBOX,
    RESIDUALS_OF,
    RESIDUALS_OF_F,
    Setup,
    mean_scale,
)
from jaxpipe.runtime.trees import combine, divide, joined, widened
from jaxpipe.runtime.types import (
    Activation,
    Arrays,
    At,
    Batch,
    Gradients,
    Index,
    Key,
    LayerParams,
    Leaves,
    Message,
    OuterParams,
    Shapes,
    Slot,
    States,
    Stored,
    Tree,
)
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import (
    NONE,
    BodyParts,
    Cell,
    Moved,
    Row,
    TickTable,
    Transfer,
)

jax.tree_util.register_dataclass(Cell)  # here, since the schedule layer knows no jax


class Collector(Protocol):
    """A collector of what the head returns for the microbatches."""

    def empty(self) -> Tree:
        """Makes what is collected before the first microbatch."""

    def add(self, collected: Tree, new: Tree, i: Index) -> Tree:
        """Adds what the head returns for microbatch i."""

    def result(self, collected: Tree, layer_losses: Tree) -> Tree:
        """Makes what a step returns; ``layer_losses`` are this stage's sums over layers, if any."""


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Values that no tick changes, as one device sees them.

    Args:
      weights: where the weights of an action come from.
      gradients: what becomes of gradients; None for an evaluation.
      stage, shard: this device's place on the mesh.
      first_layer: canonical number of every chunk's first layer, int32 ``[chunks]``.
      kind_of: number of every layer's kind, int32 ``[chunks, layers]``, -1 where there is none.
      residuals: how layers share the buffers of residuals, by name.
      messages: how activations share a message.
      collector: what becomes of what the head returns.
      weight: the weight of a microbatch's loss, from what the head is given beside parameters and
        activation; None if the loss is not weighted, or nothing is trained.
    """

    setup: Setup
    weights: WeightSource
    gradients: GradientSink | None
    stage: jax.Array
    shard: jax.Array
    layers: Layers
    first_layer: jax.Array
    kind_of: jax.Array
    residuals: dict[str, SharedBuffers | KnownSlots]
    messages: SharedBuffers
    collector: Collector
    weight: Callable[[Tree], jax.Array] | None

    @property
    def axes(self) -> Axes:
        return self.setup.layout.axes

    @property
    def params(self) -> LayerLayout:
        """The layout of the layers' trained parameters, and of their gradients."""
        return self.setup.layout.layers

    @property
    def table(self) -> TickTable:
        return self.setup.table

    @property
    def one_message(self) -> bool:
        """Whether an activation and a cotangent that a stage hands on are the same arrays."""
        return self.setup.knows_chunks and self.table.one_message

    def outbox(self, kind: Kind) -> str:
        """Name of the message that an action of a kind hands on."""
        return INBOX[Kind.F if self.one_message else kind]

    @property
    def loops_in_chunk(self) -> bool:
        """Whether the layers of a chunk that the program knows are a loop."""
        return self.setup.knows_chunks and not self.params.own_arrays

    def fields(self, kind: Kind, known: Collection[str]) -> tuple[str, ...]:
        """Names the fields of a kind's cells that the program knows, if it knows these slots."""
        return "chunk", "layers", *(name for name in RESIDUALS_OF[kind] if name in known)

    def cells(
        self, kind: Kind, known: Collection[str], parts: BodyParts
    ) -> dict[int, dict[str, Any]]:
        """The cells of a kind that ticks with these parts have, by number."""
        return self.table.cells(kind, self.fields(kind, known), self._ticks(parts))

    def runs(self, phase: str, parts: BodyParts) -> bool:
        """Whether any tick with these parts has an outer phase: a field of `Outer`."""
        column = getattr(self.table.outer, phase)[self._ticks(parts)]
        return not self.setup.cells_in_table or bool((column != NONE).any())

    def _ticks(self, parts: BodyParts) -> np.ndarray:
        """Marks the ticks with these parts, bool ``[ticks]``."""
        return np.asarray([one == parts for one in self.table.parts(**self._moves)])

    def numbered(self, kind: Kind, cell: Cell) -> Cell:
        """The cells of a kind with their numbers."""
        numbers = self.table.cell_numbers(kind, self.fields(kind, self.known_slots))
        return dataclasses.replace(cell, number=jnp.asarray(numbers))

    @property
    def known_slots(self) -> list[str]:
        """Names of the residuals whose slots the program knows."""
        return [name for name, kept in self.residuals.items() if isinstance(kept, KnownSlots)]

    def shared(self, name: str) -> SharedBuffers:
        """How layers share the buffers of residuals whose slots come from the table."""
        kept = self.residuals[name]
        assert isinstance(kept, SharedBuffers)
        return kept

    @property
    def moving_residuals(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what moves to the host beside a layer, or back, one for each dtype."""
        parts = self.table.residual_parts
        pieces = [self.shared(name).piece_shapes(parts) for name in RESIDUALS_OF_F if parts]
        return jax.eval_shape(joined, [piece for one in pieces for piece in one])

    @property
    def bodies(self) -> tuple[tuple[BodyParts, ...], np.ndarray]:
        """The parts of ticks that occur, and how many ticks of each follow each other:
        `TickTable.runs`."""
        return self.table.runs(**self._moves)

    def runs_once(self, parts: BodyParts) -> bool:
        """Whether a single tick has these parts: XLA leaves out its loop."""
        return int(self._ticks(parts).sum()) == 1

    @property
    def _moves(self) -> dict[str, bool]:
        """Arguments of `TickTable.runs` that say which transfers over data a step has."""
        reduces = self.gradients is not None and self.gradients.reduces(self)
        return {"gathers": self.weights.gathers, "reduces": reduces}

    def kinds_at(self, chunk: Index, layer: Index) -> list[LayerKind]:
        """The kinds that a layer may be of: where the program knows its place, those that stages
        have there."""
        if not (isinstance(chunk, int) and isinstance(layer, int)):
            return list(self.layers.kinds)
        found = {self.layers.kind_of[n] for n in self.params.rows[:, chunk, layer] if n >= 0}
        return [kind for kind in self.layers.kinds if kind.number in found]

    @property
    def num_layers(self) -> int:
        return sum(self.table.layer_counts)

    def context(self, batch: Microbatches, i: Index, layer: Index) -> tuple[Batch, Key]:
        """Reads what every function of a layer is given beside its parameters and values."""
        return context_of(batch, i, layer, self.shard)

    def divided(self, outer: OuterParams) -> tuple[OuterParams, OuterParams]:
        """Divides what belongs to no single layer into what is trained and the rest."""
        frozen = self.setup.frozen
        nothing = jax.tree.map(lambda _: None, outer)
        return divide(outer, nothing if frozen is None else frozen.outer)

    def embed_context(self, batch: Microbatches, i: Index) -> tuple[Batch, Key]:
        return self.context(batch, i, embed_layer(self.num_layers))

    def head_context(self, batch: Microbatches, i: Index) -> tuple[Batch, Key]:
        return self.context(batch, i, head_layer(self.num_layers))

    def head(self, outer: OuterParams, x: Activation, rows: Batch, rng: Key) -> Tree:
        """The loss or the output of a microbatch, from the last layer's output."""
        model = self.setup.model
        function = model.output if self.setup.outputs else model.head_loss
        result = function(outer, x, rows, rng)
        return jax.tree.map(jnp.asarray, result)  # a Python number has a dtype then

    # Losses.

    @property
    def layer_losses(self) -> Shapes:
        """Shapes of a layer's own loss and metrics, made `losses.addable`; None if there are none,
        or none are wanted."""
        found = None if self.setup.outputs else next(iter(losses_of_layers(self.layers)), None)
        return jax.eval_shape(losses.addable, found)

    def loss_scale(self, batch: Microbatches, i: Index) -> float | jax.Array:
        """The cotangent of a microbatch's loss."""
        weighted = batch.scale_of(i)
        return mean_scale(self.setup) if weighted is None else weighted

    def weighed(self, batch: StepMicrobatches) -> StepMicrobatches:
        """The microbatches with the scale of their losses, if these are weighted."""
        weight = self.weight
        if weight is None:
            return batch
        passes = jnp.arange(self.table.schedule.num_passes, dtype=jnp.int32)
        weights = lax.map(lambda i: weight(self.head_context(batch, i)), passes)
        return batch._replace(scale=1 / losses.divisor(lax.psum(weights.sum(), self.axes.peers)))

    def activation(self, message: Message, number: int) -> Activation:
        """A message's content as the activation of that number."""
        values = self.messages.read([w[None] for w in message], number, 0, (number, 0, 0))
        return jax.tree.unflatten(jax.tree.structure(self.layers.activations[number]), values)

    def message(self, message: Message, number: int, activation: Activation) -> Message:
        """The message with an activation in it; what is longer than it stays as it was."""
        values = jax.tree.leaves(activation)
        buffers = [w[None] for w in message]
        return [w[0] for w in self.messages.write(buffers, number, 0, (number, 0, 0), values)]

    def message_shape(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in self.messages.shapes(1)]

    def empty_message(self) -> Message:
        return list(map(jnp.zeros_like, self.message_shape()))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carried:
    """Values that the loop over ticks carries on one device.

    Args:
      weights: what the weights' source holds.
      inboxes: messages that wait for their reader, by name: x for F, dy for the backward.
      residuals: what layers leave behind, by name: until_b, until_w, crossing.
      gradients: the gradient sums of layers; nothing in an evaluation.
      outer_gradients: those of embedding and head, which all stages compute alike.
      shared_gradients: this stage's share of those of what its layers share; None for nothing.
      finished: what finished gradients have become, or what else their sink carries.
      collected: what the head has returned: sums of loss and metrics, or outputs.
      layer_losses: the sums of the losses and metrics of this stage's layers; None if no layer has
        a loss.
      states: the layers' states.
      input_gradients: of the batch's arrays whose gradients are wanted, ``[rows, m, ...]``.
      messages: the activations or cotangents that layers hand on (`Fixed.outbox`); between ticks
        those that travel in the next, or that its layers write in place.
    """

    weights: Arrays
    inboxes: dict[str, Message]
    residuals: dict[str, list[jax.Array]]
    gradients: Arrays
    outer_gradients: Gradients
    shared_gradients: Gradients
    finished: Arrays
    collected: Tree
    layer_losses: Tree
    states: States
    input_gradients: list[jax.Array]
    messages: dict[str, Message] = dataclasses.field(default_factory=dict)

    def but(self, **changes: Any) -> Carried:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Work:
    """An action of a tick."""

    fixed: Fixed
    batch: Microbatches
    held: Tree
    action: Kind
    cell: Cell

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
        cell = dataclasses.replace(self.cell, chunk=chunk)
        return LayerWork(self.fixed, self.batch, self.held, self.action, cell, layer, kind)


@dataclasses.dataclass(frozen=True)
class LayerWork(Work):
    """One layer of an action, and what it may read.

    Args:
      layer: counted within the chunk.
    """

    layer: Index
    kind: LayerKind

    @property
    def at(self) -> At:
        """The layer's stage, chunk and number."""
        return self.fixed.stage, self.cell.chunk, self.layer

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

    def weights(self) -> tuple[list[Stored], list[Stored], Tree]:
        """The layer's weights as they are stored, scales of those that are quantized, and what it
        shares with others, if anything."""
        setup = self.fixed.setup
        shared = self.held.outer[SHARED] if setup.shares else None
        scales = self.read(self.held.scales) if setup.options.stores_fp8 else []
        return self.fixed.weights.layer(self), scales, shared

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

    def tied_weights(self, carried: Carry) -> tuple[tuple[list[Stored], list[Stored], Tree], Carry]:
        """`weights`, and a value that the loop carries, tied to each other.

        A slice behind a barrier would be copied. Slices that a loop of known trips reads need none:
        they depend on its number, and the stacks are tied to the loop around it.
        """
        weights = self.weights()
        return (weights, carried) if self.fixed.loops_in_chunk else tie(weights, carried)

    def params(self, weights: tuple[list[Stored], list[Stored], Tree]) -> LayerParams:
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

    def read(self, arrays: Sequence[Arrays], slot: Slot = None) -> list[Stored]:
        """The layer's part of the arrays of all layouts."""
        return [
            layout.read(one, layout.layer_at(self.at, self.kind.example, slot=slot))
            for layout, one in zip(self.fixed.setup.layer_layouts, arrays, strict=True)
        ]

    def place(self, slot: Slot = None) -> Tree:
        """Finds where its trained parameters lie: among the stage's own, or in a slot of chunks."""
        return self.fixed.params.layer_at(self.at, self.kind.example, slot=slot)

    @property
    def leaves(self) -> Leaves:
        """Its trained parameters as they are stored, every array a `Leaf`."""
        return self.fixed.params.leaves_of(self.kind.example)

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

    def cut(self, carried: Carried, name: str, moved: Moved, slot: Index) -> list[jax.Array]:
        """Reads the part of a slot's residuals that moves beside the layer."""
        piece = Piece(slot, self.layer, moved.part, self.fixed.table.residual_parts)
        return self.fixed.shared(name).cut(carried.residuals[name], piece)

    def put(
        self, carried: Carried, name: str, moved: Moved, slot: Index, values: list[jax.Array]
    ) -> Carried:
        """Writes it, in place."""
        piece = Piece(slot, self.layer, moved.part, self.fixed.table.residual_parts)
        written = self.fixed.shared(name).put(carried.residuals[name], piece, values)
        return carried.but(residuals=carried.residuals | {name: written})

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


class WeightSource(abc.ABC):
    """A source of the weights of actions; ``held`` is what the ticks carry for it.

    Attributes:
      gathers: whether it gathers chunks, as the table says.
    """

    gathers: ClassVar[bool] = False

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        """Shapes of its buffers, by name."""
        return {}

    def with_buffers(self, held: Tree, buffers: dict[str, Arrays]) -> Tree:
        """Returns what is held, with its empty buffers."""
        return held

    def gather(self, fixed: Fixed, held: Tree, transfer: Transfer) -> Tree:
        """Gathers a chunk before layers run; returns what is held then."""
        return held

    def moving(self, fixed: Fixed) -> Shapes:
        """Shapes of what is on its way while layers run, and of what it is made from."""
        return []

    def start(self, fixed: Fixed, held: Tree, moved: Sequence[MovedPiece]) -> list[Joined]:
        """Begins to gather pieces that move while layers run."""
        raise NotImplementedError

    def finish(
        self, fixed: Fixed, held: Tree, gathered: list[Joined], moved: Sequence[MovedPiece]
    ) -> Tree:
        """Stores these pieces; returns what is held then."""
        raise NotImplementedError

    @abc.abstractmethod
    def layer(self, work: LayerWork) -> list[Stored]:
        """A layer's weights as they are stored: those that are trained, then the others, if any."""

    def outer(self, fixed: Fixed, held: Tree, phase: str, value: Tree) -> tuple[OuterParams, Tree]:
        """Reads what a phase ("enter", "leave", "embed_gradient") needs of embedding and head.

        It comes with a value of the phase's loop, tied to it where a read must not be hoisted."""
        return held.outer, value


class GradientSink(abc.ABC):
    """A sink of gradients: sums them, reduces them or updates with them."""

    @abc.abstractmethod
    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        """Shapes of its buffers, by name: "gradients", the sums of layers, and what they become."""

    def reduces(self, fixed: Fixed) -> bool:
        """Whether it reduces chunks when the table says."""
        return False

    def finished(self, buffers: dict[str, Arrays]) -> Tree:
        """Makes what finished gradients have become when nothing has run; ``buffers`` of zeros."""
        return buffers.get("reduced")

    def add(self, work: LayerWork, sums: Arrays, stored: Stored) -> Arrays:
        """Adds the gradient of a layer, for one microbatch, to the sums of the chunk in a slot."""
        place = work.place(work.cell.gradient)
        return work.fixed.params.update(sums, place, widened(stored))

    def add_outer(self, sums: Gradients, new: Gradients, phase: str) -> Gradients:
        """Adds a microbatch's share of a phase to the sums of embedding and head."""
        return jax.tree.map(jnp.add, sums, widened(new))

    def before_layers(
        self, fixed: Fixed, batch: Microbatches, carried: Carried, row: Row
    ) -> Carried:
        """Prepares what is carried for the layers of a tick."""
        return carried

    def chunk(self, fixed: Fixed, carried: Carried, transfer: Transfer) -> Carried:
        """Ends the layers' part of a tick: reduces the chunk whose sums leave their slot."""
        return carried

    def moving(self, fixed: Fixed) -> Shapes:
        """Shapes of what is on its way while layers run, and of what it is made from."""
        return []

    def take(
        self, fixed: Fixed, carried: Carried, moved: Sequence[MovedPiece]
    ) -> tuple[Carried, Joined]:
        """Takes the sums of pieces that are reduced while layers run."""
        raise NotImplementedError

    def start(self, fixed: Fixed, sums: Joined) -> Joined:
        """Reduces the pieces."""
        raise NotImplementedError

    def finish(
        self, fixed: Fixed, carried: Carried, reduced: Joined, moved: Sequence[MovedPiece]
    ) -> Carried:
        """Stores the reduced pieces."""
        raise NotImplementedError


def context_of(batch: Microbatches, i: Index, layer: Index, shard: Index) -> tuple[Batch, Key]:
    rows, rng, number = batch.at(i)
    return rows, layer_key(rng, microbatch=number, shard=shard, layer=layer)


def losses_of_layers(layers: Layers) -> list[Shapes]:
    """Shapes of the losses and metrics of all layers that have any."""
    found = [layers.kinds[number].split.traced.loss for number in layers.kind_of]
    return [one for one in found if one is not None]
