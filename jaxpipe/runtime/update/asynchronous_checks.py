"""What an asynchronous pipeline refuses, before anything is compiled."""

from __future__ import annotations

import math

import jax

from jaxpipe.runtime.layout.whole_model import SHARED
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.trees import shapes_of
from jaxpipe.runtime.types import Shapes, Tree
from jaxpipe.schedule.placement import linear
from jaxpipe.schedule.problems import Problem, below_one, refuse

OTHER_STATE = (
    "The state of an asynchronous pipeline comes from its own `init`, `step` or `drain`, or from a "
    "checkpoint of one of these."
)
OTHER_MINIBATCH = (
    "Every minibatch must be like the one that `AsyncPipeline.init` was given: what is in flight "
    "lies in buffers of these shapes. If `init` was given a key, pass every `step` one of its own, "
    "such as rng=jax.random.fold_in(key, number); if it was not, pass none. To change them, "
    "`drain` the state and call `init` with what `finish` returns."
)


def entering(state: Tree, microbatches: int) -> tuple[Shapes, Shapes]:
    """Shapes of the batch and the key that `AsyncPipeline.init` was given, read from a state.

    Raises:
      ValueError: what keeps no rows and keys, and thus cannot be a state.
    """
    recent = state.get("recent") if isinstance(state, dict) else None
    if not isinstance(recent, dict) or recent.keys() != {"rows", "rng"}:
        found = f"a {type(state).__name__}"
        if isinstance(state, dict):
            found = f"a dictionary of {list(state)}"
        raise ValueError(
            f"state is {found}; expected a dictionary in which 'recent' holds 'rows' and 'rng'.\n"
            f"{OTHER_STATE}"
        )

    def batch(kept: Shapes) -> jax.ShapeDtypeStruct:
        rows = microbatches * math.prod(kept.shape[1:2])
        return jax.ShapeDtypeStruct((rows, *kept.shape[2:]), kept.dtype)

    def key(kept: Shapes) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(kept.shape[1:], kept.dtype)

    recent = shapes_of(recent)
    return jax.tree.map(batch, recent["rows"]), jax.tree.map(key, recent["rng"])


def check_arguments(
    pipe: Pipeline,
    method: str,
    rescheduling_steps: int | None,
    discrepancy_decay: float | None,
    clip_norm: float | None,
) -> None:
    """Raises one error with everything that does not fit."""
    problems: list[Problem | str] = []
    if pipe.schedule.placement != linear(pipe.schedule.num_stages):
        problems.append(
            f"Schedule {pipe.schedule.name!r} has {pipe.schedule.num_chunks} chunks per stage; an "
            "asynchronous pipeline is made from one with a single chunk a stage, in model order.\n"
            "Nearest valid: '1f1b'."
        )
    if pipe.layout.layers.own_arrays:
        rule = "has no room for versions of weights, which lie in one stacked array per parameter"
        problems.append(Problem("weights", pipe.weights, rule, {"weights": "stacked"}))
    if pipe.model.uses_axes:
        problems.append(
            "An asynchronous pipeline splits no layer over devices, as Model.axes and "
            "Model.axis_split ask: give these devices to stages or data shards."
        )
    if pipe.frozen is not None:
        problems.append(
            "An asynchronous pipeline trains all parameters: make its Pipeline without `trainable`."
        )
    if pipe.compute_dtype is not None:
        rule = "has no place in an asynchronous pipeline, which keeps weights in versions"
        problems.append(Problem("compute_dtype", str(pipe.compute_dtype), rule, (None,)))
    if pipe.residuals == "host":
        rule = "would leave the host between calls: what is in flight is a part of the state"
        problems.append(Problem("residuals", pipe.residuals, rule, ("device",)))
    if SHARED in pipe.layout.outer:
        problems.append(
            "params['shared'] has no place in an asynchronous pipeline, whose stages update their "
            "weights at different times; give every layer its own."
        )
    problems += below_one(rescheduling_steps=rescheduling_steps)
    if discrepancy_decay is not None and not 0 < discrepancy_decay < 1:
        rule = "must lie between 0 and 1"
        problems.append(Problem("discrepancy_decay", discrepancy_decay, rule, (0.135,)))
    if discrepancy_decay is not None and method != "pipemare":
        rule = (
            "corrects what the backward of method='pipemare' reads; the one of $method reads what "
            "its forward has read"
        )
        problem = Problem("discrepancy_decay", discrepancy_decay, rule, (None,), {"method": method})
        problems.append(problem)
    if clip_norm is not None and clip_norm <= 0:
        problems.append(Problem("clip_norm", clip_norm, "must be positive, or None"))
    refuse(problems)
