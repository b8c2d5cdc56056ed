"""Transfers over data that run under the layers of other chunks.

A gather or reduction overlaps computation on GPUs only if it stands beside the loops over layers
and not in a loop of its own, so a tick moves something on all stages or on none. Between the chunk
that lay in a slot before and its first use, a chunk has a window of ticks in which its pieces can
be gathered; between its last use and the next chunk of its slot, one in which they can be reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxpipe.schedule.lowering.slots import Stay
from jaxpipe.schedule.lowering.table import NONE, Transfer, Transfers

SMALLEST_SHARE = 1 << 27
"""Bytes of parameters below which no part of a layer moves over data by itself: a collective of a
few megabytes does not reach the bandwidth of its links."""
_WASTE = 0.05
"""Share of a layer's bytes that may move in vain, because arrays do not divide."""


class _Job(NamedTuple):
    """A chunk to move on a stage in ticks from ``start`` to before ``end``, or at the edge of the
    step."""

    start: int
    end: int
    stage: int
    stay: Stay
    at_edge: bool


def under_layers(
    stays: Sequence[Sequence[Stay]],
    num_ticks: int,
    num_slots: int,
    pieces: int,
    most_shares: int,
    *,
    load: bool,
) -> Transfers | None:
    """Spreads the pieces of chunks over ticks, as few at once as possible.

    The first chunk that a stage uses is gathered as a whole before the first tick, and the last one
    is reduced after the last tick. So is any other chunk that has no time within the step but may
    move at its edge.

    Args:
      stays: stays of each stage.
      num_slots: number of slots of each stage.
      pieces: pieces of a chunk; 0 if chunks move only at the edges of the step, not under layers.
      most_shares: the most shares in which a piece may move, a power of two.
      load: whether chunks are gathered, or reduced.

    Returns:
      The transfers; None where a chunk has too short a window, and cannot wait for an edge.
    """
    jobs = [
        job for n, own_stays in enumerate(stays) for job in _jobs(n, own_stays, num_ticks, load)
    ]
    ticks: list[np.ndarray | None] = [None] * len(jobs)
    group, shares = 0, 1
    for group, shares in _sizes(pieces, most_shares):
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
            edge[job.stage].append(job.stay)
        else:
            return None
    parts = pieces * shares // group if group else 1
    return Transfers(chunk, slot, piece, num_slots, group, shares, parts, _at_edge(edge))


def most_shares(layer_bytes: float, smallest: float = SMALLEST_SHARE) -> int:
    """The most shares, a power of two, in which a layer may move: of ``smallest`` bytes or more."""
    shares = 1
    while layer_bytes >= 2 * shares * smallest:
        shares *= 2
    return shares


def dividing_shares(arrays: Sequence[tuple[float, int]], smallest: float = SMALLEST_SHARE) -> int:
    """`most_shares` of a layer, or fewer if too much of it does not divide into them.

    Args:
      arrays: bytes of each, and the length of a data shard's part of it; 0 if it is not split.

    Example:
      >>> dividing_shares([(8.0, 6), (8.0, 4)], smallest=1.0), dividing_shares([(16.0, 1)], 1.0)
      (2, 1)
    """
    total = sum(size for size, _ in arrays)
    number = most_shares(total, smallest)

    def in_vain() -> float:
        whole = sum(size for size, length in arrays if not length or length % number)
        return (number - 1) * whole

    while in_vain() > _WASTE * total:
        number //= 2
    return number


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
            start, end, at_edge = 1 + max(before, default=-1), stay.loaded, not before
            alone = stay.loaded == min(other.loaded for other in stays)
        else:
            after = [other.loaded for other in same_slot if other.loaded > stay.unloaded]
            start, end, at_edge = stay.unloaded + 1, min(after, default=num_ticks), not after
            alone = stay.unloaded == max(other.unloaded for other in stays)
        # The first chunk, or the last: no other chunk's layers run then.
        yield _Job(start, start if alone else end, stage, stay, at_edge)


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
