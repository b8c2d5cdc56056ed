"""Everything that is known about a schedule before it runs, as plain values for JSON."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.check.validate import simulated_only
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.lowering.transfers import cached_slots
from jaxpipe.schedule.problems import Problem, refuse
from jaxpipe.schedule.show.exchanges import Exchange, exchanges
from jaxpipe.schedule.simulate import Costs, TimedAction, Timeline, simulate

Clock = Literal["free", "device"]
"""Names of the clocks on the command line; the first is the free-running one."""


def report(
    schedule: Schedule,
    costs: Costs | Sequence[Costs],
    *,
    clock: Clock | None = None,
    weight_slots: int = 1,
    activation_bytes: int | None = None,
) -> dict[str, Any]:
    """Reports times on both clocks, memory, messages and data-axis transfers of a schedule.

    Args:
      costs: costs of one chunk; or, if chunks differ, of every virtual stage.
      clock: clock of the actions and messages; None as for `Timelines.on`.
      weight_slots: gathered chunks a stage keeps at once under ZeRO-3, at least 1.
      activation_bytes: kept by one microbatch from F to W on one chunk; None if unknown.

    Returns:
      A tree of plain values:
      - ``schedule, stages, chunks, microbatches, costs, clock``: the request; of costs that
        differ by virtual stage, the list;
      - ``free_running, device``: ``makespan``, ``bubble_ratio``, and per stage ``stage_spans``,
        ``stage_bubble_ratios``; no device if it can only be simulated;
      - ``peak_in_flight``: per stage, in microbatches of a full stage;
      - ``peak_in_flight_bytes``: the same in bytes, only where ``activation_bytes`` is given;
      - ``ticks``: by tick, when each stage starts its layers; at the end, when it is done; empty
        on the free-running clock;
      - ``actions``: per stage; a fused backward is its B, then its W; with ``tick`` if there are
        ticks;
      - ``overlapped``: only if there are any, the F that run together with the backward after them;
      - ``messages``: ``total``; how many are received a tick ``late``; by edge ``count`` and
        ``load``, the share of the makespan in which the link is busy; ``sent``: all of them;
      - ``moves``: when the ticks gather and reduce chunks under ZeRO-3 with one slot of each;
      - ``gathers, reductions``: chunk weight gathers and gradient reductions of each stage in one
        step under ZeRO-3.

    Raises:
      ScheduleError: the schedule cannot run.

    Example:
      >>> from jaxpipe.schedule.generators.one_f_one_b import one_f_one_b
      >>> shown = report(one_f_one_b(2, 4), Costs(1, 1, 1))
      >>> shown["peak_in_flight"], shown["messages"]["total"], shown["gathers"]
      ([2.0, 1.0], 8, [1, 1])
    """
    clocks = timelines(schedule, costs)
    shown = clocks.on(clock)
    peak = shown.peak_in_flight
    in_bytes = {}
    if activation_bytes is not None:
        in_bytes["peak_in_flight_bytes"] = [count * activation_bytes for count in peak]
    priced = [dataclasses.asdict(cost) for cost in shown.costs]
    exchanged = exchanges(shown)
    return {
        "schedule": schedule.name,
        "stages": schedule.num_stages,
        "chunks": schedule.num_chunks,
        "microbatches": schedule.batch_microbatches,
        "costs": priced[0] if len(set(shown.costs)) == 1 else priced,
        "clock": "free" if shown is clocks.free_running else "device",
        "free_running": _clock(clocks.free_running),
        "device": None if clocks.device is None else _clock(clocks.device),
        "peak_in_flight": [shown.in_full_stages(count) for count in peak],
        **in_bytes,
        "ticks": [list(tick) for tick in shown.ticks],
        "actions": [[part for timed in row for part in _parts(timed, shown)] for row in shown.rows],
        **({"overlapped": [*map(str, schedule.overlapped)]} if schedule.overlapped else {}),
        "messages": _messages(exchanged.messages, shown),
        "moves": [move._asdict() for move in exchanged.moves],
        "gathers": transfers(schedule, kinds=tuple(Kind), num_slots=weight_slots),
        "reductions": transfers(schedule, kinds=(Kind.W, Kind.BW), num_slots=weight_slots),
    }


def _messages(messages: Sequence[Exchange], timeline: Timeline) -> dict[str, Any]:
    edges: dict[tuple[int, int], list[float]] = {}
    for message in messages:
        cost = timeline.costs[message.action.virtual_stage].message
        edges.setdefault((message.sender, message.receiver), []).append(cost)
    return {
        "total": len(messages),
        "late": sum(message.late for message in messages),
        "edges": [
            {
                "sender": sender,
                "receiver": receiver,
                "count": len(times),
                "load": math.fsum(times) / timeline.makespan,
            }
            for (sender, receiver), times in sorted(edges.items())
        ],
        "sent": [
            message._asdict() | {"action": str(message.action), "reader": str(message.reader)}
            for message in messages
        ],
    }


class Timelines(NamedTuple):
    """A schedule on both clocks; ``device`` is None if it can only be simulated, ``measured`` if it
    has not run."""

    free_running: Timeline
    device: Timeline | None
    measured: Timeline | None = None

    def on(self, clock: Clock | None = None) -> Timeline:
        """The timeline of one clock; without one, of devices if the schedule can be executed.

        Raises:
          ArgumentError: the schedule can only be simulated, and has no device clock.
        """
        if clock == "device" and self.device is None:
            rule = "is for schedules that can be executed, and $name can only be simulated"
            others = {"name": self.free_running.schedule.name}
            refuse([Problem("clock", clock, rule, {"clock": "free"}, others)])
        return self.free_running if clock == "free" or self.device is None else self.device


def timelines(
    schedule: Schedule, costs: Costs | Sequence[Costs], *, measured: Timeline | None = None
) -> Timelines:
    """Runs a schedule on both clocks; arguments as for `report`.

    Args:
      measured: a step that ran it (`jaxpipe.measure.timeline`), to be shown beside the others;
        ``measured.costs`` are the mean times of its actions.
    """
    executed = None if any(simulated_only(schedule)) else device_clock(schedule, costs)
    return Timelines(simulate(schedule, costs), executed, measured)


def transfers(schedule: Schedule, *, kinds: Collection[Kind], num_slots: int) -> list[int]:
    """Counts the chunks each stage moves over the data axis in one step, under ZeRO-3.

    A chunk moves when an action needs it and no slot holds it: its weights are gathered, or its
    gradient buffer is opened, to be reduced when the slot is given up.

    Args:
      kinds: all kinds for weight gathers; W and BW for gradient reductions.
      num_slots: chunks a stage holds at once, at least 1.

    Example:
      >>> from jaxpipe.schedule.generators.gpipe import gpipe
      >>> transfers(gpipe(2, 8), kinds=tuple(Kind), num_slots=1)
      [1, 1]
    """
    chunks = schedule.placement.chunks
    counts = []
    for order in schedule.orders:
        used = (chunks[action.virtual_stage] for action in order if action.kind in kinds)
        # Consecutive actions of a chunk are one use: only a change can move anything.
        runs = [chunk for chunk, _ in itertools.groupby(used)]
        stays, _ = cached_slots(range(len(runs)), runs, num_slots=num_slots)
        counts.append(len(stays))
    return counts


def _clock(timeline: Timeline) -> dict[str, Any]:
    names = "makespan", "bubble_ratio", "stage_spans", "stage_bubble_ratios"
    values = (getattr(timeline, name) for name in names)
    shown = (list(value) if isinstance(value, tuple) else value for value in values)
    return dict(zip(names, shown, strict=True))


def place_of(action: Action, schedule: Schedule) -> dict[str, int]:
    """Chunk, virtual stage and microbatch of an action, as plain values."""
    chunk = schedule.placement.chunks[action.virtual_stage] % schedule.num_chunks
    own = {"virtual_stage": action.virtual_stage, "microbatch": action.microbatch}
    return {"chunk": chunk, **own}


def _parts(timed: TimedAction, timeline: Timeline) -> list[dict[str, Any]]:
    action = timed.action
    parts = [(action.kind, timed.start, timed.end)]
    if action.kind is Kind.BW:
        cost = timeline.costs[action.virtual_stage]
        middle = timed.start + (timed.end - timed.start) * cost.b / (cost.b + cost.w)
        parts = [(Kind.B, timed.start, middle), (Kind.W, middle, timed.end)]
    place: dict[str, Any] = {**place_of(action, timeline.schedule)}
    if timed.tick is not None:
        place["tick"] = timed.tick
    return [{"kind": kind.value, **place, "start": start, "end": end} for kind, start, end in parts]
