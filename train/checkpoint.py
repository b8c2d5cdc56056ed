"""Checkpoints in canonical order: they restore onto any mesh, schedule and ZeRO level.

A checkpoint of a pipeline in mid-flight is the exception: it holds the pipeline's arrays as they
are, and fits only the layout that it was saved in.

Saving is asynchronous and atomic: a checkpoint appears under its name when it is whole, with a
checksum of every file. The latest few and the one with the lowest held-out loss are kept. A run
resumes from the newest one that is still whole. Damaged ones are moved aside, never deleted.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from train import checksums, distributed, recovery, tasks
from train.checksums import DamagedError
from train.config import Config, upgraded
from train.errors import Failure
from train.recovery import CHECKSUMS, DATA, RUN, STATE
from train.step import TrainState

PyTree = Any

IN_FLIGHT = "in_flight"
"""The entry of the description with the layout of a pipeline in mid-flight; None if drained."""

_EVAL_LOSS = "eval_loss"
_METRICS_FILE = "metrics/metrics"


class Checkpoints:
    """The checkpoints of one run. Use it as a context manager: leaving waits for pending writes.

    Entering it or saving moves damaged checkpoints aside and removes half-written ones of a killed
    run. Until then nothing is changed.

    Args:
      folder: absolute or relative path; made when first needed.
      keep: how many of the latest checkpoints to keep, at least 1.
      read_only: never write.
    """

    def __init__(self, folder: Path, *, keep: int = 1, read_only: bool = False) -> None:
        self._folder, self._keep, self._read_only = folder.resolve(), keep, read_only
        self._manager: ocp.CheckpointManager | None = None
        self._writing = 0

    def __enter__(self) -> Checkpoints:
        if not self._read_only:
            self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if self._manager is not None:
            self._manager.close()

    @functools.cached_property
    def found(self) -> recovery.Found:
        """What the folder held at first. Every process must ask; process 0 reads the newest files.

        Process 0 alone decides what is damaged, so that all processes resume from the same step.
        """
        found = distributed.from_first(lambda: dataclasses.asdict(recovery.find(self._folder)))
        return recovery.Found.from_dict(found)

    @property
    def latest(self) -> int | None:
        """The newest step whose checkpoint is whole, or None."""
        return self.found.latest if self._manager is None else self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """Every step that has a checkpoint, whole or not, in ascending order."""
        return recovery.steps(self._folder)

    def save(
        self,
        step: int,
        state: TrainState | dict[str, Any],
        *,
        data: dict[str, Any],
        run: dict[str, Any],
        eval_loss: float | None = None,
    ) -> None:
        """Starts to save; returns as soon as the state may change again.

        Args:
          step: optimizer steps done.
          state: in canonical order; or the arrays of a pipeline in mid-flight, by name.
          data: position in the data, for JSON.
          run: from `describe`.
          eval_loss: held-out loss at this step, if it was evaluated.
        """
        manager = self._manager or self._open()
        # The checksums of the step before must be written first.
        manager.wait_until_finished()
        self._writing = step
        manager.save(
            step,
            args=ocp.args.Composite(
                **{
                    STATE: ocp.args.StandardSave(_as_dict(state)),
                    DATA: ocp.args.JsonSave(data),
                    RUN: ocp.args.JsonSave(run | {CHECKSUMS: checksums.FILE}),
                }
            ),
            metrics={_EVAL_LOSS: math.inf if eval_loss is None else eval_loss},
            force=True,
        )

    def check(self) -> None:
        """Raises the error of a write that has failed since the last call."""
        if self._manager is not None:
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Waits until what was saved is on disk."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def read_run(self, step: int) -> dict[str, Any]:
        """What `describe` said when the checkpoint was saved."""
        return _restore(self._folder / str(step), **{RUN: ocp.args.JsonRestore()})[RUN]

    def restore(self, step: int, shapes: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """Reads a checkpoint.

        Args:
          step: one of `steps`.
          shapes: of what was saved, with shardings.

        Returns:
          What was saved, and the position in the data. Arrays by name may be fewer than asked for:
          older versions saved fewer of a pipeline in mid-flight.
        """
        folder = self._folder / str(step)
        if isinstance(shapes, dict):
            held = ocp.StandardCheckpointer().metadata(folder / STATE).item_metadata.keys()
            shapes = {name: leaf for name, leaf in shapes.items() if name in held}
        items = {
            STATE: ocp.args.StandardRestore(_as_dict(shapes)),
            DATA: ocp.args.JsonRestore(),
        }
        restored = _restore(folder, **items)
        state = restored[STATE]
        return (TrainState(**state) if isinstance(shapes, TrainState) else state), restored[DATA]

    def _open(self) -> ocp.CheckpointManager:
        """Makes the folder ready to be written to."""
        assert not self._read_only
        damaged = self.found.damaged
        distributed.from_first(lambda: recovery.move_aside(self._folder, damaged))
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_LatestAndBest(self._folder, self._keep),
                # Without it the losses are not saved, and a run that resumes would not know them.
                best_fn=_held_out,
                best_mode="min",
                cleanup_tmp_directories=True,
                # Otherwise orbax reads the files of every step, and stops at a damaged one.
                lightweight_initialize=True,
                # Called when all processes have written, before the folder has its final name.
                async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
            ),
        )
        return self._manager

    def _write_checksums(self) -> None:
        (written,) = self._folder.glob(f"{self._writing}{ocp.utils.TMP_DIR_SUFFIX}*")
        checksums.write(written)


class _LatestAndBest(checkpoint_managers.PreservationPolicy):
    """Keeps the latest few, and the one with the lowest held-out loss."""

    def __init__(self, folder: Path, num_latest: int) -> None:
        self._folder, self._num_latest = folder, num_latest

    def should_preserve(
        self,
        checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: checkpoint_managers.PreservationContext,
    ) -> Sequence[bool]:
        del context
        losses = [self._loss(checkpoint) for checkpoint in checkpoints]
        newest_first = range(len(losses) - 1, -1, -1)
        best = min(newest_first, key=losses.__getitem__, default=None)
        first = len(losses) - self._num_latest
        return [number >= first or number == best for number in range(len(losses))]

    def _loss(self, checkpoint: checkpoint_managers.PolicyCheckpointInfo) -> float:
        """The held-out loss; infinite if it was not evaluated or cannot be read."""
        folder, metrics = self._folder / str(checkpoint.step), checkpoint.metrics
        try:
            if metrics is None:  # an earlier run saved it
                metrics = json.loads((folder / _METRICS_FILE).read_bytes())
                if (folder / checksums.FILE).exists():
                    checksums.verify(folder, [_METRICS_FILE])
            return loss if math.isfinite(loss := _held_out(metrics)) else math.inf
        except (OSError, ValueError, KeyError, TypeError, DamagedError):
            return math.inf


def _restore(folder: Path, **items: ocp.args.CheckpointArgs) -> Mapping[str, Any]:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        return reader.restore(folder, args=ocp.args.Composite(**items))


def other_layout(layout: dict[str, Any], now: dict[str, Any], *, step: int) -> list[Failure]:
    """Says why a pipeline in mid-flight cannot be continued; empty if it can.

    Args:
      layout: that of the saved pipeline, values by path.
      now: that of the run that wants to continue.
      step: of the checkpoint.
    """
    return [
        Failure(
            f"{path}={now.get(path)} does not fit the asynchronous checkpoint of step {step}, "
            f"which was saved in mid-flight with {path}={value}. Nearest valid: {value}. To change "
            f"it, resume with the old values and train.steps of at least {step + 1} first: the end "
            "of a run drains the pipeline, and its last checkpoint fits any layout.",
            (path,),
        )
        for path, value in layout.items()
        if now.get(path) != value
    ]


def describe(config: Config, *, data_sha256: str) -> dict[str, Any]:
    """Describes a run for its checkpoints: the whole configuration and a digest of its data.

    Args:
      config: of the run.
      data_sha256: digest of the tokenizer, or of the data if it has no tokenizer.
    """
    return {"config": config.model_dump(), "data_sha256": data_sha256}


def in_todays_form(saved: dict[str, Any]) -> dict[str, Any]:
    """Renames what an older version saved; see `train.config.upgraded`.

    Args:
      saved: from `Checkpoints.read_run`.
    """
    own = f"{saved['config']['task']}."
    layout = {
        f"model.{path.removeprefix(own)}" if path.startswith(own) else path: value
        for path, value in (saved.get(IN_FLIGHT) or {}).items()
    }
    return saved | {"config": upgraded(saved["config"]), IN_FLIGHT: layout or None}


def other_model(saved: dict[str, Any], config: Config, *, data_sha256: str) -> list[Failure]:
    """Says why a checkpoint cannot be continued with this configuration; empty if it can.

    Args:
      saved: from `in_todays_form`.
      config: of the run that wants to continue it.
      data_sha256: digest of the data that it would train on.
    """
    before = Config(**saved["config"])
    if before.task != config.task:
        return [
            Failure(
                f"task={config.task} is not that of the checkpoint in run_dir={config.run_dir}. "
                f"Nearest valid: {before.task}, or another --run-dir.",
                ("task",),
            )
        ]
    task, then = tasks.find(config.task), before.model.model_dump()
    failures = [
        Failure(
            f"model.{name}={value} is not the model of the checkpoint in run_dir="
            f"{config.run_dir}: it has model.{name}={then[name]}. Nearest valid: "
            f"{then[name]}, or another --run-dir.",
            (f"model.{name}",),
        )
        for name, value in config.model.model_dump().items()
        if name not in task.free and then[name] != value
    ]
    if saved["data_sha256"] != data_sha256:
        what = "other images" if task.data_kind == "images" else "another tokenizer"
        failures.append(
            Failure(
                f"data.path={config.data.path} has {what} than the checkpoint in "
                f"run_dir={config.run_dir} was trained with. Nearest valid: data.path="
                f"{before.data.path}, or another --run-dir.",
                ("data.path",),
            )
        )
    return failures


def changes(saved: dict[str, Any], config: Config) -> list[str]:
    """Lists fields that affect the losses and differ from the checkpoint's: "train.seed 0 -> 1".

    Args:
      saved: from `in_todays_form`.
      config: of the run that continues it.
    """
    free = ("run_dir", "data.prepare", "sample", "distributed", "wandb")
    before, now = Config(**saved["config"]).flat(), config.flat()
    return [
        f"{path} {before[path]} -> {now[path]}"
        for path in now
        if not path.startswith(free) and before[path] != now[path]
    ]


def _held_out(metrics: Mapping[str, float]) -> float:
    return metrics[_EVAL_LOSS]


def _as_dict(state: TrainState | dict[str, Any]) -> dict[str, Any]:
    if isinstance(state, dict):
        return state
    kept = {"params": state.params, "optimizer": state.optimizer}
    return kept if state.layers is None else kept | {"layers": state.layers}
