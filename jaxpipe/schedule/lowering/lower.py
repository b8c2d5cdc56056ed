"""Lowering: from a schedule to the tick table that the SPMD program runs.

Every tick is one row. Within a tick the phases come in this order, and slots are coloured by it:

    gather weights | embed | R | F | B, BW | W | reduce gradients | exchange messages | head | embed
    gradient

Everything a stage keeps lives in a numbered slot: a message that has arrived and waits (inbox),
residuals from F to the last action that reads them, values from B to W. Interval colouring gives
each buffer exactly the schedule's peak and no more.

A message that is first read two ticks after it was sent may arrive one tick late and travel while
that tick's layers run. Stages meet at the end of a tick if any of its messages cannot wait, so a
tick's messages are late only if all of them can be.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxpipe.schedule.actions import Kind, Schedule
from jaxpipe.schedule.check.validate import simulated_only
from jaxpipe.schedule.lowering.minibatches import with_updates
from jaxpipe.schedule.lowering.slots import cached_slots, colour_intervals
from jaxpipe.schedule.lowering.table import NONE, Cell, Channel, TickTable, Transfers
from jaxpipe.schedule.problems import refuse
from jaxpipe.schedule.simulate import ticks

_SPARED = 0.25
"""Least share of ticks without a meeting for which skipping meetings pays: late messages take a
second set of permutes in every tick, and skipping takes a loop. By schedule: docs/design/007."""


class Phase(enum.IntEnum):
    """Order of the parts of one tick that write or free a slot."""

    EMBED = 0
    RECOMPUTE = 1
    FORWARD = 2
    BACKWARD = 3
    WEIGHTS = 4
    EXCHANGE = 5


_PHASE = {
    Kind.F: Phase.FORWARD,
    Kind.B: Phase.BACKWARD,
    Kind.BW: Phase.BACKWARD,
    Kind.W: Phase.WEIGHTS,
}


def lower(
    schedule: Schedule,
    layer_counts: Sequence[int],
    *,
    weight_slots: int = 1,
    own_slots: bool = False,
) -> TickTable:
    """Turns a schedule into its tick table.

    Args:
      schedule: a valid schedule, or its forward part alone (`forward_only`). Its slices, if any,
        must be of the same layers.
      layer_counts: layers of every virtual stage, see
        `jaxpipe.schedule.partition`.
      weight_slots: gathered chunks a stage keeps at once when weights are sharded over data; capped
        by the number of chunks. With slices, raised to the number that one tick uses, and until no
        tick gathers twice.
      own_slots: a chunk always lies in slot ``chunk % k`` of k, for programs that must know where
        weights are; this may take more slots and gather more often.

    Returns:
      The table.

    Raises:
      ValueError: the schedule's slices are of other layers, or it can only be simulated.

    Example:
      >>> from jaxpipe.schedule.generators.one_f_one_b import one_f_one_b
      >>> lower(one_f_one_b(4, 8), [2] * 4).num_slots["until_w"]
      4
    """
    refuse(simulated_only(schedule))
    num_slots = min(weight_slots, schedule.num_chunks)
    return _Lowering(schedule, tuple(layer_counts), num_slots, own_slots).run()


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule's forwards alone, for evaluation."""
    orders = tuple(tuple(a for a in row if a.kind is Kind.F) for row in schedule.orders)
    return dataclasses.replace(schedule, orders=orders, peak_in_flight=None, slices=None)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The slices that run, one row each, in order within each stage: int64 ``[slices]``."""

    stage: np.ndarray
    tick: np.ndarray
    kind: np.ndarray
    virtual_stage: np.ndarray
    microbatch: np.ndarray
    lo: np.ndarray
    hi: np.ndarray


_KINDS = tuple(Kind)
"""Kinds by their number in `_Parts`."""


class _Lowering:
    """The passes of `lower`, which share the ticks of every action.

    The pass of microbatch i on virtual stage s has the number s*m + i; arrays of all of them are
    ``[p*v*m]``. Times within the step are ``tick * len(Phase) + phase``.
    """

    def __init__(
        self,
        schedule: Schedule,
        layer_counts: tuple[int, ...],
        weight_slots: int,
        own_slots: bool,
    ) -> None:
        self.schedule = schedule
        self.layer_counts = layer_counts
        self.weight_slots = weight_slots
        self.own_slots = own_slots
        self.m = schedule.num_microbatches
        self.stage_of = np.asarray(schedule.placement.stages)
        self.chunk_of = np.asarray(schedule.placement.chunks)
        self.parts = _parts(schedule, layer_counts)
        self.number = self.parts.virtual_stage * self.m + self.parts.microbatch
        self.num_ticks = 1 + int(self.parts.tick.max())
        found = set(np.unique(self.parts.kind).tolist())
        self.kinds = [kind for k, kind in enumerate(_KINDS) if k in found]
        self.backward = Kind.BW if Kind.BW in self.kinds else Kind.B
        self.trains = self.backward in self.kinds
        self.recomputes = Kind.R in self.kinds
        self.starts, self.ends = self._spans()
        self.late, self.meets = self._meetings()

    def run(self) -> TickTable:
        slots, num_slots = self._colour()
        gathers, weights, _ = self._transfers(self.kinds, load=True)
        sums = [kind for kind in self.kinds if kind in (Kind.W, Kind.BW)]
        reduces, gradients, fresh = self._transfers(sums, load=False)
        passes = {kind: self._pass(kind, slots, weights, gradients, fresh) for kind in self.kinds}
        last = len(self.stage_of) - 1
        embed, embed_slot = self._uniform(self.starts[Kind.F], 0, slots["x"])
        head, head_slot = self._uniform(self.ends[Kind.F], last, slots["dy"])
        leaves = self.ends[self.backward] if self.trains else None
        embed_gradient, _ = self._uniform(leaves, 0, slots["dy"])
        table = TickTable(
            schedule=self.schedule,
            layer_counts=self.layer_counts,
            passes=passes,
            channels=tuple(self._channels(slots)),
            embed=embed,
            embed_slot=embed_slot,
            head=head,
            head_slot=head_slot,
            embed_gradient=embed_gradient,
            gathers=gathers,
            reduces=reduces,
            num_slots=num_slots,
            meets=self.meets,
        )
        if self.schedule.minibatches is None:
            return table
        return with_updates(table, slots.get("replay"))

    def _spans(self) -> tuple[dict[Kind, np.ndarray], dict[Kind, np.ndarray]]:
        """The ticks in which the actions of each kind start and end."""
        starts, ends = {}, {}
        for kind in self.kinds:
            mine = self.parts.kind == _KINDS.index(kind)
            number, tick = self.number[mine], self.parts.tick[mine]
            starts[kind] = np.full(len(self.stage_of) * self.m, self.num_ticks)
            ends[kind] = np.full(len(self.stage_of) * self.m, NONE)
            np.minimum.at(starts[kind], number, tick)
            np.maximum.at(ends[kind], number, tick)
        return starts, ends

    def _messages(self) -> Iterator[tuple[Kind, int, int, np.ndarray, np.ndarray]]:
        """Kind (F, backward or R), source, target, and per microbatch the ticks in which the source
        sends and the target first reads."""
        steps = ((Kind.F, 1), (self.backward, -1), (Kind.R, 1))
        for kind, step in steps[: 1 + self.trains + self.recomputes]:
            for source, target in _hops(len(self.stage_of), step):
                if kind is Kind.R and target % (self.schedule.segment or 1) == 0:
                    continue
                sent = self.ends[kind][source * self.m : (source + 1) * self.m]
                read = self.starts[kind][target * self.m : (target + 1) * self.m]
                yield kind, source, target, sent, read

    def _meetings(self) -> tuple[np.ndarray, np.ndarray]:
        """bool ``[ticks]``: the ticks whose messages between stages are received in the next tick,
        and those at whose end stages meet."""
        soonest = np.full(self.num_ticks, self.num_ticks)
        for _, source, target, sent, read in self._messages():
            if self.stage_of[source] != self.stage_of[target]:
                np.minimum.at(soonest, sent, read - sent)
        meets = soonest == 1
        if np.mean(~meets) < _SPARED:
            return np.zeros_like(meets), np.ones_like(meets)
        return (soonest > 1) & (soonest < self.num_ticks), meets

    def _arrivals(self, sent: np.ndarray) -> np.ndarray:
        """Ticks in which messages between neighbouring virtual stages are received, from those in
        which they are sent, ``[(p*v - 1) * m]``."""
        moved = np.repeat(self.stage_of[1:] != self.stage_of[:-1], self.m)
        return sent + (self.late[sent] & moved)

    def _colour(self) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Slots by buffer and number, and how many each buffer has."""

        def at(ticks: np.ndarray, phase: Phase) -> np.ndarray:
            return ticks * len(Phase) + phase

        first, last = self.starts[Kind.F], self.ends[Kind.F]
        received = at(self._arrivals(last[: -self.m]), Phase.EXCHANGE)
        enters = at(first[: self.m], Phase.EMBED)
        forward = at(first, Phase.FORWARD)
        lives = {"x": (np.concatenate([enters, received]), at(last, Phase.FORWARD))}
        if self.trains:
            phase = _PHASE[self.backward]
            back = self._arrivals(self.ends[self.backward][self.m :])
            leaves = at(last[-self.m :], Phase.EXCHANGE)
            caused = np.concatenate([at(back, Phase.EXCHANGE), leaves])
            done = at(self.ends[self.backward], phase)
            frees = done if self.backward is Kind.BW else at(self.ends[Kind.W], Phase.WEIGHTS)
            kept = at(self.starts[Kind.R], Phase.RECOMPUTE) if self.recomputes else forward
            lives |= {"dy": (caused, done), "until_b": (kept, done), "until_w": (kept, frees)}
        if self.recomputes:
            lives["replay"] = (forward, at(self.ends[Kind.R], Phase.RECOMPUTE))
        if self.trains and self.backward is Kind.B:
            lives["crossing"] = (at(self.starts[Kind.B], Phase.BACKWARD), frees)
        slots, num_slots = {}, {}
        replay = ["replay"] if self.recomputes else []
        for name in ("x", "dy", "until_b", "until_w", "crossing", *replay):
            slots[name] = np.zeros(len(first), np.int64)
            num_slots[name] = 0
            for numbers in self._held() if name in lives else ():
                start, end = (times[numbers] for times in lives[name])
                slots[name][numbers] = colour_intervals(start, end)
                num_slots[name] = max(num_slots[name], 1 + int(slots[name][numbers].max()))
        return slots, num_slots

    def _held(self) -> Iterator[np.ndarray]:
        """For every stage, the numbers of its passes."""
        stages = np.repeat(self.stage_of, self.m)
        for stage in range(self.schedule.num_stages):
            yield np.flatnonzero(stages == stage)

    def _pass(
        self,
        kind: Kind,
        slots: dict[str, np.ndarray],
        weights: np.ndarray,
        gradients: np.ndarray,
        fresh: np.ndarray,
    ) -> Cell:
        parts = self.parts
        mine = np.flatnonzero(parts.kind == _KINDS.index(kind))
        number, tick = self.number[mine], parts.tick[mine]
        values = {
            "lo": parts.lo[mine],
            "hi": parts.hi[mine],
            "pauses": (tick < self.ends[kind][number]) & (kind is not Kind.W),
            "chunk": self.chunk_of[parts.virtual_stage[mine]],
            "microbatch": parts.microbatch[mine],
            "inbox": slots["x" if kind is Kind.F else "dy"][number],
            "until_b": slots["until_b"][number],
            "until_w": slots["until_w"][number],
            "crossing": slots["crossing"][number],
            "weights": weights[mine],
            "gradient": gradients[mine],
            "fresh": fresh[mine],
        }
        columns = {}
        for name, value in values.items():
            columns[name] = np.zeros((self.num_ticks, self.schedule.num_stages), np.int32)
            columns[name][tick, parts.stage[mine]] = value
        return Cell(**columns)

    def _uniform(
        self, ticks: np.ndarray | None, virtual_stage: int, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Columns of a phase that all stages run in these ticks of one virtual stage."""
        microbatch = np.full(self.num_ticks, NONE, np.int32)
        slot = np.zeros(self.num_ticks, np.int32)
        if ticks is not None:
            numbers = virtual_stage * self.m + np.arange(self.m)
            microbatch[ticks[numbers]] = np.arange(self.m)
            slot[ticks[numbers]] = slots[numbers]
        return microbatch, slot

    def _channels(self, slots: dict[str, np.ndarray]) -> Iterable[Channel]:
        """Groups messages by kind and distance, so that each group is one permutation."""
        _Group = tuple[set[tuple[int, int]], np.ndarray, np.ndarray]
        groups: dict[tuple[Kind, int], _Group] = {}
        shape = (self.num_ticks, self.schedule.num_stages)
        for kind, source, target, sent, _ in self._messages():
            sender, receiver = int(self.stage_of[source]), int(self.stage_of[target])
            group = (kind if kind in (Kind.F, Kind.R) else Kind.B, receiver - sender)
            empty: _Group = set(), np.full(shape, NONE, np.int32), np.full(shape, NONE, np.int32)
            edges, slot, late_slot = groups.setdefault(group, empty)
            edges.add((sender, receiver))
            inbox = slots["dy" if kind is self.backward else "x"]
            written = inbox[target * self.m : (target + 1) * self.m]
            # R reads what R of the tick before has put out, on its way.
            late = (self.late[sent] & (sender != receiver)) | (kind is Kind.R)
            slot[sent[~late], receiver] = written[~late]
            late_slot[sent[late] + 1, receiver] = written[late]
        for (kind, _), (edges, slot, late_slot) in sorted(groups.items(), key=lambda item: item[0]):
            yield Channel(kind, tuple(sorted(edges)), slot, late_slot)

    def _transfers(
        self, kinds: Sequence[Kind], *, load: bool
    ) -> tuple[Transfers, np.ndarray, np.ndarray]:
        """Gathers (load) or reductions (unload) of chunks that these kinds of action use; the slot
        of every slice, and which slices belong to the first action of a stay."""
        num_slots = self.weight_slots
        while (transfers := self._with_slots(kinds, num_slots, load=load)) is None:
            num_slots += 1
        return transfers

    def _with_slots(
        self, kinds: Sequence[Kind], num_slots: int, *, load: bool
    ) -> tuple[Transfers, np.ndarray, np.ndarray] | None:
        """As `_transfers`; None where a tick needs more slots or more than one transfer."""
        parts = self.parts
        shape = (self.num_ticks, self.schedule.num_stages)
        chunk, slot = np.full(shape, NONE, np.int32), np.zeros(shape, np.int32)
        slots_of, fresh = np.zeros(len(parts.tick), np.int64), np.zeros(len(parts.tick), bool)
        wanted = np.isin(parts.kind, [_KINDS.index(kind) for kind in kinds])
        chunks = self.chunk_of[parts.virtual_stage]
        # One cache of all slots, or slots of their own: a cache of one slot each.
        caches, size = (num_slots, 1) if self.own_slots else (1, num_slots)
        for stage, cache in itertools.product(range(self.schedule.num_stages), range(caches)):
            used = np.flatnonzero(wanted & (parts.stage == stage) & (chunks % caches == cache))
            uses, items = parts.tick[used], chunks[used]
            if _most_together(uses, items) > size:
                return None
            stays, stay_of = cached_slots(uses.tolist(), items.tolist(), num_slots=size)
            ticks = [stay.loaded if load else stay.unloaded for stay in stays]
            if len(set(ticks)) < len(ticks) or (chunk[ticks, stage] != NONE).any():
                return None
            held_in = cache * size + np.asarray([stay.slot for stay in stays], np.int64)
            chunk[ticks, stage], slot[ticks, stage] = [stay.item for stay in stays], held_in
            slots_of[used] = held_in[stay_of]
            fresh[used] = self._first_of_stay(used, np.asarray(stay_of, np.int64))
        return Transfers(chunk, slot, num_slots), slots_of, fresh

    def _first_of_stay(self, used: np.ndarray, stay_of: np.ndarray) -> np.ndarray:
        """Which of these slices belong to the action that begins their stay in a slot."""
        action = self.parts.kind[used] * len(self.starts[Kind.F]) + self.number[used]
        _, firsts = np.unique(stay_of, return_index=True)
        return action == action[firsts][stay_of]


def _parts(schedule: Schedule, layer_counts: tuple[int, ...]) -> _Parts:
    """The schedule's own slices, or one whole action per tick."""
    code = {kind: k for k, kind in enumerate(_KINDS)}
    counts = np.asarray(layer_counts)

    # Column by column: with one tuple per row, garbage collection would take longer than the rest.
    def column(values: Iterable[int]) -> np.ndarray:
        return np.fromiter(values, np.int64)

    slices = [part for row in schedule.slices or () for part in row]
    actions = [part.action for part in slices] or [a for row in schedule.orders for a in row]
    virtual_stage = column(action.virtual_stage for action in actions)
    if slices:
        tick = column(part.tick for part in slices)
        lo, hi = column(part.lo for part in slices), column(part.hi for part in slices)
    else:
        tick = column(itertools.chain.from_iterable(ticks(schedule)))
        lo, hi = np.zeros_like(virtual_stage), counts[virtual_stage]
    reached = np.zeros_like(counts)
    np.maximum.at(reached, virtual_stage, hi)
    if tuple(reached.tolist()) != layer_counts:
        raise ValueError(
            f"Schedule {schedule.name!r} was cut for {tuple(reached.tolist())} layers per virtual "
            f"stage, but the model has {layer_counts}: cut it again with `slice_ticks`."
        )
    return _Parts(
        stage=np.asarray(schedule.placement.stages)[virtual_stage],
        tick=tick,
        kind=column(code[action.kind] for action in actions),
        virtual_stage=virtual_stage,
        microbatch=column(action.microbatch for action in actions),
        lo=lo,
        hi=hi,
    )


def _hops(num_virtual_stages: int, step: int) -> Iterator[tuple[int, int]]:
    """Virtual stages and the ones they send to."""
    for source in range(num_virtual_stages):
        if 0 <= source + step < num_virtual_stages:
            yield source, source + step


def _most_together(ticks: np.ndarray, items: np.ndarray) -> int:
    """The most different items used in one tick."""
    pairs = np.unique(np.stack([ticks, items]), axis=1)
    return int(np.unique(pairs[0], return_counts=True)[1].max(initial=0))
