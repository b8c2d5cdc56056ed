"""Proves that a schedule can run: every action once, in an order that never waits for itself."""

from __future__ import annotations

import collections
import itertools
import string
from collections.abc import Callable, Iterable, Iterator

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.check.grid import MAX_MISSING, SHOWN_PROBLEMS, Fault, message
from jaxpipe.schedule.check.schedule_types import wrong_types
from jaxpipe.schedule.check.slice_rules import slice_faults
from jaxpipe.schedule.check.walk import Walk, walk
from jaxpipe.schedule.problems import Problem, below_one, refuse


class ScheduleError(ValueError):
    """A schedule that cannot run as written."""


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most chunk activations each stage keeps, from F to the W or BW that frees them.

    Returns:
      One count for every stage; it follows from the order alone, whatever the costs.
    """
    return tuple(max(_in_flight(order), default=0) for order in schedule.orders)


def keeper(kinds: Iterable[Kind]) -> Kind:
    """The kind of action that leaves residuals: F, or R where there is any."""
    return Kind.R if Kind.R in kinds else Kind.F


def _in_flight(order: tuple[Action, ...]) -> list[int]:
    keeps = {kind: -(kind in (Kind.W, Kind.BW)) for kind in Kind}
    keeps[keeper(action.kind for action in order)] = 1
    # An activation is still held while the action that frees it runs.
    return list(itertools.accumulate(keeps[action.kind] for action in order))


def validate(
    schedule: Schedule,
    *,
    inbox_slots: int | None = None,
    spell: Callable[[Action], str] = str,
) -> None:
    """Checks that a schedule is complete, in order, free of deadlock and within its promise.

    Slices, if there are any, must follow the rules of `jaxpipe.schedule.check.slice_rules`.

    Args:
      schedule: the schedule to check.
      inbox_slots: at least 1: messages of one kind (activations or gradients) from one stage that a
        stage can hold before it uses them. None for no limit.
      spell: how errors write an action.

    Raises:
      ScheduleError: with every failure, and the stage x tick grid around the first one.
      ValueError: ``inbox_slots`` is below 1.

    Example:
      >>> from jaxpipe.schedule.generators.gpipe import gpipe
      >>> validate(gpipe(2, 4))
      >>> validate(gpipe(2, 4), inbox_slots=1)
    """
    refuse(below_one(inbox_slots=inbox_slots))
    wrong = list(itertools.islice(wrong_types(schedule), SHOWN_PROBLEMS))
    if wrong:
        raise ScheduleError("\n  ".join([f"Schedule {schedule.name!r} cannot run:", *wrong]))
    problems = _shape_problems(schedule)
    if problems:
        # An index out of range may be why the shape is wrong.
        problems += _out_of_range(schedule, spell)
    else:
        problems = _action_problems(schedule, spell)
    # A walk with inbox slots means something only once every sender and receiver is in place.
    walked = walk(schedule, inbox_slots=None if problems else inbox_slots)
    if not problems:
        problems = _deadlocks(schedule, walked, inbox_slots, spell)
        problems += _broken_promises(schedule, spell)
    if not problems and schedule.slices is not None:
        problems = list(slice_faults(schedule))
    if problems:
        raise ScheduleError(message(schedule, problems, walked.ticks, spell))


def simulated_only(schedule: Schedule) -> Iterator[Problem]:
    """Says why a valid schedule can only be simulated; nothing if it can also be executed."""
    why, copies = "can only be simulated: it", schedule.placement.num_copies
    if copies > 1:
        rule = f"{why} needs {copies} copies of the model's weights, and the runtime keeps one"
        yield Problem("schedule", schedule.name, rule, ("hanayo", "dualpipe-v"))
    if {Kind.B, Kind.BW} <= {action.kind for order in schedule.orders for action in order}:
        rule = (
            f"{why} has both B and BW, and the program runs one kind of backward: B and W, or BW, "
            "for every microbatch"
        )
        yield Problem("schedule", schedule.name, rule)


def _shape_problems(schedule: Schedule) -> list[Fault]:
    placement, problems = schedule.placement, []
    held = collections.Counter(placement.stages)
    stages = range(max(len(schedule.orders), len(held)))
    if not held or set(held) - set(stages) or len({held[d] for d in stages}) > 1:
        text = "The placement does not give every stage the same number of virtual stages"
        if not held:
            return [Fault(f"{text}: it is empty.")]
        least, most = min(stages, key=held.__getitem__), max(held, key=held.__getitem__)
        return [
            Fault(f"{text}: stage {least} holds {held[least]}, stage {most} holds {held[most]}.")
        ]
    if placement.num_copies < 1 or held[0] % placement.num_copies:
        return [
            Fault(
                f"{held[0]} virtual stages on every stage are not those of num_copies="
                f"{placement.num_copies} copies of a model."
            )
        ]
    if schedule.num_microbatches < 1:
        problems.append(Fault(f"num_microbatches={schedule.num_microbatches} is below 1."))
    if len(schedule.orders) != len(held):
        problems.append(Fault(f"There are {len(schedule.orders)} orders for {len(held)} stages."))
    promise = schedule.peak_in_flight
    if promise is not None and len(promise) != len(held):
        problems.append(Fault(f"peak_in_flight has {len(promise)} values for {len(held)} stages."))
    return problems


# The kinds one virtual stage has run for one microbatch, as bits.
_BIT = {Kind.F: 1, Kind.B: 2, Kind.W: 4, Kind.BW: 8, Kind.R: 16}
_SPLIT, _FUSED = _BIT[Kind.B] | _BIT[Kind.W], _BIT[Kind.BW]


def _out_of_range(schedule: Schedule, spell: Callable[[Action], str]) -> list[Fault]:
    problems = []
    for d, order in enumerate(schedule.orders):
        for k, action in enumerate(order):
            for index, number, what in (
                (action.virtual_stage, len(schedule.placement.stages), "virtual stage"),
                (action.microbatch, schedule.num_microbatches, "microbatch"),
            ):
                # If there is none at all, that alone is the problem.
                if number > 0 and not 0 <= index < number:
                    text = f"has no {what}: they run from 0 to {number - 1}."
                    problems.append(Fault(f"{spell(action)} on stage {d} {text}", d, k))
                    break
    return problems


def _action_problems(schedule: Schedule, spell: Callable[[Action], str]) -> list[Fault]:
    stages, m = schedule.placement.stages, schedule.num_microbatches
    problems = _out_of_range(schedule, spell)
    seen: dict[tuple[int, int], int] = {}
    for d, order in enumerate(schedule.orders):
        for k, action in enumerate(order):
            s, i, bit = action.virtual_stage, action.microbatch, _BIT[action.kind]
            text = None
            if not (0 <= s < len(stages) and 0 <= i < m):
                continue
            if action.kind is Kind.R and schedule.segment is None:
                text = "recomputes, and the schedule has no segments (Minibatches.segment)."
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
                problems.append(Fault(f"{spell(action)} on stage {d} {text}", d, k))
    return problems + list(itertools.islice(_missing(schedule, seen, spell), MAX_MISSING))


def _missing(
    schedule: Schedule, seen: dict[tuple[int, int], int], spell: Callable[[Action], str]
) -> Iterator[Fault]:
    kinds = {action.kind for order in schedule.orders for action in order}
    # If no action of a backward is left, assume the form that all others have.
    whole = (Kind.BW,) if Kind.BW in kinds and not kinds & {Kind.B, Kind.W} else (Kind.B, Kind.W)
    again = () if schedule.segment is None and Kind.R not in kinds else (Kind.R,)
    for s, stage in enumerate(schedule.placement.stages):
        for i in range(schedule.num_microbatches):
            ran = seen.get((s, i), 0)
            backward = () if ran & _FUSED else whole
            for kind in (Kind.F, *again, *backward):
                if not ran & _BIT[kind]:
                    either = kind is Kind.B and not ran & _SPLIT
                    fused = f" (and so is {spell(Action(s, Kind.BW, i))})" if either else ""
                    absent = Action(s, kind, i)
                    text = f"{spell(absent)} is missing from stage {stage}{fused}."
                    yield Fault(text, stage, absent=absent)


def _deadlocks(
    schedule: Schedule, walked: Walk, inbox_slots: int | None, spell: Callable[[Action], str]
) -> list[Fault]:
    """The problem of every stage that stops; first those that stop by themselves."""
    alone, others = [], []
    for d, blocker in sorted(walked.blockers.items()):
        k = len(walked.ticks[d])
        stuck = schedule.orders[d][k]
        text = f"Deadlock: stage {d} stops for good at {spell(stuck)}, which waits for "
        if isinstance(blocker, int):
            text += f"one of the {inbox_slots} inbox slots of stage {blocker}."
            others.append(Fault(text, d, k))
            continue
        fused = Action(blocker.virtual_stage, Kind.BW, blocker.microbatch)
        order = schedule.orders[schedule.placement.stages[blocker.virtual_stage]]
        if blocker.kind is Kind.B and fused in order:
            blocker = fused
        if (blocker.virtual_stage, blocker.microbatch) == (stuck.virtual_stage, stuck.microbatch):
            kind = spell(blocker).strip(string.digits)
            text = f"{spell(stuck)} on stage {d} comes before its own {kind}, {spell(blocker)}."
            alone.append(Fault(text, d, k))
        else:
            others.append(Fault(f"{text}the result of {spell(blocker)}.", d, k))
    return alone + others


def _broken_promises(schedule: Schedule, spell: Callable[[Action], str]) -> list[Fault]:
    problems = []
    for d, promised in enumerate(schedule.peak_in_flight or ()):
        counts = _in_flight(schedule.orders[d])
        k = next((k for k, count in enumerate(counts) if count > promised), None)
        if k is not None:
            text = (
                f"{spell(schedule.orders[d][k])} on stage {d} exceeds the promised peak in flight: "
                f"{max(counts)} chunks against {promised}."
            )
            problems.append(Fault(text, d, k))
    return problems
