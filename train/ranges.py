"""Numbers out of range, found before any rule divides by them or builds what they ask for."""

from __future__ import annotations

import math
from collections.abc import Iterator

from train.config import Config, Section
from train.errors import Failure
from train.fields import Range

_MAX_PASSES = 100_000
"""Forward passes of the largest schedule: building that of zb-v takes about 10 seconds."""


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
    """Yields the path of every field that has a range, with the range."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from limits(value, f"{prefix}{name}.")
        for note in field.metadata:
            if isinstance(note, Range):
                yield f"{prefix}{name}", note


def _ranges(config: Config) -> Iterator[Failure]:
    values = config.flat()
    for path, range_ in limits(config):
        value = values[path]
        if value is None:
            continue
        low = value > range_.low if range_.above else value >= range_.low
        high = range_.high is None or (
            value < range_.high if range_.below else value <= range_.high
        )
        if low and high and value != math.inf:
            continue
        rule = f"{'above' if range_.above else 'at least'} {range_.low}"
        if value == math.inf:
            yield Failure(f"{path}={value} must be {rule} and finite.", (path,))
            continue
        if range_.high is not None:
            rule += f" and {'below' if range_.below else 'at most'} {range_.high}"
        is_open = range_.above if not low else range_.below
        bound = range_.low if not low else range_.high
        nearest = "" if is_open else f" Nearest valid: {bound}."
        yield Failure(f"{path}={value} must be {rule}.{nearest}", (path,))


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
