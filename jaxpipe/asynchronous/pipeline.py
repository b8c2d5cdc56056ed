"""Asynchronous training: a pipeline that never drains, as PipeMare, PipeDream or PipeDream-2BW.

`docs/design/008-asynchronous.md` explains it; the rules of ticks, delays and versions are
`jaxpipe.asynchronous.steady`, one call's program is `jaxpipe.asynchronous.run`.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.asynchronous import run
from jaxpipe.asynchronous.rows import steady_table
from jaxpipe.asynchronous.run import AsyncState
from jaxpipe.asynchronous.steady import SteadyState
from jaxpipe.asynchronous.updates import Rules
from jaxpipe.runtime.layout.placed import Placed, other_orders
from jaxpipe.runtime.layout.whole_model import SHARED, outer_of
from jaxpipe.runtime.mesh import unusable_context
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.tick.microbatches import split_rows
from jaxpipe.runtime.trees import mismatches, shapes_of
from jaxpipe.runtime.types import Batch, Index, Key, OptimizerState, Shapes, Shardings, States, Tree
from jaxpipe.runtime.update.optimizer import PlacedOptimizer
from jaxpipe.runtime.update.per_unit import with_stages
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.placement import linear
from jaxpipe.schedule.problems import Problem, below_one, refuse

_OTHER_STATE = (
    "The state of an asynchronous pipeline comes from its own `init`, `step` or `drain`, or from a "
    "checkpoint of one of these."
)
_OTHER_MINIBATCH = (
    "Every minibatch must be like the one that `AsyncPipeline.init` was given: what is in flight "
    "lies in buffers of these shapes. If `init` was given a key, pass every `step` one of its own, "
    "such as rng=jax.random.fold_in(key, number); if it was not, pass none. To change them, "
    "`drain` the state and call `init` with what `finish` returns."
)


# The rules of a pipeline are a part of its state without arrays.
jax.tree_util.register_static(SteadyState)


class AsyncPipeline:
    """Trains a pipeline's model without ever draining it.

    A call of `step` runs N ticks, in which one minibatch of N microbatches enters. Each stage
    updates its own layers as soon as their gradient is complete. On stage d = 0..P-1, the weights
    that F reads for a minibatch's microbatch j are ceil((2(P-d)-1-j)/N) updates behind; with 2BW,
    all weights are one update behind. B reads the newest weights (PipeMare) or those that its F has
    read (PipeDream, 2BW). The residuals that F keeps for B follow from F's weights.

    Layout, evaluation and warm-up (PipeMare's T3) are those of the synchronous pipeline ``pipe``.
    Parameters and optimizer state pass between the two unchanged.

    Clipping scales a gradient by ``clip_norm / max(norm, clip_norm)`` when its part (the layers of
    a stage, the embedding, the head) is updated. The norm is over the newest finished gradients of
    all parts, before clipping; a part without one counts as 0. When stage d is updated for
    minibatch k, the newest gradient of stage s is that of minibatch ``k + floor((s - d) / N)``,
    where the embedding counts as stage 0 and the head as stage P.

    The states of a stateful model are updated as follows: each data shard updates its own from
    microbatch to microbatch. When F has run the minibatch's last microbatch on the layer's stage,
    they are averaged over the data shards, as at the end of a synchronous step.
    ``state["states"]`` has the placed states of each stage after the last minibatch that its F has
    finished.

    Args:
      pipe: one chunk per stage in model order, such as "1f1b"; its microbatches are N.
      optimizer: a transformation that updates every layer independently, unlike clipping by a
        global norm.
      method: "pipemare", "pipedream" or "2bw".
      rescheduling_steps: T1's K: in step k updates are divided by max(tau, 1)^(1 - min(k/K, 1)).
        None for no rescheduling.
      discrepancy_decay: T2's D between 0 and 1, near 0.135: the backward reads w - tau * delta,
        delta being the weights' average step. None for no correction; PipeMare without T1 and T2 is
        naive asynchrony.
      recompute_segment: stages per segment. F keeps only a segment's input, and the states that it
        reads if they affect a layer's output; the segment runs forward again just before its
        backward. T2 also corrects the weights of this second forward, by less because they are less
        late. None for no recomputation.
      clip_norm: the largest norm over the newest finished gradients of all parts, or None.

    Raises:
      ValueError: the arguments do not fit each other, or the optimizer needs the gradients of
        several parts at once.

    Example:
      >>> from jaxpipe.runtime.layers.model import Model
      >>> from jaxpipe.runtime.mesh import make_mesh
      >>> from jaxpipe.schedule.generators.depth_first import one_f_one_b
      >>> model = Model(
      ...     embed=lambda outer, batch, rng: batch["x"],
      ...     layer=lambda w, x, batch, rng: jnp.tanh(x @ w),
      ...     head_loss=lambda outer, x, batch, rng: jnp.mean((x - batch["y"]) ** 2),
      ... )
      >>> params = {"embed": {}, "layers": jnp.ones((2, 3, 3)), "head": {}}
      >>> pipe = Pipeline(model, params, schedule=one_f_one_b(1, 2), mesh=make_mesh(stage=1))
      >>> training = AsyncPipeline(pipe, optax.sgd(0.1))
      >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.ones((4, 3))}
      >>> params = pipe.place(params)
      >>> state = training.init(params, pipe.init(training.optimizer, params), batch)
      >>> state, loss = jax.jit(training.step)(state, batch)
      >>> state, losses = jax.jit(training.drain)(state)
      >>> params, optimizer_state = training.finish(state)

    Source: Yang et al., PipeMare, arXiv 1910.05124, sections 3 and 4.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: optax.GradientTransformation,
        *,
        method: str = "pipemare",
        rescheduling_steps: int | None = None,
        discrepancy_decay: float | None = None,
        recompute_segment: int | None = None,
        clip_norm: float | None = None,
    ) -> None:
        _check_arguments(pipe, method, rescheduling_steps, discrepancy_decay, clip_norm)
        stages, microbatches = pipe.schedule.num_stages, pipe.schedule.num_microbatches
        self.pipe, self.optimizer = pipe, optimizer
        self.steady = SteadyState(stages, microbatches, method, recompute_segment)
        scaled = rescheduling_steps is not None
        # Embedding and head are updated in some ticks, and read in all: every stage has them.
        self._layout = pipe.layout if pipe.table.together else pipe.layout.whole_outer
        parts = PlacedOptimizer(optimizer, self._layout, zero=pipe.options.zero, scaled=scaled)
        parts.check_parts()
        self._rules = Rules(self.steady, parts, rescheduling_steps, discrepancy_decay, clip_norm)
        leaves = Kind.F if recompute_segment is None else Kind.R
        setup = pipe.setup(steady_table(pipe.table, self.steady))
        layout = self._layout.local
        # W follows B in the same tick, so B leaves to it all that belongs to W. Checkpoints hold
        # residuals, so which these are may not change from version to version.
        self._setup = dataclasses.replace(
            setup, layout=layout, leaves=leaves, early=False, cells_in_table=False
        )

    @property
    def delays(self) -> np.ndarray:
        """Updates by which F's weights are behind, int ``[stages, N]``, N microbatches."""
        j = np.arange(self.steady.num_microbatches)
        stages = range(self.steady.num_stages)
        return np.stack([self.steady.delay(self.steady.stage(d), j) for d in stages])

    # State.

    def init(
        self,
        params: Placed,
        optimizer_state: OptimizerState,
        batch: Batch,
        rng: Key = None,
        *,
        states: States = None,
        step: int = 0,
    ) -> AsyncState:
        """The state of an empty pipeline.

        Args:
          params, optimizer_state, states: placed trees of the synchronous pipeline, when training
            begins or a warm-up ends.
          batch, rng: a minibatch and a key like those of the steps, for their shapes.
          step: asynchronous steps already taken, from which T1 continues.

        Returns:
          The state: a tree of arrays to pass through `step`, which can be saved and restored.

        Raises:
          ValueError: the arguments do not fit the pipeline or the optimizer, or functions of the
            model cannot run asynchronously.
        """
        optimizer_placing = self._rules.optimizer.placing
        optimizer_problems = optimizer_placing.problems("optimizer_state", optimizer_state)
        self.pipe.check("params", params, batch, states, optimizer_problems)

        @partial(jax.jit, out_shardings=self.state_shardings)
        def init(
            params: Placed, optimizer_state: OptimizerState, rng: Key, states: States, step: Index
        ) -> AsyncState:
            state = self._at_rest(params, optimizer_state, shapes_of(batch), rng, states, step)
            return state | {"flight": self._make_flight(state), "steady": self.steady}

        return init(params, optimizer_state, rng, states, step)

    def _at_rest(
        self, params: Tree, optimizer_state: Tree, batch: Tree, rng: Key, states: Tree, step: Index
    ) -> AsyncState:
        """The state of an empty pipeline without "flight" and "steady"; ``batch`` is of shapes."""
        # A state to be donated must not share an array, with itself or with the caller.
        params, optimizer_state, states = jax.tree.map(jnp.copy, (params, optimizer_state, states))
        owned, rest = self._rules.optimizer.state.split(optimizer_state)
        stages, slots = self.steady.num_stages, self.steady.num_slots

        def recent(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            rows = leaf.shape[0] // self.steady.num_microbatches
            return jnp.zeros((slots, rows, *leaf.shape[1:]), leaf.dtype)

        return {
            "weights": self._versions_of(params),
            "delta": jax.tree.map(jnp.zeros_like, {k: params[k] for k in self._rules.corrected}),
            "owned": jax.tree.leaves(owned),
            "rest": {
                "layers": [jnp.stack([leaf] * stages) for leaf in rest],
                "embed": rest,
                "head": jax.tree.map(jnp.copy, rest),
            },
            "states": states,
            "recent": {
                "rows": jax.tree.map(recent, batch),
                "rng": None if rng is None else jnp.stack([rng] * slots),
            },
            "clock": {"tick": jnp.int32(0), "entered": jnp.int32(0), "first": jnp.int32(step)},
        }

    @cached_property
    def _make_flight(self) -> Callable[[AsyncState], Tree]:
        """Makes what is in flight of an empty pipeline, from the rest of its state."""

        def empty(state: AsyncState) -> Tree:
            flight = run.empty_flight(self._setup, self._rules, state)
            return jax.tree.map(lambda w: w[None, None], flight)

        specs = {k: spec for k, spec in self._specs.items() if k not in ("flight", "steady")}
        return jax.jit(self.pipe.shard_map(empty, (specs,), self._specs["flight"]))

    def _checked(self, state: AsyncState, **minibatch: Tree) -> AsyncState:
        """The state; raises if it is not this pipeline's, or if another kind of minibatch enters.

        It may lack "steady", if a checkpoint held only arrays.
        """
        refuse(list(unusable_context()))
        batch, rng = _entering(state, self.steady.num_microbatches)
        placed = self.pipe.layout.placed_shapes()
        shapes = placed, self._rules.optimizer.placing.placed, batch, rng, self.pipe.placed_states
        at_rest = jax.eval_shape(self._at_rest, *shapes, 0)
        arrays = {name: value for name, value in state.items() if name not in ("flight", "steady")}
        problems = list(other_orders("state", arrays, at_rest))
        problems = problems or mismatches("state", arrays, at_rest)
        if (steady := state.get("steady") or self.steady) != self.steady:
            problems.append(f"state['steady'] is {steady}; expected {self.steady}.")
        if not problems:  # only then can the model be traced
            refuse(self.pipe.batch_problems(batch))
            expected = jax.eval_shape(self._make_flight, at_rest)
            problems = mismatches("state['flight']", state.get("flight"), expected)
        problems += [_OTHER_STATE] if problems else []
        given = {"batch": batch, "rng": rng}
        minibatch_problems = [
            line for key, value in minibatch.items() for line in mismatches(key, value, given[key])
        ]
        problems += [*minibatch_problems, _OTHER_MINIBATCH] if minibatch_problems else []
        refuse(problems)
        return state | {"steady": self.steady}

    @cached_property
    def state_shardings(self) -> Shardings:
        """Shardings of a state, as a prefix of its tree."""
        return jax.tree.map(lambda spec: NamedSharding(self.pipe.mesh, spec), self._specs)

    def _versions_of(self, params: Placed) -> Placed:
        """Repeats the weights as often as the method keeps versions."""
        copies, axis = self.steady.num_versions, 1 + self.pipe.layout.layers.slot_dim
        layers = jax.tree.map(lambda w: jnp.concatenate([w] * copies, axis), params["layers"])
        outer = jax.tree.map(lambda w: jnp.stack([w] * copies), outer_of(params))
        return params | {"layers": layers, **outer}

    def params(self, state: AsyncState) -> Placed:
        """The newest placed parameters of every part; all of one version after `drain`."""
        return self._newest_params(self._checked(state))

    @cached_property
    def _newest_params(self) -> Callable[[AsyncState], Placed]:
        def newest(state: AsyncState) -> Placed:
            weights = run.newest_weights(self._setup, self._rules, state)
            return Placed(with_stages(weights), self._layout.layers.order)

        out_specs = self._layout.specs(sharded=self.pipe.options.zero.shards_weights)
        return jax.jit(self.pipe.shard_map(newest, (self._specs,), out_specs))

    def discrepancy(self, state: AsyncState) -> jax.Array:
        """T2's correction of the layers: the norm of tau * delta over that of the weights, float32
        ``[stages]``; 0 without T2."""
        state = self._checked(state)
        stages = self.steady.num_stages
        taus = jnp.asarray([self.steady.mean_delay(self.steady.stage(d)) for d in range(stages)])
        if not self._rules.corrected:
            return jnp.zeros(stages)

        def norms(tree: Tree) -> jax.Array:
            squares = jax.tree.map(lambda w: jnp.square(w).reshape(stages, -1).sum(1), tree)
            return jnp.sqrt(sum(jax.tree.leaves(squares)))

        return taus * norms(state["delta"]["layers"]) / norms(state["weights"]["layers"])

    def grad_norm(self, state: AsyncState) -> jax.Array:
        """The norm over the newest finished gradients of all parts, before clipping, float32;
        0 before there are any. Measured only if there is a ``clip_norm``."""
        return jnp.sqrt(self._checked(state)["flight"]["norms"]["total"][0, 0])

    def finish(self, state: AsyncState) -> tuple[Placed, OptimizerState]:
        """Placed parameters and optimizer state for the synchronous pipeline.

        Args:
          state: a drained state; otherwise parts have had different numbers of updates.
        """
        params = self.params(state)
        optimizer = self._rules.optimizer
        components = optimizer.components(state["owned"])
        optimizer_state = optimizer.state.join(components, state["rest"]["embed"])
        return self._to_synchronous(params, optimizer_state)

    @cached_property
    def _to_synchronous(self) -> Callable[..., tuple[Placed, OptimizerState]]:
        """Puts parameters and optimizer state where the synchronous pipeline has them."""
        shapes = self.pipe.placed_params, self.pipe.optimizer_placing(self.optimizer).placed
        shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
        return jax.jit(lambda *trees: trees, out_shardings=shardings)

    # Running.

    def step(self, state: AsyncState, batch: Batch, rng: Key = None) -> tuple[AsyncState, Tree]:
        """Lets a minibatch enter: N ticks.

        Args:
          state: from `init`, `step` or `drain`; donate it to `jax.jit`.
          batch: as for `Pipeline.value_and_grad`, with the structure, shapes and dtypes of the
            batch for `init`.
          rng: the minibatch's key, if `init` was given one.

        Returns:
          The state and the loss, a float32 scalar, or ``(loss, metrics)``. The loss is that of the
          minibatch whose last microbatch left during the call, about (P-1)/N minibatches behind.
          Before there is one, it is NaN (0 for integers).

        Raises:
          ValueError: a state of another pipeline; a batch or a key unlike those for `init`.
        """
        state = self._checked(state, batch=batch, rng=rng)

        def body(state: AsyncState, batch: Batch, rng: Key) -> tuple[AsyncState, Tree]:
            rows = split_rows(batch, self.pipe.schedule.num_microbatches)
            return run.call(self._setup, self._rules, state, rows, rng)

        in_specs = self._specs, P(self.pipe.axes.data), P()
        run_ticks = self.pipe.shard_map(body, in_specs, (self._specs, P()))
        state, left = run_ticks(state, batch, rng)
        return state, jax.tree.map(lambda w: w[0], left)

    def drain(self, state: AsyncState) -> tuple[AsyncState, Tree]:
        """Finishes everything in flight in 2P-1 ticks, in which nothing enters.

        Training can continue from the returned state, with an empty pipeline. To evaluate a run
        without disturbing it, drain a copy.

        Args:
          state: from `init` or `step`.

        Returns:
          The state and the losses of the minibatches that were in flight, float32 ``[about
          (P-1)/N]``, or ``(loss, metrics)`` with this leading dimension. They are NaN (0 for
          integers) for minibatches that never entered.

        Raises:
          ValueError: a state of another pipeline.
        """
        state = self._checked(state)

        def body(state: AsyncState) -> tuple[AsyncState, Tree]:
            return run.call(self._setup, self._rules, state, None, None)

        return self.pipe.shard_map(body, (self._specs,), (self._specs, P()))(state)

    @cached_property
    def _specs(self) -> dict[str, Tree]:
        """Partition specs of the state by key; `AsyncState` says where else a new key belongs."""
        zero, axes = self.pipe.options.zero, self.pipe.axes
        weights = self._layout.specs(sharded=zero.shards_weights)
        states = self._rules.optimizer.state.components
        versions = jax.tree.map(lambda spec: P(None, *spec), outer_of(weights))
        return {
            "weights": weights | versions,
            "delta": {name: weights[name] for name in self._rules.corrected},
            "owned": jax.tree.leaves([state.specs(sharded=zero.shards_state) for state in states]),
            "rest": {"layers": P(axes.stage), "embed": P(), "head": P()},
            "states": P(axes.stage),
            "recent": {"rows": P(None, axes.data), "rng": P()},
            "clock": P(),
            "flight": P(axes.data, axes.stage),
            "steady": P(),  # of no array
        }


# Checks, before anything is compiled.


def _entering(state: Tree, microbatches: int) -> tuple[Shapes, Shapes]:
    """Shapes of the batch and the key that `AsyncPipeline.init` was given, read from a state."""
    recent = state.get("recent") if isinstance(state, dict) else None
    if not isinstance(recent, dict) or recent.keys() != {"rows", "rng"}:
        found = f"a {type(state).__name__}"
        if isinstance(state, dict):
            found = f"a dictionary of {list(state)}"
        raise ValueError(
            f"state is {found}; expected a dictionary in which 'recent' holds 'rows' and 'rng'.\n"
            f"{_OTHER_STATE}"
        )

    def batch(kept: Shapes) -> jax.ShapeDtypeStruct:
        rows = microbatches * math.prod(kept.shape[1:2])
        return jax.ShapeDtypeStruct((rows, *kept.shape[2:]), kept.dtype)

    def key(kept: Shapes) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(kept.shape[1:], kept.dtype)

    recent = shapes_of(recent)
    return jax.tree.map(batch, recent["rows"]), jax.tree.map(key, recent["rng"])


def _check_arguments(
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
    if pipe.schedule.num_slices > 1:
        problems.append(
            "An asynchronous pipeline runs whole sequences: make its Pipeline without slices."
        )
    if pipe.layout.layers.own_arrays:
        rule = "is not supported: versions of weights need one stacked array per parameter"
        problems.append(Problem("weights", pipe.options.weights, rule, {"weights": "stacked"}))
    if pipe.model.uses_axes:
        problems.append(
            "An asynchronous pipeline splits no layer over devices, as Model.axes and "
            "Model.axis_split ask: give these devices to stages or data shards."
        )
    if pipe.frozen is not None:
        problems.append(
            "An asynchronous pipeline trains all parameters: make its Pipeline without `trainable`."
        )
    rule = "is not supported in an asynchronous pipeline, which keeps versions of the weights"
    if pipe.options.compute_dtype is not None:
        problems.append(Problem("compute_dtype", str(pipe.options.compute_dtype), rule, (None,)))
    if pipe.options.fp8 != ():
        problems.append(Problem("fp8", pipe.options.fp8, rule, ((),)))
    if pipe.options.residuals != "device":
        rule = "is not supported in an asynchronous pipeline, whose state includes its residuals"
        problems.append(Problem("residuals", pipe.options.residuals, rule, ("device",)))
    if SHARED in pipe.layout.outer:
        problems.append(
            "params['shared'] is not supported in an asynchronous pipeline, whose stages update "
            "their weights at different times; give every layer its own."
        )
    problems += below_one({"rescheduling_steps": rescheduling_steps})
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
