"""The search for orders that end early on the free-running clock, under a memory limit.

A few numbers say when passes are due, and every stage starts the pass that is due first, if memory
allows (`jaxpipe.schedule.generators.events.Rule`). No rule is the best for all costs and memory
limits, but one of a few hundred nearly always is close. The best orders by rules, and given ones,
are then improved by tabu search. So are orders of few microbatches, in which one is then repeated
as often as it takes: a change of what is repeated would take as many swaps.

A schedule ends when its longest chain of actions does. Only a swap of two neighbors on that chain
can shorten it, so those are the moves; the best one is made even if nothing gets shorter, and is
not undone for a while. This is how job shops are scheduled. On its way the search may keep a chunk
more than memory allows, at a price that follows from how long it has done so.

Source: Nowicki and Smutnicki, "A fast taboo search algorithm for the job shop problem", 1996; the
estimate of a move is Taillard's, "Parallel taboo search techniques for the job shop scheduling
problem", 1994.
"""

import bisect
import collections
import dataclasses
import itertools
import math
import operator
import random
from collections.abc import Iterable, Iterator, Sequence

from jaxpipe.schedule.actions import HELD, Action, Kind, Schedule, dependencies
from jaxpipe.schedule.check import peak_in_flight
from jaxpipe.schedule.generators.events import Rule, dispatch
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.simulate import Costs, makespan, simulate

_PACES = (0.75, 0.5, 1.3, 1.0, 1.7, 0.3, 0.0)
_LEADS = (0.0, 1.0, 2.0, 4.0)
_PATIENCE = (0.5, 0.0, 0.99)
_FREES_RESERVES = ((True, True), (True, False), (False, True), (False, False))
"""Values of a rule's numbers, first those of the rules that ended first most often in 220 cases."""
_RULE_SHARE, _FINAL_SHARE, _REPEATED_SHARE = 0.2, 0.1, 0.3
"""Shares of the work for rules, for the best of them once all microbatches are there, and for
orders of few microbatches that are repeated; what is left is for local search."""
_STEADY, _NUM_REPEATED, _NUM_CUTS = 3, 3, 8
"""How many microbatches more than fit in memory show what is repeated, from how many orders of so
few a local search starts, and from how many times on each of them is repeated."""
_ORDERED, _MOVED = 8.0, 1.6
"""Microseconds that it takes to order an action by a rule, and per action to time a move."""
_FEWEST_MOVES, _MOST_MOVES = 30, 3_000
_NUM_STARTS = 8
"""Number of orders from which local search starts; more moves from fewer find less."""

_NONE = -1
"""No action."""
_ROUNDING = 1e-9
"""Share of the work of a microbatch; smaller differences count as none."""
_TENURE, _SPREAD = 8, 12
"""Number of moves for which a swap is not undone, and up to how many more."""
_PATIENT, _CHEAPER, _DEARER = 5, 0.7, 1.5
"""After so many moves in a row within the cap (or beyond it), what an excess costs becomes cheaper
(or dearer) by this factor."""
_STALLED, _KICKS = 300, 8
"""Number of moves without a better schedule after which the search goes back to the best one, and
the number of random swaps that it may make there."""


