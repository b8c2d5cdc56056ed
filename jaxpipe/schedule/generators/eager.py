"""Running a given order as early as inputs and memory allow, with real costs, its gaps filled."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from jaxpipe.schedule.actions import HELD, Action, Kind, Schedule
from jaxpipe.schedule.check import Results, peak_in_flight, walk
from jaxpipe.schedule.generators import events
from jaxpipe.schedule.simulate import Costs, makespan, simulate

_PATIENCE = (0.0, 0.25, 0.5, 0.75)
"""Values of patience to try; each of them ends first on some shapes."""
_LONG = 6_000
"""Number of actions beyond which one order of a schedule is adapted, not several."""
_ROUNDING = 1e-9
"""The share of an action by which a gap may be too short: sums of decimals are not exact."""


def in_time(schedule: Schedule, costs: Costs) -> Schedule:
    """Orders a schedule anew for real costs and messages, within its own peaks in flight.

    Tries every stage's order run eagerly, with more and less patience, and the gaps of each filled
    by `earliest`; in the best of them W then fills waits. Ends no later than the schedule itself,
    which wins if nothing ends sooner.
    """
    eager = (_eager(schedule, costs, patience) for patience in _PATIENCE)
    candidates = [schedule, *(earliest(order, costs) for order in (schedule, *eager))]
    best = min(candidates, key=lambda order: makespan(order, costs))
    while (sooner := _w_in_wait(best, costs)) is not None:
        best = sooner
    return best


def soonest(orders: Sequence[Schedule], costs: Costs) -> Schedule:
    """Orders several schedules anew for real costs (`in_time`); returns the one that ends first.

    Of long schedules, each of which takes seconds, only the one that ends first after `earliest` is
    ordered anew.
    """

    def ends(order: Schedule) -> float:
        return makespan(order, costs)

    if sum(map(len, orders[0].orders)) > _LONG:
        orders = [min(orders, key=lambda order: ends(earliest(order, costs)))]
    return min((in_time(order, costs) for order in orders), key=ends)


def _w_in_wait(schedule: Schedule, costs: Costs) -> Schedule | None:
    """Moves a W into a wait, perhaps shorter than the W, of the stage that ends last.

    The delay of other stages costs nothing as long as these end no later. Returns the first move
    with which the schedule ends sooner; None if there is none.
    """
    rows, orders = simulate(schedule, costs).rows, list(schedule.orders)
    ends = makespan(schedule, costs)
    d = max(range(len(rows)), key=lambda stage: rows[stage][-1].end)
    row, order = rows[d], orders[d]
    for k, (before, after) in enumerate(itertools.pairwise(row), start=1):
        if after.start <= before.end:
            continue
        later = next((j for j in range(k, len(row)) if order[j].kind is Kind.W), k)
        if later == k or dataclasses.replace(order[later], kind=Kind.B) not in order[:k]:
            continue
        orders[d] = (*order[:k], order[later], *order[k:later], *order[later + 1 :])
        moved = dataclasses.replace(schedule, orders=tuple(orders))
        if makespan(moved, costs) < ends * (1 - _ROUNDING):
            return moved
    return None


def _eager(schedule: Schedule, costs: Costs, patience: float) -> Schedule:
    """Runs every stage's order on the event machine, where what is ready may overtake."""
    caps = schedule.peak_in_flight or peak_in_flight(schedule)
    fused = any(action.kind is Kind.BW for action in schedule.orders[0])
    stages = []
    for virtual_stages, order, cap in zip(
        schedule.placement.virtual_stages, schedule.orders, caps, strict=True
    ):
        passes = events.stage_passes(virtual_stages, fused=fused)
        numbers = {(Kind.W, s): len(passes) - 1 for s in virtual_stages}
        numbers |= {place: number for number, place in enumerate(passes)}
        sequence = [numbers[action.kind, action.virtual_stage] for action in order]
        stages.append(EagerStage(passes, sequence, costs, cap, patience=patience))
    m, k = schedule.num_microbatches, schedule.num_slices
    events.run_stages(stages, schedule.placement, m, message=costs.message, num_slices=k)
    assert not any(stage.upcoming for stage in stages), "only what is ready overtakes"
    orders = tuple(
        tuple(events.actions(stage.passes, stage.order, num_slices=k)) for stage in stages
    )
    return dataclasses.replace(schedule, orders=orders)


