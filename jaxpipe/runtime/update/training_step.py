"""A whole training step: the backward and the optimizer, after it or within it.

Within it is layered gradient accumulation. Where a schedule finishes all microbatches of a chunk
before it goes on to the next one, the chunk's gradient is complete while other chunks still run
backward. It is reduced and updates the chunk's weights at once, so that only the gradients of
chunks in work are kept: one, or one per slot. `docs/design/004-optimizers.md` says when this pays.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime import checks, host
from jaxpipe.runtime.assembly import Assembly
from jaxpipe.runtime.barriers import after
from jaxpipe.runtime.layers.losses import with_aux
from jaxpipe.runtime.layout.data_axis import reduce_gradients
from jaxpipe.runtime.layout.placed import Placed
from jaxpipe.runtime.layout.whole_model import frozen_part, outer_of, trained_part
from jaxpipe.runtime.tick import executor
from jaxpipe.runtime.tick.fixed import Fixed, GradientSink
from jaxpipe.runtime.tick.gradients import reduced_outer
from jaxpipe.runtime.tick.microbatches import StepMicrobatches, split_rows
from jaxpipe.runtime.tick.values import Carried
from jaxpipe.runtime.trees import deleted, elsewhere, rounded, select, shapes_of
from jaxpipe.runtime.types import (
    Arrays,
    At,
    Batch,
    Gradients,
    Index,
    Key,
    OptimizerState,
    OuterParams,
    Shapes,
    States,
    Stored,
    Tree,
)
from jaxpipe.runtime.update.optimizer import PlacedOptimizer
from jaxpipe.runtime.update.per_unit import without_stages
from jaxpipe.schedule.lowering.table import NONE, Transfer
from jaxpipe.schedule.problems import Problem, refuse


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
    if isinstance(grads, Placed):  # those of `jax.grad` are 0 for what is not trained
        grads = trained_part(grads)
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


class Updating(NamedTuple):
    """Values that a step which updates its weights carries beside them.

    Args:
      layers: the layers' part of the components of the optimizer's state.
      others: the components, without it.
      rest: what the state holds beside components.
    """

    layers: list[Arrays]
    others: list[OuterParams]
    rest: list[Tree]
    outer: OuterParams


class Applied(GradientSink):
    """A finished gradient is reduced and updates its chunk's weights at once."""

    def __init__(self, optimizer: PlacedOptimizer) -> None:
        self._optimizer = optimizer

    def begin(self, placed: Placed, state: OptimizerState) -> Updating:
        """Makes what is carried when the step begins."""
        components, rest = self._optimizer.state.split(state)
        layers = [without_stages(component)["layers"] for component in components]
        return Updating(layers, list(map(outer_of, components)), rest, outer_of(placed))

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        return {"gradients": fixed.params.sum_shapes(fixed.table.reduces.num_slots)}

    def reduces(self, fixed: Fixed) -> bool:
        return True

    def chunk(self, fixed: Fixed, carried: Carried, transfer: Transfer) -> Carried:
        """Updates a chunk whose gradient is complete; nothing reads it again."""
        params, updating = fixed.params, carried.finished
        step, zero = self._optimizer.step, fixed.setup.options.zero
        shared = step.share(updating.rest)

        def body(
            chunk: Index, layer: Index, sums: Arrays, kept: list[Arrays]
        ) -> tuple[Arrays, list[Arrays]]:
            at = fixed.stage, chunk, layer

            def gradient(at: At, example: int) -> Stored:
                place = params.layer_at(at, example, slot=transfer.slot)
                leaves = params.leaves_of(example)
                total = params.read(sums, place)
                return rounded(reduce_gradients(total, leaves, fixed.axes, zero=zero), leaves)

            return sums, step.layers([at], gradient, kept, shared)

        last = jnp.where(transfer.chunk == NONE, jnp.int32(0), fixed.table.layers_per_chunk)
        (trained, *frozen), layers = carried.weights.layers, updating.layers
        kept = [trained, *layers]
        sums, (weights, *layers) = params.loop(
            (transfer.chunk, 0, last), body, carried.gradients, kept
        )

        # The sums are cleared after what reads them, or XLA copies them.
        transfer = after((weights, *layers), transfer, fixed.stage)

        def clear(chunk: Index, number: Index, sums: Arrays) -> Arrays:
            place = params.piece_at((fixed.stage, chunk, number), slot=transfer.slot)
            return params.write(sums, place, jax.tree.map(jnp.zeros_like, params.read(sums, place)))

        return carried.but(
            gradients=params.loop_pieces(transfer.chunk, clear, sums),
            weights=carried.weights._replace(layers=[weights, *frozen]),
            finished=updating._replace(layers=layers),
        )

    def result(self, fixed: Fixed, carried: Carried) -> tuple[Placed, OptimizerState]:
        """This device's part of the new parameters and optimizer state."""
        updating, step = carried.finished, self._optimizer.step
        shared = step.share(updating.rest)
        given = [reduced_outer(fixed, carried), updating.outer, *updating.others]
        layers = [carried.weights.layers[0], *updating.layers]
        new, *components = step.on_stages(step.with_outer(layers, given, shared))
        return new, self._optimizer.state.join(components, step.rest(shared))


