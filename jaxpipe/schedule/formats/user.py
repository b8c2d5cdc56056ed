"""A user's own schedule: a CSV file, or a Python function."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.check.validate import validate
from jaxpipe.schedule.formats.files import read_csv
from jaxpipe.schedule.problems import ArgumentError, Problem, refuse

_LIBRARY = str(Path(__file__).parents[2])


def is_users(name: str) -> bool:
    """Whether a schedule's name is a file "PATH.csv" or a function "module:function".

    Example:
      >>> is_users("mine.csv"), is_users("package.module:mine"), is_users("1f1b")
      (True, True, False)
    """
    return is_file(name) or ":" in name


def is_file(name: str) -> bool:
    """Whether a schedule's name is a file "PATH.csv"."""
    return name.lower().endswith(".csv")


def load(
    name: str,
    *,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    clock: Mapping[str, Any] | None = None,
    **options: Any,
) -> Schedule:
    """Loads and validates a user's schedule.

    Args:
      name: "PATH.csv", see `jaxpipe.schedule.formats.files`; or "module:function", imported
        from the current folder or wherever Python finds it, and called as
        ``function(num_stages, num_microbatches, **options)``, options as in
        `jaxpipe.schedule.catalog`.
      num_stages, num_microbatches: None for those of a file.
      clock: the costs of the later timing: passed to a function that has parameters of these names.
      options: num_chunks, group, num_slices, memory_limit, for the function; a file takes none.

    Raises:
      ValueError: the name leads nowhere; numbers do not fit a file or are not given to a function;
        or what `call_user` raises.
      ScheduleError: the schedule cannot run.
    """
    shape = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    wanted = {argument: number for argument, number in shape.items() if number is not None}
    if not is_file(name):
        if num_stages is None or num_microbatches is None:
            raise ArgumentError([no_shape(name)])
        return _load_function(name, num_stages, num_microbatches, clock or {}, options)
    if options:
        extra = ", ".join(f"${argument}" for argument in options)
        rule = f"is a schedule as it stands: leave out {extra}"
        refuse([Problem("name", name, rule, others=dict.fromkeys(options))])
    try:
        schedule = read_csv(name)
    except OSError as error:
        raise ArgumentError([Problem("name", name, f"cannot be read: {error.strerror}")]) from None
    own = {argument: getattr(schedule, argument) for argument in wanted}
    if own != wanted:
        rule = f"is not a schedule for {' and '.join(f'${argument}' for argument in wanted)}"
        refuse([Problem("name", name, rule, own, wanted)])
    return schedule


def _load_function(
    name: str, stages: int, microbatches: int, clock: Mapping[str, Any], options: Mapping[str, Any]
) -> Schedule:
    """Calls the function of a name, with the costs for which it has parameters."""
    function = _function(name)
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        unsaid = "does not say what parameters it has, so it cannot be used"
        raise ValueError(f"{name} {unsaid}.") from None
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        refuse(
            Problem(key, options[key], f"it has no parameter {key}", (None,), schedule=name)
            for key in sorted(options.keys() - parameters.keys())
        )
    costs = {cost: value for cost, value in clock.items() if cost in parameters}
    return call_user(name, function, stages, microbatches, **options, **costs)


def no_shape(name: str) -> Problem:
    """Says that a schedule was asked for without its stages or its microbatches."""
    rule = "needs $num_stages and $num_microbatches"
    return Problem("name", name, rule, others={"num_stages": None, "num_microbatches": None})


def call_user(
    name: str, function: Callable[..., Schedule], stages: int, microbatches: int, **options: Any
) -> Schedule:
    """Calls a user's function for a schedule, which gets this name, and checks what it returns.

    Raises:
      ValueError: the function does not take these arguments, raises something, or returns anything
        but a schedule of p stages, m microbatches and, if they are an option, k slices.
      ScheduleError: the schedule cannot run.
    """
    try:
        inspect.signature(function).bind(stages, microbatches, **options)
    except TypeError as error:
        names = ", ".join(["num_stages", "num_microbatches", *(f"{key}=..." for key in options)])
        raise ValueError(f"{name} cannot be called as function({names}): {error}.") from None
    try:
        schedule = function(stages, microbatches, **options)
    except Exception as error:  # a user's code may raise anything
        raise ValueError(f"{name} {_raised(error)}") from error
    if not isinstance(schedule, Schedule):
        raise ValueError(f"{name} returned {type(schedule).__name__}, and must return a Schedule.")
    schedule = dataclasses.replace(schedule, name=name)
    validate(schedule)
    asked = {"stages": stages, "microbatches": microbatches}
    asked |= {"slices": options["num_slices"]} if "num_slices" in options else {}
    made = {what: getattr(schedule, f"num_{what}") for what in asked}
    if made != asked:
        returned, wanted = (
            ", ".join(f"{what}={count}" for what, count in counts.items())
            for counts in (made, asked)
        )
        raise ValueError(f"{name} returned a schedule of {returned}; it was asked for {wanted}.")
    return schedule


def _function(name: str) -> Callable[..., Schedule]:
    module_name, _, function_name = name.partition(":")
    if not module_name or module_name.startswith("."):
        raise _no_function(name, f"{module_name!r} is not the full name of a module")
    if os.getcwd() not in sys.path and "" not in sys.path:
        # An installed command does not search the current folder by itself.
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything when it is imported
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise _no_function(name, str(error)) from None
        raise ValueError(f"{name!r} cannot be imported: {module_name} {_raised(error)}") from error
    if not hasattr(module, function_name):
        raise _no_function(name, f"module {module_name!r} has no attribute {function_name!r}")
    function: Callable[..., Schedule] = getattr(module, function_name)
    if not callable(function):
        raise ValueError(f"{name!r} is not a function but {type(function).__name__}.")
    return function


def _no_function(name: str, reason: str) -> ArgumentError:
    rule = f"is no function Python can import: {reason}"
    note = "Nearest valid: 'module:function', for example 'my_schedules:mine'."
    return ArgumentError([Problem("name", name, rule, note=note)])


def _raised(error: Exception) -> str:
    """Describes an error and its place: the unreadable file, or the deepest line of others."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(("<", _LIBRARY))]
    place = f"{(theirs or frames)[-1].filename}:{(theirs or frames)[-1].lineno}"
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    return f"raised {type(error).__name__} at {place}: {error}"
