"""Facts about a pipeline's program: costs of its layers, its buffers, and the memory of its step.

Costs of layers, for `jaxpipe.schedule.partition`, are counted from the trace, or timed.

The tick loop's buffers follow from the schedule: slots x layers x sizes; the gradients that a step
returns are among them. Beside them the compiler keeps the values of the one layer it is running,
which no schedule changes; that working set is read from the same model compiled with two
microbatches and a plain schedule, and with few layers if they cost time to compile.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.layers import jaxprs, losses
from jaxpipe.runtime.layers.kinds import LayerKind, Layers
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.layout.placed import Placed
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.tick import executor
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.microbatches import StepMicrobatches, split_rows
from jaxpipe.runtime.trees import bare_shapes, combine
from jaxpipe.runtime.types import Activation, Batch, Key, Shapes, States, Tree
from jaxpipe.runtime.update.training_step import Applied
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.generators.breadth_first import breadth_first
from jaxpipe.schedule.generators.depth_first import one_f_one_b
from jaxpipe.schedule.offload import kept_on_devices
from jaxpipe.schedule.problems import refuse
from jaxpipe.schedule.simulate import Costs

Traced = TypeVar("Traced")


def buffers(
    pipe: Pipeline,
    batch: Batch,
    rng: Key = None,
    *,
    by_chunk: optax.GradientTransformation | None = None,
) -> dict[str, Shapes]:
    """Finds the buffers of the tick loop on each device.

    "moving" has the pieces of chunks that are gathered or reduced while layers run, and the
    residuals that are on their way to the host or back.

    Args:
      batch: a batch, or its shapes.
      by_chunk: an optimizer that updates every chunk within the step; None keeps the gradients.

    Returns:
      Trees of `jax.ShapeDtypeStruct` by the buffer's name.
    """

    def read(fixed: Fixed, _: StepMicrobatches) -> dict[str, Shapes]:
        if by_chunk is not None:
            setup = dataclasses.replace(fixed.setup, table=pipe.chunk_table)
            applied = Applied(pipe.placed_optimizer(by_chunk))
            fixed = dataclasses.replace(fixed, setup=setup, gradients=applied)
        sink, shapes = fixed.gradients, executor.buffer_shapes(fixed)
        moving = [fixed.weights.moving(fixed), [] if sink is None else sink.moving(fixed)]
        moving.append(fixed.moving_residuals)
        for name, kept in fixed.residuals.items():
            if kept.on_host:
                shapes.pop(name, None)
        return shapes | ({"moving": moving} if any(moving) else {})

    return in_trace(pipe, batch, rng, read)


def traced_layers(pipe: Pipeline, batch: Batch, rng: Key = None) -> tuple[Layers, Shapes]:
    """Traces the layers by kind, each with F, B and W; also returns shapes of microbatch and key.

    Arguments as for `buffers`.
    """

    def read(fixed: Fixed, batch: StepMicrobatches) -> tuple[Layers, Shapes]:
        return fixed.layers, bare_shapes(jax.eval_shape(lambda: fixed.context(batch, 0, 0)))

    return in_trace(pipe, batch, rng, read)


def in_trace(
    pipe: Pipeline, batch: Batch, rng: Key, read: Callable[[Fixed, StepMicrobatches], Traced]
) -> Traced:
    """Calls ``read`` where a step's program is traced, inside `jax.shard_map`; returns its result.

    Other arguments as for `buffers`.
    """
    refuse(pipe.batch_problems(batch))
    results: list[Traced] = []

    def body(placed: Placed, batch: Batch, rng: Key, states: States) -> jax.Array:
        rows = split_rows(batch, pipe.schedule.num_microbatches, pipe.schedule.num_slices)
        microbatches, setup = StepMicrobatches(rows, rng), pipe.setup(pipe.table)
        fixed, _ = executor.begin(setup, placed, microbatches, executor.sink_of(setup))
        results.append(read(fixed, microbatches))
        return jnp.zeros(())

    arguments = pipe.placed_params, batch, rng, pipe.placed_states
    jax.eval_shape(pipe.shard_map(body, pipe.in_specs, P()), *arguments)
    return results[0]


# Costs of layers.


_GROUPS, _QUEUED = 5, 4
"""A program is timed in groups of runs that wait for the device together, as they do in a step; the
fastest group counts, since whatever disturbs only adds."""


def layer_costs(
    pipe: Pipeline,
    batch: Batch,
    rng: Key = None,
    *,
    measure: bool = False,
    together: bool = False,
) -> list[Costs]:
    """Costs of F, B and W of every layer for one microbatch on one data shard, without messages.

    If sequences are cut, costs are those of a slice that attends to the whole sequence.

    Layers of one kind are traced, or timed, once. By default costs are the floating-point
    operations that XLA counts before it optimizes, including the recomputation of ``remat``. If
    devices along model axes share a layer, operations are those of one device's part, and a time is
    that of all devices together.

    Args:
      pipe: any pipeline of the model; it is not run, and its partition does not matter.
      batch: a batch, or its shapes.
      rng: as for `Pipeline.value_and_grad`.
      measure: compile every part, run it on the first device, and return seconds.
      together: run it on all devices of the pipeline at once, with the same values, since all are
        busy in a step; simulated devices share the machine's cores.
    """
    layers, context = traced_layers(pipe, batch, rng)
    cost = functools.partial(_cost, pipe, measure=measure, together=together)
    by_kind = [
        Costs(*(cost(part, *args) for part, args in map(parts.__getitem__, "fbw")))
        for parts in (_parts(pipe, kind, layers.activations, context) for kind in layers.kinds)
    ]
    return [by_kind[number] for number in layers.kind_of]


def end_costs(
    pipe: Pipeline, batch: Batch, rng: Key = None, *, measure: bool = False
) -> tuple[float, float]:
    """Costs of embedding and head for one microbatch, each with its gradient, as in `layer_costs`.

    Without ``Model.stage_split``, the stages of the first and the last layer compute them. Add them
    to the costs of these layers for `jaxpipe.schedule.partition`.

    Args:
      pipe: pipeline of a model without ``stage_split``; all arguments as for `layer_costs`.
    """
    layers, (rows, key) = traced_layers(pipe, batch, rng)
    outers = [
        jax.tree.map(Leaf.struct, layout.local.outer)
        for layout in (pipe.layout, pipe.frozen)
        if layout is not None
    ]
    outer, model = functools.reduce(combine, outers), pipe.model

    def embed(outer: Shapes, dx: Activation, rows: Batch, key: Key) -> Tree:
        value, vjp = jax.vjp(lambda outer: model.embed(outer, rows, key), outer)
        return value, vjp(dx)

    def head(outer: Shapes, y: Activation, rows: Batch, key: Key) -> Tree:
        def loss(outer: Shapes, y: Activation) -> jax.Array:
            return losses.differentiated(model.head_loss(outer, y, rows, key))

        return jax.value_and_grad(loss, (0, 1))(outer, y)

    cost = functools.partial(_cost, pipe, measure=measure)
    given = rows, key
    return cost(embed, outer, layers.embedded, *given), cost(head, outer, layers.merged, *given)


def _parts(
    pipe: Pipeline, kind: LayerKind, activations: Sequence[Activation], context: Shapes
) -> dict[str, tuple[Callable[..., Tree], tuple[Shapes, ...]]]:
    """Makes F, B and W of a kind of layer, each with the shapes of its arguments."""
    split, params, states = kind.split, kind.split.params, pipe.state_layout
    state = None if states is None else states.shape_of(kind.example)
    x, dy, until_w = activations[kind.x], activations[kind.y], list(split.until_w)
    if kind.carry is not None:
        x, dy = (x, kind.carry.shapes), (dy, kind.carry.shapes)
        until_w += kind.carry.buffers
        context = *context, jax.ShapeDtypeStruct((), jnp.int32)

    def forward(params: Shapes, x: Activation, state: Shapes, *context: Shapes) -> Tree:
        return split.forward(params, x, *context, state=state)

    return {
        "f": (forward, (params, x, state, *context)),
        "b": (split.backward_input, (params, list(split.until_b), until_w, dy, *context)),
        "w": (split.backward_weights, (params, until_w, list(split.crossing), *context)),
    }


def _cost(
    pipe: Pipeline, part: Callable[..., Tree], *args: Shapes, measure: bool, together: bool = False
) -> float:
    """Measures the seconds of a function, or counts its operations."""
    if together or pipe.model.uses_axes:
        # What names axes runs on all devices, each with values like these.
        part = pipe.shard_map(part, P(), P())
    if measure:
        return run_seconds(jax.jit(part, keep_unused=True), *args)
    return _flops(part, args)


def _flops(part: Callable[..., Tree], args: Sequence[Shapes]) -> float:
    program = jax.jit(part).trace(*args)
    flops = _flops_of_xla(program)
    for eqn in jaxprs.with_stated_flops(program.jaxpr.jaxpr):
        # XLA counts one turn of a loop.
        alone = jax.jit(lambda *args, eqn=eqn: jaxprs.bind(eqn, args))
        counted = _flops_of_xla(alone.trace(*jaxprs.shapes_of_variables(eqn.invars)))
        flops += (jaxprs.stated_flops(eqn.primitive, eqn.params) or 0.0) - counted
    return max(flops, 1.0)  # a layer without parameters has no W


def _flops_of_xla(program: jax.stages.Traced) -> float:
    analysis = program.lower().cost_analysis()
    assert analysis is not None  # every backend of jax has one
    return analysis.get("flops", 0.0)


def run_seconds(program: jax.stages.Wrapped, *args: Shapes) -> float:
    """Measures the seconds of a run of a jitted function, which must keep arguments that it does
    not read, on zeros of these shapes."""
    compiled = program.lower(*args).compile()
    given, _ = compiled.input_shardings
    arrays = jax.tree.map(_zeros, args)
    arrays = jax.tree.map(jax.device_put, arrays, given)
    jax.block_until_ready(compiled(*arrays))
    best = float("inf")
    for _ in range(_GROUPS):
        began = time.perf_counter()
        for _ in range(_QUEUED):
            last = compiled(*arrays)
        jax.block_until_ready(last)
        best = min(best, time.perf_counter() - began)
    return best / _QUEUED


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return jnp.zeros(leaf.shape, leaf.dtype)


# Memory of a step.


def predicted_bytes(
    pipe: Pipeline,
    batch: Batch,
    rng: Key = None,
    *,
    by_chunk: optax.GradientTransformation | None = None,
) -> dict[str, int]:
    """Predicts the bytes that a training step takes on each device in addition to its arguments.

    Args:
      pipe: the pipeline; it is not run.
      batch: a batch, or its shapes.
      rng: as for `Pipeline.value_and_grad`.
      by_chunk: the optimizer of ``pipe.train_step(by_chunk, update="chunk")``, for the memory of
        that step. None is for a step that updates after the backward, without the memory that its
        optimizer needs beside the gradients.

    Returns:
      Bytes by buffer, as `buffers` names them, and "working_set".
    """
    small = _smallest(pipe)
    rows = small.schedule.num_microbatches / pipe.schedule.num_microbatches
    small_batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((int(leaf.shape[0] * rows), *leaf.shape[1:]), leaf.dtype),
        batch,
    )
    bytes_by_buffer, of_small = (
        {name: tree_bytes(tree) for name, tree in buffers(*args, rng, by_chunk=by_chunk).items()}
        for args in ((pipe, batch), (small, small_batch))
    )
    beside = compiled_bytes(small, small_batch, rng, by_chunk=by_chunk) - sum(of_small.values())
    working_set = beside + _free(small, of_small) - _free(pipe, bytes_by_buffer)
    return bytes_by_buffer | {"working_set": max(working_set, 0)}


def compiled_bytes(
    pipe: Pipeline,
    batch: Batch,
    rng: Key = None,
    *,
    by_chunk: optax.GradientTransformation | None = None,
) -> int:
    """Compiles the step, with plain SGD if it updates after the backward, and returns the bytes
    that it takes on each device in addition to its arguments.

    The program includes the update. If it returned gradients, the compiler would reuse their arrays
    for other values.

    Arguments as for `predicted_bytes`.
    """
    updates = PLAIN_UPDATES if by_chunk is None else (by_chunk, "chunk")
    return bytes_beside_arguments(compiled(pipe, batch, rng, updates=updates))


PLAIN_UPDATES = optax.sgd(1.0), "step"
"""Arguments of `Pipeline.train_step` for updates that need nothing beside the gradients."""


def bytes_beside_arguments(program: jax.stages.Compiled) -> int:
    """Bytes that a compiled program takes on each device in addition to its arguments."""
    analysis = program.memory_analysis()
    assert analysis is not None  # every backend of jax has one
    returned = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + returned


def compiled(
    pipe: Pipeline,
    batch: Batch,
    rng: Key = None,
    *,
    updates: tuple[optax.GradientTransformation, str] | None = None,
    options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiles for the shapes of these arguments, with these options of XLA.

    ``updates`` are the arguments of `Pipeline.train_step`; None compiles `Pipeline.value_and_grad`.
    """

    def shape(leaf: Shapes) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=pipe.batch_sharding)

    batch, states = jax.tree.map(shape, batch), pipe.placed_states
    if updates is None:
        lowered = jax.jit(pipe.value_and_grad).lower(pipe.placed_params, batch, rng, states=states)
    else:
        optimizer, when = updates
        state = pipe.optimizer_placing(optimizer).placed
        step: Any = pipe.train_step(optimizer, update=when)
        lowered = step.lower(pipe.placed_params, state, batch, rng, states)
    return lowered.compile(options)


