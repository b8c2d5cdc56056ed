"""Schedule and placement for a model: how its layers are cut into chunks is searched too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.placement import Placement, linear, looped, wave
from jaxpipe.schedule.search.auto import auto
from jaxpipe.schedule.search.bounds import lower_bound
from jaxpipe.schedule.simulate import Costs, lock_step

_Cut = tuple[Placement, tuple[int, ...], tuple[Costs, ...]]

_NUM_TRIED = 3
"""Placements that are searched, of those that promise most."""


def auto_placed(
    num_stages: int,
    num_microbatches: int,
    *,
    layer_costs: Sequence[Costs],
    memory_limit: float | None = None,
) -> Schedule:
    """Searches placement, number of chunks, order and slices for a model given layer by layer.

    More chunks shorten the ramps, but every tick ends with an exchange of messages. Each placement
    is judged by what no schedule can beat on it (`lower_bound`) and by the exchanges it needs;
    `auto` searches those that promise most. All are of the same model under the same memory.

    Args:
      layer_costs: of every layer, in model order; at least p. The messages after the last layer of
        each chunk count.
      memory_limit: as for `auto`.

    Returns:
      A schedule with slices. Its chunks are those of `jaxpipe.schedule.partition.partition` with
      the layers' F+B+W.

    Raises:
      ValueError: there are fewer layers than stages, or the memory limit is too small.

    Example:
      >>> layers = [Costs(1, 1.2, 0.8, message=2)] * 8
      >>> auto_placed(2, 4, layer_costs=layers).num_chunks
      1
    """
    limit = num_stages if memory_limit is None else memory_limit
    choices: list[tuple[float, int, _Cut]] = []
    for placement, counts, costs in placements(num_stages, layer_costs):
        cap = max(placement.num_chunks, int(min(limit, num_microbatches) * placement.num_chunks))
        promise = lower_bound(placement, num_microbatches, costs, cap=cap)
        if num_stages > 1:
            # Every chunk's F of every microbatch ends in a tick of its own.
            exchanges = num_microbatches * placement.num_chunks + placement.num_virtual_stages
            promise += exchanges * max(cost.message for cost in costs)
        choices.append((promise, len(choices), (placement, counts, costs)))
    choices.sort(key=lambda choice: choice[:2])
    best, makespan = None, math.inf
    for _, _, (placement, counts, costs) in choices[:_NUM_TRIED]:
        found = auto(
            num_stages,
            num_microbatches,
            costs=costs,
            memory_limit=memory_limit,
            layer_counts=counts,
            placement=placement,
        )
        time = lock_step(found, costs).makespan
        if time < makespan:
            best, makespan = found, time
    if best is None:
        raise ValueError(f"{len(layer_costs)} layers are too few for {num_stages} stages.")
    return best


def placements(num_stages: int, layer_costs: Sequence[Costs]) -> Iterator[_Cut]:
    """All placements of this package for a model, with as many chunks as its layers allow: each
    with the number of layers and the costs of every chunk."""
    most = len(layer_costs) // num_stages
    found = [linear(num_stages)] if most else []
    for chunks in range(2, most + 1):
        if chunks % 2 == 0:
            found.append(wave(num_stages, num_waves=chunks // 2))
        found.append(looped(num_stages, num_chunks=chunks))
    for placement in found:
        counts = partition([cost.f + cost.b + cost.w for cost in layer_costs], placement)
        yield placement, counts, _of_chunks(layer_costs, counts)


def _of_chunks(layer_costs: Sequence[Costs], counts: Sequence[int]) -> tuple[Costs, ...]:
    """What every chunk costs; its message is that of its last layer."""
    layers, chunks = iter(layer_costs), []
    for count in counts:
        held = list(itertools.islice(layers, count))
        f, b, w = (math.fsum(getattr(cost, kind) for cost in held) for kind in "fbw")
        chunks.append(Costs(f, b, w, held[-1].message))
    return tuple(chunks)
