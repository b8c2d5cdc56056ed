"""The trainer's part of ``jaxpipe plan``: the sizes of a configuration's model, and plans as YAML.

The library finds `read` by an entry point (``jaxpipe.configurations`` in pyproject.toml).
"""

from __future__ import annotations

import itertools
import json
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
from jaxpipe.errors import ArgumentError, refuse
from jaxpipe.planning.cost import Prediction, chunk_costs
from jaxpipe.planning.counting import sizes
from jaxpipe.planning.devices import cluster, known
from jaxpipe.planning.plans import NOTHING, Offload, Plan
from jaxpipe.planning.search import Goal, search
from jaxpipe.planning.sizes import ModelSizes, Sizes, Variant
from jaxpipe.planning.without_devices import attention_of_gpus
from jaxpipe.schedule import Costs
from jaxpipe.testing import simulate_devices
from train import checks, command_line, configured, errors, tasks
from train.config import Config
from train.optimizers import learning_rate, make_optimizer, num_moments

_REMATS = ("none", "dots", "full")
_TAKEN_FOR = "cpu"
"""Device that stands for those that are not in the table, such as simulated ones."""
_MOST_SHARING = 8
"""Most devices that share a layer: no more than a host has."""
_MICROBATCHES = 2


class Planned:
    """A configuration that is planned for, as `jaxpipe.planning.configurations.Configured` says.

    Args:
      config: a checked configuration.
      name: name of its file.
    """

    def __init__(self, config: Config, name: str) -> None:
        self.config, self.name = config, name
        self.task = tasks.make(config)

    def sizes(self, most_context: int, progress: Callable[[float], None]) -> ModelSizes:
        """Traces the model for all devices that may share a layer, and every policy."""
        simulate_devices(_MOST_SHARING)
        numbers = [2**n for n in range(_MOST_SHARING.bit_length())]
        cases = [
            Variant(context, tensor, remat, expert)
            for context, tensor, expert in itertools.product(numbers, repeat=3)
            if context <= most_context and self._may_share(context, tensor, expert)
            for remat in _REMATS
        ]
        return self._sizes(cases, progress)

    def _sizes(self, cases: Sequence[Variant], progress: Callable[[float], None]) -> ModelSizes:
        variants = {}
        for number, case in enumerate(cases, start=1):
            variants[case] = self._traced(case)
            progress(number / len(cases))
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
        )

    def write(self, plan: Plan, costs: Costs, steps: int | None) -> str:
        """Writes the configuration with a plan's mesh, pipeline, costs and batch."""
        config = self.config
        axes = ("stage", "data", "replica", "expert", "context", "tensor")
        mesh = {name: getattr(plan, name) for name in axes}
        pipeline = _chosen(plan) | {
            "stage_memory": None,
            "zero": plan.zero,
            "weights": plan.weights,
            "weight_slots": plan.weight_slots,
            "residuals": "host" if plan.on_host.residuals else "device",
            "update": "step",
            "vocabulary": "ends" if plan.ends else "split",
        }
        if self._compute_bytes == 2:
            pipeline["compute_dtype"] = "bfloat16"
        train = {"batch_size": plan.batch_rows}
        if steps is not None:
            train["steps"] = max(steps, config.optimizer.warmup_steps)
        changed = {"mesh": mesh, "pipeline": pipeline, "train": train, "costs": _of_chunk(costs)}
        changed["optimizer"] = {"offload": plan.on_host.state}
        return _changed(config, changed).to_yaml()

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
        slots = configured.weight_slots(config, platform="gpu")
        devices = cluster(device, shape.num_devices, memory=limit_bytes)
        on_host = NOTHING
        if devices.has_host_memory:
            on_host = Offload(config.optimizer.offload, config.pipeline.residuals == "host")

        def allowed(plan: Plan) -> bool:
            mesh = plan.stage, plan.data, plan.replica, plan.context, plan.tensor, plan.expert
            zero = config.pipeline.zero if shape.data > 1 else 0
            fewer = min(slots, plan.chunks) if zero >= 2 else 1
            enough = plan.microbatches > 1 or not config.train.noise_every
            return enough and (mesh, plan.zero, plan.weight_slots) == (own, zero, fewer)

        sharing = shape.context, shape.tensor
        cases = [Variant(*sharing, remat, shape.expert) for remat in _REMATS]
        model = self._sizes(cases, lambda share: None)
        goal = Goal(None, (model.batch_rows,))
        result = search(model, [devices], goal, on_host=on_host, allowed=allowed)
        best = result.best[0]
        changed = {"pipeline": _chosen(best.plan), "costs": _of_chunk(chunk_costs(best.placed))}
        words = [f"pipeline.schedule=plan on {device}s: {_in_words(best)}"]
        words += [f"then {_in_words(other)}" for other in result.best[1:3]]
        return _changed(config, changed), "; ".join(words)

    @cached_property
    def _params(self) -> Any:
        return jax.eval_shape(self.task.init, jax.random.key(0))

    @property
    def _compute_bytes(self) -> int:
        """Bytes of a weight when layers read it: they cast to the model's dtype."""
        return 4 if self.task.dtype is None else jnp.dtype(self.task.dtype).itemsize

    def _sharing(self, context: int, tensor: int, expert: int) -> Config:
        """Makes the configuration on the devices of one layer."""
        shape = {"stage": 1, "data": expert, "replica": 1, "expert": expert}
        shape |= {"context": context, "tensor": tensor}
        mesh = self.config.mesh.model_copy(update=shape)
        return self.config.model_copy(update={"mesh": mesh})

    def _may_share(self, context: int, tensor: int, expert: int) -> bool:
        fits = context * tensor * expert <= _MOST_SHARING
        return fits and not any(checks.shared_axes(self._sharing(context, tensor, expert)))

    def _traced(self, case: Variant) -> Sizes:
        config = self._sharing(*case.mesh)
        key = jax.eval_shape(lambda: jax.random.key(0)) if self.task.dropout else None
        with attention_of_gpus():
            axes = config.mesh.shared_axes()
            pipe = self._pipeline(config, case.remat, stage=1, data=case.expert, **axes)
            return sizes(pipe, self._batch, key, compute_bytes=self._compute_bytes)

    def _batch(self, rows: int) -> Any:
        shapes = self.task.row_shapes()
        return jax.tree.map(lambda row: jax.ShapeDtypeStruct((rows, *row.shape), row.dtype), shapes)

    def _pipeline(self, config: Config, remat: str, **axes: Any) -> Pipeline:
        """Makes a pipeline of one stage on as many devices as the axes have."""
        task = tasks.make(config)
        return Pipeline(
            task.model(train=True),
            self._params,
            schedule=schedules.build("1f1b", stages=1, microbatches=_MICROBATCHES),
            mesh=make_mesh(**axes),
            remat=remat,
            fp8=fp8.split(",") if (fp8 := self.config.pipeline.fp8) else (),
            states=jax.eval_shape(task.init_states),
        )

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        settings = self.config.optimizer
        rate = learning_rate(settings, num_steps=self.config.train.steps)
        return make_optimizer(settings, rate)


