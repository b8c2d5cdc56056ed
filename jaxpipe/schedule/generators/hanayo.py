"""Hanayo: waves through the stages, with one copy of the weights."""

import dataclasses
import itertools
import math

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.check import peak_in_flight
from jaxpipe.schedule.generators import events
from jaxpipe.schedule.generators.blocks import closest_block
from jaxpipe.schedule.generators.eager import soonest
from jaxpipe.schedule.placement import wave
from jaxpipe.schedule.problems import Problem, refuse
from jaxpipe.schedule.simulate import UNIT, Costs, makespan

_RULE = events.Rule(pace=0.5, lead=0.0, staggers=True)
"""Microbatches enter twice as fast as a stage processes them. At that rate earlier ones pull ahead,
but a backward does not always precede a forward, which would open gaps that no other fits."""
_MOST_TRAVEL = 3
"""Units of a message in a block: longer ones leave no room within the peak for p microbatches."""


def hanayo(
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 2,
    memory_limit: float | None = None,
    fused: bool = False,
    costs: Costs = UNIT,
) -> Schedule:
    """Sends every microbatch down and up the stages W times; turns cost no message.

    The paper repeats units of p microbatches; here the wave continues across units, under a cap on
    the chunks in flight. The split form puts W in the gaps and leaves few of them. For other costs,
    and for messages that take time, the order is adapted (`in_time`), or replaced by that of a
    building block which leaves time for messages (`closest_block`).

    The bubble, in full-stage units at F=B=W, is (p-1)/(2W) split and 2(p-1) fused at m = p, less
    with more waves. At m > p and W = 1 it is the same fused, and split at most 2 more (p <= 12);
    with more waves up to 4.5 times as much split and 7.3 times fused (p <= 9, m <= 4p, W <= 4).

    Source: Liu et al., "Hanayo", arXiv 2308.15762.

    Args:
      num_chunks: v = 2W, even.
      memory_limit: peak in flight per stage, in microbatches of a full stage, at least 1; p by
        default, which is what 1F1B keeps on its first stage.
      costs: costs of one chunk.

    Raises:
      ValueError: v is odd, or the memory limit does not hold one microbatch.

    Example:
      >>> hanayo(4, 8, num_chunks=4).peak_in_flight
      (16, 16, 16, 16)
    """
    if num_chunks % 2:
        nearest = [v for v in (num_chunks - 1, num_chunks + 1) if v]
        rule = "it must be a multiple of 2"
        refuse([Problem("num_chunks", num_chunks, rule, nearest, schedule="hanayo")])
    if memory_limit is not None and memory_limit < 1:
        rule = "a stage must hold a whole microbatch, all chunks of it"
        refuse([Problem("memory_limit", memory_limit, rule, (1,), schedule="hanayo")])
    placement = wave(num_stages, num_waves=num_chunks // 2)
    most = num_stages if memory_limit is None else memory_limit
    unit, cap = [UNIT] * placement.num_virtual_stages, int(min(most, num_microbatches) * num_chunks)
    schedule = Schedule(
        name="hanayo-fused" if fused else "hanayo",
        placement=placement,
        num_microbatches=num_microbatches,
        orders=events.dispatch(placement, num_microbatches, unit, cap, _RULE, fused=fused),
        peak_in_flight=(cap,) * num_stages,
    )
    if costs == UNIT:
        return schedule
    return soonest([schedule, *_of_blocks(schedule, costs, fused)], costs)


def _of_blocks(schedule: Schedule, costs: Costs, fused: bool) -> list[Schedule]:
    """Orders a schedule as the building block that ends first; the list is empty if none fits."""
    placement, m = schedule.placement, schedule.num_microbatches
    most = min(_MOST_TRAVEL, math.ceil(costs.message / costs.f) + 1)
    ordered = []
    for travel in itertools.product(range(most + 1), range(most + 1)):
        block = closest_block(placement, fused=fused, travel=travel)
        whole = block.repeated(schedule.name, m)
        if max(peak_in_flight(whole)) <= max(peak_in_flight(schedule)):
            ordered.append(dataclasses.replace(whole, peak_in_flight=schedule.peak_in_flight))
    ordered.sort(key=lambda order: makespan(order, costs))
    return ordered[:1]
