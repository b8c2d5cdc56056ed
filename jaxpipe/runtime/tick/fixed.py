"""What no tick changes: the setup, the layers by kind, and this device's place on the mesh."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.layers.calls import output_shapes
from jaxpipe.runtime.layers.keys import embed_layer, head_layer, layer_key
from jaxpipe.runtime.layers.kinds import Layers, check_loss, sort_layers
from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layout.buffers import SharedBuffers
from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.runtime.layout.whole_model import Layout, layer_rows
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.types import Activation, Batch, Index, Key, Message, OuterParams
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import TickTable

if TYPE_CHECKING:
    from jaxpipe.runtime.tick.gradients import GradientSink
    from jaxpipe.runtime.tick.weights import WeightSource

RESIDUALS = ("until_b", "until_w", "crossing")
"""What a layer leaves behind: for B, for B and W, and from B to W."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything about a run that is known before it is traced.

    Args:
      model: the user's functions.
      layout: where parameters live.
      table: the tick table to run.
      remat: rematerialisation policy, by name.
      zero: ZeRO level 0 to 3; 0 when the data axis has one device.
      states: where the layers' states live, or None for a model without.
      poison: fill buffers and idle messages with NaN, to prove that nothing from a bubble is used.
    """

    model: Model
    layout: Layout
    table: TickTable
    remat: str
    zero: int
    states: LayerLayout | None = None
    poison: bool = False

    @property
    def trains(self) -> bool:
        return bool(self.table.passes.keys() & {Kind.B, Kind.BW})


class Microbatches(Protocol):
    """Where the rows and the key of a microbatch come from."""

    def at(self, i: Index) -> tuple[Batch, Key, Index]:
        """A microbatch's rows, the key of its step, and its number within the step."""


class StepMicrobatches(NamedTuple):
    """The microbatches of one step: leaves ``[rows, m, ...]`` and the step's key, or None."""

    rows: Batch
    rng: Key

    def at(self, i: Index) -> tuple[Batch, Key, Index]:
        """As of `Microbatches`."""

        def row(leaf: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(leaf, i, 1, keepdims=False)

        return jax.tree.map(row, self.rows), self.rng, i


@dataclasses.dataclass(frozen=True)
class Fixed:
    """What no tick changes, as one device sees it.

    Args:
      setup: what to run.
      weights: where the weights of an action come from.
      gradients: what becomes of gradients; None for an evaluation.
      stage, shard: this device's place on the mesh.
      layers: the layers by kind.
      first_layer: canonical number of every chunk's first layer, int32 ``[chunks]``.
      kind_of: number of every layer's kind, int32 ``[chunks, layers]``, -1 where there is none.
      residuals: how layers share the buffers of residuals, by name.
      messages: how activations share a message.
    """

    setup: Setup
    weights: WeightSource
    gradients: GradientSink | None
    stage: jax.Array
    shard: jax.Array
    layers: Layers
    first_layer: jax.Array
    kind_of: jax.Array
    residuals: dict[str, SharedBuffers]
    messages: SharedBuffers

    @property
    def axes(self) -> Axes:
        """The mesh axes by their use."""
        return self.setup.layout.axes

    @property
    def params(self) -> LayerLayout:
        """Where the layers' parameters lie."""
        return self.setup.layout.layers

    @property
    def table(self) -> TickTable:
        return self.setup.table

    @property
    def num_layers(self) -> int:
        return sum(self.table.layer_counts)

    @property
    def recomputes(self) -> bool:
        return Kind.R in self.table.passes

    @property
    def rereads_states(self) -> bool:
        """Whether recomputed layers need the states that their F has read."""
        return self.recomputes and any(kind.split.reads_state for kind in self.layers.kinds)

    def context(self, batch: Microbatches, i: Index, layer: Index) -> tuple[Batch, Key]:
        """What every function of a layer is given beside its parameters and values."""
        return _context(batch, i, layer, self.shard)

    def embed(self, batch: Microbatches, outer: OuterParams, i: Index) -> Activation:
        """The embedding of a microbatch."""
        return _embed(self.setup, batch, outer, i, self.shard)

    def head_loss(
        self, batch: Microbatches, outer: OuterParams, x: Activation, i: Index
    ) -> jax.Array:
        """The loss of a microbatch, from the last layer's output."""
        layer = head_layer(self.num_layers)
        loss = self.setup.model.head_loss(outer, x, *self.context(batch, i, layer))
        return jax.tree.map(jnp.asarray, loss)  # a Python number has a dtype then

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
        return [jnp.zeros(w.shape, w.dtype) for w in self.message_shape()]


def fix(
    setup: Setup,
    batch: Microbatches,
    outer: OuterParams,
    *,
    weights: WeightSource,
    gradients: GradientSink | None,
) -> Fixed:
    """Finds the kinds of layers, and what they leave in buffers; inside `jax.shard_map`."""
    rows, numbers = layer_rows(setup.table), range(sum(setup.table.layer_counts))
    axes = setup.layout.axes
    stage, shard = lax.axis_index(axes.stage), lax.axis_index(axes.data)
    model, (rows_of_one, rng) = setup.model, jax.eval_shape(lambda: _context(batch, 0, 0, shard))
    given = {"microbatch": rows_of_one, "rng": rng}
    layers = sort_layers(
        model,
        [setup.layout.layers.shape_of(n) for n in numbers],
        output_shapes("Model.embed", model.embed, outer=outer, **given),
        *given.values(),
        states=None if setup.states is None else [setup.states.shape_of(n) for n in numbers],
        remat=setup.remat,
    )
    kind_of = np.where(rows < 0, -1, np.asarray(layers.kind_of, np.int32)[rows])
    leaves = [jax.tree.leaves(x) for x in layers.activations]
    fixed = Fixed(
        setup,
        weights,
        gradients,
        stage,
        shard,
        layers,
        first_layer=jnp.asarray(rows[:, :, 0])[stage],
        kind_of=jnp.asarray(kind_of)[stage],
        residuals={
            name: SharedBuffers([getattr(kind.split, name) for kind in layers.kinds], kind_of)
            for name in RESIDUALS
        },
        messages=SharedBuffers(leaves, np.arange(len(leaves)).reshape(-1, 1, 1)),
    )
    y = layers.activations[layers.last]
    given, giver = {"outer": outer, "x": y, **given}, "the last layer"
    check_loss(output_shapes("Model.head_loss", model.head_loss, giver=giver, **given))
    return fixed


def _context(batch: Microbatches, i: Index, layer: Index, shard: Index) -> tuple[Batch, Key]:
    rows, rng, number = batch.at(i)
    return rows, layer_key(rng, microbatch=number, shard=shard, layer=layer)


def _embed(
    setup: Setup, batch: Microbatches, outer: OuterParams, i: Index, shard: Index
) -> Activation:
    layer = embed_layer(sum(setup.table.layer_counts))
    return setup.model.embed(outer, *_context(batch, i, layer, shard))
