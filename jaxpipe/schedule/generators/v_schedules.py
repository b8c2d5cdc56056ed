"""Schedules on the V placement that trade bubble for memory: V-Min, V-Half, V-ZB, and their kin.

Each is a building block (`jaxpipe.schedule.generators.blocks`) with strides and gaps that
the paper gives. `jaxpipe.schedule.search.controllable_memory` searches for others.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.generators.blocks import Block, BlockPlan, closest_block, split_block
from jaxpipe.schedule.generators.eager import earliest, soonest
from jaxpipe.schedule.placement import wave
from jaxpipe.schedule.simulate import UNIT, Costs, makespan

_GAPS = range(1, 7)
"""Units at the turns of the blocks that are tried for other costs than those of the paper."""


def v_min(num_stages: int, num_microbatches: int, *, costs: Costs = UNIT) -> Schedule:
    """Keeps about a third of 1F1B's activations: every hop takes one unit.

    With unequal costs the bubble can grow with every microbatch. With two stages it is V-Half,
    which keeps no more there.

    Example:
      >>> v_min(4, 8).peak_in_flight
      (4, 4, 4, 4)
    """
    return _named("v-min", v_min_block(num_stages), num_microbatches, costs)


def v_half(num_stages: int, num_microbatches: int, *, costs: Costs = UNIT) -> Schedule:
    """Keeps half of 1F1B's activations: F0 and B1 take two units per hop, F1 and B0 one.

    From m = 2p on the bubble does not grow with m if W+2B >= 2F and W+2F >= 2B; for odd p only
    then, for even p also at other costs.

    Example:
      >>> v_half(4, 8).peak_in_flight
      (6, 6, 6, 6)
    """
    return _named("v-half", v_half_block(num_stages), num_microbatches, costs)


def v_zb(num_stages: int, num_microbatches: int, *, costs: Costs = UNIT) -> Schedule:
    """Leaves no gap in a stage's span, at 1F1B's peak: six units down one stage and up again.

    That is at F=B=W and m >= 2p; a barrier between optimizer steps costs (p-1)/2 of a full stage.

    Example:
      >>> v_zb(4, 8).peak_in_flight
      (8, 8, 8, 8)
    """
    return _named("v-zb", v_zb_block(num_stages), num_microbatches, costs)


def zb_v(num_stages: int, num_microbatches: int, *, costs: Costs = UNIT) -> Schedule:
    """Builds ZB-V, the zero-bubble paper's name for the schedule of :func:`v_zb`.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241.

    Example:
      >>> zb_v(4, 8).orders == v_zb(4, 8).orders
      True
    """
    return dataclasses.replace(v_zb(num_stages, num_microbatches, costs=costs), name="zb-v")


def one_f_one_b_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds 1F1B-V: fused backwards, two thirds of 1F1B's activations.

    Example:
      >>> one_f_one_b_v(4, 8).peak_in_flight
      (6, 6, 6, 6)
    """
    whole = one_f_one_b_v_block(num_stages).repeated("1f1b-v", num_microbatches)
    # Every stage may keep as much as the one that keeps the most, which fills more of its gaps.
    caps = (max(whole.peak_in_flight or ()),) * num_stages
    return earliest(dataclasses.replace(whole, peak_in_flight=caps), UNIT)


def one_f_one_b_v_block(num_stages: int) -> Block:
    return closest_block(wave(num_stages), fused=True)


def v_min_block(num_stages: int) -> Block:
    if num_stages == 2:
        return v_half_block(num_stages)
    return _uniform(num_stages, 2, (1, 1 if num_stages % 3 else 3, 1))


def v_half_block(num_stages: int) -> Block:
    return _uniform(num_stages, 3, (1, 1 if num_stages % 2 else 4, 2))


def v_zb_block(num_stages: int) -> Block:
    return _uniform(num_stages, 6, (1, 1, 1))


def _uniform(num_stages: int, stride: int, gaps: Sequence[int]) -> Block:
    block = split_block((stride,) * (num_stages - 1), gaps)
    assert block is not None, "the paper's blocks never collide"
    return block


def _named(name: str, block: Block, num_microbatches: int, costs: Costs) -> Schedule:
    """Builds the schedule of a block; with other costs than the paper's, maybe in another order."""
    # Two rounds of the pipeline show what comes before the steady state, and after it.
    trial = min(num_microbatches, 2 * len(block.peaks))

    def ends(plan: BlockPlan) -> float:
        schedule = plan.schedule(name, trial)
        return math.inf if schedule is None else makespan(schedule, costs)

    plans, caps = [BlockPlan(block, block.peaks)], (max(block.peaks),) * len(block.peaks)
    for blocks in () if costs == UNIT else _kin(block):
        choices = itertools.product(blocks, (False, True), (UNIT, costs))
        tried = (BlockPlan(other, caps, planned, reserve) for other, reserve, planned in choices)
        plans += sorted(tried, key=ends)[:1]
    # A plan that ran so far may still stop with more microbatches; the paper's never do.
    schedules = [*filter(None, (plan.schedule(name, num_microbatches) for plan in plans))]
    return schedules[0] if costs == UNIT else soonest(schedules, costs)


def _kin(block: Block) -> Iterator[list[Block]]:
    """Yields lists of blocks that keep no more in flight: first this one and those with other
    turns, then those with other turns and a first or last hop twice as long."""
    hops, leads = len(block.peaks) - 1, [row[1] - row[0] for row in block.starts]
    strides = ((leads[0] - leads[-1]) // max(hops, 1),) * hops
    stretched = []
    if hops > 1:
        stretched = [(2 * strides[0], *strides[1:]), (*strides[:-1], 2 * strides[-1])]
    for first, paths in (([block], [strides]), ([], stretched)):
        turns = itertools.product(paths, itertools.product(_GAPS, repeat=3))
        others = (split_block(path, gaps) for path, gaps in turns)
        yield first + [one for one in others if one and max(one.peaks) <= max(block.peaks)]
