"""DualPipe-V: the V-shaped half of DeepSeek's DualPipe, with one copy of the weights."""

from __future__ import annotations

import collections

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.placement import wave


def dualpipe_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Pairs the forward of one chunk with the backward of the other, on the V placement.

    Each stage has eight phases. In the middle ones every forward runs beside a backward, which
    hides their communication on hardware that overlaps two passes. Some W wait until the cool-down.

    ============  =====================================================================
    bubble        (p-1)/2 in full-stage units at F=B=W, m >= 2p
    in flight     at most 2p+1 chunks: p + 1/2 microbatches of a full stage
    constraints   p >= 1, m >= 1, v = 2 on the V placement; for m < 2p the schedule is that of 2p
                  microbatches without the surplus ones
    source        DeepSeek-AI, "DeepSeek-V3", arXiv 2412.19437; DualPipe-V is the "cut in half" form
                  published with its code
    ============  =====================================================================

    Example:
      >>> dualpipe_v(4, 8).peak_in_flight
      (9, 9, 9, 9)
    """
    planned = max(num_microbatches, 2 * num_stages)
    orders = tuple(
        tuple(
            action
            for action in _stage_order(d, num_stages, planned)
            if action.microbatch < num_microbatches
        )
        for d in range(num_stages)
    )
    return Schedule(
        name="dualpipe-v",
        placement=wave(num_stages),
        num_microbatches=num_microbatches,
        orders=orders,
        peak_in_flight=(min(2 * num_microbatches, 2 * num_stages + 1),) * num_stages,
    )


def _stage_order(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """The eight phases, of lengths that depend on the stages before and behind this one."""
    behind, upto = num_stages - stage - 1, stage + 1
    virtual_stages = (stage, 2 * num_stages - stage - 1)
    done: collections.Counter[tuple[Kind, int]] = collections.Counter()
    put_off: collections.deque[Action] = collections.deque()
    order: list[Action] = []

    def run(kind: Kind, chunk: int) -> Action:
        action = Action(virtual_stages[chunk], kind, done[kind, chunk])
        done[kind, chunk] += 1
        order.append(action)
        return action

    def backward(chunk: int, *, later: bool = False) -> None:
        b = run(Kind.B, chunk)
        put_off.append(Action(b.virtual_stage, Kind.W, b.microbatch))
        if not later:
            weights()

    def weights() -> None:
        order.append(put_off.popleft())

    for _ in range(2 * behind):
        run(Kind.F, 0)
    for _ in range(upto):
        run(Kind.F, 0)
        run(Kind.F, 1)
    for _ in range(behind):
        backward(1)
        run(Kind.F, 1)
    for _ in range(num_microbatches - 2 * num_stages + upto):
        run(Kind.F, 0)
        backward(1)
        run(Kind.F, 1)
        backward(0)
    for _ in range(behind):
        backward(1)
        run(Kind.F, 1)
        backward(0)
    # From the middle of this phase on, W waits: the stages upstream want their gradients first.
    for k in range(2 * upto):
        backward(1 - k % 2, later=k >= upto)
    for _ in range(behind):
        weights()
        backward(0, later=True)
    while put_off:
        weights()
    return order
