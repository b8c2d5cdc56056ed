"""The problems of a model's config, as sentences; every config collects all of them."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any, Literal


class Validated:
    """A dataclass that refuses numbers that do not fit together, all of them in one message."""

    def __post_init__(self) -> None:
        if failures := list(self.failures()):
            raise ValueError("\n".join(failures))

    def failures(self) -> Iterator[str]:
        """What is wrong; each sentence begins with the field at fault, as in ``model.width=7``."""
        raise NotImplementedError


def small_counts(config: Any, *names: str) -> Iterator[str]:
    """The fields among ``names`` that are below 1; None stands for a default and passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            yield f"model.{name}={value} must be at least 1. Nearest valid: 1."


def wrong_choices(config: Any) -> Iterator[str]:
    """The fields whose value is not one of the literals that their type allows."""
    for name, kind in typing.get_type_hints(type(config)).items():
        allowed = typing.get_args(kind)
        if typing.get_origin(kind) is Literal and (value := getattr(config, name)) not in allowed:
            yield f"model.{name}={value!r} must be one of: {', '.join(map(str, allowed))}."


def not_positive(config: Any, *names: str) -> Iterator[str]:
    """The fields among ``names`` that are not above 0."""
    for name in names:
        if (value := getattr(config, name)) <= 0:
            yield f"model.{name}={value} must be above 0."


def wrong_probability(config: Any, name: str) -> Iterator[str]:
    """The field's value, if it is not in [0, 1)."""
    value = getattr(config, name)
    if not 0 <= value < 1:
        yield (
            f"model.{name}={value} must be at least 0 and below 1. "
            f"Nearest valid: {0 if value < 0 else 0.9}."
        )


def not_a_divisor(name: str, value: int, of: str, whole: int) -> str:
    """Says that a field must divide another one, and which values nearby do."""
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    nearest = [d for d in divisors if d < value][-1:] + [d for d in divisors if d > value][:1]
    return (
        f"model.{name}={value} must divide model.{of}={whole}. "
        f"Nearest valid: {', '.join(map(str, nearest))}."
    )
