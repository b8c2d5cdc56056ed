"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

import dataclasses

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.generators.breadth_first import breadth_first


def gpipe(
    num_stages: int, num_microbatches: int, *, num_slices: int = 1, fused: bool = False
) -> Schedule:
    """Orders every forward before every backward.

    The split form puts W directly after its B: running all B first would not end sooner and would
    keep the values that B passes to W for every microbatch. With slices it is TeraPipe.

    ============  =====================================================================
    bubble        fused (p-1)(F+B+W), split (p-1)(F+B), added to the m(F+B+W) of work
    in flight     m on every stage
    k slices      bubble / k; as much in flight
    constraints   p >= 1, m >= 1, v = 1
    source        Huang et al., "GPipe", arXiv 1811.06965; slices: Li et al., "TeraPipe",
                  arXiv 2102.07988
    ============  =====================================================================

    Example:
      >>> [str(action) for action in gpipe(1, 2).orders[0]]
      ['0F0', '0F1', '0B0', '0W0', '0B1', '0W1']
    """
    ordered = breadth_first(
        num_stages, num_microbatches, num_chunks=1, num_slices=num_slices, fused=fused
    )
    return dataclasses.replace(ordered, name="gpipe-fused" if fused else "gpipe")
