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
import math
import operator
import random
from collections.abc import Iterable, Iterator, Sequence

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
        self.cap, self.num_stages = cap, placement.num_stages
        self.num_microbatches = num_microbatches
        self.passes = placement.num_virtual_stages * num_microbatches
        self.actions = [
            Action(s, kind, i)
            for kind in _KINDS
            for s in range(placement.num_virtual_stages)
            for i in range(num_microbatches)
        ]
        self.durations = [costs[a.virtual_stage].of(a.kind) for a in self.actions]
        self.stages = [placement.stages[a.virtual_stage] for a in self.actions]
        self.held = [HELD[a.kind] for a in self.actions]
        self.inputs: list[list[tuple[int, float]]] = []
        self.readers: list[list[tuple[int, float]]] = [[] for _ in self.actions]
        self.rounding = _ROUNDING * math.fsum(cost.f + cost.b + cost.w for cost in costs)
        for number, action in enumerate(self.actions):
            waits = []
            for needed in dependencies(action, num_virtual_stages=placement.num_virtual_stages):
                other = self.number(needed)
                lag = self.durations[other]
                if self.stages[other] != self.stages[number]:
                    lag += costs[needed.virtual_stage].message
                waits.append((other, lag))
                self.readers[other].append((number, lag))
            self.inputs.append(waits)

    def number(self, action: Action) -> int:
        return (
            _KINDS.index(action.kind) * self.passes
            + action.virtual_stage * self.num_microbatches
            + action.microbatch
        )

    def may_swap(self, first: int, second: int, in_flight: int) -> bool:
        """Whether neighbors in an order may change places, as far as their stage can tell.

        Args:
          in_flight: after the first.
        """
        same_queue = first // self.num_microbatches == second // self.num_microbatches
        raises = self.held[first] < 0 < self.held[second] and in_flight + 2 > self.cap
        return not (same_queue or raises or any(n == first for n, _ in self.inputs[second]))


@dataclasses.dataclass(slots=True)
class _Orders:
    """The order of every stage as a list and, per action, as links."""

    work: NumberedActions
    rows: list[list[int]]
    places: list[int]
    before: list[int]
    after: list[int]
    in_flight: list[int]

    @classmethod
    def of(cls, work: NumberedActions, rows: Iterable[Sequence[int]]) -> _Orders:
        size = len(work.actions)
        orders = cls(work, [], [0] * size, [_NONE] * size, [_NONE] * size, [0] * size)
        for row in map(list, rows):
            orders.rows.append(row)
            in_flight = 0
            for place, (number, before, after) in enumerate(
                zip(row, (_NONE, *row), (*row[1:], _NONE), strict=False)
            ):
                in_flight += work.held[number]
                orders.places[number], orders.in_flight[number] = place, in_flight
                orders.before[number], orders.after[number] = before, after
        return orders

    def swap(self, first: int, second: int) -> None:
        """Makes neighbors change places."""
        row, place = self.rows[self.work.stages[first]], self.places[first]
        row[place], row[place + 1] = second, first
        self.places[first], self.places[second] = place + 1, place
        before, after = self.before[first], self.after[second]
        self.before[second], self.after[second] = before, first
        self.before[first], self.after[first] = second, after
        if before != _NONE:
            self.after[before] = second
        if after != _NONE:
            self.before[after] = first
        held = self.work.held
        both = self.in_flight[second]
        self.in_flight[first], self.in_flight[second] = both, both - held[first]

    def starts(self) -> tuple[list[float], list[int]]:
        """Computes when every action starts, and an order in which none waits for a later one; the
        order is shorter if stages wait for each other."""
        work, after = self.work, self.after
        durations, readers = work.durations, work.readers
        starts = [0.0] * len(durations)
        waits = [
            len(inputs) + (before != _NONE)
            for inputs, before in zip(work.inputs, self.before, strict=True)
        ]
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
        return starts, order

    def tails(self, order: Sequence[int]) -> list[float]:
        """Computes the time from every action's start to the end of all that waits for it."""
        durations, readers, after = self.work.durations, self.work.readers, self.after
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


