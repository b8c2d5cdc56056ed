"""The tick table: what every stage does in every tick, as arrays of integers.

A `Row` is one tick, and a `Cell` is its action of one kind. The executor only sees rows, with one
integer per field: that of its own stage. A table holds the same rows as columns.
"""

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np

from jaxpipe.schedule.actions import Kind, Schedule

Integer: TypeAlias = Any
"""An integer of every tick and stage, int32 ``[ticks, stages]``; in a row of one stage a scalar."""

NONE = -1
"""Marks an empty cell of a table: no action, no message, no slot."""

_MIXED = 0.25
"""Largest share of ticks with both directions that leaves the others a body for each: every body
takes time to compile. Shares by schedule are in docs/design/001-executor.md."""


class Moved(NamedTuple):
    """Residuals of another microbatch or chunk that move beside the layers of an action: to the
    host beside F, back beside a backward.

    Args:
      until_b, until_w: their slots on the device.
      on_host: their slot on the host; the last one, which nothing reads, if nothing moves.
      part: number of the part of every layer's residuals that moves.
    """

    until_b: Integer
    until_w: Integer
    on_host: Integer
    part: Integer


@dataclasses.dataclass(frozen=True)
class Cell:
    """The action of one kind that one stage runs in one tick.

    In a table, every field is a column, int32 ``[ticks, stages]``.

    Args:
      layers: number of layers of the chunk, which may be empty; 0 without an action.
      microbatch: `NONE` without an action.
      inbox: slot of the input (x for F, the cotangent for B and BW).
      until_b: slot of the residuals that only B reads.
      until_w: slot of the residuals that W reads.
      crossing: slot of the values that go from B to W.
      weights: weight slot (sharded weights only).
      gradient: gradient slot (sharded gradients only).
      carry: slot of what layers hand from slice to slice of a sequence (slices only).
      carry_gradient: slot of its cotangent.
      moved: what moves beside its layers, where residuals wait on the host.
      number: number of its place in the program, where that knows all places
        (`TickTable.cell_numbers`).
    """

    layers: Integer
    chunk: Integer
    microbatch: Integer
    inbox: Integer
    until_b: Integer
    until_w: Integer
    crossing: Integer
    weights: Integer
    gradient: Integer
    carry: Integer = None
    carry_gradient: Integer = None
    moved: Moved | None = None
    number: Integer = None

    @property
    def runs(self) -> Any:
        """Whether there is an action, which hands its message on even without layers."""
        return self.microbatch != NONE


class Arrival(NamedTuple):
    """Slots for what a channel brings to a stage, `NONE` for nothing: see `Channel`."""

    slot: Integer
    late_slot: Integer


class Transfer(NamedTuple):
    """A chunk to gather or reduce over data; `NONE` for nothing.

    Args:
      piece: number of the first piece to move, where chunks move in pieces; or, where pieces move
        in shares, of the share, counted within the chunk.
    """

    chunk: Integer
    slot: Integer
    piece: Integer = 0


class BodyParts(NamedTuple):
    """Parts of a tick's body; the program has a body for every combination that occurs.

    Args:
      forward: embedding, forwards, their messages and the head.
      backward: backwards, their messages and the embedding's gradient.
      gather, reduce: what all stages move over data under the tick's layers.
      first, last: the first tick, which gathers the chunk that a stage begins with, and the last,
        which reduces the one that it ends with, each layer under the one before it.
    """

    forward: bool = True
    backward: bool = True
    gather: bool = False
    reduce: bool = False
    first: bool = False
    last: bool = False

    @property
    def name(self) -> str:
        """Name of the body, such as "tick_forward_gather"."""
        return "_".join(["tick", *(name for name, has in self._asdict().items() if has)])

    def has(self, kind: Kind) -> bool:
        """Whether actions of a kind run, and messages of that kind are sent and received."""
        return self.forward if kind.is_forward else self.backward


class Outer(NamedTuple):
    """The embedding and the head of one tick.

    In a table, every field is a column, int32 ``[ticks]`` or ``[ticks, most in a tick]``.

    Args:
      embed, embed_slot: microbatch that enters, and its inbox slot on the first stage.
      head, head_slot: microbatch that leaves, and the slot of its cotangent on the last.
      embed_gradient, embed_gradient_slot: microbatches whose cotangents reach the embedding, and
        the slots in which they wait on the first stage; `NONE` for this tick's. There are as many
        as in the fullest tick, padded with `NONE`.
    """

    embed: Integer
    embed_slot: Integer
    head: Integer
    head_slot: Integer
    embed_gradient: Integer
    embed_gradient_slot: Integer = NONE


