"""The trainer's part of ``jaxpipe plan``: the sizes of a configuration's model, and plans as YAML.

The library finds `read` by an entry point (``jaxpipe.configurations`` in pyproject.toml).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpipe import Pipeline, make_mesh, schedules
from jaxpipe.errors import ArgumentError, counted, refuse
from jaxpipe.planning.cost import Prediction, chunk_costs
from jaxpipe.planning.counting import num_moments, sizes, update_flops
from jaxpipe.planning.devices import cluster, known
from jaxpipe.planning.plans import NOTHING, Offload, Plan, depths, expert_groups
from jaxpipe.planning.search import Goal, search, without_garbage_collection
from jaxpipe.planning.sizes import ModelSizes, Sizes, Variant
from jaxpipe.planning.without_devices import attention_of_gpus
from jaxpipe.schedule import Costs
from jaxpipe.testing import simulate_devices
from train import checks, command_line, errors, pipeline_section, tasks
from train.config import Config
from train.optimizers import learning_rate, make_optimizer
from train.task import Task

_REMATS = ("none", "dots", "full")
_TAKEN_FOR = "cpu"
"""Device that stands for those that are not in the table, such as simulated ones."""
_MOST_SHARING = 8
"""Most devices that share a layer, unless more share its sequences: as many as a host has."""
_MOST_EXPERT = 64
"""Most data shards that split experts where nothing else shares a layer: as in published runs."""
_MICROBATCHES = 2


class Planned:
    """A configuration that is planned for, as `jaxpipe.planning.configurations.Configured` says."""

    def __init__(self, config: Config, name: str) -> None:
        self.config, self.name = config, name
        self.task = tasks.make(config)
        # Thousands of shapes of layers that differ would take minutes; few tell as much.
        self._few, self._like = self.task.few_layers()

    def sizes(
        self,
        devices: Sequence[int],
        most_context: int,
        most_slices: int,
        progress: Callable[[float], None],
    ) -> ModelSizes:
        """Traces the model for all devices that may share a layer, slices, and every policy."""
        most = max(_MOST_SHARING, most_context)
        cases = [
            Variant(context, tensor, remat, expert, slices)
            for context, tensor, expert in itertools.product(
                _powers(most_context), _powers(_MOST_SHARING), _powers(_MOST_EXPERT)
            )
            if (context * tensor * expert <= most or context * tensor == 1)
            and self._may_share(context, tensor, expert)
            and any(self._may_run(count, context, tensor, expert) for count in devices)
            for slices in _powers(most_slices)
            if self._may_cut(context, tensor, slices)
            for remat in _REMATS
        ]
        simulate_devices(max(most, *(math.prod(case.mesh) for case in cases)))
        return self.counted(cases, progress)

    def counted(self, cases: Sequence[Variant], progress: Callable[[float], None]) -> ModelSizes:
        """Traces the model for these choices."""
        variants: dict[Variant, Sizes] = {}
        for _, alike in itertools.groupby(cases, lambda case: case._replace(remat="")):
            variants |= self._traced(list(alike))
            progress(len(variants) / len(cases))
        params = jax.tree.leaves(self._params)
        row = jax.tree.leaves(self.task.row_shapes())
        return ModelSizes(
            name=self.name,
            tokens_per_row=self.task.units_per_row,
            parameter_bytes=max(leaf.dtype.itemsize for leaf in params),
            compute_bytes=self._compute_bytes,
            moments=num_moments(self._optimizer, self._params),
            batch_rows=self.config.train.batch_size,
            row_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in row),
            variants=variants,
            may_offload=not self.config.optimizer.max_skipped,
            document_share=self._document_share,
            in_pieces=self.task.in_pieces,
            update_flops=self._update_flops,
        )

    def write(self, plan: Plan, costs: Costs, steps: int | None) -> str:
        """Writes the configuration with a plan's mesh, pipeline, costs and batch."""
        config = self.config
        axes = ("stage", "data", "replica", "expert", "context", "tensor")
        mesh = {name: getattr(plan, name) for name in axes}
        pipeline = _chosen(plan) | {
            "zero": int(plan.zero),
            "weights": plan.weights,
            "weight_slots": plan.weight_slots,
            "residuals": "host" if plan.on_host.residuals else "device",
            "update": "step",
            "vocabulary": "ends" if plan.ends else "split",
            "partition": "flops",
        }
        if self._compute_bytes == 2:
            pipeline["compute_dtype"] = "bfloat16"
        train = {"batch_size": plan.batch_rows}
        if steps is not None:
            train["steps"] = max(steps, config.optimizer.warmup_steps)
        optimizer = {"offload": plan.on_host.state}
        changed = {"mesh": mesh, "pipeline": pipeline, "train": train, "costs": _of_chunk(costs)}
        return config.changed(**changed, optimizer=optimizer).to_yaml()

    def compiled_bytes(self, plan: Plan, costs: Costs, device: str) -> int:
        """Compiles the configuration with a plan in a process of its own (`train.compiled`)."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.yaml"
            path.write_text(self.write(plan, costs, None), encoding="utf-8")
            command = [sys.executable, "-m", "train.compiled"]
            command += ["--config", str(path), "--device", device]
            paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            done = subprocess.run(
                command, env=os.environ | paths, capture_output=True, text=True, check=False
            )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            raise ArgumentError([f"a plan could not be compiled: {''.join(last)}"])
        return int(json.loads(done.stdout.splitlines()[-1])["bytes"])

    def choice(self, limit_bytes: float | None, device: str) -> tuple[Config, str]:
        """Chooses the schedule, chunks, microbatches and policy that are predicted to be fastest on
        the configuration's own mesh, and says why.

        Args:
          limit_bytes: limit of a device's memory; None for what such a device has.
          device: kind of device to predict for, a name in `jaxpipe.planning.devices`.

        Raises:
          ArgumentError: nothing fits.
        """
        config, shape = self.config, self.config.mesh
        own = shape.stage, shape.data, shape.replica, shape.context, shape.tensor, shape.expert
        slots = pipeline_section.weight_slots(config) or 2  # as by default on GPUs
        devices = cluster(device, shape.num_devices, memory=limit_bytes)
        on_host = NOTHING
        if devices.has_host_memory:
            on_host = Offload(config.optimizer.offload, config.pipeline.residuals == "host")

        def allowed(plan: Plan) -> bool:
            mesh = plan.stage, plan.data, plan.replica, plan.context, plan.tensor, plan.expert
            zero = plan.level(config.pipeline.zero)
            fewer = min(slots, plan.chunks) if zero.shards_gradients else 1
            enough = plan.microbatches > 1 or not config.train.noise_every
            return enough and (mesh, plan.zero, plan.weight_slots) == (own, zero, fewer)

        sharing = shape.context, shape.tensor
        slices = config.pipeline.sequence_slices
        cases = [Variant(*sharing, remat, shape.expert, slices) for remat in _REMATS]
        model = self.counted(cases, lambda share: None)
        goal = Goal(None, (model.batch_rows,))
        result = search(model, [devices], goal, on_host=on_host, allowed=allowed)
        best = result.best[0]
        costs = _of_chunk(chunk_costs(best.placed))
        words = [f"pipeline.schedule=plan on {device}s: {_in_words(best)}"]
        words += [f"then {_in_words(other)}" for other in result.best[1:3]]
        return config.changed(pipeline=_chosen(best.plan), costs=costs), "; ".join(words)

    @cached_property
    def _params(self) -> Any:
        return jax.eval_shape(tasks.make(self._few).init, jax.random.key(0))

    @cached_property
    def _states(self) -> Any:
        return jax.eval_shape(tasks.make(self._few).init_states)

    @property
    def _compute_bytes(self) -> int:
        """Bytes of a weight when layers read it: they cast to the model's dtype."""
        return 4 if self.task.dtype is None else jnp.dtype(self.task.dtype).itemsize

    @property
    def _document_share(self) -> float:
        """Mean length of the document of a token, as a share of a row."""
        length = self.config.data.document_tokens or self.task.units_per_row
        return min(length / self.task.units_per_row, 1.0)

    def _sharing(self, context: int, tensor: int, expert: int) -> Config:
        """Makes the configuration of few layers on the devices of one."""
        shape = {"stage": 1, "data": expert, "replica": 1, "expert": expert}
        shape |= {"context": context, "tensor": tensor}
        return self._few.changed(mesh=shape)

    def _may_share(self, context: int, tensor: int, expert: int) -> bool:
        config = self._sharing(context, tensor, expert)
        return not any([*checks.shared_axes(config), *checks.balanced(config)])

    def _may_run(self, devices: int, context: int, tensor: int, expert: int) -> bool:
        """Whether plans for so many devices may split experts so."""
        groups, left = devices // (context * tensor), devices % (context * tensor)
        counted = [n for n in _powers(_MOST_EXPERT) if self._may_share(context, tensor, n)]
        inside = _MOST_SHARING // (context * tensor)
        return not left and any(
            expert in expert_groups(counted, groups // stages, inside)
            for stages in depths(groups, self.task.num_layers)
        )

    def _may_cut(self, context: int, tensor: int, slices: int) -> bool:
        config = self._sharing(context, tensor, 1)
        return not any(checks.slices(config.changed(pipeline={"sequence_slices": slices})))

    @without_garbage_collection()
    def _traced(self, cases: Sequence[Variant]) -> dict[Variant, Sizes]:
        """Traces the model for choices that differ in the policy of rematerialization alone."""
        case, remats = cases[0], [case.remat for case in cases]
        config = self._sharing(*case.mesh).changed(pipeline={"sequence_slices": case.slices})
        key = jax.eval_shape(lambda: jax.random.key(0)) if self.task.dropout else None
        with attention_of_gpus(compute_capability="8.0"):
            axes = config.mesh.shared_axes()
            task = tasks.make(config)
            pipe = self._pipeline(task, config, case.remat, stage=1, data=case.expert, **axes)
            batch = functools.partial(_batch, task.row_shapes())
            few = sizes(
                *(pipe, batch, key),
                compute_bytes=self._compute_bytes,
                document_share=self._document_share,
                remats=remats,
            )
        return {
            case: of_few._replace(kind_of=tuple(of_few.kind_of[layer] for layer in self._like))
            for case, of_few in ((case, few[case.remat]) for case in cases)
        }

    def _pipeline(self, task: Task, config: Config, remat: str, **axes: Any) -> Pipeline:
        """Makes a pipeline of one stage on as many devices as the axes have."""
        return Pipeline(
            task.model(train=True).in_pairs(),  # the planner hides collectives in pairs alone
            self._params,
            schedule=schedules.build(
                "1f1b", stages=1, microbatches=_MICROBATCHES, slices=pipeline_section.slices(config)
            ),
            mesh=make_mesh(**axes),
            remat=remat,
            trainable=pipeline_section.trainable(config),
            fp8=fp8.split(",") if (fp8 := self.config.pipeline.fp8) else (),
            fp8_recipe=self.config.pipeline.fp8_recipe,
            states=self._states,
        )

    @property
    def _update_flops(self) -> tuple[float, ...]:
        config = self._sharing(1, 1, 1)
        layers = self._pipeline(tasks.make(config), config, "none", stage=1).layout.layers
        return update_flops(self._optimizer, map(layers.shape_of, set(self._like)))

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        settings = self.config.optimizer
        rate = learning_rate(settings, num_steps=self.config.train.steps)
        return make_optimizer(settings, rate)


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length())]


