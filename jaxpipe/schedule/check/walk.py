"""The walk of stages through their orders: the clock of `simulate`, and the proof of `validate`."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from jaxpipe.schedule.actions import Action, Kind, Schedule, dependencies


@dataclasses.dataclass(frozen=True)
class Walk:
    """Progress of the stages when each runs its order as its inputs arrive.

    Args:
      starts, ends: ``ends[d][k]`` is when stage ``d``'s action ``k`` ends; shorter than the stage's
        order where the stage stops for good.
      blockers: for every stage that stops, the action whose result its next action waits for; a
        fused backward counts as its B.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    blockers: dict[int, Action]

    @property
    def ticks(self) -> list[list[int]]:
        """Ticks of the actions, if every unit took one."""
        return [[int(end) - 1 for end in row] for row in self.ends]


class Results:
    """Numbers the results of actions, so that looking one up needs no hashing of actions.

    Results of F are numbered by virtual stage and microbatch; that of B, split or fused, is larger
    by the number of all F. W has no reader and no number.
    """

    def __init__(self, schedule: Schedule) -> None:
        # `validate` walks any schedule before it refuses it.
        self._stages = schedule.placement.stages
        self._microbatches, self._slices = max(schedule.num_passes, 1), max(schedule.num_slices, 1)
        self._forwards = max(len(self._stages) * self._microbatches, 1)
        self._firsts: dict[tuple[Kind, int], tuple[int, list[int]]] = {}

    def first(self, action: Action) -> tuple[int, list[int]]:
        """Returns `number` and `inputs` for microbatch 0; for microbatch i they are i larger."""
        place = action.kind, action.virtual_stage
        if (numbers := self._firsts.get(place)) is None:
            first = dataclasses.replace(action, microbatch=0)
            needed = dependencies(first, num_virtual_stages=len(self._stages))
            numbers = self._first(*place), [self._first(n.kind, n.virtual_stage) for n in needed]
            self._firsts[place] = numbers
        return numbers

    def _first(self, kind: Kind, virtual_stage: int) -> int:
        return self._forwards * (kind is not Kind.F) + virtual_stage * self._microbatches

    def number(self, action: Action) -> int:
        """The number of the result of an F, B or BW."""
        return self.first(action)[0] + action.microbatch

    def inputs(self, action: Action) -> list[int]:
        """The results that an action reads, in numbers; those of another slice come last."""
        read = [*map(action.microbatch.__add__, self.first(action)[1])]
        step = -1 if action.kind is Kind.F else 1
        if 0 <= action.microbatch % self._slices + step < self._slices != 1:
            read += [self.number(action) + step] * (action.kind is not Kind.W)
        return read

    def stage(self, number: int) -> int:
        """The stage that computes a result."""
        return self._stages[number % self._forwards // self._microbatches]

    def action(self, number: int) -> Action:
        """The action that computes a result; B if that is a fused backward."""
        s, i = divmod(number % self._forwards, self._microbatches)
        return Action(s, Kind.F if number < self._forwards else Kind.B, i)


def walk(
    schedule: Schedule,
    *,
    durations: Callable[[Sequence[Action]], Sequence[float]] | None = None,
    messages: Sequence[float] = (),
) -> Walk:
    """Runs the orders greedily: a unit (`Schedule.units`) starts when its stage is free and its
    inputs are there, and gives its results when it ends.

    The result does not depend on which stage goes first: each stage has one fixed order. A stage
    that stops here therefore stops in every execution.

    The walk ends for any schedule, after one visit of every action and every wait.

    Args:
      durations: computes how long each action of a unit takes; None for one tick per unit.
      messages: how long a result travels to another stage, by virtual stage; none for no time.
        Virtual stages must then be in range.
    """
    results, together = Results(schedule), frozenset(schedule.overlapped)
    stages, begin = schedule.placement.stages, 0 if durations is None else 0.0
    walked = Walk([[] for _ in schedule.orders], [[] for _ in schedule.orders], {})
    done: dict[int, float] = {}  # result -> end
    waiting: dict[int, list[int]] = collections.defaultdict(list)  # result -> stages
    known: dict[tuple[Kind, int, int], tuple[int, list[tuple[int, float]], Sequence[float]]] = {}
    ready, num_slices = [*range(len(schedule.orders))], max(schedule.num_slices, 1)

    def take(unit: Sequence[Action]) -> Sequence[float]:
        return [1, 0][: len(unit)] if durations is None else durations(unit)

    def facts_of(action: Action) -> tuple[int, list[tuple[int, float]], Sequence[float]]:
        """Numbers of microbatch 0's result and inputs, with travel times, and its duration."""
        number, inputs = results.first(action)
        senders = [results.action(needed).virtual_stage for needed in inputs] if messages else ()
        own = stages[action.virtual_stage] if messages else 0
        lags = [messages[s] if stages[s] != own else 0 for s in senders] or [0] * len(inputs)
        return number, [*zip(inputs, lags, strict=True)], take((action,))

    def advance(stage: int) -> None:
        """Runs a stage until it waits for a result or has run everything."""
        order, starts, ends = schedule.orders[stage], walked.starts[stage], walked.ends[stage]
        free, position = ends[-1] if ends else begin, len(ends)
        while position < len(order):
            unit: Sequence[Action] = order[position : position + 1]
            if together and unit[0] in together:
                unit = order[position : position + 2]
            results_of_unit = []
            for action in unit:
                i = action.microbatch
                place = action.kind, action.virtual_stage, i % num_slices
                if (facts := known.get(place)) is None:
                    facts = known[place] = facts_of(action)
                number, inputs, times = facts
                for needed, lag in inputs:
                    if (end := done.get(needed + i)) is None:
                        waiting[needed + i].append(stage)
                        return
                    if end + lag > free:
                        free = end + lag
                if action.kind is not Kind.W:
                    results_of_unit.append(number + i)
            for time in times if len(unit) == 1 else take(unit):
                starts.append(free)
                free += time
                ends.append(free)
            position += len(unit)
            for number in results_of_unit:
                done.setdefault(number, free)
                if number in waiting:
                    ready.extend(waiting.pop(number))

    while ready:
        advance(ready.pop())
    for number, stopped in waiting.items():
        walked.blockers.update(dict.fromkeys(stopped, results.action(number)))
    return walked
