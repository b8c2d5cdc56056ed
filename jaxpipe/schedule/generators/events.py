"""The event machine of the free-running clock, on which orders are made.

Each stage starts a pass as soon as it is free and its own rule chooses one of those that are ready.
The result of a pass arrives at its readers, which may then start in turn. With `dispatch` this is
the pass that a `Rule` says is due first.
"""

import abc
import collections
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxpipe.schedule.actions import Action, Kind, nth_backward
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.simulate import Costs

StagePass = tuple[Kind, int]
"""A kind of action and its virtual stage. A stage has one W for all its virtual stages: weight
gradients are computed first-in first-out."""


def stage_passes(virtual_stages: Sequence[int], *, fused: bool) -> list[StagePass]:
    """Lists F of a stage's chunks, backwards from the last to the first and, if split, W."""
    backward = Kind.BW if fused else Kind.B
    passes = [(Kind.F, s) for s in virtual_stages] + [(backward, s) for s in virtual_stages[::-1]]
    return passes if fused else [*passes, (Kind.W, virtual_stages[0])]


class Stage(abc.ABC):
    """One stage: the inputs it has received and the passes it has started.

    A pass is called by its number in ``passes``. Its n-th start is of microbatch n.

    Args:
      passes: what the stage runs; W is the last.

    Attributes:
      arrivals: for each pass, when the input of its n-th start arrives, rising.
      done: for each pass, how often it has started.
      order: the passes in the order in which they have started.
      free_at: when the latest pass ends.
    """

    def __init__(self, passes: Sequence[StagePass], durations: Sequence[float]) -> None:
        self.passes, self.durations = passes, durations
        self.arrivals: list[list[float]] = [[] for _ in passes]
        self.done = [0] * len(passes)
        self.order: list[int] = []
        self.free_at = 0.0

    @abc.abstractmethod
    def choose(self, now: float) -> int | None:
        """Chooses the pass that this stage, which is free, starts now; None to wait."""

    def is_ready(self, number: int, now: float) -> bool:
        """Whether the input of the next start of a pass has arrived."""
        arrivals, done = self.arrivals[number], self.done[number]
        return done < len(arrivals) and arrivals[done] <= now

    def start(self, number: int, now: float) -> None:
        self.order.append(number)
        self.done[number] += 1
        self.free_at = now + self.durations[number]


def run_stages(
    stages: Sequence[Stage],
    placement: Placement,
    num_microbatches: int,
    *,
    message: float = 0.0,
    num_slices: int = 1,
) -> None:
    """Runs the stages of a placement until none of them can start anything more.

    All microbatches can enter at once, slice after slice; a message between two stages takes
    ``message``. The backwards of a sequence begin when its last slice has gone forward.
    """
    readers = _readers(stages, placement)
    entrance = stages[placement.stages[0]]
    entrance.arrivals[entrance.passes.index((Kind.F, 0))] = [0.0] * (num_microbatches * num_slices)
    events = [(0.0, d) for d in range(len(stages))]
    while events:
        now, d = heapq.heappop(events)
        stage = stages[d]
        if stage.free_at > now:
            continue
        number = stage.choose(now)
        if number is None:
            continue
        stage.start(number, now)
        heapq.heappush(events, (stage.free_at, d))
        for reader, read in readers[d][number]:
            arrival, count = stage.free_at, 1
            if stage.passes[number][0] is Kind.F is not stages[reader].passes[read][0]:
                count = 0 if stage.done[number] % num_slices else num_slices
            if reader != d:
                arrival += message
                heapq.heappush(events, (arrival, reader))
            stages[reader].arrivals[read] += [arrival] * count


def _readers(stages: Sequence[Stage], placement: Placement) -> list[list[list[tuple[int, int]]]]:
    """Finds the stages and passes that read the result of every stage's passes."""
    places = {
        (Kind.F if kind is Kind.F else Kind.B, s): (d, number)
        for d, stage in enumerate(stages)
        for number, (kind, s) in enumerate(stage.passes)
        if kind is not Kind.W
    }

    def of(d: int, stage: Stage, kind: Kind, s: int) -> Iterator[tuple[int, int]]:
        if kind is Kind.F:
            yield places[(Kind.F, s + 1) if s + 1 < placement.num_virtual_stages else (Kind.B, s)]
        elif kind is not Kind.W:
            if s:
                yield places[Kind.B, s - 1]
            if kind is Kind.B:
                yield d, len(stage.passes) - 1

    return [
        [[*of(d, stage, kind, s)] for kind, s in stage.passes] for d, stage in enumerate(stages)
    ]


def actions(
    passes: Sequence[StagePass], order: Iterable[int], *, num_slices: int = 1
) -> Iterator[Action]:
    """Yields the actions of a stage from the numbers of its passes in order (`Stage.order`)."""
    microbatches = [0] * len(passes)
    pending: collections.deque[tuple[int, int]] = collections.deque()
    for number in order:
        kind, s = passes[number]
        if kind is Kind.W:
            s, i = pending.popleft()
        else:
            i = microbatches[number]
            microbatches[number] += 1
            if kind is not Kind.F:
                i = nth_backward(i, num_slices)
            if kind is Kind.B:
                pending.append((s, i))
        yield Action(s, kind, i)


# Orders by rules.


class Rule(NamedTuple):
    """Numbers that say when passes are due, and which of them wait.

    Args:
      pace: time from one microbatch to the next, in a stage's work per microbatch. The slower, the
        more a forward has to wait for backwards of earlier microbatches.
      lead: how much earlier backwards are due than after the last forward, in the work of a chunk.
      patience: a stage waits for a more urgent pass that arrives within this share of its duration.
      frees: W goes first where memory keeps a more urgent forward waiting.
      reserves: a forward leaves room for those that are due before it, of earlier microbatches on
        their way back to the stage.
      staggers: a forward leaves room for one in each later chunk of the stage, which is enough to
        finish all microbatches; without, what is in flight decides.
    """

    pace: float
    lead: float
    patience: float = 0.0
    frees: bool = False
    reserves: bool = False
    staggers: bool = False


