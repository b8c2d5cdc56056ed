"""The lock-step clock at work: fills a tick of a given length on each stage.

`Engine` fills ticks with layers of the passes that are ready; `jaxpipe.schedule.search.tick_search`
decides how long the ticks are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxpipe.schedule.actions import Action, Kind, Schedule, Slice
from jaxpipe.schedule.simulate import Costs

_NONE = -1
"""No pass."""
_ROUNDING = 1e-9
"""Lengths are sums of layer costs: smaller differences, relative to F+B+W, count as none."""

_F, _B, _W = range(3)
"""The kinds of action, as indices."""


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of the stages; passes are those of `Schedule.number`.

    Args:
      schedule: placement and microbatches; its orders are not read.
      costs: of every virtual stage, however many layers it has.
      forwards: per stage, its queues of forwards. A stage starts the head of the first queue whose
        head is ready.
      backwards: likewise.
      weights: per stage, the order of its W; None for that of its B.
      limits: per stage and queue of forwards, in flight below which the queue may start another.
      fused: the passes whose backward is BW.
      ranks: for F, B and W, per pass, its place in its stage's order; None if there is no order
        yet.
    """

    schedule: Schedule
    layer_counts: tuple[int, ...]
    costs: tuple[Costs, ...]
    forwards: Sequence[Sequence[Sequence[int]]]
    backwards: Sequence[Sequence[Sequence[int]]]
    weights: Sequence[Sequence[int]] | None
    limits: Sequence[Sequence[int]]
    fused: frozenset[int] = frozenset()
    ranks: tuple[Sequence[int], ...] | None = None


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


Counts = tuple[int, int, int]
"""Layers of F, B and W that a stage runs in one tick."""


class Choice(NamedTuple):
    """One tick of a plan, and the ticks before it: per stage, the layers it runs."""

    counts: tuple[Counts, ...]
    before: Choice | None


@dataclasses.dataclass(slots=True)
class Progress:
    """What the stages have done before a tick. Lists of lists are by kind: F, B, W."""

    heads: list[list[int]]  # by queue; of W by stage
    running: list[list[int]]  # by stage: the pass under way
    layers: list[list[int]]  # by stage: layers of it that are done
    done: list[bytearray]  # by pass
    pending: list[tuple[int, ...]]  # by stage: W to come, where Work does not order them
    in_flight: list[int]  # by stage
    busy: Sequence[float]  # by stage
    time: float
    critical: float  # time in F and B, all stages together
    left: int  # layers to run
    choice: Choice | None

    def copy(self) -> Progress:
        return Progress(
            [*map(list.copy, self.heads)],
            [*map(list.copy, self.running)],
            [*map(list.copy, self.layers)],
            [*map(bytearray.copy, self.done)],
            self.pending[:],
            self.in_flight[:],
            self.busy,
            self.time,
            self.critical,
            self.left,
            self.choice,
        )

    def work_done(self) -> tuple[tuple[int, ...], ...]:
        """Equal for two of them in which the same work is done."""
        return tuple(map(tuple, (*self.heads, *self.layers)))


class Ready(NamedTuple):
    """What a stage can run in the next tick, by kind: F, B, W.

    Args:
      passes: the passes, or `_NONE`.
      queues: of F and B, the queues of the passes that would start, or `_NONE`.
      rooms: the layers left to run; for W those whose B has run.
      costs: of a layer.
    """

    passes: tuple[int, int, int]
    queues: tuple[int, int, int]
    rooms: tuple[int, int, int]
    costs: tuple[float, float, float]


