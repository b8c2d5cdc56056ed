"""The event machine of the free-running clock, on which orders are made.

Each stage starts a pass as soon as it is free and its own rule chooses one of those that are ready.
The result of a pass arrives at its readers, which may then start in turn.
"""

from __future__ import annotations

import abc
import heapq
import math
from collections.abc import Callable, Iterable, Sequence


class Stage(abc.ABC):
    """One stage: the inputs it has received and the passes it has started.

    A stage numbers the kinds of pass that it runs, such as the forward of its first chunk. Passes
    of one kind never overtake each other: the n-th to start is of microbatch n.

    Args:
      durations: how long a pass of each kind takes.

    Attributes:
      arrivals: per kind, when the input of its n-th pass arrives, rising.
      done: per kind, how many passes have started.
      order: the kinds of the passes in the order in which they have started.
      started_at: when the first pass started; infinite before.
      free_at: when the latest pass ends.
    """

    def __init__(self, durations: Sequence[float]) -> None:
        self.durations = durations
        self.arrivals: list[list[float]] = [[] for _ in durations]
        self.done = [0] * len(durations)
        self.order: list[int] = []
        self.started_at, self.free_at = math.inf, 0.0

    @abc.abstractmethod
    def choose(self, now: float) -> int | None:
        """Chooses the kind of pass that this stage, which is free, starts now; None to wait."""

    def is_ready(self, kind: int, now: float) -> bool:
        """Whether the input of the next pass of a kind has arrived."""
        arrivals, done = self.arrivals[kind], self.done[kind]
        return done < len(arrivals) and arrivals[done] <= now

    def start(self, kind: int, now: float) -> None:
        """Starts the next pass of a kind."""
        self.order.append(kind)
        self.done[kind] += 1
        self.started_at = min(self.started_at, now)
        self.free_at = now + self.durations[kind]


def run(
    stages: Sequence[Stage],
    readers: Callable[[int, int], Iterable[tuple[int, int]]],
    *,
    message: float = 0.0,
) -> None:
    """Runs the stages until none of them can start anything more.

    Args:
      stages: the stages, with the arrivals of the inputs from outside the pipeline.
      readers: given a stage and a kind of pass, the stages and kinds that read its result.
      message: how long a message between two stages takes.
    """
    events = [(0.0, d) for d in range(len(stages))]
    while events:
        now, d = heapq.heappop(events)
        stage = stages[d]
        if stage.free_at > now:
            continue
        kind = stage.choose(now)
        if kind is None:
            continue
        stage.start(kind, now)
        heapq.heappush(events, (stage.free_at, d))
        for reader, read in readers(d, kind):
            arrival = stage.free_at
            if reader != d:
                arrival += message
                heapq.heappush(events, (arrival, reader))
            stages[reader].arrivals[read].append(arrival)
