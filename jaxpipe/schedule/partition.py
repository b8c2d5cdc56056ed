"""Partition: which layers make up each virtual stage, balanced by their cost.

``docs/design/003-schedules.md`` gives the reasons for this objective.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.problems import Problem, counted, refuse
from jaxpipe.schedule.simulate import Costs

_BITS = 30
"""Costs are compared as integers whose sum has at most this many bits, so sums are exact."""
_NEVER = 2**61
"""The cost of a forbidden chunk: above any sum of squares, and twice it still fits an int64."""


def partition(layer_costs: Sequence[float], placement: Placement) -> tuple[int, ...]:
    """Splits layers, in model order, over virtual stages so that none is slower than it must be.

    The largest chunk costs as little as possible; within that limit the sum of squared costs is
    least. If a stage holds several chunks, layers then move between neighboring chunks from
    fuller stages to emptier ones, within the same limit, until no move helps. Layers of equal cost
    give chunks of equal length, earlier ones longer if the layers do not divide evenly.

    Takes time proportional to n L^2 for L layers, not all alike, on n virtual stages.

    Args:
      layer_costs: F + B + W of every layer, in any one unit, above 0. ``[1] * num_layers`` for
        layers that are all alike.
      placement: placement of the chunks.

    Returns:
      Layers of every virtual stage, at least 1 each. Deterministic; differences below a billionth
      of the whole cost count as none.

    Raises:
      ValueError: fewer layers than virtual stages, or a cost is not above 0.

    Example:
      >>> from jaxpipe.schedule.placement import linear
      >>> partition([1] * 7, linear(4))
      (2, 2, 2, 1)
      >>> partition([4, 1, 1, 1, 1, 2, 2], linear(3))
      (1, 4, 2)
    """
    _check(layer_costs, placement)
    num_layers, num_parts = len(layer_costs), placement.num_virtual_stages
    if len(set(layer_costs)) == 1:
        # The code below would give the same, but takes seconds for a thousand layers.
        share, extra = divmod(num_layers, num_parts)
        return tuple(share + (s < extra) for s in range(num_parts))
    loads = _spans(_integers(layer_costs))
    fits = np.triu(np.ones(loads.shape, bool), 1)
    largest, _ = _best_ends(np.where(fits, loads, _NEVER), num_parts, np.maximum)
    fits &= loads <= largest
    _, ends = _best_ends(np.where(fits, loads**2, _NEVER), num_parts, np.add)
    _relieve(ends, loads, fits, placement)
    return tuple(np.diff(ends, prepend=0).tolist())


def chunk_costs(
    costs: Costs, layer_costs: Sequence[float], layer_counts: Sequence[int]
) -> list[Costs]:
    """Computes the cost of every chunk of a partition, for `simulate` and `device_clock`.

    Each gets its layers' share of all F, B and W, from ``costs`` of an average chunk; messages stay
    as they are.

    Example:
      >>> [cost.f for cost in chunk_costs(Costs(1, 1, 1), [1] * 10, [3, 3, 2, 2])]
      [1.2, 1.2, 0.8, 0.8]
    """
    total, first, chunks = math.fsum(layer_costs), 0, []
    for count in layer_counts:
        own = math.fsum(layer_costs[first : first + count]) * len(layer_counts)
        f, b, w = (cost * own / total for cost in (costs.f, costs.b, costs.w))
        chunks.append(dataclasses.replace(costs, f=f, b=b, w=w))
        first += count
    return chunks


def cut_layers(
    layer_costs: Sequence[Costs], placement: Placement
) -> tuple[tuple[int, ...], tuple[Costs, ...]]:
    """Cuts a model into the chunks of a placement by its layers' F+B+W.

    Args:
      layer_costs: costs of every layer, in model order; at least one per virtual stage.

    Returns:
      The layers and the costs of every virtual stage; a chunk's message is that of its last layer,
      and so is what overlap saves.

    Example:
      >>> from jaxpipe.schedule.placement import linear
      >>> counts, costs = cut_layers([Costs(1, 1, 1)] * 3, linear(2))
      >>> counts, costs[0].f
      ((2, 1), 2.0)
    """
    counts = partition([cost.f + cost.b + cost.w for cost in layer_costs], placement)
    layers, chunks = iter(layer_costs), []
    for count in counts:
        chunk_layers = list(itertools.islice(layers, count))
        f, b, w = (math.fsum(getattr(cost, kind) for cost in chunk_layers) for kind in "fbw")
        chunks.append(dataclasses.replace(chunk_layers[-1], f=f, b=b, w=w))
    return counts, tuple(chunks)


def _check(layer_costs: Sequence[float], placement: Placement) -> None:
    problems = []
    num_layers, needed = len(layer_costs), placement.num_virtual_stages
    if num_layers < needed:
        layers = counted(num_layers, "layer")
        rule = f"of {layers} cannot fill {needed} virtual stages: each needs a layer"
        problems.append(Problem("layer_costs", None, rule, note=f"Nearest valid: {needed} layers."))
    problems += [
        Problem(f"layer_costs[{layer}]", cost, "must be a finite number above 0")
        for layer, cost in enumerate(layer_costs)
        if not 0 < cost < math.inf
    ]
    refuse(problems)


def _integers(layer_costs: Sequence[float]) -> np.ndarray:
    """Costs as int64 ``[layers]`` with a sum of about 2 ** `_BITS`, for exact sums and squares."""
    largest_exponent = math.frexp(max(layer_costs))[1] + len(layer_costs).bit_length()
    # A power of two keeps whole numbers whole, so equal sums stay equal.
    scaled = [math.ldexp(cost, _BITS - largest_exponent) for cost in layer_costs]
    return np.rint(scaled).astype(np.int64)


def _spans(values: np.ndarray) -> np.ndarray:
    """Sums values k to l - 1 at ``[k, l]``; meaningless where l < k."""
    upto = np.concatenate([[0], np.cumsum(values)])
    spans: np.ndarray = upto[None, :] - upto[:, None]
    return spans


def _best_ends(costs: np.ndarray, num_parts: int, combine: np.ufunc) -> tuple[float, np.ndarray]:
    """Splits a sequence into the parts with the least combined cost, by dynamic programming.

    Elements k to l - 1 as one part cost ``costs[k, l]``, and costs combine by np.add or np.maximum.
    Returns the least cost, and where each part ends; among equals, earlier parts are longest.
    """
    # [k]: the least cost of elements k on, in the parts so far.
    least = np.full(len(costs), _NEVER, costs.dtype)
    least[-1] = 0
    choices = []
    for _ in range(num_parts):
        totals = np.minimum(combine(costs, least), _NEVER)
        least = totals.min(axis=1)
        choices.append(len(least) - 1 - totals[:, ::-1].argmin(axis=1))
    ends = [0]
    for choice in reversed(choices):
        ends.append(choice[ends[-1]])
    return least[0], np.asarray(ends[1:])


def _relieve(ends: np.ndarray, loads: np.ndarray, fits: np.ndarray, placement: Placement) -> None:
    """Moves ends of chunks, in place, so that the sum of squared loads of stages falls.

    A layer moves to the next or the previous chunk if their stages then differ less. Each move
    lowers the sum, so this ends.
    """
    cuts = [0, *ends.tolist()]
    stage_loads = [0] * placement.num_stages
    for s, stage in enumerate(placement.stages):
        stage_loads[stage] += int(loads[cuts[s], cuts[s + 1]])
    moved = True
    while moved:
        moved = False
        for s, (left, right) in enumerate(itertools.pairwise(placement.stages), start=1):
            first, cut, last = cuts[s - 1 : s + 2]
            for step, giver, taker in ((-1, left, right), (1, right, left)):
                new = cut + step
                layer = int(loads[min(cut, new), max(cut, new)])
                helps = stage_loads[giver] - stage_loads[taker] > layer and giver != taker
                if helps and fits[first, new] and fits[new, last]:
                    stage_loads[giver] -= layer
                    stage_loads[taker] += layer
                    cuts[s], moved = new, True
                    break
    ends[:] = cuts[1:]
