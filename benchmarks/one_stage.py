"""One stage of a pipeline on one device: the stage's column of the tick table, and its slots.

The device runs every tick of the pipeline, idle ones too, and sends to itself whatever the stage
would send or receive. Values are wrong, and thrown away; what is computed and kept, and so time and
memory, are those of the stage, but that it never waits for others.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

import jaxpipe
from jaxpipe.runtime.mesh import transfers_overlap
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.lowering.table import (
    BodyParts,
    Channel,
    Edges,
    TickTable,
    Transfer,
    Transfers,
)
from jaxpipe.schedule.placement import Placement
from models import gpt

_ITSELF: Edges = ((0, 0),)


def stage_of_pipeline(
    config: gpt.GPTConfig, schedule: Schedule, stage: int, *, device: Any, **options: Any
) -> jaxpipe.Pipeline:
    """Makes the pipeline of one device that runs one stage of a schedule.

    Args:
      config: the whole model's, whose layers the schedule's chunks share equally. The stages at the
        ends of the pipeline compute embedding and head.
      schedule: of any number of stages.
      stage: whose column the device runs.
      device: where.
      options: of `jaxpipe.Pipeline`.
    """
    per_chunk = config.num_layers // schedule.placement.num_virtual_stages
    config = dataclasses.replace(config, num_layers=per_chunk * schedule.num_chunks)
    mesh = jaxpipe.make_mesh(stage=1, devices=[device])
    alone = jaxpipe.schedules.build(
        "breadth-first",
        stages=1,
        microbatches=schedule.num_microbatches,
        chunks=schedule.num_chunks,
    )
    pipe = jaxpipe.Pipeline(
        gpt.model(config),
        jax.eval_shape(lambda: gpt.init(config, jax.random.key(0))),
        schedule=alone,  # where the stage's chunks lie; its ticks are those of `column`
        mesh=mesh,
        **options,
    )
    whole = lower(
        schedule,
        [per_chunk] * schedule.placement.num_virtual_stages,
        gradient_slots=schedule.num_chunks,
        own_slots=pipe.options.weights == "unrolled",
        overlaps=transfers_overlap(mesh),
    )
    pipe.table = column(whole, stage)
    return pipe


def column(table: TickTable, stage: int) -> TickTable:
    """The table of one stage alone, with the bodies of the whole table's ticks."""
    own = slice(stage, stage + 1)
    placement = table.schedule.placement
    # Virtual stages of other stages lie on none: embedding and head run where they belong.
    here = Placement(tuple(int(other != stage) for other in placement.stages))
    return _Column(
        schedule=dataclasses.replace(table.schedule, placement=here),
        layer_counts=tuple(table.layer_counts[s] for s in placement.virtual_stages[stage]),
        passes=jax.tree.map(lambda field: field[:, own], table.passes),
        channels=tuple(_channel(channel, stage) for channel in table.channels),
        outer=table.outer,
        gathers=_transfers(table.gathers, stage),
        reduces=_transfers(table.reduces, stage),
        num_slots=table.num_slots,
        exchanges=tuple(
            tuple(_ITSELF if _meets(edges, stage) else () for edges in pairs)
            for pairs in table.exchanges
        ),
        exchange=table.exchange,
        together=table.together,
        residual_parts=table.residual_parts,
        whole=table,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Column(TickTable):
    whole: TickTable

    def parts(self, *, gathers: bool, reduces: bool) -> list[BodyParts]:
        return self.whole.parts(gathers=gathers, reduces=reduces)


@dataclasses.dataclass(frozen=True)
class _Channel(Channel):
    """A channel that a stage has with itself in place of others."""

    late: bool

    @property
    def local(self) -> bool:
        return False

    @property
    def late_edges(self) -> Edges:
        return _ITSELF if self.late else ()


def _channel(channel: Channel, stage: int) -> Channel:
    own = {
        "slot": channel.slot[:, stage : stage + 1],
        "late_slot": channel.late_slot[:, stage : stage + 1],
    }
    if channel.local:
        return dataclasses.replace(channel, edges=_ITSELF, **own)
    late = _meets(channel.late_edges, stage)
    return _Channel(channel.kind, _ITSELF, late=late, **own)


def _meets(edges: Edges, stage: int) -> bool:
    """Whether the stage sends or receives."""
    return any(stage in edge for edge in edges)


def _transfers(transfers: Transfers, stage: int) -> Transfers:
    def own(array: np.ndarray) -> np.ndarray:
        return array[:, stage : stage + 1]

    edge = Transfer(*map(own, transfers.edge))
    chunk, slot, piece = (own(getattr(transfers, name)) for name in ("chunk", "slot", "piece"))
    return dataclasses.replace(transfers, chunk=chunk, slot=slot, piece=piece, edge=edge)
