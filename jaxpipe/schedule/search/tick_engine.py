"""The lock-step clock at work: fills a tick of a given length on each stage.

`Engine` fills ticks with layers of the passes that are ready; `jaxpipe.schedule.search.tick_search`
decides how long the ticks are.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.simulate import Costs

_NONE = -1
"""No pass."""
_ROUNDING = 1e-9
"""Lengths are sums of layer costs: smaller differences, relative to F+B+W, count as none."""

_F, _B, _W = range(3)


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of the stages; a pass of microbatch i on virtual stage s has the number s*m + i.

    Args:
      placement: which stage holds which virtual stage.
      num_microbatches: m.
      layer_counts: layers of every virtual stage, at least 1 each.
      costs: of one chunk, however many layers it has.
      forwards: per stage, its queues of forwards. A stage starts the head of the first queue whose
        head is ready.
      backwards: likewise.
      weights: per stage, the order of its W; None for that of its B.
      limits: per stage and queue of forwards, in flight below which the queue may start another.
      fused: the passes whose backward is BW.
      ranks: for F, B and W, per pass, its place in its stage's order; None if there is no order
        yet.
    """

    placement: Placement
    num_microbatches: int
    layer_counts: tuple[int, ...]
    costs: Costs
    forwards: Sequence[Sequence[Sequence[int]]]
    backwards: Sequence[Sequence[Sequence[int]]]
    weights: Sequence[Sequence[int]] | None
    limits: Sequence[Sequence[int]]
    fused: frozenset[int] = frozenset()
    ranks: tuple[Sequence[int], Sequence[int], Sequence[int]] | None = None


class Policy(NamedTuple):
    """How a stage fills a tick.

    Args:
      in_order: by `Work.ranks`. Otherwise one of F and B, then W, which goes first only if
        memory keeps a forward waiting.
      first: of F and B, which runs if both are ready, neither is under way and there are no
        ranks.
    """

    in_order: bool
    first: Kind = Kind.B


class Choice(NamedTuple):
    """One tick of a plan, and the ticks before it: per stage, the layers it runs."""

    counts: tuple[tuple[int, int, int], ...]
    before: Choice | None


class Cell(NamedTuple):
    """The part of one pass that one stage runs in one tick: layers lo up to hi."""

    tick: int
    kind: Kind
    number: int
    lo: int
    hi: int


@dataclasses.dataclass(slots=True)
class State:
    """The progress of the stages between two ticks. Lists are by stage; `*_heads` by queue."""

    forward_done: bytearray  # by pass
    backward_done: bytearray  # by pass
    forward_heads: list[int]
    backward_heads: list[int]
    weight_heads: list[int]
    pending: list[tuple[int, ...]]  # W to come, where Work does not order them
    forward: list[int]  # the pass under way
    forward_layers: list[int]  # layers of it that are done
    backward: list[int]
    backward_layers: list[int]
    weight_layers: list[int]
    in_flight: list[int]
    busy: list[float]
    time: float
    critical: float  # time in F and B, all stages together
    left: int  # actions to finish
    choice: Choice | None

    def copy(self) -> State:
        return State(
            self.forward_done[:],
            self.backward_done[:],
            self.forward_heads[:],
            self.backward_heads[:],
            self.weight_heads[:],
            self.pending[:],
            self.forward[:],
            self.forward_layers[:],
            self.backward[:],
            self.backward_layers[:],
            self.weight_layers[:],
            self.in_flight[:],
            self.busy[:],
            *(self.time, self.critical, self.left, self.choice),
        )

    def progress(self) -> tuple[tuple[int, ...], ...]:
        """Equal for two states in which the same work is done."""
        lists = (
            *(self.forward_heads, self.backward_heads, self.weight_heads),
            *(self.forward_layers, self.backward_layers, self.weight_layers),
        )
        return tuple(map(tuple, lists))


class Ready(NamedTuple):
    """The passes a stage can run in the next tick.

    Args:
      forward, backward, weights: the passes, or `_NONE`.
      forward_queue, backward_queue: the queues of the passes that would start.
      rooms: for F, B and W, the layers left to run; for W those whose B has run.
      costs: for F, B and W, of a layer.
    """

    forward: int
    forward_queue: int
    backward: int
    backward_queue: int
    weights: int
    rooms: tuple[int, int, int]
    costs: tuple[float, float, float]


Counts = tuple[int, int, int]
"""Layers of F, B and W that a stage runs in one tick."""


