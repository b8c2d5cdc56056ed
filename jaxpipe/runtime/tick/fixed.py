"""What no tick changes: the setup, the layers by kind, and this device's place on the mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.layers import losses
from jaxpipe.runtime.layers.calls import output_shapes
from jaxpipe.runtime.layers.jaxprs import collectives
from jaxpipe.runtime.layers.keys import embed_layer, head_layer, layer_key
from jaxpipe.runtime.layers.kinds import Layers, barred, sort_layers
from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layout.buffers import SharedBuffers
from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.layout.whole_model import SHARED, Layout, layer_rows
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.tick.collected import Collector, Losses, Outputs, check_output
from jaxpipe.runtime.tick.inputs import read_by_layers
from jaxpipe.runtime.tick.microbatches import Microbatches, StepMicrobatches
from jaxpipe.runtime.trees import combine, divide
from jaxpipe.runtime.types import (
    Activation,
    Batch,
    Index,
    Key,
    Message,
    OuterParams,
    Shapes,
    Tree,
)
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import Pairs, TickTable
from jaxpipe.schedule.problems import refuse

if TYPE_CHECKING:
    from jaxpipe.runtime.tick.gradients import GradientSink
    from jaxpipe.runtime.tick.stamps import Stamps
    from jaxpipe.runtime.tick.weights import WeightSource

RESIDUALS_OF_F = ("until_b", "until_w")
RESIDUALS = (*RESIDUALS_OF_F, "crossing")
"""What a layer leaves behind: for B, for B and W, and from B to W."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything about a run that is known before it is traced.

    Args:
      model: the user's functions.
      layout: where the parameters that are trained live, as a device has them: `Layout.local`.
      frozen: where the others live, likewise; None if all are trained.
      table: the tick table to run.
      remat: rematerialization policy, by name.
      zero: ZeRO level 0 to 3; 0 when the data axis has one device.
      states: where the layers' states live, or None for a model without.
      compute: dtypes that layers compute in, a tree like a piece for each of `layouts`; None for
        those of the parameters.
      poison: fill buffers and idle messages with NaN, to prove that nothing from a bubble is used.
      outputs: collect what `Model.output` returns, not the loss; forward only.
      inputs: numbers of the batch's arrays whose gradients are wanted.
      early: whether B does what belongs to W where less then crosses; not where W follows at once.
      leaves: the kind of forward that leaves residuals.
      residuals: where those of F wait, "device" or "host".
      pair_layers: whether layers of an overlapped forward and backward share a loop.
      overlaps: whether devices communicate while they compute.
      stamps: where the host notes when cells begin and end; None for a step that is not measured.
    """

    model: Model
    layout: Layout
    frozen: Layout | None
    table: TickTable
    remat: str
    zero: int
    states: LayerLayout | None = None
    compute: Sequence[Tree] | None = None
    poison: bool = False
    outputs: bool = False
    inputs: tuple[int, ...] = ()
    early: bool = True
    leaves: Kind = Kind.F
    residuals: str = "device"
    pair_layers: bool = False
    overlaps: bool = True
    stamps: Stamps | None = None

    @property
    def layouts(self) -> list[Layout]:
        """Those of all parameters: `layout`, and `frozen` if there is one."""
        return [self.layout] if self.frozen is None else [self.layout, self.frozen]

    @property
    def layer_layouts(self) -> list[LayerLayout]:
        """Where layers lie in them."""
        return [layout.layers for layout in self.layouts]

    @property
    def shares(self) -> bool:
        """Whether layers share parameters."""
        return SHARED in self.layout.outer

    @property
    def trains(self) -> bool:
        return bool(self.table.passes.keys() & {Kind.B, Kind.BW})


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
    residuals: dict[str, SharedBuffers]
    messages: SharedBuffers
    collector: Collector
    weight: Callable[[Tree], jax.Array] | None

    @property
    def axes(self) -> Axes:
        """The mesh axes by their use."""
        return self.setup.layout.axes

    @property
    def params(self) -> LayerLayout:
        """Where the layers' trained parameters lie, and their gradients."""
        return self.setup.layout.layers

    @property
    def table(self) -> TickTable:
        return self.setup.table

    @property
    def pairs(self) -> Pairs:
        """The actions whose layers share a loop: none where cells are measured one by one, or
        where layers are of several kinds."""
        measured = self.setup.stamps is not None
        alone = measured or len(self.layers.kinds) > 1 or not self.setup.pair_layers
        return {} if alone else self.table.pairs

    @property
    def num_layers(self) -> int:
        return sum(self.table.layer_counts)

    def context(self, batch: Microbatches, i: Index, layer: Index) -> tuple[Batch, Key]:
        """What every function of a layer is given beside its parameters and values."""
        return _context(batch, i, layer, self.shard)

    def divided(self, outer: OuterParams) -> tuple[OuterParams, OuterParams]:
        """What is trained of what belongs to no single layer, and the rest."""
        frozen = self.setup.frozen
        nothing = jax.tree.map(lambda _: None, outer)
        return divide(outer, nothing if frozen is None else frozen.outer)

    def embed(self, batch: Microbatches, outer: OuterParams, i: Index) -> Activation:
        """The embedding of a microbatch."""
        context = self.context(batch, i, embed_layer(self.num_layers))
        return self.setup.model.embed(outer, *context)

    def head(self, batch: Microbatches, outer: OuterParams, x: Activation, i: Index) -> Tree:
        """The loss or the output of a microbatch, from the last layer's output."""
        model, context = self.setup.model, self.context(batch, i, head_layer(self.num_layers))
        function = model.output if self.setup.outputs else model.head_loss
        result = function(outer, x, *context)
        return jax.tree.map(jnp.asarray, result)  # a Python number has a dtype then

    # Losses.

    @property
    def layer_losses(self) -> Shapes:
        """Shapes of a layer's own loss and metrics, made `losses.addable`; None if there are none,
        or none are wanted."""
        found = None if self.setup.outputs else next(iter(_layer_losses(self.layers)), None)
        return jax.eval_shape(losses.addable, found)

    def loss_scale(self, batch: Microbatches, i: Index) -> float | jax.Array:
        """The cotangent of a microbatch's loss."""
        weighted = batch.scale_of(i)
        return _mean_scale(self.setup) if weighted is None else weighted

    def weighed(self, batch: StepMicrobatches) -> StepMicrobatches:
        """The microbatches with the scale of their losses, if these are weighted."""
        weight = self.weight
        if weight is None:
            return batch
        layer = head_layer(self.num_layers)
        weights = lax.map(
            lambda i: weight(self.context(batch, i, layer)),
            jnp.arange(self.table.schedule.num_microbatches),
        )
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
    model, axes = setup.model, setup.layout.axes
    stage, shard = lax.axis_index(axes.stage), lax.axis_index(axes.data)
    rows_of_one, rng = jax.eval_shape(lambda: _context(batch, 0, 0, shard))
    trained, *frozen = ([layer_shapes(one, n) for n in numbers] for one in setup.layouts)
    layers = sort_layers(
        model,
        list(map(combine, trained, *frozen)) if frozen else trained,
        output_shapes("Model.embed", model.embed, outer=outer, microbatch=rows_of_one, rng=rng),
        rows_of_one,
        rng,
        frozen=frozen[0] if frozen else None,
        states=None if setup.states is None else [setup.states.shape_of(n) for n in numbers],
        remat=setup.remat,
        loss_scale=_mean_scale(setup),
        early=setup.early,
        stage_axis=axes.stage,
    )
    refuse(read_by_layers(layers, rows_of_one, setup.inputs))
    kind_of = np.where(rows < 0, -1, np.asarray(layers.kind_of, np.int32)[rows])
    leaves = [jax.tree.leaves(x) for x in layers.activations]
    y = layers.activations[layers.last]
    collector, weight = _leaving(setup, layers, outer, y, rows_of_one, rng)
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
            name: SharedBuffers(
                [getattr(kind.split, name) for kind in layers.kinds],
                kind_of,
                on_host=name in RESIDUALS_OF_F and setup.residuals == "host",
            )
            for name in RESIDUALS
        },
        messages=SharedBuffers(leaves, np.arange(len(leaves)).reshape(-1, 1, 1)),
        collector=collector,
        weight=weight,
    )
    if not setup.table.together:
        refuse(_barred_at_ends(fixed, outer, rows_of_one, rng))
    return fixed


