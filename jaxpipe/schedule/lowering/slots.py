"""Slots for chunks, where a stage has fewer slots than chunks.

Weights sharded over the data axis are gathered into slots before use; sharded gradients are summed
in slots and reduced when a slot is given up. Both follow from the order alone, by the same rule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(slots=True)
class Stay:
    """An item's stay in a slot: from the tick of its first use to that of its last."""

    item: int
    slot: int
    loaded: int
    unloaded: int


def cached_slots(
    ticks: Sequence[int], items: Sequence[int], *, num_slots: int
) -> tuple[list[Stay], list[int]]:
    """Assigns slots to items, evicting the one whose next use is farthest (Belady's rule).

    The number of stays, and hence of transfers, is the least possible. An item stays until the tick
    of its use is over. Among items that are not used again, the one that has waited longest goes.

    Args:
      ticks: when each use is, in order.
      items: the item (a chunk) of each use; at most ``num_slots`` different ones in a tick.

    Returns:
      The stays in order of loading, and the index of every use's stay.

    Example:
      >>> stays, of_use = cached_slots([0, 1, 2], [0, 1, 0], num_slots=1)
      >>> [(stay.item, stay.loaded, stay.unloaded) for stay in stays], of_use
      ([(0, 0, 0), (1, 1, 1), (0, 2, 2)], [0, 1, 2])
    """
    next_use = _next_uses(items)
    current: dict[int, int] = {}  # item -> index of its stay
    farthest: dict[int, float] = {}
    stays: list[Stay] = []
    of_use: list[int] = []
    for index, (tick, item) in enumerate(zip(ticks, items, strict=True)):
        if item not in current:
            slot = len(current)
            if slot == num_slots:
                used = {other: stays[stay].unloaded for other, stay in current.items()}
                idle = (other for other in current if used[other] < tick)
                farthest_idle = max(idle, key=lambda other: (farthest[other], -used[other]))
                slot = stays[current.pop(farthest_idle)].slot
            current[item] = len(stays)
            stays.append(Stay(item, slot, tick, tick))
        stays[current[item]].unloaded = tick
        farthest[item] = next_use[index]
        of_use.append(current[item])
    return stays, of_use


def _next_uses(items: Sequence[int]) -> list[float]:
    """Finds, for every use, the index of the same item's next use."""
    upcoming: dict[int, int] = {}
    result = [math.inf] * len(items)
    for index in range(len(items) - 1, -1, -1):
        result[index] = upcoming.get(items[index], math.inf)
        upcoming[items[index]] = index
    return result


def colour_intervals(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Gives every interval a slot so that overlapping intervals differ, using as few as possible.

    Args:
      starts: time of the first write of each, int64 ``[intervals]``.
      ends: time of its last read, not before its start; a slot read last at a time is free for a
        write strictly after it.

    Example:
      >>> colour_intervals(np.array([0, 1, 3]), np.array([2, 3, 4]))
      array([0, 1, 0])
    """
    by_start, by_end = np.argsort(starts, kind="stable"), np.argsort(ends, kind="stable")
    ended = np.searchsorted(ends[by_end], starts[by_start])
    num_slots = int((1 + np.arange(len(starts)) - ended).max(initial=0))
    # The first intervals take new slots; each later one takes the slot that was freed first.
    slots = np.empty(len(starts), np.int64)
    slots[by_start[:num_slots]] = np.arange(num_slots)
    for later, earlier in zip(by_start[num_slots:].tolist(), by_end.tolist(), strict=False):
        slots[later] = slots[earlier]
    return slots
