"""Moves of chunks over the data axis: gathers of weights before use, reductions after it.

A stage has fewer slots than chunks. Weights sharded over the data axis are gathered into slots
before use; sharded gradients are summed in slots and reduced when a slot is given up. Both follow
from the order alone, by the same rule (`cached_slots`).

Transfers may run under the layers of other chunks (`under_layers`). A gather or reduction overlaps
computation on GPUs only if it stands beside the loops over layers and not in a loop of its own, so
a tick moves something on all stages or on none. Between the chunk that lay in a slot before and its
first use, a chunk has a window of ticks in which its pieces can be gathered; between its last use
and the next chunk of its slot, one in which they can be reduced.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxpipe.schedule.actions import Kind, Schedule, split_action
from jaxpipe.schedule.lowering.table import NONE, Transfer, Transfers
from jaxpipe.schedule.simulate import ticks

SMALLEST_SHARE = 1 << 27
"""Bytes of parameters below which no part of a layer moves over data by itself: a collective of a
few megabytes does not reach the bandwidth of its links."""
_WASTE = 0.05
"""Share of a layer's bytes that may move in vain, because arrays do not divide."""


_KINDS = tuple(Kind)
"""Kinds by their number in `Columns.kind`."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """The actions, one row each, in order within each stage: int64 ``[actions]``."""

    stage: np.ndarray
    tick: np.ndarray
    kind: np.ndarray
    virtual_stage: np.ndarray
    microbatch: np.ndarray

    def of(self, *kinds: Kind) -> np.ndarray:
        """Marks the actions of these kinds, bool ``[actions]``."""
        marked: np.ndarray = np.logical_or.reduce([self.kind == _KINDS.index(k) for k in kinds])
        return marked


def columns_of(schedule: Schedule) -> Columns:
    """Puts every action, or overlapped pair, into its earliest tick.

    Where some backwards are B and W, and others BW, a BW becomes B and W in the same tick.
    """
    code = {kind: k for k, kind in enumerate(_KINDS)}
    actions = [action for order in schedule.orders for action in order]
    when = [tick for row in ticks(schedule) for tick in row]
    if schedule.mixes_backwards:
        pairs = zip(when, map(split_action, actions), strict=True)
        when, actions = map(list, zip(*((t, a) for t, parts in pairs for a in parts), strict=True))

    # Column by column: with one tuple per row, garbage collection would take longer than the rest.
    def column(values: Iterable[int]) -> np.ndarray:
        return np.fromiter(values, np.int64)

    virtual_stage = column(action.virtual_stage for action in actions)
    return Columns(
        stage=np.asarray(schedule.placement.stages)[virtual_stage],
        tick=column(when),
        kind=column(code[action.kind] for action in actions),
        virtual_stage=virtual_stage,
        microbatch=column(action.microbatch for action in actions),
    )


class MoveOptions(NamedTuple):
    """Options for how chunks move over data, as for `jaxpipe.schedule.lowering.lower.lower`."""

    own_slots: bool
    pieces: int
    shares: int
    within: bool


class ChunkSlots(NamedTuple):
    """Transfers, and the slots in which actions find their chunks.

    Args:
      transfers: at most one per stage and tick.
      slots: int64 ``[actions]``: the slot of each action's chunk.
    """

    transfers: Transfers
    slots: np.ndarray


def held_chunks(
    schedule: Schedule,
    columns: Columns,
    moving: MoveOptions,
    num_slots: int,
    kinds: Sequence[Kind],
    *,
    load: bool,
    waits: bool,
) -> ChunkSlots:
    """Plans the gathers (load) or reductions (unload) of the chunks that some kinds of action use.

    Args:
      num_slots: per stage, at least 1; raised until no tick needs more slots or two transfers.
      kinds: kinds of action that need the chunk in a slot.
      load: whether chunks move before their first use, or after their last.
      waits: whether chunks may move at other times than when they are used.
    """
    while (
        planned := _with_slots(schedule, columns, num_slots, moving.own_slots, kinds, load)
    ) is None:
        num_slots += 1
    whole, stays = planned
    if not waits:
        return whole
    ticks = len(whole.transfers.chunk)
    spread = under_layers(stays, ticks, num_slots, moving, load=load)
    return whole if spread is None else whole._replace(transfers=spread)


def _with_slots(
    schedule: Schedule,
    columns: Columns,
    num_slots: int,
    own_slots: bool,
    kinds: Sequence[Kind],
    load: bool,
) -> tuple[ChunkSlots, list[list[Stay]]] | None:
    """Plans the transfers of chunks that move as a whole, and lists their stays by stage.

    Returns None where a tick needs more slots or more than one transfer.
    """
    shape = (1 + int(columns.tick.max()), schedule.num_stages)
    chunk, slot = np.full(shape, NONE, np.int32), np.zeros(shape, np.int32)
    slots_of = np.zeros(len(columns.tick), np.int64)
    all_stays: list[list[Stay]] = [[] for _ in range(schedule.num_stages)]
    wanted = columns.of(*kinds)
    chunks = np.asarray(schedule.placement.chunks)[columns.virtual_stage]
    # One cache of all slots, or slots of their own: a cache of one slot each.
    caches, size = (num_slots, 1) if own_slots else (1, num_slots)
    place = (columns.tick * schedule.num_stages + columns.stage) * schedule.num_chunks + chunks
    needed = np.unique(place[wanted])
    of_cache = needed // schedule.num_chunks * caches + needed % schedule.num_chunks % caches
    if np.bincount(of_cache).max(initial=0) > size:
        return None  # a tick uses more chunks
    for stage, cache in itertools.product(range(schedule.num_stages), range(caches)):
        first, end = np.searchsorted(columns.stage, (stage, stage + 1))
        selected = wanted[first:end] & (chunks[first:end] % caches == cache)
        used = first + np.flatnonzero(selected)
        uses, items = columns.tick[used], chunks[used]
        stays, of_use = cached_slots(uses.tolist(), items.tolist(), num_slots=size)
        ticks = [stay.loaded if load else stay.unloaded for stay in stays]
        if len(set(ticks)) < len(ticks) or (chunk[ticks, stage] != NONE).any():
            return None
        for stay in stays:
            stay.slot += cache * size
        all_stays[stage] += stays
        slot_of_stay = np.asarray([stay.slot for stay in stays], np.int64)
        chunk[ticks, stage], slot[ticks, stage] = [stay.item for stay in stays], slot_of_stay
        slots_of[used] = slot_of_stay[np.asarray(of_use, np.int64)]
    nothing = Transfer(*(np.full((0, schedule.num_stages), NONE, np.int32) for _ in range(3)))
    whole = Transfers(
        chunk, slot, np.zeros_like(slot), num_slots, group=0, shares=1, parts=1, edge=nothing
    )
    return ChunkSlots(whole, slots_of), all_stays


class _Job(NamedTuple):
    """A chunk to move on a stage in ticks from ``start`` to before ``end``, or at the edge of the
    step; ``alone`` if it is the first of the stage, or the last: no other chunk's layers run then.
    """

    start: int
    end: int
    stage: int
    stay: Stay
    at_edge: bool
    alone: bool


def under_layers(
    stays: Sequence[Sequence[Stay]],
    num_ticks: int,
    num_slots: int,
    moving: MoveOptions,
    *,
    load: bool,
) -> Transfers | None:
    """Spreads the pieces of chunks over ticks, as few at once as possible.

    The first chunk that a stage uses is gathered before the first tick, and the last one is reduced
    after the last tick. If these are the same chunk on all stages, they may leave one piece there:
    the others move within the first tick, or the last, each under the layer next to it. Any other
    chunk that has no time within the step but may move at its edge does so as a whole.

    Args:
      moving: with no pieces if chunks move only at the edges of the step, not under layers.
      load: whether chunks are gathered, or reduced.

    Returns:
      The transfers; None where a chunk has too short a window, and cannot wait for an edge.
    """
    jobs = [
        job for n, own_stays in enumerate(stays) for job in _jobs(n, own_stays, num_ticks, load)
    ]
    ticks: list[np.ndarray | None] = [None] * len(jobs)
    group, shares = 0, 1
    pieces = moving.pieces
    for group, shares in _sizes(pieces, moving.shares):
        ticks = _choose(jobs, num_ticks, len(stays), pieces * shares // group)
        late = [job for job, when in zip(jobs, ticks, strict=True) if when is None]
        if all(job.start == job.end for job in late):
            break
    chunk, slot, piece = (np.full((num_ticks, len(stays)), v, np.int32) for v in (NONE, 0, 0))
    edge: list[list[Stay]] = [[] for _ in stays]
    for job, when in zip(jobs, ticks, strict=True):
        if when is not None:
            chunk[when, job.stage], slot[when, job.stage] = job.stay.item, job.stay.slot
            piece[when, job.stage] = np.arange(len(when)) * group
        elif job.at_edge:
            edge[job.stage].insert(0 if job.alone else len(edge[job.stage]), job.stay)
        else:
            return None
    parts = pieces * shares // group if group else 1
    outer = _at_edge(edge)
    alike = len(outer.chunk) > 0 and bool((outer.chunk[0] == outer.chunk[0, 0]).all())
    within = moving.within and pieces > 1 and alike
    return Transfers(chunk, slot, piece, num_slots, group, shares, parts, outer, within)


def dividing_shares(arrays: Sequence[tuple[float, int]], smallest: float = SMALLEST_SHARE) -> int:
    """The most shares, a power of two, of ``smallest`` bytes or more in which a layer may move;
    fewer if too much of it does not divide into them.

    Args:
      arrays: bytes of each, and the length of a data shard's part of it; 0 if it is not split.

    Example:
      >>> dividing_shares([(8.0, 6), (8.0, 4)], smallest=1.0), dividing_shares([(16.0, 1)], 1.0)
      (2, 1)
    """
    total, shares = sum(size for size, _ in arrays), 1
    while total >= 2 * shares * smallest:
        shares *= 2
    while (shares - 1) * sum(s for s, n in arrays if not n or n % shares) > _WASTE * total:
        shares //= 2
    return shares


def _sizes(pieces: int, most_shares: int) -> Iterator[tuple[int, int]]:
    """Yields amounts that may move in a tick, the least first: one share, or a group of pieces."""
    shares = most_shares
    while pieces and shares > 1:
        yield 1, shares
        shares //= 2
    yield from ((group, 1) for group in range(1, pieces + 1) if pieces % group == 0)


def _jobs(stage: int, stays: Sequence[Stay], num_ticks: int, load: bool) -> Iterator[_Job]:
    """Yields the chunks to move on a stage, each while its slot holds it and no layer uses it."""
    for stay in stays:
        same_slot = [other for other in stays if other.slot == stay.slot]
        if load:
            before = [other.unloaded for other in same_slot if other.unloaded < stay.loaded]
            start, end = 1 + max(before, default=-1), stay.loaded
            at_edge, alone = not before, stay.loaded == min(other.loaded for other in stays)
        else:
            after = [other.loaded for other in same_slot if other.loaded > stay.unloaded]
            start, end = stay.unloaded + 1, min(after, default=num_ticks)
            at_edge, alone = not after, stay.unloaded == max(other.unloaded for other in stays)
        yield _Job(start, start if alone else end, stage, stay, at_edge, alone)


def _choose(
    jobs: Sequence[_Job], num_ticks: int, num_stages: int, parts: int
) -> list[np.ndarray | None]:
    """Chooses ``parts`` ticks within each job's window, few in all; None where a window is short.

    Every job takes the earliest ticks that another stage's takes as well, and then the earliest.
    The jobs that start last choose first, as they can share only what starts as late.
    """
    moves, taken = np.zeros(num_ticks, bool), np.zeros((num_ticks, num_stages), bool)
    ticks: list[np.ndarray | None] = [None] * len(jobs)
    for number in sorted(range(len(jobs)), key=lambda n: jobs[n].start, reverse=True):
        start, end, stage, *_ = jobs[number]
        free = start + np.flatnonzero(~taken[start:end, stage])
        chosen = np.sort(free[np.argsort(~moves[free], kind="stable")][:parts])
        if len(chosen) == parts:
            moves[chosen] = taken[chosen, stage] = True
            ticks[number] = chosen
    return ticks


def _at_edge(stays: Sequence[Sequence[Stay]]) -> Transfer:
    """Lists the chunks that stages move one after the other, int32 ``[moves, stages]``."""
    moves = max(map(len, stays), default=0)
    chunk, slot = (np.full((moves, len(stays)), v, np.int32) for v in (NONE, 0))
    for stage, own_stays in enumerate(stays):
        for move, stay in enumerate(own_stays):
            chunk[move, stage], slot[move, stage] = stay.item, stay.slot
    return Transfer(chunk, slot, np.zeros_like(slot))


@dataclasses.dataclass(slots=True)
class Stay:
    """An item's stay in a slot: from the tick of its first use to that of its last."""

    item: int
    slot: int
    loaded: int
    unloaded: int


