"""Proves that a schedule can run: every action once, in an order that never waits for itself.

`walk` is also the base of both clocks in `jaxpipe.schedule.simulate`.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.slice_rules import slice_problems

_GRID_TICKS = 12
"""Ticks of the grid an error shows: enough to see a pattern, narrow enough for a terminal."""
_GRID_STAGES = 10
_SHOWN_PROBLEMS = 8
_MAX_MISSING = 1000
"""Missing actions are counted no further: m may be any number."""


class ScheduleError(ValueError):
    """A schedule that cannot run as written."""


@dataclasses.dataclass(frozen=True)
class Walk:
    """How far the stages get when each runs its order as its inputs arrive.

    Args:
      order: the stages that run their next action, in an order that respects every dependency.
      ticks: ``ticks[d][k]`` is the earliest tick of stage ``d``'s action ``k``; shorter than the
        stage's order where the stage stops for good.
      blockers: for every stage that stops, what its next action waits for, in words.
    """

    order: list[int]
    ticks: list[list[int]]
    blockers: dict[int, str]


class Results:
    """Numbers what actions compute, so that looking a result up costs no hashing of actions.

    F of virtual stage s and microbatch i is s*m + i; B, split or fused, comes p*v*m later. W has no
    reader and no number.

    Example:
      >>> from jaxpipe.schedule.gpipe import gpipe
      >>> results = Results(gpipe(2, 4))
      >>> results.number(Action(1, Kind.B, 3)), results.inputs(Action(0, Kind.B, 3))
      (15, (3, 15))
      >>> str(results.action(15))
      '1B3'
    """

    def __init__(self, schedule: Schedule) -> None:
        self._m = max(schedule.num_microbatches, 1)
        self._depth = max(schedule.placement.depth, 1)
        self._backward = self._m * max(len(schedule.placement.stages), 1)
        self._stages = schedule.placement.stages * 2

    def number(self, action: Action) -> int:
        """The number of what an F, B or BW computes."""
        forward = action.virtual_stage * self._m + action.microbatch
        return forward if action.kind is Kind.F else forward + self._backward

    def inputs(self, action: Action) -> tuple[int, ...]:
        """The results that an action reads: `actions.dependencies` in numbers."""
        s = action.virtual_stage
        forward = s * self._m + action.microbatch
        if action.kind is Kind.F:
            return (forward - self._m,) if s % self._depth else ()
        backward = forward + self._backward
        if action.kind is Kind.W:
            return (backward,)
        return (forward, backward + self._m) if (s + 1) % self._depth else (forward,)

    def stage(self, number: int) -> int:
        """The stage that computes a result."""
        return self._stages[number // self._m]

    def action(self, number: int) -> Action:
        """The action that computes a result; a fused backward reads B."""
        kind = Kind.F if number < self._backward else Kind.B
        s, i = divmod(number % self._backward, self._m)
        return Action(s, kind, i)


def walk(schedule: Schedule, *, inbox_slots: int | None = None) -> Walk:
    """Runs the orders greedily, one action a stage and tick, a message arriving one tick later.

    What can run does not depend on who goes first: each stage has one fixed order and each inbox
    one sender and one receiver. So a stage that stops here stops in every execution.

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
        blockers = {stage: self._in_words(awaited) for stage, awaited in self.awaited.items()}
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

    def _in_words(self, awaited: int | _Pool) -> str:
        if isinstance(awaited, int):
            return f"the result of {self.results.action(awaited)}"
        return f"one of the {self.inbox_slots} inbox slots of stage {awaited[1]}"

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
        kind = Kind.F if action.kind is Kind.F else Kind.B
        return (self.schedule.placement.stages[action.virtual_stage], target, kind)


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


_KEEPS = {Kind.F: 1, Kind.B: 0, Kind.W: -1, Kind.BW: -1}


def _in_flight(order: tuple[Action, ...]) -> list[int]:
    # An activation is still held while the action that frees it runs.
    return list(itertools.accumulate(_KEEPS[action.kind] for action in order))


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


# The kinds one virtual stage has run for one microbatch, as bits.
_BIT = {Kind.F: 1, Kind.B: 2, Kind.W: 4, Kind.BW: 8}
_SPLIT, _FUSED = _BIT[Kind.B] | _BIT[Kind.W], _BIT[Kind.BW]


def _action_problems(schedule: Schedule) -> list[_Problem]:
    stages, m = schedule.placement.stages, schedule.num_microbatches
    problems: list[_Problem] = []
    seen: dict[tuple[int, int], int] = {}
    for d, order in enumerate(schedule.orders):
        for k, action in enumerate(order):
            s, i, bit = action.virtual_stage, action.microbatch, _BIT[action.kind]
            text = None
            if not 0 <= s < len(stages):
                text = f"has no virtual stage: they run from 0 to {len(stages) - 1}."
            elif not 0 <= i < m:
                text = f"has no microbatch: they run from 0 to {m - 1}."
            elif stages[s] != d:
                text = f"is on the wrong stage: virtual stage {s} is held by stage {stages[s]}."
            else:
                before = seen.get((s, i), 0)
                if before & bit:
                    text = "runs a second time."
                elif (before | bit) & _SPLIT and (before | bit) & _FUSED:
                    text = "mixes split and fused backward for one virtual stage and microbatch."
                seen[s, i] = before | bit
            if text is not None:
                problems.append(_Problem(f"{action} on stage {d} {text}", d, k))
    return problems + list(itertools.islice(_missing(schedule, seen), _MAX_MISSING))


def _missing(schedule: Schedule, seen: dict[tuple[int, int], int]) -> Iterator[_Problem]:
    for s, stage in enumerate(schedule.placement.stages):
        for i in range(schedule.num_microbatches):
            ran = seen.get((s, i), 0)
            backward = () if ran & _FUSED else (Kind.B, Kind.W)
            for kind in (Kind.F, *backward):
                if not ran & _BIT[kind]:
                    fused = " (and so is BW)" if kind is Kind.B and not ran & _SPLIT else ""
                    absent = Action(s, kind, i)
                    text = f"{absent} is missing from stage {stage}{fused}."
                    yield _Problem(text, stage, absent=absent)


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
        least = "at least " if len(problems) >= _MAX_MISSING else ""
        lines.append(f"  ... and {least}{len(problems) - _SHOWN_PROBLEMS} more.")
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
