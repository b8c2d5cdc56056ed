"""List scheduling: every stage always starts the most urgent pass that is ready.

For placements on which several passes meet on a stage in ways no short formula describes.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Sequence

from jaxpipe.schedule.actions import Action, Kind
from jaxpipe.schedule.placement import Placement

_SLOTS = {Kind.F: 1, Kind.B: 1, Kind.W: 1, Kind.BW: 2}
"""Durations that decide what is ready when: F=B=W, as in the papers' figures."""


def list_schedule(
    placement: Placement, num_microbatches: int, *, limits: Sequence[int], fused: bool
) -> tuple[tuple[Action, ...], ...]:
    """Runs the pipeline event by event and writes down what each stage did.

    The pass that is due first goes first, forward or backward; W fills what gaps remain. A pass is
    due when it would start if nobody waited and microbatches entered twice as fast as a stage
    works them off: more than full speed, so that earlier microbatches pull ahead, but not so
    little that a backward always precedes a forward, which opens gaps that no other backward fits.

    Args:
      placement: any.
      num_microbatches: m.
      limits: per virtual stage, how many chunks its stage may hold, of the same copy of the model,
        before the virtual stage starts another forward. At least 1, and growing from chunk to chunk
        of a stage: so the microbatch that is farthest always finds room, and nothing stops.
      fused: run B and W of a microbatch as one action.

    Returns:
      The orders.
    """
    stages = [_Stage(held, limits, placement, fused) for held in placement.virtual_stages]
    for first in range(0, placement.num_virtual_stages, placement.depth):
        entrance = stages[placement.stages[first]]
        entrance.arrivals[Kind.F, first].extend((0, i) for i in range(num_microbatches))
    # A time and a stage as one number: heaps compare numbers faster than pairs.
    events = list(range(len(stages)))
    while events:
        now, d = divmod(heapq.heappop(events), len(stages))
        action = stages[d].start(now)
        if action is None:
            continue
        end = stages[d].free_at
        heapq.heappush(events, end * len(stages) + d)
        reader = _reader(action, stages[d].backward, placement)
        if reader is not None:
            target = placement.stages[reader[1]]
            stages[target].arrivals[reader].append((end, action.microbatch))
            if target != d:
                heapq.heappush(events, end * len(stages) + target)
    return tuple(tuple(stage.order) for stage in stages)


def _reader(action: Action, backward: Kind, placement: Placement) -> tuple[Kind, int] | None:
    """The kind and virtual stage that read what an action computes; None if no F, B or BW does."""
    s = action.virtual_stage
    if action.kind is Kind.F:
        return (Kind.F, s + 1) if (s + 1) % placement.depth else (backward, s)
    if action.kind is Kind.W or s % placement.depth == 0:
        return None
    return (backward, s - 1)


class _Stage:
    """What a stage has received and runs; times in slots."""

    def __init__(
        self, held: Sequence[int], limits: Sequence[int], placement: Placement, fused: bool
    ) -> None:
        self.backward = Kind.BW if fused else Kind.B
        # B first: it wins where a forward is due at the same time.
        self.arrivals: dict[tuple[Kind, int], collections.deque[tuple[int, int]]] = {
            (kind, s): collections.deque() for kind in (self.backward, Kind.F) for s in held
        }
        depth = placement.depth
        self.due = {
            (kind, s): s % depth
            if kind is Kind.F
            else depth + _SLOTS[kind] * (depth - 1 - s % depth)
            for kind, s in self.arrivals
        }
        self.pace = 3 * len(held) / placement.num_copies / 2
        self.limits = limits
        self.copy_of = {s: s // depth for s in held}
        self.in_flight = [0] * placement.num_copies
        self.weights: collections.deque[Action] = collections.deque()
        self.order: list[Action] = []
        self.free_at = 0

    def start(self, now: int) -> Action | None:
        """Starts the most urgent pass and returns it; None if busy or nothing is ready."""
        if self.free_at > now:
            return None
        action = self._choose(now)
        if action is None:
            return None
        self.order.append(action)
        self.free_at = now + _SLOTS[action.kind]
        if action.kind is Kind.F:
            self.in_flight[self.copy_of[action.virtual_stage]] += 1
        elif action.kind is Kind.B:
            self.weights.append(Action(action.virtual_stage, Kind.W, action.microbatch))
        else:
            self.in_flight[self.copy_of[action.virtual_stage]] -= 1
        return action

    def _choose(self, now: int) -> Action | None:
        best, earliest = None, float("inf")
        for (kind, s), queue in self.arrivals.items():
            if not queue or queue[0][0] > now:
                continue
            if kind is Kind.F and self.in_flight[self.copy_of[s]] >= self.limits[s]:
                continue
            due = self.due[kind, s] + self.pace * queue[0][1]
            if due < earliest:
                best, earliest = (kind, s), due
        if best is not None:
            return Action(best[1], best[0], self.arrivals[best].popleft()[1])
        return self.weights.popleft() if self.weights else None
