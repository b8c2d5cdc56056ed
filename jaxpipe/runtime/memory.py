"""Memory of a training step: its buffers, predicted and compiled."""

import dataclasses
from functools import partial
from typing import Any

import jax
import optax

from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.tick import executor
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.microbatches import StepMicrobatches
from jaxpipe.runtime.tracing import in_trace
from jaxpipe.runtime.types import Batch, Key, Shapes
from jaxpipe.runtime.update.training_step import Applied
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.generators.breadth_first import breadth_first
from jaxpipe.schedule.generators.depth_first import one_f_one_b
from jaxpipe.schedule.offload import kept_on_devices


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
        part = partial(jax.tree.map, lambda leaf: leaf.summed.struct(sharded=True))
        largest = max(tree_bytes(part(piece)) for piece in pipe.layout.local.layers.pieces)
        return reduced + largest * reduces.group // reduces.shares
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
    params, layer_counts = dict(pipe.canonical_params), None
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
    elif pipe.options.weights == "unrolled":  # other chunks have other layers at a place
        chunks, layer_counts = pipe.schedule.num_chunks, pipe.options.layer_counts
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
        pipe.options, layer_counts=layer_counts, poison=False, residuals=residuals
    )
    return Pipeline(
        pipe.model,
        params,
        schedule=schedule,
        mesh=pipe.mesh,
        stage_axis=pipe.axes.stage,
        data_axes=[name for name in pipe.axes.data if name not in pipe.axes.replica],
        replica_axes=pipe.axes.replica,
        states=pipe.canonical_states,
        **vars(options),
    )
