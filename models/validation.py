"""The problems of a model's config; every config collects all of them."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any, Literal

from jaxpipe.errors import Problem, below_one, refuse

_LARGEST_TRIED = 10**6
"""Largest divisor to try: a number beyond its square is a mistake, to be refused quickly."""


class Validated:
    """A dataclass that refuses numbers that do not fit together, all of them in one message."""

    def __post_init__(self) -> None:
        refuse([*not_finite(self), *self.problems()])

    def problems(self) -> Iterator[Problem]:
        """Yields what is wrong, by field."""
        raise NotImplementedError


def small_counts(config: Any, *names: str) -> list[Problem]:
    """Lists the fields among ``names`` that are below 1; None stands for a default and passes."""
    return below_one({name: getattr(config, name) for name in names})


def wrong_choices(config: Any) -> Iterator[Problem]:
    """Yields the fields whose value is not one of the literals that their type allows."""
    for name, kind in typing.get_type_hints(type(config)).items():
        allowed = typing.get_args(kind)
        if typing.get_origin(kind) is Literal and (value := getattr(config, name)) not in allowed:
            yield Problem(name, value, f"must be one of: {', '.join(map(str, allowed))}")


def not_finite(config: Any) -> Iterator[Problem]:
    """Yields the fields that are infinite or no number, which no comparison would find."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(field.name, value, "must be finite")


def not_positive(config: Any, *names: str) -> Iterator[Problem]:
    """Yields the fields among ``names`` that are not above 0; None is a default and passes."""
    for name in names:
        if (value := getattr(config, name)) is not None and value <= 0:
            yield Problem(name, value, "must be above 0")


def without_effect(config: Any, needed: str, *names: str) -> Iterator[Problem]:
    """Yields the fields among ``names`` that are set, but do nothing as ``needed`` is None."""
    if getattr(config, needed) is not None:
        return
    for name in names:
        if (value := getattr(config, name)) != getattr(type(config), name):
            yield Problem(name, value, "has no effect without $" + needed, (), {needed: None})


def negative(config: Any, *names: str) -> Iterator[Problem]:
    """Yields the fields among ``names`` that are below 0; None passes."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < 0:
            yield Problem(name, value, "must not be negative", (0,))


def wrong_probability(config: Any, name: str) -> Iterator[Problem]:
    """Yields the field's value, if it is not in [0, 1)."""
    value = getattr(config, name)
    if not 0 <= value < 1:
        yield Problem(name, value, "must be at least 0 and below 1", (0 if value < 0 else 0.9,))


def check_length(config: Any, what: str, length: int) -> None:
    """Raises ValueError if rows of a batch are longer than the model's sequences.

    ``what`` begins the message, such as "tokens hold".
    """
    if length > (most := config.sequence_length):
        raise ValueError(
            f"{what} {length} inputs per row, but sequence_length={most}. Nearest valid: "
            f"{most} or fewer."
        )


def not_a_divisor(name: str, value: int, of: str, whole: int) -> Problem:
    """Says that a field must divide another one, and which values nearby do."""
    return Problem(name, value, f"must divide ${of}", nearest_divisors(whole, value), {of: whole})


def nearest_divisors(whole: int, value: int) -> list[int]:
    """Finds the divisors of a number next to a value that is none, below and above it.

    Example:
      >>> nearest_divisors(12, 5)
      [4, 6]
    """
    most = min(math.isqrt(whole), _LARGEST_TRIED)
    small = [d for d in range(1, most + 1) if whole % d == 0]
    divisors = {*small, *(whole // d for d in small)}
    below, above = {d for d in divisors if d < value}, {d for d in divisors if d > value}
    return [*([max(below)] if below else []), *([min(above)] if above else [])]
