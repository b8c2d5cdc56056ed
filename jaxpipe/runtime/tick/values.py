"""Values of ticks: those that no tick changes, and those that each hands on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.runtime.defaults import RESIDUALS_OF_F
from jaxpipe.runtime.layers import losses
from jaxpipe.runtime.layers.kinds import LayerKind, Layers
from jaxpipe.runtime.layers.model import embed_layer, head_layer, layer_key
from jaxpipe.runtime.layout.buffers import KnownSlots, SharedBuffers
from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.tick.microbatches import Microbatches
from jaxpipe.runtime.tick.setup import INBOX, Setup, mean_scale
from jaxpipe.runtime.trees import divide, joined
from jaxpipe.runtime.types import (
    Activation,
    Arrays,
    At,
    Batch,
    Gradients,
    Index,
    Key,
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
from jaxpipe.schedule.lowering.table import Cell, TickTable

jax.tree_util.register_dataclass(Cell)  # here, since the schedule layer knows no jax


@dataclasses.dataclass(frozen=True)
class Values:
    """Values that no tick changes, as one device sees them.

    Args:
      stage, shard: this device's place on the mesh.
      first_layer: canonical number of every chunk's first layer, int32 ``[chunks]``.
      kind_of: number of every layer's kind, int32 ``[chunks, layers]``, -1 where there is none.
      residuals: how layers share the buffers of residuals, by name.
      messages: how activations share a message.
    """

    setup: Setup
    stage: jax.Array
    shard: jax.Array
    layers: Layers
    first_layer: jax.Array
    kind_of: jax.Array
    residuals: dict[str, SharedBuffers | KnownSlots]
    messages: SharedBuffers

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

    def outbox(self, kind: Kind) -> str:
        """Name of the message that an action of a kind hands on: that of F for all, if no stage
        hands on an activation and a cotangent in one tick."""
        one_message = self.setup.knows_chunks and self.table.one_message
        return INBOX[Kind.F if one_message else kind]

    @property
    def loops_in_chunk(self) -> bool:
        """Whether the layers of a chunk that the program knows are a loop."""
        return self.setup.knows_chunks and not self.params.own_arrays

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
        rows, rng, number = batch.at(i)
        return rows, layer_key(rng, microbatch=number, shard=self.shard, layer=layer)

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

    @property
    def layer_losses(self) -> Shapes:
        """Shapes of a layer's own loss and metrics, made `losses.addable`; None if there are none,
        or none are wanted."""
        found = None if self.setup.outputs else next(iter(self.layers.losses), None)
        return jax.eval_shape(losses.addable, found)

    def loss_scale(self, batch: Microbatches, i: Index) -> float | jax.Array:
        """The cotangent of a microbatch's loss."""
        weighted = batch.scale_of(i)
        return mean_scale(self.setup) if weighted is None else weighted

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


@dataclasses.dataclass(frozen=True)
class LayerPlace:
    """One layer of an action, and where its arrays lie.

    Args:
      layer: counted within the chunk.
    """

    fixed: Values
    action: Kind
    cell: Cell
    layer: Index
    kind: LayerKind

    @property
    def at(self) -> At:
        """The layer's stage, chunk and number."""
        return self.fixed.stage, self.cell.chunk, self.layer

    def read(self, arrays: Sequence[Arrays], slot: Slot = None) -> list[Stored]:
        """The layer's part of the arrays of all layouts."""
        return [
            layout.read(one, layout.layer_at(self.at, self.kind.example, slot=slot))
            for layout, one in zip(self.fixed.setup.layer_layouts, arrays, strict=True)
        ]

    def trained_at(self, slot: Slot = None) -> Tree:
        """Finds where its trained parameters lie: among the stage's own, or in a slot of chunks."""
        return self.fixed.params.layer_at(self.at, self.kind.example, slot=slot)

    @property
    def leaves(self) -> Leaves:
        """Its trained parameters as they are stored, every array a `Leaf`."""
        return self.fixed.params.leaves_of(self.kind.example)


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
