"""Schedules on the V placement that trade bubble for memory: V-Min, V-Half, V-ZB, and a search.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.check.validate import validate
from jaxpipe.schedule.generators.building_blocks import (
    PERIOD,
    Block,
    Plan,
    eager,
    fused_block,
    split_block,
    squeeze,
    to_schedule,
)
from jaxpipe.schedule.simulate import Costs

_UNIT = Costs(1, 1, 1)

_STRIDES = range(2, 7)
_MAX_GAP = 9
"""At p=4, 6, 8 more slots at a turn find nothing better; fewer miss the frontier at some limits."""
_SPREAD = 8
"""How far, in slots held, a block may be from the one expected to fill the memory."""
_MAX_BLOCKS = 100
"""At p=4, 6, 8 the winner is among the first 10 with equal costs, mostly among 60 with others."""
_TRIAL_ACTIONS = 1_200_000
"""How many actions the search may simulate: about five seconds."""
_MAX_FINALISTS = 8
_CACHE_VERSION = 1
"""To be raised when the search finds other schedules."""


def v_min(num_stages: int, num_microbatches: int) -> Schedule:
    """Keeps about a third of 1F1B's activations: every hop takes one slot.

    ============  =====================================================================
    bubble        (4p-5)/2, or (4p-7)/2 if 3 divides p, in full-stage slots at F=B=W, m >= p >= 2;
                  with unequal costs it can grow with every microbatch
    in flight     floor((p+4)/3) microbatches of a full stage
    constraints   p >= 1, m >= 1, v = 2 on the V placement
    source        arXiv 2405.15362, V-Min
    ============  =====================================================================

    Args:
      num_stages: p, at least 1.
      num_microbatches: m, at least 1; may be less than p.

    Returns:
      The schedule, named "v-min".

    Example:
      >>> v_min(4, 8).peak_in_flight
      (4, 4, 4, 4)
    """
    return _named("v-min", _v_min_block(num_stages), num_microbatches)


def v_half(num_stages: int, num_microbatches: int) -> Schedule:
    """Keeps half of 1F1B's activations: F0 and B1 take two slots per hop, F1 and B0 one.

    ============  =====================================================================
    bubble        (3p-7)/2 for even p, (3p-4)/2 for odd p, in full-stage slots at F=B=W,
                  m >= p >= 3; 1/2 at p = 2. From m = 2p on it does not grow with m if
                  W+2B >= 2F and W+2F >= 2B; for odd p only then, for even p also at other costs
    in flight     floor((p+2)/2) microbatches of a full stage
    constraints   p >= 1, m >= 1, v = 2 on the V placement
    source        arXiv 2405.15362, V-Half
    ============  =====================================================================

    Args:
      num_stages: p, at least 1.
      num_microbatches: m, at least 1; may be less than p.

    Returns:
      The schedule, named "v-half".

    Example:
      >>> v_half(4, 8).peak_in_flight
      (6, 6, 6, 6)
    """
    return _named("v-half", _v_half_block(num_stages), num_microbatches)


def v_zb(num_stages: int, num_microbatches: int) -> Schedule:
    """Leaves no gap in a stage's span, at 1F1B's memory: six slots down one stage and up again.

    ============  =====================================================================
    bubble        in full-stage slots at F=B=W: (p-1)/2 with a barrier between optimizer steps,
                  m >= p; 0 in the span of each stage, m >= 2p
    in flight     p microbatches of a full stage
    constraints   p >= 1, m >= 1, v = 2 on the V placement
    source        arXiv 2405.15362, V-ZB
    ============  =====================================================================

    Args:
      num_stages: p, at least 1.
      num_microbatches: m, at least 1; may be less than p.

    Returns:
      The schedule, named "v-zb".

    Example:
      >>> v_zb(4, 8).peak_in_flight
      (8, 8, 8, 8)
    """
    return _named("v-zb", _v_zb_block(num_stages), num_microbatches)


def zb_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds ZB-V, the zero-bubble paper's name for the schedule of :func:`v_zb`.

    ============  =====================================================================
    bubble        as v-zb
    in flight     p microbatches of a full stage
    constraints   p >= 1, m >= 1, v = 2 on the V placement
    source        Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241
    ============  =====================================================================

    Args:
      num_stages: p, at least 1.
      num_microbatches: m, at least 1; may be less than p.

    Returns:
      The schedule, named "zb-v".

    Example:
      >>> zb_v(4, 8).orders == v_zb(4, 8).orders
      True
    """
    return dataclasses.replace(v_zb(num_stages, num_microbatches), name="zb-v")