def search_orders(
    placement: Placement,
    num_microbatches: int,
    *,
    costs: Sequence[Costs],
    cap: int,
    seeds: Iterable[Schedule] = (),
    bound: float = 0.0,
    seconds: float = 4.0,
) -> list[Schedule]:
    """Finds orders that end early on the free-running clock, the earliest first. Deterministic.

    Args:
      costs: costs of every virtual stage.
      cap: the most chunks in flight on a stage, at least those of one microbatch.
      seeds: split schedules on this placement, within the cap.
      bound: no schedule ends before this.
      seconds: about the time that this takes on one core of a server of 2021. Actions are counted,
        not time, so that the result does not depend on the machine.
    """
    budget = 1e6 * seconds
    schedules = [*seeds, *_by_rules(placement, num_microbatches, costs, cap, budget)]
    few = -(-cap // placement.num_chunks) + _STEADY
    repeating = _REPEATED_SHARE if few < num_microbatches else 0.0
    schedules += _by_repeating(placement, num_microbatches, few, costs, cap, budget * repeating)
    timed = sorted(((makespan(s, costs), k) for k, s in enumerate(schedules)))
    # Orders that end at the same time mostly lead to the same one.
    distinct = {time: (time, schedules[k]) for time, k in reversed(timed)}
    best = sorted(distinct.values(), key=lambda item: item[0])[:_NUM_STARTS]
    size = 3 * placement.num_virtual_stages * num_microbatches
    moving = budget * (1 - _RULE_SHARE - _FINAL_SHARE - repeating)
    moves = min(_MOST_MOVES, int(moving / (_MOVED * size * len(best))))
    if moves < _FEWEST_MOVES:
        moves = 0
    improved: list[tuple[float, Schedule]] = []
    for time, schedule in best:
        if improved and improved[-1][0] <= bound * (1 + 1e-9):
            break
        if time > bound and moves:
            schedule = improve(schedule, costs, cap=cap, moves=moves, bound=bound)
            time = makespan(schedule, costs)
        improved.append((time, schedule))
    improved.sort(key=lambda item: item[0])
    return [schedule for _, schedule in improved]


def _by_rules(
    placement: Placement,
    num_microbatches: int,
    costs: Sequence[Costs],
    cap: int,
    microseconds: float,
) -> Iterator[Schedule]:
    """Yields the best schedules by rules; three rounds of the pipeline show how good a rule is."""
    trial = min(num_microbatches, 3 * placement.num_stages)
    size = 3 * placement.num_virtual_stages * trial

    def ordered(rule: Rule, count: int) -> Schedule:
        orders = dispatch(placement, count, costs, cap, rule)
        return Schedule("auto", placement, count, orders)

    found = dict[float, tuple[float, Rule, Schedule]]()
    affordable = max(1, int(microseconds * _RULE_SHARE / (_ORDERED * size)))
    for rule in rules(placement)[:affordable]:
        schedule = ordered(rule, trial)
        time = makespan(schedule, costs)
        found.setdefault(time, (time, rule, schedule))
    tried = sorted(found.values(), key=lambda item: item[:2])
    if trial == num_microbatches:
        yield from (schedule for _, _, schedule in tried[: 4 * _NUM_STARTS])
    else:
        whole = 3 * placement.num_virtual_stages * num_microbatches
        affordable = int(microseconds * _FINAL_SHARE / (_ORDERED * whole))
        number = max(1, min(2 * _NUM_STARTS, affordable))
        yield from (ordered(rule, num_microbatches) for _, rule, _ in tried[:number])


def _by_repeating(
    placement: Placement,
    num_microbatches: int,
    few: int,
    costs: Sequence[Costs],
    cap: int,
    microseconds: float,
) -> Iterator[Schedule]:
    """Yields improved orders of few microbatches, with what they do for one of them repeated."""
    size = 3 * placement.num_virtual_stages * few
    affordable = rules(placement)[: int(microseconds / 2 / (_ORDERED * size))]
    if not affordable:
        return
    made = {dispatch(placement, few, costs, cap, rule) for rule in affordable}
    tried = [Schedule("auto", placement, few, orders) for orders in made]
    moves = min(_MOST_MOVES, int(microseconds / 2 / (_MOVED * size * _NUM_REPEATED)))
    for schedule in sorted(tried, key=lambda s: (makespan(s, costs), s.orders))[:_NUM_REPEATED]:
        improved = improve(schedule, costs, cap=cap, moves=moves, bound=0.0)
        repeated = [*_repeated(improved, costs, num_microbatches)]
        fits = [schedule for schedule in repeated if max(peak_in_flight(schedule)) <= cap]
        yield from sorted(fits, key=lambda schedule: makespan(schedule, costs))[:1]


def _repeated(
    schedule: Schedule, costs: Sequence[Costs], num_microbatches: int
) -> Iterator[Schedule]:
    """Yields schedules in which stages repeat what they do from some time on: each of their passes
    once, for any microbatch. Tries a few times, since a stage may not be in its rhythm yet."""
    more, period = num_microbatches - schedule.num_microbatches, 3 * schedule.num_chunks
    starts = [[event.start for event in row] for row in simulate(schedule, costs).rows]
    times = sorted({start for row in starts for start in row})
    cuts = {tuple(bisect.bisect_left(row, time) for row in starts): None for time in times}

    def repeats(order: Sequence[Action], first: int) -> bool:
        passes = {(a.virtual_stage, a.kind) for a in order[first : first + period]}
        return len(passes) == period

    steady = [cut for cut in cuts if all(map(repeats, schedule.orders, cut))]
    for cut in steady[:: -(-len(steady) // _NUM_CUTS) or 1]:
        longer = (
            _numbered((*order[:first], *order[first : first + period] * more, *order[first:]))
            for order, first in zip(schedule.orders, cut, strict=True)
        )
        yield dataclasses.replace(
            schedule,
            orders=tuple(longer),
            num_microbatches=num_microbatches,
            peak_in_flight=None,
        )


def _numbered(order: Iterable[Action]) -> tuple[Action, ...]:
    """Numbers the microbatches of every pass of a stage in turn."""
    counts = collections.Counter[tuple[int, Kind]]()
    numbered = []
    for action in order:
        place = action.virtual_stage, action.kind
        numbered.append(Action(*place, counts[place]))
        counts[place] += 1
    return tuple(numbered)


def rules(placement: Placement) -> list[Rule]:
    """Lists rules, first those whose numbers are all among the best; a pace matters least."""
    pairs = [pair for pair in _FREES_RESERVES if placement.num_chunks > 1 or not pair[1]]
    ranked = [
        (a + 2 * (b + c + d), Rule(pace, lead, patience, *pair))
        for a, pace in enumerate(_PACES)
        for b, lead in enumerate(_LEADS)
        for c, patience in enumerate(_PATIENCE)
        for d, pair in enumerate(pairs)
    ]
    return [rule for _, rule in sorted(ranked, key=lambda item: item[0])]


# Tabu search.


def improve(
    schedule: Schedule, costs: Sequence[Costs], *, cap: int, moves: int, bound: float
) -> Schedule:
    """Looks for orders of a split schedule that end sooner on the free-running clock, in so many
    swaps; other arguments as for `search_orders`."""
    search = _TabuSearch(schedule, costs, cap)
    orders = search.orders(search.best(moves, bound))
    return dataclasses.replace(schedule, orders=orders, peak_in_flight=None)


class NumberedActions:
    """Actions of a split schedule by number, which says their kind, virtual stage and microbatch,
    in that order.

    Attributes:
      held: chunks that an action adds to those in flight.
      inputs: what an action reads, and how long after its start that is there.
      needed: what it reads.
      queues: the same for all microbatches of a pass, which run in turn.
    """

    def __init__(self, schedule: Schedule, costs: Sequence[Costs]) -> None:
        placement, m = schedule.placement, schedule.num_microbatches
        kinds = Kind.F, Kind.B, Kind.W
        passes = [(s, kind) for kind in kinds for s in range(placement.num_virtual_stages)]
        self.actions = [Action(*place, i) for place in passes for i in range(m)]
        self.numbers = {action: number for number, action in enumerate(self.actions)}
        self.queues = [queue for queue in range(len(passes)) for _ in range(m)]
        self.stages, self.held = list[int](), list[int]()
        self.durations, self.inputs = list[float](), list[list[tuple[int, float]]]()
        for s, kind in passes:
            read, stage = list[tuple[int, float]](), placement.stages[s]
            for needed in dependencies(Action(s, kind, 0), num_virtual_stages=len(costs)):
                cost = costs[needed.virtual_stage]
                lag = 0.0 if placement.stages[needed.virtual_stage] == stage else cost.message
                read.append((self.numbers[needed], cost.of(needed.kind) + lag))
            self.stages += [stage] * m
            self.held += [HELD[kind]] * m
            self.durations += [costs[s].of(kind)] * m
            self.inputs += [[(other + i, lag) for other, lag in read] for i in range(m)]
        self.needed = [{other for other, _ in inputs} for inputs in self.inputs]
        self.rows = [[self.numbers[action] for action in order] for order in schedule.orders]

    def in_turn(self, first: int, second: int) -> bool:
        """Whether two actions of a stage cannot change places: the second reads the first, or is
        the same pass of a later microbatch."""
        return self.queues[first] == self.queues[second] or first in self.needed[second]

    def orders(self, rows: Iterable[Iterable[int]]) -> tuple[tuple[Action, ...], ...]:
        return tuple(tuple(self.actions[number] for number in row) for row in rows)


class _TabuSearch(NumberedActions):
    """The orders of all stages, and the best ones so far."""

    def __init__(self, schedule: Schedule, costs: Sequence[Costs], cap: int) -> None:
        super().__init__(schedule, costs)
        self.cap = cap
        self.rounding = _ROUNDING * math.fsum(cost.f + cost.b + cost.w for cost in costs)
        self.readers: list[list[tuple[int, float]]] = [[] for _ in self.actions]
        for number, inputs in enumerate(self.inputs):
            for other, lag in inputs:
                self.readers[other].append((number, lag))
        self.best_rows = self.rows
        # `random` is the same on every Python since 3.2; `randrange` is not.
        self.random = random.Random(0).random
        self._go_back(kicks=0)

    def best(self, moves: int, bound: float) -> list[list[int]]:
        """The rows of the schedule that ends first."""
        earliest, since = math.inf, 0
        most = max(self.durations)
        self.price, within = most, 0
        for move in range(moves):
            starts, order = self._starts()
            if len(order) < len(starts):
                # A random swap made stages wait for each other.
                self._go_back(kicks=0)
                continue
            tails = self._tails(order)
            makespan = max(map(operator.add, starts, tails))
            excess = sum(count - self.cap for count in self.in_flight if count > self.cap)
            fits = not excess
            within = max(within, 0) + 1 if fits else min(within, 0) - 1
            if abs(within) > _PATIENT:
                factor, within = (_CHEAPER if fits else _DEARER), 0
                self.price = min(max(self.price * factor, most / 50), most * 20)
            if fits and makespan < earliest - self.rounding:
                earliest, since = makespan, move
                self.best_rows = [row[:] for row in self.rows]
                if makespan <= bound + self.rounding:
                    break
            paid = earliest - self.price * excess
            swap = self._best_move(starts, tails, makespan, paid, move)
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
        self.rows, self.barred = [row[:] for row in self.best_rows], dict[tuple[int, int], int]()
        self.places, self.in_flight = [0] * len(self.actions), [0] * len(self.actions)
        self.after, self.waits = [_NONE] * len(self.actions), [*map(len, self.inputs)]
        for row in self.rows:
            for number, follower in itertools.pairwise(row):
                self.after[number] = follower
                self.waits[follower] += 1
            counts = itertools.accumulate(self.held[number] for number in row)
            for place, (number, count) in enumerate(zip(row, counts, strict=True)):
                self.places[number], self.in_flight[number] = place, count
        for _ in range(kicks):
            row = self.rows[self._below(len(self.rows))]
            place = self._below(len(row) - 1)
            if self._may_swap(row[place], row[place + 1], self.cap):
                self._swap(row[place], row[place + 1])

    def _may_swap(self, first: int, second: int, most: int) -> bool:
        """Whether neighbors may change places, as far as their stage can tell, with at most so many
        chunks in flight between them."""
        before = self.in_flight[first]
        after = before - self.held[first] + self.held[second]
        if after > most and after > before:
            return False
        return not self.in_turn(first, second)

    def _excess(self, first: int, second: int) -> int:
        """How many more chunks beyond the cap a stage keeps between two neighbors that swap."""
        before = self.in_flight[first]
        after = before - self.held[first] + self.held[second]
        return max(0, after - self.cap) - max(0, before - self.cap)

    def _swap(self, first: int, second: int) -> None:
        row, place, after = self.rows[self.stages[first]], self.places[first], self.after
        row[place], row[place + 1] = second, first
        after[first], after[second] = after[second], first
        if place:
            after[row[place - 1]] = second
        else:
            self.waits[first] += 1
            self.waits[second] -= 1
        self.places[first], self.places[second] = place + 1, place
        both = self.in_flight[second]
        self.in_flight[first], self.in_flight[second] = both, both - self.held[first]

    def _starts(self) -> tuple[list[float], list[int]]:
        """Computes when every action starts, and an order in which none waits for a later one: it
        is shorter if stages wait for each other."""
        durations, readers, after, waits = self.durations, self.readers, self.after, self.waits[:]
        starts = [0.0] * len(durations)
        ready = [row[0] for row in self.rows if not waits[row[0]]]
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

    def _tails(self, order: Sequence[int]) -> list[float]:
        """Computes the time from every action's start to the end of all that waits for it."""
        durations, readers, after = self.durations, self.readers, self.after
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
        """Finds the swap after which the longest chain is shortest, with the price of what exceeds
        the cap; a random one if there are several, None if there is none. What was swapped of late
        is not swapped back, unless the chain may get shorter than the earliest end so far."""
        best, rounding = math.inf, self.rounding
        swaps: list[tuple[int, int]] = []
        for first, second, least in self._candidates(starts, tails, makespan):
            estimate = max(least, self._estimate(first, second, starts, tails))
            estimate += self.price * self._excess(first, second)
            if self.barred.get((second, first), -1) >= move and estimate >= earliest - rounding:
                continue
            if estimate < best - rounding:
                best, swaps = estimate, []
            if estimate <= best + rounding:
                swaps.append((first, second))
        return swaps[self._below(len(swaps))] if swaps else None

    def _candidates(
        self, starts: list[float], tails: list[float], makespan: float
    ) -> Iterator[tuple[int, int, float]]:
        """Yields neighbors that follow each other on a longest chain, and those whose swap keeps
        fewer chunks beyond the cap, each with a time before which the schedule will not end."""
        durations, rounding, most = self.durations, self.rounding, self.cap + 1
        for row in self.rows:
            critical = [starts[number] + tails[number] >= makespan - rounding for number in row]
            for place, (first, second) in enumerate(itertools.pairwise(row)):
                if critical[place] and critical[place + 1]:
                    gap = starts[second] - starts[first] - durations[first]
                    if gap <= rounding and self._may_swap(first, second, most):
                        yield first, second, 0.0
                beyond = self.in_flight[first] > self.cap
                fewer = self.held[second] < self.held[first]
                if beyond and fewer and self._may_swap(first, second, most):
                    yield first, second, makespan

    def _estimate(self, first: int, second: int, starts: list[float], tails: list[float]) -> float:
        """A lower bound on the longest chain through two neighbors after they change places."""
        durations, row = self.durations, self.rows[self.stages[first]]
        place = self.places[first]
        start = starts[row[place - 1]] + durations[row[place - 1]] if place else 0.0
        for number, lag in self.inputs[second]:
            start = max(start, starts[number] + lag)
        later = start + durations[second]
        for number, lag in self.inputs[first]:
            later = max(later, starts[number] + lag)
        tail = durations[first] + (tails[row[place + 2]] if place + 2 < len(row) else 0.0)
        for number, lag in self.readers[first]:
            tail = max(tail, tails[number] + lag)
        longer = durations[second] + tail
        for number, lag in self.readers[second]:
            longer = max(longer, tails[number] + lag)
        return max(start + longer, later + tail)
