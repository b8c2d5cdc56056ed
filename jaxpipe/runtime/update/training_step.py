"""A whole training step: the backward and the optimizer, after it or within it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime import checks, host, programs
from jaxpipe.runtime.assembly import Assembly
from jaxpipe.runtime.layers.losses import with_aux
from jaxpipe.runtime.layout.whole_model import frozen_part, trained_part
from jaxpipe.runtime.tick import executor
from jaxpipe.runtime.tick.microbatches import StepMicrobatches, split_rows
from jaxpipe.runtime.trees import deleted, elsewhere, shapes_of
from jaxpipe.runtime.types import Batch, Gradients, Key, OptimizerState, Placed, States, Tree
from jaxpipe.runtime.update.layered import Applied
from jaxpipe.runtime.update.optimizer import PlacedOptimizer
from jaxpipe.schedule.problems import Problem, refuse


def init(pipe: Assembly, optimizer: optax.GradientTransformation, params: Placed) -> OptimizerState:
    """Makes the state, as `Pipeline.init` does."""
    refuse(pipe.params_placing.problems("params", params))
    placed = pipe.placed_optimizer(optimizer)
    return jax.jit(placed.init, out_shardings=placed.placing.shardings)(trained_part(params))


def update(
    pipe: Assembly,
    optimizer: optax.GradientTransformation,
    grads: Gradients,
    state: OptimizerState,
    params: Placed,
    extra: dict[str, Tree],
) -> tuple[Placed, OptimizerState]:
    """Takes a step of the optimizer, as `Pipeline.update` does."""
    placed = pipe.placed_optimizer(optimizer)
    if extra:
        refuse(checks.not_arrays("extra", extra))
        shapes = shapes_of(extra)
        placed = PlacedOptimizer(optimizer, pipe.layout, zero=pipe.options.zero, extra=shapes)
    grads = trained_part(grads)  # those of `jax.grad` are 0 for what is not trained
    problems = pipe.trained_placing.problems("grads", grads)
    problems += placed.placing.problems("state", state)
    refuse([*problems, *pipe.params_placing.problems("params", params)])
    if placed.on_host:
        state, grads = host.fetch(state, grads)
    new = placed.program(grads, state, trained_part(params), extra)
    shardings = pipe.trained_placing.shardings, placed.shardings
    new, state = jax.lax.with_sharding_constraint(new, shardings)
    state = host.to_host(state) if placed.on_host else state
    return new | frozen_part(params), state


TrainingStep: TypeAlias = Callable[
    [Placed, OptimizerState, Batch, Key, States], tuple[Tree, Placed, OptimizerState]
]
"""A training step, as `Pipeline.train_step` describes it."""


def _chunk_by_chunk(pipe: Assembly, optimizer: optax.GradientTransformation) -> TrainingStep:
    """A training step that updates every chunk as soon as its gradient is complete.

    Its result is that of `Pipeline.value_and_grad` followed by the optimizer, without room for the
    gradients of all layers.

    Raises:
      ValueError: a schedule that comes back to a chunk whose slot it has given up, or an optimizer
        that needs the gradients of several parts at once.

    Source: Lamy-Poirier, "Layered gradient accumulation and modular pipeline parallelism",
    arXiv 2106.02679, section 3.
    """
    _check(pipe)
    placed_optimizer = pipe.placed_optimizer(optimizer)
    placed_optimizer.check_parts()
    setup, applied = pipe.setup(pipe.chunk_table), Applied(placed_optimizer)

    def body(params: Placed, state: Tree, batch: Batch, rng: Key, states: States) -> Tree:
        rows = StepMicrobatches(
            split_rows(batch, pipe.schedule.num_microbatches, pipe.schedule.num_slices), rng
        )
        fixed, held = executor.begin(setup, params, rows, applied)
        outer = executor.outer_gradients_like(setup, held)
        carried = executor.start(fixed, held, outer, states)
        carried = carried.but(finished=applied.begin(params, state))
        value, carried, states = executor.run_ticks(fixed, rows, carried)
        return value, applied.result(fixed, carried), states

    weights, *others = pipe.in_specs
    specs = pipe.trained_placing.specs, placed_optimizer.placing.specs
    given = weights, specs[1], *others
    on_devices = pipe.shard_map(body, given, (P(), specs, P(pipe.axes.stage)))

    def step(
        params: Placed, state: OptimizerState, batch: Batch, rng: Key, states: States
    ) -> tuple[Tree, Placed, OptimizerState]:
        value, (new, state), states = on_devices(params, state, batch, rng, states)
        return with_aux(value, states), new | frozen_part(params), state

    return step


def _check(pipe: Assembly) -> None:
    if pipe.layout.layers.own_arrays:
        rule = "is not stacked: a chunk is updated piece by piece in stacked arrays"
        refuse([Problem("weights", pipe.options.weights, rule, {"weights": "stacked"})])
    counts, chunks = pipe.chunk_table.reduces.counts, pipe.schedule.num_chunks
    if any(count > chunks for count in counts):
        rule = (
            "comes back to a chunk after it has worked on another: a stage finishes a gradient "
            f"{max(counts)} times per step, with {chunks} chunks, and $update needs each complete "
            "at once"
        )
        near, others = {"weight_slots": chunks}, {"update": "chunk"}
        note = "Or 'modular' or 'breadth-first' without group, or one chunk per stage."
        refuse([Problem("schedule", pipe.schedule.name, rule, near, others, note=note)])


def _at_once(pipe: Assembly, optimizer: optax.GradientTransformation) -> TrainingStep:
    """A training step that updates when all gradients are there."""

    def step(
        params: Placed, state: OptimizerState, batch: Batch, rng: Key, states: States
    ) -> tuple[Tree, Placed, OptimizerState]:
        done = programs.train(pipe, params, batch, rng, states)
        updated = update(pipe, optimizer, done.gradients, state, params, {})
        return with_aux(done.value, done.states), *updated

    return step


UPDATES = {"step": _at_once, "chunk": _chunk_by_chunk}
"""When a training step updates parameters, by name."""


def train_step(pipe: Assembly, optimizer: optax.GradientTransformation, update: str) -> Any:
    """Makes a training step, as `Pipeline.train_step` does."""
    if update not in UPDATES:
        rule = f"is no time to update; choose one of {', '.join(UPDATES)}"
        refuse([Problem("update", update, rule)])
    run = UPDATES[update](pipe, optimizer)

    def step(
        params: Placed, state: OptimizerState, batch: Batch, rng: Key = None, states: States = None
    ) -> tuple[Tree, Placed, OptimizerState]:
        placing = pipe.placed_optimizer(optimizer).placing
        others = [*placing.problems("state", state), *checks.key(rng)]
        pipe.check("params", params, batch, states, others)
        return run(params, state, batch, rng, states)

    return _Checked(jax.jit(step, donate_argnames=("params", "state", "states")), pipe.mesh)


class _Checked:
    """A jitted step that refuses what is not on its devices: with deleted arrays, XLA for several
    CPU devices crashes."""

    def __init__(self, jitted: Any, mesh: Mesh) -> None:
        self._jitted, self._mesh = jitted, mesh
        functools.update_wrapper(self, jitted)

    def __call__(
        self,
        params: Placed,
        state: OptimizerState,
        batch: Batch,
        rng: Key = None,
        states: States = None,
    ) -> Any:
        gone = deleted(params=params, state=state, states=states)
        refuse([*gone, *elsewhere(self._mesh, batch=batch, rng=rng)])
        return self._jitted(params, state, batch, rng, states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)