def _barred_at_ends(fixed: Fixed, outer: OuterParams, rows: Batch, rng: Key) -> Iterator[str]:
    """Names collectives of embedding and head, and of their backwards, for which stages that do not
    run them would wait."""
    setup, y = fixed.setup, fixed.layers.activations[fixed.layers.last]
    head = "output" if setup.outputs else "head_loss"
    for name, given in (("embed", ()), (head, (y,))):
        function = getattr(setup.model, name)

        def passes(
            outer: OuterParams,
            given: tuple[Activation, ...],
            rows: Batch,
            rng: Key,
            function: Callable[..., Tree] = function,
        ) -> Tree:
            if not setup.trains:
                return function(outer, *given, rows, rng)
            trained, constant = fixed.divided(outer)

            def run(trained: OuterParams, given: tuple[Activation, ...]) -> Activation:
                result = function(combine(trained, constant), *given, rows, rng)
                return losses.differentiated(result) if given else result

            result, backward = jax.vjp(run, trained, given)
            return backward(jax.tree.map(jnp.ones_like, result))

        traced = jax.make_jaxpr(passes)(outer, given, rows, rng)
        yield from barred(f"Model.{name}", collectives(traced.jaxpr), fixed.axes.stage)


def layer_shapes(layout: Layout, layer: int) -> Shapes:
    """Shapes of what a layer's function is given as its parameters, as far as they lie there."""
    own = layout.layers.shape_of(layer)
    if SHARED not in layout.outer:
        return own
    return own, jax.tree.map(Leaf.struct, layout.outer[SHARED])


