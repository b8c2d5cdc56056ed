"""Depth-first orders: 1F1B and its kin, whose microbatches go to all chunks in small groups.

`depth_first` is the family's one algorithm.
"""

from collections.abc import Sequence

from jaxpipe.schedule.actions import Action, Kind, Schedule, nth_backward
from jaxpipe.schedule.placement import Placement, linear, looped
from jaxpipe.schedule.problems import Problem, refuse


def one_f_one_b(
    num_stages: int, num_microbatches: int, *, num_slices: int = 1, fused: bool = False
) -> Schedule:
    """Orders each stage as a few warm-up forwards, then one forward and one backward in turn.

    Stage d warms up with p-d-1 forwards: one for each stage behind it. The split form puts W
    directly after its B, which keeps the fused form's memory and sends the gradient on
    before W runs. With slices it is Seq1F1B: a slice is one k-th of the work and of the memory, and
    the first backward, of a last slice, comes after k - 1 more forwards.

    Source: Narayanan et al., arXiv 2006.09503 (there "PipeDream-Flush"); slices: Sun et al., arXiv
    2406.03488 (Seq1F1B).

    Example:
      >>> [str(action) for action in one_f_one_b(2, 2, fused=True).orders[0]]
      ['0F0', '0F1', '0BW0', '0BW1']
    """
    return depth_first(
        "1f1b-fused" if fused else "1f1b",
        linear(num_stages),
        num_microbatches,
        warm_ups=range(num_stages - 1, -1, -1),
        delays=None if fused else (0,) * num_stages,
        num_slices=num_slices,
    )


def eager_1f1b(
    num_stages: int, num_microbatches: int, *, num_slices: int = 1, fused: bool = False
) -> Schedule:
    """Runs 1F1B with twice the warm-up, which leaves messages the time of an F to travel.

    Between a forward and its backward, each hop has a whole period of the steady state, in place of
    an F and a backward. Without the time of messages it ends when 1F1B does, and keeps 2(p-d)-1
    microbatches on stage d.

    Source: Zhuang et al., "On Optimizing the Communication of Model Parallelism", arXiv 2211.05322;
    JaxPP's ``Eager1F1B``.

    Example:
      >>> eager_1f1b(4, 8).peak_in_flight
      (7, 5, 3, 1)
    """
    return depth_first(
        "eager-1f1b-fused" if fused else "eager-1f1b",
        linear(num_stages),
        num_microbatches,
        warm_ups=range(2 * num_stages - 2, -1, -2),
        delays=None if fused else (0,) * num_stages,
        num_slices=num_slices,
    )


def zb_h1(num_stages: int, num_microbatches: int, *, num_slices: int = 1) -> Schedule:
    """Runs 1F1B with W deferred by d backwards on stage d, which levels the memory of all stages.

    Source: arXiv 2401.10241, ZB-H1.

    Example:
      >>> [str(action) for action in zb_h1(2, 2).orders[1]]
      ['1F0', '1B0', '1F1', '1B1', '1W0', '1W1']
    """
    return depth_first(
        "zb-h1",
        linear(num_stages),
        num_microbatches,
        warm_ups=range(num_stages - 1, -1, -1),
        delays=range(num_stages),
        num_slices=num_slices,
    )


