"""Building blocks of the controllable-memory family, and the pass that makes schedules of them.

A building block says when each stage starts the passes of one microbatch, in units of one pass.
Repeated every `PERIOD` units it is the steady state of a schedule; `eager` turns it into a whole
one: warm-up and cool-down reordered, gaps squeezed out and filled, the peak in flight capped.

Everything here lives on the V placement. A microbatch goes down the stages and up again (F0, F1),
then its gradient does (B1, B0).

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property

from jaxpipe.schedule.actions import Kind, Schedule
from jaxpipe.schedule.generators import events
from jaxpipe.schedule.generators.eager import EagerStage
from jaxpipe.schedule.placement import wave
from jaxpipe.schedule.simulate import Costs

PERIOD = 6
"""Units of work that one microbatch takes on a stage: F, B and W of two chunks."""

F0, F1, B1, B0, W = range(5)
"""The passes of a stage as a microbatch goes through them; the digit is the chunk. W is of either
chunk (`jaxpipe.schedule.generators.events.Pass`)."""


@dataclasses.dataclass(frozen=True)
class Block:
    """Start times of one microbatch's passes, in units of one pass.

    Args:
      starts: ``starts[d]`` is when stage ``d`` starts F0, F1, B1, B0 and its two W. The order of
        a stage follows from its own row, so each row may count from its own zero.
      fused: whether each W directly follows its B, as one action of two units.
    """

    starts: tuple[tuple[int, ...], ...]
    fused: bool = False

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Per stage, the most chunk activations in flight in the steady state."""
        return tuple(_peak(row) for row in self.starts)

    def sequence(self, stage: int, num_microbatches: int) -> list[int]:
        """The passes of a stage when the block is repeated for every microbatch, in order."""
        kinds = (F0, F1, B1, B0) if self.fused else (F0, F1, B1, B0, W, W)
        timed = (
            (start + PERIOD * i, kind)
            for start, kind in zip(self.starts[stage], kinds, strict=False)
            for i in range(num_microbatches)
        )
        return [kind for _, kind in sorted(timed)]


