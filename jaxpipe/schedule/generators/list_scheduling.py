"""List scheduling: every stage always starts the most urgent pass that is ready.

It is for placements on which several passes meet on a stage in ways no short formula describes.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Sequence

from jaxpipe.schedule.actions import Action, Kind
from jaxpipe.schedule.generators import events
from jaxpipe.schedule.placement import Placement

_DURATIONS = {Kind.F: 1, Kind.B: 1, Kind.W: 1, Kind.BW: 2}
"""Durations that decide what is ready when: F=B=W, as in the papers' figures."""


def list_schedule(
    placement: Placement, num_microbatches: int, *, limits: Sequence[int], fused: bool
) -> tuple[tuple[Action, ...], ...]:
    """Runs the pipeline event by event and records what each stage does.

    The pass that is due first goes first, forward or backward; W fills the remaining gaps. A pass
    is due when it would start if no stage waited and microbatches entered twice as fast as a stage
    processes them. At that rate earlier microbatches pull ahead, but a backward does not always
    precede a forward, which would open gaps that no other backward fits.

    Args:
      placement: any.
      num_microbatches: m.
      limits: per virtual stage, how many chunks its stage may hold, of the same copy of the model,
        before the virtual stage starts another forward. At least 1, and growing from chunk to chunk
        of a stage, so that the farthest microbatch always finds room and nothing stops.
      fused: run B and W of a microbatch as one action.

    Returns:
      The orders.
    """
    backward = Kind.BW if fused else Kind.B
    stages = [_UrgentStage(held, limits, placement, backward) for held in placement.virtual_stages]
    kind_of = {action: n for stage in stages for n, action in enumerate(stage.passes)}
    for first in range(0, placement.num_virtual_stages, placement.depth):
        entrance = stages[placement.stages[first]]
        entrance.arrivals[kind_of[Kind.F, first]] = [0.0] * num_microbatches
    readers = [
        [
            [(placement.stages[reader[1]], kind_of[reader])]
            if (reader := _reader(*action, backward, placement.depth))
            else []
            for action in stage.passes
        ]
        for stage in stages
    ]
    events.run(stages, lambda d, kind: readers[d][kind])
    return tuple(tuple(stage.actions()) for stage in stages)


def _reader(kind: Kind, s: int, backward: Kind, depth: int) -> tuple[Kind, int] | None:
    """The kind and virtual stage that read the result of a pass; None if no F, B or BW does."""
    if kind is Kind.F:
        return (Kind.F, s + 1) if (s + 1) % depth else (backward, s)
    if kind is Kind.W or s % depth == 0:
        return None
    return (backward, s - 1)


class _UrgentStage(events.Stage):
    """A stage that starts the pass due first, and W if nothing else is ready; F takes 1."""

    def __init__(
        self, held: Sequence[int], limits: Sequence[int], placement: Placement, backward: Kind
    ) -> None:
        # B first: it wins where a forward is due at the same time.
        kinds = (backward, Kind.F) if backward is Kind.BW else (backward, Kind.F, Kind.W)
        self.passes = [(kind, s) for kind in kinds for s in held]
        super().__init__([_DURATIONS[kind] for kind, _ in self.passes])
        depth = placement.depth
        self.due = [
            s % depth if kind is Kind.F else depth + _DURATIONS[kind] * (depth - 1 - s % depth)
            for kind, s in self.passes
            if kind is not Kind.W
        ]
        self.pace = 3 * len(held) / placement.num_copies / 2
        self.limits = [limits[s] if kind is Kind.F else math.inf for kind, s in self.passes]
        self.copy_of = [s // depth for _, s in self.passes]
        self.in_flight = [0] * placement.num_copies
        self.first_w = len(self.due)
        self.weights: collections.deque[int] = collections.deque()

    def choose(self, now: float) -> int | None:
        best, earliest = None, math.inf
        for kind, first_due in enumerate(self.due):
            if not self.is_ready(kind, now):
                continue
            if self.in_flight[self.copy_of[kind]] >= self.limits[kind]:
                continue
            due = first_due + self.pace * self.done[kind]
            if due < earliest:
                best, earliest = kind, due
        if best is None and self.weights:
            return self.weights.popleft()
        return best

    def start(self, kind: int, now: float) -> None:
        super().start(kind, now)
        action, copy = self.passes[kind][0], self.copy_of[kind]
        if action is Kind.F:
            self.in_flight[copy] += 1
        elif action is Kind.B:
            self.weights.append(kind + self.first_w)
        else:
            self.in_flight[copy] -= 1

    def actions(self) -> Iterator[Action]:
        """The actions that the stage has run, in order."""
        numbers = [itertools.count() for _ in self.passes]
        for number in self.order:
            kind, s = self.passes[number]
            yield Action(s, kind, next(numbers[number]))
