"""Schedules of building blocks: a block repeated, or also reordered, squeezed and filled.

Repeated every period a block (`jaxpipe.schedule.generators.blocks`) is the steady state of a
schedule. `eager` turns it into a whole one: warm-up and cool-down reordered, gaps squeezed out and
filled, the peak in flight capped.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxpipe.schedule.actions import Kind, Schedule
from jaxpipe.schedule.generators import events
from jaxpipe.schedule.generators.blocks import Block
from jaxpipe.schedule.generators.eager import EagerStage
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.simulate import UNIT, Costs


@dataclasses.dataclass(frozen=True)
class TimedOrders:
    """The passes of every stage, in order, from the first start to the end of everything.

    ``longest_span`` is the longest time of any stage from the start of its first pass to the end of
    its last.
    """

    orders: tuple[tuple[int, ...], ...]
    makespan: float
    longest_span: float


def repeated(block: Block, num_microbatches: int) -> list[list[int]]:
    """The passes of every stage when the block is repeated for every microbatch.

    Example:
      >>> from jaxpipe.schedule.generators.blocks import looped_block
      >>> repeated(looped_block(2, strides=(1, 2), fused=True), 2)
      [[0, 0, 1, 1], [0, 1, 0, 1]]
    """
    return [block.sequence(d, num_microbatches) for d in range(len(block.starts))]


def eager(
    block: Block,
    num_microbatches: int,
    *,
    caps: Sequence[int],
    costs: Costs,
    reserve: bool = False,
) -> TimedOrders | None:
    """Runs every stage's repeated block as early as inputs and memory allow.

    In the steady state no stage waits and the block stays as it is; warm-up and cool-down are
    reordered, squeezed and filled in one pass (`EagerStage`).

    Args:
      block: block of split backwards, on any placement.
      caps: per stage, the most chunk activations in flight; at least the block's own peak.
      costs: costs of one chunk; they decide what is ready when.
      reserve: before its first backward a stage keeps room for later chunks: it starts F of its
        first only as long as min(d+1, half the cap) places remain.

    Returns:
      The orders; None if a stage stops for good.
    """
    stages = []
    for (d, cap), sequence in zip(enumerate(caps), repeated(block, num_microbatches), strict=True):
        passes = _passes(d, block.placement, fused=False)
        first_f0 = cap - min(d + 1 if reserve else 0, cap // 2)
        stages.append(_BlockStage(passes, sequence, costs, cap, first_f0))
    return _run(stages, block.placement, num_microbatches, message=costs.message)


class Plan(NamedTuple):
    """How to make orders of a block: the arguments of `eager`."""

    block: Block
    caps: Sequence[int]
    costs: Costs = UNIT
    reserve: bool = False

    def orders(self, num_microbatches: int, costs: Costs) -> TimedOrders | None:
        """Makes the orders and times them with costs that may differ from those that they are made
        for; None if a stage stops for good."""
        timed = eager(
            self.block, num_microbatches, caps=self.caps, costs=self.costs, reserve=self.reserve
        )
        if timed is None or self.costs == costs:
            return timed
        return squeeze(timed, self.block.placement, num_microbatches, costs=costs)

    def makespan(self, num_microbatches: int, costs: Costs) -> float:
        """Time at which the orders end; infinite if a stage stops for good."""
        timed = self.orders(num_microbatches, costs)
        return math.inf if timed is None else timed.makespan


def squeeze(
    timed: TimedOrders, placement: Placement, num_microbatches: int, *, costs: Costs
) -> TimedOrders:
    """Times orders of split backwards with other costs, which change only the gaps."""
    stages = [
        _OrderedStage(_passes(d, placement, fused=False), order, costs)
        for d, order in enumerate(timed.orders)
    ]
    squeezed = _run(stages, placement, num_microbatches, message=costs.message)
    assert squeezed is not None, "an order that ran once runs whatever the costs"
    return squeezed


def to_schedule(
    name: str,
    placement: Placement,
    orders: Sequence[Sequence[int]],
    num_microbatches: int,
    caps: Iterable[int],
) -> Schedule:
    """Names the orders that a block gives, and promises the caps as peaks in flight."""
    most, weights = placement.num_chunks * num_microbatches, 2 * placement.num_chunks
    return Schedule(
        name=name,
        placement=placement,
        num_microbatches=num_microbatches,
        orders=tuple(
            tuple(events.actions(_passes(d, placement, fused=weights not in order), order))
            for d, order in enumerate(orders)
        ),
        peak_in_flight=tuple(min(cap, most) for cap in caps),
    )


def _passes(d: int, placement: Placement, *, fused: bool) -> list[events.Pass]:
    """Lists F of a stage's chunks, backwards from the last to the first and, if split, W."""
    own_stages = placement.virtual_stages[d]
    backward = Kind.BW if fused else Kind.B
    passes = [(Kind.F, s) for s in own_stages] + [(backward, s) for s in reversed(own_stages)]
    return passes if fused else [*passes, (Kind.W, own_stages[0])]


def _run(
    stages: Sequence[_OrderedStage | EagerStage],
    placement: Placement,
    num_microbatches: int,
    *,
    message: float,
) -> TimedOrders | None:
    events.run(stages, placement, num_microbatches, message=message)
    if any(stage.upcoming for stage in stages):
        return None
    return TimedOrders(
        orders=tuple(tuple(stage.order) for stage in stages),
        makespan=max(stage.free_at for stage in stages),
        longest_span=max(stage.free_at - stage.started_at for stage in stages),
    )


class _OrderedStage(events.Stage):
    """A stage that runs its passes in a given order."""

    def __init__(self, passes: list[events.Pass], sequence: Sequence[int], costs: Costs) -> None:
        super().__init__(passes, [costs.of(kind) for kind, _ in passes])
        # Reversed: passes are taken from near the front, and a list is fast only at its end.
        self.upcoming = list(reversed(sequence))

    def choose(self, now: float) -> int | None:
        """Takes the pass to run now out of the sequence; None to wait."""
        if self.upcoming and self.is_ready(self.upcoming[-1], now):
            return self.upcoming.pop()
        return None


class _BlockStage(EagerStage):
    """One stage in `eager`, which keeps room for later chunks before its first backward."""

    def __init__(
        self,
        passes: list[events.Pass],
        sequence: Sequence[int],
        costs: Costs,
        cap: int,
        first_f0: int,
    ) -> None:
        super().__init__(passes, sequence, costs, cap)
        self.first_f0 = first_f0

    def has_room(self, number: int, peak: int) -> bool:
        first_backward = len(self.passes) // 2
        if number == 0 and not self.done[first_backward] and self.done[0] >= self.first_f0:
            return False
        return super().has_room(number, peak)
