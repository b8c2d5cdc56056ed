"""Everything that is known about a schedule before it runs, as plain values for JSON."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection
from typing import Any, NamedTuple

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.check.validate import simulated_only
from jaxpipe.schedule.lowering.slots import cached_slots
from jaxpipe.schedule.neighbors import neighbor_clock
from jaxpipe.schedule.search.slices import slice_ticks
from jaxpipe.schedule.simulate import Costs, TimedAction, Timeline, lock_step, simulate


def report(
    schedule: Schedule,
    costs: Costs,
    *,
    layers_per_chunk: int | None = None,
    weight_slots: int = 1,
    activation_bytes: int | None = None,
) -> dict[str, Any]:
    """Reports times on all clocks, memory, messages and data-axis transfers of a schedule.

    Args:
      costs: of one chunk.
      layers_per_chunk: cut ticks into time slices at the granularity of this many layers; None
        for one whole action per tick.
      weight_slots: gathered chunks a stage keeps at once under ZeRO-3, at least 1.
      activation_bytes: kept by one microbatch from F to W on one chunk; None if unknown.

    Returns:
      A tree of plain values:
      - ``schedule, stages, chunks, microbatches, costs``: the request;
      - ``free_running, neighbor, lock_step``: ``makespan``, ``bubble_ratio``, and per stage
        ``stage_spans``, ``stage_bubble_ratios``; no neighbor if it can only be simulated;
      - ``peak_in_flight``: per stage, in microbatches of a full stage;
      - ``peak_in_flight_bytes``: the same in bytes, only where ``activation_bytes`` is given;
      - ``actions``: per stage, on the free-running clock; a fused backward is its B, then its W;
      - ``messages``: ``total``, and by edge ``count`` and ``load``, the share of the free-running
        makespan in which the link is busy;
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
    free, neighbor, locked = timelines(schedule, costs, layers_per_chunk=layers_per_chunk)
    peak = free.peak_in_flight
    in_bytes = {}
    if activation_bytes is not None:
        in_bytes["peak_in_flight_bytes"] = [count * activation_bytes for count in peak]
    return {
        "schedule": schedule.name,
        "stages": schedule.num_stages,
        "chunks": schedule.num_chunks,
        "microbatches": schedule.batch_microbatches,
        "costs": dataclasses.asdict(costs),
        "free_running": _clock(free),
        "neighbor": None if neighbor is None else _clock(neighbor),
        "lock_step": _clock(locked),
        "peak_in_flight": [free.in_full_stages(count) for count in peak],
        **in_bytes,
        "actions": [[part for timed in row for part in _parts(timed, free)] for row in free.rows],
        "messages": _messages(free, busy=costs.message / free.makespan),
        "gathers": transfers(schedule, kinds=tuple(Kind), num_slots=weight_slots),
        "reductions": transfers(schedule, kinds=(Kind.W, Kind.BW), num_slots=weight_slots),
    }


def _messages(free: Timeline, *, busy: float) -> dict[str, Any]:
    """The messages by edge; ``busy`` is the share of the makespan that one of them takes."""
    return {
        "total": sum(free.messages.values()),
        "edges": [
            {"sender": sender, "receiver": receiver, "count": count, "load": count * busy}
            for (sender, receiver), count in free.messages.items()
        ],
    }


class Timelines(NamedTuple):
    """A schedule on every clock; ``neighbor`` is None if it can only be simulated."""

    free_running: Timeline
    neighbor: Timeline | None
    lock_step: Timeline


def timelines(
    schedule: Schedule, costs: Costs, *, layers_per_chunk: int | None = None
) -> Timelines:
    """Runs a schedule on every clock; arguments as for `report`."""
    ticked = schedule
    if layers_per_chunk is not None and schedule.slices is None:
        counts = [layers_per_chunk] * schedule.placement.num_virtual_stages
        ticked = slice_ticks(schedule, costs, counts)
    executed = None if any(simulated_only(schedule)) else neighbor_clock(ticked, costs)
    return Timelines(simulate(schedule, costs), executed, lock_step(ticked, costs))


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
    """What an action works on, as plain values."""
    chunk = schedule.placement.chunks[action.virtual_stage] % schedule.num_chunks
    own = {"virtual_stage": action.virtual_stage, "microbatch": action.microbatch}
    return {"chunk": chunk, **own}


def _parts(timed: TimedAction, timeline: Timeline) -> list[dict[str, Any]]:
    action = timed.action
    parts = [(action.kind, timed.start, timed.end)]
    if action.kind is Kind.BW:
        middle = timed.start + timeline.costs[action.virtual_stage].b
        parts = [(Kind.B, timed.start, middle), (Kind.W, middle, timed.end)]
    place = place_of(action, timeline.schedule)
    return [{"kind": kind.value, **place, "start": start, "end": end} for kind, start, end in parts]