def zb_h2(num_stages: int, num_microbatches: int, *, num_slices: int = 1) -> Schedule:
    """Fills the warm-up with forwards and the cool-down with W: stages never idle at F=B=W.

    With slices its longer warm-up is slack: stages wait less for later slices, which take longer.

    At W <= F, W <= B and m >= 2p-1 the bubble in the longest span of a stage is (p-1)(F+B-2W); the
    makespan is longer, as the last stage starts (p-1)F later. With fewer microbatches the warm-up
    lies between those of ZB-H1 and ZB-H2, so that it never ends later than ZB-H1.

    Source: arXiv 2401.10241, ZB-H2.

    Example:
      >>> zb_h2(4, 8).peak_in_flight
      (7, 7, 7, 7)
    """
    # More forwards than this would be followed by no steady state.
    most = max(0, num_microbatches * num_slices - num_stages)
    return depth_first(
        "zb-h2",
        linear(num_stages),
        num_microbatches,
        warm_ups=[behind + min(behind, most) for behind in reversed(range(num_stages))],
        delays=[d + min(d, most) for d in range(num_stages)],
        num_slices=num_slices,
    )


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

    Stage d keeps min(m v, 2(p-d-1) + (v-1)g + 1) chunks of groups of g in flight; if g < p,
    min(m v, p-d + (v-1)g).

    Source: Narayanan et al., arXiv 2104.04473 (Megatron-LM).

    Args:
      num_microbatches: m, at least 1. If it is not a multiple of the group, the schedule is that of
        the next multiple without the surplus microbatches.
      group: microbatches that go through a chunk before the next chunk's turn, at least p/2. By
        default p; with fused backwards the smallest from p on that leaves no last group of fewer
        than p, as there is no W to fill its gaps. With slices it counts these, and is the next
        multiple of k.

    Raises:
      ValueError: the group is smaller than half of the number of stages.

    Example:
      >>> interleaved(4, 8, fused=True).peak_in_flight
      (11, 9, 7, 5)
    """
    num_passes = num_microbatches * num_slices
    if group is None:
        group = _fused_group(num_stages, num_passes, num_slices) if fused else num_stages
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


def _fused_group(num_stages: int, num_passes: int, num_slices: int) -> int:
    """Chooses the smallest group that ends first at F=B=W: no last group has fewer than p."""
    least = num_stages + -num_stages % num_slices
    groups = range(least, num_passes, num_slices)
    whole = (g for g in groups if num_passes % g == 0 or num_passes % g >= num_stages)
    return next(whole, max(least, num_passes))


def interleaved_overlapped(
    num_stages: int, num_microbatches: int, *, num_chunks: int = 2, fused: bool = False
) -> Schedule:
    """Runs `interleaved` with each forward of the steady state together with the next backward.

    These pairs hide what layers communicate (`Schedule.overlapped`). The results of a pair leave
    when it ends, so each hop takes a period of the steady state, as it does in `interleaved`. One
    more warm-up forward is enough: no backward needs the forward beside it. With one chunk it is
    1F1B in pairs, with twice the warm-up. The split form puts W after its pair.

    Stage d keeps min(m v, 2(p-d-1) + (v-1)g + 2) chunks in flight; g is the group of `interleaved`.

    Source: Megatron-LM's ``--overlap-moe-expert-parallel-comm``.

    Example:
      >>> schedule = interleaved_overlapped(4, 8, num_chunks=1, fused=True)
      >>> schedule.peak_in_flight, [str(action) for action in schedule.overlapped[:2]]
      ((8, 6, 4, 2), ['0F7', '1F5'])
    """
    group = _fused_group(num_stages, num_microbatches, 1) if fused else num_stages
    alternating = warm_up_forwards(num_stages, num_chunks, group, hops=2)
    return depth_first(
        "interleaved-overlapped-fused" if fused else "interleaved-overlapped",
        looped(num_stages, num_chunks=num_chunks),
        num_microbatches,
        group=group,
        warm_ups=[forwards + 1 for forwards in alternating],
        delays=None if fused else (0,) * num_stages,
        overlaps=True,
    )


def interleaved_zb(
    num_stages: int, num_microbatches: int, *, num_chunks: int = 2, num_slices: int = 1
) -> Schedule:
    """Runs 1F1B over chunks, with W deferred by d backwards on stage d.

    Without W in its way a gradient is back twice as fast, so half of the warm-up of `interleaved`
    is enough, and all stages keep the same. The microbatches go in floor(m/p) groups.

    In flight are min(m v, (v-1)g + p) chunks, g = ceil(m / max(1, floor(m/p))) the group.

    Source: arXiv 2401.10241, on the order of arXiv 2104.04473; groups and warm-up as in PyTorch's
    ScheduleInterleavedZeroBubble.

    Example:
      >>> interleaved_zb(4, 8).peak_in_flight
      (8, 8, 8, 8)
    """
    num_passes = num_microbatches * num_slices
    group = -(-num_passes // max(1, num_passes // num_stages))
    group += -group % num_slices
    return depth_first(
        "interleaved-zb",
        looped(num_stages, num_chunks=num_chunks),
        num_microbatches,
        group=group,
        warm_ups=warm_up_forwards(num_stages, num_chunks, group, hops=1),
        delays=range(num_stages),
        num_slices=num_slices,
    )


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
    overlaps: bool = False,
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
      overlaps: whether F and the backward of one turn are a pair (`Schedule.overlapped`).
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
    orders, peaks, overlapped = [], [], list[Action]()
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
            turn = []
            for kind, virtual_stages, delay in turns:
                if delay <= k < delay + len(cells):
                    chunk, i = cells[k - delay]
                    if kind is not Kind.F:
                        i = nth_backward(i, num_slices)
                    if i < num_passes:
                        turn.append(Action(virtual_stages[chunk], kind, i))
            if overlaps and len(turn) > 1 and turn[0].kind is Kind.F:
                overlapped.append(turn[0])
            order += turn
        orders.append(tuple(order))
        peaks.append(min(num_passes * placement.num_chunks, last + 1))
    return Schedule(
        name,
        placement,
        num_microbatches,
        tuple(orders),
        tuple(peaks),
        overlapped=tuple(overlapped),
        num_slices=num_slices,
    )