class Engine:
    """Runs ticks of given lengths."""

    def __init__(self, work: Work) -> None:
        self.work = work
        schedule, placement, costs = work.schedule, work.schedule.placement, work.costs
        self.stages, depth = range(placement.num_stages), placement.depth
        places = [schedule.place(number) for number in range(schedule.num_passes)]
        self.layers = [work.layer_counts[s] for s, _ in places]
        per_layer: list[list[float]] = [[], [], []]
        for number, ((s, _), count) in enumerate(zip(places, self.layers, strict=True)):
            backward = Kind.BW if number in work.fused else Kind.B
            for column, kind in zip(per_layer, (Kind.F, backward, Kind.W), strict=True):
                column.append(costs[s].of(kind) / count)
        self.costs = tuple(per_layer)
        self.largest = largest(costs)
        self.message = self.largest.message if len(self.stages) > 1 else 0.0
        self.inputs = (
            [[(_F, schedule.number(s - 1, i))] if s % depth else [] for s, i in places],
            [
                [(_F, number)] + [(_B, schedule.number(s + 1, i))] * ((s + 1) % depth > 0)
                for number, (s, i) in enumerate(places)
            ],
        )
        # A backward frees memory: nothing limits it.
        unlimited = [[math.inf] * len(queues) for queues in work.backwards]
        self.queues = _numbered(work.forwards, work.limits), _numbered(work.backwards, unlimited)
        self.limits = [min(row) for row in work.limits]
        self.longest_layer = max(map(max, self.costs))
        self.rounding = _ROUNDING * (self.largest.f + self.largest.b + self.largest.w)

    def start(self) -> Progress:
        """Nothing is done."""
        passes, p = len(self.layers), len(self.stages)
        sizes = [sum(map(len, queues)) for queues in self.queues]
        return Progress(
            heads=[[0] * size for size in (*sizes, p)],
            running=[[_NONE] * p for _ in range(3)],
            layers=[[0] * p for _ in range(3)],
            done=[bytearray(passes) for _ in self.queues],
            pending=[()] * p,
            in_flight=[0] * p,
            busy=[0.0] * p,
            time=0.0,
            critical=0.0,
            left=3 * sum(self.layers) - sum(self.layers[number] for number in self.work.fused),
            choice=None,
        )

    def ready(self, progress: Progress, d: int) -> Ready:
        """What stage d can run now."""
        forward, backward = progress.running[_F][d], progress.running[_B][d]
        forward_queue = backward_queue = _NONE
        if forward == _NONE:
            forward, forward_queue = self._next(progress, d, _F)
        if backward == _NONE:
            backward, backward_queue = self._next(progress, d, _B)
        weights = self._weights(progress, d, backward)
        (f_layers, b_layers, w_layers), room = progress.layers, 0
        if weights != _NONE:
            if progress.done[_B][weights]:
                room = self.layers[weights] - w_layers[d]
            elif weights == backward:
                room = b_layers[d] - w_layers[d]
        return Ready(
            (forward, backward, weights),
            (forward_queue, backward_queue, _NONE),
            (
                0 if forward == _NONE else self.layers[forward] - f_layers[d],
                0 if backward == _NONE else self.layers[backward] - b_layers[d],
                room,
            ),
            (self.costs[_F][forward], self.costs[_B][backward], self.costs[_W][weights]),
        )

    def _next(self, progress: Progress, d: int, kind: int) -> tuple[int, int]:
        """The F or B that a stage can start, and its queue."""
        inputs, done = self.inputs[kind], progress.done
        for queue, numbers, limit in self.queues[kind][d]:
            head = progress.heads[kind][queue]
            if head < len(numbers) and progress.in_flight[d] < limit:
                number = numbers[head]
                for read, needed in inputs[number]:
                    if not done[read][needed]:
                        break
                else:
                    return number, queue
        return _NONE, _NONE

    def _weights(self, progress: Progress, d: int, backward: int) -> int:
        """The next W of a stage, which may be that of the backward it can run."""
        if self.work.weights is not None:
            order, head = self.work.weights[d], progress.heads[_W][d]
            return order[head] if head < len(order) else _NONE
        if progress.pending[d]:
            return progress.pending[d][0]
        return _NONE if backward in self.work.fused else backward

    def claims(self, progress: Progress, d: int, policy: Policy, ready: Ready) -> Sequence[int]:
        """Which kinds may fill a tick of stage d, most urgent first."""
        forward, backward, weights = ready.passes
        ranks = self.work.ranks
        if policy.in_order and ranks is not None:
            claims = [kind for kind in (_F, _B, _W) if ready.passes[kind] != _NONE]
            claims.sort(key=lambda kind: ranks[kind][ready.passes[kind]])
            # Layers of W that B has only now made possible come last.
            return claims if weights == _NONE else (*claims, _W)
        filler = () if weights == _NONE else (_W,)
        if forward == _NONE:
            blocked = progress.in_flight[d] >= self.limits[d]
            critical = () if backward == _NONE else (_B,)
            return (*filler, *critical, *filler) if blocked else (*critical, *filler)
        if backward == _NONE:
            return (_F, *filler)
        under_way = progress.running[_F][d] != _NONE, progress.running[_B][d] != _NONE
        if under_way[0] != under_way[1]:
            forward_first = under_way[0]
        elif ranks is not None:
            forward_first = ranks[_F][forward] < ranks[_B][backward]
        else:
            forward_first = policy.first is Kind.F
        return (_F if forward_first else _B, *filler)

    def fill(self, length: float, ready: Ready, claims: Sequence[int]) -> Counts:
        """Counts the layers, by kind, that a stage runs in a tick of at most this length, which is
        at least `longest_layer`."""
        rooms, costs, counts = list(ready.rooms), ready.costs, [0, 0, 0]
        left = length + self.rounding
        for kind in claims:
            cost = costs[kind]
            count = int(left / cost)
            if count > rooms[kind]:
                count = rooms[kind]
            if count:
                counts[kind] += count
                rooms[kind] -= count
                left -= count * cost
                if kind == _B and ready.passes[_W] == ready.passes[_B]:
                    rooms[_W] += count
        return counts[_F], counts[_B], counts[_W]

    def tick(
        self, progress: Progress, ready: Sequence[Ready], counts: Sequence[Counts]
    ) -> Progress:
        """What is done after a tick in which each stage runs what `fill` gave it. The times stay
        those before the tick."""
        new = progress.copy()
        done: list[tuple[bytearray, int]] = []
        for d in self.stages:
            for kind, count in enumerate(counts[d]):
                if count:
                    self._run(new, d, ready[d], kind, count, done)
        # What this tick computes is there for other stages, and other kinds, from the next on.
        for flags, number in done:
            flags[number] = 1
        return new

    def _run(
        self,
        new: Progress,
        d: int,
        ready: Ready,
        kind: int,
        count: int,
        done: list[tuple[bytearray, int]],
    ) -> None:
        number, queue = ready.passes[kind], ready.queues[kind]
        fused = kind == _B and number in self.work.fused
        if queue != _NONE:
            new.heads[kind][queue] += 1
            if kind == _F:
                new.in_flight[d] += 1
            elif self.work.weights is None and not fused:
                new.pending[d] += (number,)
        layers, running = new.layers[kind], new.running[kind]
        layers[d] += count
        new.left -= count
        if layers[d] < self.layers[number]:
            running[d] = number
            return
        layers[d], running[d] = 0, _NONE
        if kind == _W or fused:
            new.in_flight[d] -= 1
        if kind == _W:
            new.heads[_W][d] += 1
            new.pending[d] = new.pending[d][1:]
        else:
            done.append((new.done[kind], number))

    def slices(
        self, progress: Progress, d: int, ready: Ready, counts: Counts, tick: int
    ) -> Iterator[Slice]:
        """The work of stage d in a tick."""
        for kind, count in enumerate(counts):
            if count:
                number, done = ready.passes[kind], progress.layers[kind][d]
                backward = Kind.BW if number in self.work.fused else Kind.B
                s, i = self.work.schedule.place(number)
                # F goes up through the layers, the others go down.
                hi = done + count if kind == _F else self.layers[number] - done
                yield Slice(tick, Action(s, (Kind.F, backward, Kind.W)[kind], i), hi - count, hi)


def largest(costs: Sequence[Costs]) -> Costs:
    """The largest cost of every kind."""
    return Costs(*map(max, zip(*((c.f, c.b, c.w, c.message) for c in costs), strict=True)))


def _numbered(
    stages: Sequence[Sequence[Sequence[int]]], limits: Sequence[Sequence[float]]
) -> list[list[tuple[int, Sequence[int], float]]]:
    """Per stage, its queues as (place among the queues of all stages, passes, limit)."""
    places = itertools.count()
    return [
        [(next(places), queue, limit) for queue, limit in zip(queues, row, strict=True)]
        for queues, row in zip(stages, limits, strict=True)
    ]
