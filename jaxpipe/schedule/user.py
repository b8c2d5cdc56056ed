"""A user's own schedule: a CSV file, or a Python function."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.csv_format import read_csv
from jaxpipe.schedule.validate import validate


def is_users(name: str) -> bool:
    """Whether a schedule's name is a file "PATH.csv" or a function "module:function".

    Example:
      >>> is_users("mine.csv"), is_users("package.module:mine"), is_users("1f1b")
      (True, True, False)
    """
    return name.endswith(".csv") or ":" in name


def load(
    name: str,
    *,
    stages: int | None,
    microbatches: int | None,
    clock: Mapping[str, Any] | None = None,
    **options: Any,
) -> Schedule:
    """Loads and validates a user's schedule.

    Args:
      name: "PATH.csv", see `jaxpipe.schedule.csv_format`; or "module:function", imported from the
        current folder or wherever Python finds it, and called as
        ``function(stages, microbatches, **options)``, options as in
        `jaxpipe.schedule.catalog`.
      stages: p; None for a file, which has its own.
      microbatches: m; None for a file, which has its own.
      clock: what the schedule will be timed with (costs, layers_per_chunk): handed to a function
        that has parameters of these names.
      options: num_chunks, group, memory_limit, for the function; a file takes none.

    Returns:
      A schedule that `validate` accepts.

    Raises:
      ValueError: the name leads nowhere, or numbers are given to a file or not given to a function.
      ScheduleError: the schedule cannot run.
      OSError: the file cannot be read.
    """
    if name.endswith(".csv"):
        given = {"stages": stages, "microbatches": microbatches, **options}
        extra = ", ".join(option for option, value in given.items() if value is not None)
        if extra:
            raise ValueError(f"{name} says itself what it needs: leave out {extra}.")
        return read_csv(name)
    if stages is None or microbatches is None:
        raise ValueError(f"{name} needs a number of stages and of microbatches.")
    function = _function(name)
    reads = inspect.signature(function).parameters
    unread = ", ".join(sorted(options.keys() - reads.keys()))
    if unread:
        raise ValueError(f"{name} has no parameter for {unread}.\nNearest valid: leave it out.")
    times = {name: value for name, value in (clock or {}).items() if name in reads}
    schedule = function(stages, microbatches, **options, **times)
    if not isinstance(schedule, Schedule):
        raise ValueError(f"{name} returned {type(schedule).__name__}, and must return a Schedule.")
    validate(schedule)
    return schedule


def _function(name: str) -> Callable:
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        # An installed command does not look into the current folder by itself.
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name!r} is no function Python can import: {error}.\n"
            "Nearest valid: 'module:function', for example 'my_schedules:mine'."
        ) from None
    if not callable(function):
        raise ValueError(f"{name!r} is not a function but {type(function).__name__}.")
    return function
