"""Checkpoints in canonical order: they restore onto any mesh, schedule and ZeRO level.

One of a pipeline in mid-flight holds its arrays as they are, and fits the same layout alone.

Saving is asynchronous and atomic: a checkpoint appears under its name when it is whole. The latest
few and the one with the lowest held-out loss are kept.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from train.config import Config
from train.errors import Failure
from train.step import State

PyTree = Any

_STATE, _DATA, _RUN = "state", "data", "run"
_EVAL_LOSS = "eval_loss"


class Checkpoints:
    """The checkpoints of one run. Use as a context manager: leaving waits for pending writes.

    Args:
      folder: absolute or relative path; made when first needed.
      keep: latest checkpoints to keep, at least 1.
      read_only: only look.
    """

    def __init__(self, folder: Path, *, keep: int = 1, read_only: bool = False) -> None:
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(keep),
                # Reversed, the best comes last: the lowest loss.
                checkpoint_managers.BestN(get_metric_fn=_held_out, reverse=True, n=1),
            ]
        )
        self._manager = ocp.CheckpointManager(
            folder.resolve(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy,
                # Without it the losses are not saved, and forgotten by a run that resumes.
                best_fn=_held_out,
                best_mode="min",
                create=not read_only,
                read_only=read_only,
                cleanup_tmp_directories=not read_only,
            ),
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """The newest step that is saved, or None."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """Every step that is saved, rising."""
        return sorted(self._manager.all_steps())

    def save(
        self,
        step: int,
        state: State | dict[str, Any],
        *,
        data: dict[str, Any],
        run: dict[str, Any],
        eval_loss: float | None = None,
    ) -> None:
        """Starts to save; returns when the state may be changed.

        Args:
          step: optimizer steps done.
          state: in canonical order; or the arrays of a pipeline in mid-flight, by name.
          data: position in the data, for JSON.
          run: from `describe`.
          eval_loss: held-out loss at this step, if it was evaluated.
        """
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{
                    _STATE: ocp.args.StandardSave(_as_dict(state)),
                    _DATA: ocp.args.JsonSave(data),
                    _RUN: ocp.args.JsonSave(run),
                }
            ),
            metrics={_EVAL_LOSS: math.inf if eval_loss is None else eval_loss},
            force=True,
        )

    def check(self) -> None:
        """Raises what went wrong with a write since the last call."""
        self._manager.check_for_errors()

    def wait(self) -> None:
        """Waits until what was saved is on disk."""
        self._manager.wait_until_finished()

    def read_run(self, step: int) -> dict[str, Any]:
        """What `describe` said when the checkpoint was saved."""
        restored = self._manager.restore(
            step, args=ocp.args.Composite(**{_RUN: ocp.args.JsonRestore()})
        )
        return restored[_RUN]

    def restore(self, step: int, shapes: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """Reads a checkpoint.

        Args:
          step: one of `steps`.
          shapes: of what was saved, with shardings.

        Returns:
          What was saved and the position in the data.
        """
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                **{
                    _STATE: ocp.args.StandardRestore(_as_dict(shapes)),
                    _DATA: ocp.args.JsonRestore(),
                }
            ),
        )
        state = restored[_STATE]
        return (State(**state) if isinstance(shapes, State) else state), restored[_DATA]


def other_layout(layout: dict[str, Any], now: dict[str, Any], *, step: int) -> list[Failure]:
    """Why a pipeline in mid-flight cannot be continued; empty if it can.

    Args:
      layout: of the pipeline that was saved: values by path.
      now: of the one that wants to continue.
      step: of the checkpoint.
    """
    return [
        Failure(
            f"{path}={now.get(path)} is not that of the asynchronous checkpoint of step {step}, "
            f"saved in mid-flight with {path}={value}. Nearest valid: {value}. To change it, "
            f"resume with the old values and train.steps of at least {step + 1} first: the end of "
            "a run drains the pipeline, and what it saves fits any layout.",
            (path,),
        )
        for path, value in layout.items()
        if now.get(path) != value
    ]


def describe(config: Config, *, data_sha256: str) -> dict[str, Any]:
    """What a checkpoint says about its run: the whole configuration, and a digest of its data.

    Args:
      config: of the run.
      data_sha256: digest of the tokenizer, or of the data where there is none.
    """
    return {"config": config.model_dump(), "data_sha256": data_sha256}


def other_model(saved: dict[str, Any], config: Config, *, data_sha256: str) -> list[Failure]:
    """Why a checkpoint cannot be continued with this configuration; empty if it can.

    Args:
      saved: from `Checkpoints.read_run`.
      config: of the run that wants to continue it.
      data_sha256: of the data it would train on.
    """
    section, task = config.section, saved["config"]["task"]
    if task != config.task:
        return [
            Failure(
                f"task={config.task} is not that of the checkpoint in run_dir={config.run_dir}. "
                f"Nearest valid: {task}, or another --run-dir.",
                ("task",),
            )
        ]
    before, now = saved["config"][section], getattr(config, section).model_dump()
    failures = [
        Failure(
            f"{section}.{name}={now[name]} is not the model of the checkpoint in run_dir="
            f"{config.run_dir}: it has {section}.{name}={before.get(name)}. Nearest valid: "
            f"{before.get(name)}, or another --run-dir.",
            (f"{section}.{name}",),
        )
        for name in now
        # Neither has weights: they may change from one part of a run to the next.
        if name not in ("dropout", "label_smoothing") and before.get(name) != now[name]
    ]
    if saved["data_sha256"] != data_sha256:
        what = "other images" if config.task == "resnet" else "another tokenizer"
        failures.append(
            Failure(
                f"data.path={config.data.path} has {what} than the checkpoint in "
                f"run_dir={config.run_dir} was trained with. Nearest valid: data.path="
                f"{saved['config']['data']['path']}, or another --run-dir.",
                ("data.path",),
            )
        )
    return failures


def changes(saved: dict[str, Any], config: Config) -> list[str]:
    """Fields that decide the losses and differ from the checkpoint's, such as "train.seed 0 -> 1".

    Args:
      saved: from `Checkpoints.read_run`.
      config: of the run that continues it.
    """
    free = ("run_dir", "sample", "distributed", "wandb")
    before, now = Config(**saved["config"]).flat(), config.flat()
    return [
        f"{path} {before[path]} -> {now[path]}"
        for path in now
        if path.split(".")[0] not in free and before[path] != now[path]
    ]


def _held_out(metrics: dict[str, float]) -> float:
    return metrics[_EVAL_LOSS]


def _as_dict(state: State | dict[str, Any]) -> dict[str, Any]:
    if isinstance(state, dict):
        return state
    kept = {"params": state.params, "optimizer": state.optimizer}
    return kept if state.layers is None else kept | {"layers": state.layers}
