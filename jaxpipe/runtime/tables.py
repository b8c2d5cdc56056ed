"""Tick tables of a pipeline, whose options decide what moves over data, and when."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh
from jax.tree_util import DictKey

from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.runtime.layout.splits import Splits
from jaxpipe.runtime.layout.whole_model import layer_layout
from jaxpipe.runtime.mesh import transfers_overlap
from jaxpipe.runtime.options import Options
from jaxpipe.runtime.types import Params
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.lowering.table import TickTable


@dataclasses.dataclass(frozen=True)
class Tables:
    """Lowers the schedules of a pipeline.

    Args:
      layout: of its layers.
      shares: the most shares in which a layer may move over data.
      weight_slots: as for `jaxpipe.Pipeline`.
      zero: ZeRO level; until 2, the gradients of all chunks have room.
      together, overlaps: as for `lower`.
    """

    layout: type[LayerLayout]
    shares: int
    weight_slots: int
    zero: int
    together: bool
    overlaps: bool

    @classmethod
    def of(
        cls,
        layers: Params,
        splits: Splits,
        options: Options,
        mesh: Mesh,
        *,
        together: bool,
    ) -> Tables:
        """Chooses how tables are lowered for canonical layers, split and run as the options say."""
        layout = layer_layout(layers, options.weights)
        shares = layout.most_shares(layers, splits.part(DictKey("layers")))
        overlaps = transfers_overlap(mesh)
        return cls(layout, shares, options.weight_slots, options.zero, together, overlaps)

    def of_step(self, schedule: Schedule, layer_counts: Sequence[int]) -> TickTable:
        """Lowers a schedule whose gradients are summed, and used when the step has ended."""
        slots, pieces = self.weight_slots, self.layout.pieces_of(max(layer_counts))
        return lower(
            schedule,
            layer_counts,
            weight_slots=slots,
            gradient_slots=None if self.zero >= 2 else schedule.num_chunks,
            own_slots=self.layout.own_arrays,
            pieces=pieces if slots > 1 else 0,
            shares=self.shares,
            together=self.together,
            overlaps=self.overlaps,
        )

    def of_chunks(self, schedule: Schedule, layer_counts: Sequence[int]) -> TickTable:
        """Lowers a schedule whose chunks are reduced, and used, when their gradient is complete."""
        return lower(
            schedule,
            layer_counts,
            weight_slots=self.weight_slots,
            own_slots=self.layout.own_arrays,
            together=self.together,
            overlaps=self.overlaps,
        )
