"""The run folder: the names of its files, whether a run may use it, and how far the run has come.

``progress.json`` holds the step of the last checkpoint that was written whole, and the step that
ended the run if its numbers were not finite, so that no lost checkpoint goes unnoticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pydantic

from jaxpipe.files import read_bytes, write_whole
from train import tasks
from train.config import Config
from train.errors import ConfigError, Failure, NonFiniteLossError
from train.object_store import ObjectStore, StoreError, is_url
from train.runs import checkpoint, run_lock
from train.runs.object_lock import ObjectLock
from train.runs.run_lock import Lock, RunLock

CONFIG_FILE = "config.yaml"
METRICS_FILE, SAMPLES = "metrics.jsonl", "samples"
CHECKPOINTS = "checkpoints"
CHOICE_FILE = "schedule.json"
PROGRESS_FILE = "progress.json"
GAUGES_FILE = "metrics.prom"
SCHEDULE_FILE, STEADY_STATE_FILE = "schedule.svg", "schedule.txt"
TENSORBOARD = "tensorboard"
PROFILE = "profile"
TIMELINE_PAGE = "timeline.html"
FILES = (
    *(CONFIG_FILE, METRICS_FILE, CHECKPOINTS, CHOICE_FILE, PROGRESS_FILE),
    *(SCHEDULE_FILE, STEADY_STATE_FILE, TENSORBOARD, GAUGES_FILE),
)
"""Files that every run leaves; a task's report may add one."""
_HARMLESS = (
    "train.log_every",
    "train.keep",
    "train.checkpoint_",
    "train.profile_",
    "train.timeline_at",
)
"""Settings that the numbers of a step do not depend on."""


def failures(config: Config, *, resume: bool) -> Iterator[Failure]:
    """Says why the run folder cannot be used: it holds a run, or cannot be written."""
    problems = [*misplaced(config), *_unreachable(config)]
    yield from problems or ([] if resume else [*_existing_run(config)])
    yield from _writable(config)


def _names(config: Config) -> list[str]:
    """Lists the files that a run of any task may leave."""
    reports = {tasks.find(task).report_file for task in (*tasks.names(), config.task)}
    return [*FILES, *sorted(filter(None, reports))]


def _existing_run(config: Config) -> Iterator[Failure]:
    with contextlib.suppress(OSError):
        existing = _present(config)
        if existing:
            who = run_lock.holder(config.folder)
            used = "" if who is None else f" and is in use by {who}: wait until that run has ended"
            yield config.failure(
                f"$run_dir already holds a run ({', '.join(existing)}){used}. Continue it with "
                "--resume, or name another --run-dir."
            )


def _present(config: Config) -> list[str]:
    """Lists the files of a run that there are."""
    if is_url(config.run_dir):
        objects = {name.partition("/")[0] for name in ObjectStore(config.run_dir).names()}
        return [name for name in _names(config) if name in objects]
    return [name for name in _names(config) if (config.folder / name).exists()]


def has_begun(config: Config) -> bool:
    """Says whether the run has checkpoints."""
    if is_url(config.run_dir):
        with contextlib.suppress(StoreError):  # `failures` says so
            return CHECKPOINTS in _present(config)
        return False
    folder = config.folder / CHECKPOINTS
    return folder.is_dir() and any(path.name.isdecimal() for path in folder.iterdir())


def _unreachable(config: Config) -> Iterator[Failure]:
    """Tries to read from the store of a URL."""
    if "://" in config.run_dir and not is_url(config.run_dir):
        scheme = config.run_dir.partition("://")[0]
        yield config.failure(
            f"$run_dir is in no store that is known: {scheme}://. Nearest valid: "
            "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, or a folder."
        )
    elif is_url(config.run_dir):
        try:
            ObjectStore(config.run_dir).names()
        except StoreError as error:
            yield Failure(
                f"run_dir={error}. Name a bucket that exists, and keys that may read and write it.",
                ("run_dir",),
            )


def misplaced(config: Config) -> Iterator[Failure]:
    """Says which files and folders of a run have something else in their place."""
    for path in (config.folder / name for name in (run_lock.LOCK_FILE, *_names(config))):
        wanted = "a folder" if path.name in (CHECKPOINTS, TENSORBOARD) else "a file"
        with contextlib.suppress(OSError):
            actual = "a folder" if path.is_dir() else "something else, such as a broken link"
            actual = "a file" if path.is_file() else actual
            if os.path.lexists(path) and actual != wanted:
                yield Failure(
                    f"{path} must be {wanted}, and is {actual}. Move it away, or name another "
                    "--run-dir.",
                    ("run_dir",),
                )