def _changed(config: Config, sections: dict[str, dict[str, Any]]) -> Config:
    """Changes some fields in the sections of a configuration."""
    changed = {
        name: getattr(config, name).model_copy(update=update) for name, update in sections.items()
    }
    return config.model_copy(update=changed)


def _chosen(plan: Plan) -> dict[str, Any]:
    """Takes the fields that decide the order of a pipeline, and what its layers keep."""
    return {
        "schedule": plan.schedule,
        "chunks": plan.chunks,
        "microbatches": plan.microbatches,
        "group": None,
        "memory_limit": None,
        "remat": plan.remat,
    }


def _of_chunk(costs: Costs) -> dict[str, float]:
    return {name: getattr(costs, name) for name in ("f", "b", "w", "message")}


def _in_words(candidate: Prediction) -> str:
    plan, waits = candidate.plan, candidate.seconds["waits"] / candidate.step_seconds
    return (
        f"{plan.schedule}, {plan.chunks} chunks per stage, {plan.microbatches} microbatches, remat "
        f"{plan.remat}: {1e3 * candidate.step_seconds:.3g} ms per step predicted, {waits:.0%} of "
        f"it waiting for other stages, {candidate.device_bytes / 1e9:.3g} GB"
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
    if (number := config.pipeline.sequence_slices) > 1:
        text = (
            f"pipeline.sequence_slices={number}: pipeline.schedule={configured.PLAN} chooses among "
            "schedules of whole sequences. Nearest valid: 1, or pipeline.schedule=1f1b."
        )
        raise errors.refused(text, "pipeline.sequence_slices")
    device = jax.devices()[0]
    named = known(device.device_kind)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    try:
        taken_for = _TAKEN_FOR if named is None else named.name
        chosen = Planned(config, config.run_dir).choice(limit, taken_for)
    except ArgumentError as error:
        text = f"pipeline.schedule={configured.PLAN}: {error}"
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
    config = _changed(config, {"pipeline": {"fp8": parsed.config.pipeline.fp8}})
    wrong = checks.check(config, writes=False, reads=False)
    messages = [failure.message for failure in (*parsed.failures, *wrong) if _matters(failure)]
    refuse(messages)
    return Planned(config, path.stem)


def _matters(failure: errors.Failure) -> bool:
    """Says whether a failure is of something that a plan keeps."""
    chosen = ("mesh", "pipeline", "costs", "asynchronous", "run_dir", "data")
    return not any(field.split(".")[0] in chosen for field in failure.fields)
