"""How far stages get when each runs its order: the base of the validator and of both clocks."""

from __future__ import annotations

import collections
import dataclasses

from jaxpipe.schedule.actions import Action, Kind, Schedule


@dataclasses.dataclass(frozen=True)
class Walk:
    """How far the stages get when each runs its order as its inputs arrive.

    Args:
      order: the stages that run their next action, in an order that respects every dependency.
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

    That of F is `Schedule.number`; that of B, split or fused, is larger by the number of passes,
    and that of R by as much again. W has no reader and no number.

    Example:
      >>> from jaxpipe.schedule.generators.gpipe import gpipe
      >>> results = Results(gpipe(2, 4))
      >>> results.number(Action(1, Kind.B, 3)), results.inputs(Action(0, Kind.B, 3))
      (15, (3, 15))
      >>> str(results.action(15))
      '1B3'
    """

    def __init__(self, schedule: Schedule) -> None:
        # `validate` walks any schedule before it refuses it.
        schedule = dataclasses.replace(schedule, num_microbatches=max(schedule.num_microbatches, 1))
        self._forward, self._place = schedule.number, schedule.place
        self._next_stage = schedule.number(1, 0)
        self._passes = max(schedule.num_passes, 1)
        self._depth, self._segment = schedule.placement.depth, schedule.segment
        self._stages = schedule.placement.stages

    def number(self, action: Action) -> int:
        """The number of the result of an F, B, BW or R."""
        forward = self._forward(action.virtual_stage, action.microbatch)
        if action.kind is Kind.R:
            return forward + 2 * self._passes
        return forward if action.kind is Kind.F else forward + self._passes

    def inputs(self, action: Action) -> tuple[int, ...]:
        """The results that an action reads: `actions.dependencies` in numbers."""
        s = action.virtual_stage
        forward = self._forward(s, action.microbatch)
        if action.kind is Kind.F:
            return (forward - self._next_stage,) if s % self._depth else ()
        backward = forward + self._passes
        if action.kind is Kind.W:
            return (backward,)
        again = backward + self._passes
        if action.kind is Kind.R:
            begins = s % (self._segment or 1) == 0
            return (forward,) if begins else (forward, again - self._next_stage)
        own = (forward,) if self._segment is None else (forward, again)
        return (*own, backward + self._next_stage) if (s + 1) % self._depth else own

    def stage(self, number: int) -> int:
        """The stage that computes a result."""
        return self._stages[self._place(number % self._passes)[0]]

    def action(self, number: int) -> Action:
        """The action that computes a result; a fused backward reads B."""
        kind = (Kind.F, Kind.B, Kind.R)[min(number // self._passes, 2)]
        s, i = self._place(number % self._passes)
        return Action(s, kind, i)


def walk(schedule: Schedule, *, inbox_slots: int | None = None) -> Walk:
    """Runs the orders greedily: one action per stage and tick, a message arrives one tick later.

    The result does not depend on which stage goes first: each stage has one fixed order and each
    inbox one sender and one receiver. A stage that stops here therefore stops in every execution.

    Args:
      schedule: a schedule whose virtual stages and microbatches are in range.
      inbox_slots: messages of one kind from one stage that a stage can hold before it uses them;
        the sender waits for a free slot. None for no limit.

    Returns:
      The walk; it ends for any schedule, after one visit of every action and every wait.
    """
    return _Walker(schedule, inbox_slots).run()


# Pools of inbox slots: (sender, receiver, kind of message).
_Pool = tuple[int, int, Kind]


class _Walker:
    def __init__(self, schedule: Schedule, inbox_slots: int | None) -> None:
        self.schedule = schedule
        self.results = Results(schedule)
        self.inbox_slots = inbox_slots
        self.done: dict[int, int] = {}  # result -> tick
        self.waiting: dict[int | _Pool, list[int]] = collections.defaultdict(list)
        self.held: collections.Counter[_Pool] = collections.Counter()
        self.awaited: dict[int, int | _Pool] = {}
        self.order: list[int] = []
        self.ticks: list[list[int]] = [[] for _ in schedule.orders]

    def run(self) -> Walk:
        ready = collections.deque(range(len(self.schedule.orders)))
        while ready:
            stage = ready.popleft()
            self.awaited.pop(stage, None)
            self._advance(stage, ready)
        blockers = {
            stage: self.results.action(awaited) if isinstance(awaited, int) else awaited[1]
            for stage, awaited in self.awaited.items()
        }
        return Walk(self.order, self.ticks, blockers)

    def _advance(self, stage: int, ready: collections.deque[int]) -> None:
        """Runs a stage until it has to wait; the stages that waited for it become ready."""
        order, ticks = self.schedule.orders[stage], self.ticks[stage]
        inputs_of, number_of, done = self.results.inputs, self.results.number, self.done
        tick = ticks[-1] if ticks else -1
        for position in range(len(ticks), len(order)):
            action = order[position]
            inputs = inputs_of(action)
            for needed in inputs:
                if needed not in done:
                    self._wait(stage, needed)
                    return
                if done[needed] > tick:
                    tick = done[needed]
            if self.inbox_slots is not None:
                pool = self._message(action)
                if pool is not None and self.held[pool] >= self.inbox_slots:
                    self._wait(stage, pool)
                    return
            tick += 1
            ticks.append(tick)
            self.order.append(stage)
            if action.kind is not Kind.W:
                number = number_of(action)
                done.setdefault(number, tick)
                if number in self.waiting:
                    ready.extend(self.waiting.pop(number))
            if self.inbox_slots is not None:
                ready.extend(self._move_messages(stage, action, inputs))

    def _wait(self, stage: int, awaited: int | _Pool) -> None:
        self.waiting[awaited].append(stage)
        self.awaited[stage] = awaited

    def _move_messages(self, stage: int, action: Action, inputs: tuple[int, ...]) -> list[int]:
        woken: list[int] = []
        for needed in inputs:
            if self.results.stage(needed) != stage:
                freed = self._message(self.results.action(needed))
                assert freed is not None
                self.held[freed] -= 1
                woken += self.waiting.pop(freed, [])
        sent = self._message(action)
        if sent is not None:
            self.held[sent] += 1
        return woken

    def _message(self, action: Action) -> _Pool | None:
        target = message_target(action, self.schedule)
        if target is None:
            return None
        kind = action.kind if action.kind in (Kind.F, Kind.R) else Kind.B
        return (self.schedule.placement.stages[action.virtual_stage], target, kind)


def message_target(action: Action, schedule: Schedule) -> int | None:
    """The stage that receives the message of ``action``; None if no other stage reads it."""
    if action.kind is Kind.W:
        return None
    stages, depth = schedule.placement.stages, schedule.placement.depth
    reader = action.virtual_stage + (1 if action.kind in (Kind.F, Kind.R) else -1)
    if action.kind is Kind.R and not reader % (schedule.segment or 1):
        return None
    if not (0 <= reader < len(stages) and 0 <= action.virtual_stage < len(stages)):
        return None
    if reader // depth != action.virtual_stage // depth:
        return None
    return stages[reader] if stages[reader] != stages[action.virtual_stage] else None
