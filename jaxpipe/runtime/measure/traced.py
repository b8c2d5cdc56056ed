"""Facts about a pipeline's program from its trace, without compiling it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.layers.kinds import Layers
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.tick import executor
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.microbatches import StepMicrobatches, split_rows
from jaxpipe.runtime.types import Batch, Key, Placed, Shapes, States
from jaxpipe.runtime.update.training_step import Applied
from jaxpipe.schedule.problems import refuse

Traced = TypeVar("Traced")


def buffers(
    pipe: Pipeline,
    batch: Batch,
    rng: Key = None,
    *,
    by_chunk: optax.GradientTransformation | None = None,
) -> dict[str, Shapes]:
    """Finds the buffers of the tick loop on each device, which schedule and model determine.

    Pieces of chunks that are gathered or reduced while layers run are "moving".

    Args:
      pipe: the pipeline; it is not run.
      batch: a batch, or its shapes.
      rng: as for `Pipeline.value_and_grad`.
      by_chunk: an optimizer that updates every chunk within the step; None keeps the gradients.

    Returns:
      Trees of `jax.ShapeDtypeStruct` by the buffer's name.
    """

    def read(fixed: Fixed, _: StepMicrobatches) -> dict[str, Shapes]:
        if by_chunk is not None:
            setup = dataclasses.replace(fixed.setup, table=pipe.chunk_table)
            sink = Applied(pipe.placed_optimizer(by_chunk))
            fixed = dataclasses.replace(fixed, setup=setup, gradients=sink)
        moving, shapes = executor.moving_shapes(fixed), executor.buffer_shapes(fixed)
        for name, kept in fixed.residuals.items():
            if kept.on_host:
                shapes.pop(name, None)
        return shapes | ({"moving": moving} if any(moving) else {})

    return within(pipe, batch, rng, read)


def layers(pipe: Pipeline, batch: Batch, rng: Key = None) -> tuple[Layers, Shapes]:
    """Traces the layers by kind, each with F, B and W; also returns shapes of microbatch and key.

    Arguments as for `buffers`.
    """

    def read(fixed: Fixed, batch: StepMicrobatches) -> tuple[Layers, Shapes]:
        context = jax.eval_shape(lambda: fixed.context(batch, 0, 0))
        # The shapes are returned without the mesh in which they were traced.
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), context)
        return fixed.layers, shapes

    return within(pipe, batch, rng, read)


def within(
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
