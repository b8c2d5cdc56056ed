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

    Of the passes that are ready, the earliest microbatch goes first. Split: B before F before W,
    which fills what gaps remain. Fused: forwards and backwards alternate where both are ready,
    since backwards alone would open gaps of one slot, in which no other backward fits.

    Args:
      placement: any.
      num_microbatches: m.
      limits: per virtual stage, how many chunks its stage may hold, of the same copy of the model,
        before the virtual stage starts another forward. They must grow by 1 or more from chunk to
        chunk of a stage: so the microbatch that is farthest always finds room, and nothing stops.
      fused: run B and W of a microbatch as one action.

    Returns:
      The orders.
    """
    stages = [_Stage(held, limits, placement, fused) for held in placement.virtual_stages]
    for first in range(0, placement.num_virtual_stages, placement.depth):
        entrance = stages[placement.stages[first]]
        entrance.forwards[first].extend((i, 0) for i in range(num_microbatches))
    events = [(0, d) for d in range(len(stages))]
    while events:
        now, d = heapq.heappop(events)
        action = stages[d].start(now)
        if action is None:
            continue
        end = stages[d].free_at
        heapq.heappush(events, (end, d))
        s = action.virtual_stage
        if action.kind is Kind.W:
            continue
        if action.kind is Kind.F and (s + 1) % placement.depth:
            reader = placement.stages[s + 1]
            stages[reader].forwards[s + 1].append((action.microbatch, end))
        elif action.kind is Kind.F:
            reader = d
            stages[d].backwards[s].append((action.microbatch, end))
        elif s % placement.depth:
            reader = placement.stages[s - 1]
            stages[reader].backwards[s - 1].append((action.microbatch, end))
        else:
            continue
        if reader != d:
            heapq.heappush(events, (end, reader))
    return tuple(tuple(stage.order) for stage in stages)


_Queue = collections.deque[tuple[int, int]]
"""Microbatches that have arrived at a virtual stage, each with its time; earlier ones first."""


class _Stage:
    def __init__(
        self, held: Sequence[int], limits: Sequence[int], placement: Placement, fused: bool
    ) -> None:
        self.forwards: dict[int, _Queue] = {s: collections.deque() for s in held}
        self.backwards: dict[int, _Queue] = {s: collections.deque() for s in held}
        self.weights: collections.deque[Action] = collections.deque()
        self.limits = limits
        self.copy_of = {s: s // placement.depth for s in held}
        self.in_flight = [0] * placement.num_copies
        self.backward = Kind.BW if fused else Kind.B
        self.order: list[Action] = []
        self.free_at = 0

    def start(self, now: int) -> Action | None:
        """Starts the most urgent pass and returns it; None if busy or nothing is ready."""
        if self.free_at > now:
            return None
        action = self._choose(now)
        if action is not None:
            self.order.append(action)
            self.free_at = now + _SLOTS[action.kind]
            if action.kind is Kind.F:
                self.in_flight[self.copy_of[action.virtual_stage]] += 1
            elif action.kind is not Kind.B:
                self.in_flight[self.copy_of[action.virtual_stage]] -= 1
            else:
                self.weights.append(Action(action.virtual_stage, Kind.W, action.microbatch))
        return action

    def _choose(self, now: int) -> Action | None:
        if self.order and self.order[-1].kind is Kind.BW:
            action = self._forward(now) or self._backward(now)
        else:
            action = self._backward(now) or self._forward(now)
        if action is None and self.weights:
            action = self.weights.popleft()
        return action

    def _forward(self, now: int) -> Action | None:
        with_room = {
            s: queue
            for s, queue in self.forwards.items()
            if self.in_flight[self.copy_of[s]] < self.limits[s]
        }
        return _take(Kind.F, with_room, now)

    def _backward(self, now: int) -> Action | None:
        return _take(self.backward, self.backwards, now)


def _take(kind: Kind, queues: dict[int, _Queue], now: int) -> Action | None:
    ready = [(queue[0][0], s) for s, queue in queues.items() if queue and queue[0][1] <= now]
    if not ready:
        return None
    microbatch, s = min(ready)
    queues[s].popleft()
    return Action(s, kind, microbatch)
