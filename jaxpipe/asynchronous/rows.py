"""The rows of an asynchronous pipeline, computed from the tick's number.

Slots rotate with the microbatches in flight, minibatches with N, weight versions with V: a table of
one period of all of them would have lcm(2P, N, V) rows. So a row is integer arithmetic in the tick
and the stage, the same for numpy's arrays and traced ones.
"""

import dataclasses
from types import ModuleType
from typing import NamedTuple

import numpy as np

from jaxpipe.asynchronous.steady import PartTicks, SteadyState
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import (
    NONE,
    Arrival,
    Cell,
    Integer,
    Outer,
    Row,
    TickTable,
    Transfer,
)


class Update(NamedTuple):
    """An update that ends a tick.

    Args:
      minibatch: minibatch whose gradients are complete, counted since the pipeline was last empty;
        `NONE` if there is no update.
      version: version of the weights before the update.
    """

    minibatch: Integer
    version: Integer


class SteadyRow(NamedTuple):
    """One tick.

    Args:
      row: what the executor runs, and R among its cells, if anything is recomputed.
      inputs: slots of the inputs that F keeps and R reads, by their kinds; empty without R.
      reads: slots of the versions of embedding and head, by phase: enter, leave, embed_gradient.
      any_update: 1 if any part of any stage is.
    """

    row: Row
    inputs: dict[Kind, Integer]
    reads: dict[str, dict[str, Integer]]
    updates: dict[str, Update]
    any_update: Integer


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
      >>> cell = rows.at(np.arange(4), 1, layers=3).row.cells[Kind.F]
      >>> cell.layers.tolist(), cell.microbatch.tolist()
      ([0, 3, 3, 3], [-1, 0, 1, 2])
    """

    def __init__(
        self,
        steady: SteadyState,
        *,
        entered: Integer,
        first: Integer = 0,
        fused: bool = False,
        xp: ModuleType,
    ) -> None:
        self.steady, self.entered, self.first, self.xp = steady, entered, first, xp
        self.kinds = steady.kinds(fused=fused)

    def at(self, tick: Integer, stage: Integer, *, layers: Integer) -> SteadyRow:
        """Computes what one stage does in one tick.

        Args:
          tick: counted since the pipeline was last empty; an integer or an array of them.
        """
        steady, part, nothing = self.steady, self.steady.stage(stage), Transfer(NONE, NONE)
        row = Row(
            cells={kind: self._cell(kind, part, tick, layers) for kind in self.kinds},
            arrivals=self._arrivals(tick, stage),
            gather=nothing,
            reduce=nothing,
            outer=self._outer(tick),
            exchange=0,
        )
        inputs = {}
        if Kind.R in self.kinds:
            slots = {kind: (tick - part.start(kind)) for kind in (Kind.F, Kind.R)}
            inputs = {kind: slot % steady.input_slots for kind, slot in slots.items()}
        any_update = 0 * tick
        for other in (*map(steady.stage, range(steady.num_stages)), steady.head):
            any_update = any_update | 1 * self._is_due(tick - other.backward)
        updates = {name: self._update(part, tick) for name, part in steady.parts(stage).items()}
        return SteadyRow(row, inputs, self._reads(tick), updates, any_update)

    def _runs(self, g: Integer) -> Integer:
        return (g >= 0) & (g < self.entered)

    def _if_runs(self, g: Integer, value: Integer) -> Integer:
        return self.xp.where(self._runs(g), value, NONE)

    def _cell(self, kind: Kind, part: PartTicks, tick: Integer, layers: Integer) -> Cell:
        steady, g = self.steady, tick - part.start(kind)
        slot, zero = g % steady.residual_slots, 0 * g
        return Cell(
            layers=self.xp.where(self._runs(g), layers, 0),
            chunk=zero,
            microbatch=self._if_runs(g, g),
            inbox=zero,
            until_b=slot,
            until_w=slot,
            crossing=zero,
            weights=steady.version(part, kind, g, self.first) % steady.num_versions,
            gradient=zero,
        )

    def _arrivals(self, tick: Integer, stage: Integer) -> tuple[Arrival, ...]:
        """Arrivals of cotangents and activations."""
        last = self.steady.num_stages - 1
        before, behind = (self.steady.stage(stage + shift) for shift in (-1, 1))
        back, forth = (
            self._if_runs(tick - start, 0) for start in (behind.backward, before.forward)
        )
        edges = (stage == last, back), (stage == 0, forth)
        arrivals = [Arrival(self.xp.where(ends, NONE, slot), NONE) for ends, slot in edges]
        return tuple(arrivals) if last else ()

    def _outer(self, tick: Integer) -> Outer:
        embed, head = self.steady.embed, self.steady.head
        enters, leaves, ends = tick - embed.forward, tick - head.forward, tick - embed.backward
        return Outer(
            embed=self._if_runs(enters, enters),
            embed_slot=0,
            head=self._if_runs(leaves, leaves),
            head_slot=0,
            embed_gradient=self.xp.expand_dims(self._if_runs(ends, ends), -1),
            embed_gradient_slot=self.xp.full((1,), NONE),
        )

    def _reads(self, tick: Integer) -> dict[str, dict[str, Integer]]:
        steady, first, count = self.steady, self.first, self.steady.num_versions
        embed, head = steady.embed, steady.head
        enter = steady.version(embed, Kind.F, tick - embed.forward, first)
        back = steady.version(embed, Kind.B, tick - embed.backward, first)
        leave = [steady.newest(part, tick, first) for part in (embed, head)]
        if steady.method == "2bw":
            leave = [steady.version(head, Kind.F, tick - head.forward, first)] * 2
        reads = {"enter": (enter, enter), "leave": leave, "embed_gradient": (back, back)}
        return {k: {"embed": e % count, "head": h % count} for k, (e, h) in reads.items()}

    def _is_due(self, g: Integer) -> Integer:
        return self._runs(g) & self.steady.updates(g)

    def _update(self, part: PartTicks, tick: Integer) -> Update:
        g = tick - part.backward
        minibatch = g // self.steady.num_microbatches
        due = self.xp.where(self._is_due(g), minibatch, NONE)
        return Update(due, self.first + minibatch)


def steady_table(table: TickTable, steady: SteadyState) -> TickTable:
    """Makes of a synchronous pipeline's table what the executor reads of it beside rows.

    These are the kinds of action, the channels, all prompt, and the buffers' slots. R and its
    messages are `jaxpipe.asynchronous.updates`'.
    """
    channels = tuple(
        dataclasses.replace(channel, late_slot=np.full_like(channel.late_slot, NONE))
        for channel in table.channels
        if not channel.local  # cotangents do not wait for the embedding
    )
    return dataclasses.replace(
        table,
        channels=channels,
        outer=table.outer._replace(
            embed_gradient_slot=np.full_like(table.outer.embed_gradient_slot, NONE)
        ),
        num_slots={"x": 1, "dy": 1, "crossing": 1}
        | dict.fromkeys(("until_b", "until_w"), steady.residual_slots),
        # A stage sends in every tick in which the pipeline is full.
        exchanges=(tuple(channel.edges for channel in channels),),
        together=True,
    )
