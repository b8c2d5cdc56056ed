"""The rows of an asynchronous pipeline, computed from the tick's number.

Slots rotate with the microbatches in flight, minibatches with N, weight versions with V: a table of
one period of all of them would have lcm(2P, N, V) rows. So a row is integer arithmetic in the tick
and the stage, the same for numpy's arrays and traced ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lower import lower
from jaxpipe.schedule.one_f_one_b import one_f_one_b
from jaxpipe.schedule.pipemare import Part, SteadyState
from jaxpipe.schedule.table import (
    NONE,
    Arrival,
    Cell,
    Channel,
    Outer,
    Reads,
    Row,
    TickTable,
    Transfer,
    Update,
    Updates,
)


class SteadyRows:
    """A source of rows.

    Args:
      steady: the pipeline.
      entered: microbatches that have entered since it was last empty.
      first: the version of the weights that it was filled with.
      fused: whether backwards are BW, or B and W.
      xp: the namespace of the arrays that come in: numpy or `jax.numpy`.

    Example:
      >>> import numpy as np
      >>> rows = SteadyRows(SteadyState(2, 2), entered=8, xp=np)
      >>> cell = rows.row(np.arange(4), 1, layers=3).cells[Kind.F]
      >>> cell.hi.tolist(), cell.microbatch.tolist()
      ([0, 3, 3, 3], [-1, 0, 1, 2])
    """

    def __init__(
        self, steady: SteadyState, *, entered: Any, first: Any = 0, fused: bool = False, xp: Any
    ) -> None:
        self.steady, self.entered, self.first, self.xp = steady, entered, first, xp
        recomputes = steady.recompute_segment is not None
        self.kinds = (
            *([Kind.R] if recomputes else []),
            *([Kind.F, Kind.BW] if fused else [Kind.F, Kind.B, Kind.W]),
        )

    def row(self, tick: Any, stage: Any, *, layers: Any) -> Row:
        """What one stage does in one tick.

        Args:
          tick: counted since the pipeline was last empty; an integer or an array of them.
          stage: from 0, likewise.
          layers: how many the stage has.
        """
        part = self.steady.stage(stage)
        nothing = Transfer(NONE, NONE)
        return Row(
            cells={kind: self._cell(kind, part, tick, layers) for kind in self.kinds},
            arrivals=self._arrivals(tick, stage),
            gather=nothing,
            reduce=nothing,
            outer=self._outer(tick),
            meets=1,
            updates=self._updates(part, tick),
        )

    def _runs(self, g: Any) -> Any:
        return (g >= 0) & (g < self.entered)

    def _if_runs(self, g: Any, value: Any) -> Any:
        return self.xp.where(self._runs(g), value, NONE)

    def _cell(self, kind: Kind, part: Part, tick: Any, layers: Any) -> Cell:
        steady = self.steady
        if kind is Kind.F:
            g, version = tick - part.forward, steady.forward_version
        elif kind is Kind.R:
            g, version = tick - part.recompute, steady.recompute_version
        else:
            g, version = tick - part.backward, steady.backward_version
        slot, zero = g % steady.residual_slots, 0 * g
        return Cell(
            lo=zero,
            hi=self.xp.where(self._runs(g), layers, 0),
            pauses=zero,
            chunk=zero,
            microbatch=g,
            inbox=zero,
            until_b=slot,
            until_w=slot,
            crossing=zero,
            weights=version(part, g, self.first) % steady.num_versions,
            gradient=zero,
            fresh=1 * (g % steady.num_microbatches == 0),
            replay=g % steady.input_slots if steady.input_slots else None,
        )

    def _arrivals(self, tick: Any, stage: Any) -> tuple[Arrival, ...]:
        """In the order of channels: cotangents, activations, recomputed activations."""
        steady = self.steady
        if steady.num_stages == 1:
            return ()
        before, behind, here = (steady.stage(stage + shift) for shift in (-1, 1, 0))
        back, forth = tick - behind.backward, tick - before.forward
        is_last, is_first = stage == steady.num_stages - 1, stage == 0
        arrivals = [
            Arrival(self.xp.where(is_last, NONE, self._if_runs(back, 0)), NONE),
            Arrival(self.xp.where(is_first, NONE, self._if_runs(forth, 0)), NONE),
        ]
        if steady.recompute_edges:
            again = self._if_runs(tick - here.recompute, 0)
            begins = steady.begins_segment(stage)
            arrivals.append(Arrival(NONE, self.xp.where(begins, NONE, again)))
        return tuple(arrivals)

    def _outer(self, tick: Any) -> Outer:
        steady = self.steady
        embed, head = steady.embed, steady.head
        enters, leaves, ends = tick - embed.forward, tick - head.forward, tick - embed.backward

        def slots(of_embed: Any, of_head: Any) -> Reads:
            return Reads(of_embed % steady.num_versions, of_head % steady.num_versions)

        if steady.method == "2bw":
            left = slots(*[steady.forward_version(head, leaves, self.first)] * 2)
        else:
            left = slots(*(steady.newest(part, tick, self.first) for part in (embed, head)))
        return Outer(
            embed=self._if_runs(enters, enters),
            embed_slot=0,
            head=self._if_runs(leaves, leaves),
            head_slot=0,
            embed_gradient=self._if_runs(ends, ends),
            reads={
                "enter": slots(*[steady.forward_version(embed, enters, self.first)] * 2),
                "leave": left,
                "embed_gradient": slots(*[steady.backward_version(embed, ends, self.first)] * 2),
            },
        )

    def _updates(self, part: Part, tick: Any) -> Updates:
        steady = self.steady
        stages = [steady.stage(d) for d in range(steady.num_stages)]
        any_stage = 0 * tick
        for other in [*stages, steady.head]:
            any_stage = any_stage | 1 * self._is_due(tick - other.backward)
        return Updates(
            layers=self._update(part, tick),
            embed=self._update(steady.embed, tick),
            head=self._update(steady.head, tick),
            any_stage=any_stage,
        )

    def _is_due(self, g: Any) -> Any:
        return self._runs(g) & self.steady.updates(g)

    def _update(self, part: Part, tick: Any) -> Update:
        g = tick - part.backward
        minibatch = g // self.steady.num_microbatches
        due = self.xp.where(self._is_due(g), minibatch, NONE)
        return Update(due, self.first + minibatch)


def steady_table(steady: SteadyState, layer_counts: Sequence[int], *, fused: bool) -> TickTable:
    schedule = one_f_one_b(steady.num_stages, steady.num_microbatches, fused=fused)
    table = lower(schedule, layer_counts)
    none = np.full((table.num_ticks, steady.num_stages), NONE, np.int32)
    channels = [dataclasses.replace(c, late_slot=none) for c in table.channels]
    passes = table.passes
    if steady.recompute_segment is not None:
        passes = {Kind.R: passes[Kind.F], **passes}
    if steady.recompute_edges:
        channels.append(Channel(Kind.R, steady.recompute_edges, none, 0 * none))
    kept = steady.residual_slots
    slots = {"x": 1, "dy": 1, "crossing": 1, "until_b": kept, "until_w": kept}
    slots |= {"replay": steady.input_slots}
    return dataclasses.replace(
        table,
        passes=passes,
        channels=tuple(channels),
        num_slots=slots,
        meets=np.ones(table.num_ticks, bool),
    )
