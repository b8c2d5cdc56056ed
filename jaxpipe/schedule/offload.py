"""Chooses the residuals that wait on the host, so that a stage's device keeps no more than a limit.

Residuals move beside layers: while an F runs, those of an earlier F leave, and while a backward
runs, those of a later one come back, layer by layer. So an action moves no more than what one
action keeps, or a part of it, where the bus is slower than layers. What waits longest leaves first,
and no more leaves than the limit asks.

Source: Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory
Optimization", arXiv 2503.01328.
"""

import dataclasses
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxpipe.schedule.actions import HELD, Action, Kind, Schedule
from jaxpipe.schedule.simulate import Costs

_PARTS = range(8, 0, -1)
"""Parts in which residuals may move, the slowest first, which leaves the bus the most time."""

Pass: TypeAlias = tuple[int, int]
"""A virtual stage, and the pass of a microbatch, or slice, through it."""


class Move(NamedTuple):
    """How the residuals of a pass move: a part of them beside each of these actions, by their
    places in the stage's order.

    Args:
      out: Fs beside which they leave.
      back: backwards beside which they come back.
    """

    out: list[int]
    back: list[int]


class Choice(NamedTuple):
    """The residuals that leave a stage's device.

    Args:
      moves: how the residuals of each pass that leaves move.
      early: places of W that must run earlier for the limit, each with that of the action before
        which it runs.
    """

    moves: dict[Pass, Move]
    early: dict[int, int]


def choose(
    order: Sequence[Action], layer_counts: Sequence[int], *, limit: int, parts: int = 1
) -> Choice | None:
    """Chooses the passes whose residuals leave, those that wait longest first, until the limit
    holds.

    Args:
      order: a stage's actions, as they run.
      layer_counts: layers of every virtual stage; shorter chunks cannot move a longer one's.
      limit: chunks whose residuals the device keeps at once.
      parts: actions that it takes to move the residuals of one.

    Returns:
      The choice, or None if no choice holds the limit.

    Example:
      >>> from jaxpipe.schedule.generators.depth_first import one_f_one_b
      >>> order = one_f_one_b(8, 16).orders[0]
      >>> len(choose(order, [1] * 8, limit=8).moves), len(choose(order, [1] * 8, limit=4).moves)
      (0, 11)
    """
    places: dict[Kind, dict[Pass, int]] = {kind: {} for kind in Kind}
    for place, action in enumerate(order):
        places[action.kind][action.virtual_stage, action.microbatch] = place
    starts, ends = places[Kind.F], places[Kind.B] | places[Kind.BW]
    free = sorted(starts.values()), sorted(ends.values())
    # The action that frees a chunk still reads it.
    kept = np.cumsum([HELD[a.kind] for a in order]) + [HELD[a.kind] < 0 for a in order]
    moves: dict[Pass, Move] = {}
    early: dict[int, int] = {}
    waiting, late = list[Pass](), list[Pass]()

    def move_at(one: Pass, place: int) -> Move:
        """Finds actions that carry a pass out by this place, and back from it on."""
        spans = (starts[one] + 1, place + 1), (place, ends[one])
        out, back = (
            [
                carrier
                for carrier in carriers[bisect_left(carriers, start) : bisect_left(carriers, end)]
                if layer_counts[order[carrier].virtual_stage] >= layer_counts[one[0]]
            ]
            for carriers, (start, end) in zip(free, spans, strict=True)
        )
        return Move(out[:parts], back[-parts:])

    for place, action in enumerate(order):
        one = action.virtual_stage, action.microbatch
        while kept[place] > limit:
            found = ((leaver, move_at(leaver, place)) for leaver in waiting)
            fits = (leaves for leaves in found if min(map(len, leaves[1])) == parts)
            if leaves := next(fits, None):
                leaver, moves[leaver] = leaves
                waiting.remove(leaver)
                for carriers, taken in zip(free, moves[leaver], strict=True):
                    carriers[:] = [carrier for carrier in carriers if carrier not in taken]
                kept[moves[leaver].out[-1] : moves[leaver].back[0] + 1] -= 1
            else:
                # Too much is kept since this F, or since something came back beside the last B.
                since = place if action.kind is Kind.F else place - 1
                done = next((done for done in late if ends[done] < since), None)
                if done is None:
                    return None
                late.remove(done)
                w = places[Kind.W][done]
                early[w] = since
                kept[since : w + 1] -= 1
        if action.kind is Kind.F:
            insort(waiting, one, key=lambda one: starts[one] - ends[one])
        elif one in waiting:
            waiting.remove(one)
        if action.kind is Kind.B:
            late.append(one)
        elif one in late:
            late.remove(one)
    return Choice(moves, early)


def move_residuals(
    orders: Sequence[Sequence[Action]], layer_counts: Sequence[int], *, limit: int
) -> tuple[int, dict[Pass, Move]] | None:
    """Chooses what leaves the devices of all stages, as slowly as the limit allows.

    Returns:
      In how many parts residuals move, and how each does; None if no choice holds the limit.
    """
    for parts in _PARTS:
        found = [choose(order, layer_counts, limit=limit, parts=parts) for order in orders]
        chosen = [choice for choice in found if choice is not None and not choice.early]
        if len(chosen) == len(orders):
            return parts, {one: move for choice in chosen for one, move in choice.moves.items()}
    return None


def kept_on_devices(schedule: Schedule, parts: int = 1) -> tuple[int, ...]:
    """Counts the chunks whose residuals each stage's device must keep at once, if all others may
    wait on the host.

    Example:
      >>> from jaxpipe.schedule.generators.depth_first import one_f_one_b
      >>> kept_on_devices(one_f_one_b(8, 16))
      (3, 3, 3, 3, 3, 3, 2, 1)
    """
    alike = [1] * schedule.placement.num_virtual_stages

    def least(order: Sequence[Action]) -> int:
        def fits(limit: int) -> bool:
            choice = choose(order, alike, limit=limit, parts=parts)
            return choice is not None and not choice.early

        return 1 + bisect_left(range(1, len(order)), True, key=fits)

    return tuple(map(least, schedule.orders))


def within_limit(schedule: Schedule, *, limit: int, parts: int) -> Schedule | None:
    """The schedule with each W as late as it was, or as early as the limit asks where residuals
    may wait on the host; None if that is not enough.

    Args:
      limit: chunks whose residuals a stage's device keeps at once.
      parts: as for `choose`.
    """
    orders, alike = [], [1] * schedule.placement.num_virtual_stages
    for order in schedule.orders:
        while choice := choose(order, alike, limit=limit, parts=parts):
            if not choice.early:
                break
            # In the new order, others may wait longest.
            key = {n: (choice.early.get(n, n), n not in choice.early) for n in range(len(order))}
            order = tuple(order[n] for n in sorted(key, key=key.__getitem__))
        if choice is None:
            return None
        orders.append(order)
    if tuple(orders) == schedule.orders:
        return schedule
    return dataclasses.replace(schedule, orders=tuple(orders), peak_in_flight=None, ticks=None)


def parts_of(offload: float, costs: Sequence[Costs]) -> int:
    """In how many parts residuals must move, so that the layers beside them hide each.

    Args:
      offload: time in which residuals move to the host, or back, as a share of the F that keeps
        them.
      costs: costs of every chunk.

    Example:
      >>> parts_of(0.8, [Costs(1, 1.2, 0.8)]), parts_of(1.2, [Costs(1, 1.2, 0.8)])
      (1, 2)
    """
    f, b = (math.fsum(getattr(cost, kind) for cost in costs) for kind in "fb")
    return max(1, math.ceil(offload * f / min(f, b)))
