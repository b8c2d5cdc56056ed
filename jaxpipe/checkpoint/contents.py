"""Contents of a checkpoint of a training run, in canonical order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp

from jaxpipe.runtime.assembly import NO_STATES
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.trees import leaf_mismatches
from jaxpipe.runtime.types import OptimizerState, Placed, Shapes, States, Tree

PARAMS, OPTIMIZER, STATES = "params", "optimizer", "layers"
"""Parts of the contents; the states of the layers are there if the model keeps some."""

_BELONG_TO = {
    PARAMS: "another model",
    OPTIMIZER: "another optimizer, or other parameters are trained",
    STATES: "a model whose layers keep other states",
}
_MOST_LINES = 5


def contents(
    pipe: Pipeline,
    optimizer: optax.GradientTransformation,
    params: Placed,
    state: OptimizerState,
    states: States,
) -> dict[str, Tree]:
    """Copies the arrays to save to the host's memory, by part; later steps do not change them."""
    if states is None and pipe.placed_states is not None:
        raise ValueError("states=None, but this model's layers keep states: save them, too.")
    placing = pipe.optimizer_placing(optimizer)
    arrays = {PARAMS: pipe.params_placing.to_host(params), OPTIMIZER: placing.to_host(state)}
    if states is None:
        return arrays
    if pipe.states_placing is None:
        raise ValueError(NO_STATES)
    return arrays | {STATES: pipe.states_placing.to_host(states)}


def shapes(pipe: Pipeline, optimizer: optax.GradientTransformation) -> dict[str, Shapes]:
    """Shapes and shardings of the arrays that `contents` returns."""
    placing = pipe.optimizer_placing(optimizer)
    of_states = {} if pipe.canonical_states is None else {STATES: pipe.canonical_states}
    return {PARAMS: pipe.canonical_params, OPTIMIZER: placing.canonical, **of_states}


def differences(path: Path, saved: Shapes, expected: dict[str, Shapes]) -> Iterator[str]:
    """Says why a checkpoint is not of this model and optimizer; nothing if it is.

    Args:
      path: path of the checkpoint.
      saved: shapes of its arrays, in dictionaries and lists.
      expected: shapes and shardings from `shapes`.
    """
    for part in _BELONG_TO:
        wanted = ocp.tree.serialize_tree(expected.get(part), keep_empty_nodes=True)
        if lines := list(leaf_mismatches(part, saved.get(part), _raw_keys(wanted))):
            yield f"The checkpoint {path} is of {_BELONG_TO[part]}:"
            yield from lines[:_MOST_LINES]
            if len(lines) > _MOST_LINES:
                yield f"... and {len(lines) - _MOST_LINES} further differences."
            return


def _raw_keys(shapes: Tree) -> Shapes:
    """Replaces the shapes of random keys by those of the data that is written of them."""

    def raw(leaf: Any) -> jax.ShapeDtypeStruct:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(raw, shapes)
