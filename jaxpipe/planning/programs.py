"""The tick table of a plan, and how its time and its slots grow with the microbatches.

A schedule's steady state repeats every ``p`` microbatches. A long step is therefore not lowered
whole: two shorter ones that are ``p`` microbatches apart give the line on which it lies. The plans
that are shown at the end are lowered as they are (`search.exact`), unless they are very long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.lowering.lower import Lowering, lowering
from jaxpipe.schedule.lowering.table import TickTable
from jaxpipe.schedule.lowering.transfers import MoveOptions
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.simulate import Costs

_PERIODS = 4
"""Microbatches, in stages, after which a schedule is in its steady state."""
_FEWEST = 8
_MOST_PASSES = 4096
"""Forward passes of a program with an order of its own that is lowered as it is: seconds."""
_DIGITS = 2
"""Significant digits of relative costs that tell two programs apart."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What decides a tick table.

    Args:
      schedule: its name.
      stages, chunks, microbatches: its shape.
      layers: of the model.
      costs: of a chunk, relative, for which orders are made; None for the published order.
      weight_slots, own_slots, shares, sums_in_slots, together: how the pipeline lowers it; no
        shares where chunks move as a whole.
      head_layers: how many layers the last stage's head stands for in the partition.
    """

    schedule: str
    stages: int
    chunks: int
    microbatches: int
    layers: int
    costs: Costs | None
    weight_slots: int
    own_slots: bool
    shares: int
    sums_in_slots: bool
    together: bool = False
    head_layers: float = 0.0

    def lowering(self) -> Lowering:
        """What programs share that differ in how chunks move over data: see `lowering_of`.

        Raises:
          ArgumentError: the schedule does not fit the shape.
        """
        order = order_of(self.schedule, self.stages, self.chunks, self.microbatches, self.costs)
        loads = [1.0] * self.layers
        loads[-1] += self.head_layers
        counts = partition(loads, order.placement)
        return lowering(order, counts, together=self.together)

    def table(self) -> TickTable:
        """Lowers it, as `jaxpipe.Pipeline` does.

        Raises:
          ArgumentError: the schedule does not fit the shape.
        """
        lowered = lowering_of(self)
        pieces = max(lowered.layer_counts) if self.shares else 0
        return lowered.table(
            weight_slots=self.weight_slots,
            gradient_slots=None if self.sums_in_slots else lowered.schedule.num_chunks,
            moving=MoveOptions(self.own_slots, pieces, max(1, self.shares)),
        )

    @property
    def unmoved(self) -> Program:
        """It without chunks that move over data, which programs with the same order share."""
        return dataclasses.replace(
            self, weight_slots=1, own_slots=False, shares=0, sums_in_slots=False
        )

    def shorter(self) -> tuple[tuple[Program, float], ...]:
        """Programs with weights whose sum this one's time and slots are; itself, if it is short."""
        p, most = self.stages, max(_PERIODS * self.stages, _FEWEST)
        passes = p * self.chunks * self.microbatches
        shown = self.costs is not None and passes <= _MOST_PASSES
        if shown or self.microbatches <= most + p:
            return ((self, 1.0),)
        longer = most + self.microbatches % p
        periods = (self.microbatches - longer) / p
        two = (dataclasses.replace(self, microbatches=m) for m in (longer, longer - p))
        return tuple(zip(two, (1 + periods, -periods), strict=True))


def grown(program: Program, of: Callable[[Program], float]) -> float:
    """A number of a program that grows in a line with its microbatches."""
    return sum(weight * of(one) for one, weight in program.shorter())


def lowering_of(program: Program) -> Lowering:
    """`Program.lowering`, kept for all programs with the same order."""
    return _lowering_of(program.unmoved)


@lru_cache(maxsize=512)
def _lowering_of(unmoved: Program) -> Lowering:
    return unmoved.lowering()


@lru_cache(maxsize=512)
def table_of(program: Program) -> TickTable:
    """`Program.table`, kept."""
    return program.table()


@lru_cache(maxsize=512)
def order_of(
    name: str, stages: int, chunks: int, microbatches: int, costs: Costs | None
) -> Schedule:
    """The order of a program, as the trainer makes it.

    Raises:
      ArgumentError: the schedule does not fit the shape.
    """
    return catalog.build(name, stages=stages, microbatches=microbatches, chunks=chunks, costs=costs)


def relative(costs: Costs) -> Costs:
    """Costs as multiples of F, in few digits, so that plans that hardly differ share a table.

    Example:
      >>> relative(Costs(2.0, 2.4444, 1.6, 0.0123))
      Costs(f=1.0, b=1.2, w=0.8, message=0.0062)
    """
    b, w, message = (
        float(f"{value / costs.f:.{_DIGITS}g}") for value in (costs.b, costs.w, costs.message)
    )
    return Costs(1.0, b, w, message)
