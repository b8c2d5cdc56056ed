"""Time on the free-running clock: each stage waits only for its inputs, as the papers draw it.

`jaxpipe.schedule.device_clock` says how long the program takes that runs on devices. The two clocks
must not be mixed up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

from jaxpipe.schedule.actions import HELD, Action, Kind, Schedule
from jaxpipe.schedule.check import Walk, chunks_in_flight, peak_in_flight, validate, walk
from jaxpipe.schedule.placement import Placement


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times of one microbatch, or of its average slice, on one chunk, in any one unit; a fused
    backward takes b + w.

    Args:
      f: forward, 1e-100 to 1e100, so that no sum or ratio of times is infinite or undefined.
      b: backward for the input, as f.
      w: backward for the weights, as f.
      message: one message between two stages, 0 to 1e100.
      overlap: how much an overlapped pair of a forward and a backward saves, as a share of the
        shorter of both, 0 to 1. Only the free-running clock reads it: the device clock is that of
        jaxpipe's program, which runs one after the other.
      attention: the share of f and b, 0 to 1, that grows with the keys that a slice of a sequence
        sees: that of slice j of k is (2j+1)/k of the average.
      rendezvous: whether a sender waits for its receiver, as NCCL's does with a message that does
        not fit into its buffers. Only the device clock reads it.

    Raises:
      ValueError: a cost is out of range or not a number.
    """

    f: float
    b: float
    w: float
    message: float = 0.0
    overlap: float = 0.0
    attention: float = 0.0
    rendezvous: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        problems = [
            f"costs.{name}={value} must be a number above 0 (1e-100 to 1e100)."
            for name, value in (("f", self.f), ("b", self.b), ("w", self.w))
            if not 1e-100 <= value <= 1e100
        ]
        if not 0 <= self.message <= 1e100:
            problems.append(
                f"costs.message={self.message} must be a finite number from 0 to 1e100."
            )
        for name in ("overlap", "attention"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                problems.append(f"costs.{name}={share} must be a share from 0 to 1.")
        if problems:
            raise ValueError("\n".join(problems))

    def of(self, kind: Kind) -> float:
        """The duration of an action of this kind, of an average slice."""
        both = self.b + self.w
        return {Kind.F: self.f, Kind.B: self.b, Kind.W: self.w, Kind.BW: both}[kind]

    def times(self, factor: float) -> Costs:
        """The costs of so many chunks, or of a share of one, between the same messages.

        Example:
          >>> Costs(1, 2, 1, message=0.1).times(2)
          Costs(f=2, b=4, w=2, message=0.1, overlap=0.0, attention=0.0, rendezvous=False)
        """
        f, b, w = (factor * cost for cost in (self.f, self.b, self.w))
        return dataclasses.replace(self, f=f, b=b, w=w)

    def more(self, kind: Kind, number: Any, num_slices: int) -> Any:
        """How much longer such an action takes for the slice of this number, counted over all
        sequences: an integer, or an array of them."""
        grows = {Kind.F: self.f, Kind.W: 0.0}.get(kind, self.b)
        return self.attention * grows * ((2 * (number % num_slices) + 1) / num_slices - 1)


MEASURED = "measured"
"""The clock of a timeline that has run: see `jaxpipe.measure.timeline`."""

UNIT = Costs(1, 1, 1)
"""F=B=W, as in the papers' figures."""


def kind_durations(costs: Sequence[Costs]) -> list[dict[Kind, float]]:
    """Durations of every kind of action, by virtual stage."""
    return [{kind: cost.of(kind) for kind in HELD} for cost in costs]


def unit_durations(
    unit: Sequence[Action], costs: Sequence[Costs], num_slices: int = 1
) -> list[float]:
    """Computes how long the actions of a unit (`Schedule.units`) take, free-running: a pair shares
    what its overlap saves.

    Example:
      >>> pair = Action.parse("0F1"), Action.parse("0BW0")
      >>> unit_durations(pair, [Costs(1, 1, 1, overlap=0.6)])
      [0.8, 1.6]
    """
    durations = [costs[action.virtual_stage].of(action.kind) for action in unit]
    if num_slices > 1:
        for place, action in enumerate(unit):
            cost = costs[action.virtual_stage]
            durations[place] += cost.more(action.kind, action.microbatch, num_slices)
    overlap = costs[unit[0].virtual_stage].overlap
    if len(unit) == 1 or not overlap:
        return durations
    share = 1 - overlap * min(durations) / math.fsum(durations)
    return [share * duration for duration in durations]


@dataclasses.dataclass(frozen=True, slots=True)
class TimedAction:
    """An action with its start and end in the unit of the costs.

    Args:
      tick: tick in which it runs; None on the free-running clock.
    """

    action: Action
    start: float
    end: float
    tick: int | None = None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A schedule in time.

    Args:
      costs: costs of every virtual stage.
      clock: "free-running" or "device"; or "measured", in seconds.
      rows: ``rows[d]`` lists what stage ``d`` runs, in time.
      makespan: time from the first start to the end of everything.
      ticks: ``ticks[t][d]`` is when stage ``d`` starts its layers in tick ``t``; the last row is
        when the stages are done. Empty on the free-running clock, and where time was measured.
    """

    schedule: Schedule
    costs: tuple[Costs, ...]
    clock: str
    rows: tuple[tuple[TimedAction, ...], ...]
    makespan: float
    ticks: tuple[tuple[float, ...], ...] = ()

    @cached_property
    def stage_bubble_ratios(self) -> tuple[float, ...]:
        """Share of the makespan in which each stage does not compute."""
        durations = kind_durations(self.costs)
        busy = [
            math.fsum(durations[action.virtual_stage][action.kind] for action in order)
            for order in self.schedule.orders
        ]
        if self.schedule.overlapped and self.clock == "free-running":
            units = map(self.schedule.units, range(len(busy)))
            busy = [
                math.fsum(time for unit in row for time in unit_durations(unit, self.costs))
                for row in units
            ]
        # Without a bubble the two sums may differ in their last digit.
        return tuple(max(0.0, 1 - time / self.makespan) for time in busy)

    @cached_property
    def bubble_ratio(self) -> float:
        """The share of all stages' time in which they do not compute."""
        return math.fsum(self.stage_bubble_ratios) / len(self.rows)

    @cached_property
    def stage_spans(self) -> tuple[float, ...]:
        """Time of each stage from the start of its first action to the end of its last."""
        return tuple(row[-1].end - row[0].start for row in self.rows)

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most chunk activations that each stage keeps from F to the action that frees them."""
        return peak_in_flight(self.schedule)

    def in_full_stages(self, chunks: int) -> float:
        """Converts a number of chunk activations, or slices of them, to microbatches of a full
        stage."""
        return chunks / (self.schedule.num_chunks * self.schedule.num_slices)


def in_flight(row: Sequence[TimedAction]) -> list[tuple[float, int]]:
    """Counts the chunk activations that one stage keeps: (time, how many from then on).

    There is one more from the start of each F, one less from the end of the W or BW that frees it.
    """
    steps: dict[float, int] = {}
    before, last = 0, 0.0
    for timed, count in zip(row, chunks_in_flight([t.action for t in row]), strict=True):
        if count != before:
            # After rounding, an action may start just before the end of the one it follows.
            last = max(last, timed.start if count > before else timed.end)
            steps[last] = count
        before = count
    return list(steps.items())


def ticks(schedule: Schedule) -> list[list[int]]:
    """Assigns every action, per stage in order, the tick that the schedule gives it; by default the
    earliest, from 0, that its inputs allow.

    A stage runs at most one action per tick, and a result can be used from the next tick on, on its
    own stage or, as a message, on another.

    Raises:
      ScheduleError: the schedule cannot run.

    Example:
      >>> from jaxpipe.schedule.generators.breadth_first import gpipe
      >>> ticks(gpipe(2, 1))
      [[0, 3, 4], [1, 2, 3]]
    """
    if schedule.ticks is not None:
        return [*map(list, schedule.ticks)]
    return _walk(schedule).ticks


def simulate(schedule: Schedule, costs: Costs | Sequence[Costs]) -> Timeline:
    """Runs a schedule on the free-running clock: each stage waits only for its inputs.

    A message delays its reader by its sender's ``costs.message`` and occupies neither stage. Takes
    time proportional to the number of actions.

    Args:
      costs: costs of one chunk; or, if chunks differ, of every virtual stage.

    Raises:
      ScheduleError: the schedule cannot run.
      ValueError: there is not one cost for every virtual stage.

    Example:
      >>> from jaxpipe.schedule.generators.depth_first import one_f_one_b
      >>> simulate(one_f_one_b(4, 8, fused=True), Costs(1, 1, 1)).makespan
      33.0
    """
    costs = of_virtual_stages(schedule.placement, costs)
    walked = _walk(schedule, costs)
    rows = tuple(
        tuple(map(TimedAction, *row))
        for row in zip(schedule.orders, walked.starts, walked.ends, strict=True)
    )
    return Timeline(schedule, costs, "free-running", rows, _last(walked))


def makespan(schedule: Schedule, costs: Costs | Sequence[Costs]) -> float:
    """The makespan of `simulate`, for searches that compare thousands."""
    return _last(_walk(schedule, of_virtual_stages(schedule.placement, costs)))


def of_virtual_stages(placement: Placement, costs: Costs | Sequence[Costs]) -> tuple[Costs, ...]:
    """Returns the costs of every virtual stage, given them or one for all."""
    needed = placement.num_virtual_stages
    if isinstance(costs, Costs):
        return (costs,) * needed
    if len(costs) != needed:
        raise ValueError(
            f"There are {len(costs)} costs for {needed} virtual stages.\n"
            f"Nearest valid: {needed}, or one for all."
        )
    return tuple(costs)


def _walk(schedule: Schedule, costs: Sequence[Costs] | None = None) -> Walk:
    """Runs a schedule with these costs, or in ticks."""
    if costs is None:
        walked = walk(schedule)
    else:
        messages = [cost.message for cost in costs] if any(c.message for c in costs) else ()
        durations = partial(unit_durations, costs=costs, num_slices=schedule.num_slices)
        walked = walk(schedule, durations=durations, messages=messages)
    # Only `validate` knows how to explain a schedule that stops; pay for it only then.
    if walked.blockers or not all(schedule.orders):
        validate(schedule)
    return walked


def _last(walked: Walk) -> float:
    return max(row[-1] for row in walked.ends)
