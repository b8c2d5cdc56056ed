"""Checks the types in a `Schedule` of a user's function: Python does not enforce annotations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jaxpipe.schedule.actions import Action, Kind, Schedule, Slice
from jaxpipe.schedule.placement import Placement


def wrong_types(schedule: Schedule) -> Iterator[str]:
    """Finds every value in a schedule that has the wrong type.

    Args:
      schedule: any.

    Yields:
      A sentence per problem; for every row the first.

    Example:
      >>> from jaxpipe.schedule.placement import linear
      >>> for text in wrong_types(Schedule("mine", linear(1), 2.0, (("0F0",),))):
      ...     print(text)
      num_microbatches=2.0 is float, and must be int.
      '0F0' on stage 0 is str, and must be an Action (int, Kind, int).
    """
    placement, peak = schedule.placement, schedule.peak_in_flight
    if not isinstance(placement, Placement):
        yield _wrong("placement", placement, "a Placement")
    else:
        if not _is_row(placement.stages, int):
            yield _wrong("placement.stages", placement.stages, "a tuple of nothing but int")
        if not isinstance(placement.num_copies, int):
            yield _wrong(f"num_copies={placement.num_copies!r}", placement.num_copies, "int")
    if not isinstance(schedule.num_microbatches, int):
        m = schedule.num_microbatches
        yield _wrong(f"num_microbatches={m!r}", m, "int")
    if peak is not None and not _is_row(peak, (int, float)):
        yield _wrong("peak_in_flight", peak, "a tuple of nothing but int")
    yield from _in_rows("orders", schedule.orders, _is_action, "an Action (int, Kind, int)")
    if schedule.slices is not None:
        expected = "a Slice (int, Action, int, int)"
        yield from _in_rows("slices", schedule.slices, _is_slice, expected)


def _in_rows(name: str, rows: Any, fits: Callable[[Any], bool], expected: str) -> Iterator[str]:
    if not _is_row(rows, (tuple, list)):
        yield _wrong(name, rows, "a tuple of one tuple for every stage")
        return
    for d, row in enumerate(rows):
        for item in row:
            if not fits(item):
                yield _wrong(f"{item!r} on stage {d}", item, expected)
                break


def _is_row(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(item, kinds) for item in value)


def _is_action(value: Any) -> bool:
    return (
        isinstance(value, Action)
        and isinstance(value.kind, Kind)
        and isinstance(value.virtual_stage, int)
        and isinstance(value.microbatch, int)
    )


def _is_slice(value: Any) -> bool:
    return (
        isinstance(value, Slice)
        and _is_action(value.action)
        and all(isinstance(number, int) for number in (value.tick, value.lo, value.hi))
    )


def _wrong(what: str, value: Any, expected: str) -> str:
    return f"{what} is {type(value).__name__}, and must be {expected}."
