"""Lowering: from a schedule to the tick table that the SPMD program runs.

Every tick is one row. Within a tick the phases come in this order, and slots are coloured by it:

    gather weights | embed | F | B, BW | W | reduce gradients | exchange messages
    | embed gradient | head

Everything a stage keeps lives in a numbered slot: a message that has arrived and waits (inbox),
residuals from F to the last action that reads them, values from B to W. Interval coloring gives
each buffer exactly the schedule's peak and no more.

Residuals that wait on the host (`jaxpipe.schedule.offload`) leave their slot beside an F, and
return to another beside a backward.

`Channel` says which messages are late. Pieces of chunks that move over data under layers
(`jaxpipe.schedule.lowering.transfers`) are on their way from a tick's beginning to its end.

Where all stages embed together, each embedding is a sum in which every stage waits for the slowest,
and so is its gradient. The head's sum is one that cannot be moved: its cotangent is wanted in the
next tick. Beside it, in the same wait, the other two cost nothing. So a microbatch is embedded
right after a head, ahead of its use, and its cotangent waits for the next head, or with others for
the end of the step (`embed_ticks`, `embed_gradient_ticks`).
"""

import dataclasses
import enum
import functools
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.lowering.table import NONE, Cell, Channel, Edges, Moved, Outer, TickTable
from jaxpipe.schedule.lowering.transfers import (
    ChunkSlots,
    MoveOptions,
    columns_of,
    held_chunks,
)
from jaxpipe.schedule.offload import Move, Pass, move_residuals
from jaxpipe.schedule.problems import Problem, refuse

Times = TypeVar("Times", int, np.ndarray)


class Phase(enum.IntEnum):
    """Order of the parts of one tick that write or free a slot."""

    EMBED = 0
    FORWARD = 1
    BACKWARD = 2
    WEIGHTS = 3
    EXCHANGE = 4
    EMBED_GRADIENT = 5
    HEAD = 6


def lower(
    schedule: Schedule,
    layer_counts: Sequence[int],
    *,
    weight_slots: int = 1,
    gradient_slots: int | None = None,
    residuals: float | None = None,
    own_slots: bool = False,
    pieces: int = 0,
    shares: int = 1,
    within: bool = False,
    together: bool = False,
    overlaps: bool = True,
) -> TickTable:
    """Turns a schedule into its tick table.

    Args:
      schedule: a valid schedule, or its forward part alone (`forward_only`).
      layer_counts: layers of every virtual stage (`jaxpipe.schedule.partition`).
      weight_slots: gathered chunks a stage keeps at once when weights are sharded over data; capped
        by the number of chunks, and raised to the number that one tick uses, until no tick gathers
        twice.
      gradient_slots: chunks whose gradients a stage sums at once; by default as many. If given, a
        chunk may be reduced when the step ends.
      residuals: microbatches of a full stage whose residuals a device keeps at once; others wait on
        the host. By default it keeps all.
      own_slots: a chunk always lies in slot ``chunk % k`` of k, for programs that must know where
        weights are; this may take more slots and gather more often.
      pieces: number of pieces in which a chunk moves under layers of other chunks, where there is
        one more slot; by default chunks move as a whole.
      shares: largest number of equal parts in which a piece may move, a power of two.
      within: whether the pieces of the first chunk and of the last may move under the layers of the
        same chunk, within the first tick and the last.
      together: whether all stages compute embedding and head together, or those of the first and
        the last virtual stage alone.
      overlaps: whether messages travel while layers run, as on GPUs. XLA for CPUs runs one after
        the other: there no message is late.

    Raises:
      ArgumentError: a device must keep more residuals.

    Example:
      >>> from jaxpipe.schedule.generators.depth_first import one_f_one_b
      >>> lower(one_f_one_b(4, 8), [2] * 4).num_slots["until_w"]
      4
      >>> lower(one_f_one_b(4, 8), [2] * 4, residuals=3).num_slots["until_w"]
      3
    """
    lowering = Lowering(
        schedule, layer_counts, residuals=residuals, together=together, overlaps=overlaps
    )
    return lowering.table(
        weight_slots=weight_slots,
        gradient_slots=gradient_slots,
        moving=MoveOptions(own_slots, pieces, shares, within),
    )