def one_f_one_b_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds 1F1B-V: fused backwards, two thirds of 1F1B's activations.

    ============  =====================================================================
    bubble        in full-stage slots at F=B=W: at most 3(p-1), which fused 1F1B has
    in flight     floor(2p/3) + 1 microbatches of a full stage
    constraints   p >= 1, m >= 1, v = 2 on the V placement
    source        arXiv 2405.15362, 1F1B-V
    ============  =====================================================================

    Args:
      num_stages: p, at least 1.
      num_microbatches: m, at least 1; may be less than p.

    Returns:
      The schedule, named "1f1b-v".

    Example:
      >>> one_f_one_b_v(4, 8).peak_in_flight
      (6, 6, 5, 6)
    """
    return _named("1f1b-v", fused_block(num_stages), num_microbatches)


def _v_min_block(num_stages: int) -> Block:
    shift = 2 if num_stages % 3 == 0 else 0
    return _uniform(num_stages, 2, (1, 1 + shift, 1))


def _v_half_block(num_stages: int) -> Block:
    shift = 3 if num_stages % 2 == 0 else 0
    return _uniform(num_stages, 3, (1, 1 + shift, 2))


def _v_zb_block(num_stages: int) -> Block:
    return _uniform(num_stages, 6, (1, 1, 1))


def _uniform(num_stages: int, stride: int, gaps: tuple[int, int, int]) -> Block:
    block = split_block((stride,) * (num_stages - 1), gaps)
    assert block is not None, "the paper's blocks never collide"
    return block


def _named(name: str, block: Block, num_microbatches: int) -> Schedule:
    plan = eager(block, num_microbatches, caps=block.peaks, costs=_UNIT)
    assert plan is not None, "the paper's blocks never stop"
    return to_schedule(name, plan.orders, num_microbatches, fused=block.fused, caps=block.peaks)


def controllable_memory(
    num_stages: int,
    num_microbatches: int,
    *,
    memory_limit: float | None = None,
    costs: Costs = _UNIT,
) -> Schedule:
    """Searches for the building block whose schedule ends first under a memory limit.

    Tries blocks with one or two strides and every turn of the V up to `_MAX_GAP` slots, starting
    with those that fill the memory best, and orders each with the real and with equal costs. It
    never ends later than V-Min, V-Half or V-ZB where they fit. The result is kept on disk, under
    ``$XDG_CACHE_HOME`` or ``~/.cache``.

    ============  =====================================================================
    bubble        in full-stage slots at F=B=W, k = 2 memory_limit, at most 2p:
                  max(6p-1-3k, 3p-1-k)/2, m >= p; of the span of a stage, m >= 2p: (6p-1-3k)/2 up to
                  k = 2p-2, 3/2 at k = 2p-1 (p >= 3), 0 at k = 2p
    in flight     memory_limit microbatches of a full stage
    constraints   p >= 1, m >= 1, v = 2 on the V placement; memory_limit at least V-Min's, about p/3
    source        arXiv 2405.15362, adaptive scheduler
    ============  =====================================================================

    Args:
      num_stages: p, at least 1.
      num_microbatches: m, at least 1; may be less than p.
      memory_limit: peak in flight per stage, in microbatches of a full stage; halves count.
        None for 1F1B's, which is p.
      costs: of one chunk; the search minimises the free-running makespan with them.

    Returns:
      The schedule, named "controllable-memory".

    Raises:
      ValueError: no building block fits the limit.

    Example:
      >>> controllable_memory(4, 8, memory_limit=2.5).peak_in_flight
      (5, 5, 5, 5)
    """
    memory_limit = num_stages if memory_limit is None else memory_limit
    smallest = min(max(_v_min_block(num_stages).peaks), 2 * num_microbatches)
    if not 2 * memory_limit >= smallest:
        raise ValueError(
            f"pipeline.memory_limit={memory_limit:g} does not fit schedule 'controllable-memory': "
            f"with mesh.stage={num_stages} and pipeline.microbatches={num_microbatches} a stage "
            f"keeps at least {smallest / 2:g} microbatches in flight.\n"
            f"Nearest valid: {smallest / 2:g}."
        )
    # At most all microbatches are in flight.
    limit = int(min(2 * memory_limit, 2 * num_microbatches))
    caps = (limit,) * num_stages
    path = _cache_path(num_stages, num_microbatches, limit, costs)
    schedule = _load(path, num_microbatches, caps)
    if schedule is None:
        plan = _search(num_stages, num_microbatches, limit, costs)
        _store(path, plan)
        schedule = _schedule(plan.orders, num_microbatches, caps)
    return schedule


def _schedule(
    orders: Iterable[Sequence[int]], num_microbatches: int, caps: Sequence[int]
) -> Schedule:
    return to_schedule("controllable-memory", orders, num_microbatches, fused=False, caps=caps)


class _Choice(NamedTuple):
    """How to make a schedule; only its order is used if its costs are not the real ones."""

    block: Block
    caps: Sequence[int]
    costs: Costs = _UNIT
    reserve: bool = False

    def plan(self, num_microbatches: int, costs: Costs) -> Plan | None:
        block, caps, own_costs, reserve = self
        plan = eager(block, num_microbatches, caps=caps, costs=own_costs, reserve=reserve)
        if plan is None or own_costs == costs:
            return plan
        return squeeze(plan, num_microbatches, costs=costs)


def _search(num_stages: int, num_microbatches: int, limit: int, costs: Costs) -> Plan:
    # Three rounds of the pipeline show warm-up, steady state and cool-down.
    trial_microbatches = min(num_microbatches, 3 * num_stages)
    num_trials = _TRIAL_ACTIONS // (PERIOD * num_stages * trial_microbatches)
    num_finalists = _TRIAL_ACTIONS // (PERIOD * num_stages * num_microbatches)
    # Blocks that hold more than 2p chunks gain nothing, and a limit of all 2m chunks is no limit.
    block_limit = 2 * num_stages
    if limit < 2 * num_microbatches:
        block_limit = min(block_limit, limit)
    choices = (
        _Choice(block, (limit,) * num_stages, planned, reserve)
        for block in itertools.islice(_blocks(num_stages, block_limit), _MAX_BLOCKS)
        for reserve in (False, True)
        for planned in dict.fromkeys((costs, _UNIT))
    )
    trials = (
        (choice, choice.plan(trial_microbatches, costs))
        for choice in itertools.islice(choices, num_trials)
    )
    ranked = sorted(
        ((_quality(plan), choice) for choice, plan in trials if plan is not None),
        key=lambda trial: trial[0],
    )
    finalists = [choice for _, choice in ranked[: min(num_finalists, _MAX_FINALISTS)]]
    named = (_v_min_block(num_stages), _v_half_block(num_stages), _v_zb_block(num_stages))
    finalists += [_Choice(block, block.peaks) for block in named if max(block.peaks) <= block_limit]
    plans = (choice.plan(num_microbatches, costs) for choice in finalists)
    return min((plan for plan in plans if plan is not None), key=_quality)


def _quality(plan: Plan) -> tuple[float, float]:
    return plan.makespan, plan.longest_span


def _blocks(num_stages: int, limit: int) -> Iterator[Block]:
    """Blocks within a limit, starting with those expected to fill it best.

    A stage holds its chunks for 2 (sum of strides) + g0 + 2 g1 + g2 slots in all, plus the time
    that its W wait; the winners are nearly always the blocks for which this is 6 limit - 8.
    """
    found = []
    slots = range(1, _MAX_GAP + 1)
    gaps = [(first, turn, last) for first in slots for turn in slots for last in slots]
    for strides in _stride_lists(num_stages):
        turns = PERIOD * limit - 8 - 2 * sum(strides)
        for gap in gaps:
            distance = abs(turns - gap[0] - 2 * gap[1] - gap[2])
            if distance <= _SPREAD:
                found.append((distance, strides, gap))
    found.sort(key=lambda candidate: candidate[0])
    for _, strides, gap in found:
        block = split_block(strides, gap)
        if block is not None and max(block.peaks) <= limit:
            yield block


def _stride_lists(num_stages: int) -> Iterator[tuple[int, ...]]:
    """One stride for all hops, or two with one switch."""
    hops = num_stages - 1
    for stride in _STRIDES:
        yield (stride,) * hops
    for above, below in itertools.permutations(_STRIDES, 2):
        for switch in range(1, hops):
            yield (above,) * switch + (below,) * (hops - switch)


def _cache_path(num_stages: int, num_microbatches: int, limit: int, costs: Costs) -> Path:
    inputs = [
        _CACHE_VERSION,
        num_stages,
        num_microbatches,
        limit,
        *map(float, dataclasses.astuple(costs)),
    ]
    digest = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "jaxpipe" / f"controllable-memory-{digest[:32]}.json"


def _load(path: Path, num_microbatches: int, caps: Sequence[int]) -> Schedule | None:
    """Reads a stored schedule; None if there is none, or none that can run."""
    try:
        schedule = _schedule(json.loads(path.read_text()), num_microbatches, caps)
        validate(schedule)
    except (OSError, ValueError, TypeError, IndexError):
        return None
    return schedule


def _store(path: Path, plan: Plan) -> None:
    """Writes a plan's orders in one step, so that nobody reads half a file."""
    # A cache that cannot be written costs time but never changes the result.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(plan.orders, file)
        os.replace(file.name, path)
