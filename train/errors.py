"""Errors of the user: all of them in one message, each naming its fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Failure:
    """One thing that is wrong.

    Args:
      message: the field's path, its value, the rule, and the nearest valid values.
      fields: paths of the fields the rule reads, such as ``mesh.stage``.
    """

    message: str
    fields: tuple[str, ...] = ()


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
