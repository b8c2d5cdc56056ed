"""Asynchronous pipelines: the actions of every tick in a pipeline that never drains.

Minibatches of N microbatches follow each other without a gap; g counts microbatches through all of
them, and one enters every tick. A *part* is a group of parameters that is read and updated
together: the layers of a stage, the embedding, the head. Ticks, delays and versions are integer
arithmetic in the tick and the stage, so that traced integers can go through it as well.

Source: Yang et al., PipeMare, arXiv 1910.05124; PipeDream, arXiv 1806.03377; PipeDream-2BW,
arXiv 2006.09503.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.problems import Problem, below_one, refuse
from jaxpipe.schedule.show.draw import check_width
from jaxpipe.schedule.simulate import UNIT, Costs

ASYNCHRONOUS_METHODS: dict[str, str] = {
    "pipemare": "forward and backward read the newest weights",
    "pipedream": "the backward reads the version that its forward read (weight stashing)",
    "2bw": "minibatch k reads version k-1 everywhere (two versions)",
}
"""Rules for which weights are read, by the method's name."""

Integers: TypeAlias = Any
"""An integer, an array of them, or a traced one."""


@dataclasses.dataclass(frozen=True)
class PartTicks:
    """Ticks of a part's work on microbatch g: forward in g + forward, gradient in g + backward.

    If it recomputes, it runs forward again in tick g + recompute, and its segment starts from the
    input kept in tick g + forward.
    """

    forward: Integers
    backward: Integers
    recompute: Integers = None

    def start(self, kind: Kind) -> Integers:
        """Ticks from a microbatch's entry to an action."""
        return {Kind.F: self.forward, Kind.R: self.recompute}.get(kind, self.backward)


