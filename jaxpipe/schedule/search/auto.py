"""The search for the schedule that ends first on devices, under a memory limit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxpipe.schedule.actions import Schedule, split_backwards
from jaxpipe.schedule.check.validate import peak_in_flight
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.partition import cut_layers
from jaxpipe.schedule.placement import Placement, linear, looped, wave
from jaxpipe.schedule.problems import Problem, refuse
from jaxpipe.schedule.search.bounds import lower_bound
from jaxpipe.schedule.search.candidates import published, reordered
from jaxpipe.schedule.search.order_search import search_orders
from jaxpipe.schedule.simulate import UNIT, Costs, makespan, of_virtual_stages

_FEW_CHUNKS, _NUM_PROMISING = 4, 6
"""Published schedules are tried where chunks are few, and on so many placements of least bounds."""
_MOST_VIRTUAL_STAGES = 256
"""Placements of more are left out, unless their chunks are few: the time to order actions on them
grows faster than the square of this number."""
_SEARCHED_CHUNKS, _SEARCHED_ACTIONS = 2, 24_000
"""Orders are searched on the best placement so far, and on those of at most so many chunks as long
as all searched schedules together have at most so many actions."""


def auto(
    num_stages: int,
    num_microbatches: int,
    *,
    costs: Costs | Sequence[Costs] = UNIT,
    layer_costs: Sequence[Costs] | None = None,
    memory_limit: float | None = None,
    placement: Placement | None = None,
) -> Schedule:
    """Finds the schedule that ends first on the device clock under a memory limit.

    Candidates are the schedules of this package that fit, as published and in another order for the
    costs, and the orders of a search, on every placement that the model allows, of up to 256
    virtual stages or 4 chunks.

    ============  =====================================================================
    bubble        searched; `jaxpipe.schedule.search.bounds.lower_bound` says what is left
    in flight     at most memory_limit microbatches of a full stage
    constraints   p >= 1, m >= 1; memory_limit at least 1
    source        jaxpipe
    ============  =====================================================================

    Args:
      costs: costs of half a stage. A stage holds two such chunks, on the V or in a loop, or one
        that takes twice as long. With ``placement``, costs of one of its chunks; as a sequence,
        those of every virtual stage of ``placement``, or of the V without one.
      layer_costs: costs of every layer, instead of ``costs``, in model order; at least p. Then the
        number of chunks is chosen as well; a placement's chunks are those of
        `jaxpipe.schedule.partition.cut_layers`.
      memory_limit: peak in flight per stage, in microbatches of a full stage; None for p.
      placement: the only one to try.

    Raises:
      ValueError: the memory limit is too small, there are fewer layers than stages, or an argument
        does not fit the placement.

    Example:
      >>> costs = Costs(1, 1.2, 0.8)
      >>> schedule = auto(2, 4, costs=costs)
      >>> schedule.num_chunks, round(device_clock(schedule, costs).makespan, 1)
      (2, 25.2)
    """
    limit = num_stages if memory_limit is None else memory_limit
    models = _models(num_stages, costs, layer_costs, placement, limit)
    first = _First()
    known = _offer_known(first, models, num_microbatches, limit)
    few = (m for m in models if m.placement.num_chunks <= _SEARCHED_CHUNKS)
    actions = 0
    for model in dict.fromkeys([first.model, *few]):
        actions += 3 * model.placement.num_virtual_stages * num_microbatches
        promises = model.bound(num_microbatches, limit) < first.makespan
        if promises and (model == first.model or actions <= _SEARCHED_ACTIONS):
            seeds = known.get(model) or _published(model, num_microbatches, limit)
            first.offer(model, _searched(model, num_microbatches, limit, seeds))
    return dataclasses.replace(
        first.schedule, name="auto", peak_in_flight=peak_in_flight(first.schedule)
    )


def gain_of_memory(
    schedule: Schedule,
    *,
    costs: Costs | Sequence[Costs] = UNIT,
    layer_costs: Sequence[Costs] | None = None,
    memory_limit: float | None = None,
) -> tuple[Schedule, float]:
    """Finds what half a microbatch more would be worth, as far as known schedules tell.

    Args:
      schedule: schedule of `auto`, with the same other arguments.

    Returns:
      The known schedule that ends first with that memory, and the share of the time that it saves.
    """
    p, m = schedule.num_stages, schedule.num_microbatches
    limit = (p if memory_limit is None else memory_limit) + 0.5
    models, current, larger = _models(p, costs, layer_costs, None, limit), _First(), _First()
    current.offer(next(m for m in models if m.placement == schedule.placement), [schedule])
    _offer_known(larger, models, m, limit)
    return larger.schedule, 1 - larger.makespan / current.makespan


class _Model(NamedTuple):
    """A model on a placement, with the costs of its virtual stages."""

    placement: Placement
    costs: tuple[Costs, ...]

    def cap(self, num_microbatches: int, memory_limit: float) -> int:
        """Chunks in flight that a limit in microbatches of a full stage allows."""
        chunks = self.placement.num_chunks
        return max(chunks, int(min(memory_limit, num_microbatches) * chunks))

    def bound(self, num_microbatches: int, memory_limit: float) -> float:
        """Time before which no schedule ends."""
        cap = self.cap(num_microbatches, memory_limit)
        return lower_bound(self.placement, num_microbatches, self.costs, cap=cap)


class _First:
    """The schedule that ends first on the device clock, among those that are offered."""

    schedule: Schedule
    model: _Model
    makespan = math.inf

    def offer(self, model: _Model, schedules: Iterable[Schedule]) -> None:
        """Takes schedules of one placement."""
        # No schedule ends sooner on devices than free-running, and that time is quick to compute.
        timed = sorted(
            ((makespan(schedule, model.costs), schedule) for schedule in schedules),
            key=lambda pair: pair[0],
        )
        for least, schedule in timed:
            if least >= self.makespan:
                break
            end = device_clock(schedule, model.costs).makespan
            if end < self.makespan:
                self.schedule, self.model, self.makespan = schedule, model, end


def _models(
    num_stages: int,
    costs: Costs | Sequence[Costs],
    layer_costs: Sequence[Costs] | None,
    placement: Placement | None,
    memory_limit: float,
) -> list[_Model]:
    """Lists the model on every placement that it allows; refuses what cannot be searched for."""
    _check(num_stages, layer_costs, placement, memory_limit)
    layers = layer_costs
    if layers is None:
        if placement is not None or not isinstance(costs, Costs):
            only = placement or wave(num_stages)
            return [_Model(only, of_virtual_stages(only, costs))]
        layers = [costs] * (2 * num_stages)
    places = [linear(num_stages)] if placement is None else [placement]
    most = max(_FEW_CHUNKS, _MOST_VIRTUAL_STAGES // num_stages) if placement is None else 0
    for chunks in range(2, min(most, len(layers) // num_stages) + 1):
        if chunks % 2 == 0:
            places.append(wave(num_stages, num_waves=chunks // 2))
        places.append(looped(num_stages, num_chunks=chunks))
    return [_Model(place, cut_layers(layers, place)[1]) for place in places]


def _check(
    num_stages: int,
    layer_costs: Sequence[Costs] | None,
    placement: Placement | None,
    memory_limit: float,
) -> None:
    problems, others = [], {"num_stages": num_stages}
    if placement is not None and (placement.num_stages, placement.num_copies) != (num_stages, 1):
        rule = "it must be of one copy of the model on $num_stages"
        problems.append(Problem("placement", placement, rule, (), others, "auto"))
    if layer_costs is not None and len(layer_costs) < num_stages:
        rule = f"{len(layer_costs)} layers cannot fill $num_stages: each needs a layer"
        problems.append(Problem("layer_costs", None, rule, (), others, "auto"))
    if not memory_limit >= 1:
        rule = "a stage keeps all chunks of a microbatch at once"
        problems.append(Problem("memory_limit", memory_limit, rule, (1,), schedule="auto"))
    refuse(problems)


def _offer_known(
    first: _First, models: Sequence[_Model], m: int, limit: float
) -> dict[_Model, list[Schedule]]:
    """Offers the schedules of this package, from the placements of the least bounds on; returns the
    published ones."""
    bounds = {model: model.bound(m, limit) for model in models}
    ranked = sorted(bounds, key=bounds.__getitem__)
    few = [model for model in ranked if model.placement.num_chunks <= _FEW_CHUNKS]
    known = {}
    for model in dict.fromkeys([*few, *ranked[:_NUM_PROMISING]]):
        if bounds[model] < first.makespan:
            known[model] = _published(model, m, limit)
            first.offer(model, known[model])
            cap = model.cap(m, limit)
            first.offer(model, reordered(model.placement, m, cap=cap, costs=model.costs))
    return known


def _published(model: _Model, m: int, limit: float) -> list[Schedule]:
    return published(model.placement, m, cap=model.cap(m, limit), costs=model.costs)


def _searched(model: _Model, m: int, limit: float, seeds: Sequence[Schedule]) -> list[Schedule]:
    """Searches for orders, starting from some schedules and from rules."""
    place, apart = model.placement, map(split_backwards, seeds)
    cap, bound = model.cap(m, limit), model.bound(m, limit)
    return search_orders(place, m, costs=model.costs, cap=cap, seeds=apart, bound=bound)
