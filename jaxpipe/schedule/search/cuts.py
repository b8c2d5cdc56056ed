"""How a model's layers are cut into chunks, and which ways there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jaxpipe.schedule.partition import cut_layers
from jaxpipe.schedule.placement import Placement, linear, looped, wave
from jaxpipe.schedule.search.bounds import lower_bound
from jaxpipe.schedule.simulate import Costs


@dataclasses.dataclass(frozen=True)
class Cut:
    """A placement, and what its chunks cost.

    Args:
      layer_counts: of every virtual stage.
      costs: of every virtual stage.
    """

    placement: Placement
    layer_counts: tuple[int, ...]
    costs: tuple[Costs, ...]

    @property
    def message(self) -> float:
        """What every tick ends with."""
        return max(c.message for c in self.costs) if self.placement.num_stages > 1 else 0.0

    def cap(self, num_microbatches: int, memory_limit: float) -> int:
        """Chunks in flight that a limit in microbatches of a full stage allows."""
        chunks = self.placement.num_chunks
        return max(chunks, int(min(memory_limit, num_microbatches) * chunks))

    def bound(self, num_microbatches: int, memory_limit: float) -> float:
        """Before this no schedule can end in lock-step."""
        return self.bound_at(num_microbatches, self.cap(num_microbatches, memory_limit))

    def bound_at(self, num_microbatches: int, cap: int) -> float:
        """As `bound`, for schedules with at most so many chunks in flight."""
        ends = lower_bound(self.placement, num_microbatches, self._silent, cap=cap)
        return ends + self.exchanges(num_microbatches)

    @property
    def _silent(self) -> tuple[Costs, ...]:
        return tuple(dataclasses.replace(cost, message=0.0) for cost in self.costs)

    def exchanges(self, num_microbatches: int) -> float:
        """The least time of messages: every chunk's F of every microbatch ends a tick of its
        own."""
        placement = self.placement
        ticks = num_microbatches * placement.num_chunks + placement.num_virtual_stages
        return ticks * self.message


def cuts(num_stages: int, layer_costs: Sequence[Costs]) -> Iterator[Cut]:
    """All placements of this package for a model, with as many chunks as its layers allow."""
    most = len(layer_costs) // num_stages
    found = [linear(num_stages)] if most else []
    # The V comes second.
    for chunks in range(2, most + 1):
        if chunks % 2 == 0:
            found.append(wave(num_stages, num_waves=chunks // 2))
        found.append(looped(num_stages, num_chunks=chunks))
    for placement in found:
        yield Cut(placement, *cut_layers(layer_costs, placement))
