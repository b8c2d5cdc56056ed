"""Tabu search on the orders of the stages, for the free-running clock.

A schedule ends when its longest chain of actions does. Only a swap of two neighbors on that chain
can shorten it, so those are the moves; the best one is made even if nothing gets shorter, and is
not undone for a while. This is how job shops are scheduled.

Source: Nowicki and Smutnicki, "A fast taboo search algorithm for the job shop problem", 1996; the
estimate of a move is Taillard's, "Parallel taboo search techniques for the job shop scheduling
problem", 1994.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import random
from collections.abc import Iterator, Sequence

from jaxpipe.schedule.actions import HELD, Action, Kind, Schedule, dependencies
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.simulate import Costs

_KINDS = (Kind.F, Kind.B, Kind.W)
_NONE = -1
"""No action."""
_ROUNDING = 1e-9
"""Share of the work of a microbatch; smaller differences count as none."""
_TENURE, _SPREAD = 8, 12
"""Number of moves for which a swap is not undone, and up to how many more."""
_STALLED, _KICKS = 100, 8
"""Number of moves without a better schedule after which the search goes back to the best one, and
the number of random swaps that it may make there."""


class NumberedActions:
    """The actions of a schedule as numbers, with what each waits for.

    An action's number says its kind, virtual stage and microbatch, in that order.
    """

    def __init__(
        self, placement: Placement, num_microbatches: int, costs: Sequence[Costs], cap: int
    ) -> None:
        self.cap, self.num_microbatches = cap, num_microbatches
        virtual_stages, microbatches = range(placement.num_virtual_stages), range(num_microbatches)
        self.actions = [
            Action(s, kind, i) for kind in _KINDS for s in virtual_stages for i in microbatches
        ]
        self.numbers = {action: number for number, action in enumerate(self.actions)}
        self.durations = [costs[a.virtual_stage].of(a.kind) for a in self.actions]
        self.stages = [placement.stages[a.virtual_stage] for a in self.actions]
        self.held = [HELD[a.kind] for a in self.actions]
        self.inputs: list[list[tuple[int, float]]] = [[] for _ in self.actions]
        self.readers: list[list[tuple[int, float]]] = [[] for _ in self.actions]
        self.rounding = _ROUNDING * math.fsum(cost.f + cost.b + cost.w for cost in costs)
        for number, action in enumerate(self.actions):
            for needed in dependencies(action, num_virtual_stages=len(virtual_stages)):
                other = self.numbers[needed]
                lag = self.durations[other]
                if self.stages[other] != self.stages[number]:
                    lag += costs[needed.virtual_stage].message
                self.inputs[number].append((other, lag))
                self.readers[other].append((number, lag))


def improve(
    schedule: Schedule, costs: Sequence[Costs], *, cap: int, moves: int, bound: float
) -> Schedule:
    """Looks for split orders that end sooner on the free-running clock.

    Args:
      costs: costs of every virtual stage.
      cap: the most chunks in flight on a stage.
      moves: how many swaps to make.
      bound: no schedule ends before this.
    """
    work = NumberedActions(schedule.placement, schedule.num_microbatches, costs, cap)
    rows = [[work.numbers[action] for action in order] for order in schedule.orders]
    rows = _Search(work, rows).best(moves, bound)
    orders = tuple(tuple(work.actions[number] for number in row) for row in rows)
    return dataclasses.replace(schedule, orders=orders, peak_in_flight=None)


class _Search:
    """The state of a tabu search: the orders of all stages, and the best ones so far."""

    def __init__(self, work: NumberedActions, rows: list[list[int]]) -> None:
        self.work, self.best_rows = work, rows
        # `random` is the same on every Python since 3.2; `randrange` is not.
        self.random = random.Random(0).random
        self._go_back(kicks=0)

    def best(self, moves: int, bound: float) -> list[list[int]]:
        """The rows of the schedule that ends first."""
        work, earliest, since = self.work, math.inf, 0
        for move in range(moves):
            starts, order, after = self._starts()
            if len(order) < len(starts):
                # A random swap made stages wait for each other.
                self._go_back(kicks=0)
                continue
            tails = self._tails(order, after)
            makespan = max(map(operator.add, starts, tails))
            if makespan < earliest - work.rounding:
                earliest, since = makespan, move
                self.best_rows = [row[:] for row in self.rows]
                if makespan <= bound + work.rounding:
                    break
            swap = self._best_move(starts, tails, makespan, earliest, move)
            if swap is None or move - since > _STALLED:
                since = move
                self._go_back(kicks=2 + self._below(_KICKS))
                continue
            first, second = swap
            self.barred[first, second] = move + _TENURE + self._below(_SPREAD)
            self._swap(first, second)
        return self.best_rows

    def _below(self, number: int) -> int:
        return int(self.random() * number)

    def _go_back(self, *, kicks: int) -> None:
        """Returns to the best schedule and makes some random swaps."""
        size, held = len(self.work.actions), self.work.held
        self.rows, self.barred = [row[:] for row in self.best_rows], dict[tuple[int, int], int]()
        self.places, self.in_flight = [0] * size, [0] * size
        for row in self.rows:
            counts = itertools.accumulate(held[number] for number in row)
            for place, (number, count) in enumerate(zip(row, counts, strict=True)):
                self.places[number], self.in_flight[number] = place, count
        for _ in range(kicks):
            row = self.rows[self._below(len(self.rows))]
            place = self._below(len(row) - 1)
            if self._may_swap(row[place], row[place + 1]):
                self._swap(row[place], row[place + 1])

    def _may_swap(self, first: int, second: int) -> bool:
        """Whether neighbors may change places, as far as their stage can tell."""
        work, held = self.work, self.work.held
        same_queue = first // work.num_microbatches == second // work.num_microbatches
        raises = held[first] < 0 < held[second] and self.in_flight[first] + 2 > work.cap
        return not (same_queue or raises or any(n == first for n, _ in work.inputs[second]))

    def _swap(self, first: int, second: int) -> None:
        """Makes neighbors change places."""
        row, place = self.rows[self.work.stages[first]], self.places[first]
        row[place], row[place + 1] = second, first
        self.places[first], self.places[second] = place + 1, place
        both = self.in_flight[second]
        self.in_flight[first], self.in_flight[second] = both, both - self.work.held[first]

    def _starts(self) -> tuple[list[float], list[int], list[int]]:
        """Computes when every action starts, an order in which none waits for a later one, and what
        follows each on its stage; the order is shorter if stages wait for each other."""
        durations, readers = self.work.durations, self.work.readers
        starts, after = [0.0] * len(durations), [_NONE] * len(durations)
        waits = [*map(len, self.work.inputs)]
        for row in self.rows:
            for number, follower in itertools.pairwise(row):
                after[number] = follower
                waits[follower] += 1
        ready = [number for number, count in enumerate(waits) if not count]
        order = []
        while ready:
            number = ready.pop()
            order.append(number)
            start = starts[number]
            for reader, lag in readers[number]:
                if start + lag > starts[reader]:
                    starts[reader] = start + lag
                waits[reader] -= 1
                if not waits[reader]:
                    ready.append(reader)
            reader = after[number]
            if reader != _NONE:
                if start + durations[number] > starts[reader]:
                    starts[reader] = start + durations[number]
                waits[reader] -= 1
                if not waits[reader]:
                    ready.append(reader)
        return starts, order, after

    def _tails(self, order: Sequence[int], after: Sequence[int]) -> list[float]:
        """Computes the time from every action's start to the end of all that waits for it."""
        durations, readers = self.work.durations, self.work.readers
        tails = [0.0] * len(durations)
        for number in reversed(order):
            tail = duration = durations[number]
            for reader, lag in readers[number]:
                if tails[reader] + lag > tail:
                    tail = tails[reader] + lag
            reader = after[number]
            if reader != _NONE and tails[reader] + duration > tail:
                tail = tails[reader] + duration
            tails[number] = tail
        return tails

    def _best_move(
        self, starts: list[float], tails: list[float], makespan: float, earliest: float, move: int
    ) -> tuple[int, int] | None:
        """Finds the swap on the longest chain after which this chain is shortest; a random one if
        there are several, None if there is none."""
        best, rounding = math.inf, self.work.rounding
        swaps: list[tuple[int, int]] = []
        for first, second in self._critical(starts, tails, makespan):
            estimate = self._estimate(first, second, starts, tails)
            if self.barred.get((second, first), -1) >= move and estimate >= earliest - rounding:
                continue
            if estimate < best - rounding:
                best, swaps = estimate, []
            if estimate <= best + rounding:
                swaps.append((first, second))
        return swaps[self._below(len(swaps))] if swaps else None

    def _critical(
        self, starts: list[float], tails: list[float], makespan: float
    ) -> Iterator[tuple[int, int]]:
        """Yields neighbors that follow each other on a longest chain and may change places."""
        durations, rounding = self.work.durations, self.work.rounding
        for row in self.rows:
            critical = [starts[number] + tails[number] >= makespan - rounding for number in row]
            for place, (first, second) in enumerate(itertools.pairwise(row)):
                if critical[place] and critical[place + 1]:
                    gap = starts[second] - starts[first] - durations[first]
                    if gap <= rounding and self._may_swap(first, second):
                        yield first, second

    def _estimate(self, first: int, second: int, starts: list[float], tails: list[float]) -> float:
        """A lower bound on the longest chain through two neighbors after they change places."""
        work, row = self.work, self.rows[self.work.stages[first]]
        durations, place = work.durations, self.places[first]
        start = starts[row[place - 1]] + durations[row[place - 1]] if place else 0.0
        for number, lag in work.inputs[second]:
            start = max(start, starts[number] + lag)
        later = start + durations[second]
        for number, lag in work.inputs[first]:
            later = max(later, starts[number] + lag)
        tail = durations[first] + (tails[row[place + 2]] if place + 2 < len(row) else 0.0)
        for number, lag in work.readers[first]:
            tail = max(tail, tails[number] + lag)
        longer = durations[second] + tail
        for number, lag in work.readers[second]:
            longer = max(longer, tails[number] + lag)
        return max(start + longer, later + tail)
