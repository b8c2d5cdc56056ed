"""Several minibatches of an asynchronous pipeline as a schedule, to be simulated and drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxpipe.asynchronous.rows import steady_table
from jaxpipe.asynchronous.steady import SteadyState
from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.lowering.table import TickTable
from jaxpipe.schedule.placement import linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class SteadySchedule(Schedule):
    """Several minibatches, whose microbatches are numbered through all of them.

    A tick holds one action of each kind, which follow each other in the order of `kinds`.

    Args:
      steady: their rules.
      fused: whether backwards are BW, or B and W.
    """

    steady: SteadyState
    fused: bool

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return self.steady.kinds(fused=self.fused)

    def inputs(self, action: Action) -> list[Action]:
        """R waits for its own F, and within a segment for R of the previous stage; a backward for
        its own R."""
        d, i = action.virtual_stage, action.microbatch
        if action.kind is Kind.R:
            begins = self.steady.begins_segment(d)
            return [Action(d, Kind.F, i), *([] if begins else [Action(d - 1, Kind.R, i)])]
        again = Kind.R in self.kinds and action.kind in (Kind.B, Kind.BW)
        return [*super().inputs(action), *([Action(d, Kind.R, i)] if again else [])]

    def table(self, layer_counts: Sequence[int]) -> TickTable:
        return steady_table(self, self.steady, layer_counts, fused=self.fused)


def shown_minibatches(num_stages: int, num_microbatches: int) -> int:
    """Number of minibatches that keep the pipeline full throughout at least one of them."""
    return 1 + -(-4 * num_stages // num_microbatches)


def steady_schedule(
    steady: SteadyState, minibatches: int | None = None, *, fused: bool = False
) -> SteadySchedule:
    """Builds the schedule of several minibatches, from an empty pipeline to an empty one.

    Args:
      minibatches: K, at least 1; microbatches are numbered through all of them. None for
        `shown_minibatches`.
      fused: whether backwards are BW, or B and W.

    Example:
      >>> schedule = steady_schedule(SteadyState(2, 1), 2, fused=True)
      >>> [" ".join(map(str, order)) for order in schedule.orders]
      ['0F0 0F1 0BW0 0BW1', '1F0 1F1 1BW0 1BW1']
    """
    P, N = steady.num_stages, steady.num_microbatches
    total = N * (shown_minibatches(P, N) if minibatches is None else minibatches)
    parts, kinds = [*map(steady.stage, range(P))], steady.kinds(fused=fused)
    return SteadySchedule(
        name=steady.method,
        placement=linear(P),
        num_microbatches=total,
        orders=tuple(
            tuple(
                Action(d, kind, tick - part.start(kind))
                for tick in range(total + steady.drain_ticks)
                for kind in kinds
                if 0 <= tick - part.start(kind) < total
            )
            for d, part in enumerate(parts)
        ),
        peak_in_flight=tuple(
            part.backward - (part.forward if part.recompute is None else part.recompute) + 1
            for part in parts
        ),
        steady=steady,
        fused=fused,
    )
