"""The disk cache of searched schedules: the only code of `jaxpipe.schedule` that keeps files.

A search takes seconds and always finds the same schedule, so `jaxpipe.schedule.catalog` looks here
first. The files lie in ``$XDG_CACHE_HOME/jaxpipe``, or in ``~/.cache/jaxpipe`` if that variable is
unset, one per schedule in the form of `jaxpipe.schedule.formats.files`. They can be deleted
at any time. If ``JAXPIPE_NO_CACHE`` is set to anything, files are neither read nor written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpipe.files import read_json
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.formats.files import from_json, to_json

_CACHE_VERSION = 14
"""Version of the searches, to be raised when one finds other schedules."""


def cached(search: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """Gives a search, a pure function, a memory on disk; what it raises is not kept."""

    @functools.wraps(search)
    def found(*numbers: int, **options: Any) -> Schedule:
        if os.environ.get("JAXPIPE_NO_CACHE"):
            return search(*numbers, **options)
        inputs = [_CACHE_VERSION, search.__name__, numbers, options]
        key = json.dumps(inputs, default=dataclasses.asdict, sort_keys=True)
        digest = hashlib.sha256(key.encode()).hexdigest()
        path = cache_folder() / f"{search.__name__}-{digest[:32]}.json"
        schedule = _load(path, key, numbers)
        if schedule is None:
            schedule = search(*numbers, **options)
            _store(path, key, schedule)
        return schedule

    return found


def cache_folder() -> Path:
    """Folder of the files: ``$XDG_CACHE_HOME/jaxpipe``, or ``~/.cache/jaxpipe``.

    Example:
      >>> cache_folder().name
      'jaxpipe'
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpipe"


def _load(path: Path, key: str, numbers: tuple[int, ...]) -> Schedule | None:
    """Reads a stored schedule; None if there is none of these inputs, or none that can run."""
    try:
        data = read_json(path)
        schedule = from_json(data) if data["key"] == key else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    shape = schedule and (schedule.num_stages, schedule.num_microbatches)
    return schedule if shape == numbers else None


def _store(path: Path, key: str, schedule: Schedule) -> None:
    """Writes a schedule in one step, so that nobody reads half a file."""
    # A cache that cannot be written costs time but never changes the result.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"key": key, **to_json(schedule)}, file)
        os.replace(file.name, path)
