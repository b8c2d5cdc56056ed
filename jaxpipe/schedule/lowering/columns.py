"""The slices of a schedule as columns of integers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable

import numpy as np

from jaxpipe.schedule.actions import Kind, Schedule, Slice, split_action
from jaxpipe.schedule.simulate import ticks

KINDS = tuple(Kind)
"""Kinds by their number in `Columns.kind`."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """The slices that run, one row each, in order within each stage: int64 ``[slices]``."""

    stage: np.ndarray
    tick: np.ndarray
    kind: np.ndarray
    virtual_stage: np.ndarray
    microbatch: np.ndarray
    lo: np.ndarray
    hi: np.ndarray

    def of(self, *kinds: Kind) -> np.ndarray:
        """Which slices are of these kinds, bool ``[slices]``."""
        found: np.ndarray = np.logical_or.reduce([self.kind == KINDS.index(k) for k in kinds])
        return found


def columns_of(
    schedule: Schedule,
    layer_counts: tuple[int, ...],
    ticks: Callable[[Schedule], list[list[int]]] = ticks,
) -> Columns:
    """Reads the schedule's own slices, or one whole action or overlapped pair per tick.

    Where some backwards are B and W, and others BW, these are B and W in the same tick.

    Args:
      ticks: chooses those of whole actions, per stage in order; by default the earliest.

    Raises:
      ValueError: the slices are not of these layers.
    """
    code = {kind: k for k, kind in enumerate(KINDS)}
    counts = np.asarray(layer_counts)

    # Column by column: with one tuple per row, garbage collection would take longer than the rest.
    def column(values: Iterable[int]) -> np.ndarray:
        return np.fromiter(values, np.int64)

    slices = [part for row in schedule.slices or () for part in row]
    if not slices and schedule.mixes_backwards:
        slices = _with_one_kind_of_backward(schedule, layer_counts, ticks(schedule))
    actions = [part.action for part in slices] or [a for row in schedule.orders for a in row]
    virtual_stage = column(action.virtual_stage for action in actions)
    if slices:
        tick = column(part.tick for part in slices)
        lo, hi = column(part.lo for part in slices), column(part.hi for part in slices)
    else:
        tick = column(itertools.chain.from_iterable(ticks(schedule)))
        lo, hi = np.zeros_like(virtual_stage), counts[virtual_stage]
    reached = np.zeros_like(counts)
    np.maximum.at(reached, virtual_stage, hi)
    if tuple(reached.tolist()) != layer_counts:
        raise ValueError(
            f"Schedule {schedule.name!r} was cut for {tuple(reached.tolist())} layers per virtual "
            f"stage, but the model has {layer_counts}: cut it again with `slice_ticks`."
        )
    return Columns(
        stage=np.asarray(schedule.placement.stages)[virtual_stage],
        tick=tick,
        kind=column(code[action.kind] for action in actions),
        virtual_stage=virtual_stage,
        microbatch=column(action.microbatch for action in actions),
        lo=lo,
        hi=hi,
    )


def _with_one_kind_of_backward(
    schedule: Schedule, layer_counts: tuple[int, ...], ticks: list[list[int]]
) -> list[Slice]:
    return [
        Slice(tick, part, 0, layer_counts[part.virtual_stage])
        for row, order in zip(ticks, schedule.orders, strict=True)
        for tick, action in zip(row, order, strict=True)
        for part in split_action(action)
    ]
