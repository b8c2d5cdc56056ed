"""List scheduling: every stage always starts the most urgent pass that is ready.

Placements on which passes meet on a stage in ways that no short formula describes are ordered so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxpipe.schedule.actions import Action, Kind
from jaxpipe.schedule.generators import events
from jaxpipe.schedule.generators.earliest import HELD
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.simulate import UNIT


def list_schedule(
    placement: Placement, num_microbatches: int, *, limits: Sequence[int], fused: bool
) -> tuple[tuple[Action, ...], ...]:
    """Runs the pipeline event by event, at F=B=W, and records what each stage does.

    The pass that is due first goes first, forward or backward; W fills the remaining gaps. A pass
    is due when it would start if no stage waited and microbatches entered twice as fast as a stage
    processes them. At that rate earlier microbatches pull ahead, but a backward does not always
    precede a forward, which would open gaps that no other backward fits.

    Args:
      limits: per virtual stage, how many chunks its stage may hold before the virtual stage starts
        another forward. At least 1, and growing from chunk to chunk
        of a stage, so that the farthest microbatch always finds room and nothing stops.
      fused: run B and W of a microbatch as one action.
    """
    stages = [
        _UrgentStage(own_stages, limits, placement, fused)
        for own_stages in placement.virtual_stages
    ]
    events.run_stages(stages, placement, num_microbatches)
    return tuple(tuple(events.actions(stage.passes, stage.order)) for stage in stages)


class _UrgentStage(events.Stage):
    """A stage that starts the pass due first, and W if nothing else is ready; F takes 1."""

    def __init__(
        self, own_stages: Sequence[int], limits: Sequence[int], placement: Placement, fused: bool
    ) -> None:
        backward = Kind.BW if fused else Kind.B
        # B first: it wins where a forward is due at the same time.
        passes = [(kind, s) for kind in (backward, Kind.F) for s in own_stages]
        depth = placement.num_virtual_stages
        self.due = [
            s if kind is Kind.F else depth + UNIT.of(kind) * (depth - 1 - s) for kind, s in passes
        ]
        self.pace = 3 * len(own_stages) / 2
        self.limits = [limits[s] if kind is Kind.F else math.inf for kind, s in passes]
        self.in_flight = self.pending = 0  # chunks kept, and those whose W is next
        passes += [] if fused else [(Kind.W, own_stages[0])]
        super().__init__(passes, [UNIT.of(kind) for kind, _ in passes])

    def choose(self, now: float) -> int | None:
        best, earliest = None, math.inf
        for number, first_due in enumerate(self.due):
            if not self.is_ready(number, now) or self.in_flight >= self.limits[number]:
                continue
            due = first_due + self.pace * self.done[number]
            if due < earliest:
                best, earliest = number, due
        return len(self.due) if best is None and self.pending else best

    def start(self, number: int, now: float) -> None:
        super().start(number, now)
        kind = self.passes[number][0]
        self.in_flight += HELD[kind]
        self.pending += {Kind.B: 1, Kind.W: -1}.get(kind, 0)
