"""The programs of a pipeline, and what `jax.grad` sees of them.

JAX cannot reverse the loops that run a schedule, and need not: a schedule holds its own backward.
First derivatives of the loss come from it, and all others are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jaxpipe.runtime.assembly import Assembly
from jaxpipe.runtime.layout.whole_model import FROZEN
from jaxpipe.runtime.tick import executor
from jaxpipe.runtime.types import Batch, Gradients, Key, Placed, States, Tree

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


def train(pipe: Assembly, *args: Tree, inputs: tuple[int, ...] = ()) -> executor.Step:
    """Runs a step.

    Args:
      pipe: what to run.
      args: placed parameters, batch, key and states; here and below.
      inputs: numbers of the batch's arrays whose gradients are wanted.
    """
    run = pipe.program("train", inputs=inputs)
    step: executor.Step = _refusing_derivatives(run, _FIRST_ORDER)(*args)
    return step


def outputs(pipe: Assembly, *args: Tree) -> Tree:
    """Computes `Model.output` for every row."""
    run = pipe.program("outputs")
    return _refusing_derivatives(run, _OUTPUTS)(*args).value


def loss(pipe: Assembly, *args: Tree) -> Tree:
    """Computes loss and metrics from forwards alone; differentiated, from a whole step."""

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


def _refusing_derivatives(run: Callable[..., Tree], refusal: str) -> Callable[..., Tree]:
    """``run``, which raises ValueError when it is differentiated."""
    guarded = jax.custom_jvp(run)

    def refuse(primals: Tree, tangents: Tree) -> Any:
        raise ValueError(refusal)

    guarded.defjvp(refuse)
    return guarded
