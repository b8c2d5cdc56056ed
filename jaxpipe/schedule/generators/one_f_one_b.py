"""1F1B: one forward, one backward, in turn."""

from __future__ import annotations

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.generators.interleaved import depth_first
from jaxpipe.schedule.placement import linear


def one_f_one_b(
    num_stages: int, num_microbatches: int, *, num_slices: int = 1, fused: bool = False
) -> Schedule:
    """Orders each stage as a few warm-up forwards, then one forward and one backward in turn.

    Stage d warms up with p-d-1 forwards: one for each stage behind it. The split form puts W
    directly after its B, which keeps the fused form's memory and sends the gradient on
    before W runs. With slices it is Seq1F1B: a slice is one k-th of the work and of the memory, and
    the first backward, of a last slice, comes after k - 1 more forwards.

    ============  =====================================================================
    bubble        fused (p-1)(F+B+W), split (p-1)(F+B), added to the m(F+B+W) of work
    in flight     min(m, p-d) on stage d; min(m k, p-d+k-1) slices of 1/k
    constraints   p >= 1, m >= 1, v = 1
    source        Narayanan et al., arXiv 2006.09503 (there "PipeDream-Flush"); slices: Sun et al.,
                  arXiv 2406.03488 (Seq1F1B)
    ============  =====================================================================

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
