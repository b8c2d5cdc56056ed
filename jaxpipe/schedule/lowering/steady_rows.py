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

from jaxpipe.schedule.actions import Action, Kind, Minibatches, MinibatchSchedule
from jaxpipe.schedule.generators.pipemare import Part, SteadyState
from jaxpipe.schedule.lowering import table
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.lowering.table import NONE, Arrival
from jaxpipe.schedule.placement import linear


class SteadyRows:
    """Source of the rows of an asynchronous pipeline.

    Args:
      entered: microbatches that have entered since the pipeline was last empty.
      first: version of the weights with which the pipeline was filled.
      fused: whether backwards are BW, or B and W.
      xp: the namespace of the arrays that come in: numpy or `jax.numpy`.

    Example:
      >>> import numpy as np
      >>> rows = SteadyRows(SteadyState(2, 2), entered=8, xp=np)
      >>> cell = rows.row(np.arange(4), 1, layers=3).cells[Kind.F]
      >>> cell.layers.tolist(), cell.microbatch.tolist()
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

    def row(self, tick: Any, stage: Any, *, layers: Any) -> table.Row:
        """Computes what one stage does in one tick.

        Args:
          tick: counted since the pipeline was last empty; an integer or an array of them.
          stage: number of the stage, from 0.
          layers: how many the stage has.
        """
        part, nothing = self.steady.stage(stage), table.Transfer(NONE, NONE)
        return table.Row(
            cells={kind: self._cell(kind, part, tick, layers) for kind in self.kinds},
            arrivals=self._arrivals(tick, stage),
            gather=nothing,
            reduce=nothing,
            outer=self._outer(tick),
            exchange=0,
            updates=self._updates(part, tick),
            replay=self._replay(part, tick),
        )

    def _runs(self, g: Any) -> Any:
        return (g >= 0) & (g < self.entered)

    def _if_runs(self, g: Any, value: Any) -> Any:
        return self.xp.where(self._runs(g), value, NONE)

    def _cell(self, kind: Kind, part: Part, tick: Any, layers: Any) -> table.Cell:
        steady = self.steady
        started, version = {
            Kind.F: (part.forward, steady.forward_version),
            Kind.R: (part.recompute, steady.recompute_version),
        }.get(kind, (part.backward, steady.backward_version))
        g = tick - started
        slot, zero = g % steady.residual_slots, 0 * g
        return table.Cell(
            layers=self.xp.where(self._runs(g), layers, 0),
            chunk=zero,
            microbatch=g,
            inbox=zero,
            until_b=slot,
            until_w=slot,
            crossing=zero,
            weights=version(part, g, self.first) % steady.num_versions,
            gradient=zero,
        )

    def _replay(self, part: Part, tick: Any) -> dict[Kind, Any] | None:
        size = self.steady.input_slots
        if not size:
            return None
        return {Kind.F: (tick - part.forward) % size, Kind.R: (tick - part.recompute) % size}

    def _arrivals(self, tick: Any, stage: Any) -> tuple[Arrival, ...]:
        """Arrivals in the order of channels: cotangents, activations, recomputed activations."""
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

    def _outer(self, tick: Any) -> table.Outer:
        steady, first = self.steady, self.first
        embed, head = steady.embed, steady.head
        enters, leaves, ends = tick - embed.forward, tick - head.forward, tick - embed.backward
        enter = steady.forward_version(embed, enters, first)
        back = steady.backward_version(embed, ends, first)
        leave = [steady.newest(part, tick, first) for part in (embed, head)]
        if steady.method == "2bw":
            leave = [steady.forward_version(head, leaves, first)] * 2
        reads = {"enter": (enter, enter), "leave": leave, "embed_gradient": (back, back)}
        return table.Outer(
            embed=self._if_runs(enters, enters),
            embed_slot=0,
            head=self._if_runs(leaves, leaves),
            head_slot=0,
            embed_gradient=self.xp.expand_dims(self._if_runs(ends, ends), -1),
            embed_gradient_slot=self.xp.full((1,), NONE),
            reads={
                phase: table.Reads(*(version % steady.num_versions for version in versions))
                for phase, versions in reads.items()
            },
        )

    def _updates(self, part: Part, tick: Any) -> table.Updates:
        steady = self.steady
        any_stage = 0 * tick
        for other in (*map(steady.stage, range(steady.num_stages)), steady.head):
            any_stage = any_stage | 1 * self._is_due(tick - other.backward)
        layers, embed, head = (self._update(p, tick) for p in (part, steady.embed, steady.head))
        return table.Updates(layers, embed, head, any_stage)

    def _is_due(self, g: Any) -> Any:
        return self._runs(g) & self.steady.updates(g)

    def _update(self, part: Part, tick: Any) -> table.Update:
        g = tick - part.backward
        minibatch = g // self.steady.num_microbatches
        due = self.xp.where(self._is_due(g), minibatch, NONE)
        return table.Update(due, self.first + minibatch)


def shown_minibatches(num_stages: int, num_microbatches: int) -> int:
    """Number of minibatches that keep the pipeline full throughout at least one of them."""
    return 1 + -(-4 * num_stages // num_microbatches)


def steady_schedule(
    steady: SteadyState, minibatches: int | None = None, *, fused: bool = False
) -> MinibatchSchedule:
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
    rows = SteadyRows(steady, entered=total, fused=fused, xp=np)
    tick = np.arange(total + steady.drain_ticks)
    in_ticks = []
    for d in range(P):
        cells = rows.row(tick, d, layers=1).cells
        in_ticks.append(
            [
                (t, Action(d, kind, int(cells[kind].microbatch[t])))
                for t in tick.tolist()
                for kind in rows.kinds
                if cells[kind].layers[t]
            ]
        )
    return MinibatchSchedule(
        name=steady.method,
        placement=linear(P),
        num_microbatches=total,
        orders=tuple(tuple(action for _, action in row) for row in in_ticks),
        peak_in_flight=tuple(
            part.backward - (part.forward if part.recompute is None else part.recompute) + 1
            for part in map(steady.stage, range(P))
        ),
        several=Minibatches(N, steady.method, steady.num_versions, steady.recompute_segment),
        ticks=tuple(tuple(t for t, _ in row) for row in in_ticks),
    )


def steady_table(
    steady: SteadyState, layer_counts: Sequence[int], *, fused: bool
) -> table.TickTable:
    """Builds the table of a few minibatches, with the kinds, channels and slots of a pipeline that
    never drains.

    While the pipeline is full, all messages of a tick are read in the next one.

    Args:
      layer_counts: layers of every stage.
      fused: as for `steady_schedule`.
    """
    lowered = lower(steady_schedule(steady, fused=fused), layer_counts)
    everything = tuple(() if c.kind is Kind.R else c.edges for c in lowered.channels)
    return dataclasses.replace(
        lowered,
        exchanges=(everything,),
        exchange=np.zeros_like(lowered.exchange),
        together=True,
        # A state has a slot for what goes from B to W whether its backward is split or not.
        num_slots=lowered.num_slots | {"crossing": 1},
    )
