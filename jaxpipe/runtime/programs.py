"""The programs of a pipeline, and what `jax.grad` sees of them.

JAX cannot reverse the loops that run a schedule, and need not: a schedule holds its own backward.
First derivatives by parameters come from it, and all others are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.mesh import DATA, STAGE
from jaxpipe.runtime.tick import executor
from jaxpipe.runtime.tick.fixed import Setup
from jaxpipe.runtime.types import Batch, Gradients, Key, Placed, States, Tree

if TYPE_CHECKING:
    from jaxpipe.runtime.pipeline import Pipeline

_FIRST_ORDER = (
    "The gradients of a pipeline were differentiated; it has first derivatives alone, because a "
    "schedule holds one backward."
)
_INPUTS = (
    "Pipeline.loss was differentiated with respect to its batch or its states; it has derivatives "
    "by the placed parameters alone. What needs a gradient must be a parameter."
)
_METRICS = (
    "A metric of Pipeline.loss was differentiated; only the loss has derivatives, as with "
    "`has_aux=True`."
)
_OUTPUTS = (
    "Pipeline.outputs was differentiated; it runs forward alone. Compute what needs a gradient in "
    "`Model.head_loss`, and differentiate `Pipeline.loss`."
)


def train(pipe: Pipeline, *args: Tree) -> tuple[Tree, Gradients, States]:
    """Loss and metrics, gradients and states of a step.

    ``args`` are those of a step here and below: placed parameters, batch, key and states.
    """
    run = partial(_run, pipe, pipe.setup(pipe.table))
    found: tuple[Tree, Gradients, States] = _refusing_derivatives(run, _FIRST_ORDER)(*args)
    return found


def outputs(pipe: Pipeline, *args: Tree) -> Tree:
    """What `Model.output` returns for every row."""
    setup = dataclasses.replace(pipe.setup(pipe.forward_table), outputs=True)
    return _refusing_derivatives(partial(_run, pipe, setup), _OUTPUTS)(*args)[0]


def loss(pipe: Pipeline, *args: Tree) -> Tree:
    """Loss and metrics, from forwards alone; differentiated, from a whole step."""

    @jax.custom_vjp
    def evaluate(placed: Placed, batch: Batch, rng: Key, states: States) -> Tree:
        return _run(pipe, pipe.setup(pipe.forward_table), placed, batch, rng, states)[0]

    def forward(*primals: Tree) -> tuple[Tree, Gradients]:
        _, batch, _, states = primals
        if any(leaf.perturbed for leaf in jax.tree.leaves((batch, states))):
            raise ValueError(_INPUTS)
        return train(pipe, *jax.tree.map(lambda leaf: leaf.value, primals))[:2]

    def backward(gradients: Gradients, cotangents: Tree) -> tuple[Any, ...]:
        of_loss, *of_metrics = jax.tree.leaves(cotangents)
        if not all(isinstance(cotangent, SymbolicZero) for cotangent in of_metrics):
            raise ValueError(_METRICS)
        of_params = jax.tree.map(lambda w: (of_loss * w).astype(w.dtype), gradients)
        return of_params, None, None, None

    evaluate.defvjp(forward, backward, symbolic_zeros=True)
    return evaluate(*args)


def _run(pipe: Pipeline, setup: Setup, *args: Tree) -> tuple[Tree, Gradients, States]:
    """Runs a table on all devices."""

    def body(placed: Placed, batch: Batch, rng: Key, states: States) -> tuple[Tree, ...]:
        return executor.run(setup, placed, pipe.split_rows(batch), rng, states)

    collected = P(DATA) if setup.outputs else P()
    gradients = pipe.layout.specs(sharded=pipe.zero >= 1) if setup.trains else None
    on_devices = pipe.shard_map(body, pipe.in_specs, (collected, gradients, P(STAGE)))
    found: tuple[Tree, Gradients, States] = on_devices(*args)
    return found


def _refusing_derivatives(run: Callable[..., Any], refusal: str) -> Callable[..., Any]:
    """``run``, which raises ValueError when it is differentiated."""
    guarded = jax.custom_jvp(run)

    def refuse(primals: Tree, tangents: Tree) -> Any:
        raise ValueError(refusal)

    guarded.defjvp(refuse)
    return guarded
