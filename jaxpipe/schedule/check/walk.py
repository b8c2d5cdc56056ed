"""The walk of stages through their orders, on which the validator and both clocks are built."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from jaxpipe.schedule.actions import Action, Kind, Schedule


@dataclasses.dataclass(frozen=True)
class Walk:
    """Progress of the stages when each runs its order as its inputs arrive.

    Args:
      order: the stages that run their next action, or overlapped pair (`Schedule.units`), in an
        order that respects every dependency.
      ticks: ``ticks[d][k]`` is the earliest tick of stage ``d``'s action ``k``; shorter than the
        stage's order where the stage stops for good.
      blockers: for every stage that stops, the thing its next action waits for: a result (a fused
        backward counts as its B), or one of the inbox slots of a stage.
    """

    order: list[int]
    ticks: list[list[int]]
    blockers: dict[int, Action | int]


class Results:
    """Numbers the results of actions, so that looking one up needs no hashing of actions.

    The result of F has the number `Schedule.number`; that of B, split or fused, is larger by the
    number of passes, and that of R by as much again. W has no reader and no number.

    Example:
      >>> from jaxpipe.schedule.generators.gpipe import gpipe
      >>> results = Results(gpipe(2, 4))
      >>> results.number(Action(1, Kind.B, 3)), results.inputs(Action(0, Kind.B, 3))
      (15, [3, 15])
      >>> str(results.action(15))
      '1B3'
    """

    def __init__(self, schedule: Schedule) -> None:
        # `validate` walks any schedule before it refuses it.
        schedule = dataclasses.replace(schedule, num_microbatches=max(schedule.num_microbatches, 1))
        self._schedule, self._passes = schedule, max(schedule.num_passes, 1)
        self._firsts: dict[tuple[Kind, int], tuple[int, list[int]]] = {}

    def first(self, action: Action) -> tuple[int, list[int]]:
        """Returns `number` and `inputs` for microbatch 0; for microbatch i they are i larger."""
        place = action.kind, action.virtual_stage
        if (numbers := self._firsts.get(place)) is None:
            needed = self._schedule.inputs(dataclasses.replace(action, microbatch=0))
            numbers = self._first(*place), [self._first(n.kind, n.virtual_stage) for n in needed]
            self._firsts[place] = numbers
        return numbers

    def _first(self, kind: Kind, virtual_stage: int) -> int:
        block = {Kind.F: 0, Kind.R: 2}.get(kind, 1)
        return block * self._passes + self._schedule.number(virtual_stage, 0)

    def number(self, action: Action) -> int:
        """The number of the result of an F, B, BW or R."""
        return self.first(action)[0] + action.microbatch

    def inputs(self, action: Action) -> list[int]:
        """The results that an action reads: `Schedule.inputs` in numbers."""
        return [*map(action.microbatch.__add__, self.first(action)[1])]

    def receiver(self, action: Action) -> int:
        """The stage that an F, B, BW or R sends its result to; its own if no other reads it."""
        stages, s = self._schedule.placement.stages, action.virtual_stage
        reader = s + (1 if action.kind.is_forward else -1)
        inputs = self.inputs(dataclasses.replace(action, virtual_stage=reader))
        sends = 0 <= reader < len(stages) and self.number(action) in inputs
        return stages[reader if sends else s]

    def stage(self, number: int) -> int:
        """The stage that computes a result."""
        return self._schedule.placement.stages[self._schedule.place(number % self._passes)[0]]

    def action(self, number: int) -> Action:
        """The action that computes a result; B if that is a fused backward."""
        kind, place = divmod(number, self._passes)
        s, i = self._schedule.place(place)
        return Action(s, (Kind.F, Kind.B, Kind.R)[min(kind, 2)], i)


def walk(schedule: Schedule, *, inbox_slots: int | None = None) -> Walk:
    """Runs the orders greedily: one action, or overlapped pair, per stage and tick; a message
    arrives one tick later.

    The result does not depend on which stage goes first: each stage has one fixed order and each
    inbox one sender and one receiver. A stage that stops here therefore stops in every execution.

    The walk ends for any schedule, after one visit of every action and every wait.

    Args:
      inbox_slots: messages of one kind from one stage that a stage can hold before it uses them;
        the sender waits for a free slot. None for no limit. Virtual stages and microbatches must
        then be in range.
    """
    results, together = Results(schedule), frozenset(schedule.overlapped)
    frees = {} if inbox_slots is None else _frees(schedule, results, inbox_slots)
    walked = Walk([], [[] for _ in schedule.orders], {})
    done: dict[int, int] = {}  # result -> tick
    waiting: dict[int, list[int]] = collections.defaultdict(list)  # result -> stages
    ready = collections.deque(range(len(schedule.orders)))

    def advance(stage: int) -> int | None:
        """Runs a stage until it waits for a result, which is returned, or has run everything."""
        order, ticks = schedule.orders[stage], walked.ticks[stage]
        walked.blockers.pop(stage, None)
        tick = ticks[-1] if ticks else -1
        while len(ticks) < len(order):
            action = order[len(ticks)]
            unit: Sequence[Action] = (action,)
            if together and action in together:
                unit = order[len(ticks) : len(ticks) + 2]
            for action in unit:
                number, inputs = results.first(action)
                number += action.microbatch
                for needed in inputs:
                    needed += action.microbatch
                    if needed not in done:
                        walked.blockers[stage] = results.action(needed)
                        return needed
                    if done[needed] > tick:
                        tick = done[needed]
                if number in frees and frees[number] not in done:
                    walked.blockers[stage] = results.receiver(action)
                    return frees[number]
            tick += 1
            walked.order.append(stage)
            for action in unit:
                ticks.append(tick)
                if action.kind is not Kind.W:
                    number = results.number(action)
                    done.setdefault(number, tick)
                    ready.extend(waiting.pop(number, ()))
        return None

    while ready:
        stage = ready.popleft()
        if (awaited := advance(stage)) is not None:
            waiting[awaited].append(stage)
    return walked


def _frees(schedule: Schedule, results: Results, inbox_slots: int) -> dict[int, int]:
    """Maps results that are sent to the result whose action frees the slot that they need.

    The n-th message of a kind from one stage to another can be sent once message n - inbox_slots
    has been read.
    """
    sent, read = collections.defaultdict(list), collections.defaultdict(list)
    for stage, order in enumerate(schedule.orders):
        for action in order:
            if action.kind is Kind.W:
                continue
            number = results.number(action)
            for needed in results.inputs(action):
                read[results.stage(needed), stage, results.action(needed).kind].append(number)
            if (receiver := results.receiver(action)) != stage:
                sent[stage, receiver, results.action(number).kind].append(number)
    return {
        number: freed
        for inbox, numbers in sent.items()
        for number, freed in zip(numbers[inbox_slots:], read[inbox], strict=False)
    }
