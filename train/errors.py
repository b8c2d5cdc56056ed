"""Errors of the user: all of them in one message, each naming its fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpipe.schedule.problems import ArgumentError, Problem, in_python

_FIELDS = {
    "name": "pipeline.schedule",
    "method": "pipeline.schedule",
    "schedule": "pipeline.schedule",
    "num_stages": "mesh.stage",
    "recompute_segment": "asynchronous.recompute_segment",
}
"""Paths of the fields that set an argument of the library; of others, the name in ``pipeline``."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """One thing that is wrong.

    Args:
      message: the field's path, its value, the rule, and the nearest valid values.
      fields: paths of the fields the rule reads, such as ``mesh.stage``.
    """

    message: str
    fields: tuple[str, ...] = ()


def refused(error: ValueError, name: str) -> Iterator[Failure]:
    """What the library refuses, in the names of the configuration's fields.

    Args:
      error: what it raised.
      name: of the schedule that was asked for, even if another was built to warm up with.
    """
    problems = error.problems if isinstance(error, ArgumentError) else [str(error)]
    for problem in problems:
        if isinstance(problem, Problem):
            own = problem.schedule and name
            text = " ".join(dataclasses.replace(problem, schedule=own).lines(spell))
            yield Failure(text, tuple(map(_field, (problem.argument, *problem.others))))
        else:
            yield Failure(problem, ("pipeline.schedule",))


def spell(argument: str, value: Any) -> str:
    """Writes an argument of the library as a field of the configuration."""
    return in_python(_field(argument), value)


def _field(argument: str) -> str:
    return _FIELDS.get(argument, f"pipeline.{argument.removeprefix('num_')}")


class ConfigError(ValueError):
    """The input is wrong: the trainer ends with status 2 and has written nothing.

    Args:
      failures: at least one.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        assert failures
        self.failures = tuple(failures)
        super().__init__("\n".join(failure.message for failure in failures))


class NonFiniteLossError(RuntimeError):
    """Training produced a loss or gradient norm that is not a number.

    Args:
      step: the first step with such a value.
      values: the values of that step, by name.
      kept: the step of the last checkpoint, or None.
    """

    def __init__(self, *, step: int, values: Mapping[str, float], kept: int | None) -> None:
        self.step = step
        left = (
            "There is no checkpoint yet."
            if kept is None
            else f"The checkpoint of step {kept} is kept; --resume continues from it."
        )
        seen = " and ".join(f"the {name} is {value}" for name, value in values.items())
        super().__init__(
            f"step {step}: {seen}; training stopped. "
            f"{left} Try a smaller optimizer.peak_lr or a longer optimizer.warmup_steps."
        )
