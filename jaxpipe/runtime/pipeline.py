"""The public object: a model, a schedule and a mesh, as one differentiated step."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Unpack, cast

import jax
import numpy as np
import optax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime import checks
from jaxpipe.runtime.assembly import NO_STATES, Assembly, refusing_derivatives
from jaxpipe.runtime.layers import losses
from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layout.placed import Placed
from jaxpipe.runtime.layout.placing import Placing
from jaxpipe.runtime.layout.splits import splitting
from jaxpipe.runtime.layout.whole_model import FROZEN, trained_part
from jaxpipe.runtime.mesh import Axes, leave_compilation_cache, with_auto_axes
from jaxpipe.runtime.options import Arguments, Options
from jaxpipe.runtime.types import (
    Batch,
    Gradients,
    Key,
    OptimizerState,
    Params,
    Shapes,
    States,
    Tree,
)
from jaxpipe.runtime.update import training_step
from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.check import validate
from jaxpipe.schedule.problems import ArgumentError, Problem, counted, in_python, refuse

# Refusals of derivatives.
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
_TOTALS = "Pipeline.totals was differentiated; it only runs forward. Differentiate `Pipeline.loss`."

MICROBATCHES_PER_STAGE = 2
"""By default. Every built-in schedule takes this many, and 1F1B's bubble ratio is below a third."""