def tree_bytes(shapes: Shapes) -> int:
    """Bytes of all arrays of a tree, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _free(pipe: Pipeline, bytes_by_buffer: dict[str, int]) -> int:
    """Counts the bytes of buffers that are unused while layers run; the working set may lie there.

    The finished gradients are written after the last tick if nothing is reduced before. If only the
    last tick reduces, they are written then as well, and so are the results of that reduction.
    """
    reduces, reduced = pipe.table.reduces, bytes_by_buffer.get("reduced", 0)
    if reduced and pipe.table.reduces_last(gathers=pipe.options.zero.shards_weights):
        layers = pipe.layout.local.layers
        parts = [leaf.summed.struct(sharded=True) for leaf in jax.tree.leaves(layers.piece)]
        return reduced + tree_bytes(parts) * reduces.group // reduces.shares
    return 0 if reduces.whole or reduces.shared.any() else reduced


def _smallest(pipe: Pipeline) -> Pipeline:
    """Makes a pipeline of the same model, mesh and options that is fast to compile.

    It has two microbatches, because the compiler simplifies where it knows that there is one, and
    in general one chunk per stage, of two layers. It keeps what the working set depends on: the
    number of stacked layers, since the compiler packs values into memory in the order of their
    sizes, and their chunks if these are reduced from slots while layers run; chunks of one layer,
    whose gradient is no copy beside its own; ticks that go one way, with messages of one direction;
    and, where layers run in pairs, the schedule.
    """
    stages, chunks, layers = pipe.schedule.num_stages, 1, 2
    params = dict(pipe.canonical_params)
    if pipe.model.layers_are_alike:
        largest, stacked = max(pipe.table.layer_counts), pipe.options.weights == "stacked"
        if pipe.options.pair_layers:
            chunks, layers = pipe.schedule.num_chunks, largest if stacked else min(largest, 2)
        elif largest == 1:
            chunks, layers = min(2, pipe.schedule.num_chunks), 1
        elif stacked and pipe.options.zero.shards_gradients and pipe.table.reduces.shared.any():
            chunks, layers = pipe.schedule.num_chunks, largest
        elif stacked:
            layers = largest * pipe.schedule.num_chunks
        num_layers = layers * chunks * stages
        params["layers"] = jax.tree.map(
            lambda w: jax.ShapeDtypeStruct((num_layers, *w.shape[1:]), w.dtype), params["layers"]
        )
    fused = Kind.BW in pipe.table.passes
    slices = pipe.schedule.num_slices
    schedule = one_f_one_b(stages, 2, fused=fused, num_slices=slices)
    both_ways = any(
        tick.forward and tick.backward for tick in pipe.table.parts(gathers=False, reduces=False)
    )
    if chunks > 1 or not both_ways:
        schedule = breadth_first(stages, 2, num_chunks=chunks, fused=fused, num_slices=slices)
    if pipe.options.pair_layers:
        schedule = pipe.schedule
    elif pipe.table.num_slots["crossing"] > 1:
        # With only one slot for a layer, the values that B leaves for W are written in place.
        orders = (tuple(sorted(row, key=lambda a: a.kind is Kind.W)) for row in schedule.orders)
        schedule = dataclasses.replace(schedule, orders=tuple(orders), peak_in_flight=None)
    residuals = pipe.options.residuals
    if not isinstance(residuals, str):
        parts = schedule.num_chunks * slices
        residuals = max(residuals, max(kept_on_devices(schedule)) / parts)
    options = dataclasses.replace(
        pipe.options, layer_counts=None, poison=False, residuals=residuals
    )
    return Pipeline(
        pipe.model,
        params,
        schedule=schedule,
        mesh=pipe.mesh,
        stage_axis=pipe.axes.stage,
        data_axes=pipe.axes.split,
        replica_axes=pipe.axes.replica,
        states=pipe.canonical_states,
        **vars(options),
    )