def _context(batch: Microbatches, i: Index, layer: Index, shard: Index) -> tuple[Batch, Key]:
    rows, rng, number = batch.at(i)
    return rows, layer_key(rng, microbatch=number, shard=shard, layer=layer)


def _mean_scale(setup: Setup) -> float:
    """The cotangent of what is averaged over microbatches and the devices of a stage."""
    return 1 / (setup.table.schedule.num_microbatches * lax.axis_size(setup.layout.axes.peers))


def _layer_losses(layers: Layers) -> list[Shapes]:
    """Shapes of the losses and metrics of all layers that have any."""
    found = [layers.kinds[number].split.loss for number in layers.kind_of]
    return [one for one in found if one is not None]


def _leaving(
    setup: Setup, layers: Layers, outer: OuterParams, y: Activation, rows: Batch, rng: Key
) -> tuple[Collector, Callable[[Tree], jax.Array] | None]:
    """`Fixed.collector` and `Fixed.weight`; raises ValueError for what head and layers may not
    return."""
    microbatches, model = setup.table.schedule.num_microbatches, setup.model
    name = "output" if setup.outputs else "head_loss"
    result = output_shapes(
        f"Model.{name}",
        lambda *args: jax.tree.map(jnp.asarray, getattr(model, name)(*args)),
        giver="the last layer",
        outer=outer,
        x=y,
        microbatch=rows,
        rng=rng,
    )
    if setup.outputs:
        check_output(result, rows)
        return Outputs(result, microbatches), None
    losses.check_head_loss(result)
    of_layers = _layer_losses(layers)
    losses.check_metrics_of_layers(of_layers, result)
    weight = None
    if setup.trains and isinstance(losses.parts(result)[0], losses.Weighted):
        weight = losses.weight_of(model.head_loss, outer, y, (rows, rng), setup.inputs)
    shapes = jax.eval_shape(losses.addable, result)
    return Losses(shapes, microbatches, len(of_layers), setup.layout.axes), weight
