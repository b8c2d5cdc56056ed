"""The rules that slices must follow, so that the executor can run them.

In one tick a stage runs at most one range of layers of each kind: R, then F, then B or BW, then W.
R and F go up through the layers, B, BW and W down. Each kind has one running value, so an
unfinished action keeps others of its kind waiting. The results of R, F, B and BW are available to
others from the next tick on; W may run the layers whose B ran in the same tick or before, and B
follows its own R within a tick.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence

from jaxpipe.schedule.actions import Action, Kind, Schedule, Slice, dependencies
from jaxpipe.schedule.check.grid import Fault

_TURN = {Kind.R: 0, Kind.F: 1, Kind.B: 2, Kind.BW: 2, Kind.W: 3}
"""The order of the kinds in a tick; there is one running value for each."""


def slice_faults(schedule: Schedule) -> Iterator[Fault]:
    """The violations of a rule by slices, and their differences from orders that are valid."""
    assert schedule.slices is not None
    if len(schedule.slices) != schedule.num_stages:
        text = f"There are slices of {len(schedule.slices)} stages for {schedule.num_stages}."
        yield Fault(text, 0)
        return
    layers = chunk_layers(schedule.slices)
    ends = {part.action: part.tick for part in itertools.chain(*schedule.slices)}
    for stage, (row, order) in enumerate(zip(schedule.slices, schedule.orders, strict=True)):
        found = (
            _first_in_order(row, order)
            or _first_in_row(row, layers)
            or _first_too_early(row, ends, schedule)
        )
        if found is not None:
            text, action = found
            position = order.index(action) if action in order else None
            yield Fault(f"{text} (slices of stage {stage}).", stage, position)


def chunk_layers(rows: Sequence[Sequence[Slice]]) -> dict[int, int]:
    """The layers of every virtual stage: how far its longest action reaches."""
    layers: collections.Counter[int] = collections.Counter()
    for part in itertools.chain(*rows):
        layers[part.action.virtual_stage] = max(layers[part.action.virtual_stage], part.hi)
    return layers


_Found = tuple[str, Action]


def order_of(row: Sequence[Slice]) -> tuple[Action, ...]:
    """The order of a stage that follows from its slices.

    F and B are placed where they start, W and BW where they end: every action then comes after its
    inputs, and the peak in flight of the order is that of the slices.

    Example:
      >>> F, W = Action.parse("0F1"), Action.parse("0W0")
      >>> row = (Slice(0, W, 1, 2), Slice(1, F, 0, 1), Slice(1, W, 0, 1), Slice(2, F, 1, 2))
      >>> [str(action) for action in order_of(row)]
      ['0F1', '0W0']
    """
    places: dict[Action, int] = {}
    for place, part in enumerate(row):
        if part.action.kind in (Kind.W, Kind.BW):
            places[part.action] = place
        else:
            places.setdefault(part.action, place)
    return tuple(sorted(places, key=places.__getitem__))


def _first_in_order(row: Sequence[Slice], order: Sequence[Action]) -> _Found | None:
    implied = order_of(row)
    for sliced, ordered in itertools.zip_longest(implied, order):
        if sliced != ordered:
            return f"The order has {ordered} where the slices have {sliced}", ordered or sliced
    return None


def _first_in_row(row: Sequence[Slice], layers: dict[int, int]) -> _Found | None:
    """Ticks, turns and ranges of one stage."""
    last = (-1, 0)
    running: dict[int, tuple[Action, int]] = {}  # turn -> what is not finished, layers to go
    for tick, action, lo, hi in ((part.tick, part.action, part.lo, part.hi) for part in row):
        turn, count = _TURN[action.kind], layers[action.virtual_stage]
        if (tick, turn) <= last:
            return f"{action} in tick {tick} comes after its turn: F, then B or BW, then W", action
        last = tick, turn
        other, left = running.pop(turn, (action, count))
        if other != action:
            return f"{action} starts in tick {tick} before {other} has finished", action
        start, end = (count - left, hi) if action.kind.is_forward else (lo, left)
        if (lo, hi) != (start, end) or not 0 <= lo < hi <= count:
            return f"{action} runs layers {lo} to {hi} in tick {tick}, with {left} to go", action
        if left > hi - lo:
            running[turn] = action, left - (hi - lo)
    for action, left in running.values():
        return f"{action} never runs its other {left} layers", action
    return None


def _first_too_early(
    row: Sequence[Slice], ends: dict[Action, int], schedule: Schedule
) -> _Found | None:
    """Inputs from earlier ticks."""
    reached: dict[tuple[int, int], int] = {}  # down to which layer B has come
    for part in row:
        action, key = part.action, (part.action.virtual_stage, part.action.microbatch)
        if action.kind is Kind.W:
            if part.lo < reached.get(key, part.hi):
                return f"{action} in tick {part.tick} runs layer {part.lo} before its B", action
            continue
        if action.kind is Kind.B:
            reached[key] = part.lo
        depth = schedule.placement.depth
        for needed in dependencies(
            action, num_virtual_stages=depth, split=True, segment=schedule.segment
        ):
            if needed not in ends:
                needed = Action(needed.virtual_stage, Kind.BW, needed.microbatch)
            own = needed.kind is Kind.R and needed.virtual_stage == action.virtual_stage
            if ends[needed] >= part.tick + own:
                return f"{action} in tick {part.tick} does not wait for {needed}", action
    return None