def _batch(row: Any, rows: int) -> Any:
    """Shapes of so many rows."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype), row)


def _chosen(plan: Plan) -> dict[str, Any]:
    """Takes the fields that decide the order of a pipeline, and what its layers keep."""
    return {
        "schedule": plan.schedule,
        "chunks": plan.chunks,
        "microbatches": plan.microbatches,
        "sequence_slices": plan.slices,
        "group": None,
        "memory_limit": None,
        "remat": plan.remat,
    }


def _of_chunk(costs: Costs) -> dict[str, float]:
    names = "f", "b", "w", "message", "attention", "rendezvous"
    return {name: getattr(costs, name) for name in names}


def _in_words(candidate: Prediction) -> str:
    plan, waits = candidate.plan, candidate.seconds["waits"] / candidate.step_seconds
    return (
        f"{plan.schedule}, {counted(plan.chunks, 'chunk')} per stage, {plan.microbatches} "
        f"microbatches, remat {plan.remat}: {1e3 * candidate.step_seconds:.3g} ms per step "
        f"predicted, {waits:.0%} of it waiting for other stages, "
        f"{candidate.device_bytes / 1e9:.3g} GB"
    )


def choose(config: Config) -> tuple[Config, str]:
    """Chooses what ``pipeline.schedule: plan`` leaves open, for the devices that jax has.

    Args:
      config: a checked configuration; the devices it needs are there.

    Returns:
      The configuration with a schedule, chunks, microbatches and remat, and why, in words.

    Raises:
      ConfigError: nothing fits the devices.
    """
    device = jax.devices()[0]
    named = known(device.device_kind)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    try:
        taken_for = _TAKEN_FOR if named is None else named.name
        chosen = Planned(config, config.run_dir).choice(limit, taken_for)
    except ArgumentError as error:
        text = f"pipeline.schedule={pipeline_section.PLAN}: {error}"
        raise errors.refused(text, "pipeline.schedule") from error
    return chosen


def read(path: Path) -> Planned:
    """Reads a configuration's file; its mesh and pipeline do not matter.

    Raises:
      ArgumentError: it cannot be read, or something in it is wrong.
    """
    try:
        parsed = command_line.parse(["--config", str(path)])
    except errors.ConfigError as error:
        raise ArgumentError([failure.message for failure in error.failures]) from error
    # Planning chooses anew the sections that say how the model lies on devices.
    config = parsed.config.reset(["mesh", "pipeline", "costs", "asynchronous"])
    # A named schedule, since the default one is searched for.
    given = parsed.config.pipeline
    kept = {"fp8": given.fp8, "fp8_recipe": given.fp8_recipe}
    config = config.changed(pipeline=kept | {"schedule": "1f1b"})
    wrong = checks.check(config, writes=False, reads=False)
    messages = [failure.message for failure in (*parsed.failures, *wrong) if _matters(failure)]
    refuse(messages)
    return Planned(config, path.stem)


def _matters(failure: errors.Failure) -> bool:
    """Says whether a failure is of something that a plan keeps."""
    chosen = ("mesh", "pipeline", "costs", "asynchronous", "run_dir", "data")
    return not any(field.split(".")[0] in chosen for field in failure.fields)
