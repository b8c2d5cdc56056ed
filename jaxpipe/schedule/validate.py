"""Proves that a schedule can run: every action once, in an order that never waits for itself.

`walk` is also the base of both clocks in `jaxpipe.schedule.simulate`.
"""

from __future__ import annotations

import collections
import dataclasses

from jaxpipe.schedule.actions import Action, Kind, Schedule, dependencies
from jaxpipe.schedule.slice_rules import slice_problems

_GRID_TICKS = 12
"""Ticks of the grid an error shows: enough to see a pattern, narrow enough for a terminal."""
_GRID_STAGES = 10
_SHOWN_PROBLEMS = 8


class ScheduleError(ValueError):
    """A schedule that cannot run as written."""


@dataclasses.dataclass(frozen=True)
class Walk:
    """How far the stages get when each runs its order as its inputs arrive.

    Args:
      order: (stage, position in that stage's order), in an order that respects every dependency.
      ticks: ``ticks[d][k]`` is the earliest tick of stage ``d``'s action ``k``; shorter than the
        stage's order where the stage stops for good.
      blockers: for every stage that stops, what its next action waits for, in words.
    """

    order: list[tuple[int, int]]
    ticks: list[list[int]]
    blockers: dict[int, str]


def walk(schedule: Schedule, *, inbox_slots: int | None = None) -> Walk:
    """Runs the orders greedily, one action a stage and tick, a message arriving one tick later.

    What can run does not depend on who goes first: each stage has one fixed order and each inbox
    one sender and one receiver. So a stage that stops here stops in every execution.

    Args:
      schedule: any schedule, valid or not.
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
        self.stages = schedule.placement.stages
        self.inbox_slots = inbox_slots
        self.done: dict[Action, int] = {}
        self.waiting: dict[Action | _Pool, list[int]] = collections.defaultdict(list)
        self.held: collections.Counter[_Pool] = collections.Counter()
        self.result = Walk([], [[] for _ in schedule.orders], {})

    def run(self) -> Walk:
        ready = collections.deque(range(len(self.schedule.orders)))
        while ready:
            stage = ready.popleft()
            self.result.blockers.pop(stage, None)
            order, ticks = self.schedule.orders[stage], self.result.ticks[stage]
            while len(ticks) < len(order):
                action = order[len(ticks)]
                inputs = self._inputs(action)
                if self._blocked(stage, action, inputs):
                    break
                ready.extend(self._run(stage, action, inputs))
        return self.result

    def _inputs(self, action: Action) -> list[Action]:
        # Both kinds of backward are recorded under B: the reader does not care which it was.
        depth = self.schedule.placement.depth
        return dependencies(action, num_virtual_stages=depth, split=True)

    def _blocked(self, stage: int, action: Action, inputs: list[Action]) -> bool:
        missing = next((result for result in inputs if result not in self.done), None)
        if missing is not None:
            self.waiting[missing].append(stage)
            self.result.blockers[stage] = f"the result of {missing}"
            return True
        pool = self._message(action)
        if (
            pool is not None
            and self.inbox_slots is not None
            and self.held[pool] >= self.inbox_slots
        ):
            self.waiting[pool].append(stage)
            self.result.blockers[stage] = (
                f"one of the {self.inbox_slots} inbox slots of stage {pool[1]}"
            )
            return True
        return False

    def _run(self, stage: int, action: Action, inputs: list[Action]) -> list[int]:
        ticks = self.result.ticks[stage]
        tick = max([-1, *ticks[-1:], *(self.done[result] for result in inputs)]) + 1
        self.result.order.append((stage, len(ticks)))
        ticks.append(tick)
        woken: list[int] = []
        if action.kind is not Kind.W:
            result = result_of(action)
            self.done.setdefault(result, tick)
            woken += self.waiting.pop(result, [])
        if self.inbox_slots is not None:
            woken += self._move_messages(action, inputs)
        return woken

    def _move_messages(self, action: Action, inputs: list[Action]) -> list[int]:
        woken: list[int] = []
        for result in inputs:
            freed = self._message(result) if result.virtual_stage != action.virtual_stage else None
            if freed is not None:
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
        return (self.stages[action.virtual_stage], target, result_of(action).kind)


def result_of(action: Action) -> Action:
    """The key under which readers find what ``action`` computes: a fused backward counts as B."""
    if action.kind is Kind.BW:
        return Action(action.virtual_stage, Kind.B, action.microbatch)
    return action


def message_target(action: Action, schedule: Schedule) -> int | None:
    """The stage that receives what ``action`` sends; None where no other stage reads it."""
    if action.kind is Kind.W:
        return None
    stages, depth = schedule.placement.stages, schedule.placement.depth
    reader = action.virtual_stage + (1 if action.kind is Kind.F else -1)
    if not (0 <= reader < len(stages) and 0 <= action.virtual_stage < len(stages)):
        return None
    if reader // depth != action.virtual_stage // depth:
        return None
    return stages[reader] if stages[reader] != stages[action.virtual_stage] else None


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most chunk activations each stage keeps, from F to the W or BW that frees them.

    Returns:
      One count for every stage; it follows from the order alone, whatever the costs.
    """
    return tuple(max(_in_flight(order), default=0) for order in schedule.orders)


