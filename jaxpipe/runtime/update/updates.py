"""The programs of an optimizer on all placed parameters: its first state, and a step of it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import optax
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime import checks
from jaxpipe.runtime.trees import shapes_of
from jaxpipe.runtime.types import Gradients, OptimizerState, Placed, Tree
from jaxpipe.runtime.update.optimizer import PlacedOptimizer
from jaxpipe.schedule.problems import refuse

if TYPE_CHECKING:
    from jaxpipe.runtime.pipeline import Pipeline


def init(pipe: Pipeline, optimizer: optax.GradientTransformation, params: Placed) -> OptimizerState:
    """`Pipeline.init`."""
    refuse(pipe.params_placing.problems("params", params))
    placed = pipe.placed_optimizer(optimizer)
    specs = placed.state.specs(sharded=pipe.zero >= 1)
    run = pipe.shard_map(placed.init, (pipe.in_specs[0],), specs)
    return jax.jit(run, out_shardings=placed.placing.shardings)(params)


def update(
    pipe: Pipeline,
    optimizer: optax.GradientTransformation,
    grads: Gradients,
    state: OptimizerState,
    params: Placed,
    extra: dict[str, Tree],
) -> tuple[Placed, OptimizerState]:
    """`Pipeline.update`."""
    placed = pipe.placed_optimizer(optimizer)
    if extra:
        shapes = shapes_of(extra)
        placed = PlacedOptimizer(optimizer, pipe.layout, zero=pipe.zero, extra=shapes)
    problems = pipe.params_placing.problems("grads", grads)
    problems += checks.optimizer_state("state", state, placed.placing.placed)
    refuse([*problems, *pipe.params_placing.problems("params", params)])
    gradients = pipe.layout.specs(sharded=pipe.zero >= 1)
    states, weights = placed.state.specs(sharded=pipe.zero >= 1), pipe.in_specs[0]
    body, given = partial(placed.update, placed.step), (gradients, states, weights, P())
    run = pipe.shard_map(body, given, (weights, states))
    shardings = pipe.param_shardings, placed.placing.shardings
    new: tuple[Placed, OptimizerState]
    new = jax.lax.with_sharding_constraint(run(grads, state, params, extra), shardings)
    return new