class Engine:
    """Runs ticks of given lengths.

    Args:
      work: what to run.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        placement, m, costs = work.placement, work.num_microbatches, work.costs
        self.m, self.stages = m, range(placement.num_stages)
        self.layers = [count for count in work.layer_counts for _ in range(m)]
        self.costs = (
            [costs.f / count for count in self.layers],
            [
                costs.of(Kind.BW if number in work.fused else Kind.B) / count
                for number, count in enumerate(self.layers)
            ],
            [costs.w / count for count in self.layers],
        )
        self.message = costs.message if len(self.stages) > 1 else 0.0
        virtual = [number // m % placement.depth for number in range(len(self.layers))]
        self.enters = [s == 0 for s in virtual]
        self.leaves = [s == placement.depth - 1 for s in virtual]
        self.forwards = _numbered(work.forwards, work.limits)
        # A backward frees memory: nothing limits it.
        self.backwards = _numbered(work.backwards, [[0] * len(row) for row in work.backwards])
        self.limits = [min(row) for row in work.limits]
        self.longest_layer = max(map(max, self.costs))
        self.rounding = _ROUNDING * (costs.f + costs.b + costs.w)

    def start(self) -> State:
        """Nothing is done."""
        passes, p = len(self.layers), len(self.stages)
        return State(
            forward_done=bytearray(passes),
            backward_done=bytearray(passes),
            forward_heads=[0] * sum(map(len, self.forwards)),
            backward_heads=[0] * sum(map(len, self.backwards)),
            weight_heads=[0] * p,
            pending=[()] * p,
            forward=[_NONE] * p,
            forward_layers=[0] * p,
            backward=[_NONE] * p,
            backward_layers=[0] * p,
            weight_layers=[0] * p,
            in_flight=[0] * p,
            busy=[0.0] * p,
            time=0.0,
            critical=0.0,
            left=3 * passes - len(self.work.fused),
            choice=None,
        )

    def ready(self, state: State, d: int) -> Ready:
        """The forward and backward that stage d can run now."""
        forward, backward, forward_queue, backward_queue = (
            *(state.forward[d], state.backward[d]),
            *(_NONE, _NONE),
        )
        if forward == _NONE:
            for queue, numbers, limit in self.forwards[d]:
                head = state.forward_heads[queue]
                if head < len(numbers) and state.in_flight[d] < limit:
                    number = numbers[head]
                    if self.enters[number] or state.forward_done[number - self.m]:
                        forward, forward_queue = number, queue
                        break
        if backward == _NONE:
            for queue, numbers, _ in self.backwards[d]:
                head = state.backward_heads[queue]
                if head < len(numbers):
                    number = numbers[head]
                    if state.forward_done[number] and (
                        self.leaves[number] or state.backward_done[number + self.m]
                    ):
                        backward, backward_queue = number, queue
                        break
        weights = self._weights(state, d, backward)
        room = 0
        if weights != _NONE:
            if state.backward_done[weights]:
                room = self.layers[weights] - state.weight_layers[d]
            elif weights == backward:
                room = state.backward_layers[d] - state.weight_layers[d]
        rooms = (
            0 if forward == _NONE else self.layers[forward] - state.forward_layers[d],
            0 if backward == _NONE else self.layers[backward] - state.backward_layers[d],
            room,
        )
        costs = self.costs[_F][forward], self.costs[_B][backward], self.costs[_W][weights]
        return Ready(forward, forward_queue, backward, backward_queue, weights, rooms, costs)

    def _weights(self, state: State, d: int, backward: int) -> int:
        """The next W of a stage, which may be that of the backward it can run."""
        if self.work.weights is not None:
            order, head = self.work.weights[d], state.weight_heads[d]
            return order[head] if head < len(order) else _NONE
        if state.pending[d]:
            return state.pending[d][0]
        return _NONE if backward in self.work.fused else backward

    def claims(self, state: State, d: int, policy: Policy, ready: Ready) -> Sequence[int]:
        """Which kinds may fill a tick of stage d, most urgent first."""
        forward, backward, weights = ready.forward, ready.backward, ready.weights
        ranks = self.work.ranks
        if policy.in_order and ranks is not None:
            numbers = (forward, backward, weights)
            claims = [kind for kind in (_F, _B, _W) if numbers[kind] != _NONE]
            claims.sort(key=lambda kind: ranks[kind][numbers[kind]])
            # Layers of W that B has only now made possible come last.
            return claims if weights == _NONE else (*claims, _W)
        filler = () if weights == _NONE else (_W,)
        if forward == _NONE:
            blocked = state.in_flight[d] >= self.limits[d]
            critical = () if backward == _NONE else (_B,)
            return (*filler, *critical, *filler) if blocked else (*critical, *filler)
        if backward == _NONE:
            return (_F, *filler)
        under_way = state.forward[d] != _NONE, state.backward[d] != _NONE
        if under_way[0] != under_way[1]:
            forward_first = under_way[0]
        elif ranks is not None:
            forward_first = ranks[_F][forward] < ranks[_B][backward]
        else:
            forward_first = policy.first is Kind.F
        return (_F if forward_first else _B, *filler)

    def fill(self, length: float, ready: Ready, claims: Sequence[int]) -> Counts:
        """The layers a stage runs in a tick of at most this length.

        Args:
          length: of the tick, at least `longest_layer`.
          ready: of `ready`.
          claims: of `claims`.
        """
        rooms, counts = list(ready.rooms), [0, 0, 0]
        left = length + self.rounding
        for kind in claims:
            cost = ready.costs[kind]
            count = int(left / cost)
            if count > rooms[kind]:
                count = rooms[kind]
            if count:
                counts[kind] += count
                rooms[kind] -= count
                left -= count * cost
                if kind == _B and ready.weights == ready.backward:
                    rooms[_W] += count
        return counts[_F], counts[_B], counts[_W]

    def tick(self, state: State, ready: Sequence[Ready], counts: Sequence[Counts]) -> State:
        """The state after a tick in which each stage runs what `fill` gave it."""
        new = state.copy()
        done: list[tuple[bytearray, int]] = []
        longest = 0.0
        for d in self.stages:
            stage, (num_forward, num_backward, num_weights) = ready[d], counts[d]
            used = 0.0
            if num_forward:
                used = num_forward * stage.costs[_F]
                self._run_forward(new, d, stage, num_forward, done)
            if num_backward:
                used += num_backward * stage.costs[_B]
                self._run_backward(new, d, stage, num_backward, done)
            new.critical += used
            if num_weights:
                used += num_weights * stage.costs[_W]
                self._run_weights(new, d, stage.weights, num_weights)
            new.busy[d] += used
            if used > longest:
                longest = used
        # What this tick computes is there for other stages, and other kinds, from the next on.
        for flags, number in done:
            flags[number] = 1
        new.time += longest + self.message
        return new

    def _run_forward(
        self, new: State, d: int, ready: Ready, count: int, done: list[tuple[bytearray, int]]
    ) -> None:
        number = ready.forward
        if ready.forward_queue != _NONE:
            new.forward_heads[ready.forward_queue] += 1
            new.in_flight[d] += 1
        new.forward[d], new.forward_layers[d] = number, new.forward_layers[d] + count
        if new.forward_layers[d] == self.layers[number]:
            new.forward[d], new.forward_layers[d] = _NONE, 0
            new.left -= 1
            done.append((new.forward_done, number))

    def _run_backward(
        self, new: State, d: int, ready: Ready, count: int, done: list[tuple[bytearray, int]]
    ) -> None:
        number = ready.backward
        fused = number in self.work.fused
        if ready.backward_queue != _NONE:
            new.backward_heads[ready.backward_queue] += 1
            if self.work.weights is None and not fused:
                new.pending[d] += (number,)
        new.backward[d], new.backward_layers[d] = number, new.backward_layers[d] + count
        if new.backward_layers[d] == self.layers[number]:
            new.backward[d], new.backward_layers[d] = _NONE, 0
            new.left -= 1
            new.in_flight[d] -= fused
            done.append((new.backward_done, number))

    def _run_weights(self, new: State, d: int, number: int, count: int) -> None:
        new.weight_layers[d] += count
        if new.weight_layers[d] == self.layers[number]:
            new.weight_layers[d] = 0
            new.weight_heads[d] += 1
            new.pending[d] = new.pending[d][1:]
            new.left -= 1
            new.in_flight[d] -= 1

    def cells(
        self, state: State, d: int, ready: Ready, counts: Counts, tick: int
    ) -> Iterator[Cell]:
        """The work of stage d in a tick, as cells of a table."""
        num_forward, num_backward, num_weights = counts
        if num_forward:
            lo = state.forward_layers[d]
            yield Cell(tick, Kind.F, ready.forward, lo, lo + num_forward)
        if num_backward:
            kind = Kind.BW if ready.backward in self.work.fused else Kind.B
            hi = self.layers[ready.backward] - state.backward_layers[d]
            yield Cell(tick, kind, ready.backward, hi - num_backward, hi)
        if num_weights:
            hi = self.layers[ready.weights] - state.weight_layers[d]
            yield Cell(tick, Kind.W, ready.weights, hi - num_weights, hi)


def _numbered(
    stages: Sequence[Sequence[Sequence[int]]], limits: Sequence[Sequence[int]]
) -> list[list[tuple[int, Sequence[int], int]]]:
    """Per stage, its queues as (place among the queues of all stages, passes, limit)."""
    places = itertools.count()
    return [
        [(next(places), queue, limit) for queue, limit in zip(queues, row, strict=True)]
        for queues, row in zip(stages, limits, strict=True)
    ]
