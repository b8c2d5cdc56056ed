"""The public object: a model, a schedule and a mesh, as one differentiated step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime import checks, programs
from jaxpipe.runtime.layers.losses import with_aux
from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layout.placing import Placing
from jaxpipe.runtime.layout.whole_model import StateLayout, layer_layout, layer_rows, make_layout
from jaxpipe.runtime.mesh import DATA, STAGE, leave_compilation_cache
from jaxpipe.runtime.tick.fixed import Setup
from jaxpipe.runtime.trees import shapes_of, strongly_typed
from jaxpipe.runtime.types import (
    Batch,
    Gradients,
    Key,
    OptimizerState,
    Params,
    Placed,
    Shapes,
    Shardings,
    States,
    Tree,
)
from jaxpipe.runtime.update.part_optimizer import owners
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.check.validate import validate
from jaxpipe.schedule.lowering.lower import forward_only, lower
from jaxpipe.schedule.lowering.table import TickTable
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.problems import refuse


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
      weights: how the weights of layers that are alike lie on a stage: "stacked" in one array per
        parameter, for any depth; "unrolled" in one array per layer, which a GPU need not copy
        before it multiplies, for a program that grows with the layers of a stage.
      weight_slots: chunks of gathered weights (ZeRO-3) and of gradient sums (from ZeRO-2 on, and
        with `LayeredUpdate`) that a stage keeps at once. More slots take more memory and need fewer
        gathers and reductions: ``pipe.table.gathers`` says how many. The number is raised to the
        chunks that one tick uses, and lowered to those of a stage.
      layer_counts: layers of every virtual stage, in model order; by default as equal as possible.
      states: the layers' initial states, or their shapes, for a `Model` that is stateful.
      poison: test mode; fills bubbles with NaN.

    Raises:
      ValueError: arguments that do not fit each other; all failures in one message.

    Example:
      >>> import jax.numpy as jnp
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
      >>> optimizer, params = optax.sgd(0.1), pipe.place(params)
      >>> state = pipe.init(optimizer, params)
      >>> @jax.jit
      ... def step(params, state, batch):
      ...     loss, grads = pipe.value_and_grad(params, batch)
      ...     return loss, *pipe.update(optimizer, grads, state, params)
      >>> loss, params, state = step(params, state, {"x": jnp.ones((4, 3)), "y": jnp.ones((4, 3))})
      >>> pipe.unplace(params)["layers"].shape
      (2, 3, 3)
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        *,
        schedule: Schedule,
        mesh: Mesh,
        remat: str = "none",
        zero: int = 0,
        weights: str = "stacked",
        weight_slots: int = 1,
        layer_counts: Sequence[int] | None = None,
        states: States = None,
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
        self._own_slots = layer_layout(params["layers"], weights).own_arrays
        self.table = self._lower(schedule, layer_counts)
        self.layout = make_layout(params, model.stage_split, mesh, self.table, weights=weights)
        self._params = Placing(self.layout, sharded=self.zero == 3, method="place")
        self.state_layout, self._states = None, None
        if states is not None:
            held = layer_rows(self.table)
            self.state_layout = layer_layout(states, weights="stacked")(states, held, 1)
            layout = StateLayout(self.state_layout, mesh)
            self._states = Placing(layout, sharded=False, method="place_states")

    # Layout.

    @property
    def param_shardings(self) -> Shardings:
        """Shardings of the placed parameters: over data, too, with ZeRO-3."""
        return self._params.shardings

    @cached_property
    def gradient_shardings(self) -> Shardings:
        """Shardings of gradients and optimizer state: over data, too, from ZeRO-1 on."""
        return self.layout.shardings(sharded=self.zero >= 1)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of a batch's leaves ``[rows, ...]``."""
        return NamedSharding(self.mesh, P(DATA))

    @property
    def canonical_shardings(self) -> Shardings:
        """Shardings of what `unplace` returns: over all devices, as far as the sizes divide."""
        return self._params.canonical_shardings

    def optimizer_shardings(self, state: OptimizerState) -> Shardings:
        """Shardings of an optax state: what belongs to a parameter and has its shape is sharded
        like its gradient, the rest is replicated.

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

    def map_parameters(
        self,
        fn: Callable[[Tree], Tree],
        tree: Tree,
        *,
        rest: Callable[[Any], Any] = lambda leaf: leaf,
    ) -> Tree:
        """Applies ``fn`` to every subtree with the structure of the parameters, placed or
        canonical, and ``rest`` to all other leaves.

        With `place` and `unplace` it converts a whole optimizer state, or any tree that is shaped
        like the parameters, such as a mask, whatever its dtypes are.
        """
        if fn == self.place:
            fn = partial(self._params.place, "params", dtypes=False)
        trees = self.param_shardings, self.canonical_shardings
        structures = [jax.tree.structure(tree) for tree in trees]

        def is_params(node: Tree) -> bool:
            return jax.tree.structure(node) in structures

        return jax.tree.map(
            lambda node: fn(node) if is_params(node) else rest(node), tree, is_leaf=is_params
        )

    def place(self, params: Params) -> Placed:
        """Canonical parameters to placed, sharded ones.

        Raises:
          ValueError: parameters unlike those that the pipeline was built for, in structure, shape
            or dtype, or that are placed already.
        """
        return self._params.place("params", params)

    def unplace(self, placed: Placed) -> Params:
        """Undoes `place`, also for what is shaped like parameters, such as gradients."""
        return self._params.unplace(placed, dtypes=False)

    def place_states(self, states: States) -> States:
        """Canonical states of the layers, one tree per layer, to placed ones; raises as `place`."""
        return self._states_or_raise().place("states", states)

    def unplace_states(self, placed: States) -> States:
        """Undoes `place_states`."""
        return self._states_or_raise().unplace(placed)

    def _states_or_raise(self) -> Placing:
        if self._states is None:
            raise ValueError(_NO_STATES)
        return self._states

    @property
    def placed_states(self) -> Shapes:
        """Shapes and shardings of the placed states; None for a model without."""
        return None if self._states is None else self._states.placed

    @property
    def canonical_states(self) -> Shapes:
        """Shapes of the layers' states; None for a model without."""
        return None if self._states is None else self._states.canonical

    # The optimizer.

    def init(self, optimizer: optax.GradientTransformation, params: Placed) -> OptimizerState:
        """The state of an optimizer, sharded as the ZeRO level says.

        Args:
          optimizer: any optax transformation.
          params: placed parameters.

        Raises:
          ValueError: parameters unlike those that the pipeline was built for, or not placed.
        """
        refuse(self._params.problems("params", params))
        shardings = self.optimizer_shardings(jax.eval_shape(optimizer.init, params))

        def init(params: Placed) -> OptimizerState:
            return strongly_typed(optimizer.init(params))

        return jax.jit(init, out_shardings=shardings)(params)

    def update(
        self,
        optimizer: optax.GradientTransformation,
        grads: Gradients,
        state: OptimizerState,
        params: Placed,
    ) -> tuple[Placed, OptimizerState]:
        """Takes a step of an optimizer, and leaves everything where it was.

        In a jitted step the compiler would otherwise choose where the new parameters and the new
        state lie, which is not where the ZeRO level wants them; the next call would then compile
        the step again.

        Args:
          optimizer: any optax transformation.
          grads: gradients, from `value_and_grad`.
          state: the optimizer's state, from `init`.
          params: placed parameters.

        Returns:
          The new parameters and the new state, sharded like the old ones.

        Raises:
          ValueError: a tree unlike those that the pipeline was built for, or not placed.
        """
        shapes = jax.eval_shape(optimizer.init, self.layout.placed_shapes())
        refuse(
            [
                *self._params.problems("grads", grads, dtypes=False),
                *checks.optimizer_state("state", state, shapes),
                *self._params.problems("params", params),
            ]
        )
        updates, state = optimizer.update(grads, state, params)
        new = strongly_typed((optax.apply_updates(params, updates), state))
        shardings = self.param_shardings, self.optimizer_shardings(state)
        return jax.lax.with_sharding_constraint(new, shardings)

    # Running.

    def value_and_grad(
        self, placed: Placed, batch: Batch, rng: Key = None, *, states: States = None
    ) -> tuple[Any, Gradients]:
        """Loss and gradients of a batch.

        Args:
          placed: placed parameters.
          batch: leaves ``[rows, ...]``, rows a multiple of microbatches x data shards. Within a
            data shard row r belongs to microbatch ``r % m``.
          rng: the step's key for models with randomness, or None.
          states: placed states, for a stateful model.

        Returns:
          The loss, a float32 scalar, and gradients like ``placed``. The loss is the mean, weighted
          or not, of what `Model.head_loss` returns for the microbatches of all data shards, plus
          the mean of what layers add. With metrics, or states, ``(loss, aux)`` takes its place, as
          in `jax.value_and_grad` with ``has_aux``: aux is the metrics, the states after the last
          microbatch, averaged over data shards, or ``(metrics, states)``.

        Raises:
          ValueError: arguments that do not fit the pipeline, layers that do not fit each other, or
            a loss that is not a float32 scalar.
        """
        self.check("placed", placed, batch, states)
        step = programs.train(self, placed, batch, rng, states)
        return with_aux(step.value, step.states), step.gradients

    def loss(self, placed: Placed, batch: Batch, rng: Key = None, *, states: States = None) -> Any:
        """Only the loss, or ``(loss, metrics)``, from the schedule's forwards.

        Arguments as for `value_and_grad`, which ``jax.value_and_grad(pipe.loss)`` equals. Arrays of
        the batch that only the embedding and the head read have gradients, too.
        """
        self.check("placed", placed, batch, states)
        return programs.loss(self, placed, batch, rng, states)

    def outputs(
        self, placed: Placed, batch: Batch, rng: Key = None, *, states: States = None
    ) -> Tree:
        """What `Model.output` returns, such as logits, from the schedule's forwards.

        Arguments as for `value_and_grad`.

        Returns:
          Arrays ``[rows, ...]`` in the order of the batch's rows, sharded like the batch.

        Raises:
          ValueError: as of `value_and_grad`, or an output that does not begin with rows.
        """
        self.check("placed", placed, batch, states)
        return programs.outputs(self, placed, batch, rng, states)

    @cached_property
    def forward_table(self) -> TickTable:
        """The table of the schedule's forwards alone."""
        return self._lower(forward_only(self.schedule), self.table.layer_counts)

    def _lower(self, schedule: Schedule, layer_counts: Sequence[int]) -> TickTable:
        slots, own = self.weight_slots, self._own_slots
        return lower(schedule, layer_counts, weight_slots=slots, own_slots=own)

    def setup(self, table: TickTable) -> Setup:
        """How this pipeline runs a table of its own placement and layers."""
        return Setup(
            self.model, self.layout, table, self.remat, self.zero, self.state_layout, self.poison
        )

    def check(
        self, name: str, placed: Placed, batch: Batch, states: States, others: Sequence[str] = ()
    ) -> None:
        """Raises ValueError for arguments of a step that do not fit, and for problems of others."""
        rest = [*self._batch_problems(batch), *self._state_problems(states)]
        refuse([*self._params.problems(name, placed), *others, *rest])

    def _state_problems(self, states: States) -> list[str]:
        if self._states is None:
            return [] if states is None else [_NO_STATES]
        if states is None:
            return ["states=None, but this model's layers keep states: see `pipe.place_states`."]
        return self._states.problems("states", states)

    def check_batch(self, batch: Batch) -> None:
        """Raises ValueError for rows that do not divide into microbatches and data shards."""
        refuse(self._batch_problems(batch))

    def _batch_problems(self, batch: Batch) -> list[str]:
        m, shards = self.schedule.num_microbatches, self.mesh.shape[DATA]
        return list(checks.batch(batch, num_microbatches=m, num_shards=shards))

    @property
    def in_specs(self) -> Tree:
        """Partition specs of a step's arguments: placed parameters, batch, key and states."""
        return self.layout.specs(sharded=self.zero == 3), P(DATA), P(), P(STAGE)

    def shard_map(
        self, body: Callable[..., Any], in_specs: Tree, out_specs: Tree
    ) -> Callable[..., Any]:
        """``body`` on every device, as one program."""
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def split_rows(self, batch: Batch) -> Batch:
        """One data shard's leaves ``[rows, ...]`` as ``[rows of a microbatch, m, ...]``: a view."""
        m = self.schedule.num_microbatches
        return jax.tree.map(lambda leaf: leaf.reshape(-1, m, *leaf.shape[1:]), batch)


_NO_STATES = "This model's layers keep no state: Pipeline was given no states."