class EagerStage(events.Stage):
    """A stage that runs its passes in a given order, in which a pass may overtake earlier ones.

    A stage that would wait runs instead the first later pass of its sequence that is ready and
    cannot raise the peak: a forward may move forward only if no point that it passes is at the cap.
    A W lets a ready B go first as long as no forward lies between, which costs no memory.

    Args:
      sequence: the passes in order, by number.
      cap: the most chunks in flight.
      patience: a pass does not overtake if the next one in order, W aside, arrives within this
        share of its duration.
      opening: starts of the first forward before the first backward, which leave room for others.
    """

    def __init__(
        self,
        passes: list[events.StagePass],
        sequence: Sequence[int],
        costs: Costs,
        cap: int,
        *,
        patience: float = 0.0,
        opening: float = math.inf,
    ) -> None:
        super().__init__(passes, [costs.of(kind) for kind, _ in passes])
        # Reversed: passes are taken from near the front, and a list is fast only at its end.
        self.upcoming = list(reversed(sequence))
        self.kinds = [kind for kind, _ in passes]
        self.held = [HELD[kind] for kind in self.kinds]
        self.cap, self.patience, self.opening, self.in_flight = cap, patience, opening, 0

    def choose(self, now: float) -> int | None:
        """Takes the pass to run now out of the sequence; None to wait."""
        if not self.upcoming:
            return None
        number = self.upcoming[-1]
        kind = self.kinds[number]
        waits = kind is Kind.F and not self._has_room(number, self.in_flight)
        goes_first = kind is not Kind.W and not waits
        if goes_first and self.is_ready(number, now):
            return self.upcoming.pop()
        position = self._overtaking(now)
        if position is None or self._is_worth_waiting(self.upcoming[position], now):
            return None
        return self.upcoming.pop(position)

    def _is_worth_waiting(self, number: int, now: float) -> bool:
        if not self.patience:
            return False
        first = next((n for n in reversed(self.upcoming) if self.kinds[n] is not Kind.W), number)
        arrivals, done = self.arrivals[first], self.done[first]
        latest = now + self.patience * self.durations[number]
        return done < len(arrivals) and now < arrivals[done] <= latest

    def _overtaking(self, now: float) -> int | None:
        """Finds the position in the sequence of the pass that runs now; None to wait."""
        ready = {number for number in range(len(self.passes)) if self.is_ready(number, now)}
        in_flight = peak = self.in_flight
        deferred_w = None
        for position in range(len(self.upcoming) - 1, -1, -1):
            number = self.upcoming[position]
            forward = self.kinds[number] is Kind.F
            if number in ready:
                if self.kinds[number] is Kind.W:
                    deferred_w = position
                elif not forward or self._has_room(number, peak):
                    return position
                # Passes of one kind never overtake each other.
                ready.remove(number)
            if deferred_w is not None and (forward or not ready):
                return deferred_w
            if not ready:
                return None
            in_flight += self.held[number]
            peak = max(peak, in_flight)
        return None

    def _has_room(self, number: int, peak: int) -> bool:
        """Whether a forward can start now, as the next pass after a point of this peak."""
        is_opening = number == 0 and not self.done[len(self.passes) // 2]
        return peak < self.cap and not (is_opening and self.done[0] >= self.opening)

    def start(self, number: int, now: float) -> None:
        super().start(number, now)
        self.in_flight += self.held[number]


def earliest(schedule: Schedule, costs: Costs) -> Schedule:
    """Moves actions into earlier gaps of their stages.

    The actions are taken in the order in which they start. Each goes to the first gap of its stage
    that follows its inputs and is long enough, an F only if the stage stays within its peak all the
    way to where the F was. A gap is time in which the stage waits, so nothing else is delayed: no
    action ever starts later than before.

    Args:
      schedule: synchronous; its promised peaks in flight are kept.
    """
    timeline, results = simulate(schedule, costs), Results(schedule)
    rows = [_Row(cap) for cap in schedule.peak_in_flight or peak_in_flight(schedule)]
    ends: dict[int, float] = {}
    # Equal starts are ordered by tick: an action too short to change a float sum starts at the same
    # time as the one it follows. Actions themselves are never compared.
    in_time = sorted(
        (
            (timed.start, tick, d, timed.action)
            for d, (row, ticks) in enumerate(zip(timeline.rows, walk(schedule).ticks, strict=True))
            for timed, tick in zip(row, ticks, strict=True)
        ),
        key=lambda entry: entry[:3],
    )
    for *_, d, action in in_time:
        ready = 0.0
        for needed in results.inputs(action):
            travel = costs.message if results.stage(needed) != d else 0.0
            ready = max(ready, ends[needed] + travel)
        duration = costs.of(action.kind)
        duration += costs.more(action.kind, action.microbatch, schedule.num_slices)
        end = rows[d].place(action, ready, duration)
        if action.kind is not Kind.W:
            ends[results.number(action)] = end
    return dataclasses.replace(schedule, orders=tuple(tuple(row.order) for row in rows))


class _Row:
    """The actions that one stage runs so far, in order, with starts and ends."""

    def __init__(self, cap: int) -> None:
        self.cap, self.in_flight = cap, 0
        self.order: list[Action] = []
        self.starts: list[float] = []
        self.ends: list[float] = []

    def place(self, action: Action, ready: float, duration: float) -> float:
        """Puts an action into the first gap that it fits, or behind all others; returns its end."""
        chosen = len(self.order)
        start = max(ready, self.ends[-1] if self.ends else 0.0)
        in_flight = self.in_flight
        # From the last gap to the first that follows the inputs; the earliest that fits is kept.
        # `in_flight` counts the chunks before the action at `position`. An F adds one to this count
        # and to all later ones; once one is at the cap, no earlier gap will do either.
        for position in reversed(range(len(self.order))):
            if self.ends[position] <= ready:
                break
            in_flight -= HELD[self.order[position].kind]
            if action.kind is Kind.F and in_flight >= self.cap:
                break
            begin = max(ready, self.ends[position - 1] if position else 0.0)
            if begin + duration * (1 - _ROUNDING) <= self.starts[position]:
                chosen, start = position, begin
        self.order.insert(chosen, action)
        self.starts.insert(chosen, start)
        self.ends.insert(chosen, start + duration)
        self.in_flight += HELD[action.kind]
        return start + duration
