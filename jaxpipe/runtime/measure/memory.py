"""Memory: what a training step takes on each device, predicted from the schedule and compiled.

The tick loop's buffers follow from the schedule: slots x layers x sizes; the gradients that a step
returns are among them. Beside them the compiler keeps the values of the one layer it is running,
which no schedule changes; that working set is read from the same model compiled at its smallest,
two layers per stage and two microbatches.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxpipe.runtime.measure.traced import buffers
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.types import Batch, Key, Shapes
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.generators.one_f_one_b import one_f_one_b


def predicted_bytes(pipe: Pipeline, batch: Batch, rng: Key = None) -> dict[str, int]:
    """Predicts what ``pipe.value_and_grad`` takes on each device beside its arguments.

    Args:
      pipe: the pipeline; it is not run.
      batch: a batch, or its shapes.
      rng: as for `Pipeline.value_and_grad`.

    Returns:
      Bytes by buffer, as `jaxpipe.runtime.measure.traced.buffers` names them, and "working_set".
    """
    small = _smallest(pipe)
    rows = small.schedule.num_microbatches / pipe.schedule.num_microbatches
    small_batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((int(leaf.shape[0] * rows), *leaf.shape[1:]), leaf.dtype),
        batch,
    )
    kept = tree_bytes(buffers(small, small_batch, rng))
    working_set = compiled_bytes(small, small_batch, rng) - kept
    sizes = {name: tree_bytes(shapes) for name, shapes in buffers(pipe, batch, rng).items()}
    return sizes | {"working_set": working_set}


def compiled_bytes(pipe: Pipeline, batch: Batch, rng: Key = None) -> int:
    """Compiles ``pipe.value_and_grad`` and returns what it takes on each device beside its
    arguments: the bytes of its temporaries and of the gradients it returns.

    Arguments as for `predicted_bytes`.
    """
    analysis = compiled(pipe, batch, rng).memory_analysis()
    assert analysis is not None  # every backend of jax has one
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


def compiled(
    pipe: Pipeline, batch: Batch, rng: Key = None, *, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles ``pipe.value_and_grad`` for the shapes of these arguments, with these options of
    XLA."""

    def shape(leaf: Shapes) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=pipe.batch_sharding)

    batch = jax.tree.map(shape, batch)
    step = jax.jit(pipe.value_and_grad)
    return step.lower(pipe.placed_params, batch, rng, states=pipe.placed_states).compile(options)


def tree_bytes(shapes: Shapes) -> int:
    """Bytes of all arrays of a tree, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _smallest(pipe: Pipeline) -> Pipeline:
    """The same model, mesh and options with two microbatches, and two layers per stage if they are
    alike.

    Two, because the compiler simplifies where it knows that there is one.
    """
    stages = pipe.schedule.num_stages
    params = dict(pipe.canonical_params)
    if pipe.model.layers_are_alike:
        params["layers"] = jax.tree.map(
            lambda w: jax.ShapeDtypeStruct((2 * stages, *w.shape[1:]), w.dtype), params["layers"]
        )
    fused = any(action.kind is Kind.BW for action in pipe.schedule.orders[0])
    return Pipeline(
        pipe.model,
        params,
        schedule=one_f_one_b(stages, 2, fused=fused),
        mesh=pipe.mesh,
        stage_axis=pipe.axes.stage,
        data_axes=pipe.axes.names[:-1],
        trainable=pipe.trainable,
        compute_dtype=pipe.compute_dtype,
        full_precision=pipe.full_precision,
        remat=pipe.remat,
        zero=pipe.zero,
        weights=pipe.weights,
        states=pipe.canonical_states,
    )
