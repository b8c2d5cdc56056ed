"""The progress of a run, recorded beside its checkpoints so that none is lost unnoticed.

``progress.json`` in the run folder holds the step of the last checkpoint that was written whole,
and the step that ended the run if its numbers were not finite.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pydantic

from jaxpipe.files import read_bytes
from train import checkpoint, run_folder
from train.config import Config
from train.errors import Failure, NonFiniteLossError

_HARMLESS = (
    "train.log_every",
    "train.keep",
    "train.checkpoint_",
    "train.profile_",
    "train.timeline_at",
)
"""Settings that the numbers of a step do not depend on."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """The record of a run.

    Args:
      saved: step of a checkpoint that was whole; 0 before there was any.
      failed_step: the step whose numbers were not finite; None if all were.
      failed_config: the configuration with which it failed.
      failed_because: the numbers of that step, in words.
    """

    saved: int = 0
    failed_step: int | None = None
    failed_config: dict[str, Any] | None = None
    failed_because: str = ""


_FORM = pydantic.TypeAdapter(Progress)


def read(folder: Path) -> Progress:
    """Reads the record of a run folder; an empty one if there is none, or none is readable."""
    try:
        return _FORM.validate_json(read_bytes(folder / run_folder.PROGRESS_FILE), strict=True)
    except (OSError, ValueError):
        return Progress()


def note_saved(folder: Path, step: int) -> None:
    """Records that the checkpoint of a step is whole."""
    _write(folder, dataclasses.replace(read(folder), saved=step))


def note_failure(folder: Path, error: NonFiniteLossError, config: dict[str, Any]) -> None:
    """Records the step that ended a run, and the configuration that it failed with."""
    progress = dataclasses.replace(read(folder), failed_step=error.step, failed_because=error.seen)
    _write(folder, dataclasses.replace(progress, failed_config=config))


def _write(folder: Path, progress: Progress) -> None:
    path = folder / run_folder.PROGRESS_FILE
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(dataclasses.asdict(progress)) + "\n", encoding="utf-8")
    os.replace(partial, path)


def lost(folder: Path) -> list[Failure]:
    """Says that a run without checkpoints has had some; empty if it never had."""
    done, checkpoints = read(folder).saved, folder / run_folder.CHECKPOINTS
    metrics = folder / run_folder.METRICS_FILE
    # The folder of checkpoints is made before the first step is recorded.
    if not done and not checkpoints.exists() and metrics.is_file():
        done = metrics.read_bytes().count(b"\n")
    if not done:
        return []
    return [
        Failure(
            f"run_dir={folder} has done at least {done} steps, but {checkpoints} holds no "
            "checkpoint to resume from. Put its checkpoints back, or name another --run-dir to "
            "start from step 0.",
            ("run_dir",),
        )
    ]


def would_fail_again(folder: Path, config: Config, *, step: int) -> list[Failure]:
    """Says that a run ended with numbers that are not finite, and that nothing has changed since.

    Args:
      folder: folder of the run.
      config: configuration that it would continue with.
      step: step that it would continue from.
    """
    last = read(folder)
    if last.failed_step is None or last.failed_config is None or step >= last.failed_step:
        return []
    try:
        changed = checkpoint.changes({"config": last.failed_config}, config)
    except (TypeError, ValueError):  # it is not of this version
        return []
    if any(not change.startswith(_HARMLESS) for change in changed):
        return []
    return [
        Failure(
            f"run_dir={folder} was stopped at step {last.failed_step} ({last.failed_because}), "
            f"and would be again: from step {step} it repeats the same numbers. Change "
            "optimizer.peak_lr, optimizer.warmup_steps, optimizer.clip_norm, optimizer.max_skipped "
            "or train.seed; or "
            f"remove {folder / run_folder.PROGRESS_FILE} to try the same settings again.",
            ("run_dir",),
        )
    ]
