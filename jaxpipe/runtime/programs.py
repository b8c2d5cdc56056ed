"""The programs of a pipeline, and what `jax.grad` sees of them.

JAX cannot reverse the loops that run a schedule, and need not: a schedule holds its own backward.
First derivatives of the loss come from it, and all others are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.layout.whole_model import FROZEN
from jaxpipe.runtime.tick import executor
from jaxpipe.runtime.tick.microbatches import split_rows
from jaxpipe.runtime.types import Batch, Gradients, Key, Placed, States, Tree

if TYPE_CHECKING:
    from jaxpipe.runtime.pipeline import Pipeline
    from jaxpipe.runtime.tick.stamps import Stamps

_FIRST_ORDER = (
    "The gradients of a pipeline were differentiated; a pipeline has only first derivatives, "
    "because a schedule holds one backward."
)
_FORWARD_MODE = (
    "Pipeline.loss was differentiated in forward mode, as by jax.jvp; a schedule holds a backward "
    "alone. Use jax.grad, jax.value_and_grad or jax.vjp."
)
_STATES = (
    "Pipeline.loss was differentiated with respect to the states of its layers; these have no "
    "gradient."
)
_METRICS = (
    "A metric of Pipeline.loss was differentiated; only the loss has derivatives, as with "
    "`has_aux=True`."
)
_OUTPUTS = (
    "Pipeline.outputs was differentiated; it only runs forward. Compute what needs a gradient in "
    "`Model.head_loss`, and differentiate `Pipeline.loss`."
)


def train(pipe: Pipeline, *args: Tree, inputs: tuple[int, ...] = ()) -> executor.Step:
    """Runs a step.

    Args:
      pipe: what to run.
      args: placed parameters, batch, key and states; here and below.
      inputs: numbers of the batch's arrays whose gradients are wanted.
    """
    run = pipe.program("train", inputs=inputs)
    step: executor.Step = _refusing_derivatives(run, _FIRST_ORDER)(*args)
    return step


def outputs(pipe: Pipeline, *args: Tree) -> Tree:
    """What `Model.output` returns for every row."""
    run = pipe.program("outputs")
    return _refusing_derivatives(run, _OUTPUTS)(*args).value


def loss(pipe: Pipeline, *args: Tree) -> Tree:
    """Loss and metrics, from forwards alone; differentiated, from a whole step."""

    @jax.custom_vjp
    def evaluate(placed: Placed, batch: Batch, rng: Key, states: States) -> Tree:
        return pipe.program("loss")(placed, batch, rng, states).value

    def forward(*primals: Tree) -> tuple[Tree, tuple[Gradients, Batch]]:
        _, batch, _, states = primals
        if any(leaf.perturbed for leaf in jax.tree.leaves(states)):
            raise ValueError(_STATES)
        leaves, structure = jax.tree.flatten(batch)
        inputs = tuple(n for n, leaf in enumerate(leaves) if leaf.perturbed)
        step = train(pipe, *jax.tree.map(lambda leaf: leaf.value, primals), inputs=inputs)
        found = dict(zip(inputs, step.input_gradients, strict=True))
        of_batch = jax.tree.unflatten(structure, [found.get(n) for n in range(len(leaves))])
        return step.value, (step.gradients, of_batch)

    def backward(gradients: tuple[Gradients, Batch], cotangents: Tree) -> tuple[Any, ...]:
        of_loss, *of_metrics = jax.tree.leaves(cotangents)
        if not all(isinstance(cotangent, SymbolicZero) for cotangent in of_metrics):
            raise ValueError(_METRICS)
        scaled = jax.tree.map(lambda w: (of_loss * w).astype(w.dtype), gradients)
        of_params, of_batch = scaled
        constant = {} if pipe.frozen is None else {FROZEN: None}
        return of_params | constant, of_batch, None, None

    evaluate.defvjp(forward, backward, symbolic_zeros=True)
    try:
        return evaluate(*args)
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        raise ValueError(_FORWARD_MODE) from error


def make(
    pipe: Pipeline, result: str, *, inputs: tuple[int, ...] = (), stamps: Stamps | None = None
) -> Callable[..., executor.Step]:
    """What runs a table on all devices: the pipeline's own, or that of its forwards.

    It is jitted, so that calls outside `jax.jit` compile it once, and inlined inside.

    Args:
      pipe: what to run.
      result: "train" for gradients, too; "loss" alone; or "outputs".
      inputs: numbers of the batch's arrays whose gradients are wanted.
      stamps: where to note when layers run.
    """
    table, outputs = pipe.table if result == "train" else pipe.forward_table, result == "outputs"
    setup = dataclasses.replace(pipe.setup(table), outputs=outputs, inputs=inputs, stamps=stamps)

    def body(placed: Placed, batch: Batch, rng: Key, states: States) -> executor.Step:
        rows = split_rows(batch, pipe.schedule.num_microbatches)
        return executor.run(setup, placed, rows, rng, states)

    data = P(pipe.axes.data)
    collected = data if outputs else P()
    gradients = pipe.layout.specs(sharded=pipe.zero >= 1) if setup.trains else None
    specs = executor.Step(collected, gradients, P(pipe.axes.stage), data)
    return jax.jit(pipe.shard_map(body, pipe.in_specs, specs), inline=True)


def _refusing_derivatives(run: Callable[..., Any], refusal: str) -> Callable[..., Any]:
    """``run``, which raises ValueError when it is differentiated."""
    guarded = jax.custom_jvp(run)

    def refuse(primals: Tree, tangents: Tree) -> Any:
        raise ValueError(refusal)

    guarded.defjvp(refuse)
    return guarded
