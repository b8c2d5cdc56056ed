"""The neighbor clock: how long the tick table of a schedule takes on GPUs.

A permute waits for the stages that this one exchanges messages with, in both directions; a sum
over all stages, for embedding, head and the embedding's gradient, waits for everybody. Nothing else
holds a stage up, so that a slow tick of one stage delays another only along the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.check.slice_rules import chunk_layers
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.lowering.table import NONE, TickTable
from jaxpipe.schedule.simulate import (
    Costs,
    TimedAction,
    Timeline,
    kind_durations,
    of_virtual_stages,
)


def neighbor_clock(schedule: Schedule, costs: Costs | Sequence[Costs]) -> Timeline:
    """Runs a schedule's tick table with the waits that it has on GPUs.

    Embedding and head take no time here, only the waiting that their sums over stages cause. A late
    message leaves when its sender begins the next tick and arrives ``costs.message`` later at the
    earliest; another one starts when both ends have finished their tick.

    Args:
      schedule: whole actions, or the slices of `Schedule.slices`.
      costs: of one chunk; or, if chunks differ, of every virtual stage.

    Raises:
      ScheduleError: the schedule cannot run.
      ValueError: it can only be simulated, or there is not one cost for every virtual stage.

    Example:
      >>> from jaxpipe.schedule.generators.v_schedules import zb_v
      >>> round(neighbor_clock(zb_v(4, 16), Costs(1, 1.2, 0.8)).bubble_ratio, 3)
      0.059
    """
    costs = of_virtual_stages(schedule.placement, costs)
    layers = chunk_layers(schedule.slices or ())
    table = lower(schedule, [layers.get(s, 1) for s in range(len(costs))], clock="neighbor")
    work = work_of(table, costs)
    message = max(cost.message for cost in costs) if schedule.num_stages > 1 else 0.0
    starts = replay(table, np.sum(list(work.values()), axis=0), message=message)
    parts: list[list[TimedAction]] = [[] for _ in schedule.orders]
    held, begins = schedule.placement.virtual_stages, starts[:-1]
    for kind, cell in table.passes.items():
        ends = begins + work[kind]
        for tick, stage in np.argwhere(cell.lo < cell.hi).tolist():
            at = tick, stage
            virtual_stage = held[stage][cell.chunk[at]]
            action = Action(virtual_stage, kind, int(cell.microbatch[at]))
            lo, hi = int(cell.lo[at]), int(cell.hi[at])
            some = None if hi - lo == table.layer_counts[virtual_stage] else (lo, hi)
            times = float(begins[at]), float(ends[at])
            parts[stage].append(TimedAction(action, *times, some, tick))
        begins = ends
    # Within a tick, kinds stand in the order in which they run.
    rows = tuple(tuple(sorted(row, key=lambda part: cast(int, part.tick))) for row in parts)
    ticks = tuple(map(tuple, starts.tolist()))
    return Timeline(schedule, costs, "neighbor", rows, float(starts[-1].max()), ticks)


def replay(
    table: TickTable,
    work: np.ndarray,
    *,
    message: float = 0.0,
    sums: bool = True,
    clock: str = "neighbor",
) -> np.ndarray:
    """When each stage starts its layers in each tick.

    Messages that stages wait for come at the end of a tick; late ones travel under its layers.

    Args:
      work: how long that takes, ``[ticks, stages]``.
      message: how long the messages of a tick take.
      sums: whether stages wait for each other in the sums of embedding and head.
      clock: "neighbor"; or "lock-step", on which the permutes of a tick wait for all stages, as on
        simulated devices.

    Returns:
      ``[ticks + 1, stages]``; the last row is when the stages are done.
    """
    stages = work.shape[1]
    together = clock == "lock-step"
    linked = np.ones((stages, stages), bool) if together else np.eye(stages, dtype=bool)
    for channel in table.channels:
        for sender, receiver in channel.edges:
            linked[sender, receiver] = linked[receiver, sender] = True
    late = any(channel.late for channel in table.channels)
    enters = (sums & (table.embed != NONE)) | (together and late)
    leaves = sums & ((table.head != NONE) | (table.embed_gradient != NONE).any(axis=1))

    def of_neighbors(times: np.ndarray) -> np.ndarray:
        latest: np.ndarray = np.where(linked, times, 0.0).max(1)
        return latest + message

    now, starts = np.zeros(stages), np.zeros((table.num_ticks + 1, stages))
    for tick in range(table.num_ticks):
        begun = now
        now = np.full(stages, now.max()) if enters[tick] else now
        starts[tick] = now
        now = now + work[tick]
        if late:
            now = np.maximum(now, of_neighbors(begun))
        if table.meets[tick]:
            now = of_neighbors(now)
        if leaves[tick]:
            now = np.full(stages, now.max())
    starts[-1] = now
    return starts


def work_of(table: TickTable, costs: Sequence[Costs]) -> dict[Kind, np.ndarray]:
    """How long the layers of each kind of action take, ``[ticks, stages]``.

    Args:
      costs: of every virtual stage.
    """
    held = np.asarray(table.schedule.placement.virtual_stages)
    of_layer = [
        {kind: time / layers for kind, time in of_chunk.items()}
        for of_chunk, layers in zip(kind_durations(costs), table.layer_counts, strict=True)
    ]
    stages = np.arange(len(held))
    return {
        kind: (cell.hi - cell.lo)
        * np.asarray([one[kind] for one in of_layer])[held[stages, cell.chunk]]
        for kind, cell in table.passes.items()
    }