class Pipeline(Assembly):
    """Runs a model through a pipeline schedule on a mesh.

    The user has *canonical* parameters: ``{"embed", "layers", "head"}`` and, if layers share some,
    "shared". Layers are in model order, stacked if they are alike, or else in a tuple or list. The
    devices have *placed* parameters; `place` and `unplace` convert. A placed tree records the order
    of its layers, and a pipeline refuses trees with another order. `init` and `update` run an
    optimizer on placed parameters and shard its state by the ZeRO level. All methods can be called
    in `jax.jit`.

    Args:
      model: the model's pure functions.
      params: canonical parameters, or their shapes.
      schedule: a result of `jaxpipe.schedules.build`; your own schedule, which is then validated;
        or the name of a schedule, such as "1f1b", to build for the mesh with its default options.
      mesh: from `jaxpipe.make_mesh`, or your own; explicit axes are used as automatic ones.
      stage_axis: the mesh axis of the stages.
      data_axes: the mesh axes of data shards, which act as one axis; by default "data" and, if the
        mesh has it, "expert".
      replica_axes: further data axes, along which ZeRO does not shard; by default "replica", if the
        mesh has it.
      microbatches: number of microbatches of a named schedule; by default two per stage.
      states: the layers' initial states, or their shapes, for a stateful `Model`.

      **options: the fields of `Options`, such as ``zero=3``, ``remat="full"`` or
        ``compute_dtype="bfloat16"``.

    Raises:
      ValueError: arguments that do not fit each other; all failures in one message.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxpipe.runtime.mesh import make_mesh
      >>> model = Model(
      ...     embed=lambda outer, batch, rng: batch["x"],
      ...     layer=lambda w, x, batch, rng: jnp.tanh(x @ w),
      ...     head_loss=lambda outer, x, batch, rng: jnp.mean((x - batch["y"]) ** 2),
      ... )
      >>> params = {"embed": {}, "layers": jnp.ones((2, 3, 3)), "head": {}}
      >>> pipe = Pipeline(model, params, schedule="1f1b", mesh=make_mesh(stage=1))
      >>> optimizer, params = optax.sgd(0.1), pipe.place(params)
      >>> state, step = pipe.init(optimizer, params), pipe.train_step(optimizer)
      >>> loss, params, state = step(params, state, {"x": jnp.ones((4, 3)), "y": jnp.ones((4, 3))})
      >>> pipe.unplace(params)["layers"].shape
      (2, 3, 3)
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        *,
        schedule: Schedule | str,
        mesh: Mesh,
        stage_axis: str = "stage",
        data_axes: Sequence[str] | None = None,
        replica_axes: Sequence[str] | None = None,
        microbatches: int | None = None,
        states: States = None,
        **options: Unpack[Arguments],
    ) -> None:
        for name in options:
            if name not in Arguments.__annotations__:
                raise TypeError(f"Pipeline() got an unexpected keyword argument {name!r}")
        apart = splitting(getattr(model, "axis_split", None))
        axes = Axes.of(mesh, stage_axis, data_axes, replica_axes, getattr(model, "axes", ()), apart)
        built, unknown = named_schedule(schedule, mesh, axes, microbatches)
        given = Options(**cast(Any, options))  # of any type: checks.arguments says what is wrong
        problems = checks.arguments(
            model, params, built, mesh=mesh, axes=axes, states=states, options=given
        )
        refuse([*unknown, *problems])
        assert built is not None  # named_schedule gave none only with a problem, as did checks
        validate(built)
        leave_compilation_cache(mesh)  # of the whole process, for several CPU devices alone
        mesh = with_auto_axes(mesh)
        decided = given.on(mesh, axes, model, built, params)
        model = model.in_pairs() if decided.pair_layers else model
        super().__init__(model, params, built, mesh=mesh, axes=axes, states=states, options=decided)
        self._train_step = lru_cache(maxsize=8, typed=True)(partial(training_step.train_step, self))

    def __repr__(self) -> str:
        schedule, options = self.schedule, self.options
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        trees = self.canonical_params, self.layout.canonical_shapes()
        total, trained = (sum(w.size for w in jax.tree.leaves(tree)) for tree in trees)
        return (
            f"Pipeline of {counted(sum(self.table.layer_counts), 'layer')}: "
            f"schedule {schedule.name!r}, stages={schedule.num_stages}, "
            f"chunks={schedule.num_chunks}, microbatches={schedule.num_microbatches}\n"
            f"  mesh: {mesh}; rows of a batch: a multiple of {self._batch_unit}\n"
            f"  parameters: {total:,}, trained: {trained:,}; zero={options.zero:d}, "
            f"remat={options.remat!r}, weights={options.weights!r}"
        )

    # Layout.

    @property
    def placed_params(self) -> Shapes:
        """Shapes and shardings of the placed parameters, which ZeRO-3 also splits over data."""
        return self.params_placing.placed

    @property
    def canonical_params(self) -> Shapes:
        """Shapes and shardings of the results of `unplace`, split over all devices as far as the
        sizes divide."""
        return self.params_placing.canonical

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of a batch's leaves ``[rows, ...]``."""
        return NamedSharding(self.mesh, P(self.axes.data))

    def pad_batch(self, batch: Batch, *, mask: str = "mask") -> Batch:
        """Adds rows of weight 0 until microbatches x data shards divides their number.

        The new rows come last and repeat the first ones, so that their values are ordinary.
        In them ``batch[mask]`` is 0. The loss stays that of the other rows if `Model.head_loss`
        returns ``jaxpipe.Weighted((mask * losses).sum(), mask.sum())``. A mean over the rows of a
        microbatch, and losses and states of layers, include the new rows.

        Args:
          batch: a dictionary of arrays ``[rows, ...]``, at least one row.
          mask: the name of the weights, ``[rows]`` or of tokens ``[rows, ...]``; if there are none,
            they are made, as float32 ones ``[rows]``.

        Raises:
          ValueError: a batch that is no dictionary, or whose arrays differ in their rows.

        Example:
          >>> pipe.pad_batch({"x": np.ones((13, 3))})["mask"][-4:].tolist()  # doctest: +SKIP
          [1.0, 0.0, 0.0, 0.0]
        """
        if not isinstance(batch, dict):
            refuse([f"batch is a {type(batch).__name__}; a mask needs a dictionary of arrays."])
        rows_of, problems = checks.rows_of(batch)
        refuse(problems or ([] if any(rows_of.values()) else ["batch holds no rows."]))
        rows = next(iter(rows_of.values()))
        number = np.arange(-(-rows // self._batch_unit) * self._batch_unit)
        batch = {mask: np.ones(rows, np.float32)} | batch
        padded = jax.tree.map(lambda w: w[number % rows], batch)
        is_given = (number < rows).reshape(-1, *[1] * (batch[mask].ndim - 1))
        return padded | {mask: padded[mask] * is_given.astype(batch[mask].dtype)}

    @property
    def _batch_unit(self) -> int:
        """The number that must divide the rows of a batch."""
        return self.schedule.num_microbatches * self.axes.num_shards(self.mesh)

    def place(self, params: Params) -> Placed:
        """Places canonical parameters on the devices, sharded by the ZeRO level.

        Returns:
          A mapping like ``params``, in which stages hold their layers; ``placed | {"head": head}``
          replaces a part of it.

        Raises:
          ValueError: parameters that differ from those of the pipeline in structure, shape or
            dtype, or that are already placed.
        """
        return self.params_placing.place(params)

    def unplace(self, placed: Placed) -> Params:
        """Undoes `place`, also for trees shaped like parameters, such as gradients."""
        # Gradients have no frozen part.
        placing = self.params_placing if FROZEN in placed else self.trained_placing
        return placing.unplace(placed, dtypes=False)

    def place_states(self, states: States) -> States:
        """Places canonical states of the layers, one tree per layer; raises like `place`."""
        return self._states_or_raise().place(states)

    def unplace_states(self, placed: States) -> States:
        """Undoes `place_states`."""
        return self._states_or_raise().unplace(placed)

    def _states_or_raise(self) -> Placing:
        if self.states_placing is None:
            raise ValueError(NO_STATES)
        return self.states_placing

    @property
    def placed_states(self) -> Shapes:
        """Shapes and shardings of the placed states; None for a model without."""
        return None if self.states_placing is None else self.states_placing.placed

    @property
    def canonical_states(self) -> Shapes:
        """Shapes and shardings of the layers' canonical states; None for a model without."""
        return None if self.states_placing is None else self.states_placing.canonical

    # The optimizer.

    def init(self, optimizer: optax.GradientTransformation, params: Placed) -> OptimizerState:
        """The initial state of an optimizer, sharded by the ZeRO level.

        Args:
          optimizer: an optax transformation. It, its masks and its labels see whole parameters,
            with one tree per layer in ``params["layers"]``.
          params: placed parameters.

        Raises:
          ValueError: the parameters differ from those that the pipeline was built for, or are not
            placed; or the optimizer needs arrays of several layers at once.
        """
        refuse(self.params_placing.problems("params", params))
        placed = self.placed_optimizer(optimizer)
        return jax.jit(placed.init, out_shardings=placed.placing.shardings)(trained_part(params))

    def update(
        self,
        optimizer: optax.GradientTransformation,
        grads: Gradients,
        state: OptimizerState,
        params: Placed,
        **extra: Tree,
    ) -> tuple[Placed, OptimizerState]:
        """Takes a step of an optimizer; all shardings stay the same.

        A stage updates its own layers, and from ZeRO-1 on a data shard updates its part of them. If
        the update needs whole arrays, as Muon does, the devices that share a stage each gather
        those of one layer at a time, and return its parts.

        Args:
          optimizer: an optax transformation.
          grads: gradients, from `value_and_grad`.
          state: the optimizer's state, from `init`.
          params: placed parameters.
          **extra: further arguments of ``optimizer.update``, such as ``value=loss``.

        Returns:
          The new parameters and the new state, sharded like the old ones.

        Raises:
          ValueError: a tree differs from those that the pipeline was built for, or is not placed.
        """
        return training_step.update(self, optimizer, grads, state, params, extra)

    def optimizer_placing(self, optimizer: optax.GradientTransformation) -> Placing:
        """The object that places an optimizer's state, with its shapes and shardings.

        ``placing.unplace(state)`` returns the canonical state, which belongs to canonical
        parameters and fits any mesh, schedule and ZeRO level. ``placing.place(state)`` undoes that.
        ``placing.to_host(state)`` unplaces into host memory. ``placing.placed`` and
        ``placing.canonical`` are the shapes and shardings of both forms.
        """
        return self.placed_optimizer(optimizer).placing

    def train_step(
        self, optimizer: optax.GradientTransformation, *, update: str = "step"
    ) -> Callable[..., tuple[Tree, Placed, OptimizerState]]:
        """A whole training step, jitted: ``step(params, state, batch, rng=None, states=None)``.

        The step donates parameters, optimizer state and states, compiles once, and keeps all
        shardings. The same optimizer and ``update`` give the same function.

        Args:
          optimizer: an optax transformation.
          update: "step" updates after the backward. "chunk" updates each chunk of layers as soon as
            its gradient is complete, and needs no memory for all gradients. For "chunk", weights
            must be "stacked", the schedule must finish one chunk before the next, as "modular",
            "breadth-first" and any schedule with one chunk per stage do (or ``weight_slots`` must
            cover all chunks), and the optimizer must update every layer independently.

        Returns:
          A function that returns the first result of `value_and_grad`, the new parameters and the
          new optimizer state. Its arguments are those of `value_and_grad`, with the optimizer's
          state from `init`.

        Raises:
          ValueError: the schedule or the optimizer cannot update chunk by chunk.

        Source of "chunk": Lamy-Poirier, "Layered gradient accumulation and modular pipeline
        parallelism", arXiv 2106.02679, section 3.
        """
        return self._train_step(optimizer, update)

    # Running.

    def value_and_grad(
        self, placed: Placed, batch: Batch, rng: Key = None, *, states: States = None
    ) -> tuple[Tree, Gradients]:
        """Computes loss and gradients of a batch.

        Args:
          placed: placed parameters.
          batch: leaves ``[rows, ...]``, rows a multiple of microbatches x data shards. Within a
            data shard row r belongs to microbatch ``r % m``.
          rng: the step's key for models with randomness, or None.
          states: placed states, for a stateful model.

        Returns:
          The loss and the gradients. The loss is a float32 scalar: the mean (weighted or not) of
          `Model.head_loss` over the microbatches of all data shards, plus the mean of the layers'
          own losses. If the model has metrics or states, ``(loss, aux)`` replaces the loss, as in
          `jax.value_and_grad` with ``has_aux``. ``aux`` is the metrics, the states, or ``(metrics,
          states)``. The states are those after the last microbatch, averaged over data shards.
          Gradients are a tree like ``placed``. They are summed in float32 and, for narrower
          parameters, rounded to their dtypes.

        Raises:
          ValueError: the arguments do not fit the pipeline, the layers do not fit each other, or
            the loss is not a float32 scalar.
        """
        self.check("placed", placed, batch, states, checks.key(rng))
        step = self.run_step(placed, batch, rng, states)
        return losses.with_aux(step.value, step.states), step.gradients

    def loss(self, placed: Placed, batch: Batch, rng: Key = None, *, states: States = None) -> Tree:
        """Computes the loss, or ``(loss, metrics)``, from the schedule's forwards alone.

        Arguments as for `value_and_grad`. ``jax.value_and_grad(pipe.loss)`` gives the same loss and
        gradients; the loss also has gradients by arrays of the batch that no layer reads.
        """
        self.check("placed", placed, batch, states, checks.key(rng))
        return _loss(self, placed, batch, rng, states)

    def totals(
        self, placed: Placed, batch: Batch, rng: Key = None, *, states: States = None
    ) -> Tree:
        """Computes the loss, or ``(loss, metrics)``, of one of several batches, to be added up.

        Arguments as for `value_and_grad`.

        Returns:
          The result of `loss`, with a `Weighted` or a `Sum` in place of every value: totals and
          weights of all microbatches and data shards. The weight of an unweighted mean is the
          number of rows; the layers' own losses have the weight of the loss. If you add the results
          of several batches, ``loss.mean`` does not depend on how the rows were divided. All
          devices along a model axis count.

        Raises:
          ValueError: as for `value_and_grad`.

        Example:
          >>> evaluate = jax.jit(pipe.totals)  # doctest: +SKIP
          >>> found = [evaluate(placed, batch) for batch in heldout]  # doctest: +SKIP
          >>> loss, metrics = jax.tree.map(lambda *w: sum(w), *found)  # doctest: +SKIP
          >>> print(loss.mean, metrics["accuracy"].mean)  # doctest: +SKIP
        """
        self.check("placed", placed, batch, states, checks.key(rng))
        run = refusing_derivatives(self.program("totals"), _TOTALS)
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        return losses.totals(run(placed, batch, rng, states).value, num_rows)

    def outputs(
        self, placed: Placed, batch: Batch, rng: Key = None, *, states: States = None
    ) -> Tree:
        """Computes `Model.output`, such as logits, from the schedule's forwards.

        Arguments as for `value_and_grad`.

        Returns:
          Arrays ``[rows, ...]`` in the order of the batch's rows, sharded like the batch.

        Raises:
          ValueError: as for `value_and_grad`, or an output whose first dimension is not rows.
        """
        self.check("placed", placed, batch, states, checks.key(rng))
        run = refusing_derivatives(self.program("outputs"), _OUTPUTS)
        return run(placed, batch, rng, states).value


def _loss(pipe: Assembly, *args: Tree) -> Tree:
    """Computes loss and metrics from forwards alone; differentiated, from a whole step.

    JAX cannot reverse the loops that run a schedule, and need not: a schedule holds its own
    backward. First derivatives of the loss come from it, and all others are refused.
    """

    @jax.custom_vjp
    def evaluate(placed: Placed, batch: Batch, rng: Key, states: States) -> Tree:
        return pipe.program("loss")(placed, batch, rng, states).value

    def forward(*primals: Tree) -> tuple[Tree, tuple[Gradients, Batch]]:
        _, batch, _, states = primals
        if any(leaf.perturbed for leaf in jax.tree.leaves(states)):
            raise ValueError(_STATES)
        leaves, structure = jax.tree.flatten(batch)
        inputs = tuple(n for n, leaf in enumerate(leaves) if leaf.perturbed)
        step = pipe.run_step(*jax.tree.map(lambda leaf: leaf.value, primals), inputs=inputs)
        found = dict(zip(inputs, step.input_gradients, strict=True))
        of_batch = jax.tree.unflatten(structure, [found.get(n) for n in range(len(leaves))])
        return step.value, (step.gradients, of_batch)

    def backward(gradients: tuple[Gradients, Batch], cotangents: Tree) -> tuple[Tree, ...]:
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


def named_schedule(
    schedule: Schedule | str, mesh: Mesh, axes: Axes, microbatches: int | None
) -> tuple[Schedule | None, list[Problem | str]]:
    """Builds the schedule that the arguments name, and lists what is wrong with them.

    Args:
      microbatches: m for a name; None for the default.

    Returns:
      The schedule, or None if there is none or the mesh has no such axis; and the problems.
    """
    if isinstance(schedule, Schedule):
        if microbatches in (None, schedule.num_microbatches):
            return schedule, []
        rule = "is for a schedule that is given by its name, and $schedule is built already"
        others = {"schedule": schedule.name}
        near = (None, schedule.num_microbatches)
        return schedule, [Problem("microbatches", microbatches, rule, near, others)]
    if not isinstance(schedule, str):
        found = type(schedule).__name__
        return None, [
            f"schedule is a {found}; it must be a Schedule, such as `jaxpipe.schedules.build` "
            'returns, or the name of one, such as "1f1b".'
        ]
    if not isinstance(mesh, Mesh) or axes.stage not in mesh.shape:
        return None, []
    num_stages = axes.num_stages(mesh)
    if microbatches is None:
        microbatches = MICROBATCHES_PER_STAGE * num_stages
    try:
        built = catalog.build(schedule, stages=num_stages, microbatches=microbatches)
        return built, []
    except ArgumentError as error:
        return None, [error.text(_spell)]


def _spell(argument: str, value: object) -> str:
    """`Pipeline` calls the name ``schedule``, and its stages are those of the mesh."""
    names = {"name": "schedule", "num_stages": "mesh's stage"}
    return in_python(names.get(argument, argument.removeprefix("num_")), value)