def _writable(config: Config) -> Iterator[Failure]:
    """Tries to write: permissions alone say little about network file systems and full disks."""
    folder = config.folder
    try:
        missing = run_lock.missing_folders(folder)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # It has no name, so that a killed process leaves nothing.
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(1 << 16))
                probe.flush()
                os.fsync(probe.fileno())
        finally:
            run_lock.remove_folders(missing)
    except OSError as error:
        yield unwritable(config, error)


def lock(config: Config, *, say: Callable[[str], None]) -> Lock:
    """Makes the lock of a run.

    Raises:
      ConfigError: the URL names no store.
    """
    if not is_url(config.run_dir):
        return RunLock(config.folder, say=say)
    try:
        return ObjectLock(ObjectStore(config.run_dir), say=say)
    except StoreError as error:
        raise ConfigError([unwritable(config, error)]) from error


class WrittenFiles:
    """The files that a run writes, which nothing else may remove or replace meanwhile.

    Args:
      config: configuration that names the run folder; its files are there.
    """

    def __init__(self, config: Config) -> None:
        paths = (config.folder / name for name in (METRICS_FILE, CHECKPOINTS))
        self._config, self._opened = config, {path: path.stat() for path in paths}

    def check(self) -> None:
        """Raises ConfigError if a file is gone, or another one is in its place."""
        for path, opened in self._opened.items():
            try:
                is_there = os.path.samestat(path.stat(), opened)
            except FileNotFoundError:
                is_there = False
            if not is_there:
                raise ConfigError([removed(self._config, path)])


def removed(config: Config, what: Path) -> Failure:
    """Returns the failure of a run whose files were taken away while it ran."""
    return config.failure(
        f"$run_dir: {what} was removed or replaced while the run was using it, and what the run "
        "has written since is lost. Put the folder back and continue with --resume, or name "
        "another --run-dir."
    )


def unwritable(config: Config, error: OSError) -> Failure:
    """Returns the failure of a run folder that the operating system does not let us write to."""
    return config.failure(
        f"$run_dir cannot be written: {error.strerror or error}. Free some space or name another "
        "--run-dir."
    )


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


def read_progress(folder: Path) -> Progress:
    """Reads the record of a run folder; an empty one if there is none, or none is readable."""
    try:
        return _FORM.validate_json(read_bytes(folder / PROGRESS_FILE), strict=True)
    except (OSError, ValueError):
        return Progress()


def note_saved(folder: Path, step: int) -> None:
    """Records that the checkpoint of a step is whole."""
    _write_progress(folder, dataclasses.replace(read_progress(folder), saved=step))


def note_failure(folder: Path, error: NonFiniteLossError, config: dict[str, Any]) -> None:
    """Records the step that ended a run, and the configuration that it failed with."""
    progress = dataclasses.replace(
        read_progress(folder), failed_step=error.step, failed_because=error.seen
    )
    _write_progress(folder, dataclasses.replace(progress, failed_config=config))


def _write_progress(folder: Path, progress: Progress) -> None:
    content = f"{json.dumps(dataclasses.asdict(progress))}\n"
    write_whole(folder / PROGRESS_FILE, content.encode())


def lost_checkpoints(config: Config) -> Iterator[Failure]:
    """Says that a run without checkpoints has had some; nothing if it never had."""
    folder = config.folder
    done, checkpoints = read_progress(folder).saved, folder / CHECKPOINTS
    metrics = folder / METRICS_FILE
    # The folder of checkpoints is made before the first step is recorded.
    if not done and not checkpoints.exists() and metrics.is_file():
        done = metrics.read_bytes().count(b"\n")
    if done:
        yield config.failure(
            f"$run_dir has done at least {done} steps, but {checkpoints} holds no checkpoint to "
            "resume from. Put its checkpoints back, or name another --run-dir to start from step 0."
        )


def would_fail_again(config: Config, *, step: int) -> Iterator[Failure]:
    """Says that a run ended with numbers that are not finite and would do so again."""
    last = read_progress(config.folder)
    if last.failed_step is None or last.failed_config is None or step >= last.failed_step:
        return
    try:
        changed = checkpoint.changes({"config": last.failed_config}, config)
    except (TypeError, ValueError):  # it is not of this version
        return
    if all(change.startswith(_HARMLESS) for change in changed):
        yield config.failure(
            f"$run_dir was stopped at step {last.failed_step} ({last.failed_because}), and would "
            f"be again: from step {step} it repeats the same numbers. Change optimizer.peak_lr, "
            "optimizer.warmup_steps, optimizer.clip_norm, optimizer.max_skipped or train.seed; or "
            f"remove {config.run_dir}/{PROGRESS_FILE} to try the same settings again."
        )
