"""The run folder: the names of its files, and whether a run may use it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from train import run_lock, tasks
from train.config import Config
from train.errors import ConfigError, Failure

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
CHOICE_FILE = "schedule.json"
PROGRESS_FILE = "progress.json"
SCHEDULE_FILE, STEADY_STATE_FILE = "schedule.svg", "schedule.txt"
TENSORBOARD = "tensorboard"
PROFILE = "profile"
TIMELINE_PAGE, TIMELINE_TRACE = "timeline.html", "timeline.json"
_PICTURES = SCHEDULE_FILE, STEADY_STATE_FILE
FILES = (
    *(CONFIG_FILE, METRICS_FILE, CHECKPOINTS, CHOICE_FILE, PROGRESS_FILE),
    *(*_PICTURES, TENSORBOARD),
)
"""Files that every run leaves; a task's report may add one."""


def failures(config: Config, *, resume: bool) -> Iterator[Failure]:
    """Says why the run folder cannot be used: it holds a run, or cannot be written."""
    problems = [*misplaced(config)] or ([] if resume else [*_existing_run(config)])
    yield from problems
    yield from _writable(config)


def _names(config: Config) -> list[str]:
    """Lists the files that a run of any task may leave."""
    reports = {tasks.find(task).report_file for task in (*tasks.names(), config.task)}
    return [*FILES, *sorted(filter(None, reports))]


def _existing_run(config: Config) -> Iterator[Failure]:
    folder = Path(config.run_dir)
    with contextlib.suppress(OSError):
        existing = [name for name in _names(config) if (folder / name).exists()]
        if existing:
            who = run_lock.holder(folder)
            used = "" if who is None else f" and is in use by {who}: wait until that run has ended"
            yield Failure(
                f"run_dir={folder} already holds a run ({', '.join(existing)}){used}. Continue it "
                "with --resume, or name another --run-dir.",
                ("run_dir",),
            )


def misplaced(config: Config) -> Iterator[Failure]:
    """Says which files and folders of a run have something else in their place."""
    for path in (Path(config.run_dir) / name for name in (run_lock.LOCK_FILE, *_names(config))):
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
    folder = Path(config.run_dir)
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


class Held:
    """The files that a run writes, which nothing else may remove or replace meanwhile.

    Args:
      config: configuration that names the run folder; its files are there.
    """

    def __init__(self, config: Config) -> None:
        paths = (Path(config.run_dir) / name for name in (METRICS_FILE, CHECKPOINTS))
        self._config, self._held = config, {path: path.stat() for path in paths}

    def check(self) -> None:
        """Raises ConfigError if a file is gone, or another one is in its place."""
        for path, opened in self._held.items():
            try:
                is_there = os.path.samestat(path.stat(), opened)
            except FileNotFoundError:
                is_there = False
            if not is_there:
                raise ConfigError([removed(self._config, path)])


def removed(config: Config, what: Path) -> Failure:
    """Returns the failure of a run whose files were taken away while it ran."""
    return Failure(
        f"run_dir={config.run_dir}: {what} was removed or replaced while the run was using it, and "
        "what the run has written since is lost. Put the folder back and continue with --resume, "
        "or name another --run-dir.",
        ("run_dir",),
    )


def unwritable(config: Config, error: OSError) -> Failure:
    """Returns the failure of a run folder that the operating system does not let us write to."""
    return Failure(
        f"run_dir={config.run_dir} cannot be written: {error.strerror or error}. Free some "
        "space or name another --run-dir.",
        ("run_dir",),
    )