def cached_slots(
    ticks: Sequence[int], items: Sequence[int], *, num_slots: int
) -> tuple[list[Stay], list[int]]:
    """Assigns slots to items, evicting the one whose next use is farthest (Belady's rule).

    The number of stays, and hence of transfers, is the least possible. An item stays until the tick
    of its use is over. Among items that are not used again, the one that has waited longest goes.

    Args:
      ticks: when each use is, in order.
      items: the item (a chunk) of each use; at most ``num_slots`` different ones in a tick.

    Returns:
      The stays in order of loading, and the index of every use's stay.

    Example:
      >>> stays, of_use = cached_slots([0, 1, 2], [0, 1, 0], num_slots=1)
      >>> [(stay.item, stay.loaded, stay.unloaded) for stay in stays], of_use
      ([(0, 0, 0), (1, 1, 1), (0, 2, 2)], [0, 1, 2])
    """
    uses = itertools.groupby(zip(items, ticks, strict=True), key=operator.itemgetter(0))
    runs = [(item, [tick for _, tick in run]) for item, run in uses]
    upcoming: dict[int, int] = {}
    next_run = [math.inf] * len(runs)
    for number, (item, _) in reversed([*enumerate(runs)]):
        next_run[number] = upcoming.get(item, math.inf)
        upcoming[item] = number
    current: dict[int, int] = {}  # item -> index of its stay
    farthest: dict[int, float] = {}
    stays: list[Stay] = []
    of_use: list[int] = []
    for number, (item, used_in) in enumerate(runs):
        if item not in current:
            slot = len(current)
            if slot == num_slots:
                used = {other: stays[stay].unloaded for other, stay in current.items()}
                idle = (other for other in current if used[other] < used_in[0])
                farthest_idle = max(idle, key=lambda other: (farthest[other], -used[other]))
                slot = stays[current.pop(farthest_idle)].slot
            current[item] = len(stays)
            stays.append(Stay(item, slot, used_in[0], used_in[0]))
        stays[current[item]].unloaded = used_in[-1]
        farthest[item] = next_run[number]
        of_use += [current[item]] * len(used_in)
    return stays, of_use