def _in_flight(order: tuple[Action, ...]) -> list[int]:
    counts, count = [], 0
    for action in order:
        count += {Kind.F: 1, Kind.B: 0, Kind.W: -1, Kind.BW: -1}[action.kind]
        # An activation is still held while the action that frees it runs.
        counts.append(count)
    return counts


@dataclasses.dataclass
class _Problem:
    text: str
    stage: int | None = None
    position: int | None = None
    absent: Action | None = None


def validate(schedule: Schedule, *, inbox_slots: int | None = None) -> None:
    """Checks that a schedule is complete, in order, free of deadlock and within its promise.

    Slices, where it has them, must keep to the rules of `jaxpipe.schedule.slice_rules`.

    Args:
      schedule: the schedule to check.
      inbox_slots: at least 1: messages of one kind (activations or gradients) from one stage that a
        stage can hold before it uses them. None for no limit.

    Raises:
      ScheduleError: with every failure, and the stage x tick grid around the first one.
      ValueError: ``inbox_slots`` is below 1.

    Example:
      >>> from jaxpipe.schedule.gpipe import gpipe
      >>> validate(gpipe(2, 4))
      >>> validate(gpipe(2, 4), inbox_slots=1)
    """
    if inbox_slots is not None and inbox_slots < 1:
        raise ValueError(f"inbox_slots={inbox_slots} must be at least 1, or None for no limit.")
    problems = _shape_problems(schedule) or _action_problems(schedule)
    # A walk with inbox slots means something only once every sender and receiver is in place.
    walked = walk(schedule, inbox_slots=None if problems else inbox_slots)
    if not problems:
        problems = _deadlocks(schedule, walked) + _broken_promises(schedule)
    if not problems and schedule.slices is not None:
        problems = _slice_problems(schedule)
    if problems:
        raise ScheduleError(_message(schedule, problems, walked.ticks))


def _shape_problems(schedule: Schedule) -> list[_Problem]:
    placement, problems = schedule.placement, []
    held = collections.Counter(placement.stages)
    if not held or set(held) != set(range(len(held))) or len(set(held.values())) > 1:
        return [
            _Problem("The placement does not give every stage the same number of virtual stages.")
        ]
    if placement.num_copies < 1 or len(placement.stages) % placement.num_copies:
        return [
            _Problem(
                f"{len(placement.stages)} virtual stages are not num_copies="
                f"{placement.num_copies} copies of a model."
            )
        ]
    if schedule.num_microbatches < 1:
        problems.append(_Problem(f"num_microbatches={schedule.num_microbatches} is below 1."))
    if len(schedule.orders) != len(held):
        problems.append(
            _Problem(f"There are {len(schedule.orders)} orders for {len(held)} stages.")
        )
    promise = schedule.peak_in_flight
    if promise is not None and len(promise) != len(held):
        problems.append(
            _Problem(f"peak_in_flight has {len(promise)} values for {len(held)} stages.")
        )
    return problems


def _action_problems(schedule: Schedule) -> list[_Problem]:
    stages, m = schedule.placement.stages, schedule.num_microbatches
    problems: list[_Problem] = []
    kinds: dict[tuple[int, int], set[Kind]] = collections.defaultdict(set)
    for d, order in enumerate(schedule.orders):
        for k, action in enumerate(order):
            s, i = action.virtual_stage, action.microbatch
            text = None
            if not 0 <= s < len(stages):
                text = f"has no virtual stage: they run from 0 to {len(stages) - 1}."
            elif not 0 <= i < m:
                text = f"has no microbatch: they run from 0 to {m - 1}."
            elif stages[s] != d:
                text = f"is on the wrong stage: virtual stage {s} is held by stage {stages[s]}."
            elif action.kind in kinds[s, i]:
                text = "runs a second time."
            elif Kind.BW in (seen := kinds[s, i] | {action.kind}) and seen & {Kind.B, Kind.W}:
                text = "mixes split and fused backward for one virtual stage and microbatch."
            if text is not None:
                problems.append(_Problem(f"{action} on stage {d} {text}", d, k))
            if 0 <= s < len(stages) and stages[s] == d:
                kinds[s, i].add(action.kind)
    return problems + _missing(schedule, kinds)


