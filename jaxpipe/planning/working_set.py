"""The most that exists at once of what operations make: what a layer needs beside what is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence

_MUCH = 16
"""How many times larger the largest operand is than results that are little of much."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """One kernel, as far as memory is concerned.

    Args:
      makes: its results.
      reads: what it is made from.
      by_element: whether each element of a result depends on the same element of what is read.
    """

    makes: tuple[Hashable, ...]
    reads: frozenset[Hashable]
    by_element: bool


def most_at_once(
    operations: Sequence[Operation],
    size: Callable[[Hashable], float],
    returned: Collection[Hashable] = (),
) -> float:
    """The most bytes at once of what the operations make.

    What is made lives until it is last read, or to the end if it is returned. What is element by
    element takes the place of an operand of its size that nobody reads later; XLA makes several
    such results of the same operands in one kernel.

    Example:
      >>> matmul = Operation(("y",), frozenset("x"), by_element=False)
      >>> activation = Operation(("z",), frozenset("y"), by_element=True)
      >>> most_at_once([matmul, activation], lambda name: 8.0, returned="z")
      8.0
    """
    kernels = _joined(_reduced_early(operations, size), size)
    last = {v: n for n, one in enumerate(kernels) for v in (*one.makes, *one.reads)}
    made = {v for one in kernels for v in one.makes}
    last |= {v: len(kernels) for v in returned}
    live = most = 0.0
    for n, one in enumerate(kernels):
        ends = [v for v in one.reads & made if last[v] == n]
        free = [size(v) for v in ends] if one.by_element else []
        taken = 0.0
        for v in one.makes:
            if size(v) in free:
                free.remove(size(v))
                taken += size(v)
            live += size(v)
        most = max(most, live - taken)
        live -= sum(size(v) for v in (*ends, *one.makes) if last[v] == n)
    return most


def _reduced_early(
    operations: Sequence[Operation], size: Callable[[Hashable], float]
) -> list[Operation]:
    """Operations with those that make little of much as soon as they can be made: XLA makes sums in
    the kernel of what else reads their operands."""
    found: list[Operation] = []
    for one in operations:
        made, read = sum(map(size, one.makes)), max(map(size, one.reads), default=0.0)
        place = len(found)
        if one.by_element and one.makes and made < read / _MUCH:
            while place and one.reads.isdisjoint(found[place - 1].makes):
                place -= 1
        found.insert(place, one)
    return found


def _joined(operations: Sequence[Operation], size: Callable[[Hashable], float]) -> list[Operation]:
    """Operations in their order, with those joined that XLA runs as one kernel: results of one
    size, element by element, of a common operand, none of them read before the last is made.

    What stores its results elsewhere comes last: XLA writes slots when nothing else is left to do.
    """
    kernels: list[Operation] = []  # from the last to the first
    late: list[Operation] = []
    for one in reversed(operations):
        if one.by_element and not one.makes:
            late.append(one)
            continue
        place = _kernel_to_join(one, kernels, size)
        if place is None:
            kernels.append(one)
            continue
        other = kernels[place]
        kernels[place] = Operation(one.makes + other.makes, one.reads | other.reads, True)
    return kernels[::-1] + late[::-1]


def _kernel_to_join(
    one: Operation, later: Sequence[Operation], size: Callable[[Hashable], float]
) -> int | None:
    """The number of the first kernel after an operation that can do its work, if any."""
    if not one.by_element:
        return None
    for n in reversed(range(len(later))):
        if not later[n].reads.isdisjoint(one.makes):
            return None
        alike = (
            later[n].by_element and later[n].makes and size(later[n].makes[0]) == size(one.makes[0])
        )
        if alike and not later[n].reads.isdisjoint(one.reads):
            return n
    return None
