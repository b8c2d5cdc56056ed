"""The search for the building block whose schedule ends first under a memory limit.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.generators.blocks import WORK, Block, BlockPlan, split_block
from jaxpipe.schedule.generators.v_schedules import v_half_block, v_min_block, v_zb_block
from jaxpipe.schedule.problems import Problem, refuse
from jaxpipe.schedule.simulate import UNIT, Costs, simulate

_PERIOD = 2 * WORK
_STRIDES = range(2, 7)
_MAX_GAP = 9
"""At p=4, 6, 8 longer turns find nothing better; fewer miss the frontier at some limits."""
_SPREAD = 8
"""Largest distance, in units held, of a block from the one expected to fill the memory."""
_MAX_BLOCKS = 100
"""At p=4, 6, 8 the winner is among the first 10 with equal costs, mostly among 60 with others."""
_TRIAL_ACTIONS = 200_000
"""Number of actions that the search may simulate by default: about two seconds."""
_MAX_FINALISTS = 8


def controllable_memory(
    num_stages: int,
    num_microbatches: int,
    *,
    memory_limit: float | None = None,
    costs: Costs = UNIT,
    trial_actions: int = _TRIAL_ACTIONS,
) -> Schedule:
    """Searches for the building block whose schedule ends first under a memory limit.

    Tries blocks with one or two strides and every turn of the V up to `_MAX_GAP` units, starting
    with those that fill the memory best, and orders each with the real and with equal costs. It
    never ends later than V-Min, V-Half or V-ZB where they fit.

    For a limit of k/2 the bubble of a stage's span is, in full-stage units at F=B=W and m >= 2p,
    (6p-1-3k)/2 up to k = 2p-2, 3/2 at k = 2p-1 (p >= 3), and 0 at k = 2p.

    Args:
      memory_limit: peak in flight per stage, in microbatches of a full stage; halves count.
        None for 1F1B's, which is p.
      costs: costs of one chunk; the search minimizes the free-running makespan with them.
      trial_actions: number of actions that it may simulate to rank blocks, and again to choose.

    Raises:
      ValueError: no building block fits the limit.

    Example:
      >>> controllable_memory(4, 8, memory_limit=2.5).peak_in_flight
      (5, 5, 5, 5)
    """
    memory_limit = num_stages if memory_limit is None else memory_limit
    smallest = min(max(v_min_block(num_stages).peaks), 2 * num_microbatches)
    if not 2 * memory_limit >= smallest:
        least = smallest / 2 if smallest % 2 else smallest // 2
        rule = (
            "with $num_stages and $num_microbatches a stage keeps at least "
            f"{least} microbatches in flight"
        )
        others = {"num_stages": num_stages, "num_microbatches": num_microbatches}
        name = "controllable-memory"
        refuse([Problem("memory_limit", memory_limit, rule, (least,), others, name)])
    # At most all microbatches are in flight.
    limit = int(min(2 * memory_limit, 2 * num_microbatches))
    found = _search(num_stages, num_microbatches, limit, costs, trial_actions)
    # The search may find one of the paper's blocks, which promises less.
    return dataclasses.replace(found, peak_in_flight=(limit,) * num_stages)


def _search(
    num_stages: int, num_microbatches: int, limit: int, costs: Costs, trial_actions: int
) -> Schedule:
    # Three rounds of the pipeline show warm-up, steady state and cool-down.
    trial_microbatches = min(num_microbatches, 3 * num_stages)
    num_trials = trial_actions // (_PERIOD * num_stages * trial_microbatches)
    num_finalists = trial_actions // (_PERIOD * num_stages * num_microbatches)
    # Blocks that hold more than 2p chunks gain nothing, and a limit of all 2m chunks is no limit.
    block_limit = 2 * num_stages
    if limit < 2 * num_microbatches:
        block_limit = min(block_limit, limit)
    candidates = (
        BlockPlan(block, (limit,) * num_stages, planned, reserve)
        for block in itertools.islice(_blocks(num_stages, block_limit), _MAX_BLOCKS)
        for reserve in (False, True)
        for planned in dict.fromkeys((costs, UNIT))
    )

    def made(
        plans: Iterable[BlockPlan], m: int
    ) -> Iterator[tuple[tuple[float, float], BlockPlan, Schedule]]:
        for plan in plans:
            if (schedule := plan.schedule("controllable-memory", m)) is not None:
                timeline = simulate(schedule, costs)
                yield (timeline.makespan, max(timeline.stage_spans)), plan, schedule

    trials = made(itertools.islice(candidates, num_trials), trial_microbatches)
    ranked = sorted(trials, key=lambda trial: trial[0])
    finalists = [plan for _, plan, _ in ranked[: min(num_finalists, _MAX_FINALISTS)]]
    named = (v_min_block(num_stages), v_half_block(num_stages), v_zb_block(num_stages))
    finalists += [
        BlockPlan(block, block.peaks) for block in named if max(block.peaks) <= block_limit
    ]
    return min(made(finalists, num_microbatches), key=lambda trial: trial[0])[2]


def _blocks(num_stages: int, limit: int) -> Iterator[Block]:
    """Yields blocks within a limit, starting with those expected to fill it best.

    A stage holds its chunks for 2 (sum of strides) + g0 + 2 g1 + g2 units in all, plus the time
    that its W wait; the winners are nearly always the blocks for which this is 6 limit - 8.
    """
    candidates = []
    lengths = range(1, _MAX_GAP + 1)
    gaps = list(itertools.product(lengths, lengths, lengths))
    for strides in _stride_lists(num_stages):
        turns = _PERIOD * limit - 8 - 2 * sum(strides)
        for gap in gaps:
            distance = abs(turns - gap[0] - 2 * gap[1] - gap[2])
            if distance <= _SPREAD:
                candidates.append((distance, strides, gap))
    candidates.sort(key=lambda candidate: candidate[0])
    for _, strides, gap in candidates:
        block = split_block(strides, gap)
        if block is not None and max(block.peaks) <= limit:
            yield block


def _stride_lists(num_stages: int) -> Iterator[tuple[int, ...]]:
    """Yields the strides of all hops: all equal, or two different ones with one switch."""
    hops = num_stages - 1
    for stride in _STRIDES:
        yield (stride,) * hops
    for above, below in itertools.permutations(_STRIDES, 2):
        for switch in range(1, hops):
            yield (above,) * switch + (below,) * (hops - switch)
