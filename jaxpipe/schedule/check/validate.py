"""Proves that a schedule can run: every action once, in an order that never waits for itself."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxpipe.schedule.actions import HELD, Action, Kind, Schedule
from jaxpipe.schedule.check.walk import Walk, walk
from jaxpipe.schedule.placement import Placement

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
    problems += [] if problems else [*checks.pairs(), *checks.slices()]
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
                        fault(misplaced, d, k, f"mixes {both}.")
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

    def is_row(value: Any, *kinds: type) -> bool:
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
    pairs = schedule.overlapped
    checks.append(("overlapped", pairs, is_row(pairs, Action), "a tuple of nothing but Action"))
    for what, value, fits, expected in checks:
        if not fits:
            yield f"{what} is {type(value).__name__}, and must be {expected}."


def _is_action(value: Any) -> bool:
    return (
        isinstance(value, Action)
        and isinstance(value.kind, Kind)
        and isinstance(value.virtual_stage, int)
        and isinstance(value.microbatch, int)
    )
