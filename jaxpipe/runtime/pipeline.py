"""The public object: a model, a schedule and a mesh, as one differentiated step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime import executor
from jaxpipe.runtime.fixed import Plan
from jaxpipe.runtime.layers import Layers
from jaxpipe.runtime.layout import LAYOUTS, make_layers, make_layout
from jaxpipe.runtime.mesh import DATA, STAGE
from jaxpipe.runtime.model import Model
from jaxpipe.runtime.packed_parameters import Packed
from jaxpipe.runtime.parameters import Stacked, Unrolled
from jaxpipe.runtime.split import REMAT_POLICIES
from jaxpipe.schedule.actions import Kind, Schedule
from jaxpipe.schedule.lower import forward_only, lower
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.table import TickTable
from jaxpipe.schedule.validate import simulated_only, validate

PyTree = Any


class Pipeline:
    """Runs a model through a pipeline schedule on a mesh.

    Parameters are *canonical* for the user (``{"embed", "layers", "head"}``, layers in model order:
    stacked if they are alike, a tuple if not) and *placed* on the devices; `place` and `unplace`
    convert. Everything can be called inside `jax.jit`.

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
        _check(model, params, states, schedule, mesh, remat, zero, weights, weight_slots)
        validate(schedule)
        self.model, self.schedule, self.mesh = model, schedule, mesh
        self.remat, self.poison = remat, poison
        self.weights, self.weight_slots = weights, weight_slots
        self.zero = zero if mesh.shape[DATA] > 1 else 0
        if layer_counts is None:
            layer_counts = partition([1] * num_layers(params["layers"]), schedule.placement)
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
            lambda spec: NamedSharding(self.mesh, spec), self.layout.canonical_specs()
        )

    def optimizer_shardings(self, state: PyTree) -> PyTree:
        """Shardings of an optax state: every part shaped like the parameters as gradients are, the
        rest replicated.

        Args:
          state: an optimizer state of placed parameters, or its shapes.
        """
        replicated = NamedSharding(self.mesh, P())
        return self.map_parameters(
            lambda _: self.gradient_shardings, state, rest=lambda _: replicated
        )

    def map_parameters(self, fn, tree: PyTree, *, rest=lambda leaf: leaf) -> PyTree:
        """Applies ``fn`` to every subtree with the structure of the parameters, placed or
        canonical, and ``rest`` to all other leaves.

        With `place` and `unplace` it converts a whole optimizer state.
        """
        structures = [
            jax.tree.structure(tree) for tree in (self.param_shardings, self.canonical_shardings)
        ]

        def is_params(node):
            return jax.tree.structure(node) in structures

        return jax.tree.map(
            lambda node: fn(node) if is_params(node) else rest(node), tree, is_leaf=is_params
        )

    def place(self, params: PyTree) -> PyTree:
        """Canonical parameters to placed, sharded ones."""
        return self._place(params)

    def unplace(self, placed: PyTree) -> PyTree:
        """Placed parameters (or gradients) to canonical ones."""
        return self._unplace(placed)

    def place_states(self, states: PyTree) -> PyTree:
        """Canonical states of the layers, one tree a layer, to placed ones."""
        shardings = NamedSharding(self.mesh, P(STAGE))
        return jax.jit(self._states.place, out_shardings=shardings)(states)

    def unplace_states(self, placed: PyTree) -> PyTree:
        """Undoes `place_states`."""
        return jax.jit(self._states.unplace)(placed)

    @property
    def _states(self) -> Stacked | Unrolled | Packed:
        if self.state_layout is None:
            raise ValueError("This model's layers keep no state: Pipeline was given no states.")
        return self.state_layout

    @cached_property
    def _place(self):
        return jax.jit(self.layout.place, out_shardings=self.param_shardings)

    @cached_property
    def _unplace(self):
        return jax.jit(self.layout.unplace, out_shardings=self.canonical_shardings)

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
          ValueError: the batch does not divide, or layers that do not fit each other.
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
        self.check_batch(batch)

        def body(placed, batch, rng, states):
            return executor.run(plan, placed, self.split_rows(batch), rng, states)

        gradients = self.layout.specs(sharded=self.zero >= 1) if plan.trains else None
        return self._mapped(body, (P(), gradients, P(STAGE)))(placed, batch, rng, states)

    def check_batch(self, batch: PyTree) -> None:
        """Raises ValueError for rows that do not divide into microbatches and data shards."""
        m, shards = self.schedule.num_microbatches, self.mesh.shape[DATA]
        for path, leaf in jax.tree.leaves_with_path(batch):
            if leaf.shape[0] % (m * shards):
                raise ValueError(
                    _uneven_batch(jax.tree_util.keystr(path), leaf.shape[0], m, shards)
                )

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
        sharding = NamedSharding(self.mesh, P(STAGE))

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


