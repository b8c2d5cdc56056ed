"""The most that exists at once of what operations make: what a layer needs beside what is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence


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
    kernels = _joined(operations, size)
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


def _joined(operations: Sequence[Operation], size: Callable[[Hashable], float]) -> list[Operation]:
    """Operations in their order, with those joined that XLA runs as one kernel: results of one
    size, element by element, of a common operand, none of them read before the last is made."""
    kernels: list[Operation] = []  # from the last to the first
    for one in reversed(operations):
        if one.by_element and not one.makes:
            kernels.insert(_place_of_store(one, kernels, size), one)
            continue
        place = _kernel_to_join(one, kernels, size)
        if place is None:
            kernels.append(one)
            continue
        other = kernels[place]
        kernels[place] = Operation(one.makes + other.makes, one.reads | other.reads, True)
    return kernels[::-1]


def _place_of_store(
    one: Operation, later: Sequence[Operation], size: Callable[[Hashable], float]
) -> int:
    """Where what stores its result elsewhere runs: after the first kernel that reads, element by
    element, what it reads as well. XLA writes slots late, so that the operand stays till then."""
    for n in reversed(range(len(later))):
        shared = {size(v) for v in later[n].reads & one.reads}
        if later[n].by_element and later[n].makes and size(later[n].makes[0]) in shared:
            return n
    return len(later)


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
