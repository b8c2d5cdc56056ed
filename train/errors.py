"""Errors of the user: all of them in one message, each naming its fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from jaxpipe.errors import ArgumentError, Problem, in_python, printable, shortened

RESTART = 75
"""The exit status of a run that another process kept from going on: EX_TEMPFAIL of sysexits.h."""

_FIELDS = {
    "name": "pipeline.schedule",
    "method": "pipeline.schedule",
    "schedule": "pipeline.schedule",
    "num_stages": "mesh.stage",
    "num_slices": "pipeline.sequence_slices",
    "recompute_segment": "asynchronous.recompute_segment",
}
"""Paths of the fields that set a schedule's arguments; others have their name in ``pipeline``."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """One thing that is wrong.

    Args:
      message: the field's path, its value, the rule, and the nearest valid values.
      fields: paths of the fields the rule reads, such as ``mesh.stage``.
    """

    message: str
    fields: tuple[str, ...] = ()


def in_yaml(value: object) -> str:
    """Writes a value as a configuration has it.

    Example:
      >>> in_yaml(None), in_yaml(True), in_yaml("step")
      ('null', 'true', 'step')
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def in_short(failure: Failure, values: Iterable[Any]) -> Failure:
    """Shortens long values of a configuration where a message shows them."""
    message = failure.message
    for value in values:
        parts = (*value, *value.values()) if isinstance(value, Mapping) else ()
        for whole in (spell(part) for part in (value, *parts) for spell in (repr, str)):
            message = message.replace(whole, shortened(whole))
    return dataclasses.replace(failure, message=message)


def of_pipeline(error: ValueError, name: str, *, memory: str = "memory_limit") -> Iterator[Failure]:
    """Yields what a schedule or a pipeline refuses, in the names of the configuration's fields.

    Args:
      error: what the library raised.
      name: name of the schedule that was asked for, even if another was built to warm up with.
      memory: name of the field that limits what is kept.
    """
    for problem in _problems(error):
        if isinstance(problem, Problem):
            argument = memory if problem.argument == "memory_limit" else problem.argument
            asked = None if problem.schedule is None else name
            problem = dataclasses.replace(problem, argument=argument, schedule=asked)
            if argument == "fp8":
                patterns = ",".join(cast(Sequence[str], problem.value))
                problem = dataclasses.replace(problem, value=patterns, nearest=(None,))
        yield _failure(problem, _field, "pipeline.schedule")


def of_model(error: ValueError) -> Iterator[Failure]:
    """Yields what the shape of a model refuses, each as the failure of one field."""
    for problem in _problems(error):
        failure = _failure(problem, "model.{}".format, "model")
        yield Failure(failure.message, failure.fields[:1])


def _problems(error: ValueError) -> Sequence[Problem | str]:
    return error.problems if isinstance(error, ArgumentError) else [str(error)]


def _failure(problem: Problem | str, field: Callable[[str], str], whole: str) -> Failure:
    """Makes the failure of a problem's fields, or of ``whole`` for a text."""
    if isinstance(problem, str):
        return Failure(problem, (whole,))
    lines = problem.lines(lambda argument, value: in_python(field(argument), value))
    return Failure(" ".join(lines), tuple(map(field, (problem.argument, *problem.others))))


def _field(argument: str) -> str:
    """Finds the path of the field that sets an argument of a schedule."""
    return _FIELDS.get(argument, f"pipeline.{argument.removeprefix('num_')}")


class ConfigError(ValueError):
    """The input is wrong: the trainer ends with status 2.

    Before training it has written nothing.

    Args:
      failures: the failures, at least one.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        assert failures
        self.failures = tuple(
            dataclasses.replace(failure, message=printable(failure.message)) for failure in failures
        )
        super().__init__("\n".join(failure.message for failure in self.failures))


def refused(message: str, *fields: str) -> ConfigError:
    """Makes the error of a single failure."""
    return ConfigError([Failure(message, fields)])


class RestartError(RuntimeError):
    """All processes of a run end, so that they can be started again."""


class CannotContinueError(RestartError):
    """The processes that are left after a loss cannot go on from their memory.

    Args:
      reason: why.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"the processes that are left cannot go on from copies in memory: {reason}. Start all "
            "processes again with --resume to continue from the newest checkpoint."
        )


class MissingProcessError(RestartError):
    """Processes of a run have not come; all others end.

    Args:
      missing: their numbers.
      seconds: time that the others have waited.
      twice: numbers with which several processes have come.
      stranger: HOST:PORT of process 0, where something else has answered; None if nobody has.
    """

    def __init__(
        self,
        missing: Sequence[int],
        seconds: float,
        *,
        twice: Sequence[int] = (),
        stranger: str | None = None,
    ) -> None:
        self.missing = tuple(missing)
        several = len(missing) > 1
        why = f"; what answers at {stranger} is another run or program" if stranger else ""
        if twice:
            why = f", but several as {', '.join(map(str, twice))} (distributed.process_id)"
        super().__init__(
            f"process{'es' * several} {', '.join(map(str, missing))} of this run "
            f"{'have' if several else 'has'} not come within {seconds:g} s "
            f"(distributed.patience_seconds){why}. Start all processes again."
        )


def named_values(values: Mapping[str, float | None]) -> str:
    """Writes the numbers of a step in words.

    Example:
      >>> named_values({"loss": 0.5, "gradient norm": None})
      'the loss is 0.5'
    """
    return " and ".join(f"the {n} is {value}" for n, value in values.items() if value is not None)


class NonFiniteLossError(RuntimeError):
    """Training produced a loss or gradient norm that is not a number, or more than can be skipped.

    Args:
      step: the first step with such a value.
      values: the values of that step, by name.
      kept: the step of the last checkpoint, or None.
      skipped: number of steps before it that were skipped.
      cause: what first made a value that is not finite; empty if it is not known.
    """

    def __init__(
        self,
        *,
        step: int,
        values: Mapping[str, float],
        kept: int | None,
        skipped: int = 0,
        cause: str = "",
    ) -> None:
        self.step = step
        self.seen = named_values(values)
        left = (
            "There is no checkpoint yet."
            if kept is None
            else f"The checkpoint of step {kept} is kept; --resume continues from it once "
            "a setting has changed."
        )
        before = f"{skipped} steps before it were skipped; " if skipped else ""
        made = f"The first value that was not finite is of {cause}. " if cause else ""
        super().__init__(
            f"step {step}: {self.seen}; {before}training stopped. {made}"
            f"{left} Try a smaller optimizer.peak_lr, a longer optimizer.warmup_steps, a lower "
            "optimizer.clip_norm, or other data with another train.seed."
        )
