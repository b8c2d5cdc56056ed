"""The public object: a model, a schedule and a mesh, as one differentiated step."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime import executor
from jaxpipe.runtime.layout import make_layout
from jaxpipe.runtime.mesh import DATA, STAGE
from jaxpipe.runtime.model import Model
from jaxpipe.runtime.split import REMAT_POLICIES
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.lower import forward_only, lower
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.validate import validate

PyTree = Any


class Pipeline:
    """Runs a model through a pipeline schedule on a mesh.

    Parameters are *canonical* for the user (``{"embed", "layers", "head"}``, layers stacked in
    model order) and *placed* on the devices; `place` and `unplace` convert. Everything can be
    called inside `jax.jit`.

    Args:
      model: three pure functions.
      params: canonical parameters, or their shapes.
      schedule: from `jaxpipe.schedules.build`, or your own; it is validated.
      mesh: from `jaxpipe.make_mesh`; its ``stage`` axis must be the schedule's number of stages.
      remat: "none" keeps every residual, "dots" keeps weight matmuls' outputs, "full" only layer
        inputs.
      zero: what is sharded over the ``data`` axis: 0 nothing, 1 optimizer state, 2 also gradients,
        3 also weights.
      poison: test mode; fills bubbles with NaN.

    Raises:
      ValueError: arguments that do not fit each other; all failures in one message.

    Example:
      >>> from jaxpipe.schedule.catalog import build
      >>> from jaxpipe.runtime.mesh import make_mesh
      >>> model = Model(
      ...     embed=lambda outer, batch, rng: batch["x"],
      ...     layer=lambda w, x, rng: jnp.tanh(x @ w),
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
        poison: bool = False,
    ) -> None:
        _check(params, schedule, mesh, remat, zero)
        validate(schedule)
        self.model, self.schedule, self.mesh = model, schedule, mesh
        self.remat, self.poison = remat, poison
        self.zero = zero if mesh.shape[DATA] > 1 else 0
        num_layers = jax.tree.leaves(params["layers"])[0].shape[0]
        counts = partition([1] * num_layers, schedule.placement)
        self.table = lower(schedule, counts)
        self.layout = make_layout(params, model.stage_split, mesh, self.table)

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
        """Applies ``fn`` to every subtree with the parameters' structure and ``rest`` to all other
        leaves.

        With `place` and `unplace` it converts a whole optimizer state.
        """
        structure: Any = jax.tree.structure(self.param_shardings)

        def is_params(node):
            return bool(jax.tree.structure(node) == structure)

        return jax.tree.map(
            lambda node: fn(node) if is_params(node) else rest(node), tree, is_leaf=is_params
        )

    def place(self, params: PyTree) -> PyTree:
        """Canonical parameters to placed, sharded ones."""
        return self._place(params)

    def unplace(self, placed: PyTree) -> PyTree:
        """Placed parameters (or gradients) to canonical ones."""
        return self._unplace(placed)

    @cached_property
    def _place(self):
        return jax.jit(self.layout.place, out_shardings=self.param_shardings)

    @cached_property
    def _unplace(self):
        return jax.jit(self.layout.unplace, out_shardings=self.canonical_shardings)

    # Running.

    def value_and_grad(
        self, placed: PyTree, batch: PyTree, rng: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        """Loss and gradients of a batch.

        Args:
          placed: placed parameters.
          batch: leaves ``[rows, ...]``, rows a multiple of microbatches x data shards. Within a
            data shard row r belongs to microbatch ``r % m``.
          rng: the step's key for models with randomness, or None.

        Returns:
          The mean loss over microbatches and data shards (float32 scalar), and gradients like
          ``placed``.

        Raises:
          ValueError: the batch does not divide.
        """
        out_specs = (P(), self.layout.specs(sharded=self.zero >= 1))
        return self._run(self._plan(self.table), out_specs, placed, batch, rng)

    def loss(self, placed: PyTree, batch: PyTree, rng: jax.Array | None = None) -> jax.Array:
        """The loss alone, by the schedule's forwards. Arguments as for `value_and_grad`."""
        return self._run(self._plan(self._forward_table), P(), placed, batch, rng)

    @cached_property
    def _forward_table(self):
        return lower(forward_only(self.schedule), self.table.layer_counts)

    def _plan(self, table) -> executor.Plan:
        return executor.Plan(self.model, self.layout, table, self.remat, self.zero, self.poison)

    def _run(self, plan: executor.Plan, out_specs, placed, batch, rng):
        m, shards = self.schedule.num_microbatches, self.mesh.shape[DATA]
        for path, leaf in jax.tree.leaves_with_path(batch):
            if leaf.shape[0] % (m * shards):
                raise ValueError(
                    _uneven_batch(jax.tree_util.keystr(path), leaf.shape[0], m, shards)
                )

        def body(placed, batch, rng):
            return executor.run(plan, placed, self._microbatches(batch), rng)

        in_specs = (self.layout.specs(sharded=self.zero == 3), P(DATA), P())
        run = jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return run(placed, batch, rng)

    def _microbatches(self, batch: PyTree) -> PyTree:
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
        shapes: dict[str, PyTree] = {}

        def body(placed, batch, rng):
            rows = self._microbatches(batch)
            shapes.update(executor.buffers(self._plan(self.table), placed, rows, rng))
            return jnp.zeros(())

        run = jax.shard_map(
            body,
            mesh=self.mesh,
            out_specs=P(),
            check_vma=False,
            in_specs=(self.layout.specs(sharded=self.zero == 3), P(DATA), P()),
        )
        jax.eval_shape(run, self.layout.placed_shapes(), batch, rng)
        return shapes


def _check(params: PyTree, schedule: Schedule, mesh: Mesh, remat: str, zero: int) -> None:
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
    if schedule.placement.num_copies > 1:
        problems.append(
            f"Schedule {schedule.name!r} can only be simulated: it needs "
            f"{schedule.placement.num_copies} copies of the model's weights, and the runtime keeps "
            "one.\nNearest valid: 'hanayo', or 'dualpipe-v'."
        )
    if remat not in REMAT_POLICIES:
        problems.append(
            f"remat={remat!r} is not a policy; choose one of {', '.join(REMAT_POLICIES)}."
        )
    if zero not in (0, 1, 2, 3):
        problems.append(f"zero={zero} is not a level.\nNearest valid: {min(max(zero, 0), 3)}.")
    if not isinstance(params, dict) or set(params) != {"embed", "layers", "head"}:
        problems.append('params must be {"embed": ..., "layers": ..., "head": ...}.')
    else:
        depths = {leaf.shape[0] for leaf in jax.tree.leaves(params["layers"])}
        if len(depths) != 1:
            problems.append(
                'params["layers"] must stack every layer on the leading dimension; found leading '
                f"dimensions {sorted(depths)}."
            )
    if problems:
        raise ValueError("\n".join(problems))


def _uneven_batch(path: str, rows: int, m: int, shards: int) -> str:
    unit = m * shards
    below, above = rows // unit * unit, -(-rows // unit) * unit
    valid = ", ".join(str(n) for n in (below, above) if n)
    return (
        f"batch{path} has {rows} rows, which do not divide into {m} microbatches x "
        f"{shards} data shards.\n"
        f"Nearest valid: {valid}."
    )
