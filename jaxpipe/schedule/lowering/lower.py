"""Lowering: from a schedule to the tick table that the SPMD program runs.

Every tick is one row. Within a tick the phases come in this order, and slots are coloured by it:

    gather weights | embed | R | F | B, BW | W | reduce gradients | exchange messages
    | embed gradient | head

Everything a stage keeps lives in a numbered slot: a message that has arrived and waits (inbox),
residuals from F to the last action that reads them, values from B to W. Interval coloring gives
each buffer exactly the schedule's peak and no more.

A message that is first read two ticks after it was sent may arrive one tick late and travel while
that tick's layers run. Stages meet at the end of a tick if any of its messages cannot wait, so a
tick's messages are late only if all of them can be. Where stages wait for their neighbors alone,
actions run in later ticks if fewer of them then end with a meeting
(`jaxpipe.schedule.lowering.patient_ticks`).

Where chunks move over data in pieces under layers (`jaxpipe.schedule.lowering.under_layers`), a
tick's pieces are on their way from its beginning to its end. In which ticks stages embed together
is up to `jaxpipe.schedule.lowering.outer_ticks`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jaxpipe.schedule.actions import Kind, Schedule
from jaxpipe.schedule.check.validate import simulated_only
from jaxpipe.schedule.lowering.columns import Columns, columns_of
from jaxpipe.schedule.lowering.outer_ticks import embed_gradient_ticks, embed_ticks
from jaxpipe.schedule.lowering.patient_ticks import patient_ticks
from jaxpipe.schedule.lowering.slots import colour_intervals
from jaxpipe.schedule.lowering.table import NONE, Cell, Channel, TickTable
from jaxpipe.schedule.lowering.transfers import Held, Moving, held_chunks
from jaxpipe.schedule.problems import refuse
from jaxpipe.schedule.simulate import ticks as earliest_ticks

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
    EMBED_GRADIENT = 6
    HEAD = 7


def lower(
    schedule: Schedule,
    layer_counts: Sequence[int],
    *,
    weight_slots: int = 1,
    gradient_slots: int | None = None,
    own_slots: bool = False,
    pieces: int = 0,
    shares: int = 1,
    clock: str = "lock-step",
) -> TickTable:
    """Turns a schedule into its tick table.

    Args:
      schedule: a valid schedule, or its forward part alone (`forward_only`). Its slices, if any,
        must be of the same layers.
      layer_counts: layers of every virtual stage (`jaxpipe.schedule.partition`).
      weight_slots: gathered chunks a stage keeps at once when weights are sharded over data; capped
        by the number of chunks. With slices, raised to the number that one tick uses, and until no
        tick gathers twice.
      gradient_slots: chunks whose gradients a stage sums at once; by default as many. If given, a
        chunk may be reduced when the step ends.
      own_slots: a chunk always lies in slot ``chunk % k`` of k, for programs that must know where
        weights are; this may take more slots and gather more often.
      pieces: of a chunk, to move under layers of other chunks where there is a slot more; by
        default chunks move as a whole.
      shares: the most equal parts in which a piece may move, a power of two.
      clock: of the devices: "lock-step" for the earliest ticks, or "neighbor", as on GPUs, for
        those in which stages meet the least, if they take no slot more.

    Raises:
      ValueError: the schedule's slices are of other layers, or it can only be simulated.

    Example:
      >>> from jaxpipe.schedule.generators.one_f_one_b import one_f_one_b
      >>> lower(one_f_one_b(4, 8), [2] * 4).num_slots["until_w"]
      4
    """
    return lowering(schedule, layer_counts, clock=clock).table(
        weight_slots=weight_slots,
        gradient_slots=gradient_slots,
        moving=Moving(own_slots, pieces, shares),
    )


def lowering(
    schedule: Schedule, layer_counts: Sequence[int], *, clock: str = "lock-step"
) -> Lowering:
    """The part of `lower` that is the same however chunks move over data; arguments are its own."""
    refuse(simulated_only(schedule))
    counts = tuple(layer_counts)

    def in_ticks(ticks: Callable[[Schedule], list[list[int]]]) -> Lowering:
        return Lowering(schedule, columns_of(schedule, counts, ticks), counts)

    soonest = in_ticks(earliest_ticks)
    if clock == "neighbor" and schedule.slices is None and schedule.segment is None:
        patient = in_ticks(patient_ticks)
        takes_more = any(patient.num_slots[name] > n for name, n in soonest.num_slots.items())
        if patient.meets.sum() < soonest.meets.sum() and not takes_more:
            return patient
    return soonest


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule's forwards alone, for evaluation."""
    orders = tuple(tuple(a for a in row if a.kind is Kind.F) for row in schedule.orders)
    return dataclasses.replace(
        schedule, orders=orders, peak_in_flight=None, slices=None, overlapped=()
    )