@dataclasses.dataclass(frozen=True)
class SteadyState:
    """The rules of an asynchronous pipeline.

    In tick t stage d (from 0) runs F of microbatch t - d, then its backward of microbatch
    t - 2P + 1 + d, then, if that was the last of a minibatch, its update.

    With recomputation, stages form segments of S. F keeps only the input of each segment; the
    segment runs forward again, one stage per tick, so that its last stage has the residuals in the
    tick of its backward. Stage d keeps them for 2(e-d)+1 microbatches, e being the last stage of
    its segment.

    ============  =====================================================================
    bubble        1 - mean / largest cost of a stage, 0 if all are alike; a fill of 2P-1 ticks once
    in flight     2(P-d) microbatches on stage d
    delay         ceil((2(P-d)-1-j)/N) updates, forward of a minibatch's microbatch j; 2bw: 1
    constraints   P >= 1, N >= 1, v = 1; 2bw: N >= 2P-1
    ============  =====================================================================

    Args:
      num_stages: P.
      num_microbatches: N, the microbatches of a minibatch.
      method: a name in `ASYNCHRONOUS_METHODS`.
      recompute_segment: S, from 1 to P, or None for no recomputation.

    Raises:
      ValueError: an unknown method, a number out of range, or 2bw with a delay of more than one
        update.

    Example:
      >>> steady = SteadyState(4, 2)
      >>> [steady.delay(steady.stage(d), 0) for d in range(4)]
      [4, 3, 2, 1]
    """

    num_stages: int
    num_microbatches: int
    method: str = "pipemare"
    recompute_segment: int | None = None

    def __post_init__(self) -> None:
        counts = {"num_stages": self.num_stages, "num_microbatches": self.num_microbatches}
        problems = below_one(**counts)
        if self.method not in ASYNCHRONOUS_METHODS:
            rule = f"is not asynchronous; choose one of {', '.join(ASYNCHRONOUS_METHODS)}"
            problems.append(Problem("method", self.method, rule))
        segment = self.recompute_segment
        if segment is not None and not 1 <= segment <= self.num_stages:
            nearest = {"recompute_segment": min(max(segment, 1), max(self.num_stages, 1))}
            rule = f"must be a number of stages from 1 to {self.num_stages}"
            problems.append(Problem("recompute_segment", segment, rule, nearest, counts))
        needed = 2 * self.num_stages - 1
        if self.method == "2bw" and not problems and self.num_microbatches < needed:
            rule = (
                "keeps two weight versions: $num_microbatches on "
                f"{self.num_stages} stages needs more"
            )
            nearest = {"num_microbatches": needed}
            problems.append(Problem("method", self.method, rule, nearest, counts))
        refuse(problems)

    def kinds(self, *, fused: bool) -> tuple[Kind, ...]:
        """The kinds of action, in their order within a tick; ``fused`` says whether B and W are
        BW."""
        again = () if self.recompute_segment is None else (Kind.R,)
        return (*again, Kind.F, *((Kind.BW,) if fused else (Kind.B, Kind.W)))

    def stage(self, d: Integers) -> PartTicks:
        """The layers of stage d, from 0."""
        backward = 2 * self.num_stages - 1 - d
        if self.recompute_segment is None:
            return PartTicks(d, backward)
        return PartTicks(d, backward, backward - 2 * (self._segment_end(d) - d))

    def _segment_end(self, d: Integers) -> Integers:
        segment, last = self.recompute_segment or 1, self.num_stages - 1
        return -_at_least(-last, -(d // segment * segment + segment - 1))

    def begins_segment(self, d: Integers) -> Integers:
        """Says whether stage d keeps its input, from which its segment is recomputed."""
        return d % (self.recompute_segment or 1) == 0

    @property
    def recompute_edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of each stage and the next of its segment, if the pipeline recomputes."""
        stages = () if self.recompute_segment is None else range(1, self.num_stages)
        return tuple((d - 1, d) for d in stages if not self.begins_segment(d))

    @property
    def embed(self) -> PartTicks:
        """The embedding: looked up with the first stage's forward, updated with it."""
        return self.stage(0)

    @property
    def head(self) -> PartTicks:
        """The head: forward and backward at once, after the last stage's forward."""
        return PartTicks(self.num_stages - 1, self.num_stages - 1)

    def parts(self, d: Integers) -> dict[str, PartTicks]:
        """The parts of the model by name, with the layers of stage d."""
        return {"layers": self.stage(d), "embed": self.embed, "head": self.head}

    @property
    def num_slots(self) -> int:
        """Microbatches in flight on the first stage."""
        return 2 * self.num_stages

    @property
    def residual_slots(self) -> int:
        """The most microbatches whose residuals any stage keeps."""
        if self.recompute_segment is None:
            return self.num_slots
        return 2 * self.recompute_segment - 1

    @property
    def input_slots(self) -> int:
        """Microbatches whose input the first segment keeps until it is recomputed."""
        if self.recompute_segment is None:
            return 0
        return self.num_slots - self.residual_slots

    @property
    def num_versions(self) -> int:
        """Weight versions that a stage keeps, the newest included; as many as stage 0 needs."""
        if self.method == "pipemare":
            return 1
        return 2 if self.method == "2bw" else 1 + self.delay(self.stage(0), 0)

    def num_sums(self, *, tied: bool) -> int:
        """Minibatches whose gradients of the embedding are being summed at once.

        If the head reads its parameters as well, later minibatches reach the head before the
        embedding has finished earlier ones.
        """
        between = self.embed.backward - self.head.backward
        return 1 + -(-between // self.num_microbatches) if tied else 1

    @property
    def drain_ticks(self) -> int:
        """Ticks from the last microbatch's entry to its last gradient."""
        return 2 * self.num_stages - 1

    def full_utilization(self, costs: Costs | Sequence[Costs]) -> float:
        """Share of the time of a full pipeline in which a stage works.

        A tick is F, the second forward of a pipeline that recomputes, B and W of one microbatch on
        every stage, and lasts as long as the slowest stage and one exchange of messages.

        The share is the mean over the largest time that a tick takes on a stage: 1 if all stages
        are alike and messages take no time. Costs are of a stage's layers; or, where stages differ,
        of every stage.

        Raises:
          ValueError: there is not one cost for every stage.

        Example:
          >>> SteadyState(4, 2).full_utilization([Costs(cost, cost, cost) for cost in (1, 4, 2, 1)])
          0.5
        """
        stages = self.num_stages
        costs = [costs] * stages if isinstance(costs, Costs) else costs
        if len(costs) != stages:
            raise ValueError(
                f"There are {len(costs)} costs for num_stages={stages}.\n"
                f"Nearest valid: {stages}, or one for all."
            )
        forwards = 1 if self.recompute_segment is None else 2
        work = [forwards * cost.f + cost.b + cost.w for cost in costs]
        exchange = max(cost.message for cost in costs) if stages > 1 else 0.0
        return math.fsum(work) / (stages * (max(work) + exchange))

    def utilization(self, minibatches: int, costs: Costs | Sequence[Costs] = UNIT) -> float:
        """Share of the time in which a stage works, of a run of k minibatches from filling to
        draining: `full_utilization` times N k / (N k + 2P-1)."""
        work = minibatches * self.num_microbatches
        return self.full_utilization(costs) * (work / (work + self.drain_ticks))

    def work_ratio(self, minibatch: int) -> float:
        """Share of F and backwards that run in the ticks in which a minibatch enters, by its number
        since the pipeline was last empty."""
        size, end = self.num_microbatches, (minibatch + 1) * self.num_microbatches
        parts = [self.stage(d) for d in range(self.num_stages)]
        begins: list[int] = [tick for part in parts for tick in (part.forward, part.backward)]
        return sum(min(max(end - tick, 0), size) for tick in begins) / (size * len(begins))

    @property
    def loss_lag(self) -> int:
        """Number of minibatches that enter after a minibatch before all its losses are known."""
        lag: int = -(-self.head.forward // self.num_microbatches)
        return lag

    def loss_slot(self, g: Integers) -> Integers:
        """The place of microbatch g's minibatch among the losses that are not yet known."""
        return g // self.num_microbatches % (1 + self.loss_lag)

    def delay(self, part: PartTicks, j: Integers) -> Integers:
        """Number of earlier minibatches whose updates the forward of a minibatch's microbatch j
        misses when the pipeline is full."""
        if self.method == "2bw":
            return 1 + 0 * j
        return -((j - (part.backward - part.forward)) // self.num_microbatches)

    def mean_delay(self, part: PartTicks, kind: Kind = Kind.F) -> Integers:
        """The mean over a minibatch of the updates that F, or R, misses: of F PipeMare's tau."""
        if self.method == "2bw":
            return 1.0
        return (part.backward - part.start(kind)) / self.num_microbatches

    # Weight versions: version k has seen the updates of minibatches 0..k-1.

    def newest(self, part: PartTicks, tick: Integers, first: Integers = 0) -> Integers:
        """The version a part has reached before its update in a tick, counted since the pipeline
        was last empty and filled with version ``first``."""
        return _at_least(first, first + (tick - part.backward) // self.num_microbatches)

    def version(self, part: PartTicks, kind: Kind, g: Integers, first: Integers = 0) -> Integers:
        """The version that an action of this kind reads for microbatch g."""
        if self.method == "2bw":
            return _at_least(0, first + g // self.num_microbatches - 1)
        start = part.start(kind) if self.method == "pipemare" else part.forward
        return self.newest(part, g + start, first)

    def updates(self, g: Integers) -> Integers:
        """Says whether an update follows the gradient of microbatch g, as it ends its minibatch."""
        return g % self.num_microbatches == self.num_microbatches - 1


def _at_least(bound: Integers, value: Integers) -> Integers:
    """The larger of two integers, traced ones included."""
    return value + (bound - value) * (value < bound)


def steady_text(steady: SteadyState) -> str:
    """Draws the N ticks in which one minibatch enters a full pipeline.

    A cell has F and B of one stage and tick, and R between them if the pipeline recomputes: the
    microbatch, numbered within its minibatch, and after @ the weight version it reads, counted from
    the first stage's newest at the start of the period. ``+`` marks the update that ends a
    minibatch. The delays follow, per stage.

    Example:
      >>> for line in steady_text(SteadyState(2, 2)).splitlines()[:3]:
      ...     print(line)
      tick     0           1
      stage 0  F0@0 B1@0+  F1@1 B0@1
      stage 1  F1@1 B0@1   F0@1 B1@1+
    """
    N = steady.num_microbatches
    cell = "F@0 B@0   " if steady.recompute_segment is None else "F@0 R@0 B@0   "
    check_width(N * (len(cell) + cell.count("@") * len(str(N - 1))), "draw fewer microbatches")
    # In the period of this minibatch the pipeline is first full and free of effects of its filling.
    minibatch = 2 * math.ceil(steady.num_slots / N)
    start = minibatch * N
    base = steady.newest(steady.stage(0), start)
    rows = [["tick", *(str(t) for t in range(N))]]
    parts = [steady.stage(d) for d in range(steady.num_stages)]
    for d, part in enumerate(parts):
        rows.append([f"stage {d}", *(_cell(steady, part, start + t, base) for t in range(N))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    lines += ["", "updates that F of microbatch j misses, j = 0, 1, ...; their mean, tau"]
    for d, part in enumerate(parts):
        delays = " ".join(str(steady.delay(part, j)) for j in range(N))
        lines.append(f"stage {d}  {delays}  {steady.mean_delay(part):g}")
    in_flight = ", ".join(str(part.backward - part.forward + 1) for part in parts)
    lines += ["", f"weight versions kept: {steady.num_versions}"]
    lines.append(f"microbatches in flight, per stage: {in_flight}")
    if steady.recompute_segment is not None:
        kept = ", ".join(str(part.backward - part.recompute + 1) for part in parts)
        lines.append(f"of them with residuals, per stage: {kept}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _cell(steady: SteadyState, part: PartTicks, tick: int, base: int) -> str:
    N = steady.num_microbatches
    kinds = (Kind.F, Kind.B) if part.recompute is None else (Kind.F, Kind.R, Kind.B)
    numbers = {kind: tick - part.start(kind) for kind in kinds}
    runs = (f"{k}{g % N}@{steady.version(part, k, g) - base}" for k, g in numbers.items())
    return " ".join(runs) + ("+" if steady.updates(numbers[Kind.B]) else "")
