"""Schedules as data: for every stage, an ordered list of actions.

Legend used throughout the package: p stages, v chunks per stage, s virtual stage, m microbatches,
  i microbatch, k slices per microbatch.

Where a schedule cuts the sequences of its microbatches into slices, every action runs one slice,
and the "microbatch" of an action is the number of its slice: ``i * k + j`` for slice j of
microbatch i.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
from collections.abc import Iterator, Sequence

from jaxpipe.schedule.placement import Placement

GUESTS = "pipemare", "pipedream", "2bw"
"""Names of the schedules that never drain, which `jaxpipe.asynchronous` runs."""


class Kind(enum.StrEnum):
    """Part of the computation that an action runs for one microbatch on one virtual stage."""

    # Enum hashes names in Python; actions are hashed by the hundred thousand.
    __hash__ = str.__hash__

    F = "F"
    """Forward."""
    B = "B"
    """Backward for the input: the activation gradient that the previous virtual stage waits for."""
    W = "W"
    """Backward for the weights."""
    BW = "BW"
    """Fused backward: B and W of a layer together, layer by layer."""
    R = "R"
    """F again, for its residuals; programs of `GUESTS` alone run it, and no schedule."""

    @property
    def is_forward(self) -> bool:
        """Whether the next virtual stage, not the previous one, waits for the result."""
        return self in (Kind.F, Kind.R)


HELD = {Kind.F: 1, Kind.B: 0, Kind.W: -1, Kind.BW: -1}
"""Chunks in flight that an action adds. A chunk's activations are kept from F until W or BW."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Action:
    """One pass of one microbatch through one virtual stage.

    ``str`` and :meth:`parse` are a round trip: virtual stage, kind, microbatch.

    Example:
      >>> str(Action(2, Kind.F, 0))
      '2F0'
      >>> Action.parse("13BW4")
      Action(virtual_stage=13, kind=<Kind.BW: 'BW'>, microbatch=4)
    """

    virtual_stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.virtual_stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads what ``str`` writes; raises ValueError on anything else."""
        match = re.fullmatch(r"(\d+)(F|BW|B|W)(\d+)", text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not an action: write virtual stage, kind (F, B, W or BW) and "
                "microbatch, for example '2F0'."
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order in which every stage runs its actions, without times, which come from costs.

    Args:
      name: the schedule's name, as the registry and the command line spell it.
      placement: which stage holds which virtual stage.
      num_microbatches: m; every virtual stage runs microbatches 0..m-1, or their slices.
      orders: ``orders[d]`` is what stage ``d`` runs, in order.
      peak_in_flight: the schedule's own promise, per stage: the most chunk activations that stage
        keeps from F to the action that frees them (W, or the fused backward). The validator checks
        it.
      overlapped: forwards, in any order, that each run together with the backward of another
        microbatch that follows on their stage (FB): the pair starts when both have their inputs,
        and both results are there when it ends.
      num_slices: k, the slices into which the sequences of a microbatch are cut. A slice reads what
        those before it leave on its virtual stage, so they run forwards in order, and backwards in
        the opposite order.
      ticks: ``ticks[d][k]`` is the tick, from 0, in which stage ``d`` runs action ``k`` of its
        order; None for the earliest in which it can. A tick in which a stage runs nothing takes it
        no time (`jaxpipe.schedule.pacing`), and two actions may share one (`may_share_tick`).
    """

    name: str
    placement: Placement
    num_microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    peak_in_flight: tuple[int, ...] | None = None
    overlapped: tuple[Action, ...] = ()
    num_slices: int = 1
    ticks: tuple[tuple[int, ...], ...] | None = None

    @property
    def num_passes(self) -> int:
        """Number of forwards through each virtual stage: m k."""
        return self.num_microbatches * self.num_slices

    @property
    def mixes_backwards(self) -> bool:
        """Whether some backwards are B and W, and others BW."""
        return {Kind.B, Kind.BW} <= {action.kind for order in self.orders for action in order}

    def units(self, stage: int) -> Iterator[tuple[Action, ...]]:
        """Yields what a stage runs, in order: single actions, and overlapped pairs."""
        together, order = frozenset(self.overlapped), iter(self.orders[stage])
        for action in order:
            yield (action, *itertools.islice(order, action in together))

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_chunks(self) -> int:
        return self.placement.num_chunks


def may_share_tick(actions: Sequence[Action]) -> bool:
    """Whether actions that follow each other may run in one tick: an F or a B, and a W of the same
    chunk, so that there is one chunk whose weights are used.

    Example:
      >>> [may_share_tick([*map(Action.parse, text.split())]) for text in ("1B0 1W0", "1B0 2W0")]
      [True, False]
    """
    kinds, virtual_stages = [a.kind for a in actions], {a.virtual_stage for a in actions}
    return kinds in ([Kind.F, Kind.W], [Kind.B, Kind.W]) and len(virtual_stages) == 1


def nth_backward(n: int, num_slices: int) -> int:
    """The number of the pass whose backward comes n-th, from 0: a sequence goes back from its last
    slice to its first.

    Example:
      >>> [nth_backward(n, 4) for n in range(8)]
      [3, 2, 1, 0, 7, 6, 5, 4]
    """
    return n + num_slices - 1 - 2 * (n % num_slices)


def split_backwards(schedule: Schedule) -> Schedule:
    """Replaces every BW by its B, directly followed by its W, and overlaps nothing."""
    orders = tuple(
        tuple(part for action in order for part in split_action(action))
        for order in schedule.orders
    )
    return dataclasses.replace(schedule, orders=orders, overlapped=(), ticks=None)


def split_action(action: Action) -> list[Action]:
    """Splits a BW into B and W; returns any other action as it is."""
    if action.kind is not Kind.BW:
        return [action]
    s, i = action.virtual_stage, action.microbatch
    return [Action(s, kind, i) for kind in (Kind.B, Kind.W)]


def dependencies(action: Action, *, num_virtual_stages: int) -> list[Action]:
    """The actions, of the same or another stage, whose results ``action`` reads.

    F waits for F of the previous virtual stage; B (or BW) for its own F and for B of the next
    virtual stage; W for its own B. A fused backward counts as its B.
    """
    s, i = action.virtual_stage, action.microbatch
    if action.kind is Kind.F:
        return [Action(s - 1, Kind.F, i)] if s else []
    if action.kind is Kind.W:
        return [Action(s, Kind.B, i)]
    after = [Action(s + 1, Kind.B, i)] if s + 1 < num_virtual_stages else []
    return [Action(s, Kind.F, i), *after]