def _at(ticks: np.ndarray, phase: Phase) -> np.ndarray:
    """Times within the step."""
    return ticks * len(Phase) + phase


class Lowering:
    """A schedule in its ticks, with the slots of what its actions keep: all that its tick tables
    have in common, which differ in how chunks move over data.

    Arrays of all actions of a kind are ``[virtual stages, microbatches]``.

    Attributes:
      kinds: of its actions.
      channels, num_slots, meets: as of `TickTable`.
    """

    def __init__(self, schedule: Schedule, columns: Columns, layer_counts: tuple[int, ...]) -> None:
        self.schedule, self.columns, self.layer_counts = schedule, columns, layer_counts
        self.stage_of = np.asarray(schedule.placement.stages)
        self.chunk_of = np.asarray(schedule.placement.chunks)
        self.shape = len(self.stage_of), schedule.num_microbatches
        self.num_ticks = 1 + int(self.columns.tick.max())
        self.kinds = [kind for kind in Kind if self.columns.of(kind).any()]
        self.backward = Kind.BW if Kind.BW in self.kinds else Kind.B
        self.trains = self.backward in self.kinds
        self.recomputes = Kind.R in self.kinds
        self.starts, self.ends = self._spans()
        self._late, self.meets = self._meetings()

        lives = self._lives()
        names = dict.fromkeys(("x", "dy", "until_b", "until_w", "crossing", *lives))
        self._slots = {name: np.zeros(self.shape, np.int64) for name in names}
        self._slots |= {name: self._colour(*life) for name, life in lives.items()}
        self._enters, self._slots["x"] = self._enter(*lives["x"], self._slots["x"])
        self._returned, self._slots["dy"] = self._leave(lives.get("dy"), self._slots["dy"])
        self.channels = tuple(self._channels())
        self.num_slots = {
            name: 1 + int(self._slots[name].max()) if name in lives else 0 for name in names
        }

    def table(self, *, weight_slots: int, gradient_slots: int | None, moving: Moving) -> TickTable:
        """The tick table of chunks that move so; the slots are those of `lower`."""
        slots, most = self._slots, self.schedule.num_chunks
        hold = functools.partial(held_chunks, self.schedule, self.columns, moving)
        waits, kept = moving.pieces > 0, gradient_slots is not None
        sums = min(gradient_slots or weight_slots, most)
        weights = hold(min(weight_slots, most), self.kinds, load=True, waits=waits)
        gradients = hold(sums, [Kind.W, Kind.BW], load=False, waits=waits or kept)
        embed, embed_slot = self._uniform(self._enters, slots["x"][0])
        head, head_slot = self._uniform(self.ends[Kind.F][-1], slots["dy"][-1])
        embed_gradient, embed_gradient_slot = self._together(*self._returned)
        return TickTable(
            schedule=self.schedule,
            layer_counts=self.layer_counts,
            passes={kind: self._pass(kind, weights, gradients) for kind in self.kinds},
            channels=self.channels,
            embed=embed,
            embed_slot=embed_slot,
            head=head,
            head_slot=head_slot,
            embed_gradient=embed_gradient,
            embed_gradient_slot=embed_gradient_slot,
            gathers=weights.transfers,
            reduces=gradients.transfers,
            num_slots=dict(self.num_slots),
            meets=self.meets,
        )

    def _spans(self) -> tuple[dict[Kind, np.ndarray], dict[Kind, np.ndarray]]:
        """The ticks in which the actions of each kind start and end."""
        starts, ends = {}, {}
        for kind in self.kinds:
            mine = self.columns.of(kind)
            places = self.columns.virtual_stage[mine], self.columns.microbatch[mine]
            # numpy is ten times as fast with one index as with two.
            number, tick = np.ravel_multi_index(places, self.shape), self.columns.tick[mine]
            starts[kind] = np.full(self.shape, self.num_ticks)
            ends[kind] = np.full(self.shape, NONE)
            np.minimum.at(starts[kind].reshape(-1), number, tick)
            np.maximum.at(ends[kind].reshape(-1), number, tick)
        return starts, ends

    def _messages(self) -> Iterator[tuple[Kind, int, int, np.ndarray, np.ndarray]]:
        """Kind (F, backward or R), source, target, and per microbatch the ticks in which the source
        sends and the target first reads."""
        steps = ((Kind.F, 1), (self.backward, -1), (Kind.R, 1))
        for kind, step in steps[: 1 + self.trains + self.recomputes]:
            for source, sent in enumerate(self.ends[kind]):
                target = source + step
                begins = kind is Kind.R and target % (self.schedule.segment or 1) == 0
                if 0 <= target < len(self.stage_of) and not begins:
                    yield kind, source, target, sent, self.starts[kind][target]

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
        """Ticks in which messages between neighboring virtual stages are received, from those in
        which they are sent, ``[virtual stages - 1, microbatches]``."""
        moved = self.stage_of[1:] != self.stage_of[:-1]
        arrivals: np.ndarray = sent + (self._late[sent] & moved[:, None])
        return arrivals

    def _lives(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The times of first write and last read of what each buffer keeps."""
        first, last = self.starts[Kind.F], self.ends[Kind.F]
        received = _at(self._arrivals(last[:-1]), Phase.EXCHANGE)
        enters = _at(first[:1], Phase.EMBED)
        forward = _at(first, Phase.FORWARD)
        lives = {"x": (np.concatenate([enters, received]), _at(last, Phase.FORWARD))}
        if self.trains:
            back = self._arrivals(self.ends[self.backward][1:])
            caused = [_at(back, Phase.EXCHANGE), _at(last[-1:], Phase.HEAD)]
            done = _at(self.ends[self.backward], Phase.BACKWARD)
            frees = done if self.backward is Kind.BW else _at(self.ends[Kind.W], Phase.WEIGHTS)
            kept = _at(self.starts[Kind.R], Phase.RECOMPUTE) if self.recomputes else forward
            lives |= {"dy": (np.concatenate(caused), done)}
            lives |= {"until_b": (kept, done), "until_w": (kept, frees)}
        if self.recomputes:
            lives["replay"] = (forward, _at(self.ends[Kind.R], Phase.RECOMPUTE))
        if self.trains and self.backward is Kind.B:
            lives["crossing"] = (_at(self.starts[Kind.B], Phase.BACKWARD), frees)
        return lives

    def _colour(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Slots of one buffer, as few on every stage as possible."""
        slots = np.zeros(self.shape, np.int64)
        for held in map(list, self.schedule.placement.virtual_stages):
            found = colour_intervals(start[held].reshape(-1), end[held].reshape(-1))
            slots[held] = found.reshape(len(held), -1)
        return slots

    def _enter(
        self, start: np.ndarray, end: np.ndarray, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """When each microbatch is embedded, beside heads if that takes no slot more; and the slots
        of all inputs. Arguments are those of embedding each in time."""
        first, last = self.starts[Kind.F][0], self.ends[Kind.F]
        beside = embed_ticks(first, last[0], last[-1])
        ahead = self._colour(np.append(_at(beside[None], Phase.EMBED), start[1:], axis=0), end)
        if self.schedule.slices is not None or ahead.max() > slots.max():
            return first, slots
        return beside, ahead

    def _leave(
        self, lives: tuple[np.ndarray, np.ndarray] | None, slots: np.ndarray
    ) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """When each cotangent goes through the embedding, with as many others as take no slot more,
        and the slot in which it waits; and those of all cotangents. Arguments as for `_enter`."""
        if lives is None:
            return (np.zeros(0, np.int64), np.zeros(0, np.int64)), slots
        done, most = self.ends[self.backward][0], int(slots.max())
        held = list(self.schedule.placement.virtual_stages[self.stage_of[0]])
        while self.schedule.slices is None and most > 0:
            ticks = embed_gradient_ticks(done, self.ends[Kind.F][-1], self.num_ticks, most)
            waits, waiting = ticks > done, np.full_like(done, NONE)
            start = np.append(lives[0][held], _at(done[waits], Phase.EXCHANGE))
            end = np.append(lives[1][held], _at(ticks[waits], Phase.EMBED_GRADIENT))
            found = colour_intervals(start, end)
            if found.max() <= slots.max():
                own, waiting[waits] = np.split(found, [done.size * len(held)])
                slots[held] = own.reshape(len(held), -1)
                return (ticks, waiting), slots
            most //= 2
        return (done, np.full_like(done, NONE)), slots

    def _pass(self, kind: Kind, weights: Held, gradients: Held) -> Cell:
        slices, slots = self.columns, self._slots
        mine = np.flatnonzero(slices.of(kind))
        place, tick = (slices.virtual_stage[mine], slices.microbatch[mine]), slices.tick[mine]
        values = {
            "lo": slices.lo[mine],
            "hi": slices.hi[mine],
            "pauses": (tick < self.ends[kind][place]) & (kind is not Kind.W),
            "chunk": self.chunk_of[place[0]],
            "microbatch": place[1],
            "inbox": slots["x" if kind is Kind.F else "dy"][place],
            "until_b": slots["until_b"][place],
            "until_w": slots["until_w"][place],
            "crossing": slots["crossing"][place],
            "weights": weights.slots[mine],
            "gradient": gradients.slots[mine],
            "fresh": gradients.fresh[mine],
        }
        columns = {}
        for name, value in values.items():
            columns[name] = np.zeros((self.num_ticks, self.schedule.num_stages), np.int32)
            columns[name][tick, slices.stage[mine]] = value
        return Cell(**columns)

    def _uniform(self, ticks: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Columns of a phase that all stages run in these ticks, one microbatch in each, and the
        slot it is in."""
        microbatch = np.full(self.num_ticks, NONE, np.int32)
        slot = np.zeros(self.num_ticks, np.int32)
        microbatch[ticks] = np.arange(len(ticks))
        slot[ticks] = slots
        return microbatch, slot

    def _together(self, ticks: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same where a tick may have several microbatches, ``[ticks, most in a tick]``."""
        order = np.argsort(ticks, kind="stable")
        sorted_ticks = ticks[order]
        place = np.arange(len(ticks)) - np.searchsorted(sorted_ticks, sorted_ticks)
        shape = self.num_ticks, 1 + int(place.max(initial=0))
        microbatch, slot = np.full(shape, NONE, np.int32), np.full(shape, NONE, np.int32)
        microbatch[sorted_ticks, place], slot[sorted_ticks, place] = order, slots[order]
        return microbatch, slot

    def _channels(self) -> Iterable[Channel]:
        """Groups messages by kind and distance, so that each group is one permutation. What waits
        for the embedding is a message of the first stage to itself."""
        slots, waiting = self._slots, self._returned[1]
        _Group = tuple[set[tuple[int, int]], np.ndarray, np.ndarray]
        groups: dict[tuple[Kind, int], _Group] = {}
        shape = (self.num_ticks, self.schedule.num_stages)

        def group_of(kind: Kind, sender: int, receiver: int) -> tuple[np.ndarray, np.ndarray]:
            group = (kind if kind.is_forward else Kind.B, receiver - sender)
            empty: _Group = set(), np.full(shape, NONE, np.int32), np.full(shape, NONE, np.int32)
            edges, slot, late_slot = groups.setdefault(group, empty)
            edges.add((sender, receiver))
            return slot, late_slot

        if (waits := waiting != NONE).any():
            first = int(self.stage_of[0])
            slot, _ = group_of(self.backward, first, first)
            slot[self.ends[self.backward][0, waits], first] = waiting[waits]
        for kind, source, target, sent, _ in self._messages():
            sender, receiver = int(self.stage_of[source]), int(self.stage_of[target])
            slot, late_slot = group_of(kind, sender, receiver)
            inbox = slots["dy" if kind is self.backward else "x"]
            # R reads what R of the tick before has put out, on its way.
            late = (self._late[sent] & (sender != receiver)) | (kind is Kind.R)
            slot[sent[~late], receiver] = inbox[target, ~late]
            late_slot[sent[late] + 1, receiver] = inbox[target, late]
        for (kind, _), (edges, slot, late_slot) in sorted(groups.items(), key=lambda item: item[0]):
            yield Channel(kind, tuple(sorted(edges)), slot, late_slot)
