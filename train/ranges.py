"""Numbers out of range, found before any rule divides by them or builds what they ask for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import get_args

from jaxpipe.errors import shortened, shown
from train.config import Config, Section
from train.errors import Failure
from train.fields import Range

_MAX_PASSES = 100_000
"""Forward passes of the largest schedule: building that of zb-v takes about 10 seconds."""

_LARGEST = 2**63 - 1
_INTEGERS = Range(-_LARGEST - 1, _LARGEST)
"""The range of an integer field without a range of its own."""


def in_range(config: Config) -> tuple[Config, list[Failure]]:
    """Applies the ranges of single fields, so that later rules may divide by a count.

    Args:
      config: its names and types are right.

    Returns:
      The configuration with defaults in fields that are out of range, and what is wrong.
    """
    failures = list(_ranges(config))
    config = config.reset(field for failure in failures for field in failure.fields)
    too_large = list(_size(config))
    failures += too_large
    return config.reset(field for failure in too_large for field in failure.fields), failures


def limits(section: Section, prefix: str = "") -> Iterator[tuple[str, Range]]:
    """Yields the path and the range of every field that has a range, or whose values have one."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from limits(value, f"{prefix}{name}.")
        of_values = (getattr(kind, "__metadata__", ()) for kind in get_args(field.annotation))
        for note in itertools.chain(field.metadata, *of_values):
            if isinstance(note, Range):
                yield f"{prefix}{name}", note


def _ranges(config: Config) -> Iterator[Failure]:
    ranges = dict(limits(config))
    for path, value in config.flat().items():
        parts = value if isinstance(value, dict) else {None: value}
        for key, number in parts.items():
            range_ = ranges.get(path, _INTEGERS if type(number) is int else None)
            if range_ is None or number is None:
                continue
            if rule := _broken(number, range_):
                name = path if key is None else f"{path}.{shortened(key)}"
                yield Failure(f"{name}={shown(number)} must be {rule}", (path,))


def _broken(number: float, range_: Range) -> str:
    """Writes the rule that a number breaks, and the nearest legal number; empty if it is legal."""
    high, below = range_.high, range_.below
    if high is None:
        high, below = (_LARGEST, False) if isinstance(number, int) else (math.inf, True)
    fits_low = number > range_.low if range_.above else number >= range_.low
    fits_high = number < high if below else number <= high
    if fits_low and fits_high:
        return ""
    rule = f"{'above' if range_.above else 'at least'} {range_.low}"
    if high == math.inf:
        rule += " and finite" * (number == math.inf)
    elif range_.high is not None or not fits_high:
        rule += f" and {'below' if below else 'at most'} {high}"
    bound, is_open = (high, below) if fits_low else (range_.low, range_.above)
    return f"{rule}." if is_open else f"{rule}. Nearest valid: {bound}."


def _size(config: Config) -> Iterator[Failure]:
    """Refuses schedules that would take minutes to build, and more to compile."""
    pipeline, stages = config.pipeline, config.mesh.stage
    if stages * (pipeline.chunks or 1) * pipeline.microbatches > _MAX_PASSES:
        chunks = "" if pipeline.chunks is None else f" x pipeline.chunks={pipeline.chunks}"
        yield Failure(
            f"mesh.stage={stages}{chunks} x pipeline.microbatches={pipeline.microbatches} is more "
            f"than a schedule can hold. Nearest valid: a product of at most {_MAX_PASSES}.",
            ("mesh.stage", "pipeline.chunks", "pipeline.microbatches"),
        )
