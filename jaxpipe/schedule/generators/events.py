"""The event machine of the free-running clock, on which orders are made.

Each stage starts a pass as soon as it is free and its own rule chooses one of those that are ready.
The result of a pass arrives at its readers, which may then start in turn.
"""

from __future__ import annotations

import abc
import collections
import heapq
from collections.abc import Iterable, Iterator, Sequence

from jaxpipe.schedule.actions import Action, Kind, nth_backward
from jaxpipe.schedule.placement import Placement

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
      durations: how long each pass takes.

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
        """Starts a pass."""
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
