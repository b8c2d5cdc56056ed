"""Reads what is known where the program of a step is traced."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.layers.kinds import Layers
from jaxpipe.runtime.layout.placed import Placed
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.tick import executor
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.microbatches import StepMicrobatches, split_rows
from jaxpipe.runtime.trees import bare_shapes
from jaxpipe.runtime.types import Batch, Key, Shapes, States
from jaxpipe.schedule.problems import refuse

Traced = TypeVar("Traced")


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