TrainingStep: TypeAlias = Callable[
    [Placed, OptimizerState, Batch, Key, States], tuple[Tree, Placed, OptimizerState]
]
"""A training step, as `Pipeline.train_step` describes it."""


def _chunk_by_chunk(pipe: Assembly, optimizer: optax.GradientTransformation) -> TrainingStep:
    """A training step that updates every chunk as soon as its gradient is complete."""
    _check(pipe)
    placed_optimizer = pipe.placed_optimizer(optimizer)
    placed_optimizer.check_parts()
    setup, applied = pipe.setup(pipe.chunk_table), Applied(placed_optimizer)

    def body(params: Placed, state: Tree, batch: Batch, rng: Key, states: States) -> Tree:
        rows = StepMicrobatches(
            split_rows(batch, pipe.schedule.num_microbatches, pipe.schedule.num_slices), rng
        )
        fixed, held = executor.begin(setup, params, rows, applied)
        carried = executor.start(fixed, held, select(held.outer, setup.layout.outer), states)
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
        done = pipe.run_step(params, batch, rng, states)
        updated = update(pipe, optimizer, done.gradients, state, params, {})
        return with_aux(done.value, done.states), *updated

    return step


UPDATES = {"step": _at_once, "chunk": _chunk_by_chunk}
"""When a training step updates parameters, by name."""


def train_step(pipe: Assembly, optimizer: optax.GradientTransformation, update: str) -> Any:
    """Makes a training step, as `Pipeline.train_step` does."""
    if update not in UPDATES:
        rule = f"is not a time to update; choose one of {', '.join(UPDATES)}"
        refuse([Problem("update", update, rule)])
    run = UPDATES[update](pipe, optimizer)

    def step(
        params: Placed, state: OptimizerState, batch: Batch, rng: Key = None, states: States = None
    ) -> tuple[Tree, Placed, OptimizerState]:
        placing = pipe.placed_optimizer(optimizer).placing
        others = [*placing.problems("state", state), *checks.key(rng)]
        pipe.check("params", params, batch, states, others)
        return run(params, state, batch, rng, states)

    jitted = jax.jit(step, donate_argnames=("params", "state", "states"))
    return _Checked(jitted, pipe, optimizer)


class _Checked:
    """A jitted step that refuses what is not on its devices: with deleted arrays, XLA for several
    CPU devices crashes. Numbers that have been put into the state, such as a learning rate of
    `optax.inject_hyperparams`, do not compile it again."""

    def __init__(
        self, jitted: jax.stages.Wrapped, pipe: Assembly, optimizer: optax.GradientTransformation
    ) -> None:
        self._jitted, self._pipe, self._optimizer = jitted, pipe, optimizer
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
        refuse([*gone, *elsewhere(self._pipe.mesh, batch=batch, rng=rng)])
        state = self._pipe.placed_optimizer(self._optimizer).placing.settled(state)
        return self._jitted(params, state, batch, rng, states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)
