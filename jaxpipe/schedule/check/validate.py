"""Proves that a schedule can run: every action once, in an order that never waits for itself."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import string
from collections.abc import Callable, Iterator, Sequence

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.check.grid import MAX_MISSING, SHOWN_PROBLEMS, Fault, message
from jaxpipe.schedule.check.schedule_types import wrong_types
from jaxpipe.schedule.check.walk import Walk, walk
from jaxpipe.schedule.problems import Problem, below_one, refuse


class ScheduleError(ValueError):
    """A schedule that cannot run as written."""


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most chunk activations that each stage keeps; the order decides, whatever the costs."""
    return tuple(max(chunks_in_flight(order), default=0) for order in schedule.orders)


def chunks_in_flight(order: Sequence[Action]) -> list[int]:
    """The chunk activations a stage keeps after each action: one more by F, or by R where there is
    any, and one less by the W or BW that frees it."""
    keeper = Kind.R if any(action.kind is Kind.R for action in order) else Kind.F
    changes = dict.fromkeys(Kind, 0) | {keeper: 1, Kind.W: -1, Kind.BW: -1}
    return list(itertools.accumulate(changes[action.kind] for action in order))


def validate(
    schedule: Schedule,
    *,
    inbox_slots: int | None = None,
    spell: Callable[[Action], str] = str,
) -> None:
    """Checks that a schedule is complete, in order, free of deadlock and within its promise.

    Args:
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
    checks = _Checks(schedule, spell)
    shape, (out_of_range, actions) = list(checks.shape()), checks.actions()
    # An index out of range may be why the shape is wrong.
    problems = shape + out_of_range if shape else out_of_range + actions
    problems += [] if problems else checks.pairs()
    # A walk with inbox slots means something only once every sender and receiver is in place.
    walked = walk(schedule, inbox_slots=None if problems else inbox_slots)
    if not problems:
        problems = [*checks.deadlocks(walked, inbox_slots), *checks.broken_promises()]
    if problems:
        raise ScheduleError(message(schedule, problems, walked.ticks, spell))


def simulated_only(schedule: Schedule) -> Iterator[Problem]:
    """Says why a valid schedule can only be simulated; nothing if it can also be executed."""
    why, copies = "can only be simulated: it", schedule.placement.num_copies
    if copies > 1:
        rule = f"{why} needs {copies} copies of the model's weights, and the runtime keeps one"
        yield Problem("schedule", schedule.name, rule, ("hanayo", "dualpipe-v"))


# The kinds one virtual stage has run for one microbatch, as bits.
_BIT = {Kind.F: 1, Kind.B: 2, Kind.W: 4, Kind.BW: 8, Kind.R: 16}
_SPLIT, _FUSED = _BIT[Kind.B] | _BIT[Kind.W], _BIT[Kind.BW]


@dataclasses.dataclass(frozen=True)
class _Checks:
    """The checks of `validate`, which find faults."""

    schedule: Schedule
    spell: Callable[[Action], str]

    def shape(self) -> Iterator[Fault]:
        schedule, placement = self.schedule, self.schedule.placement
        chunks_of = collections.Counter(placement.stages)
        stages = range(max(len(schedule.orders), len(chunks_of)))
        uneven = "The placement does not give every stage the same number of virtual stages"
        if not chunks_of:
            yield Fault(f"{uneven}: it is empty.")
        elif set(chunks_of) - set(stages) or len({chunks_of[d] for d in stages}) > 1:
            least, most = (
                min(stages, key=chunks_of.__getitem__),
                max(chunks_of, key=chunks_of.__getitem__),
            )
            counts = f"stage {least} holds {chunks_of[least]}, stage {most} holds {chunks_of[most]}"
            yield Fault(f"{uneven}: {counts}.")
        elif placement.num_copies < 1 or chunks_of[0] % placement.num_copies:
            yield Fault(
                f"{chunks_of[0]} virtual stages on every stage are not those of num_copies="
                f"{placement.num_copies} copies of a model."
            )
        else:
            m, orders, promise = schedule.num_microbatches, schedule.orders, schedule.peak_in_flight
            if m < 1:
                yield Fault(f"num_microbatches={m} is below 1.")
            if len(orders) != len(chunks_of):
                yield Fault(f"There are {len(orders)} orders for {len(chunks_of)} stages.")
            if promise is not None and len(promise) != len(chunks_of):
                yield Fault(
                    f"peak_in_flight has {len(promise)} values for {len(chunks_of)} stages."
                )

    def actions(self) -> tuple[list[Fault], list[Fault]]:
        """Finds actions out of range; and those on the wrong stage, repeated, mixed or missing."""
        stages, m = self.schedule.placement.stages, self.schedule.num_microbatches
        num_virtual_stages, kinds = len(stages), self.schedule.kinds
        seen: dict[int, int] = {}
        outside: list[Fault] = []
        misplaced: list[Fault] = []

        def fault(faults: list[Fault], d: int, k: int, text: str) -> None:
            action = self.schedule.orders[d][k]
            faults.append(Fault(f"{self.spell(action)} on stage {d} {text}", d, k))

        for d, order in enumerate(self.schedule.orders):
            for k, action in enumerate(order):
                s, i, bit = action.virtual_stage, action.microbatch, _BIT[action.kind]
                known = 0 <= s < num_virtual_stages
                if not (known and 0 <= i < m):
                    count, what = (m, "microbatch") if known else (len(stages), "virtual stage")
                    # If there is none at all, that alone is the problem.
                    if count > 0:
                        fault(outside, d, k, f"has no {what}: they run from 0 to {count - 1}.")
                elif action.kind not in kinds:
                    fault(misplaced, d, k, f"is none of {', '.join(kinds)}.")
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
        return outside, misplaced + list(itertools.islice(self._missing(seen), MAX_MISSING))

    def pairs(self) -> Iterator[Fault]:
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
                yield Fault(f"{text}.")
            elif (
                after is None
                or after.kind not in (Kind.B, Kind.BW)
                or after.microbatch == action.microbatch
            ):
                shown = "nothing" if after is None else self.spell(after)
                rule = "directly followed by a backward of another microbatch on its stage"
                yield Fault(f"{text}, {rule}: {shown} follows.", d, k)

    def _missing(self, seen: dict[int, int]) -> Iterator[Fault]:
        schedule, m = self.schedule, self.schedule.num_microbatches
        kinds = {action.kind for order in schedule.orders for action in order}
        # If no action of a backward is left, assume the form that all others have.
        fused = Kind.BW in kinds and not kinds & {Kind.B, Kind.W}
        again = (Kind.R,) if Kind.R in schedule.kinds else ()
        whole = (Kind.F, *again, *((Kind.BW,) if fused else (Kind.B, Kind.W)))
        for s, stage in enumerate(schedule.placement.stages):
            for i in range(m):
                ran = seen.get(s * m + i, 0)
                for kind in (Kind.F, *again) if ran & _FUSED else whole:
                    if not ran & _BIT[kind]:
                        absent = Action(s, kind, i)
                        text = f"{self.spell(absent)} is missing from stage {stage}"
                        if kind is Kind.B and not ran & _SPLIT:
                            text += f" (and so is {self.spell(Action(s, Kind.BW, i))})"
                        yield Fault(f"{text}.", stage, absent=absent)

    def deadlocks(self, walked: Walk, inbox_slots: int | None) -> list[Fault]:
        """Says why stages stop; those that stop by themselves come first."""
        alone, dependent = [], []
        for d, blocker in sorted(walked.blockers.items()):
            k = len(walked.ticks[d])
            stuck = self.schedule.orders[d][k]
            text = f"Deadlock: stage {d} stops for good at {self.spell(stuck)}, which waits for "
            if isinstance(blocker, int):
                text += f"one of the {inbox_slots} inbox slots of stage {blocker}."
                dependent.append(Fault(text, d, k))
                continue
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
                alone.append(Fault(f"{self.spell(stuck)} on stage {d} {own}", d, k))
            else:
                dependent.append(Fault(f"{text}the result of {self.spell(blocker)}.", d, k))
        return alone + dependent

    def broken_promises(self) -> Iterator[Fault]:
        for d, promised in enumerate(self.schedule.peak_in_flight or ()):
            counts = chunks_in_flight(self.schedule.orders[d])
            k = next((k for k, count in enumerate(counts) if count > promised), None)
            if k is not None:
                text = (
                    f"{self.spell(self.schedule.orders[d][k])} on stage {d} exceeds the promised "
                    f"peak in flight: {max(counts)} chunks against {promised}."
                )
                yield Fault(text, d, k)
