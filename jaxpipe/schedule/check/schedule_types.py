"""Checks the types in a `Schedule` of a user's function: Python does not enforce annotations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.placement import Placement


def wrong_types(schedule: Schedule) -> Iterator[str]:
    """Finds the values in a schedule that have the wrong type; in every row, only the first.

    Example:
      >>> from jaxpipe.schedule.placement import linear
      >>> for text in wrong_types(Schedule("mine", linear(1), 2.0, (("0F0",),))):
      ...     print(text)
      num_microbatches=2.0 is float, and must be int.
      '0F0' on stage 0 is str, and must be an Action (int, Kind, int).
    """
    for what, value, fits, expected in _values(schedule):
        if not fits:
            yield f"{what} is {type(value).__name__}, and must be {expected}."


_Value = tuple[str, Any, bool, str]
"""Name of a value, the value, whether its type fits, and the type that would fit."""


def _values(schedule: Schedule) -> Iterator[_Value]:
    placement, m, peak = schedule.placement, schedule.num_microbatches, schedule.peak_in_flight
    integers = "a tuple of nothing but int"
    yield "placement", placement, isinstance(placement, Placement), "a Placement"
    if isinstance(placement, Placement):
        stages, copies = placement.stages, placement.num_copies
        yield "placement.stages", stages, _is_row(stages, int), integers
        yield f"num_copies={copies!r}", copies, isinstance(copies, int), "int"
    yield f"num_microbatches={m!r}", m, isinstance(m, int), "int"
    yield "peak_in_flight", peak, peak is None or _is_row(peak, (int, float)), integers
    yield from _in_rows("orders", schedule.orders, _is_action, "an Action (int, Kind, int)")
    overlapped = schedule.overlapped
    yield "overlapped", overlapped, _is_row(overlapped, Action), "a tuple of nothing but Action"


def _in_rows(name: str, rows: Any, fits: Callable[[Any], bool], expected: str) -> Iterator[_Value]:
    are_rows = _is_row(rows, (tuple, list))
    yield name, rows, are_rows, "a tuple of one tuple for every stage"
    for d, row in enumerate(rows if are_rows else ()):
        for wrong in itertools.islice((item for item in row if not fits(item)), 1):
            yield f"{wrong!r} on stage {d}", wrong, False, expected


def _is_row(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(item, kinds) for item in value)


def _is_action(value: Any) -> bool:
    return (
        isinstance(value, Action)
        and isinstance(value.kind, Kind)
        and isinstance(value.virtual_stage, int)
        and isinstance(value.microbatch, int)
    )
