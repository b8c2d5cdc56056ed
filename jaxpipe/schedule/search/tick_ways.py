"""Ways in which stages fill ticks of given lengths with the layers that are ready."""

from __future__ import annotations

import numpy as np

from jaxpipe.schedule.search.tick_engine import Flags, Floats, Ints, Ready

_F, _B, _W = range(3)
"""The kinds of action, as indices."""


def by_urgency(
    ready: Ready, under_way: Flags, left: Floats, forward_first: Flags | None
) -> list[Ints]:
    """Counts the layers, by kind, that stages run in ticks of several lengths: one of F and B,
    then W, which goes first only if memory keeps a forward waiting.

    Args:
      under_way: whether F, and B, has run some of its layers, by stage and state.
      left: the lengths, by stage, state and length.
      forward_first: by state, which of F and B runs if both are ready, neither is under way and
        there are no ranks.
    """
    forwards, backwards, weights = (room[..., None] for room in ready.rooms)
    f_cost, b_cost, w_cost = (cost[..., None] for cost in ready.costs)
    f_runs, b_runs = under_way
    # Whether there is an F, and a B, to run.
    has_f, has_b = ready.rooms[_F] > 0, ready.rooms[_B] > 0
    if ready.ranks:
        first = ready.ranks[_F] < ready.ranks[_B]
    else:
        assert forward_first is not None
        first = np.broadcast_to(forward_first, has_f.shape)
    first = np.where(f_runs != b_runs, f_runs, first)
    first = (has_f & (first | ~has_b))[..., None]
    early = np.minimum(left / w_cost, weights).astype(np.int32)
    early *= ready.blocked[..., None]
    left = left - early * w_cost
    cost = np.where(first, f_cost, b_cost)
    count = np.minimum(left / cost, np.where(first, forwards, backwards)).astype(np.int32)
    left -= count * cost
    f_count = count * first
    b_count = count - f_count
    room = weights - early + b_count * ready.same[..., None]
    late = np.minimum(left / w_cost, room).astype(np.int32)
    return [f_count, b_count, early + late]


def by_rank(ready: Ready, left: Floats) -> list[Ints]:
    """As `by_urgency`, but all kinds in the order of their ranks. Layers of W that B has only now
    made possible come last."""
    rooms = [room[..., None] for room in ready.rooms]
    same = ready.same[..., None]
    # Kinds that have nothing to run may stand anywhere.
    turns = np.stack(ready.ranks).argsort(axis=0, kind="stable")
    costs = np.take_along_axis(np.stack(ready.costs), turns, axis=0)[..., None]
    counts = [np.zeros(left.shape, np.int32) for _ in range(3)]
    left = left.copy()
    for turn, cost in zip(turns[..., None], costs, strict=True):
        weights = rooms[_W] + counts[_B] * same
        room = np.where(turn == _F, rooms[_F], np.where(turn == _B, rooms[_B], weights))
        count = np.minimum(left / cost, room).astype(np.int32)
        left -= count * cost
        for kind in range(3):
            counts[kind] += count * (turn == kind)
    room = rooms[_W] + counts[_B] * same - counts[_W]
    counts[_W] += np.minimum(left / ready.costs[_W][..., None], room).astype(np.int32)
    return counts