def dispatch(
    placement: Placement,
    num_microbatches: int,
    costs: Sequence[Costs],
    cap: int,
    rule: Rule,
    *,
    fused: bool = False,
) -> tuple[tuple[Action, ...], ...]:
    """Runs the pipeline event by event and records what each stage does.

    Args:
      cap: the most chunks in flight on a stage, at least those of one microbatch.
    """
    due = _due(placement, costs, rule, Kind.BW if fused else Kind.B)
    stages = [
        _DueStage(placement, own_stages, costs, cap, rule, due)
        for own_stages in placement.virtual_stages
    ]
    message = max(cost.message for cost in costs)
    run_stages(stages, placement, num_microbatches, message=message)
    size = (2 if fused else 3) * placement.num_chunks * num_microbatches
    done = all(sum(stage.done) == size for stage in stages)
    assert done, "the earliest microbatch always finds room"
    return tuple(tuple(actions(stage.passes, stage.order)) for stage in stages)


def _due(
    placement: Placement, costs: Sequence[Costs], rule: Rule, backward: Kind
) -> dict[StagePass, float]:
    """Computes when the first microbatch's passes, but for W, are due: their starts if none
    waited."""
    time, due = 0.0, {}
    stages = placement.stages
    crosses = [a != b for a, b in itertools.pairwise(stages)]
    for s, cost in enumerate(costs):
        due[Kind.F, s] = time
        time += cost.f + (cost.message if s < len(crosses) and crosses[s] else 0)
    time -= rule.lead * max(cost.f + cost.b + cost.w for cost in costs)
    for s, cost in reversed([*enumerate(costs)]):
        due[backward, s] = time
        time += cost.of(backward) + (cost.message if s and crosses[s - 1] else 0)
    return due


class _DueStage(Stage):
    """A stage that starts the pass due first, and W if there is nothing else to do."""

    def __init__(
        self,
        placement: Placement,
        own_stages: Sequence[int],
        costs: Sequence[Costs],
        cap: int,
        rule: Rule,
        due: dict[StagePass, float],
    ) -> None:
        fused = (Kind.BW, own_stages[0]) in due
        # Backwards first: they win where a forward is due at the same time.
        kinds = Kind.BW if fused else Kind.B, Kind.F
        passes = [(kind, s) for kind in kinds for s in own_stages]
        self.due = [due[place] for place in passes]
        passes += [] if fused else [(Kind.W, own_stages[0])]
        # The duration of W is set when it starts: chunks may differ.
        self.durations: list[float]
        super().__init__(passes, [costs[s].of(kind) for kind, s in passes])
        self.num_chunks, self.cap, self.rule, self.fused = len(own_stages), cap, rule, fused
        self.waits = [rule.patience * duration for duration in self.durations]
        work = [costs[s].f + costs[s].b + costs[s].w for s in range(len(costs))]
        self.pace = rule.pace * math.fsum(work) / placement.num_stages
        self.weights = [costs[s].w for s in own_stages]
        self.pending: collections.deque[int] = collections.deque()  # chunks whose W is next
        self.in_flight = 0

    def choose(self, now: float) -> int | None:
        best, earliest, blocked = None, math.inf, math.inf
        pace, num_chunks = self.pace, self.num_chunks
        rows = zip(self.due, self.waits, self.done, self.arrivals, strict=False)
        for number, (due, wait, done, arrivals) in enumerate(rows):
            if done == len(arrivals) or arrivals[done] > now + wait:
                continue
            due += pace * done
            if due >= earliest:
                continue
            if number < num_chunks or self._has_room(number):
                best, earliest = number, due
            elif arrivals[done] <= now:
                blocked = min(blocked, due)
        if self.pending and (best is None or (self.rule.frees and blocked < earliest)):
            return len(self.due)
        if best is None:
            return None
        return best if self.is_ready(best, now) else None

    def _has_room(self, number: int) -> bool:
        """Whether a forward may start and still leave a way to finish all microbatches.

        They can always be finished one after another, the earliest first, if each finds room for
        its later chunks when those before it are gone.
        """
        v, cap = self.num_chunks, self.cap
        if self.rule.staggers:
            return self.in_flight + 2 * v - 1 - number < cap
        reserved = self._more_urgent(number) if self.rule.reserves else 0
        if self.in_flight + reserved >= cap:
            return False
        backwards, forwards = self.done[:v], self.done[v : 2 * v]
        forwards[number - v] += 1
        for first in forwards[1:]:
            needed = 0
            for started, finished in zip(forwards, backwards, strict=True):
                needed += started - max(finished, first) if started > first else 1
            if first < forwards[0] and needed > cap:
                return False
        return True

    def _more_urgent(self, number: int) -> int:
        """Counts the forwards, of earlier microbatches on their way back to this stage, that are
        due before the next start of a forward."""
        v, done = self.num_chunks, self.done
        due = self.due[number] + self.pace * done[number]
        return sum(
            self.due[other] + self.pace * i < due
            for other in range(v + 1, 2 * v)
            for i in range(done[other], min(done[other - 1], done[number]))
        )

    def start(self, number: int, now: float) -> None:
        v = self.num_chunks
        if number == 2 * v:
            self.durations[number] = self.weights[self.pending.popleft()]
            self.in_flight -= 1
        elif number >= v:
            self.in_flight += 1
        elif self.fused:
            self.in_flight -= 1
        else:
            self.pending.append(number)
        super().start(number, now)
