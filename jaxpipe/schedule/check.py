"""Proof that a schedule can run: every action once, in an order that never waits for itself.

Stages `walk` through their orders; what stops says why to `validate`, and when things end to
`jaxpipe.schedule.simulate`.
"""

import collections
import dataclasses
import itertools
import string
from collections.abc import Callable, Iterator, Sequence

from jaxpipe.schedule.actions import (
    HELD,
    Action,
    Kind,
    Schedule,
    dependencies,
    may_share_tick,
)
from jaxpipe.schedule.placement import Placement


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
            first = Action(action.virtual_stage, action.kind, 0)
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


_SHOWN_PROBLEMS = 8
_MAX_MISSING = 1000
"""Number beyond which missing actions are not counted, as m may be any number."""
_GRID_TICKS = 12
"""Ticks of the grid: enough to see a pattern, narrow enough for a terminal."""
_GRID_STAGES = 10


class ScheduleError(ValueError):
    """A schedule that cannot run as written."""


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most chunk activations that each stage keeps; the order decides, whatever the costs."""
    return tuple(max(chunks_in_flight(order), default=0) for order in schedule.orders)


def chunks_in_flight(order: Sequence[Action]) -> list[int]:
    """The chunk activations a stage keeps after each action: one more by F, one less by the W or BW
    that frees it."""
    return list(itertools.accumulate(HELD[action.kind] for action in order))


def validate(schedule: Schedule, *, spell: Callable[[Action], str] = str) -> None:
    """Checks that a schedule is complete, in order, free of deadlock and within its promise.

    Args:
      spell: how errors write an action.

    Raises:
      ScheduleError: with every failure, and the stage x tick grid around the first one.

    Example:
      >>> from jaxpipe.schedule.generators.breadth_first import gpipe
      >>> validate(gpipe(2, 4))
    """
    wrong = list(itertools.islice(_wrong_types(schedule), _SHOWN_PROBLEMS))
    if wrong:
        raise ScheduleError("\n  ".join([f"Schedule {schedule.name!r} cannot run:", *wrong]))
    checks = _Checks(schedule, spell)
    shape, (out_of_range, actions) = list(checks.shape()), checks.actions()
    # An index out of range may be why the shape is wrong.
    problems = shape + out_of_range if shape else out_of_range + actions
    problems += [] if problems else [*checks.pairs(), *checks.slices(), *checks.ticks()]
    walked = walk(schedule)
    if not problems:
        problems = [*checks.deadlocks(walked), *checks.broken_promises()]
    if problems:
        raise ScheduleError(_message(schedule, problems, walked.ticks, spell))


# The kinds one virtual stage has run for one microbatch, as bits.
_BIT = {Kind.F: 1, Kind.B: 2, Kind.W: 4, Kind.BW: 8}
_SPLIT, _FUSED = _BIT[Kind.B] | _BIT[Kind.W], _BIT[Kind.BW]


@dataclasses.dataclass
class _Fault:
    """A fault of a schedule, and its position in the order of a stage.

    The stage is None for the whole schedule, the position for an action that is ``absent``.
    """

    text: str
    stage: int | None = None
    position: int | None = None
    absent: Action | None = None


@dataclasses.dataclass(frozen=True)
class _Checks:
    """The checks of `validate`, which find faults."""

    schedule: Schedule
    spell: Callable[[Action], str]

    def shape(self) -> Iterator[_Fault]:
        schedule, placement = self.schedule, self.schedule.placement
        chunks_of = collections.Counter(placement.stages)
        stages = range(max(len(schedule.orders), len(chunks_of)))
        uneven = "The placement does not give every stage the same number of virtual stages"
        if not chunks_of:
            yield _Fault(f"{uneven}: it is empty.")
        elif set(chunks_of) - set(stages) or len({chunks_of[d] for d in stages}) > 1:
            least, most = (
                min(stages, key=chunks_of.__getitem__),
                max(chunks_of, key=chunks_of.__getitem__),
            )
            counts = f"stage {least} holds {chunks_of[least]}, stage {most} holds {chunks_of[most]}"
            yield _Fault(f"{uneven}: {counts}.")
        else:
            m, orders, promise = schedule.num_microbatches, schedule.orders, schedule.peak_in_flight
            if m < 1:
                yield _Fault(f"num_microbatches={m} is below 1.")
            if schedule.num_slices < 1:
                yield _Fault(f"num_slices={schedule.num_slices} is below 1.")
            if len(orders) != len(chunks_of):
                yield _Fault(f"There are {len(orders)} orders for {len(chunks_of)} stages.")
            if promise is not None and len(promise) != len(chunks_of):
                yield _Fault(
                    f"peak_in_flight has {len(promise)} values for {len(chunks_of)} stages."
                )

    def actions(self) -> tuple[list[_Fault], list[_Fault]]:
        """Finds actions out of range; and those on the wrong stage, repeated, mixed or missing."""
        stages, m = self.schedule.placement.stages, self.schedule.num_passes
        num_virtual_stages = len(stages)
        seen: dict[int, int] = {}
        outside: list[_Fault] = []
        misplaced: list[_Fault] = []

        def fault(faults: list[_Fault], d: int, k: int, text: str) -> None:
            action = self.schedule.orders[d][k]
            faults.append(_Fault(f"{self.spell(action)} on stage {d} {text}", d, k))

        for d, order in enumerate(self.schedule.orders):
            for k, action in enumerate(order):
                s, i, bit = action.virtual_stage, action.microbatch, _BIT.get(action.kind, 0)
                known = 0 <= s < num_virtual_stages
                if not (known and 0 <= i < m):
                    count, what = (m, "microbatch") if known else (len(stages), "virtual stage")
                    # If there is none at all, that alone is the problem.
                    if count > 0:
                        fault(outside, d, k, f"has no {what}: they run from 0 to {count - 1}.")
                elif not bit:
                    fault(misplaced, d, k, f"is none of {', '.join(_BIT)}.")
                elif stages[s] != d:
                    owner = f"virtual stage {s} is held by stage {stages[s]}"
                    fault(misplaced, d, k, f"is on the wrong stage: {owner}.")
                else:
                    before = seen.get(s * m + i, 0)
                    after = seen[s * m + i] = before | bit
                    if before & bit:
                        fault(misplaced, d, k, "runs a second time.")
                    elif after & _SPLIT and after & _FUSED:
                        both = "split and fused backward for one virtual stage and microbatch"
                        # Files and pictures differ in letters; both are shown in those of the file.
                        split, fused = (
                            self.spell(dataclasses.replace(action, kind=kind))
                            for kind in (Kind.B, Kind.BW)
                        )
                        hint = f"{split} is for the input alone, {fused} for both"
                        fault(misplaced, d, k, f"mixes {both}: {hint}.")
        return outside, misplaced + list(itertools.islice(self._missing(seen), _MAX_MISSING))

    def pairs(self) -> Iterator[_Fault]:
        """Finds the overlapped F that cannot run together with what follows them."""
        schedule = self.schedule
        places = {
            action: (d, k, order[k + 1] if k + 1 < len(order) else None)
            for d, order in enumerate(schedule.orders)
            for k, action in enumerate(order if schedule.overlapped else ())
        }
        for action in schedule.overlapped:
            d, k, after = places.get(action, (None, None, None))
            text = f"{self.spell(action)} is overlapped, and must be an F of the schedule"
            if action.kind is not Kind.F or d is None:
                yield _Fault(f"{text}.")
            elif (
                after is None
                or after.kind not in (Kind.B, Kind.BW)
                or after.microbatch == action.microbatch
            ):
                shown = "nothing" if after is None else self.spell(after)
                rule = "directly followed by a backward of another microbatch on its stage"
                yield _Fault(f"{text}, {rule}: {shown} follows.", d, k)

    def ticks(self) -> Iterator[_Fault]:
        """Finds the first action of each stage whose tick is not after those of what it follows."""
        schedule, results = self.schedule, Results(self.schedule)
        if (given := schedule.ticks) is None:
            return
        if [*map(len, given)] != [*map(len, schedule.orders)]:
            yield _Fault("ticks must have one number for every action.")
            return
        sent = {
            results.number(action): tick
            for order, row in zip(schedule.orders, given, strict=True)
            for action, tick in zip(order, row, strict=True)
            if action.kind is not Kind.W
        }
        for d, row in enumerate(given):
            k, before, last = 0, -1, tuple[Action, ...]()
            for unit in schedule.units(d):
                read = [n for action in unit for n in results.inputs(action)]
                least = 1 + max(before, *(sent[number] for number in read), -1)
                shares = row[k] == before and may_share_tick((*last, *unit))
                if (row[k] < least and not shares) or set(row[k : k + len(unit)]) != {row[k]}:
                    text = f"{self.spell(unit[0])} on stage {d} is in tick {row[k]}"
                    yield _Fault(f"{text}, and can run from tick {least} on.", d, k)
                    break
                k, before, last = k + len(unit), row[k], () if shares else unit

    def slices(self) -> Iterator[_Fault]:
        """Finds slices that come before those of their sequence that they read: F reads what F of
        the slice before leaves on the virtual stage, and a backward what that of the next does."""
        k = self.schedule.num_slices
        for d, order in enumerate(self.schedule.orders if k > 1 else ()):
            done: set[Action] = set()
            for position, action in enumerate(order):
                j, step = action.microbatch % k, -1 if action.kind is Kind.F else 1
                read = dataclasses.replace(action, microbatch=action.microbatch + step)
                if action.kind is not Kind.W and 0 <= j + step < k and read not in done:
                    text = f"{self.spell(action)} on stage {d} comes before {self.spell(read)}"
                    why = f"slice {j} of a sequence reads what slice {j + step} leaves"
                    yield _Fault(f"{text}: {why}.", d, position)
                done.add(action)

    def _missing(self, seen: dict[int, int]) -> Iterator[_Fault]:
        schedule, m = self.schedule, self.schedule.num_passes
        kinds = {action.kind for order in schedule.orders for action in order}
        # If no action of a backward is left, assume the form that all others have.
        fused = Kind.BW in kinds and not kinds & {Kind.B, Kind.W}
        whole = (Kind.F, *((Kind.BW,) if fused else (Kind.B, Kind.W)))
        for s, stage in enumerate(schedule.placement.stages):
            for i in range(m):
                ran = seen.get(s * m + i, 0)
                for kind in (Kind.F,) if ran & _FUSED else whole:
                    if not ran & _BIT[kind]:
                        absent = Action(s, kind, i)
                        text = f"{self.spell(absent)} is missing from stage {stage}"
                        if kind is Kind.B and not ran & _SPLIT:
                            text += f" (and so is {self.spell(Action(s, Kind.BW, i))})"
                        yield _Fault(f"{text}.", stage, absent=absent)

    def deadlocks(self, walked: Walk) -> list[_Fault]:
        """Says why stages stop; those that stop by themselves come first."""
        alone, dependent = [], []
        for d, blocker in sorted(walked.blockers.items()):
            k = len(walked.ticks[d])
            stuck = self.schedule.orders[d][k]
            text = f"Deadlock: stage {d} stops for good at {self.spell(stuck)}, which waits for "
            s, i = blocker.virtual_stage, blocker.microbatch
            fused = Action(s, Kind.BW, i)
            if (
                blocker.kind is Kind.B
                and fused in self.schedule.orders[self.schedule.placement.stages[s]]
            ):
                blocker = fused
            if (s, i) == (stuck.virtual_stage, stuck.microbatch):
                kind = self.spell(blocker).strip(string.digits)
                own = f"comes before its own {kind}, {self.spell(blocker)}."
                alone.append(_Fault(f"{self.spell(stuck)} on stage {d} {own}", d, k))
            else:
                dependent.append(_Fault(f"{text}the result of {self.spell(blocker)}.", d, k))
        return alone + dependent

    def broken_promises(self) -> Iterator[_Fault]:
        for d, promised in enumerate(self.schedule.peak_in_flight or ()):
            counts = chunks_in_flight(self.schedule.orders[d])
            k = next((k for k, count in enumerate(counts) if count > promised), None)
            if k is not None:
                text = (
                    f"{self.spell(self.schedule.orders[d][k])} on stage {d} exceeds the promised "
                    f"peak in flight: {max(counts)} chunks against {promised}."
                )
                yield _Fault(text, d, k)


def _message(
    schedule: Schedule,
    problems: list[_Fault],
    ticks: list[list[int]],
    spell: Callable[[Action], str],
) -> str:
    """Writes the problems, at least one, and the stage x tick grid around the first with a place.

    In the grid ``>2F0<`` offends and ``>2F0?`` is missing; ``ticks`` says how far each stage gets
    (`Walk`).
    """
    p, m = len(set(schedule.placement.stages)), schedule.num_microbatches
    lines = [f"Schedule {schedule.name!r} ({p} stages, {m} microbatches) cannot run:"]
    lines += [f"  {problem.text}" for problem in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        least = "at least " if len(problems) >= _MAX_MISSING else ""
        lines.append(f"  ... and {least}{len(problems) - _SHOWN_PROBLEMS} more.")
    marks = {(q.stage, q.position) for q in problems}
    cells: list[dict[int, str]] = []
    places: dict[tuple[int | None, int | None], int] = {}
    for d, order in enumerate(schedule.orders):
        row, tick = {}, -1
        for k, action in enumerate(order):
            # Once a stage stops there is no true tick: show the rest in its order.
            tick = ticks[d][k] if k < len(ticks[d]) else tick + 1
            row[tick] = f">{spell(action)}<" if (d, k) in marks else f" {spell(action)} "
            places[d, k] = tick
        places[d, None] = tick + 1
        absent = [q.absent for q in problems if q.stage == d and q.absent is not None]
        row |= {tick + 1 + j: f">{spell(action)}?" for j, action in enumerate(absent)}
        cells.append(row)
    first = next((problem for problem in problems if problem.stage is not None), problems[0])
    stage = first.stage or 0
    tick = places.get((first.stage, first.position), 0)
    top = max(0, min(stage - _GRID_STAGES // 2, len(cells) - _GRID_STAGES))
    left = max(0, tick - _GRID_TICKS // 2)
    columns = range(left, left + _GRID_TICKS)
    shown = [[row.get(t, " . ") for t in columns] for row in cells[top : top + _GRID_STAGES]]
    width = max((len(cell) for row in shown for cell in row), default=3)
    header = "tick".ljust(9) + "".join(f" {t}".ljust(width) for t in columns)
    lines.append(header.rstrip())
    for d, line in enumerate(shown, start=top):
        lines.append((f"stage {d}".ljust(9) + "".join(c.ljust(width) for c in line)).rstrip())
    return "\n".join(lines)


def _wrong_types(schedule: Schedule) -> Iterator[str]:
    """Finds the values in a schedule that have the wrong type; in every row, only the first."""

    def is_row(value: object, *kinds: type) -> bool:
        return isinstance(value, (tuple, list)) and all(isinstance(item, kinds) for item in value)

    placement, m, k = schedule.placement, schedule.num_microbatches, schedule.num_slices
    stages, peak = getattr(placement, "stages", ()), schedule.peak_in_flight
    orders, has_rows = schedule.orders, is_row(schedule.orders, tuple, list)
    integers = "a tuple of nothing but int"
    checks = [
        ("placement", placement, isinstance(placement, Placement), "a Placement"),
        ("placement.stages", stages, is_row(stages, int), integers),
        (f"num_microbatches={m!r}", m, isinstance(m, int), "int"),
        (f"num_slices={k!r}", k, isinstance(k, int), "int"),
        ("peak_in_flight", peak, peak is None or is_row(peak, int, float), integers),
        ("orders", orders, has_rows, "a tuple of one tuple for every stage"),
    ]
    for d, order in enumerate(orders if has_rows else ()):
        for wrong in itertools.islice(itertools.filterfalse(_is_action, order), 1):
            checks.append((f"{wrong!r} on stage {d}", wrong, False, "an Action (int, Kind, int)"))
    given = schedule.ticks
    fits = given is None or (is_row(given, tuple) and all(is_row(row, int) for row in given))
    checks.append(("ticks", given, fits, "a tuple of one tuple of int for every stage"))
    pairs = schedule.overlapped
    checks.append(("overlapped", pairs, is_row(pairs, Action), "a tuple of nothing but Action"))
    for what, value, fits, expected in checks:
        if not fits:
            yield f"{what} is {type(value).__name__}, and must be {expected}."


def _is_action(value: object) -> bool:
    return (
        isinstance(value, Action)
        and isinstance(value.kind, Kind)
        and isinstance(value.virtual_stage, int)
        and isinstance(value.microbatch, int)
    )