def num_layers(layers: PyTree) -> int:
    """How many layers canonical ``params["layers"]`` hold."""
    return len(layers) if isinstance(layers, tuple) else jax.tree.leaves(layers)[0].shape[0]


def _check(
    model: Model,
    params: PyTree,
    states: PyTree,
    schedule: Schedule,
    mesh: Mesh,
    remat: str,
    zero: int,
    weights: str,
    weight_slots: int,
) -> None:
    """Raises one error with everything that does not fit."""
    problems = []
    if set(mesh.axis_names) != {DATA, STAGE}:
        problems.append(
            f"mesh has axes {mesh.axis_names}; it must have {DATA!r} and {STAGE!r} "
            "(jaxpipe.make_mesh)."
        )
    elif mesh.shape[STAGE] != schedule.num_stages:
        problems.append(
            f"mesh.stage={mesh.shape[STAGE]} does not fit schedule {schedule.name!r}, which was "
            f"built for {schedule.num_stages} stages.\n"
            f"Nearest valid: mesh.stage={schedule.num_stages}."
        )
    problems += simulated_only(schedule)
    if remat not in REMAT_POLICIES:
        problems.append(
            f"remat={remat!r} is not a policy; choose one of {', '.join(REMAT_POLICIES)}."
        )
    if zero not in (0, 1, 2, 3):
        problems.append(f"zero={zero} is not a level.\nNearest valid: {min(max(zero, 0), 3)}.")
    if weights not in LAYOUTS:
        problems.append(f"weights={weights!r} is no layout; choose one of {', '.join(LAYOUTS)}.")
    if weight_slots < 1:
        problems.append(f"weight_slots={weight_slots} holds no chunk.\nNearest valid: 1.")
    if not isinstance(params, dict) or set(params) != {"embed", "layers", "head"}:
        problems.append('params must be {"embed": ..., "layers": ..., "head": ...}.')
    elif isinstance(params["layers"], tuple) or isinstance(model.layer, tuple):
        problems += _check_tuples(model, params["layers"], weights)
    else:
        depths = {leaf.shape[0] for leaf in jax.tree.leaves(params["layers"])}
        if len(depths) != 1:
            problems.append(
                'params["layers"] must stack every layer on the leading dimension; found leading '
                f"dimensions {sorted(depths)}."
            )
    if model.stateful != (states is not None):
        problems.append(
            f"Model.stateful={model.stateful}, but Pipeline was given "
            f"{'no states' if states is None else 'states'}: a stateful model needs the initial "
            "states of its layers, another takes none."
        )
    elif model.stateful:
        problems += _check_order(schedule)
    if problems:
        raise ValueError("\n".join(problems))


def _check_tuples(model: Model, layers: PyTree, weights: str) -> Iterator[str]:
    """What is wrong with the layers of a model whose layers differ."""
    if weights == "unrolled":
        yield (
            "weights='unrolled' needs layers that are alike, and these are a tuple: layers that "
            "differ share flat arrays.\nNearest valid: weights='stacked'."
        )
    if not (isinstance(layers, tuple) and isinstance(model.layer, tuple)):
        one, other = ("params['layers']", "Model.layer")
        if isinstance(model.layer, tuple):
            one, other = other, one
        yield (
            f"{one} is a tuple and {other} is not: layers that differ have a function and a tree "
            "of parameters each, layers that are alike one function and stacked parameters."
        )
    elif len(layers) != len(model.layer):
        yield (
            f"Model.layer has {len(model.layer)} functions and params['layers'] {len(layers)} "
            "trees; each layer needs one of both."
        )


def _check_order(schedule: Schedule) -> Iterator[str]:
    """A stateful layer must see the microbatches in their order."""
    latest: dict[int, int] = {}
    for order in schedule.orders:
        for action in order:
            if action.kind is not Kind.F:
                continue
            if action.microbatch < latest.get(action.virtual_stage, -1):
                yield (
                    f"Schedule {schedule.name!r} runs {action} after a later microbatch; the "
                    "states of a stateful model are renewed in microbatch order."
                )
                return
            latest[action.virtual_stage] = action.microbatch


def _uneven_batch(path: str, rows: int, m: int, shards: int) -> str:
    unit = m * shards
    below, above = rows // unit * unit, -(-rows // unit) * unit
    valid = ", ".join(str(n) for n in (below, above) if n)
    return (
        f"batch{path} has {rows} rows, which do not divide into {m} microbatches x "
        f"{shards} data shards.\n"
        f"Nearest valid: {valid}."
    )
