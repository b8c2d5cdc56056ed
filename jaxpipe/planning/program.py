"""Tick tables of plans, each lowered once for all plans that share it.

A schedule's steady state repeats every ``p`` microbatches. A long step is therefore not lowered
whole: two shorter ones that are ``p`` microbatches apart give the line on which its time and its
slots lie. The plans that are shown at the end are lowered as they are, unless they are very long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache

from jaxpipe.schedule import catalog
from jaxpipe.schedule.lowering.lower import Lowering, lowering
from jaxpipe.schedule.lowering.table import TickTable
from jaxpipe.schedule.lowering.transfers import MoveOptions
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.simulate import Costs

_PERIODS = 4
"""Microbatches, in stages, after which a schedule is in its steady state."""
_FEWEST = 8
_MOST_PASSES = 4096
"""Most forward passes of a program with an order of its own that is lowered as it is."""
_DIGITS = 2
"""Significant digits of relative costs that tell two programs apart."""


@dataclasses.dataclass(frozen=True)
class Program:
    """The choices that decide a tick table.

    Args:
      schedule: its name.
      stages, chunks, microbatches: its shape.
      layers: number of layers of the model.
      costs: costs of a chunk, relative, for which orders are made; None for the published order.
      weight_slots, own_slots, shares, sums_in_slots, together: how the pipeline lowers it; no
        shares where chunks move as a whole.
      head_layers: how many layers the last stage's head stands for in the partition.
      slices: slices of the sequences of a microbatch.
    """

    schedule: str
    stages: int
    chunks: int
    microbatches: int
    layers: int
    costs: Costs | None
    weight_slots: int = 1
    own_slots: bool = False
    shares: int = 0
    sums_in_slots: bool = False
    together: bool = False
    head_layers: float = 0.0
    slices: int = 1

    def without_transfers(self) -> Program:
        """The program of the same order in which nothing moves over data."""
        return dataclasses.replace(
            self, weight_slots=1, own_slots=False, shares=0, sums_in_slots=False
        )

    def shorter(self) -> tuple[tuple[Program, float], ...]:
        """Programs and weights whose sum has this one's time and slots; itself, if it is short."""
        p, k = self.stages, self.slices
        most = max(-(-_PERIODS * p // k), _FEWEST)
        passes = p * self.chunks * self.microbatches * k
        shown = self.costs is not None and passes <= _MOST_PASSES
        if shown or self.microbatches <= most + p:
            return ((self, 1.0),)
        longer = most + self.microbatches % p
        periods = (self.microbatches - longer) / p
        two = (dataclasses.replace(self, microbatches=m) for m in (longer, longer - p))
        return tuple(zip(two, (1 + periods, -periods), strict=True))


def grown(program: Program, of: Callable[[Program], float]) -> float:
    """Extends a number of a program that grows in a line with its microbatches."""
    return sum(weight * of(short) for short, weight in program.shorter())


def lowering_of(program: Program) -> Lowering:
    """Lowers a program without its transfers over data, once for all programs with its order.

    Raises:
      ArgumentError: the schedule does not fit the shape.
    """
    return _lowering_of(program.without_transfers())


@lru_cache(maxsize=512)
def _lowering_of(p: Program) -> Lowering:
    order = _build(
        p.schedule,
        stages=p.stages,
        microbatches=p.microbatches,
        chunks=p.chunks,
        slices=p.slices if p.slices > 1 else None,
        costs=p.costs,
    )
    counts = partition([1.0] * (p.layers - 1) + [1.0 + p.head_layers], order.placement)
    return lowering(order, counts, together=p.together)


_build = lru_cache(maxsize=512)(catalog.build)


@lru_cache(maxsize=2048)
def table_of(program: Program) -> TickTable:
    """Lowers a program, as `jaxpipe.Pipeline` does.

    Raises:
      ArgumentError: the schedule does not fit the shape.
    """
    lowered = lowering_of(program)
    pieces = max(lowered.layer_counts) if program.shares else 0
    return lowered.table(
        weight_slots=program.weight_slots,
        gradient_slots=None if program.sums_in_slots else lowered.schedule.num_chunks,
        moving=MoveOptions(program.own_slots, pieces, max(1, program.shares)),
    )


def relative(costs: Costs) -> Costs:
    """Rounds costs to multiples of F in few digits, so that similar plans share a table.

    Example:
      >>> relative(Costs(2.0, 2.4444, 1.6, 0.0123))
      Costs(f=1.0, b=1.2, w=0.8, message=0.0062)
    """
    b, w, message = (
        float(f"{value / costs.f:.{_DIGITS}g}") for value in (costs.b, costs.w, costs.message)
    )
    return Costs(1.0, b, w, message, attention=round(costs.attention, _DIGITS))
