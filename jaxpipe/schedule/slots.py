"""Which chunk is in which slot, when a stage holds fewer slots than chunks.

Weights sharded over the data axis are gathered into slots before use; sharded gradients are summed
in slots and reduced when a slot is given up. Both follow from the order alone, by the same rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Use:
    """An item (a chunk) needed in a tick."""

    tick: int
    item: int


@dataclasses.dataclass(frozen=True)
class Stay:
    """An item's stay in a slot: from the tick of its first use to that of its last."""

    item: int
    slot: int
    loaded: int
    unloaded: int


def cached_slots(uses: Sequence[Use], *, num_slots: int) -> tuple[list[Stay], list[int]]:
    """Assigns slots to uses, evicting the item whose next use is farthest (Belady's rule).

    The number of stays, and so of transfers, is the least possible.

    Args:
      uses: in order of their ticks.
      num_slots: items held at once, at least as many as any tick uses.

    Returns:
      The stays in order of loading, and the slot of every use.

    Example:
      >>> stays, slots = cached_slots([Use(0, 0), Use(1, 1), Use(2, 0)], num_slots=1)
      >>> [(stay.item, stay.loaded, stay.unloaded) for stay in stays], slots
      ([(0, 0, 0), (1, 1, 1), (0, 2, 2)], [0, 0, 0])
    """
    next_use = _next_uses(uses)
    held: dict[int, int] = {}  # item -> index of its stay
    farthest: dict[int, float] = {}
    stays: list[Stay] = []
    slots: list[int] = []
    for index, use in enumerate(uses):
        if use.item not in held:
            slot = len(held)
            if slot == num_slots:
                # What this tick uses stays: it needs all its items at once.
                idle = (item for item in held if stays[held[item]].unloaded < use.tick)
                evicted = max(idle, key=farthest.__getitem__)
                slot = stays[held.pop(evicted)].slot
            held[use.item] = len(stays)
            stays.append(Stay(use.item, slot, use.tick, use.tick))
        stay = dataclasses.replace(stays[held[use.item]], unloaded=use.tick)
        stays[held[use.item]] = stay
        farthest[use.item] = next_use[index]
        slots.append(stay.slot)
    return stays, slots


def _next_uses(uses: Sequence[Use]) -> list[float]:
    """For every use, the index of the same item's next one."""
    upcoming: dict[int, int] = {}
    result = [float("inf")] * len(uses)
    for index in range(len(uses) - 1, -1, -1):
        result[index] = upcoming.get(uses[index].item, float("inf"))
        upcoming[uses[index].item] = index
    return result
