"""Memory of a training step on each device, predicted from the schedule and compiled.

The tick loop's buffers follow from the schedule: slots x layers x sizes; the gradients that a step
returns are among them. Beside them the compiler keeps the values of the one layer it is running,
which no schedule changes; that working set is read from the same model compiled with two
microbatches and a plain schedule, and with few layers if they cost time to compile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax

from jaxpipe.runtime.measure.traced import buffers
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.types import Batch, Key, Shapes
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.generators.breadth_first import breadth_first
from jaxpipe.schedule.generators.depth_first import one_f_one_b


def predicted_bytes(
    pipe: Pipeline,
    batch: Batch,
    rng: Key = None,
    *,
    by_chunk: optax.GradientTransformation | None = None,
) -> dict[str, int]:
    """Predicts the bytes that a training step takes on each device beside its arguments.

    Args:
      pipe: the pipeline; it is not run.
      batch: a batch, or its shapes.
      rng: as for `Pipeline.value_and_grad`.
      by_chunk: the optimizer of ``pipe.train_step(by_chunk, update="chunk")``, for the memory of
        that step; None for a step that updates after the backward, whose optimizer's own memory
        beside the gradients is not counted.

    Returns:
      Bytes by buffer, as `jaxpipe.runtime.measure.traced.buffers` names them, and "working_set".
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
    that it takes on each device beside its arguments.

    The update is part of the program: gradients that a program returns have arrays of their own, in
    whose room the compiler puts whatever happens to fit.

    Arguments as for `predicted_bytes`.
    """
    updates = PLAIN_UPDATES if by_chunk is None else (by_chunk, "chunk")
    return bytes_beside_arguments(compiled(pipe, batch, rng, updates=updates))


PLAIN_UPDATES = optax.sgd(1.0), "step"
"""Arguments of `Pipeline.train_step` for updates that need nothing beside the gradients."""


def bytes_beside_arguments(program: jax.stages.Compiled) -> int:
    """Bytes that a compiled program takes on each device beside its arguments."""
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
    if reduced and pipe.table.reduces_last(gathers=pipe.options.zero == 3):
        layers = pipe.layout.local.layers
        parts = [leaf.summed.struct(sharded=True) for leaf in jax.tree.leaves(layers.piece)]
        return reduced + tree_bytes(parts) * reduces.group // reduces.shares
    return 0 if reduces.whole or reduces.shared.any() else reduced


def _smallest(pipe: Pipeline) -> Pipeline:
    """Makes a pipeline of the same model, mesh and options that is fast to compile.

    It has two microbatches, because the compiler simplifies where it knows that there is one, and
    in general one chunk per stage. It has two layers if layers are alike and each has a loop body
    or an array of its own. Stacked layers keep their number, for the compiler packs its values into
    memory in the order of their sizes: how well those of a layer fit depends on which of them are
    larger than the arrays of all layers. Stacked layers also keep their chunks if these are reduced
    from slots while layers run: a single chunk would have all layers in one slot. Chunks have one
    layer if those of the pipeline do: then the gradient of a layer is that of its chunk, and not a
    copy beside it. Ticks go one way if those of the pipeline do: then only messages of one
    direction exist at once. Where layers run in pairs, the pipeline keeps its schedule, whose pairs
    have the values of two layers at once.
    """
    stages, chunks, layers = pipe.schedule.num_stages, 1, 2
    params = dict(pipe.canonical_params)
    if pipe.model.layers_are_alike:
        largest, stacked = max(pipe.table.layer_counts), pipe.options.weights == "stacked"
        if pipe.options.pair_layers:
            chunks, layers = pipe.schedule.num_chunks, largest if stacked else min(largest, 2)
        elif largest == 1:
            chunks, layers = min(2, pipe.schedule.num_chunks), 1
        elif stacked and pipe.options.zero >= 2 and pipe.table.reduces.shared.any():
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
    options = dataclasses.replace(pipe.options, layer_counts=None, poison=False)
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
