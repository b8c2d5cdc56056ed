"""Schedule and placement for a model: how its layers are cut into chunks is searched too."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.problems import Problem, refuse
from jaxpipe.schedule.search.auto import auto, check, enter_named, named_for, search_best
from jaxpipe.schedule.search.contest import Contest
from jaxpipe.schedule.search.cuts import Cut, cuts
from jaxpipe.schedule.search.dispatch import Rule, dispatch
from jaxpipe.schedule.simulate import UNIT, Costs

_RULE = Rule(pace=1.0, lead=2.0, patience=0.5, frees=True, reserves=True)
_FEW_CHUNKS, _NUM_PROMISING = 4, 6
"""Placements of so few chunks enter with their named schedules, and those that promise most."""
_SEARCHED_ACTIONS = 24_000
"""How many actions the searched schedules may have together; one is always searched."""


def auto_placed(
    num_stages: int,
    num_microbatches: int,
    *,
    layer_costs: Sequence[Costs],
    memory_limit: float | None = None,
    clock: str = "lock-step",
) -> Schedule:
    """Searches placement, number of chunks, order and slices for a model given layer by layer.

    More chunks shorten the ramps, but every tick ends with an exchange of messages. Placements
    are judged first by what no schedule can beat on them (`lower_bound`) and by their exchanges,
    then by the best named schedule that fits the limit, cut into slices. `auto` searches the most
    promising ones. All are of the same model under the same memory.

    Args:
      layer_costs: of every layer, in model order; at least p. The messages after the last layer of
        each chunk count.
      memory_limit, clock: as for `auto`.

    Returns:
      A schedule with slices. Its chunks are those of `jaxpipe.schedule.partition.cut_layers`.

    Raises:
      ValueError: there are fewer layers than stages, or the memory limit is too small.

    Example:
      >>> layers = [Costs(1, 1.2, 0.8, message=2)] * 4
      >>> auto_placed(2, 4, layer_costs=layers).num_chunks
      1
    """
    limit = num_stages if memory_limit is None else memory_limit
    ways = list(cuts(num_stages, layer_costs))
    if not ways:
        rule = f"{len(layer_costs)} layers cannot fill $num_stages: each needs a layer"
        refuse([Problem("layer_costs", None, rule, (), {"num_stages": num_stages}, "auto")])
    check(num_stages, ways[0].placement, limit)
    bounds = [way.bound(num_microbatches, limit) for way in ways]
    ranked = sorted(range(len(ways)), key=lambda number: bounds[number])
    contest = Contest(clock)
    known: dict[Cut, list[Schedule]] = {}
    few = [n for n in ranked if ways[n].placement.num_chunks <= _FEW_CHUNKS]
    for numbers in (few, ranked[:_NUM_PROMISING]):
        for cut in (ways[n] for n in numbers if bounds[n] < contest.ahead):
            if cut not in known:
                known[cut] = _known(cut, num_microbatches, limit)
                enter_named(contest, cut, known[cut], num_microbatches, limit)
        contest.compare()
    # The V is searched beside the best: a careful cut gains most where chunks are few.
    first = contest.leader
    assert first is not None, "the first placement has a schedule by a rule"
    searched = [first, *(cut for cut in ways[1:2] if cut != first)]
    passes = sum(cut.placement.num_virtual_stages * num_microbatches for cut in searched)
    if 3 * passes > _SEARCHED_ACTIONS:
        searched = [first]
    pairs = [(cut, known.get(cut) or named_for(cut, num_microbatches, limit)) for cut in searched]
    return search_best(contest, pairs, num_microbatches, limit)


def _known(cut: Cut, num_microbatches: int, memory_limit: float) -> list[Schedule]:
    """The named schedules on a placement that fit the limit, and one by a rule."""
    cap = cut.cap(num_microbatches, memory_limit)
    orders = dispatch(cut.placement, num_microbatches, cut.costs, cap, _RULE)
    by_rule = Schedule("auto", cut.placement, num_microbatches, orders)
    return [*named_for(cut, num_microbatches, memory_limit), by_rule]


def planned(
    num_stages: int,
    num_microbatches: int,
    *,
    costs: Costs = UNIT,
    memory_limit: float | None = None,
    layers_per_chunk: int = 4,
    layer_costs: Sequence[Costs] | None = None,
    clock: str = "lock-step",
) -> Schedule:
    """Runs `auto_placed` for a model given layer by layer, and otherwise `auto` on the V.

    Args:
      costs: of one of the V's chunks, without ``layer_costs``.
      memory_limit: as for `auto`.
      layers_per_chunk: as for `auto`, without ``layer_costs``.
      layer_costs: as for `auto_placed`.
      clock: as for `auto`.
    """
    if layer_costs is not None:
        return auto_placed(
            num_stages,
            num_microbatches,
            layer_costs=layer_costs,
            memory_limit=memory_limit,
            clock=clock,
        )
    return auto(
        num_stages,
        num_microbatches,
        costs=costs,
        memory_limit=memory_limit,
        layers_per_chunk=layers_per_chunk,
        clock=clock,
    )
