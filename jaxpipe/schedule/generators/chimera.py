"""Chimera: two pipelines in opposite directions, each with its own copy of the weights."""

from __future__ import annotations

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.generators.list_scheduling import list_schedule
from jaxpipe.schedule.placement import mirrored
from jaxpipe.schedule.problems import Problem, refuse


def chimera(num_stages: int, num_microbatches: int, *, fused: bool = False) -> Schedule:
    """Merges two pipelines that start at opposite ends; each fills the other's gaps.

    It can only be simulated: every stage holds the weights of two stages, and both copies'
    gradients must be summed. Virtual stages 0..p-1 are the pipeline from stage 0, p..2p-1 the one
    from stage p-1, whose microbatch i is microbatch m/2 + i of the batch.

    ============  =====================================================================
    bubble        F=B=W: fused 2(p-2) of 3m + 2(p-2) units at m = p, p even; for m > p 2p-5 (p even,
                  from 4) or 2p-3 (p odd), where repeated units would lose 2(p-2) each
    in flight     m <= p: at most p, least on the first and last stage; else p+1
    constraints   p >= 1, m even, v = 1; two copies of the weights
    source        Li and Hoefler, "Chimera", arXiv 2107.06925
    ============  =====================================================================

    Args:
      num_microbatches: m of the batch, even; each direction runs half of them.

    Raises:
      ValueError: m is odd.

    Example:
      >>> chimera(4, 4).placement.num_copies
      2
    """
    if num_microbatches % 2:
        nearest = (num_microbatches + 1,)
        refuse([Problem("num_microbatches", num_microbatches, "must be even", nearest)])
    placement, own = mirrored(num_stages), num_microbatches // 2
    # Each direction on its own is 1F1B.
    limits = [min(own, num_stages - position) for position in range(num_stages)]
    return Schedule(
        name="chimera-fused" if fused else "chimera",
        placement=placement,
        num_microbatches=own,
        orders=list_schedule(placement, own, limits=limits * 2, fused=fused),
        peak_in_flight=tuple(
            limit + other for limit, other in zip(limits, reversed(limits), strict=True)
        ),
    )
