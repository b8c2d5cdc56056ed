"""Schedule and placement for a model: how its layers are cut into chunks is searched too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.partition import cut_layers
from jaxpipe.schedule.placement import Placement, linear, looped, wave
from jaxpipe.schedule.problems import Problem, refuse
from jaxpipe.schedule.search.auto import auto
from jaxpipe.schedule.search.bounds import lower_bound
from jaxpipe.schedule.search.candidates import named
from jaxpipe.schedule.search.dispatch import Rule, dispatch
from jaxpipe.schedule.search.slices import slice_ticks
from jaxpipe.schedule.simulate import UNIT, Costs, lock_step, simulate

_Cut = tuple[Placement, tuple[int, ...], tuple[Costs, ...]]

_RULE = Rule(pace=1.0, lead=2.0, patience=0.5, frees=True, reserves=True)
_NUM_CUT, _NUM_SEARCHED = 6, 2
"""Placements on which a named schedule is cut, beside linear and V, of those that promise most; and
placements that are searched, of those on which it then ends first."""
_SEARCHED_ACTIONS = 24_000
"""How many actions the searched schedules may have together; one is always searched."""


def auto_placed(
    num_stages: int,
    num_microbatches: int,
    *,
    layer_costs: Sequence[Costs],
    memory_limit: float | None = None,
) -> Schedule:
    """Searches placement, number of chunks, order and slices for a model given layer by layer.

    More chunks shorten the ramps, but every tick ends with an exchange of messages. Placements
    are judged first by what no schedule can beat on them (`lower_bound`) and by their exchanges,
    then by the best named schedule that fits the limit, cut into slices. `auto` searches the most
    promising ones. All are of the same model under the same memory.

    Args:
      layer_costs: of every layer, in model order; at least p. The messages after the last layer of
        each chunk count.
      memory_limit: as for `auto`.

    Returns:
      A schedule with slices. Its chunks are those of `jaxpipe.schedule.partition.cut_layers`.

    Raises:
      ValueError: there are fewer layers than stages, or the memory limit is too small.

    Example:
      >>> layers = [Costs(1, 1.2, 0.8, message=2)] * 8
      >>> auto_placed(2, 4, layer_costs=layers).num_chunks
      1
    """
    limit = num_stages if memory_limit is None else memory_limit
    choices: list[tuple[float, int, _Cut]] = []
    for cut in placements(num_stages, layer_costs):
        placement, _, costs = cut
        promise = lower_bound(
            placement, num_microbatches, costs, cap=_cap(cut, num_microbatches, limit)
        )
        if num_stages > 1:
            # Every chunk's F of every microbatch ends in a tick of its own.
            exchanges = num_microbatches * placement.num_chunks + placement.num_virtual_stages
            promise += exchanges * max(cost.message for cost in costs)
        choices.append((promise, len(choices), cut))
    if not choices:
        rule = f"{len(layer_costs)} layers cannot fill $num_stages: each needs a layer"
        refuse([Problem("layer_costs", None, rule, (), {"num_stages": num_stages}, "auto")])
    choices.sort(key=lambda choice: choice[:2])
    promising = [
        (_ends_named(cut, num_microbatches, limit), number, cut)
        for rank, (_, number, cut) in enumerate(choices)
        # Linear and V are the first two.
        if rank < _NUM_CUT or number < 2
    ]
    promising.sort(key=lambda choice: choice[:2])
    # The V is searched beside the best: a careful cut gains most where chunks are few.
    first = promising[0][1]
    promising.sort(key=lambda choice: (choice[1] != first, choice[1] != 1))
    best, makespan, actions = None, math.inf, 0
    for _, _, (placement, counts, costs) in promising[:_NUM_SEARCHED]:
        actions += 3 * placement.num_virtual_stages * num_microbatches
        if best is not None and actions > _SEARCHED_ACTIONS:
            break
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
    assert best is not None, "there is a placement, and auto finds a schedule on each"
    return best


def _cap(cut: _Cut, num_microbatches: int, limit: float) -> int:
    """Chunks in flight."""
    chunks = cut[0].num_chunks
    return max(chunks, int(min(limit, num_microbatches) * chunks))


def _ends_named(cut: _Cut, num_microbatches: int, limit: float) -> float:
    """When the best named schedule ends, or one by a rule, cut into slices with little effort."""
    placement, counts, costs = cut
    cap = _cap(cut, num_microbatches, limit)
    same = costs[0] if len(set(costs)) == 1 else UNIT
    fitting = named(placement, num_microbatches, cap=cap, costs=same)
    orders = dispatch(placement, num_microbatches, costs, cap, _RULE)
    fitting.append(Schedule("auto", placement, num_microbatches, orders))
    first = min(fitting, key=lambda schedule: simulate(schedule, costs).makespan)
    return lock_step(slice_ticks(first, costs, counts, quick=True), costs).makespan


def planned(
    num_stages: int,
    num_microbatches: int,
    *,
    costs: Costs = UNIT,
    memory_limit: float | None = None,
    layers_per_chunk: int = 4,
    layer_costs: Sequence[Costs] | None = None,
) -> Schedule:
    """Runs `auto_placed` for a model given layer by layer, and otherwise `auto` on the V.

    Args:
      costs: of one of the V's chunks, without ``layer_costs``.
      memory_limit: as for `auto`.
      layers_per_chunk: as for `auto`, without ``layer_costs``.
      layer_costs: as for `auto_placed`.
    """
    if layer_costs is not None:
        return auto_placed(
            num_stages, num_microbatches, layer_costs=layer_costs, memory_limit=memory_limit
        )
    return auto(
        num_stages,
        num_microbatches,
        costs=costs,
        memory_limit=memory_limit,
        layers_per_chunk=layers_per_chunk,
    )


def placements(num_stages: int, layer_costs: Sequence[Costs]) -> Iterator[_Cut]:
    """All placements of this package for a model, with as many chunks as its layers allow: each
    with the number of layers and the costs of every chunk."""
    most = len(layer_costs) // num_stages
    found = [linear(num_stages)] if most else []
    # The V comes second.
    for chunks in range(2, most + 1):
        if chunks % 2 == 0:
            found.append(wave(num_stages, num_waves=chunks // 2))
        found.append(looped(num_stages, num_chunks=chunks))
    for placement in found:
        yield placement, *cut_layers(layer_costs, placement)
