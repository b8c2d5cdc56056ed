"""Building blocks: when each stage starts the passes of one microbatch, and what follows from that.

Repeated for every microbatch a block is the steady state of a schedule. How long it keeps each
activation and how much a stage keeps at once can be read off the block alone, on any placement and
with any number of chunks. A `BlockPlan` makes it a whole schedule: warm-up and cool-down reordered,
gaps squeezed out and filled, the peak in flight capped.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.generators import events
from jaxpipe.schedule.generators.eager import EagerStage
from jaxpipe.schedule.placement import Placement, wave
from jaxpipe.schedule.simulate import UNIT, Costs

WORK = 3
"""Units of work that one microbatch takes on one chunk: F, B and W."""


@dataclasses.dataclass(frozen=True)
class Block:
    """Start times of one microbatch's passes on every stage, in units of one pass.

    Args:
      placement: placement of the model.
      starts: ``starts[d]`` is when stage ``d`` starts F of each of its chunks, in model order; then
        B of each, from the last chunk to the first; then W in the order of B. All stages are on one
        clock.
      fused: whether each W directly follows its B, as one action of two units.

    Raises:
      ValueError: a stage does not start F, B and W of each of its chunks once.

    Example:
      >>> from jaxpipe.schedule.placement import linear
      >>> block = Block(linear(2), ((0, 4, 5), (1, 2, 3)), fused=True)
      >>> block.peaks, block.period
      ((2, 1), 3)
    """

    placement: Placement
    starts: tuple[tuple[int, ...], ...]
    fused: bool = False

    def __post_init__(self) -> None:
        lengths = [len(row) for row in self.starts]
        if lengths != [self.period] * self.placement.num_stages:
            raise ValueError(
                f"The stages start {lengths} passes: each of {self.placement.num_stages} must "
                f"start {self.period}, F, B and W of {self.num_chunks} chunks."
            )

    @property
    def num_chunks(self) -> int:
        return self.placement.num_chunks

    @property
    def period(self) -> int:
        """T, the work that one microbatch takes on a stage."""
        return WORK * self.num_chunks

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Per stage, the most chunk activations in flight in the steady state."""
        return tuple(map(self._peak, self.starts))

    def _peak(self, row: Sequence[int]) -> int:
        chunks, steady = self.num_chunks, max(row) + self.period
        # An activation is still held while its W runs.
        freed = [start + 1 for start in row[2 * chunks :]]
        return max(
            sum((time - start) // self.period + 1 for start in row[:chunks])
            - sum((time - end) // self.period + 1 for end in freed)
            for time in range(steady, steady + self.period)
        )

    def repeated(self, name: str, num_microbatches: int) -> Schedule:
        """Makes the schedule that repeats the block for every microbatch.

        Example:
          >>> from jaxpipe.schedule.placement import linear
          >>> block = Block(linear(2), ((0, 4, 5), (1, 2, 3)), fused=True)
          >>> [" ".join(map(str, order)) for order in block.repeated("mine", 2).orders]
          ['0F0 0F1 0BW0 0BW1', '1F0 1BW0 1F1 1BW1']
        """
        orders = [self.sequence(d, num_microbatches) for d in range(len(self.starts))]
        return _schedule(name, self, orders, num_microbatches, self.peaks)

    def sequence(self, stage: int, num_microbatches: int) -> list[int]:
        """Numbers a stage's passes (`events.stage_passes`) in the order of repeated blocks."""
        last = 2 * self.num_chunks
        passes = self.starts[stage][: last if self.fused else None]
        timed = (
            (start + i * self.period, min(number, last))
            for number, start in enumerate(passes)
            for i in range(num_microbatches)
        )
        return [number for _, number in sorted(timed)]


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
        for d, cap in enumerate(self.caps):
            opening = cap - min(d + 1 if self.reserve else 0, cap // 2)
            passes = events.stage_passes(block.placement.virtual_stages[d], fused=False)
            sequence = block.sequence(d, num_microbatches)
            stages.append(EagerStage(passes, sequence, self.costs, cap, opening=opening))
        events.run_stages(stages, block.placement, num_microbatches, message=self.costs.message)
        if any(stage.upcoming for stage in stages):
            return None
        return _schedule(name, block, [s.order for s in stages], num_microbatches, self.caps)


def _schedule(
    name: str,
    block: Block,
    orders: Iterable[Sequence[int]],
    num_microbatches: int,
    caps: Iterable[int],
) -> Schedule:
    """Names the passes of a block in these orders, and promises the caps as peaks in flight."""
    passes = (
        events.stage_passes(own_stages, fused=block.fused)
        for own_stages in block.placement.virtual_stages
    )
    return Schedule(
        name=name,
        placement=block.placement,
        num_microbatches=num_microbatches,
        orders=tuple(map(_ending_by_chunk, map(events.actions, passes, orders))),
        peak_in_flight=tuple(min(cap, block.num_chunks * num_microbatches) for cap in caps),
    )


def _ending_by_chunk(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Sorts the W's that end an order, whose inputs are all there, by chunk: of all but the last,
    gradients are complete earlier, and move over data under more layers."""
    order = list(actions)
    end = max(n for n, action in enumerate(order, start=1) if action.kind is not Kind.W)
    return (*order[:end], *sorted(order[end:], key=lambda w: -w.virtual_stage))


def split_block(strides: Sequence[int], gaps: Sequence[int]) -> Block | None:
    """Builds a block on waves in which passes go down the stages and up again at even strides.

    Only the sum of the two strides at which a pass goes down and the next one comes up matters to
    the order of any stage, and gradients travel at the same strides (otherwise two of the passes
    would meet). So a block is that sum for every pair of neighbors, and the gaps at the turns.

    Args:
      strides: p-1 sums, from the top; each at least 2, one unit per hop.
      gaps: 2v-1 of them, v even, at least 1 each: units between the two passes at each turn, on the
        last stage and the first in turn.

    Returns:
      The block; None if two passes of a stage collide.

    Example:
      >>> split_block((6,), (1, 1, 1)).starts
      ((0, 7, 8, 15, 10, 17), (4, 5, 12, 13, 14, 15))
    """
    total, period = sum(strides), WORK * (len(gaps) + 1) // 2
    # From the first stage's clock: every other pass comes up, and meets the earlier stages later.
    begins = [0, *itertools.accumulate(g + total * (k % 2 == 0) for k, g in enumerate(gaps))]
    rows, passed, down = [], 0, 0
    for stride in (*strides, 0):
        row = [down + begin - passed * (k % 2) for k, begin in enumerate(begins)]
        if len({start % period for start in row}) < len(row):
            return None
        rows.append((*row, *_starts_of_w(row, period)))
        # The papers' V blocks go down faster than they come up.
        passed, down = passed + stride, down + 2 * stride // 3
    return Block(wave(len(rows), num_waves=(len(gaps) + 1) // 4), tuple(rows))


def _starts_of_w(row: Sequence[int], period: int) -> list[int]:
    """Finds the first free time after each B."""
    free = set(range(period)) - {start % period for start in row}
    starts = []
    for b in row[len(row) // 2 :]:
        start = next(time for time in itertools.count(b + 1) if time % period in free)
        free.remove(start % period)
        starts.append(start)
    return starts


def closest_block(
    placement: Placement, *, fused: bool = False, travel: tuple[int, int] = (0, 0)
) -> Block:
    """Builds the block whose passes follow each other as closely as they can, on any placement.

    Each pass of the microbatch, in the order in which it goes through them, starts at the first
    time at which its stage has a slot left. With fused backwards on a V this is the block of
    1F1B-V.

    Args:
      travel: units that a forward's and a backward's message take between two stages.

    Example:
      >>> closest_block(wave(1), fused=True).starts
      ((0, 1, 2, 4, 3, 5),)
    """
    chunks, depth = placement.num_chunks, placement.num_virtual_stages
    rows: list[list[int]] = [[] for _ in range(placement.num_stages)]
    taken: list[set[int]] = [set() for _ in rows]
    arrival, before = 0, placement.stages[0]
    for number, stage in enumerate((*placement.stages, *reversed(placement.stages))):
        length = 2 if fused and number >= depth else 1
        arrival += travel[number >= depth] * (stage != before)
        pairs = min(chunks, 2 * chunks - 1 - len(rows[stage])) if fused else 0
        times = (range(time, time + length) for time in itertools.count(arrival))
        chosen = next(units for units in times if _fits(units, taken[stage], WORK * chunks, pairs))
        rows[stage].append(chosen.start)
        taken[stage].update(unit % (WORK * chunks) for unit in chosen)
        arrival, before = chosen.stop, stage
    ends = ([start + 1 for start in row[chunks:]] for row in rows)
    w = ends if fused else (_starts_of_w(row, WORK * chunks) for row in rows)
    starts = (tuple(row + last) for row, last in zip(rows, w, strict=True))
    return Block(placement, tuple(starts), fused)


def _fits(units: range, taken: set[int], period: int, pairs: int) -> bool:
    """Whether a pass can take these units: they are free, and enough pairs of units remain free."""
    slots = {unit % period for unit in units}
    if slots & taken:
        return False
    # Runs of free slots, counted from a slot that is not free.
    first, free_pairs = units[0], 0
    runs = itertools.groupby(
        (first + unit) % period in slots | taken for unit in range(1, period + 1)
    )
    for is_taken, run in runs:
        free_pairs += 0 if is_taken else len(list(run)) // 2
    return free_pairs >= pairs
