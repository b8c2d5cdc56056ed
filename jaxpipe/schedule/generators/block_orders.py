"""Schedules of building blocks: a block repeated, or also reordered, squeezed and filled.

Repeated every period a block (`jaxpipe.schedule.generators.blocks`) is the steady state of a
schedule. A `BlockPlan` turns it into a whole one: warm-up and cool-down reordered, gaps squeezed
out and filled, the peak in flight capped.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxpipe.schedule.actions import Kind, Schedule
from jaxpipe.schedule.generators import events
from jaxpipe.schedule.generators.blocks import Block
from jaxpipe.schedule.generators.eager import EagerStage
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.simulate import UNIT, Costs


def repeated(block: Block, num_microbatches: int) -> list[list[int]]:
    """The passes of every stage when the block is repeated for every microbatch.

    Example:
      >>> from jaxpipe.schedule.placement import linear
      >>> repeated(Block(linear(2), ((0, 4, 5), (1, 2, 3)), fused=True), 2)
      [[0, 0, 1, 1], [0, 1, 0, 1]]
    """
    return [block.sequence(d, num_microbatches) for d in range(len(block.starts))]


class BlockPlan(NamedTuple):
    """A way to run every stage's repeated block as early as inputs and memory allow.

    In the steady state no stage waits and the block stays as it is; warm-up and cool-down are
    reordered, squeezed and filled in one pass (`EagerStage`).

    Args:
      block: block of split backwards, on any placement.
      caps: per stage, the most chunk activations in flight; at least the block's own peak.
      costs: costs of one chunk; they decide what is ready when.
      reserve: before its first backward a stage keeps room for later chunks: it starts F of its
        first only as long as min(d+1, half the cap) places remain.
    """

    block: Block
    caps: Sequence[int]
    costs: Costs = UNIT
    reserve: bool = False

    def schedule(self, name: str, num_microbatches: int) -> Schedule | None:
        """Makes the schedule; None if a stage stops for good."""
        block, stages = self.block, []
        for (d, cap), sequence in zip(
            enumerate(self.caps), repeated(block, num_microbatches), strict=True
        ):
            passes = _passes(d, block.placement, fused=False)
            first_f0 = cap - min(d + 1 if self.reserve else 0, cap // 2)
            stages.append(_BlockStage(passes, sequence, self.costs, cap, first_f0))
        events.run_stages(stages, block.placement, num_microbatches, message=self.costs.message)
        if any(stage.upcoming for stage in stages):
            return None
        orders = [stage.order for stage in stages]
        return to_schedule(name, block.placement, orders, num_microbatches, self.caps)


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


def _passes(d: int, placement: Placement, *, fused: bool) -> list[events.StagePass]:
    """Lists F of a stage's chunks, backwards from the last to the first and, if split, W."""
    own_stages = placement.virtual_stages[d]
    backward = Kind.BW if fused else Kind.B
    passes = [(Kind.F, s) for s in own_stages] + [(backward, s) for s in reversed(own_stages)]
    return passes if fused else [*passes, (Kind.W, own_stages[0])]


class _BlockStage(EagerStage):
    """One stage of a `BlockPlan`, which keeps room for later chunks before its first backward."""

    def __init__(
        self,
        passes: list[events.StagePass],
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
