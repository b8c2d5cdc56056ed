"""Prepares a run: follows the activations through the layers, and checks embedding and head."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.defaults import RESIDUALS, RESIDUALS_OF_F, known_slots, room
from jaxpipe.runtime.filters import name_of
from jaxpipe.runtime.layers import losses
from jaxpipe.runtime.layers.jaxprs import collectives, dependent, read_leaves
from jaxpipe.runtime.layers.kinds import Layers, barred, sort_layers
from jaxpipe.runtime.layers.model import output_shapes
from jaxpipe.runtime.layers.split import split_layer
from jaxpipe.runtime.layout.buffers import (
    KnownSlots,
    SharedBuffers,
    kinds_at_places,
    values_in_room,
)
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.layout.whole_model import SHARED, Layout
from jaxpipe.runtime.tick.fixed import Collector, Fixed, GradientSink, WeightSource
from jaxpipe.runtime.tick.microbatches import Microbatches
from jaxpipe.runtime.tick.outer_phases import Losses, Outputs, check_output
from jaxpipe.runtime.tick.setup import (
    CARRY,
    CARRY_GRADIENT,
    ON_HOST,
    Setup,
    mean_scale,
)
from jaxpipe.runtime.trees import combine
from jaxpipe.runtime.types import (
    Activation,
    Batch,
    Key,
    LayerParams,
    OuterParams,
    Shapes,
    Tree,
)
from jaxpipe.schedule.problems import refuse


def fix(
    setup: Setup,
    batch: Microbatches,
    outer: OuterParams,
    *,
    weights: WeightSource,
    gradients: GradientSink | None,
) -> Fixed:
    """Finds the kinds of layers, and what they leave in buffers; inside `jax.shard_map`."""
    rows, axes = setup.layout.layers.rows, setup.layout.axes
    stage, shard = lax.axis_index(axes.stage), lax.axis_index(axes.data)
    rows_of_one, rng, _ = jax.eval_shape(lambda: batch.at(0))
    layers = layers_of(setup, outer, rows_of_one, rng)
    refuse(_inputs_of_layers(layers, rows_of_one, setup.inputs))
    kind_of = np.where(rows < 0, -1, np.asarray(layers.kind_of, np.int32)[rows])
    leaves = [jax.tree.leaves(x) for x in layers.activations]
    collector, weight = _leaving(setup, layers, outer, layers.merged, rows_of_one, rng)
    fixed = Fixed(
        setup,
        stage,
        shard,
        layers,
        first_layer=jnp.asarray(rows[:, :, 0])[stage],
        kind_of=jnp.asarray(kind_of)[stage],
        residuals={},
        messages=SharedBuffers(leaves, np.arange(len(leaves)).reshape(-1, 1, 1), tiled=setup.tiled),
        weights=weights,
        gradients=gradients,
        collector=collector,
        weight=weight,
    )
    fixed = dataclasses.replace(fixed, residuals=_buffers(fixed, kind_of))
    if not setup.table.together:
        refuse(_barred_at_ends(fixed, outer, rows_of_one, rng))
    if setup.trains:
        _warn_of_unread(fixed, outer, rows_of_one, rng)
    return fixed


def layers_of(setup: Setup, outer: OuterParams, microbatch: Batch, rng: Key) -> Layers:
    """Traces the layers of a model and splits each kind once; arguments are arrays or shapes."""
    params, _, frozen = _shapes_of_layers(setup)
    numbers, states = range(len(params)), setup.states
    cut = partial(
        split_layer,
        fp8_recipe=setup.options.fp8_recipe,
        remat=setup.options.remat,
        loss_scale=mean_scale(setup),
        early=setup.early,
    )
    embed = setup.model.embed
    return sort_layers(
        setup.model,
        params,
        output_shapes("Model.embed", embed, outer=outer, microbatch=microbatch, rng=rng),
        microbatch,
        rng,
        cut=cut,
        quantized=list(map(setup.quantized, numbers)),
        frozen=frozen,
        flows=None if frozen is None else _flows(setup, outer, microbatch, rng),
        states=None if states is None else [states.shape_of(n) for n in numbers],
        num_slices=setup.num_slices,
        stage_axis=setup.layout.axes.stage,
    )


def _flows(setup: Setup, outer: OuterParams, rows: Batch, rng: Key) -> tuple[bool, ...]:
    """Marks the arrays of the first layer's input that depend on what has a gradient."""
    trained = {path for path, _ in jax.tree.leaves_with_path(setup.layout.outer)}
    paths = [path for path, _ in jax.tree.leaves_with_path(outer)]
    numbers = [n for n, path in enumerate(paths) if path in trained]
    numbers += [len(paths) + n for n in setup.inputs]
    model = setup.model
    first = jax.make_jaxpr(lambda *args: model.spread(model.embed(*args)))(outer, rows, rng)
    return dependent(first, numbers)


