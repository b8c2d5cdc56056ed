"""The public object: a model, a schedule and a mesh, as one differentiated step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime import checks
from jaxpipe.runtime.layers.kinds import Layers
from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layout.packed import Packed
from jaxpipe.runtime.layout.parameters import Stacked, Unrolled
from jaxpipe.runtime.layout.whole_model import Layout, compiled_sharding, make_layers, make_layout
from jaxpipe.runtime.mesh import DATA, STAGE, leave_compilation_cache
from jaxpipe.runtime.tick import executor
from jaxpipe.runtime.tick.fixed import Plan
from jaxpipe.runtime.trees import shapes_of, strongly_typed
from jaxpipe.runtime.update.part_optimizer import owners
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.check.validate import validate
from jaxpipe.schedule.lowering.lower import forward_only, lower
from jaxpipe.schedule.lowering.table import TickTable
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.problems import refuse

PyTree = Any


class Pipeline:
    """Runs a model through a pipeline schedule on a mesh.

    Parameters are *canonical* for the user (``{"embed", "layers", "head"}``, layers in model order:
    stacked if they are alike, a tuple if not) and *placed* on the devices; `place` and `unplace`
    convert. `init` and `update` run an optimizer on placed parameters and keep its state sharded as
    the ZeRO level says. Everything can be called inside `jax.jit`.

    Args:
      model: pure functions.
      params: canonical parameters, or their shapes.
      schedule: from `jaxpipe.schedules.build`, or your own; it is validated.
      mesh: from `jaxpipe.make_mesh`; its ``stage`` axis must be the schedule's number of stages.
      remat: "none" keeps every residual, "dots" keeps weight matmuls' outputs, "full" only layer
        inputs.
      zero: what is sharded over the ``data`` axis: 0 nothing, 1 optimizer state, 2 also gradients,
        3 also weights.
      weights: how the weights of layers that are alike lie on a stage: "stacked" in one array a
        parameter, for any depth; "unrolled" in an array a layer, which a GPU need not copy before
        it multiplies, for a program that grows with the layers of a stage.
      weight_slots: chunks of gathered weights (ZeRO-3) and of gradient sums (from ZeRO-2 on, and
        with `LayeredUpdate`) that a stage keeps at once; more take memory and are gathered and
        reduced less often: ``pipe.table.gathers`` says how often. At most all its chunks, at least
        those that one tick uses.
      layer_counts: layers of every virtual stage, in model order; by default as equal as possible.
      states: the layers' initial states, or their shapes, for a `Model` that is stateful.
      poison: test mode; fills bubbles with NaN.

    Raises:
      ValueError: arguments that do not fit each other; all failures in one message.

    Example:
      >>> from jaxpipe.schedule.catalog import build
      >>> from jaxpipe.runtime.mesh import make_mesh
      >>> model = Model(
      ...     embed=lambda outer, batch, rng: batch["x"],
      ...     layer=lambda w, x, batch, rng: jnp.tanh(x @ w),
      ...     head_loss=lambda outer, x, batch, rng: jnp.mean((x - batch["y"]) ** 2),
      ... )
      >>> params = {"embed": {}, "layers": jnp.ones((2, 3, 3)), "head": {}}
      >>> schedule = build("1f1b", stages=1, microbatches=2)
      >>> pipe = Pipeline(model, params, schedule=schedule, mesh=make_mesh(stage=1))
      >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.ones((4, 3))}
      >>> loss, grads = pipe.value_and_grad(pipe.place(params), batch)
      >>> pipe.unplace(grads)["layers"].shape
      (2, 3, 3)
      >>> optimizer, placed = optax.adam(0.1), pipe.place(params)
      >>> placed, state = pipe.update(optimizer, grads, pipe.init(optimizer, placed), placed)
    """

    def __init__(
        self,
        model: Model,
        params: PyTree,
        *,
        schedule: Schedule,
        mesh: Mesh,
        remat: str = "none",
        zero: int = 0,
        weights: str = "stacked",
        weight_slots: int = 1,
        layer_counts: Sequence[int] | None = None,
        states: PyTree = None,
        poison: bool = False,
    ) -> None:
        arguments = model, params, states, schedule, mesh, remat, zero, weights, weight_slots
        refuse(checks.arguments(*arguments, layer_counts))
        validate(schedule)
        leave_compilation_cache(mesh)
        params, states = shapes_of(params), shapes_of(states)
        self.model, self.schedule, self.mesh = model, schedule, mesh
        self.remat, self.poison = remat, poison
        self.weights, self.weight_slots = weights, weight_slots
        self.zero = zero if mesh.shape[DATA] > 1 else 0
        if layer_counts is None:
            layer_counts = partition([1] * checks.num_layers(params["layers"]), schedule.placement)
        self.table = self._lower(schedule, layer_counts)
        self.layout = make_layout(params, model.stage_split, mesh, self.table, weights=weights)
        self.state_layout = None if states is None else make_layers(states, self.table, data=1)

    # Layout.

    @cached_property
    def param_shardings(self) -> PyTree:
        """Shardings of the placed parameters: over data, too, with ZeRO-3."""
        return self.layout.shardings(sharded=self.zero == 3)

    @cached_property
    def gradient_shardings(self) -> PyTree:
        """Shardings of gradients and optimizer state: over data, too, from ZeRO-1 on."""
        return self.layout.shardings(sharded=self.zero >= 1)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of a batch's leaves ``[rows, ...]``."""
        return NamedSharding(self.mesh, P(DATA))

    @cached_property
    def canonical_shardings(self) -> PyTree:
        """Shardings of what `unplace` returns: over all devices, as far as the sizes divide."""
        return jax.tree.map(
            lambda spec: compiled_sharding(self.mesh, spec), self.layout.canonical_specs()
        )

    def optimizer_shardings(self, state: PyTree) -> PyTree:
        """Shardings of an optax state: what belongs to a parameter and has its shape is sharded as
        its gradient is, the rest is replicated.

        Args:
          state: an optimizer state of placed parameters, or its shapes.
        """
        of_gradients = jax.tree.leaves(self.gradient_shardings)
        replicated = NamedSharding(self.mesh, P())
        found = [
            replicated if owner is None else of_gradients[owner]
            for owner in owners(state, self.layout.placed_shapes())
        ]
        return jax.tree.unflatten(jax.tree.structure(state), found)

    def map_parameters(self, fn, tree: PyTree, *, rest=lambda leaf: leaf) -> PyTree:
        """Applies ``fn`` to every subtree with the structure of the parameters, placed or
        canonical, and ``rest`` to all other leaves.

        With `place` and `unplace` it converts a whole optimizer state, or any tree that is shaped
        like the parameters, such as a mask; their dtypes may be others than those of the
        parameters.
        """
        if fn == self.place:
            fn = partial(self._checked_place, dtypes=False)
        structures = [
            jax.tree.structure(tree) for tree in (self.param_shardings, self.canonical_shardings)
        ]

        def is_params(node):
            return jax.tree.structure(node) in structures

        return jax.tree.map(
            lambda node: fn(node) if is_params(node) else rest(node), tree, is_leaf=is_params
        )

    def place(self, params: PyTree) -> PyTree:
        """Canonical parameters to placed, sharded ones.

        Raises:
          ValueError: parameters unlike those that the pipeline was built for, in structure, shape
            or dtype, or that are placed already.
        """
        return self._checked_place(params, dtypes=True)

    def unplace(self, placed: PyTree) -> PyTree:
        """Placed parameters, or what is shaped like them, such as gradients, to canonical ones.

        Raises:
          ValueError: a tree of another structure or other shapes, or one that is not placed.
        """
        refuse(self._placed_problems("placed", placed, dtypes=False))
        return self._unplace(placed)

    def place_states(self, states: PyTree) -> PyTree:
        """Canonical states of the layers, one tree a layer, to placed ones.

        Raises:
          ValueError: states unlike those that the pipeline was built for, or placed already.
        """
        layout, placed = self._states, self.placed_states
        refuse(checks.canonical("states", states, self.canonical_states, placed))
        return _placing(layout, jax.tree.map(lambda leaf: leaf.sharding, placed))(states)

    def unplace_states(self, placed: PyTree) -> PyTree:
        """Undoes `place_states`.

        Raises:
          ValueError: states unlike those that the pipeline was built for, or not placed.
        """
        layout = self._states
        refuse(self._state_problems("placed", placed))
        return jax.jit(layout.unplace)(placed)

    @property
    def _states(self) -> Stacked | Unrolled | Packed:
        if self.state_layout is None:
            raise ValueError(_NO_STATES)
        return self.state_layout

    def _checked_place(self, params: PyTree, *, dtypes: bool) -> PyTree:
        shapes = self.layout.canonical_shapes(), self.layout.placed_shapes()
        refuse(checks.canonical("params", params, *shapes, dtypes=dtypes))
        return self._place(params)

    def _placed_problems(self, name: str, tree: PyTree, *, dtypes: bool = True) -> list[str]:
        shapes = self.layout.placed_shapes(), self.layout.canonical_shapes()
        return checks.placed(name, tree, *shapes, method="place", dtypes=dtypes)

    def _state_problems(self, name: str, tree: PyTree) -> list[str]:
        if self.state_layout is None:
            return [] if tree is None else [_NO_STATES]
        if tree is None:
            return [f"{name}=None, but this model's layers keep states: see `pipe.place_states`."]
        shapes = self.placed_states, self.canonical_states
        return checks.placed(name, tree, *shapes, method="place_states")

    @cached_property
    def _place(self):
        return _placing(self.layout, self.param_shardings)

    @cached_property
    def _unplace(self):
        return jax.jit(self.layout.unplace, out_shardings=self.canonical_shardings)

    # The optimizer.

    def init(self, optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
        """The state of an optimizer, made where the ZeRO level wants it.

        Args:
          optimizer: any optax transformation.
          params: placed parameters.

        Returns:
          What ``optimizer.init`` gives, with the shardings of `optimizer_shardings`.

        Raises:
          ValueError: parameters unlike those that the pipeline was built for, or not placed.
        """
        refuse(self._placed_problems("params", params))
        shardings = self.optimizer_shardings(jax.eval_shape(optimizer.init, params))

        def init(params):
            return strongly_typed(optimizer.init(params))

        return jax.jit(init, out_shardings=shardings)(params)

    def update(
        self,
        optimizer: optax.GradientTransformation,
        grads: PyTree,
        state: PyTree,
        params: PyTree,
    ) -> tuple[PyTree, PyTree]:
        """Takes a step of an optimizer, and leaves everything where it was.

        In a jitted step the compiler would otherwise choose where the new parameters and the new
        state lie: not as the ZeRO level says, and the next call would compile the step again.

        Args:
          optimizer: any optax transformation.
          grads: gradients, from `value_and_grad`.
          state: the optimizer's state, from `init`.
          params: placed parameters.

        Returns:
          The new parameters and the new state, with the shardings of `param_shardings` and
          `optimizer_shardings`.

        Raises:
          ValueError: a tree unlike those that the pipeline was built for, or not placed.
        """
        shapes = jax.eval_shape(optimizer.init, self.layout.placed_shapes())
        refuse(
            [
                *self._placed_problems("grads", grads, dtypes=False),
                *checks.optimizer_state("state", state, shapes),
                *self._placed_problems("params", params),
            ]
        )
        updates, state = optimizer.update(grads, state, params)
        new = strongly_typed((optax.apply_updates(params, updates), state))
        shardings = self.param_shardings, self.optimizer_shardings(state)
        return jax.lax.with_sharding_constraint(new, shardings)

    # Running.

    def value_and_grad(
        self,
        placed: PyTree,
        batch: PyTree,
        rng: jax.Array | None = None,
        *,
        states: PyTree = None,
    ) -> tuple[Any, PyTree]:
        """Loss and gradients of a batch.

        Args:
          placed: placed parameters.
          batch: leaves ``[rows, ...]``, rows a multiple of microbatches x data shards. Within a
            data shard row r belongs to microbatch ``r % m``.
          rng: the step's key for models with randomness, or None.
          states: placed states, for a stateful model.

        Returns:
          The mean loss over microbatches and data shards (float32 scalar), and gradients like
          ``placed``. A stateful model gives ``(loss, states)`` in place of the loss, like
          `jax.value_and_grad` with ``has_aux``: the states after the last microbatch, averaged over
          data shards.

        Raises:
          ValueError: arguments that do not fit the pipeline, layers that do not fit each other, or
            a loss that is not a float32 scalar.
        """
        loss, grads, states = self._run(self.plan(self.table), placed, batch, rng, states)
        return (loss if self.state_layout is None else (loss, states)), grads

    def loss(
        self,
        placed: PyTree,
        batch: PyTree,
        rng: jax.Array | None = None,
        *,
        states: PyTree = None,
    ) -> jax.Array:
        """The loss alone, by the schedule's forwards. Arguments as for `value_and_grad`."""
        return self._run(self.plan(self._forward_table), placed, batch, rng, states)[0]

    @cached_property
    def _forward_table(self):
        return self._lower(forward_only(self.schedule), self.table.layer_counts)

    def _lower(self, schedule: Schedule, layer_counts: Sequence[int]) -> TickTable:
        own = self.weights == "unrolled"
        return lower(schedule, layer_counts, weight_slots=self.weight_slots, own_slots=own)

    def plan(self, table: TickTable) -> Plan:
        """How this pipeline runs a table of its own placement and layers."""
        return Plan(
            self.model, self.layout, table, self.remat, self.zero, self.state_layout, self.poison
        )

    def _run(self, plan: Plan, placed, batch, rng, states):
        self.check("placed", placed, batch, states)

        def body(placed, batch, rng, states):
            return executor.run(plan, placed, self.split_rows(batch), rng, states)

        gradients = self.layout.specs(sharded=self.zero >= 1) if plan.trains else None
        return self._mapped(body, (P(), gradients, P(STAGE)))(placed, batch, rng, states)

    def check(
        self,
        name: str,
        placed: PyTree,
        batch: PyTree,
        states: PyTree,
        others: Sequence[str] = (),
    ) -> None:
        """Raises ValueError for what a step was given and does not fit.

        Args:
          name: what the caller names its placed parameters.
          placed: these.
          batch, states: as for `value_and_grad`.
          others: problems of the caller's own, for the same error.
        """
        refuse(
            [
                *self._placed_problems(name, placed),
                *others,
                *self._batch_problems(batch),
                *self._state_problems("states", states),
            ]
        )

    def check_batch(self, batch: PyTree) -> None:
        """Raises ValueError for rows that do not divide into microbatches and data shards."""
        refuse(self._batch_problems(batch))

    def _batch_problems(self, batch: PyTree) -> list[str]:
        m, shards = self.schedule.num_microbatches, self.mesh.shape[DATA]
        return list(checks.batch(batch, num_microbatches=m, num_shards=shards))

    def _mapped(self, body, out_specs):
        """``body(placed, batch, rng, states)`` on every device."""
        in_specs = (self.layout.specs(sharded=self.zero == 3), P(DATA), P(), P(STAGE))
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def split_rows(self, batch: PyTree) -> PyTree:
        """One data shard's leaves ``[rows, ...]`` as ``[rows of a microbatch, m, ...]``: a view."""
        m = self.schedule.num_microbatches
        return jax.tree.map(lambda leaf: leaf.reshape(-1, m, *leaf.shape[1:]), batch)

    def buffers(self, batch: PyTree, rng: jax.Array | None = None) -> dict[str, PyTree]:
        """What the tick loop keeps on each device, from the schedule and the model alone.

        Args:
          batch: a batch, or its shapes.
          rng: as for `value_and_grad`.

        Returns:
          Trees of `jax.ShapeDtypeStruct` by the buffer's name.
        """
        return self._traced(executor.buffers, batch, rng)

    def trace_layers(
        self, batch: PyTree, rng: jax.Array | None = None
    ) -> tuple[Layers, tuple[PyTree, ...]]:
        """The layers by kind, each with F, B and W; and shapes of a layer's microbatch and key.

        Arguments as for `buffers`.
        """
        return self._traced(executor.layers, batch, rng)

    def _traced(self, read, batch: PyTree, rng: jax.Array | None) -> Any:
        """What ``read`` finds in a trace of the program, arguments as those of `executor.run`."""
        self.check_batch(batch)
        found = []

        def body(placed, batch, rng, states):
            rows = self.split_rows(batch)
            found.append(read(self.plan(self.table), placed, rows, rng, states))
            return jnp.zeros(())

        arguments = self.layout.placed_shapes(), batch, rng, self.placed_states
        jax.eval_shape(self._mapped(body, P()), *arguments)
        return found[0]

    @property
    def placed_states(self) -> PyTree:
        """Shapes and shardings of the placed states; None for a model without."""
        if self.state_layout is None:
            return None
        sharding = compiled_sharding(self.mesh, P(STAGE))

        def shape(leaf):
            struct = leaf.behind(self.mesh.shape[STAGE]).struct()
            return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)

        return jax.tree.map(shape, self.state_layout.placed)

    @property
    def canonical_states(self) -> PyTree:
        """Shapes of the layers' states; None for a model without."""
        if self.state_layout is None:
            return None
        return jax.tree.map(lambda leaf: leaf.struct(), self.state_layout.canonical)


_NO_STATES = "This model's layers keep no state: Pipeline was given no states."


def _placing(layout: Layout | Stacked | Unrolled | Packed, shardings: PyTree):
    """The layout's `place`, compiled."""

    def place(tree):
        return strongly_typed(layout.place(tree))

    return jax.jit(place, out_shardings=shardings)
