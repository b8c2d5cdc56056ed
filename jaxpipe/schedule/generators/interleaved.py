"""Depth-first interleaving: 1F1B over several chunks per stage, microbatches in small groups.

`depth_first` is the family's one algorithm: it makes 1F1B and the zero-bubble schedules as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpipe.schedule.actions import Action, Kind, Schedule, nth_backward
from jaxpipe.schedule.placement import Placement, looped
from jaxpipe.schedule.problems import Problem, refuse
from jaxpipe.schedule.simulate import UNIT, makespan


def interleaved(
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 2,
    group: int | None = None,
    num_slices: int = 1,
    fused: bool = False,
) -> Schedule:
    """Runs 1F1B over chunks: a group of microbatches goes through chunk 0, then chunk 1, and so on.

    Each stage warms up until the last virtual stage can start its backwards without a gap, then
    runs one forward and one backward in turn. The split form puts W directly after its B. A group
    of fewer than p microbatches warms up only for the gradients' way back: it keeps less in flight
    and leaves gaps.

    ============  =====================================================================
    bubble        fused (p-1)(F+B+W)/v, split (p-1)(F+B)/v if W <= F, added to the m(F+B+W) of
                  work, when m is a multiple of the group
    in flight     min(m v, 2(p-d-1) + (v-1)g + 1) chunks on stage d, g the group; g < p:
                  min(m v, p-d-1 + (v-1)g + 1)
    k slices      the same of m k microbatches of 1/k, and k-1 more in flight
    constraints   p >= 1, m >= 1, v >= 1, g >= p/2; the bubble is that of g >= p
    source        Narayanan et al., arXiv 2104.04473 (Megatron-LM)
    ============  =====================================================================

    Args:
      num_microbatches: m, at least 1. If it is not a multiple of the group, the schedule is that of
        the next multiple without the surplus microbatches.
      group: microbatches that go through a chunk before the next chunk's turn, at least p/2. By
        default p; with fused backwards a larger one, up to 2p-1, if p does not divide m and that
        one ends sooner, as there is no W to fill the gaps that a short last group leaves. With
        slices it counts these, and is the next multiple of k.

    Raises:
      ValueError: the group is smaller than half of the number of stages.

    Example:
      >>> interleaved(4, 8, fused=True).peak_in_flight
      (11, 9, 7, 5)
    """
    num_passes = num_microbatches * num_slices
    if group is None:
        group = _fused_group(num_stages, num_passes, num_chunks) if fused else num_stages
    if 2 * group < num_stages:
        rule, others = "it must be at least half of $num_stages", {"num_stages": num_stages}
        nearest = (-(-num_stages // 2),)
        refuse([Problem("group", group, rule, nearest, others, "interleaved")])
    # A larger group gives the same order, and would take time and memory to plan.
    group = min(group, max(num_stages, num_passes))
    group += -group % num_slices
    hops = 2 if group >= num_stages else 1
    return depth_first(
        "interleaved-fused" if fused else "interleaved",
        looped(num_stages, num_chunks=num_chunks),
        num_microbatches,
        group=group,
        warm_ups=warm_up_forwards(num_stages, num_chunks, group, hops=hops),
        delays=None if fused else (0,) * num_stages,
        num_slices=num_slices,
    )


def _fused_group(num_stages: int, num_microbatches: int, num_chunks: int) -> int:
    """Chooses the group that ends first at F=B=W: p, or one that divides m evenly over as many
    turns or one fewer."""

    def ends(group: int) -> float:
        return makespan(
            interleaved(
                num_stages, num_microbatches, num_chunks=num_chunks, group=group, fused=True
            ),
            UNIT,
        )

    turns = num_microbatches // num_stages
    equal = (-(-num_microbatches // n) for n in (turns, turns - 1) if n > 0)
    groups = [g for g in equal if num_stages < g < 2 * num_stages]
    return min([num_stages, *groups], key=ends) if num_microbatches % num_stages else num_stages


def warm_up_forwards(num_stages: int, num_chunks: int, group: int, *, hops: int) -> tuple[int, ...]:
    """Forwards that each stage runs before it alternates with backwards.

    The first group passes all chunks but the last. A stage then waits for one microbatch's way down
    the stages behind it and its gradient's way back.

    Args:
      hops: forwards that fill this wait, per stage behind: 2 fill all of it, as in Megatron-LM.
    """
    behind = reversed(range(num_stages))
    return tuple((num_chunks - 1) * group + hops * stages for stages in behind)


def depth_first(
    name: str,
    placement: Placement,
    num_microbatches: int,
    *,
    group: int = 1,
    warm_ups: Sequence[int],
    delays: Sequence[int] | None,
    num_slices: int = 1,
) -> Schedule:
    """Orders each stage as warm-up forwards, then one F, one B and one delayed W in turn.

    Args:
      placement: linear or looped.
      num_microbatches: m. The last group may be short: it is planned in full, and microbatches that
        do not exist are left out, which keeps every dependency in order.
      group: microbatches, or slices, that go through a chunk before the next chunk's turn; without
        a next chunk, any multiple of the slices.
      warm_ups: per stage, forwards before the first backward; it comes k - 1 forwards later where
        sequences have k slices.
      delays: per stage, how many backwards later each W follows its B; None for fused backwards.
      num_slices: k. Backwards take the slices of a microbatch from the last to the first.
    """
    num_passes, later = num_microbatches * num_slices, num_slices - 1
    group = max(group, num_slices)
    cells = [
        (chunk, i)
        for first in range(0, num_passes, group)
        for chunk in range(placement.num_chunks)
        for i in range(first, first + group)
    ]
    orders, peaks = [], []
    for d, (own_stages, warm_up) in enumerate(zip(placement.virtual_stages, warm_ups, strict=True)):
        warm_up += later
        last = warm_up if delays is None else warm_up + delays[d]
        backwards = [(Kind.BW, last)] if delays is None else [(Kind.B, warm_up), (Kind.W, last)]
        # The kinds that the stage alternates between, with virtual stages by chunk, and delay.
        turns = [
            (Kind.F, own_stages, 0),
            *((kind, own_stages[::-1], delay) for kind, delay in backwards),
        ]
        order = []
        for k in range(len(cells) + last):
            for kind, virtual_stages, delay in turns:
                if delay <= k < delay + len(cells):
                    chunk, i = cells[k - delay]
                    if kind is not Kind.F:
                        i = nth_backward(i, num_slices)
                    if i < num_passes:
                        order.append(Action(virtual_stages[chunk], kind, i))
        orders.append(tuple(order))
        peaks.append(min(num_passes * placement.num_chunks, last + 1))
    return Schedule(
        name,
        placement,
        num_microbatches,
        tuple(orders),
        tuple(peaks),
        num_slices=num_slices,
    )