class Row(NamedTuple):
    """One tick.

    Args:
      arrivals: the messages it receives, in the order of `TickTable.channels`.
      gather, reduce: its transfers over data.
      exchange: index of its messages in `TickTable.exchanges`.
    """

    cells: dict[Kind, Cell]
    arrivals: tuple[Arrival, ...]
    gather: Transfer
    reduce: Transfer
    outer: Outer
    exchange: Integer


Chunk: TypeAlias = tuple[int, int]
"""The number of a chunk on its stage, and its number of layers."""

Pairs: TypeAlias = dict[Kind, set[tuple[Chunk, Chunk]]]
"""The chunks whose backward and whose forward a tick overlaps, by the kind of the backward."""

Edges: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of a sender and a receiver."""


@dataclasses.dataclass(frozen=True)
class Channel:
    """Messages of one kind between stages at one distance; at most one per stage and tick.

    A message that the next tick reads is received at the end of the tick that sends it. Any other
    is late: it leaves when the next tick begins, travels under its layers, and is received at its
    end.

    Args:
      kind: F (activations, sent on) or B (cotangents, sent back).
      edges: (sender, receiver) pairs; a stage that sends to itself writes its own inbox.
      slot: int32 ``[ticks, stages]``, the inbox slot of what a stage receives in the tick that
        sends it, or `NONE`.
      late_slot: the same for what was sent in the tick before.
    """

    kind: Kind
    edges: Edges
    slot: np.ndarray
    late_slot: np.ndarray

    @property
    def local(self) -> bool:
        """Whether the stages send to themselves."""
        return self.edges[0][0] == self.edges[0][1]

    @property
    def late_edges(self) -> Edges:
        """The pairs between which any message travels late."""
        receives = (self.late_slot != NONE).any(axis=0)
        return tuple(edge for edge in self.edges if receives[edge[1]])

    def edges_at(self, tick: int) -> Edges:
        """The pairs that a message of this tick connects at its end."""
        return tuple(edge for edge in self.edges if self.slot[tick, edge[1]] != NONE)


@dataclasses.dataclass(frozen=True)
class Transfers:
    """Gathers or reductions over data.

    A chunk moves as a whole in the tick of its first use, or of its last, and layers wait for it.
    Or, if there is one more slot, it moves under layers of other chunks, in the same ticks on all
    stages: one group of pieces, or one share of a piece, per tick.

    Args:
      chunk, slot, piece: int32 ``[ticks, stages]``, see `Transfer`.
      num_slots: number of slots of each stage.
      group: pieces, or shares, that move in one tick under its layers; 0 where chunks move as a
        whole.
      shares: number of shares of a piece.
      parts: number of ticks in which a chunk moves.
      edge: whole chunks that move before the first tick (gathers) or after the last (reductions),
        int32 ``[moves, stages]``; first those that stages begin or end with.
      within: whether all but one piece of those move within the first tick, or the last.
    """

    chunk: np.ndarray
    slot: np.ndarray
    piece: np.ndarray
    num_slots: int
    group: int
    shares: int
    parts: int
    edge: Transfer
    within: bool = False

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of chunks that each stage moves in one step."""
        pieces, edge = (self.chunk != NONE).sum(axis=0), (self.edge.chunk != NONE).sum(axis=0)
        return tuple((pieces // self.parts + edge).tolist())

    @property
    def whole(self) -> bool:
        """Whether chunks move as a whole when they are used."""
        return not self.group and bool((self.chunk != NONE).any())

    @property
    def shared(self) -> np.ndarray:
        """Ticks in which all stages move pieces under their layers, bool ``[ticks]``."""
        moves: np.ndarray = (self.chunk != NONE).any(axis=1) & (self.group > 0)
        return moves

    @property
    def most_moved(self) -> tuple[int, int]:
        """The most pieces, or shares of so many in a piece, that move under layers at once."""
        shared = bool(self.shared.any())
        if self.within and not (shared and self.group >= self.shares):
            return 1, 1
        return self.group * shared, self.shares


@dataclasses.dataclass(frozen=True)
class TickTable:
    """A schedule as rows of integers: what every stage does in every tick.

    Args:
      layer_counts: layers of every virtual stage.
      passes: columns by kind; only kinds the schedule uses.
      num_slots: size of each buffer, by name: x, dy, until_b, until_w, crossing; with slices,
        carry, carry_gradient; and on_host, with one slot that nothing reads, if residuals wait
        there.
      exchanges: the distinct sets of messages between stages that end a tick, each as the pairs
        that it connects on every channel.
      exchange: int32 ``[ticks]``: number of the tick's.
      together: whether all stages compute embedding and head together, or those of the first and
        the last virtual stage alone.
      residual_parts: parts in which residuals move to the host and back; 0 if none do.
    """

    schedule: Schedule
    layer_counts: tuple[int, ...]
    passes: dict[Kind, Cell]
    channels: tuple[Channel, ...]
    outer: Outer
    gathers: Transfers
    reduces: Transfers
    num_slots: dict[str, int]
    exchanges: tuple[tuple[Edges, ...], ...]
    exchange: np.ndarray
    together: bool
    residual_parts: int = 0

    @property
    def num_ticks(self) -> int:
        return len(self.exchange)

    @property
    def cotangents_wait(self) -> bool:
        """Whether any cotangent waits for the embedding."""
        return bool((self.outer.embed_gradient_slot != NONE).any())

    @property
    def one_message(self) -> bool:
        """Whether no stage hands on an activation and a cotangent in one tick."""
        handing = [cell.runs for kind, cell in self.passes.items() if kind is not Kind.W]
        return bool((np.sum(handing, axis=0) <= 1).all())

    @property
    def pairs(self) -> Pairs:
        """The chunks that ticks overlap.

        Where other backwards are split, a fused one is B and W in one tick.
        """
        pairs: Pairs = {}
        forward = self.passes[Kind.F]
        for kind, backward in self.passes.items():
            if kind not in (Kind.B, Kind.BW):
                continue
            for place in map(tuple, np.argwhere((forward.layers > 0) & (backward.layers > 0))):
                fused = Kind.W not in self.passes or self.passes[Kind.W].runs[place]
                chunks = _chunk(backward, place), _chunk(forward, place)
                pairs.setdefault(Kind.BW if fused else Kind.B, set()).add(chunks)
        return pairs

    def cells(
        self, kind: Kind, fields: Sequence[str], ticks: np.ndarray | slice = slice(None)
    ) -> dict[int, dict[str, Integer]]:
        """Lists the distinct values of these fields in cells of a kind, on any stage, by number: in
        all ticks, or in those that are marked, bool ``[ticks]``."""
        values, _ = self._distinct(kind, fields)
        numbers = np.unique(self.cell_numbers(kind, fields)[ticks])
        return {
            number: dict(zip(fields, values[number].tolist(), strict=True))
            for number in numbers[numbers != NONE].tolist()
        }

    def cell_numbers(self, kind: Kind, fields: Sequence[str]) -> np.ndarray:
        """Numbers the distinct values of these fields in cells of a kind, int32 ``[ticks,
        stages]``; `NONE` where there is nothing to run, or to hand on."""
        runs = self._acts(kind)
        numbers = np.full(runs.shape, NONE, np.int32)
        _, numbers[runs] = self._distinct(kind, fields)
        return numbers

    def _distinct(self, kind: Kind, fields: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Finds the distinct values of these fields, and the number of every cell that acts."""
        columns, runs = self.passes[kind], self._acts(kind)
        values = np.stack([getattr(columns, field)[runs] for field in fields], axis=1)
        distinct, numbers = np.unique(values, axis=0, return_inverse=True)
        return distinct, numbers.reshape(-1)

    def _acts(self, kind: Kind) -> np.ndarray:
        """Marks cells of a kind with layers or a message to hand on, bool ``[ticks, stages]``."""
        cell = self.passes[kind]
        acts: np.ndarray = cell.layers > 0 if kind is Kind.W else cell.runs
        return acts

    def branches(
        self, kinds: Collection[Kind]
    ) -> tuple[list[list[int]], list[tuple[tuple[Edges, ...], ...]], list[int]]:
        """Lists the distinct exchanges of messages of these kinds.

        Returns:
          The channels that any exchange uses, in one list those of a kind of which a stage receives
          at most one message in a tick; the permutations of every list in each distinct exchange;
          and the number of each of `exchanges` among these.
        """
        lists: list[list[int]] = []
        for number, channel in enumerate(self.channels):
            if channel.kind in kinds and any(pairs[number] for pairs in self.exchanges):
                own = next((one for one in lists if self._fit([*one, number])), [])
                lists += [] if own else [own]
                own.append(number)
        found = [
            tuple(_permutations([pairs[number] for number in own]) for own in lists)
            for pairs in self.exchanges
        ]
        distinct = list(dict.fromkeys(found))
        return lists, distinct, [distinct.index(pairs) for pairs in found]

    def _fit(self, numbers: Sequence[int]) -> bool:
        """Whether no stage sends or receives two messages of these channels in a tick."""
        kinds = {self.channels[number].kind for number in numbers}
        ticks = [[edge for number in numbers for edge in pairs[number]] for pairs in self.exchanges]
        ends = (end for edges in ticks for end in zip(*edges, strict=True))
        return len(kinds) == 1 and all(len(set(end)) == len(end) for end in ends)

    @property
    def rows(self) -> Row:
        """All rows as one, int32 ``[ticks, stages]``; `Row.outer` and `Row.exchange`, which are the
        same for all stages, have no dimension of stages."""
        return Row(
            cells=self.passes,
            arrivals=tuple(Arrival(c.slot, c.late_slot) for c in self.channels),
            gather=Transfer(self.gathers.chunk, self.gathers.slot, self.gathers.piece),
            reduce=Transfer(self.reduces.chunk, self.reduces.slot, self.reduces.piece),
            outer=self.outer,
            exchange=self.exchange,
        )

    def parts(self, *, gathers: bool, reduces: bool) -> list[BodyParts]:
        """Lists the parts of every tick's body.

        Arguments as for `runs`.
        """
        ticks = np.arange(self.num_ticks)
        first = (ticks == 0) & self.gathers.within & gathers
        last = (ticks == ticks[-1]) & self.reduces.within & reduces
        moves = self.gathers.shared & gathers, self.reduces.shared & reduces
        directions = self._directions(~(first | last))
        return [
            BodyParts(*map(bool, tick))
            for tick in zip(*directions, *moves, first, last, strict=True)
        ]

    def runs(self, *, gathers: bool, reduces: bool) -> tuple[tuple[BodyParts, ...], np.ndarray]:
        """Groups ticks in a row that have equal parts.

        Args:
          gathers, reduces: whether the program gathers, and reduces, as the table says.

        Returns:
          The parts that occur, and int32 ``[rounds, parts]``: how many ticks of each follow each
          other in every round.
        """
        of_tick = self.parts(gathers=gathers, reduces=reduces)
        distinct, rounds = list(dict.fromkeys(of_tick)), list[list[int]]()
        for number, ticks in itertools.groupby(map(distinct.index, of_tick)):
            if not rounds or any(rounds[-1][number:]):
                rounds.append([0] * len(distinct))
            rounds[-1][number] = len(list(ticks))
        return tuple(distinct), np.asarray(rounds, np.int32)

    def reduces_last(self, *, gathers: bool) -> bool:
        """Whether only the last tick reduces, in a body that runs once: XLA leaves out such a loop,
        and allocates the result of the reduction when layers are done."""
        _, rounds = self.runs(gathers=gathers, reduces=True)
        reducing = self.reduces.shared
        return len(rounds) == 1 and bool(reducing[-1]) and not reducing[:-1].any()

    def _directions(self, alike: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Marks the ticks whose bodies run forwards, and backwards, each bool ``[ticks]``; those
        that are ``alike`` do both if many do."""
        used = [
            *((kind, cell.runs.any(axis=1)) for kind, cell in self.passes.items()),
            *(
                (c.kind, ((c.slot != NONE) | (c.late_slot != NONE)).any(axis=1))
                for c in self.channels
            ),
            (Kind.F, (self.outer.embed != NONE) | (self.outer.head != NONE)),
            (Kind.B, (self.outer.embed_gradient != NONE).any(axis=1)),
        ]
        forward, backward = (
            np.any([ticks for kind, ticks in used if kind.is_forward == wanted], axis=0)
            for wanted in (True, False)
        )
        mixed = (np.mean(forward & backward) > _MIXED) & alike
        return forward | mixed | ~backward, backward | mixed

    @property
    def with_whole_edges(self) -> Self:
        """The table whose chunks move as a whole before the first tick and after the last."""
        return dataclasses.replace(
            self,
            gathers=dataclasses.replace(self.gathers, within=False),
            reduces=dataclasses.replace(self.reduces, within=False),
        )

    @property
    def last_kind(self) -> Kind:
        """The kind of action that completes gradients."""
        return Kind.W if Kind.W in self.passes else Kind.BW

    @property
    def layers_per_chunk(self) -> int:
        """Layers of the largest chunk: the room every chunk gets."""
        return max(self.layer_counts)


def _permutations(of_channels: Sequence[Edges]) -> tuple[Edges, ...]:
    """One permutation for all edges; or one per channel if together they go round in circles, since
    XLA for GPUs compiles a permutation of several cycles to wrong code."""
    edges = tuple(sorted(itertools.chain(*of_channels)))
    following = dict(edges)
    for start in following:
        at = following[start]
        while at in following and at != start:
            at = following[at]
        if at == start:
            return tuple(filter(None, of_channels))
    return (edges,) if edges else ()


def _chunk(cell: Cell, place: tuple[int, ...]) -> Chunk:
    return int(cell.chunk[place]), int(cell.layers[place])