def _shapes_of_layers(
    setup: Setup,
) -> tuple[list[LayerParams], list[LayerParams], list[LayerParams] | None]:
    """Shapes of the parameters of every layer: all, the trained ones, and the others, if any."""
    numbers = range(sum(setup.table.layer_counts))
    trained, *frozen = ([layer_shapes(one, n) for n in numbers] for one in setup.layouts)
    if not frozen:
        return trained, trained, None
    return list(map(combine, trained, *frozen)), trained, frozen[0]


def _buffers(fixed: Fixed, kind_of: np.ndarray) -> dict[str, SharedBuffers | KnownSlots]:
    """Makes the buffers of what layers leave behind, by name.

    Args:
      kind_of: as for `SharedBuffers`.
    """
    setup, buffers = fixed.setup, dict[str, SharedBuffers | KnownSlots]()
    on_host = RESIDUALS_OF_F if setup.options.residuals == "host" else ()
    on_device, parts = setup.options.residuals == "device", setup.table.residual_parts
    apart = fixed.params.own_arrays or len(fixed.layers.kinds) == 1  # several share no stack
    known = _known(fixed) if apart and setup.knows_chunks and on_device else ()
    chunks = [
        [[kind for kind in one if kind >= 0]]
        for one in kind_of.reshape(-1, kind_of.shape[2]).tolist()
    ]
    for name, values in _left_behind(fixed.layers, setup).items():
        if name in known and not room(chunks, list(map(values_in_room, values))).in_excess:
            places = kinds_at_places(kind_of)
            buffers[name] = KnownSlots(values, places, stacked=fixed.loops_in_chunk)
        else:
            buffers[name] = SharedBuffers(
                values, kind_of, tiled=setup.tiled, on_host=name in on_host
            )
    if parts:
        moving = dataclasses.replace(fixed, residuals=buffers).moving_residuals
        stored = [jax.ShapeDtypeStruct((parts * one.size,), one.dtype) for one in moving]
        buffers[ON_HOST] = SharedBuffers([stored], kind_of, tiled=False, on_host=True)
    return buffers


def _known(fixed: Fixed) -> tuple[str, ...]:
    """Chooses the residuals whose slots the program knows: `known_slots`."""

    def num_layers(chunk: int, layers: int) -> int:
        if fixed.loops_in_chunk:
            return 1
        return sum(len(fixed.kinds_at(chunk, layer)) for layer in range(layers))

    return known_slots(fixed.table, num_layers, **fixed.moves)


def _left_behind(layers: Layers, setup: Setup) -> dict[str, list[Sequence[Shapes]]]:
    """Lists the shapes of what each kind of layer leaves behind, by name."""
    names = RESIDUALS if setup.trains else ()
    values = {name: [getattr(kind.split, name) for kind in layers.kinds] for name in names}
    if setup.num_slices > 1:
        carries = [jax.tree.leaves(kind.carry.shapes) for kind in layers.kinds if kind.carry]
        values |= dict.fromkeys((CARRY, CARRY_GRADIENT) if setup.trains else (CARRY,), carries)
    return values