def forward_only(schedule: Schedule) -> Schedule:
    """Keeps only the forwards of a schedule, for evaluation."""
    orders = tuple(tuple(a for a in row if a.kind is Kind.F) for row in schedule.orders)
    return dataclasses.replace(
        schedule, orders=orders, peak_in_flight=None, overlapped=(), ticks=None
    )


def _at(ticks: Times, phase: Phase) -> Times:
    """Converts ticks to times of a phase within the step."""
    return ticks * len(Phase) + phase


class Lowering:
    """A schedule in its ticks, with the slots of what its actions keep: the part of `lower` that
    does not depend on how chunks move over data.

    Arrays of all actions of a kind, such as ``ticks``, are ``[virtual stages, microbatches]``.
    """

    def __init__(
        self,
        schedule: Schedule,
        layer_counts: Sequence[int],
        *,
        residuals: float | None = None,
        together: bool = False,
        overlaps: bool = True,
    ) -> None:
        self.schedule, self.layer_counts = schedule, tuple(layer_counts)
        self.columns = columns_of(schedule)
        self.together, self.overlaps = together, overlaps
        self.stage_of = np.asarray(schedule.placement.stages)
        self.chunk_of = np.asarray(schedule.placement.chunks)
        self.shape = len(self.stage_of), schedule.num_passes
        self.num_ticks = 1 + int(self.columns.tick.max())
        self.kinds = [kind for kind in Kind if self.columns.of(kind).any()]
        self.backward = Kind.BW if Kind.BW in self.kinds else Kind.B
        self.trains = self.backward in self.kinds
        self.ticks = {kind: self._ticks(kind) for kind in self.kinds}

        self.residual_parts, self._moves = 0, dict[Pass, Move]()
        if residuals is not None and self.trains:
            self.residual_parts, self._moves = self._move_residuals(residuals)
        lives = self._lives()
        names = dict.fromkeys(("x", "dy", "until_b", "until_w", "crossing", *lives))
        self._slots = {name: np.zeros(self.shape, np.int64) for name in names}
        self._slots |= {name: self._colour(*life) for name, life in lives.items()}
        # Of residuals those from F on, and those from the return from the host on.
        for name in ("until_b", "until_w"):
            apart = self._colour_apart(*lives[name]) if name in lives else [self._slots[name]] * 2
            self._slots[name] = np.stack(apart)
        self._share_slots(lives)
        carries = self._lives_of_carries() if schedule.num_slices > 1 else {}
        for name, life in carries.items():
            self._slots[name] = np.repeat(self._colour(*life), schedule.num_slices, axis=1)
        self._enters, self._slots["x"] = self._enter(*lives["x"], self._slots["x"])
        self._returned, self._slots["dy"] = self._leave(lives.get("dy"), self._slots["dy"])
        self.channels = tuple(self._channels())
        self.exchanges, self.exchange = self._exchanges()
        self.num_slots = {
            name: 1 + int(slots.max()) if name in lives or name in carries else 0
            for name, slots in self._slots.items()
        }
        waiting = self._returned[1].max(initial=NONE)
        self.num_slots["dy"] = max(self.num_slots["dy"], 1 + int(waiting))
        if self._moves:
            self._slots["on_host"] = self._colour_on_host()
            self.num_slots["on_host"] = 2 + int(self._slots["on_host"].max())

    def table(
        self, *, weight_slots: int, gradient_slots: int | None, moving: MoveOptions
    ) -> TickTable:
        """Builds the tick table for one way of moving chunks; slots are as for `lower`."""
        slots, most = self._slots, self.schedule.num_chunks
        hold = functools.partial(held_chunks, self.schedule, self.columns, moving)
        waits, kept = moving.pieces > 0, gradient_slots is not None
        sums = min(gradient_slots or weight_slots, most)
        weights = hold(min(weight_slots, most), self.kinds, load=True, waits=waits)
        gradients = hold(sums, [Kind.W, Kind.BW], load=False, waits=waits or kept)
        embed = self._uniform(self._enters, slots["x"][0])
        head = self._uniform(self.ticks[Kind.F][-1], slots["dy"][-1])
        return TickTable(
            schedule=self.schedule,
            layer_counts=self.layer_counts,
            passes={kind: self._pass(kind, weights, gradients) for kind in self.kinds},
            channels=self.channels,
            outer=Outer(*embed, *head, *self._together(*self._returned)),
            gathers=weights.transfers,
            reduces=gradients.transfers,
            num_slots=dict(self.num_slots),
            residual_parts=self.residual_parts,
            exchanges=self.exchanges,
            exchange=self.exchange,
            together=self.together,
        )

    def _ticks(self, kind: Kind) -> np.ndarray:
        selected = self.columns.of(kind)
        ticks = np.full(self.shape, self.num_ticks)
        ticks[self.columns.virtual_stage[selected], self.columns.microbatch[selected]] = (
            self.columns.tick[selected]
        )
        return ticks

    def _messages(self) -> Iterator[tuple[Kind, int, int, np.ndarray, np.ndarray]]:
        """Yields the kind (F or backward), source and target of messages, and per microbatch the
        ticks in which the source sends and the target reads."""
        for kind, step in ((Kind.F, 1), (self.backward, -1))[: 1 + self.trains]:
            for source, sent in enumerate(self.ticks[kind]):
                target = source + step
                if 0 <= target < len(self.stage_of):
                    yield kind, source, target, sent, self.ticks[kind][target]

    def _arrivals(self, sent: np.ndarray, read: np.ndarray) -> np.ndarray:
        """Computes the ticks in which messages between neighboring virtual stages are received from
        those in which they are sent and read, ``[virtual stages - 1, microbatches]``."""
        moved = self.stage_of[1:] != self.stage_of[:-1]
        arrivals: np.ndarray = sent + (self._is_late(sent, read) & moved[:, None])
        return arrivals

    def _is_late(self, sent: np.ndarray, read: np.ndarray) -> np.ndarray:
        """Marks the messages between stages that are received in the tick after they are sent."""
        late: np.ndarray = (read > sent + 1) & self.overlaps
        return late

    def _lives(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Computes the times of first write and last read of what each buffer keeps."""
        runs = self.ticks[Kind.F]
        received = _at(self._arrivals(runs[:-1], runs[1:]), Phase.EXCHANGE)
        enters = _at(runs[:1], Phase.EMBED)
        forward = _at(runs, Phase.FORWARD)
        lives = {"x": (np.concatenate([enters, received]), forward)}
        if self.trains:
            back = self.ticks[self.backward]
            returned = _at(self._arrivals(back[1:], back[:-1]), Phase.EXCHANGE)
            caused = [returned, _at(runs[-1:], Phase.HEAD)]
            done = _at(back, Phase.BACKWARD)
            frees = done if self.backward is Kind.BW else _at(self.ticks[Kind.W], Phase.WEIGHTS)
            lives |= {"dy": (np.concatenate(caused), done)}
            lives |= {"until_b": (forward, done), "until_w": (forward, frees)}
        if self.trains and self.backward is Kind.B:
            lives["crossing"] = (_at(self.ticks[Kind.B], Phase.BACKWARD), frees)
        return lives

    def _lives_of_carries(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Computes the same for what layers hand from slice to slice, ``[virtual stages, m]``."""
        of_sequences = len(self.stage_of), -1, self.schedule.num_slices
        forward = _at(self.ticks[Kind.F], Phase.FORWARD).reshape(of_sequences)
        if not self.trains:
            return {"carry": (forward[..., 0], forward[..., -1])}
        back = _at(self.ticks[self.backward], Phase.BACKWARD).reshape(of_sequences)
        last = back
        if self.backward is Kind.B:
            last = _at(self.ticks[Kind.W], Phase.WEIGHTS).reshape(of_sequences)
        return {
            "carry": (forward[..., 0], last.max(axis=-1)),
            "carry_gradient": (back[..., -1], back[..., 0]),
        }

    def _colour(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Assigns the slots of one buffer, as few on every stage as possible."""
        slots = np.zeros(start.shape, np.int64)
        for own_stages in map(list, self.schedule.placement.virtual_stages):
            colours = colour_intervals(start[own_stages].reshape(-1), end[own_stages].reshape(-1))
            slots[own_stages] = colours.reshape(len(own_stages), -1)
        return slots

    def _move_residuals(self, residuals: float) -> tuple[int, dict[Pass, Move]]:
        """Chooses what waits on the host, and when it moves: in how many parts, and the ticks."""
        schedule, columns = self.schedule, self.columns
        rows: list[list[tuple[int, Action]]] = [[] for _ in range(schedule.num_stages)]
        kinds = tuple(Kind)
        for n in np.lexsort((columns.kind, columns.tick)).tolist():
            i, virtual_stage = int(columns.microbatch[n]), int(columns.virtual_stage[n])
            action = Action(virtual_stage, kinds[columns.kind[n]], i)
            rows[columns.stage[n]].append((int(columns.tick[n]), action))
        orders = [[action for _, action in row] for row in rows]
        of_full_stage = schedule.num_chunks * schedule.num_slices
        found = move_residuals(orders, self.layer_counts, limit=int(residuals * of_full_stage))
        if found is None:
            least = next(
                limit
                for limit in itertools.count(1)
                if move_residuals(orders, self.layer_counts, limit=limit) is not None
            )
            rule = "is less than a device must keep, if all others wait on the host"
            near = (least / of_full_stage,)
            refuse([Problem("residuals", residuals, rule, near, schedule=schedule.name)])
            raise AssertionError  # refused
        parts, moves = found
        in_ticks = {}
        for one, move in moves.items():
            row = rows[self.stage_of[one[0]]]
            in_ticks[one] = Move(*([row[place][0] for place in places] for places in move))
        return parts if moves else 0, in_ticks

    def _colour_apart(self, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Assigns the slots of residuals, and those that they have from their return on.

        One is free when the last part has left, at the beginning of F beside which it does.
        """
        slots, returned = np.zeros_like(start), np.zeros_like(start)
        left, returns = (np.full(self.shape, NONE) for _ in range(2))
        for one, (out, back) in self._moves.items():
            left[one], returns[one] = _at(out[-1], Phase.EMBED), _at(back[0], Phase.WEIGHTS)
        for own in map(list, self.schedule.placement.virtual_stages):
            goes = left[own] != NONE
            starts = np.append(start[own], returns[own][goes])
            ends = np.append(np.where(goes, left[own], end[own]), end[own][goes])
            first, then = np.split(colour_intervals(starts, ends), [goes.size])
            slots[own] = first = first.reshape(goes.shape)
            second = first.copy()
            second[goes] = then
            returned[own] = second
        return slots, returned

    def _colour_on_host(self) -> np.ndarray:
        """Assigns the slots of residuals on the host, int64 ``[virtual stages, passes]``."""
        slots = np.zeros(self.shape, np.int64)
        for own in map(set, self.schedule.placement.virtual_stages):
            moves = {one: move for one, move in self._moves.items() if one[0] in own}
            starts = [_at(move.out[0], Phase.FORWARD) for move in moves.values()]
            ends = [_at(move.back[-1], Phase.BACKWARD) for move in moves.values()]
            colours = colour_intervals(np.asarray(starts), np.asarray(ends))
            for one, slot in zip(moves, colours.tolist(), strict=True):
                slots[one] = slot
        return slots

    def _moved(self, kind: Kind) -> Moved:
        """Fills the columns of what moves beside the layers of a kind of action."""
        back = int(kind is not Kind.F)
        shape = self.num_ticks, self.schedule.num_stages
        columns = Moved(*(np.zeros(shape, np.int32) for _ in Moved._fields))
        columns.on_host[:] = self.num_slots["on_host"] - 1
        for one, move in self._moves.items():
            place = list(move[back]), self.stage_of[one[0]]
            columns.on_host[place] = self._slots["on_host"][one]
            columns.part[place] = range(self.residual_parts)
            columns.until_b[place] = self._slots["until_b"][back][one]
            columns.until_w[place] = self._slots["until_w"][back][one]
        return columns

    def _share_slots(self, lives: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Gives residuals the slots of those that W reads, whose lives contain theirs, where these
        are no more; and else few different slots beside each of them.

        A program that knows slots has a loop for every set of them that an action uses.
        """
        pairs = set[tuple[int, int]]()
        for name in filter(lives.__contains__, ("until_b", "crossing")):
            shared = self._slots["until_w"]
            if shared.max() == self._slots[name].max():
                self._slots[name] = shared[1] if name == "crossing" else shared
            elif name == "crossing":
                for own in map(list, self.schedule.placement.virtual_stages):
                    starts, ends = (times[own].reshape(-1) for times in lives[name])
                    slots = colour_beside(starts, ends, shared[1, own].reshape(-1), pairs)
                    self._slots[name][own] = slots.reshape(len(own), -1)

    def _enter(
        self, start: np.ndarray, end: np.ndarray, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Chooses when each microbatch is embedded, and the slots of all inputs.

        Stages that embed together do it beside heads if that takes no further slot. The arguments
        describe inputs that are embedded in the tick of their use.
        """
        runs = self.ticks[Kind.F]
        if not self.together:
            return runs[0], slots
        beside = embed_ticks(runs[0], runs[-1])
        ahead = self._colour(np.append(_at(beside[None], Phase.EMBED), start[1:], axis=0), end)
        return (runs[0], slots) if ahead.max() > slots.max() else (beside, ahead)

    def _leave(
        self, lives: tuple[np.ndarray, np.ndarray] | None, slots: np.ndarray
    ) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Chooses when each cotangent goes through the embedding and the slot in which it waits,
        and the slots of all cotangents.

        Stages that embed together take as many cotangents at once as need no further slot, or no
        more than two; the last ones at the end of the step if as many wait for it as there are
        slots. Arguments as for `_enter`.
        """
        if lives is None:
            return (np.zeros(0, np.int64), np.zeros(0, np.int64)), slots
        done = self.ticks[self.backward][0]
        most = max(int(slots.max()), 1)
        tries = [(most, most + 1), *((most >> n, 0) for n in range(most.bit_length()))]
        own_stages = list(self.schedule.placement.virtual_stages[self.stage_of[0]])
        for at_once, ending in tries if self.together else []:
            heads = self.ticks[Kind.F][-1]
            ticks = embed_gradient_ticks(done, heads, self.num_ticks, at_once, ending)
            waits, waiting = ticks > done, np.full_like(done, NONE)
            start = np.append(lives[0][own_stages], _at(done[waits], Phase.EXCHANGE))
            end = np.append(lives[1][own_stages], _at(ticks[waits], Phase.EMBED_GRADIENT))
            colours = colour_intervals(start, end)
            if colours.max() <= most:
                own, waiting[waits] = np.split(colours, [done.size * len(own_stages)])
                slots[own_stages] = own.reshape(len(own_stages), -1)
                return (ticks, waiting), slots
        return (done, np.full_like(done, NONE)), slots

    def _pass(self, kind: Kind, weights: ChunkSlots, gradients: ChunkSlots) -> Cell:
        columns, slots = self.columns, self._slots
        selected = np.flatnonzero(columns.of(kind))
        place = columns.virtual_stage[selected], columns.microbatch[selected]
        values = {
            "layers": np.asarray(self.layer_counts)[place[0]],
            "chunk": self.chunk_of[place[0]],
            "microbatch": place[1],
            "inbox": slots["x" if kind is Kind.F else "dy"][place],
            "until_b": slots["until_b"][int(kind is not Kind.F)][place],
            "until_w": slots["until_w"][int(kind is not Kind.F)][place],
            "crossing": slots["crossing"][place],
            "weights": weights.slots[selected],
            "gradient": gradients.slots[selected],
        }
        carries = self._slots.keys() & {"carry", "carry_gradient"}
        values |= {name: slots[name][place] for name in carries}
        fields = {}
        for name, value in values.items():
            empty = NONE if name == "microbatch" else 0
            fields[name] = np.full((self.num_ticks, self.schedule.num_stages), empty, np.int32)
            fields[name][columns.tick[selected], columns.stage[selected]] = value
        moves = self._moves and kind in (Kind.F, self.backward)
        return Cell(**fields, moved=self._moved(kind) if moves else None)

    def _uniform(self, ticks: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fills the columns of a phase that runs in these ticks: one microbatch in each, and its
        slot."""
        microbatch = np.full(self.num_ticks, NONE, np.int32)
        slot = np.zeros(self.num_ticks, np.int32)
        microbatch[ticks] = np.arange(len(ticks))
        slot[ticks] = slots
        return microbatch, slot

    def _together(self, ticks: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Does as `_uniform` where several microbatches may share a tick: ``[ticks, most]``."""
        order = np.argsort(ticks, kind="stable")
        sorted_ticks = ticks[order]
        place = np.arange(len(ticks)) - np.searchsorted(sorted_ticks, sorted_ticks)
        shape = self.num_ticks, 1 + int(place.max(initial=0))
        microbatch, slot = np.full(shape, NONE, np.int32), np.full(shape, NONE, np.int32)
        microbatch[sorted_ticks, place], slot[sorted_ticks, place] = order, slots[order]
        return microbatch, slot

    def _channels(self) -> Iterable[Channel]:
        """Groups messages by kind and distance, so that each group is one permutation. A cotangent
        that waits for the embedding is a message of the first stage to itself."""
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
            slot[self.ticks[self.backward][0, waits], first] = waiting[waits]
        for kind, source, target, sent, read in self._messages():
            sender, receiver = int(self.stage_of[source]), int(self.stage_of[target])
            slot, late_slot = group_of(kind, sender, receiver)
            inbox = slots["dy" if kind is self.backward else "x"]
            late = self._is_late(sent, read) & (sender != receiver)
            slot[sent[~late], receiver] = inbox[target, ~late]
            late_slot[sent[late] + 1, receiver] = inbox[target, late]
        for (kind, _), (edges, slot, late_slot) in sorted(groups.items(), key=lambda item: item[0]):
            yield Channel(kind, tuple(sorted(edges)), slot, late_slot)

    def _exchanges(self) -> tuple[tuple[tuple[Edges, ...], ...], np.ndarray]:
        """Computes the exchanges of `TickTable`; a message to the stage itself connects nothing."""
        of_tick = [
            tuple(() if channel.local else channel.edges_at(tick) for channel in self.channels)
            for tick in range(self.num_ticks)
        ]
        numbers = {pairs: number for number, pairs in enumerate(dict.fromkeys(of_tick))}
        return tuple(numbers), np.asarray([numbers[pairs] for pairs in of_tick], np.int32)


def embed_ticks(first: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """Finds the tick at whose beginning each microbatch is embedded.

    This is the latest tick that follows a head, if the microbatch before has been read by then, so
    that no more than one waits; otherwise the tick of its own first use.

    Args:
      first: ticks in which the first virtual stage runs F, int64 ``[microbatches]``.
      heads: ticks that end with a head.

    Example:
      >>> embed_ticks(np.array([0, 4, 6]), np.array([2, 3, 7])).tolist()
      [0, 4, 6]
      >>> embed_ticks(np.array([0, 5, 6]), np.array([2, 3, 7])).tolist()
      [0, 4, 6]
    """
    order, after = np.argsort(first), np.sort(heads) + 1
    first = first[order]
    read = np.concatenate([[0], first[:-1] + 1])
    beside = np.concatenate([[-1], after])[np.searchsorted(after, first, side="right")]
    ticks = np.empty_like(first)
    ticks[order] = np.where(beside >= read, beside, first)
    return ticks


def embed_gradient_ticks(
    done: np.ndarray, heads: np.ndarray, num_ticks: int, most: int, last: int = 0
) -> np.ndarray:
    """Finds the tick at whose end each microbatch's cotangent goes through the embedding.

    This is the first tick with a head, or the last tick of all. Where more than ``most`` cotangents
    would wait for it, the waiting ones go together with the next one, as soon as that is there.

    Args:
      done: the ticks in which cotangents are there, int64 ``[microbatches]``.
      heads: ticks that end with a head.
      most: cotangents that may wait at once.
      last: number of the last cotangents, which wait in any case.

    Example:
      >>> done, heads = np.array([3, 6, 7, 8]), np.array([2, 5])
      >>> embed_gradient_ticks(done, heads, 10, 1).tolist()
      [5, 7, 7, 9]
      >>> embed_gradient_ticks(done, heads, 10, 0).tolist()
      [3, 6, 7, 8]
      >>> embed_gradient_ticks(done, heads, 10, 0, last=2).tolist()
      [3, 6, 9, 9]
    """
    order, meetings = np.argsort(done), np.append(np.sort(heads), num_ticks - 1)
    together = meetings[np.searchsorted(meetings, done)]
    ticks, waiting = np.empty_like(done), list[int]()
    for microbatch in order.tolist():
        if waiting and together[waiting[0]] < done[microbatch]:
            waiting = []  # a head has come
        waiting.append(microbatch)
        ticks[microbatch] = together[microbatch]
        if done[microbatch] < together[microbatch] and len(waiting) > most:
            ticks[waiting] = done[microbatch]
            waiting = []
    ending = order[len(order) - last :]
    ticks[ending] = together[ending]
    return ticks


def colour_intervals(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Gives every interval a slot so that overlapping intervals differ, using as few as possible.

    Args:
      starts: time of the first write of each, int64 ``[intervals]``.
      ends: time of its last read, not before its start; a slot read last at a time is free for a
        write strictly after it.

    Example:
      >>> colour_intervals(np.array([0, 1, 3]), np.array([2, 3, 4]))
      array([0, 1, 0])
    """
    by_start, by_end = np.argsort(starts, kind="stable"), np.argsort(ends, kind="stable")
    ended = np.searchsorted(ends[by_end], starts[by_start])
    num_slots = int((1 + np.arange(len(starts)) - ended).max(initial=0))
    # The first intervals take new slots; each later one takes the slot that was freed first.
    slots = np.empty(len(starts), np.int64)
    slots[by_start[:num_slots]] = np.arange(num_slots)
    for later, earlier in zip(by_start[num_slots:].tolist(), by_end.tolist(), strict=False):
        slots[later] = slots[earlier]
    return slots


def colour_beside(
    starts: np.ndarray, ends: np.ndarray, others: np.ndarray, pairs: set[tuple[int, int]]
) -> np.ndarray:
    """Does as `colour_intervals`, and makes few different pairs with other slots.

    Args:
      others: another slot of each interval, int64 ``[intervals]``.
      pairs: pairs of another slot and its slot that there are already; new ones are added.

    Example:
      >>> starts, ends = np.array([0, 1, 3, 4]), np.array([2, 2, 5, 5])
      >>> colour_beside(starts, ends, np.array([7, 8, 8, 7]), set())
      array([0, 1, 1, 0])
    """
    slots, free, busy = np.empty(len(starts), np.int64), list[int](), list[tuple[int, int]]()
    for n in np.argsort(starts, kind="stable").tolist():
        while busy and busy[0][0] < starts[n]:
            free.append(heapq.heappop(busy)[1])
        if not free:
            free.append(len(busy))
        slot = next((slot for slot in free if (int(others[n]), slot) in pairs), free[0])
        free.remove(slot)
        pairs.add((int(others[n]), slot))
        slots[n] = slot
        heapq.heappush(busy, (int(ends[n]), slot))
    return slots
