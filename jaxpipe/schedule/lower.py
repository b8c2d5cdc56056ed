"""Lowering: from a schedule to the tick table that the SPMD program runs.

Every tick is one row. Within a tick the phases come in this order, and slots are coloured by it:

    gather weights | embed | F | B, BW | W | reduce gradients | exchange messages | head | embed
    gradient

Everything a stage keeps lives in a numbered slot: a message that has arrived and waits (inbox),
  residuals
from F to the last action that reads them, values from B to W. Interval colouring gives each buffer
exactly the schedule's peak and no more.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from jaxpipe.schedule.actions import Action, Kind, Schedule, Slice
from jaxpipe.schedule.simulate import ticks
from jaxpipe.schedule.slice_rules import slice_spans
from jaxpipe.schedule.slots import Use, cached_slots

NONE = -1
"""Marks an empty cell of a table: no action, no message, no slot."""


class Phase(enum.IntEnum):
    """Order of the parts of one tick that write or free a slot."""

    EMBED = 0
    FORWARD = 1
    BACKWARD = 2
    WEIGHTS = 3
    EXCHANGE = 4


_PHASE = {
    Kind.F: Phase.FORWARD,
    Kind.B: Phase.BACKWARD,
    Kind.BW: Phase.BACKWARD,
    Kind.W: Phase.WEIGHTS,
}


@dataclasses.dataclass(frozen=True)
class Pass:
    """One kind's columns, each int32 ``[ticks, stages]``; a stage is idle where ``lo == hi``.

    Args:
      lo: first layer to run, counted within the chunk.
      hi: one past the last.
      pauses: 1 where layers of the action remain for later ticks: what it has computed so far
        goes back to its inbox slot, and is read from there.
      chunk: which of the stage's chunks.
      microbatch: which microbatch.
      inbox: slot of the input (x for F, the cotangent for B and BW).
      until_b: slot of the residuals that only B reads.
      until_w: slot of the residuals that W reads.
      crossing: slot of the values that go from B to W.
      weights: weight slot (sharded weights only).
      gradient: gradient slot (sharded gradients only).
      fresh: 1 where the gradient slot holds another chunk's sum, to be overwritten.
    """

    lo: np.ndarray
    hi: np.ndarray
    pauses: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    inbox: np.ndarray
    until_b: np.ndarray
    until_w: np.ndarray
    crossing: np.ndarray
    weights: np.ndarray
    gradient: np.ndarray
    fresh: np.ndarray


@dataclasses.dataclass(frozen=True)
class Channel:
    """Messages of one kind between stages at one distance; at most one a stage and tick.

    Args:
      kind: F (activations, sent on) or B (cotangents, sent back).
      edges: (sender, receiver) pairs; a stage that sends to itself writes its own inbox.
      slot: int32 ``[ticks, stages]``, the receiver's inbox slot, or `NONE`.
    """

    kind: Kind
    edges: tuple[tuple[int, int], ...]
    slot: np.ndarray


@dataclasses.dataclass(frozen=True)
class Transfers:
    """Gathers or reductions over data: int32 ``[ticks, stages]`` chunk and slot, or `NONE`."""

    chunk: np.ndarray
    slot: np.ndarray
    num_slots: int

    @property
    def counts(self) -> tuple[int, ...]:
        """How many transfers each stage executes in one step."""
        return tuple(int(n) for n in (self.chunk != NONE).sum(axis=0))


@dataclasses.dataclass(frozen=True)
class TickTable:
    """A schedule as rows of integers: what every stage does in every tick.

    Args:
      schedule: what was lowered.
      layer_counts: layers of every virtual stage.
      passes: columns by kind; only kinds the schedule uses.
      channels: the messages.
      embed, embed_slot: int32 ``[ticks]``: microbatch that enters, and its inbox slot on the first
        stage.
      head, head_slot: int32 ``[ticks]``: microbatch that leaves, and the slot of its cotangent on
        the last.
      embed_gradient: int32 ``[ticks]``: microbatch whose cotangent reaches the embedding.
      gathers, reduces: data-axis transfers.
      num_slots: size of each buffer, by name: x, dy, until_b, until_w, crossing.
    """

    schedule: Schedule
    layer_counts: tuple[int, ...]
    passes: dict[Kind, Pass]
    channels: tuple[Channel, ...]
    embed: np.ndarray
    embed_slot: np.ndarray
    head: np.ndarray
    head_slot: np.ndarray
    embed_gradient: np.ndarray
    gathers: Transfers
    reduces: Transfers
    num_slots: dict[str, int]

    @property
    def num_ticks(self) -> int:
        return len(self.embed)

    @property
    def layers_per_chunk(self) -> int:
        """Layers of the largest chunk: the room every chunk gets."""
        return max(self.layer_counts)


def partition(num_layers: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Splits layers over virtual stages as evenly as possible, earlier ones first.

    Raises:
      ValueError: fewer layers than virtual stages.

    Example:
      >>> partition(7, 4)
      (2, 2, 2, 1)
    """
    if num_layers < num_virtual_stages:
        raise ValueError(
            f"model.num_layers={num_layers} cannot fill {num_virtual_stages} virtual stages "
            "(mesh.stage x pipeline.chunks): each needs a layer.\n"
            f"Nearest valid: model.num_layers={num_virtual_stages}."
        )
    share, extra = divmod(num_layers, num_virtual_stages)
    return tuple(share + (s < extra) for s in range(num_virtual_stages))


