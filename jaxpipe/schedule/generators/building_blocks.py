"""Building blocks of the controllable-memory family, and the pass that makes schedules of them.

A building block says when each stage starts the passes of one microbatch, in units of one pass.
Repeated every `PERIOD` units it is the steady state of a schedule; `eager` turns it into a whole
one: warm-up and cool-down reordered, gaps squeezed out and filled, the peak in flight capped.

Everything here lives on the V placement. A microbatch goes down the stages and up again (F0, F1),
then its gradient does (B1, B0): a journey of 4p hops, of which stage d runs four.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.generators import events
from jaxpipe.schedule.placement import wave
from jaxpipe.schedule.simulate import Costs

PERIOD = 6
"""Units of work that one microbatch takes on a stage: F, B and W of two chunks."""

F0, F1, B1, B0, W = range(5)
"""The passes of a stage as a microbatch goes through them; the digit is the chunk. W is of either
chunk: weight gradients are computed first-in first-out."""


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
    a block is that sum for every pair of neighbours, and the three gaps at the turns of the V.

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

    Args:
      num_stages: p, at least 1.

    Returns:
      The block, on one clock for all stages.

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
    """The result of `eager` for a block.

    Args:
      orders: ``orders[d]`` lists the passes of stage ``d``; the n-th of a kind is of microbatch n.
      makespan: from the first start to the end of everything.
      longest_span: of a stage, from the start of its first pass to the end of its last.
    """

    orders: tuple[tuple[int, ...], ...]
    makespan: float
    longest_span: float


def eager(
    block: Block,
    num_microbatches: int,
    *,
    caps: Sequence[int],
    costs: Costs,
    reserve: bool = False,
) -> TimedOrders | None:
    """Runs every stage's repeated block as early as inputs and memory allow.

    A stage that would wait runs instead the first later pass of its sequence that is ready and
    cannot raise the peak: a forward may move forward only if no point that it passes is at the cap.
    A W lets a ready B go first as long as no forward lies between, which costs no memory. In the
    steady state no stage waits and the block stays as it is; warm-up and cool-down are reordered,
    squeezed and filled in one pass.

    Args:
      block: the block to repeat.
      num_microbatches: m, at least 1.
      caps: per stage, the most chunk activations in flight; at least the block's own peak.
      costs: of one chunk; they decide what is ready when.
      reserve: before its first backward a stage keeps room for the F1 to come: it starts F0 only as
        long as min(d+1, half the cap) places remain.

    Returns:
      The orders; None if a stage stops for good.
    """
    stages = [
        _BlockStage(
            block.sequence(d, num_microbatches),
            block.fused,
            caps[d],
            d + 1 if reserve else 0,
            costs,
        )
        for d in range(len(block.starts))
    ]
    return _run(stages, num_microbatches, message=costs.message)


def squeeze(timed: TimedOrders, num_microbatches: int, *, costs: Costs) -> TimedOrders:
    """Times orders of split backwards with other costs, which change only the gaps.

    Args:
      timed: of `eager`.
      num_microbatches: m, as there.
      costs: of one chunk.

    Returns:
      The same orders with their new makespan and span.
    """
    stages = [_BlockStage(list(order), False, None, 0, costs) for order in timed.orders]
    squeezed = _run(stages, num_microbatches, message=costs.message)
    assert squeezed is not None, "an order that ran once runs whatever the costs"
    return squeezed


def _run(stages: list[_BlockStage], num_microbatches: int, *, message: float) -> TimedOrders | None:
    p, fused = len(stages), stages[0].fused
    journey = (*range(p), *reversed(range(p))) * 2
    # A stage's passes F0, F1, B1, B0 in hops of the journey, and back.
    hops = [(d, 2 * p - 1 - d, 2 * p + d, 4 * p - 1 - d) for d in range(p)]
    pass_of = [kind for kind in (F0, F1, B1, B0) for _ in range(p)]

    def readers(d: int, kind: int) -> Iterator[tuple[int, int]]:
        if kind == W:
            return
        hop = hops[d][kind] + 1
        if hop < 4 * p:
            yield journey[hop], pass_of[hop]
        if kind >= B1 and not fused:
            yield d, W

    stages[0].arrivals[F0] = [0.0] * num_microbatches
    events.run(stages, readers, message=message)
    if any(stage.upcoming for stage in stages):
        return None
    return TimedOrders(
        orders=tuple(tuple(stage.order) for stage in stages),
        makespan=max(stage.free_at for stage in stages),
        longest_span=max(stage.free_at - stage.started_at for stage in stages),
    )


class _BlockStage(events.Stage):
    """One stage in `eager`: the passes it has yet to run, and its inputs so far."""

    def __init__(
        self, sequence: list[int], fused: bool, cap: int | None, reserved: int, costs: Costs
    ) -> None:
        backward = costs.b + costs.w if fused else costs.b
        super().__init__((costs.f, costs.f, backward, backward, costs.w))
        # Reversed: passes are taken from near the front, and a list is fast only at its end.
        self.upcoming = sequence[::-1]
        # Without a cap the sequence is final.
        self.final = cap is None
        self.cap = cap or 0
        self.first_f0 = self.cap - min(reserved, self.cap // 2)
        self.held = (1, 1, -1, -1, 0) if fused else (1, 1, 0, 0, -1)
        self.fused = fused
        self.in_flight = 0

    def choose(self, now: float) -> int | None:
        """Takes the pass to run now out of the sequence; None to wait."""
        if not self.upcoming:
            return None
        kind = self.upcoming[-1]
        if self.is_ready(kind, now) and (self.final or self._goes_first(kind)):
            return self.upcoming.pop()
        return None if self.final else self._overtaking(now)

    def _goes_first(self, kind: int) -> bool:
        return kind in (B1, B0) or (kind != W and self._has_room(kind, self.in_flight))

    def _overtaking(self, now: float) -> int | None:
        ready = {kind for kind in (F0, F1, B1, B0, W) if self.is_ready(kind, now)}
        if self.fused:
            # Two units in a gap of one would make the next pass miss its turn, period after period.
            ready -= {B1, B0}
        in_flight = peak = self.in_flight
        deferred_w = None
        for position in range(len(self.upcoming) - 1, -1, -1):
            kind = self.upcoming[position]
            forward = kind <= F1
            if kind in ready:
                if kind == W:
                    deferred_w = position
                elif not forward or self._has_room(kind, peak):
                    return self.upcoming.pop(position)
                # Passes of one kind never overtake each other.
                ready.remove(kind)
            if deferred_w is not None and (forward or not ready):
                return self.upcoming.pop(deferred_w)
            if not ready:
                return None
            in_flight += self.held[kind]
            peak = max(peak, in_flight)
        return None

    def _has_room(self, kind: int, peak: int) -> bool:
        """Whether a forward can start now, as the next pass after a point of this peak."""
        if kind == F0 and self.done[B1] == 0 and self.done[F0] >= self.first_f0:
            return False
        return peak < self.cap

    def start(self, kind: int, now: float) -> None:
        super().start(kind, now)
        self.in_flight += self.held[kind]


def to_schedule(
    name: str,
    orders: Iterable[Sequence[int]],
    num_microbatches: int,
    *,
    fused: bool,
    caps: Sequence[int],
) -> Schedule:
    """Numbers the passes: each kind in the order of microbatches, W first-in first-out.

    Args:
      name: the schedule's.
      orders: ``orders[d]`` is what stage ``d`` runs.
      num_microbatches: m.
      fused: whether B1 and B0 include their W.
      caps: the promised peak in flight per stage.

    Returns:
      The schedule.
    """
    rows = [list(order) for order in orders]
    p = len(rows)
    backward = Kind.BW if fused else Kind.B
    kinds = (Kind.F, Kind.F, backward, backward)
    numbered = []
    for d, row in enumerate(rows):
        virtual_stages = (d, 2 * p - 1 - d, 2 * p - 1 - d, d)
        done = [0] * 4
        pending: collections.deque[tuple[int, int]] = collections.deque()
        order = []
        for kind in row:
            if kind == W:
                order.append(Action(pending[0][0], Kind.W, pending[0][1]))
                pending.popleft()
                continue
            order.append(Action(virtual_stages[kind], kinds[kind], done[kind]))
            if kind >= B1:
                pending.append((virtual_stages[kind], done[kind]))
            done[kind] += 1
        numbered.append(tuple(order))
    return Schedule(
        name=name,
        placement=wave(p),
        num_microbatches=num_microbatches,
        orders=tuple(numbered),
        peak_in_flight=tuple(min(cap, 2 * num_microbatches) for cap in caps),
    )