def improve(
    schedule: Schedule, costs: Sequence[Costs], *, cap: int, moves: int, bound: float
) -> Schedule:
    """Looks for orders that end sooner on the free-running clock.

    Args:
      schedule: split, synchronous, of one copy of the model.
      costs: costs of every virtual stage.
      cap: the most chunks in flight on a stage.
      moves: how many swaps to make.
      bound: no schedule ends before this.
    """
    work = NumberedActions(schedule.placement, schedule.num_microbatches, costs, cap)
    rows = [[work.number(action) for action in order] for order in schedule.orders]
    rows = _Search(work, rows).best(moves, bound)
    orders = tuple(tuple(work.actions[number] for number in row) for row in rows)
    return dataclasses.replace(schedule, orders=orders, peak_in_flight=None)


class _Search:
    """The state of a tabu search."""

    def __init__(self, work: NumberedActions, rows: list[list[int]]) -> None:
        self.work, self.rows = work, rows
        self.orders = _Orders.of(work, rows)
        # `random` is the same on every Python since 3.2; `randrange` is not.
        self.random = random.Random(0).random
        self.barred: dict[tuple[int, int], int] = {}

    def best(self, moves: int, bound: float) -> list[list[int]]:
        """The rows of the schedule that ends first."""
        work, earliest, since = self.work, math.inf, 0
        for move in range(moves):
            starts, order = self.orders.starts()
            if len(order) < len(starts):
                # A random swap made stages wait for each other.
                self._go_back(kicks=0)
                continue
            tails = self.orders.tails(order)
            makespan = max(map(operator.add, starts, tails))
            if makespan < earliest - work.rounding:
                earliest, since = makespan, move
                self.rows = [row[:] for row in self.orders.rows]
                if makespan <= bound + work.rounding:
                    break
            swap = self._best_move(starts, tails, makespan, earliest, move)
            if swap is None or move - since > _STALLED:
                since = move
                self._go_back(kicks=2 + self._below(_KICKS))
                continue
            first, second = swap
            self.barred[first, second] = move + _TENURE + self._below(_SPREAD)
            self.orders.swap(first, second)
        return self.rows

    def _below(self, number: int) -> int:
        return int(self.random() * number)

    def _go_back(self, *, kicks: int) -> None:
        """Returns to the best schedule and makes some random swaps."""
        work = self.work
        self.orders = _Orders.of(work, self.rows)
        self.barred.clear()
        for _ in range(kicks):
            row = self.orders.rows[self._below(work.num_stages)]
            place = self._below(len(row) - 1)
            first, second = row[place], row[place + 1]
            if work.may_swap(first, second, self.orders.in_flight[first]):
                self.orders.swap(first, second)

    def _best_move(
        self, starts: list[float], tails: list[float], makespan: float, earliest: float, move: int
    ) -> tuple[int, int] | None:
        """Finds the swap on the longest chain after which this chain is shortest; a random one if
        there are several, None if there is none."""
        best = math.inf
        swaps: list[tuple[int, int]] = []
        rounding = self.work.rounding
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
        work, late = self.work, makespan - self.work.rounding
        for row in self.orders.rows:
            critical = [starts[number] + tails[number] >= late for number in row]
            for place in range(len(row) - 1):
                if critical[place] and critical[place + 1]:
                    first, second = row[place], row[place + 1]
                    gap = starts[second] - starts[first] - work.durations[first]
                    if gap <= work.rounding and work.may_swap(
                        first, second, self.orders.in_flight[first]
                    ):
                        yield first, second

    def _estimate(self, first: int, second: int, starts: list[float], tails: list[float]) -> float:
        """A lower bound on the longest chain through two neighbors after they change places."""
        work, orders = self.work, self.orders
        durations, before, after = work.durations, orders.before[first], orders.after[second]
        start = 0.0 if before == _NONE else starts[before] + durations[before]
        for number, lag in work.inputs[second]:
            start = max(start, starts[number] + lag)
        later = start + durations[second]
        for number, lag in work.inputs[first]:
            later = max(later, starts[number] + lag)
        tail = durations[first] + (0.0 if after == _NONE else tails[after])
        for number, lag in work.readers[first]:
            tail = max(tail, tails[number] + lag)
        longer = durations[second] + tail
        for number, lag in work.readers[second]:
            longer = max(longer, tails[number] + lag)
        return max(start + longer, later + tail)
