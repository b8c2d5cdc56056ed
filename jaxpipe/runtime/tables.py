"""Which tick table a pipeline runs: what moves over data, and when, depends on its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.lowering.table import TickTable


@dataclasses.dataclass(frozen=True)
class Tables:
    """Lowers the schedules of a pipeline.

    Args:
      layout: of its layers.
      weight_slots: as for `jaxpipe.Pipeline`.
      zero: ZeRO level; until 2, the gradients of all chunks have room.
    """

    layout: type[LayerLayout]
    weight_slots: int
    zero: int

    def of_step(self, schedule: Schedule, layer_counts: Sequence[int]) -> TickTable:
        """Gradients are summed, and used when the step has ended."""
        slots, pieces = self.weight_slots, self.layout.pieces_of(max(layer_counts))
        return lower(
            schedule,
            layer_counts,
            weight_slots=slots,
            gradient_slots=None if self.zero >= 2 else schedule.num_chunks,
            own_slots=self.layout.own_arrays,
            pieces=pieces if slots > 1 else 0,
        )

    def of_chunks(self, schedule: Schedule, layer_counts: Sequence[int]) -> TickTable:
        """A chunk is reduced as a whole, and used, as soon as its gradient is complete."""
        slots, own_slots = self.weight_slots, self.layout.own_arrays
        return lower(schedule, layer_counts, weight_slots=slots, own_slots=own_slots)