def _missing(schedule: Schedule, kinds: dict[tuple[int, int], set[Kind]]) -> list[_Problem]:
    problems = []
    for s, stage in enumerate(schedule.placement.stages):
        for i in range(schedule.num_microbatches):
            seen = kinds.get((s, i), set())
            backward = [] if Kind.BW in seen else [Kind.B, Kind.W]
            for kind in [Kind.F, *backward]:
                if kind not in seen:
                    fused = " (and so is BW)" if kind is Kind.B and Kind.W not in seen else ""
                    absent = Action(s, kind, i)
                    text = f"{absent} is missing from stage {stage}{fused}."
                    problems.append(_Problem(text, stage, absent=absent))
    return problems


def _deadlocks(schedule: Schedule, walked: Walk) -> list[_Problem]:
    problems = []
    for d, blocker in sorted(walked.blockers.items()):
        k = len(walked.ticks[d])
        stuck = schedule.orders[d][k]
        text = f"Deadlock: stage {d} stops for good at {stuck}, which waits for {blocker}."
        problems.append(_Problem(text, d, k))
    return problems


def _broken_promises(schedule: Schedule) -> list[_Problem]:
    problems = []
    for d, promised in enumerate(schedule.peak_in_flight or ()):
        counts = _in_flight(schedule.orders[d])
        k = next((k for k, count in enumerate(counts) if count > promised), None)
        if k is not None:
            text = (
                f"{schedule.orders[d][k]} on stage {d} exceeds the promised peak in flight: "
                f"{max(counts)} chunks against {promised}."
            )
            problems.append(_Problem(text, d, k))
    return problems


def _slice_problems(schedule: Schedule) -> list[_Problem]:
    problems = []
    for text, stage, action in slice_problems(schedule):
        order = schedule.orders[stage] if stage < len(schedule.orders) else ()
        position = order.index(action) if action in order else None
        problems.append(_Problem(f"{text}.", stage, position))
    return problems


def _message(schedule: Schedule, problems: list[_Problem], ticks: list[list[int]]) -> str:
    p, m = len(set(schedule.placement.stages)), schedule.num_microbatches
    lines = [f"Schedule {schedule.name!r} ({p} stages, {m} microbatches) cannot run:"]
    lines += [f"  {problem.text}" for problem in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        lines.append(f"  ... and {len(problems) - _SHOWN_PROBLEMS} more.")
    return "\n".join([*lines, *_grid(schedule, problems, ticks)])


def _grid(schedule: Schedule, problems: list[_Problem], ticks: list[list[int]]) -> list[str]:
    """Stage x tick around the first problem: ``>2F0<`` offends, ``>2F0?`` is missing."""
    marks = {(q.stage, q.position) for q in problems}
    cells: list[dict[int, str]] = []
    places: dict[tuple[int | None, int | None], int] = {}
    for d, order in enumerate(schedule.orders):
        row, tick = {}, -1
        for k, action in enumerate(order):
            # Once a stage stops there is no true tick: show the rest in its order.
            tick = ticks[d][k] if k < len(ticks[d]) else tick + 1
            row[tick] = f">{action}<" if (d, k) in marks else f" {action} "
            places[d, k] = tick
        absent = [q.absent for q in problems if q.stage == d and q.absent is not None]
        places[d, None] = tick + 1
        row |= {tick + 1 + j: f">{action}?" for j, action in enumerate(absent)}
        cells.append(row)
    stage = problems[0].stage or 0
    tick = places.get((problems[0].stage, problems[0].position), 0)
    top = max(0, min(stage - _GRID_STAGES // 2, len(cells) - _GRID_STAGES))
    left = max(0, tick - _GRID_TICKS // 2)
    columns = range(left, left + _GRID_TICKS)
    shown = [[row.get(t, " . ") for t in columns] for row in cells[top : top + _GRID_STAGES]]
    width = max((len(cell) for row in shown for cell in row), default=3)
    header = "tick".ljust(9) + "".join(f" {t}".ljust(width) for t in columns)
    rows = [
        f"stage {d}".ljust(9) + "".join(cell.ljust(width) for cell in row)
        for d, row in enumerate(shown, start=top)
    ]
    return [line.rstrip() for line in (header, *rows)]
