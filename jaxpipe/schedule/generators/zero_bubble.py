"""Zero bubble: W, which nothing waits for, is deferred until it fills a gap.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241. ZB-V, from the same paper,
is in `jaxpipe.schedule.generators.v_schedules`.
"""

from __future__ import annotations

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.generators.interleaved import depth_first, warm_up_forwards
from jaxpipe.schedule.placement import linear, looped


def zb_h1(num_stages: int, num_microbatches: int, *, num_slices: int = 1) -> Schedule:
    """Runs 1F1B with W deferred by d backwards on stage d, which levels the memory of all stages.

    ============  =====================================================================
    bubble        (p-1)(F+B-W), added to the m(F+B+W) of work; W <= F, W <= B, m >= p
    in flight     min(m, p) on every stage
    k slices      the same of m k microbatches of 1/k, and k-1 more in flight
    constraints   p >= 1, m >= 1, v = 1
    source        arXiv 2401.10241, ZB-H1
    ============  =====================================================================

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

    ============  =====================================================================
    bubble        at W <= F, W <= B, m >= 2p-1: (p-1)(F+B-2W) in the longest span of a stage and
                  (p-1) max(F, F+B-2W) in the makespan, as the last stage starts (p-1)F later
    in flight     min(m, 2p-1) on every stage
    k slices      the same of m k microbatches of 1/k, and k-1 more in flight
    constraints   p >= 1, m >= 1, v = 1; with fewer microbatches than 2p-1 the warm-up lies between
                  those of ZB-H1 and ZB-H2, so that it never ends later than ZB-H1
    source        arXiv 2401.10241, ZB-H2
    ============  =====================================================================

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


def interleaved_zb(
    num_stages: int, num_microbatches: int, *, num_chunks: int = 2, num_slices: int = 1
) -> Schedule:
    """Runs 1F1B over chunks, with W deferred by d backwards on stage d.

    Without W in its way a gradient is back twice as fast, so half of the warm-up of `interleaved`
    is enough, and all stages keep the same. The microbatches go in floor(m/p) groups.

    ============  =====================================================================
    bubble        (p-1)(F+B-W)/v, added to the m(F+B+W) of work; W <= F, W <= B, m a
                  multiple of p
    in flight     min(m v, (v-1)g + p) chunks on every stage, g = ceil(m / max(1, floor(m/p)))
                  the group: p v if p divides m
    k slices      the same of m k microbatches of 1/k, and k-1 more in flight
    constraints   p >= 1, m >= 1, v >= 1
    source        arXiv 2401.10241, on the order of arXiv 2104.04473; groups and warm-up as in
                  PyTorch's ScheduleInterleavedZeroBubble
    ============  =====================================================================

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
