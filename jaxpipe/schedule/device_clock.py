"""The device clock: how long the tick table of a schedule takes on devices that wait for messages.

A stage waits for the messages that its tick receives, and for nothing else: a prompt one is awaited
at the end of the tick that sends it, a late one at the end of the next (see
`jaxpipe.schedule.lowering.lower`). Its sender goes on. NCCL works like this while a message fits
into its buffers (``NCCL_BUFFSIZE``); senders of larger ones wait for their receivers, too
(`Costs.rendezvous`): a message then begins when both have come, and both wait for its end. Late
messages travel in every tick between all pairs that ever have one, so that these stay within a tick
of each other. Where all stages compute embedding and head together, their sums wait for all stages.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, cast

import numpy as np

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.lowering.table import NONE, Cell, TickTable
from jaxpipe.schedule.partition import chunk_costs, partition
from jaxpipe.schedule.simulate import (
    Costs,
    TimedAction,
    Timeline,
    kind_durations,
    of_virtual_stages,
    simulate,
)


def device_clock(
    schedule: Schedule,
    costs: Costs | Sequence[Costs],
    *,
    together: bool = False,
    head: float = 0.0,
) -> Timeline:
    """Runs a schedule's tick table with the waits that it has on devices.

    Args:
      costs: costs of one chunk; or, if chunks differ, of every virtual stage. The embedding and the
        head that the first and the last virtual stage compute are part of their costs.
      together: whether all stages compute embedding and head together.
      head: time that a microbatch's embedding and head then take on each stage.

    Raises:
      ScheduleError: the schedule cannot run.
      ValueError: there is not one cost for every virtual stage.

    Example:
      >>> from jaxpipe.schedule.generators.v_schedules import zb_v
      >>> round(device_clock(zb_v(4, 16), Costs(1, 1.2, 0.8)).bubble_ratio, 3)
      0.036
    """
    costs = of_virtual_stages(schedule.placement, costs)
    table = lower(schedule, [1] * len(costs), together=together)
    work = work_of(table, costs)
    message = max(cost.message for cost in costs) if schedule.num_stages > 1 else 0.0
    rendezvous = any(cost.rendezvous for cost in costs)
    durations = np.sum(list(work.values()), axis=0)
    starts = replay(table, durations, message=message, head=head, rendezvous=rendezvous)
    parts: list[list[TimedAction]] = [[] for _ in schedule.orders]
    virtual_stages, begins = schedule.placement.virtual_stages, starts[:-1]
    for kind, cell in table.passes.items():
        ends = begins + work[kind]
        for tick, stage in np.argwhere(cell.runs).tolist():
            at = tick, stage
            action = Action(virtual_stages[stage][cell.chunk[at]], kind, int(cell.microbatch[at]))
            parts[stage].append(TimedAction(action, float(begins[at]), float(ends[at]), tick=tick))
        begins = ends
    # Within a tick, kinds stand in the order in which they run.
    rows = tuple(tuple(sorted(row, key=lambda part: cast(int, part.tick))) for row in parts)
    ticks = tuple(map(tuple, starts.tolist()))
    return Timeline(schedule, costs, "device", rows, float(starts[-1].max()), ticks)


class Cut(NamedTuple):
    """A cut of a model's layers into chunks, and its time on the device clock.

    Args:
      together: whether all stages compute embedding and head together, or the ends alone.
    """

    makespan: float
    together: bool
    layer_counts: tuple[int, ...]


def cuts(
    schedule: Schedule,
    costs: Costs,
    layer_costs: Sequence[float],
    embed: float,
    head: float,
    *,
    given: tuple[int, ...] | None = None,
) -> list[Cut]:
    """Times the cuts that may be best, and lists them by time: all stages compute embedding and
    head together, each its share; or the ends do, beside as many layers as other chunks have; or
    beside fewer, which makes other chunks larger.

    Args:
      costs: of an average chunk, without embedding and head.
      layer_costs: F + B + W of every layer, in any unit.
      embed, head: likewise of embedding and head.
      given: the layers of every chunk, in place of balanced ones.

    Example:
      >>> from jaxpipe.schedule.generators.depth_first import one_f_one_b
      >>> schedule = one_f_one_b(2, 4, fused=True)
      >>> cuts(schedule, Costs(3, 3, 3), [1] * 6, 0, 2)[0].layer_counts
      (4, 2)
    """
    beside = [*layer_costs]
    beside[0], beside[-1] = beside[0] + embed, beside[-1] + head
    placement, whole = schedule.placement, math.fsum(layer_costs)
    unit = (costs.f + costs.b + costs.w) * placement.num_virtual_stages / whole

    def cut(loads: Sequence[float], counts: tuple[int, ...], *, together: bool) -> Cut:
        chunks = chunk_costs(costs.times(math.fsum(loads) / whole), loads, counts)
        share = (embed + head) * unit / schedule.num_stages if together else 0.0
        clock = device_clock(schedule, chunks, together=together, head=share)
        return Cut(clock.makespan, together, counts)

    alone, balanced = (given or partition(loads, placement) for loads in (layer_costs, beside))
    found = [cut(layer_costs, alone, together=True)]
    found += [cut(beside, counts, together=False) for counts in dict.fromkeys((alone, balanced))]
    return sorted(found, key=lambda one: one.makespan)


Clock = Literal["free", "device"]
"""Names of the clocks on the command line; the first is the free-running one."""


def timelines(schedule: Schedule, costs: Costs | Sequence[Costs]) -> tuple[Timeline, Timeline]:
    """Runs a schedule on both clocks, the free-running one and that of devices; arguments as for
    `simulate`."""
    return simulate(schedule, costs), device_clock(schedule, costs)


def replay(
    table: TickTable,
    work: np.ndarray,
    *,
    message: float = 0.0,
    head: float = 0.0,
    rendezvous: bool = False,
) -> np.ndarray:
    """Computes when each stage starts its layers in each tick.

    Args:
      work: time that these layers take, ``[ticks, stages]``.
      message: time that a message takes.
      head: as for `device_clock`.
      rendezvous: as in `Costs`.

    Returns:
      ``[ticks + 1, stages]``; the last row is when the stages are done.
    """
    late = [edge for channel in table.channels for edge in channel.late_edges]
    prompt = [[edge for edges in pairs for edge in edges] for pairs in table.exchanges]
    outer = table.outer
    enters = table.together & (outer.embed != NONE)
    leaves = table.together & ((outer.head != NONE) | (outer.embed_gradient != NONE).any(axis=1))
    # Lists, because numpy takes longer for a few stages.
    now, starts = [0.0] * work.shape[1], list[list[float]]()
    for tick, durations in enumerate(work.tolist()):
        if enters[tick]:
            now = [max(now)] * len(now)
        starts.append(now)
        ends = [start + duration for start, duration in zip(now, durations, strict=True)]
        ends = received(ends, now, late, message, rendezvous=rendezvous)
        now = received(ends, ends, prompt[table.exchange[tick]], message, rendezvous=rendezvous)
        if leaves[tick]:
            now = [max(now) + head * (outer.head[tick] != NONE)] * len(now)
    return np.asarray([*starts, now])


def received(
    times: Sequence[float],
    come: Sequence[float],
    edges: Iterable[tuple[int, int]],
    message: float,
    *,
    rendezvous: bool,
) -> list[float]:
    """Computes when stages are done that also wait for messages along the edges.

    Args:
      times: when each stage is done without.
      come: when each stage comes to the exchange of messages.
      message, rendezvous: as for `replay`.
    """
    # Plans run this millions of times: comparisons take a third of the time of `max`.
    latest = [*times]
    for sender, receiver in edges:
        begins = come[sender]
        if rendezvous and come[receiver] > begins:
            begins = come[receiver]
        arrival = begins + message
        if rendezvous and arrival > latest[sender]:
            latest[sender] = arrival
        if arrival > latest[receiver]:
            latest[receiver] = arrival
    return latest


def work_of(table: TickTable, costs: Sequence[Costs]) -> dict[Kind, np.ndarray]:
    """Computes the time that the layers of each kind of action take, ``[ticks, stages]``, from the
    costs of every virtual stage."""
    virtual_stages = np.asarray(table.schedule.placement.virtual_stages)
    of_chunk, stages = kind_durations(costs), np.arange(len(virtual_stages))

    def of_kind(kind: Kind, cell: Cell) -> np.ndarray:
        held = virtual_stages[stages, cell.chunk]
        work: np.ndarray = np.array([durations[kind] for durations in of_chunk], float)[held]
        if (slices := table.schedule.num_slices) > 1:
            for s, cost in enumerate(costs):
                work += (held == s) * cost.more(kind, cell.microbatch, slices)
        work *= cell.runs
        return work

    return {kind: of_kind(kind, cell) for kind, cell in table.passes.items()}
