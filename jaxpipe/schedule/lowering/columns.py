"""The actions of a schedule in their ticks, as columns of integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxpipe.schedule.actions import Kind, Schedule, split_action
from jaxpipe.schedule.simulate import ticks

KINDS = tuple(Kind)
"""Kinds by their number in `Columns.kind`."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """The actions, one row each, in order within each stage: int64 ``[actions]``."""

    stage: np.ndarray
    tick: np.ndarray
    kind: np.ndarray
    virtual_stage: np.ndarray
    microbatch: np.ndarray

    def of(self, *kinds: Kind) -> np.ndarray:
        """Marks the actions of these kinds, bool ``[actions]``."""
        marked: np.ndarray = np.logical_or.reduce([self.kind == KINDS.index(k) for k in kinds])
        return marked


def columns_of(schedule: Schedule) -> Columns:
    """Puts every action, or overlapped pair, into its earliest tick.

    Where some backwards are B and W, and others BW, a BW becomes B and W in the same tick.
    """
    code = {kind: k for k, kind in enumerate(KINDS)}
    actions = [action for order in schedule.orders for action in order]
    when = [tick for row in ticks(schedule) for tick in row]
    if schedule.mixes_backwards:
        pairs = zip(when, map(split_action, actions), strict=True)
        when, actions = map(list, zip(*((t, a) for t, parts in pairs for a in parts), strict=True))

    # Column by column: with one tuple per row, garbage collection would take longer than the rest.
    def column(values: Iterable[int]) -> np.ndarray:
        return np.fromiter(values, np.int64)

    virtual_stage = column(action.virtual_stage for action in actions)
    return Columns(
        stage=np.asarray(schedule.placement.stages)[virtual_stage],
        tick=column(when),
        kind=column(code[action.kind] for action in actions),
        virtual_stage=virtual_stage,
        microbatch=column(action.microbatch for action in actions),
    )
