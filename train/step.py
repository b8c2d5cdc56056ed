"""The programs of a run: the model in its pipeline, the optimizer, and one training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxpipe import Model, Options, Pipeline, make_mesh, on_host
from jaxpipe.errors import ArgumentError
from jaxpipe.measure import end_costs, layer_costs
from jaxpipe.schedule import Costs, Schedule, Timeline, chunk_costs, cuts, device_clock, partition
from models.types import PyTree
from train import errors, pipeline_section, tasks
from train.choice import Choice
from train.config import Config
from train.optimizers import learning_rate, make_optimizer
from train.processes import distributed
from train.task import Task

Key = jax.Array | None
Leaf = jax.Array | jax.ShapeDtypeStruct
Values = dict[str, PyTree]
"""Loss, norms and metrics of a step by name."""


@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that a training step changes.

    Args:
      params: placed parameters.
      optimizer: optax state of placed parameters.
      layers: placed states of the layers, such as running statistics; None if they keep none.
    """

    params: PyTree
    optimizer: PyTree
    layers: PyTree = None


jax.tree_util.register_dataclass(
    TrainState, data_fields=["params", "optimizer", "layers"], meta_fields=[]
)


class Setup:
    """Everything a run compiles, built from its configuration.

    Args:
      config: a checked configuration; the devices it needs are there.
      choice: the schedule and the partition to keep; None to choose them. Every process takes those
        of process 0.
      devices: devices to compile for, in place of those that jax has.

    Example:
      >>> setup = Setup(config)  # doctest: +SKIP
      >>> state = setup.init()  # doctest: +SKIP
      >>> state, metrics = setup.train_step(state, batch, setup.rng(0))  # doctest: +SKIP
    """

    def __init__(
        self,
        config: Config,
        choice: Choice | None = None,
        *,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        self.config = config
        self.task = tasks.make(config)
        sizes: dict[str, Any] = config.mesh.shared_axes()
        sizes |= {name: getattr(config.mesh, name) for name in ("stage", "data", "replica")}
        self.mesh = make_mesh(**sizes, devices=devices)
        self.shapes = jax.eval_shape(self.task.init, self._key)
        self.learning_rate = learning_rate(config.optimizer, num_steps=config.train.steps)
        # Measurements differ between processes.
        chosen = distributed.from_first(lambda: (choice or self._choose()).to_json())
        self.choice = Choice.from_json(chosen)
        self.task = self._task(self.choice.vocabulary)
        self.schedule = self.choice.schedule
        self.layer_costs, self.layer_counts = self.choice.layer_costs, self.choice.layer_counts
        self.pipe = self._pipeline(self.schedule, self.layer_counts)
        self.optimizer = self.make_optimizer()
        try:
            self._optimizer_placing = self.pipe.optimizer_placing(self.optimizer)
        except ValueError as error:
            given = f"optimizer.name={config.optimizer.name}"
            given += ", optimizer.offload=True" if config.optimizer.offload else ""
            raise errors.refused(f"{given}: {error}") from error
        self._updating_step = self._chunk_by_chunk()

    def _task(self, vocabulary: str) -> Task:
        return tasks.make(self.config.changed(pipeline={"vocabulary": vocabulary}))

    def _choose(self) -> Choice:
        given = self.config.pipeline.vocabulary
        vocabulary = self._vocabulary() if given == "auto" else given
        self.task = self._task(vocabulary)
        order, costs, counts = self._partition()
        return Choice(order, counts, tuple(costs), vocabulary)

    def _vocabulary(self) -> str:
        """Chooses the stages that compute embedding and head in less time on the device clock.

        If embedding and head are split, they take each stage its share of their time.
        """
        stages = self.config.mesh.stage
        if stages == 1 or pipeline_section.is_asynchronous(self.config) or self._ends_compute:
            return "split"
        order = pipeline_section.order(self.config)
        given, even = pipeline_section.own_counts(self.config), [1.0] * self.task.num_layers
        equal = partition(even, order.placement)
        self.task = self._task("ends")
        layers, ends = self._costs(order, given or equal, ends=True)
        given = equal if self.config.pipeline.partition == "equal" else given
        fastest, *_ = cuts(order, pipeline_section.costs(self.config), layers, *ends, given=given)
        return "split" if fastest.together else "ends"

    def _partition(self) -> tuple[Schedule, list[float], tuple[int, ...]]:
        """Returns the order, the cost of every layer, and the number of layers of every chunk."""
        order, rule = pipeline_section.order(self.config), self.config.pipeline.partition
        alike = not isinstance(self.shapes["layers"], tuple)
        even = [1.0] * self.task.num_layers
        counts = pipeline_section.own_counts(self.config) or partition(even, order.placement)
        ends = self._ends_compute
        if alike and not ends:
            return order, even, counts
        layers, (embed, head) = self._costs(order, counts, ends=ends, measure=rule == "measured")
        costs = [*layers]
        costs[0], costs[-1] = costs[0] + embed, costs[-1] + head
        if pipeline_section.own_counts(self.config) is not None:
            return order, costs, counts
        weights = even if rule == "equal" else costs
        if pipeline_section.chooses_placement(self.config):
            order = pipeline_section.searched(self.config, weights)
        if not ends or rule == "equal":
            return order, costs, partition(weights, order.placement)
        found = cuts(order, pipeline_section.costs(self.config), layers, embed, head)
        return order, costs, next(cut.layer_counts for cut in found if not cut.together)

    def _costs(
        self, order: Schedule, counts: Sequence[int], *, ends: bool, measure: bool = False
    ) -> tuple[list[float], tuple[float, float]]:
        """Counts or measures the costs of all layers, and of embedding and head if asked for.

        Any partition serves to inspect the layers.
        """
        probe = self._pipeline(order, counts)
        given = probe, self._batch_shapes(probe), self.rng_shape
        layers = [part.f + part.b + part.w for part in layer_costs(*given, measure=measure)]
        return layers, end_costs(*given, measure=measure) if ends else (0.0, 0.0)

    @cached_property
    def chunk_costs(self) -> list[Costs]:
        """The costs of every virtual stage, by its layers; ``costs.*`` are their average."""
        return chunk_costs(pipeline_section.costs(self.config), self.layer_costs, self.layer_counts)

    @cached_property
    def timeline(self) -> Timeline:
        """The schedule on the device clock."""
        return device_clock(self.schedule, self.chunk_costs, together=not self._ends_compute)

    @property
    def _ends_compute(self) -> bool:
        """Says whether only the ends of the pipeline compute embedding and head."""
        # Asynchronous schedules update them while they run, on all stages.
        if pipeline_section.is_asynchronous(self.config):
            return False
        return self.task.model(train=True).stage_split is None

    @cached_property
    def _reference(self) -> Pipeline | None:
        """The pipeline of the model that the task compares its own with."""
        model = self.task.reference()
        if model is None:
            return None
        return self._unchecked(self.schedule, self.layer_counts, train=False, model=model)

    def _with_reference(self, state: TrainState, batch: PyTree) -> PyTree:
        """Adds what the reference says of a batch."""
        if self._reference is None:
            return batch
        found = self._reference.outputs(state.params, batch, states=state.layers)
        return batch | {"reference": found}

    def _pipeline(self, order: Schedule, counts: Sequence[int], *, train: bool = True) -> Pipeline:
        try:
            pipe = self._unchecked(order, counts, train=train)
            if self.config.pipeline.fp8 is not None:
                # What layers do with the weights shows when they are traced.
                layer_costs(pipe, self._batch_shapes(pipe), self.rng_shape)
        except ArgumentError as error:
            failures = errors.of_pipeline(error, self.config.pipeline.schedule)
            raise errors.ConfigError(list(failures)) from error
        return pipe

    def _unchecked(
        self, order: Schedule, counts: Sequence[int], *, train: bool, model: Model | None = None
    ) -> Pipeline:
        # Options that have the same names and values in the configuration, and those that differ.
        given, names = dict(self.config.pipeline), (f.name for f in dataclasses.fields(Options))
        options: dict[str, Any] = {name: given[name] for name in names if name in given}
        options |= {
            "trainable": pipeline_section.trainable(self.config),
            "fp8": given["fp8"].split(",") if given["fp8"] else (),
            "remat": pipeline_section.remat(self.config),
            "weights": pipeline_section.weights(self.config),
            "weight_slots": pipeline_section.weight_slots(self.config),
            "layer_counts": counts,
        }
        model, states = model or self.task.model(train=train), self.task.init_states()
        return Pipeline(
            model, self.shapes, schedule=order, mesh=self.mesh, states=states, **options
        )

    def _chunk_by_chunk(self) -> Callable[..., Any] | None:
        """Makes the step that updates every chunk by itself; None if it is not wanted.

        Raises:
          ConfigError: the schedule or the optimizer does not allow it.
        """
        if self.config.pipeline.update == "step":
            return None
        try:
            return self.pipe.train_step(self.optimizer, update=self.config.pipeline.update)
        except ValueError as error:
            failures = errors.of_pipeline(error, self.config.pipeline.schedule)
            raise errors.ConfigError(list(failures)) from error

    def make_optimizer(self, *, clips: bool = True) -> optax.GradientTransformation:
        """Makes the run's optimizer; see `make_optimizer`."""
        settings = self.config.optimizer
        last = self.task.last_transformation()
        made = make_optimizer(settings, self.learning_rate, clips=clips, last=last)
        return on_host(made) if settings.offload else made

    @property
    def _key(self) -> jax.Array:
        return jax.random.key(self.config.train.seed)

    def rng(self, step: int) -> Key:
        """Returns the key of a step, or None for a model without dropout."""
        if not self.task.dropout:
            return None
        return jax.random.fold_in(self._key, step)

    @property
    def rng_shape(self) -> Key:
        """The shape of a step's key."""
        return jax.eval_shape(lambda: self.rng(0))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())

    @property
    def state_shardings(self) -> TrainState:
        """Shardings of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.state_shapes)

    @cached_property
    def state_shapes(self) -> TrainState:
        """Shapes, dtypes and shardings of the state on the devices."""
        optimizer = self._optimizer_placing.placed
        return TrainState(self.pipe.placed_params, optimizer, self.pipe.placed_states)

    @cached_property
    def canonical_shapes(self) -> TrainState:
        """Shapes, dtypes and shardings in canonical order, as a checkpoint holds the state."""
        params = self.pipe.canonical_params
        optimizer, states = self._optimizer_placing.canonical, self.pipe.canonical_states
        return TrainState(params, optimizer, states)

    @cached_property
    def batch_shapes(self) -> PyTree:
        """Shape, dtype and sharding of a batch."""
        return self._batch_shapes(self.pipe)

    def _batch_shapes(self, pipe: Pipeline) -> PyTree:

        def batch(row: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = self.config.train.batch_size, *row.shape
            return jax.ShapeDtypeStruct(shape, row.dtype, sharding=pipe.batch_sharding)

        return jax.tree.map(batch, self.task.row_shapes())

    def init(self) -> TrainState:
        """Makes the initial weights and optimizer state on the devices that hold them."""

        def make(key: jax.Array) -> TrainState:
            params = self.pipe.place(self.task.init(key))
            optimizer = self.pipe.init(self.optimizer, params)
            return TrainState(params, optimizer, self._place_states(states))

        states = self.task.init_states()
        return jax.jit(make, out_shardings=self.state_shardings)(self._key)

    def to_canonical(self, state: TrainState) -> TrainState:
        """Undoes placing, also of the optimizer state, into the memory of the host; the result does
        not depend on the layout."""
        params = self.pipe.params_placing.to_host(state.params)
        placing = self.pipe.states_placing
        layers = None if placing is None else placing.to_host(state.layers)
        return TrainState(params, self._optimizer_placing.to_host(state.optimizer), layers)

    def to_canonical_weights(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """Returns parameters and layers' states in canonical order, without the optimizer's."""
        layers = None if state.layers is None else self.pipe.unplace_states(state.layers)
        return self.pipe.unplace(state.params), layers

    def _place_states(self, states: PyTree) -> PyTree:
        return None if states is None else self.pipe.place_states(states)

    def from_canonical(self, state: TrainState) -> TrainState:
        """Places a canonical state on this run's mesh, for its schedule and ZeRO level."""

        def place(state: TrainState) -> TrainState:
            optimizer = self._optimizer_placing.place(state.optimizer)
            return TrainState(
                self.pipe.place(state.params), optimizer, self._place_states(state.layers)
            )

        return jax.jit(place, out_shardings=self.state_shardings)(state)

    @cached_property
    def train_step(self) -> jax.stages.Wrapped:
        """The jitted step ``(state, batch, rng) -> (state, values)``, which donates the state.

        Values are "loss", "grad_norm", and "metrics" if the task's loss has any; there is no
        "grad_norm" if every chunk is updated by itself.
        """

        def step(state: TrainState, batch: PyTree, rng: Key) -> tuple[TrainState, Values]:
            batch = self._with_reference(state, batch)
            given, norm = (state.params, state.optimizer, batch, rng, state.layers), {}
            if self._updating_step is not None:
                value, params, optimizer = self._updating_step(*given)
            else:
                value, params, optimizer, norm["grad_norm"] = self._step_with_norm(*given)
            values, layers = named(value, state.layers)
            layers = self._end_step(layers)
            new, values = TrainState(params, optimizer, layers), values | norm
            return self._without_skipped(state, new, values)

        shardings = self.state_shardings, self.replicated
        return jax.jit(step, donate_argnums=0, out_shardings=shardings)

    def _end_step(self, layers: PyTree) -> PyTree:
        """Lets the task end the step of placed states."""
        if layers is None:
            return None
        ended = self.task.end_step(self.pipe.unplace_states(layers))
        return layers if ended is None else self.pipe.place_states(ended)

    def _without_skipped(
        self, old: TrainState, new: TrainState, values: Values
    ) -> tuple[TrainState, Values]:
        """Keeps the new state, or the old one if the step is skipped, and says which it is."""
        settings = self.config.optimizer
        if not settings.max_skipped:
            return new, values
        loss, norm = values["loss"], values["grad_norm"]
        is_good = jnp.isfinite(loss) & jnp.isfinite(norm)
        if settings.skip_above:
            is_good &= norm <= settings.skip_above
        kept = jax.tree.map(lambda after, before: jnp.where(is_good, after, before), new, old)
        return kept, values | {"skipped": ~is_good}

    def _step_with_norm(
        self, params: PyTree, optimizer: PyTree, batch: PyTree, rng: Key, layers: PyTree
    ) -> tuple[PyTree, ...]:
        """Runs a step as `Pipeline.train_step` does; also returns the norm before clipping."""
        value, grads = self.pipe.value_and_grad(params, batch, rng, states=layers)
        more = {}
        if layers is not None:
            _, states = named(value, layers)
            more = self.task.optimizer_arguments(self.pipe.unplace_states(states))
        new = self.pipe.update(self.optimizer, grads, optimizer, params, **more)
        return value, *new, optax.tree.norm(grads)

    def lower(self) -> jax.stages.Lowered:
        """Traces `train_step` for its devices."""
        return self.train_step.lower(self.state_shapes, self.batch_shapes, self.rng_shape)

    def compile(self) -> jax.stages.Compiled:
        """Compiles `train_step`; the result is called like it and knows its memory."""
        return self.lower().compile()

    @cached_property
    def evaluate(self) -> jax.stages.Compiled:
        """The compiled ``(state, batch) -> totals``: the same pipeline, forward only, no dropout.

        They are those of `jaxpipe.Pipeline.totals`: "loss", and "metrics" if the task's loss has
        any.
        """
        pipe = self._pipeline(self.schedule, self.layer_counts, train=False)

        def evaluate(state: TrainState, batch: PyTree) -> Values:
            batch = self._with_reference(state, batch)
            return named(pipe.totals(state.params, batch, states=state.layers), None)[0]

        return jax.jit(evaluate).lower(self.state_shapes, self.batch_shapes).compile()


def named(value: PyTree, layers: PyTree) -> tuple[Values, PyTree]:
    """Takes apart what a step returns as its loss.

    Args:
      value: a loss, or ``(loss, aux)`` with metrics, the layers' states, or both.
      layers: the states before the step; None if they keep none, or if there are no new ones.

    Returns:
      Loss and metrics by name, and the new states.
    """
    loss, aux = value if isinstance(value, tuple) else (value, None)
    values, metrics = {"loss": loss}, aux
    if layers is not None:
        # Metrics and states in a tuple, or states alone.
        structure: Any = jax.tree.structure(aux)
        metrics, layers = (None, aux) if structure == jax.tree.structure(layers) else aux
    return values if metrics is None else values | {"metrics": metrics}, layers


def with_sharding(leaf: Leaf, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """Returns an array's shape and dtype with a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