def _peak(row: Sequence[int]) -> int:
    steady = max(row)
    return max(
        sum((time - start) // PERIOD + 1 for start in row[:2])
        # An activation is still held while its W runs.
        - sum((time - 1 - start) // PERIOD + 1 for start in row[4:])
        for time in range(steady, steady + PERIOD)
    )


def split_block(strides: Sequence[int], gaps: tuple[int, int, int]) -> Block | None:
    """Builds the block in which F0 leads F1 by less and less, the further down the stage.

    Only the sum of the two strides at which F0 goes down and F1 comes up matters to the order of
    any stage, and B1 and B0 travel at the same strides (otherwise two of the passes would meet). So
    a block is that sum for every pair of neighbors, and the three gaps at the turns of the V.

    Args:
      strides: p-1 sums, from the top; each at least 2, one unit per hop.
      gaps: at least 1 each: units from F0 to F1 on the last stage, from F1 to B1 on the first, and
        from B1 to B0 on the last.

    Returns:
      The block, each row counted from its F0; None if two passes of a stage collide.

    Example:
      >>> split_block((6,), (1, 1, 1)).starts
      ((0, 7, 8, 15, 10, 17), (0, 1, 8, 9, 10, 11))
    """
    lead = sum(strides) + gaps[0]
    turn = lead + gaps[1]
    end = turn + sum(strides) + gaps[2]
    rows = [
        (0, lead - passed, turn, end - passed)
        for passed in itertools.accumulate(strides, initial=0)
    ]
    if any(len({start % PERIOD for start in row}) < len(row) for row in rows):
        return None
    return Block(tuple((*row, *_starts_of_w(row)) for row in rows))


def _starts_of_w(row: Sequence[int]) -> list[int]:
    """The first free times after each B."""
    free = set(range(PERIOD)) - {start % PERIOD for start in row}
    starts = []
    for b in sorted(row[2:]):
        start = next(time for time in itertools.count(b + 1) if time % PERIOD in free)
        free.remove(start % PERIOD)
        starts.append(start)
    return starts


def fused_block(num_stages: int) -> Block:
    """Builds the block of 1F1B-V: passes as close together as backwards of two units allow.

    All stages are on one clock.

    Example:
      >>> fused_block(1).starts
      ((0, 1, 2, 4, 3, 5),)
    """
    p = num_stages
    rows = [[d, 2 * p - 1 - d] for d in range(p)]
    arrival = 2 * p
    for d in (*range(p), *reversed(range(p))):
        start = next(time for time in itertools.count(arrival) if _fits_fused(rows[d], time))
        rows[d] += [start, start + 1]
        arrival = start + 2
    return Block(tuple((f0, f1, b1, b0, w1, w0) for f0, f1, b1, w1, b0, w0 in rows), fused=True)


def _fits_fused(row: Sequence[int], time: int) -> bool:
    """Whether a backward of two units can start, and one more after it if it is the first."""
    taken = {start % PERIOD for start in (*row, time, time + 1)}
    pairs = ({start, (start + 1) % PERIOD} for start in range(PERIOD))
    return len(taken) == len(row) + 2 and (
        len(taken) == PERIOD or any(pair.isdisjoint(taken) for pair in pairs)
    )


@dataclasses.dataclass(frozen=True)
class TimedOrders:
    """The passes of every stage, in order, from the first start to the end of everything.

    ``longest_span`` is of a stage, from the start of its first pass to the end of its last.
    """

    orders: tuple[tuple[int, ...], ...]
    makespan: float
    longest_span: float


def repeated(block: Block, num_microbatches: int) -> list[list[int]]:
    """The passes of every stage when the block is repeated for every microbatch."""
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
      block: of split backwards.
      caps: per stage, the most chunk activations in flight; at least the block's own peak.
      costs: of one chunk; they decide what is ready when.
      reserve: before its first backward a stage keeps room for the F1 to come: it starts F0 only as
        long as min(d+1, half the cap) places remain.

    Returns:
      The orders; None if a stage stops for good.
    """
    stages = []
    for (d, cap), sequence in zip(enumerate(caps), repeated(block, num_microbatches), strict=True):
        passes = _passes(d, len(caps), fused=False)
        first_f0 = cap - min(d + 1 if reserve else 0, cap // 2)
        stages.append(_BlockStage(passes, sequence, costs, cap, first_f0))
    return _run(stages, num_microbatches, message=costs.message)


def squeeze(timed: TimedOrders, num_microbatches: int, *, costs: Costs) -> TimedOrders:
    """Times orders of split backwards with other costs, which change only the gaps."""
    p = len(timed.orders)
    stages = [
        _OrderedStage(_passes(d, p, fused=False), order, costs)
        for d, order in enumerate(timed.orders)
    ]
    squeezed = _run(stages, num_microbatches, message=costs.message)
    assert squeezed is not None, "an order that ran once runs whatever the costs"
    return squeezed


def to_schedule(
    name: str, orders: Sequence[Sequence[int]], num_microbatches: int, caps: Iterable[int]
) -> Schedule:
    """Names the orders that a block gives, and promises the caps as peaks in flight."""
    p = len(orders)
    return Schedule(
        name=name,
        placement=wave(p),
        num_microbatches=num_microbatches,
        orders=tuple(
            tuple(events.actions(_passes(d, p, fused=W not in order), order))
            for d, order in enumerate(orders)
        ),
        peak_in_flight=tuple(min(cap, 2 * num_microbatches) for cap in caps),
    )


def _passes(d: int, num_stages: int, *, fused: bool) -> list[events.Pass]:
    """F0, F1, B1, B0 and, unless a backward is one action, W of a stage."""
    down, up = d, 2 * num_stages - 1 - d
    backward = Kind.BW if fused else Kind.B
    passes = [(Kind.F, down), (Kind.F, up), (backward, up), (backward, down)]
    return passes if fused else [*passes, (Kind.W, down)]


def _run(
    stages: Sequence[_OrderedStage | EagerStage], num_microbatches: int, *, message: float
) -> TimedOrders | None:
    events.run(stages, wave(len(stages)), num_microbatches, message=message)
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
    """One stage in `eager`, which keeps room for F1 before its first backward."""

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
        if number == F0 and self.done[B1] == 0 and self.done[F0] >= self.first_f0:
            return False
        return super().has_room(number, peak)