def _inputs_of_layers(layers: Layers, batch: Batch, numbers: tuple[int, ...]) -> Iterator[str]:
    """Says which inputs are read by layers, whose backward has no part for the microbatch."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(batch)]
    for kind in layers.kinds:
        for n in kind.split.reads_of_context:
            if n in numbers:
                yield (
                    f"Pipeline.loss was differentiated with respect to batch{paths[n]}, which "
                    f"layer {kind.example} reads; only what the embedding and the head read has "
                    "a gradient. Let the embedding return it as a part of x."
                )


def _barred_at_ends(fixed: Fixed, outer: OuterParams, rows: Batch, rng: Key) -> Iterator[str]:
    """Names collectives of embedding and head, and of their backwards, for which stages that do not
    run them would wait."""
    setup, y = fixed.setup, fixed.layers.merged
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
            # Forwards run the function itself, of which derivatives by hand show nothing.
            forward = function(outer, *given, rows, rng)
            if not setup.trains:
                return forward
            trained, constant = fixed.divided(outer)

            def run(trained: OuterParams, given: tuple[Activation, ...]) -> Activation:
                result = function(combine(trained, constant), *given, rows, rng)
                return losses.differentiated(result) if given else result

            result, backward = jax.vjp(run, trained, given)
            return forward, backward(jax.tree.map(jnp.ones_like, result))

        traced = jax.make_jaxpr(passes)(outer, given, rows, rng)
        yield from barred(f"Model.{name}", collectives(traced.jaxpr), fixed.axes.stage)


_NAMED = 8
"""Most parameters that a warning names."""


def _warn_of_unread(
    fixed: Fixed,
    outer: OuterParams,
    rows: Batch,
    rng: Key,
) -> None:
    """Warns of trained parameters that the loss does not read."""
    model, found = fixed.setup.model, fixed.layers
    params, trained, _ = _shapes_of_layers(fixed.setup)

    def loss(*args: Tree) -> Tree:
        return losses.differentiated(model.head_loss(*args))

    def of_layer(n: int, tree: LayerParams) -> list[str]:
        own, *shared = tree if fixed.setup.shares else (tree,)
        own = own if model.layers_are_alike else {n: own}
        return _names({"layers": own}) + [name for w in shared for name in _names({SHARED: w})]

    inputs = (outer, rows, rng), (outer, found.merged, rows, rng)
    ends = read_leaves(model.embed, *inputs[0]), read_leaves(loss, *inputs[1])
    read = {name for one in ends for name in itertools.compress(_names(outer), one)}
    wanted = _names(fixed.setup.layout.outer)
    for n, number in enumerate(found.kind_of):
        read.update(itertools.compress(of_layer(n, params[n]), found.kinds[number].split.reads))
        wanted += of_layer(n, trained[n])
    unread = [name for name in dict.fromkeys(wanted) if name not in read]
    if unread:
        more = f" and {len(unread) - _NAMED} more" if len(unread) > _NAMED else ""
        warnings.warn(
            f"The loss does not depend on {', '.join(unread[:_NAMED])}{more}: these parameters "
            "cannot learn. Read them in the model's functions, or leave them out of `trainable`.",
            stacklevel=2,
        )


def _names(tree: Tree) -> list[str]:
    return [name_of(path) for path, _ in jax.tree.leaves_with_path(tree)]


def layer_shapes(layout: Layout, layer: int) -> Shapes:
    """Shapes of what a layer's function is given as its parameters, as far as they lie there."""
    own = layout.layers.shape_of(layer)
    if SHARED not in layout.outer:
        return own
    return own, jax.tree.map(Leaf.struct, layout.outer[SHARED])


def _leaving(
    setup: Setup, layers: Layers, outer: OuterParams, y: Activation, rows: Batch, rng: Key
) -> tuple[Collector, Callable[[Tree], jax.Array] | None]:
    """`Fixed.collector` and `Fixed.weight`; raises ValueError for what head and layers may not
    return."""
    passes, model = setup.table.schedule.num_passes, setup.model
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
        check_output(result, rows, setup.num_slices)
        return Outputs(result, passes, setup.num_slices), None
    losses.check_loss(result, "Model.head_loss returns", weighted=True)
    losses.check_metrics_of_layers(layers.losses, result)
    weight = None
    if setup.trains and isinstance(losses.parts(result)[0], losses.Weighted):
        weight = losses.weight_of(model.head_loss, outer, y, (rows, rng), setup.inputs)
    shapes = jax.eval_shape(losses.addable, result)
    return Losses(shapes, passes, len(layers.losses), setup.layout.axes, setup.totals), weight
