"""Moves of chunks over the data axis: gathers of weights before use, reductions after it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpipe.schedule.actions import Kind, Schedule
from jaxpipe.schedule.lowering.columns import Columns
from jaxpipe.schedule.lowering.slots import Stay, cached_slots
from jaxpipe.schedule.lowering.table import NONE, Transfer, Transfers
from jaxpipe.schedule.lowering.under_layers import under_layers


class Moving(NamedTuple):
    """Options for how chunks move over data.

    Args:
      own_slots: a chunk always lies in slot ``chunk % k`` of k.
      pieces, shares: as for `under_layers`.
    """

    own_slots: bool
    pieces: int
    shares: int


class Held(NamedTuple):
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
    moving: Moving,
    num_slots: int,
    kinds: Sequence[Kind],
    *,
    load: bool,
    waits: bool,
) -> Held:
    """Plans the gathers (load) or reductions (unload) of the chunks that some kinds of action use.

    Args:
      columns: the schedule's actions.
      moving: how chunks move.
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
    spread = under_layers(stays, ticks, num_slots, moving.pieces, moving.shares, load=load)
    return whole if spread is None else whole._replace(transfers=spread)


def _with_slots(
    schedule: Schedule,
    columns: Columns,
    num_slots: int,
    own_slots: bool,
    kinds: Sequence[Kind],
    load: bool,
) -> tuple[Held, list[list[Stay]]] | None:
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
    for stage, cache in itertools.product(range(schedule.num_stages), range(caches)):
        first, end = np.searchsorted(columns.stage, (stage, stage + 1))
        selected = wanted[first:end] & (chunks[first:end] % caches == cache)
        used = first + np.flatnonzero(selected)
        uses, items = columns.tick[used], chunks[used]
        if _most_together(uses, items) > size:
            return None
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
    return Held(whole, slots_of), all_stays


def _most_together(ticks: np.ndarray, items: np.ndarray) -> int:
    """Counts the most different items used in one tick."""
    pairs = np.unique(np.stack([ticks, items]), axis=1)
    return int(np.unique(pairs[0], return_counts=True)[1].max(initial=0))