def lower(schedule: Schedule, layer_counts: Sequence[int], *, weight_slots: int = 1) -> TickTable:
    """Turns a schedule into its tick table.

    Args:
      schedule: a valid schedule, or its forward part alone (`forward_only`). Its slices, if any,
        must be of the same layers.
      layer_counts: layers of every virtual stage, see `partition`.
      weight_slots: gathered chunks a stage keeps at once when weights are sharded over data; capped
        by the number of chunks. With slices, raised to what one tick uses, and until no tick
        gathers twice.

    Returns:
      The table.

    Raises:
      ValueError: the schedule's slices are of other layers.

    Example:
      >>> from jaxpipe.schedule.one_f_one_b import one_f_one_b
      >>> lower(one_f_one_b(4, 8), partition(8, 4)).num_slots["until_w"]
      4
    """
    return _Lowering(schedule, tuple(layer_counts), min(weight_slots, schedule.num_chunks)).run()


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule's forwards alone, for evaluation."""
    orders = tuple(tuple(a for a in row if a.kind is Kind.F) for row in schedule.orders)
    return dataclasses.replace(schedule, orders=orders, peak_in_flight=None, slices=None)


class _Lowering:
    """The passes of `lower`, which share the ticks of every action."""

    def __init__(
        self, schedule: Schedule, layer_counts: tuple[int, ...], weight_slots: int
    ) -> None:
        self.schedule = schedule
        self.layer_counts = layer_counts
        self.weight_slots = weight_slots
        self.rows = _slices(schedule, layer_counts)
        self.spans = slice_spans(self.rows)
        self.num_ticks = 1 + max(end for _, end in self.spans.values())
        self.kinds = {action.kind for action in self.spans}
        self.last = schedule.placement.num_virtual_stages - 1
        self.backward = Kind.BW if Kind.BW in self.kinds else Kind.B
        self.trains = self.backward in self.kinds

    def run(self) -> TickTable:
        slots, num_slots = self._colour()
        gathers, weights, _ = self._transfers(self.kinds, load=True)
        reduces, gradients, fresh = self._transfers(self.kinds & {Kind.W, Kind.BW}, load=False)
        passes = {
            kind: self._pass(kind, slots, weights, gradients, fresh)
            for kind in sorted(self.kinds, key=list(Kind).index)
        }
        embed, embed_slot = self._uniform(Kind.F, 0, slots["x"], enters=True)
        head, head_slot = self._uniform(Kind.F, self.last, slots["dy"])
        embed_gradient, _ = self._uniform(self.backward, 0, {})
        return TickTable(
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
        )

    def _start(self, action: Action) -> tuple[int, int]:
        return self.spans[action][0], _PHASE[action.kind]

    def _end(self, action: Action) -> tuple[int, int]:
        return self.spans[action][1], _PHASE[action.kind]

    def _sent(self, action: Action) -> tuple[int, int]:
        return self.spans[action][1], Phase.EXCHANGE

    def _colour(self) -> tuple[dict[str, dict[tuple[int, int], int]], dict[str, int]]:
        """Slots by buffer and (virtual stage, microbatch), and how many each buffer has."""
        keys = [(a.virtual_stage, a.microbatch) for a in self.spans if a.kind is Kind.F]
        lives: dict[str, dict[tuple[int, int], tuple]] = {
            name: {} for name in ("x", "dy", "until_b", "until_w", "crossing")
        }
        for s, i in keys:
            forward = Action(s, Kind.F, i)
            arrives = (
                self._sent(Action(s - 1, Kind.F, i))
                if s > 0
                else (self.spans[forward][0], Phase.EMBED)
            )
            lives["x"][s, i] = (arrives, self._end(forward))
            if not self.trains:
                continue
            backward = Action(s, self.backward, i)
            frees = Action(s, Kind.W, i) if self.backward is Kind.B else backward
            cause = Action(s + 1, self.backward, i) if s < self.last else forward
            lives["dy"][s, i] = (self._sent(cause), self._end(backward))
            lives["until_b"][s, i] = (self._start(forward), self._end(backward))
            lives["until_w"][s, i] = (self._start(forward), self._end(frees))
            if self.backward is Kind.B:
                lives["crossing"][s, i] = (self._start(backward), self._end(frees))
        coloured = {name: self._colour_stages(live) for name, live in lives.items()}
        return (
            {name: slots for name, (slots, _) in coloured.items()},
            {name: number for name, (_, number) in coloured.items()},
        )

    def _colour_stages(self, lives: dict) -> tuple[dict[tuple[int, int], int], int]:
        slots: dict[tuple[int, int], int] = {}
        number = 0
        for stage in range(self.schedule.num_stages):
            mine = {k: v for k, v in lives.items() if self.schedule.placement.stages[k[0]] == stage}
            coloured = colour_intervals(mine)
            slots |= coloured
            number = max(number, 1 + max(coloured.values(), default=-1))
        return slots, number

    def _pass(
        self,
        kind: Kind,
        slots: dict,
        weights: list[list[int]],
        gradients: list[list[int]],
        fresh: set[Action],
    ) -> Pass:
        fields = [field.name for field in dataclasses.fields(Pass)]
        columns = {
            name: np.full((self.num_ticks, self.schedule.num_stages), 0, np.int32)
            for name in fields
        }
        inbox = slots["x"] if kind is Kind.F else slots["dy"]
        for stage, row in enumerate(self.rows):
            for k, part in enumerate(row):
                action = part.action
                if action.kind is not kind:
                    continue
                key = (action.virtual_stage, action.microbatch)
                cell = {
                    "lo": part.lo,
                    "hi": part.hi,
                    "pauses": kind is not Kind.W and part.tick < self.spans[action][1],
                    "chunk": self.schedule.placement.chunks[action.virtual_stage],
                    "microbatch": action.microbatch,
                    "inbox": inbox.get(key, 0),
                    "until_b": slots["until_b"].get(key, 0),
                    "until_w": slots["until_w"].get(key, 0),
                    "crossing": slots["crossing"].get(key, 0),
                    "weights": weights[stage][k],
                    "gradient": gradients[stage][k],
                    "fresh": action in fresh,
                }
                for name, value in cell.items():
                    columns[name][part.tick, stage] = value
        return Pass(**columns)

    def _uniform(
        self, kind: Kind, virtual_stage: int, slots: dict, *, enters: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Columns of a phase that all stages run when one virtual stage starts (``enters``) or ends
        a kind of action."""
        microbatch = np.full(self.num_ticks, NONE, np.int32)
        slot = np.zeros(self.num_ticks, np.int32)
        for action, (start, end) in self.spans.items():
            if action.kind is kind and action.virtual_stage == virtual_stage:
                tick = start if enters else end
                microbatch[tick] = action.microbatch
                slot[tick] = slots.get((virtual_stage, action.microbatch), 0)
        return microbatch, slot

    def _channels(self, slots: dict) -> Iterable[Channel]:
        """Groups messages by kind and distance, so that each group is one permutation."""
        stages = self.schedule.placement.stages
        groups: dict[tuple[Kind, int], tuple[set[tuple[int, int]], np.ndarray]] = {}
        for action, (_, tick) in self.spans.items():
            if action.kind is Kind.W:
                continue
            forward = action.kind is Kind.F
            target = action.virtual_stage + (1 if forward else -1)
            if not 0 <= target <= self.last:
                continue
            edge = stages[action.virtual_stage], stages[target]
            group = (Kind.F if forward else Kind.B, edge[1] - edge[0])
            if group not in groups:
                shape = (self.num_ticks, self.schedule.num_stages)
                groups[group] = (set(), np.full(shape, NONE, np.int32))
            edges, slot = groups[group]
            edges.add(edge)
            slot[tick, edge[1]] = slots["x" if forward else "dy"][target, action.microbatch]
        for (kind, _), (edges, slot) in sorted(groups.items()):
            yield Channel(kind, tuple(sorted(edges)), slot)

    def _transfers(
        self, kinds: set[Kind], *, load: bool
    ) -> tuple[Transfers, list[list[int]], set[Action]]:
        """Gathers (load) or reductions (unload) of chunks that these kinds of action use; the slot
        of every slice, per stage, and which actions come first in a stay."""
        num_slots = self.weight_slots
        while (transfers := self._with_slots(kinds, num_slots, load=load)) is None:
            num_slots += 1
        return transfers

    def _with_slots(
        self, kinds: set[Kind], num_slots: int, *, load: bool
    ) -> tuple[Transfers, list[list[int]], set[Action]] | None:
        """As `_transfers`; None where a tick needs more slots or more than one transfer."""
        shape = (self.num_ticks, self.schedule.num_stages)
        chunk, slot = np.full(shape, NONE, np.int32), np.zeros(shape, np.int32)
        slots_of: list[list[int]] = []
        first: set[Action] = set()
        chunks = self.schedule.placement.chunks
        for stage, row in enumerate(self.rows):
            used = [k for k, part in enumerate(row) if part.action.kind in kinds]
            uses = [Use(row[k].tick, chunks[row[k].action.virtual_stage]) for k in used]
            together = itertools.groupby(uses, key=lambda use: use.tick)
            if any(len({use.item for use in group}) > num_slots for _, group in together):
                return None
            moves, slots = cached_slots(uses, num_slots=num_slots)
            ticks = [move.loaded if load else move.unloaded for move in moves]
            if len(set(ticks)) < len(ticks):
                return None
            for tick, move in zip(ticks, moves, strict=True):
                chunk[tick, stage], slot[tick, stage] = move.item, move.slot
            slots_of.append([0] * len(row))
            for k, number in zip(used, slots, strict=True):
                slots_of[-1][k] = number
            loaded = {(move.loaded, move.item) for move in moves}
            starts = zip(used, uses, strict=True)
            first |= {row[k].action for k, use in starts if (use.tick, use.item) in loaded}
        return Transfers(chunk, slot, num_slots), slots_of, first


def _slices(schedule: Schedule, layer_counts: tuple[int, ...]) -> Sequence[Sequence[Slice]]:
    """The schedule's own slices, or one whole action a tick."""
    if schedule.slices is None:
        return [
            [Slice(tick, action, 0, layer_counts[action.virtual_stage]) for tick, action in row]
            for row in ticks(schedule)
        ]
    reached = [0] * len(layer_counts)
    for part in itertools.chain(*schedule.slices):
        reached[part.action.virtual_stage] = max(reached[part.action.virtual_stage], part.hi)
    if tuple(reached) != layer_counts:
        raise ValueError(
            f"Schedule {schedule.name!r} was cut into slices of {tuple(reached)} layers a virtual "
            f"stage, and the model has {layer_counts}: cut it again with `slice_ticks`."
        )
    return schedule.slices


def colour_intervals(lives: dict) -> dict:
    """Gives every interval a slot so that overlapping intervals differ, using as few as possible.

    Args:
      lives: key -> (first write, last read), comparable times; a slot read last at a time is free
        for a write strictly after it.

    Returns:
      key -> slot, slots from 0; as many as the most intervals that overlap.

    Example:
      >>> colour_intervals({"a": (0, 2), "b": (1, 3), "c": (3, 4)})
      {'a': 0, 'b': 1, 'c': 0}
    """
    free: list[int] = []
    busy: list[tuple] = []
    slots: dict = {}
    for key, (start, end) in sorted(lives.items(), key=lambda item: item[1]):
        while busy and busy[0][0] < start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else len(busy)
        slots[key] = slot
        heapq.heappush(busy, (end, slot))
    return slots
