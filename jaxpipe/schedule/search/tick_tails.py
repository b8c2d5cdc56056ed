"""What the orders of a schedule leave to do after each pass: a bound for searches of ticks.

The passes of one kind on a stage run one after another, each waits for its inputs, and a forward
waits for the pass that makes room for it. The longest chain of such waits, from what a stage has to
run next, is time that no way to cut the schedule can save.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxpipe.schedule.search.tick_engine import Engine, Floats, States, Work

_ROUNDING = 1e-9
"""Sums along a chain and sums of ticks may differ by this share."""
_F, _B, _W = range(3)


class Tails:
    """The longest chains of waits in works whose orders are given.

    Args:
      messages: of every work, what each tick ends with.
    """

    def __init__(self, engine: Engine, messages: Sequence[float]) -> None:
        shape = 3, len(engine.works), engine.num_stages, engine.size
        # By kind, work, stage and place in the queue: the chain from the start of the pass on, and
        # what one of its layers shortens.
        self._tails, self._layers = np.zeros((2, *shape))
        for w, (work, message) in enumerate(zip(engine.works, messages, strict=True)):
            start = w * (engine.none + 1)
            passes = slice(start, start + work.schedule.num_passes)
            prices = [row[passes].tolist() for row in engine.costs]
            chains = _chains(work, prices, message)
            for kind, stages in enumerate(_queues(work)):
                for d, queue in enumerate(stages):
                    self._tails[kind, w, d, : len(queue)] = [chains[kind][n] for n in queue]
                    self._layers[kind, w, d, : len(queue)] = [prices[kind][n] for n in queue]
        self._size = engine.size
        self._stages = np.arange(engine.num_stages, dtype=np.int32)[:, None] * engine.size

    def rest(self, states: States) -> Floats:
        """By state, the time from now on that it takes at least."""
        places = states.works * (len(self._stages) * self._size) + self._stages
        layers = states["layers"]
        longest = np.zeros(len(states.works))
        for kind, name in enumerate(("done_f", "done_b", "done_w")):
            head = places + states[name][0]
            left = self._tails[kind].take(head) - layers[kind] * self._layers[kind].take(head)
            np.maximum(longest, left.max(axis=0), out=longest)
        return longest * (1 - _ROUNDING)


def _queues(work: Work) -> tuple[list[Sequence[int]], ...]:
    """The passes of every stage, in order, by kind."""
    assert work.weights is not None
    return [q for [q] in work.forwards], [q for [q] in work.backwards], [*work.weights]


def _chains(
    work: Work, prices: Sequence[Sequence[float]], message: float
) -> tuple[list[float], list[float], list[float]]:
    """By kind and pass, the longest chain from its start on.

    Args:
      prices: of a layer, by kind and pass.
    """
    number, m = work.schedule.num_passes, work.schedule.num_microbatches
    layers = [count for count in work.layer_counts for _ in range(m)]
    durations = [row[k] * layers[k] for row in prices for k in range(number)]
    waits = [(first, second, durations[first] + message) for first, second in _waits(work)]
    for k in set(range(number)) - work.fused:
        # W ends a layer after B at the earliest.
        first, second = number + k, 2 * number + k
        waits.append((first, second, durations[first] + prices[_W][k] - durations[second]))
    inputs: list[list[tuple[int, float]]] = [[] for _ in durations]
    readers = [0] * len(durations)
    for first, second, lag in waits:
        inputs[second].append((first, lag))
        readers[first] += 1
    chains = [*durations]
    ready = [k for k, count in enumerate(readers) if not count]
    while ready:
        second = ready.pop()
        chain = chains[second]
        for first, lag in inputs[second]:
            chains[first] = max(chains[first], lag + chain)
            readers[first] -= 1
            if not readers[first]:
                ready.append(first)
    return chains[:number], chains[number : 2 * number], chains[2 * number :]


def _waits(work: Work) -> Iterator[tuple[int, int]]:
    """Pairs of passes of which the second starts in a later tick than the first; numbers count on
    from F to B to W."""
    schedule, queues = work.schedule, _queues(work)
    number, m, depth = schedule.num_passes, schedule.num_microbatches, schedule.placement.depth
    for k in range(number):
        is_first, is_last = k // m % depth == 0, (k // m + 1) % depth == 0
        yield k, k + number if is_last else k + m
        if not is_first:
            yield k + number, k + number - m
    for kind, stages in enumerate(queues):
        for queue in stages:
            for first, second in itertools.pairwise(queue):
                yield kind * number + first, kind * number + second
    # W makes room, or BW: no schedule has both once it is here.
    frees = _B if work.fused else _W
    for forwards, queue, [limit] in zip(queues[_F], queues[frees], work.limits, strict=True):
        for first, second in zip(queue, forwards[limit:], strict=False):
            yield frees * number + first, second
