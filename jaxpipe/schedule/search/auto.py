"""`auto`: the schedule that ends first on devices, under a memory limit; and a bound on all."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxpipe.schedule.actions import Kind, Schedule, split_backwards
from jaxpipe.schedule.check import peak_in_flight
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.generators.breadth_first import breadth_first, gpipe
from jaxpipe.schedule.generators.depth_first import (
    interleaved,
    interleaved_zb,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from jaxpipe.schedule.generators.dualpipe import dualpipe_v
from jaxpipe.schedule.generators.eager import in_time
from jaxpipe.schedule.generators.events import Rule, dispatch
from jaxpipe.schedule.generators.hanayo import hanayo
from jaxpipe.schedule.generators.v_schedules import one_f_one_b_v, v_half, v_min, zb_v
from jaxpipe.schedule.partition import cut_layers
from jaxpipe.schedule.placement import Placement, linear, looped, wave
from jaxpipe.schedule.problems import Problem, refuse
from jaxpipe.schedule.search.controllable_memory import controllable_memory
from jaxpipe.schedule.search.order_search import search_orders
from jaxpipe.schedule.simulate import UNIT, Costs, Timeline, makespan

_FEW_CHUNKS, _NUM_PROMISING = 4, 6
"""Named schedules are tried where chunks are few, and on so many placements of least bounds."""
_MOST_VIRTUAL_STAGES = 256
"""Placements of more are left out, unless their chunks are few: the time to order actions on them
grows faster than the square of this number."""
_SEARCHED_CHUNKS, _SEARCHED_ACTIONS = 2, 24_000
"""Orders are searched on the best placement so far, and on those of at most so many chunks as long
as all searched schedules together have at most so many actions."""
_REORDERED_ACTIONS = 6_000
"""Actions of the longest schedule that is reordered: longer ones would take seconds."""
_REORDERED = ("zb-h1", "zb-h2", "interleaved-zb", "1f1b-v")
"""Schedules that are reordered by `in_time`; waves and V schedules read the costs themselves."""
_RULE = Rule(pace=1.0, lead=2.0, patience=0.5, frees=True, reserves=True)
"""The rule by which there always is a schedule."""


def auto(
    num_stages: int,
    num_microbatches: int,
    *,
    num_slices: int = 1,
    costs: Costs = UNIT,
    layer_costs: Sequence[Costs] | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """Finds the schedule that ends first on the device clock under a memory limit.

    Candidates are the schedules of this package that fit, as published and in another order for the
    costs, and the orders of a search (`search_orders`), which knows whole sequences, on every
    placement that the model allows, of up to 256 virtual stages or 4 chunks. `lower_bound` says how
    much is left.

    Args:
      costs: costs of half a stage. A stage holds two such chunks, on the V or in a loop, or one
        that takes twice as long.
      layer_costs: costs of every layer, instead of ``costs``, in model order; at least p. Then the
        number of chunks is chosen as well.
      memory_limit: peak in flight per stage, in microbatches of a full stage; None for p.
      num_slices: slices of a microbatch's sequences; costs are then those of the average slice.

    Raises:
      ValueError: the memory limit is too small, or there are fewer layers than stages.

    Example:
      >>> costs = Costs(1, 1.2, 0.8)
      >>> schedule = auto(2, 4, costs=costs)
      >>> schedule.num_chunks, round(device_clock(schedule, costs).makespan, 1)
      (2, 25.2)
    """
    limit = num_stages if memory_limit is None else memory_limit
    layers = [costs] * (2 * num_stages) if layer_costs is None else layer_costs
    models = _models(num_stages, num_microbatches, num_slices, layers, limit)
    first = _First()
    published = _offer_named(first, models)
    if num_slices == 1:
        _offer_searched(first, models, published)
    elif first.makespan == math.inf:
        _refuse_limit(models, limit)
    return dataclasses.replace(
        first.schedule, name="auto", peak_in_flight=peak_in_flight(first.schedule)
    )


def gain_of_memory(
    schedule: Schedule, *, layer_costs: Sequence[Costs], memory_limit: float | None = None
) -> tuple[Schedule, float]:
    """Finds what half a microbatch more would be worth to a schedule of `auto` with these
    arguments: the named schedule that ends first with that memory, and the share of the time that
    it saves."""
    p, m = schedule.num_stages, schedule.num_microbatches
    limit = (p if memory_limit is None else memory_limit) + 0.5
    models = _models(p, m, schedule.num_slices, layer_costs, limit)
    current, larger = _First(), _First()
    current.offer(next(m for m in models if m.placement == schedule.placement), [schedule])
    _offer_named(larger, models)
    return larger.schedule, 1 - larger.makespan / current.makespan


class PlacedModel(NamedTuple):
    """A model on a placement, with the costs of its virtual stages.

    Args:
      cap: the most chunks in flight on a stage.
      bound: time before which no schedule ends.
    """

    placement: Placement
    num_microbatches: int
    costs: tuple[Costs, ...]
    cap: int
    bound: float
    num_slices: int = 1

    @property
    def num_actions(self) -> int:
        passes = self.num_microbatches * self.num_slices
        return 3 * self.placement.num_virtual_stages * passes

    @property
    def chunk(self) -> Costs:
        """Costs of every chunk, or the unit if they differ."""
        return self.costs[0] if len(set(self.costs)) == 1 else UNIT


class _First:
    """The schedule that ends first on the device clock, among those that are offered."""

    schedule: Schedule
    model: PlacedModel
    makespan = math.inf

    def offer(self, model: PlacedModel, schedules: Iterable[Schedule]) -> None:
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
    num_microbatches: int,
    num_slices: int,
    layer_costs: Sequence[Costs],
    memory_limit: float,
) -> list[PlacedModel]:
    """Lists the model on every placement that it allows; refuses what cannot be searched for."""
    problems = []
    if len(layer_costs) < num_stages:
        rule = f"{len(layer_costs)} layers cannot fill $num_stages: each needs a layer"
        others = {"num_stages": num_stages}
        problems.append(Problem("layer_costs", None, rule, (), others, "auto"))
    if not memory_limit >= 1:
        rule = "a stage keeps all chunks of a microbatch at once"
        problems.append(Problem("memory_limit", memory_limit, rule, (1,), schedule="auto"))
    refuse(problems)
    places = [linear(num_stages)]
    most = max(_FEW_CHUNKS, _MOST_VIRTUAL_STAGES // num_stages)
    for chunks in range(2, min(most, len(layer_costs) // num_stages) + 1):
        if chunks % 2 == 0 and num_slices == 1:
            places.append(wave(num_stages, num_waves=chunks // 2))
        places.append(looped(num_stages, num_chunks=chunks))
    m, k, models = num_microbatches, num_slices, []
    for place in places:
        costs, parts = cut_layers(layer_costs, place)[1], place.num_chunks * k
        cap = max(parts, int(min(memory_limit, m) * parts))
        bound = lower_bound(place, m, costs, cap=cap, num_slices=k)
        models.append(PlacedModel(place, m, costs, cap, bound, k))
    return models


def _refuse_limit(models: Sequence[PlacedModel], memory_limit: float) -> None:
    """Refuses a memory in which no schedule with slices runs."""
    least = min(
        max(peak_in_flight(schedule)) / (model.num_slices * model.placement.num_chunks)
        for model in models
        if model.placement.num_chunks <= _FEW_CHUNKS
        for schedule in _named(model)
    )
    rule, others = "no schedule with $num_slices fits", {"num_slices": models[0].num_slices}
    refuse([Problem("memory_limit", memory_limit, rule, (least,), others, "auto")])


def _offer_named(first: _First, models: Sequence[PlacedModel]) -> dict[PlacedModel, list[Schedule]]:
    """Offers the schedules of this package, from the placements of the least bounds on; returns the
    published ones."""
    ranked = sorted(models, key=lambda model: model.bound)
    few = [model for model in ranked if model.placement.num_chunks <= _FEW_CHUNKS]
    published = {}
    for model in dict.fromkeys([*few, *ranked[:_NUM_PROMISING]]):
        if model.bound < first.makespan:
            published[model] = [*published_schedules(model)]
            first.offer(model, published[model])
            if _reorders(model):
                first.offer(model, _fitting(model, _named(model, reordered=True)))
    return published


def _offer_searched(
    first: _First,
    models: Sequence[PlacedModel],
    published: Mapping[PlacedModel, list[Schedule]],
) -> None:
    """Offers orders that are searched for on the best placement and on those of few chunks."""
    few = (model for model in models if model.placement.num_chunks <= _SEARCHED_CHUNKS)
    actions = 0
    for model in dict.fromkeys([first.model, *few]):
        actions += model.num_actions
        if model.bound < first.makespan and (model == first.model or actions <= _SEARCHED_ACTIONS):
            seeds = published.get(model) or [*published_schedules(model)]
            orders = search_orders(
                model.placement,
                model.num_microbatches,
                costs=model.costs,
                cap=model.cap,
                seeds=map(split_backwards, seeds),
                bound=model.bound,
            )
            first.offer(model, orders)


def published_schedules(model: PlacedModel) -> Iterator[Schedule]:
    """Yields the published schedules that fit, the first of them to end in another order for the
    costs, and one by a rule, which always fits."""
    schedules = _fitting(model, _named(model))
    if model.num_slices > 1:
        yield from schedules
        return
    if _reorders(model):
        schedules.sort(key=lambda schedule: makespan(schedule, model.chunk))
        schedules += [in_time(schedule, model.chunk) for schedule in schedules[:1]]
    yield from schedules
    place, m = model.placement, model.num_microbatches
    yield Schedule("auto", place, m, dispatch(place, m, model.costs, model.cap, _RULE))


def _reorders(model: PlacedModel) -> bool:
    return model.chunk != UNIT and model.num_actions <= _REORDERED_ACTIONS


def _fitting(model: PlacedModel, schedules: Iterable[Schedule]) -> list[Schedule]:
    return [schedule for schedule in schedules if max(peak_in_flight(schedule)) <= model.cap]


def _named(model: PlacedModel, *, reordered: bool = False) -> Iterator[Schedule]:
    """Yields the schedules of this package on a placement, as published, or as
    `jaxpipe.schedule.catalog.build` orders them anew for the costs.

    Fused variants are left out: those with B and W end no later.
    """
    p, m, v = model.placement.num_stages, model.num_microbatches, model.placement.num_chunks
    k = model.num_slices
    schedules = []
    if v == 1 and model.placement == linear(p):
        schedules = [make(p, m, num_slices=k) for make in (gpipe, one_f_one_b, zb_h1, zb_h2)]
    elif model.placement == looped(p, num_chunks=v):
        looping = interleaved, interleaved_zb, breadth_first
        schedules = [make(p, m, num_chunks=v, num_slices=k) for make in looping]
        groups = range(-(-p // 2), p) if k == 1 else ()
        schedules += [interleaved(p, m, num_chunks=v, group=group) for group in groups]
    elif v % 2 == 0 and model.placement == wave(p, num_waves=v // 2):
        costs = model.chunk if reordered else UNIT
        yield hanayo(p, m, num_chunks=v, memory_limit=model.cap / v, costs=costs)
        if v == 2:
            yield from (make(p, m, costs=costs) for make in (zb_v, v_half, v_min))
            schedules = [dualpipe_v(p, m), one_f_one_b_v(p, m)]
            least = min(max(v_min(p, m).peak_in_flight or ()), 2 * m)
            if least <= model.cap < 2 * p and not reordered:
                limit, costs = model.cap / 2, model.chunk
                schedules.append(controllable_memory(p, m, memory_limit=limit, costs=costs))
    if reordered:
        schedules = [in_time(s, model.chunk) for s in schedules if s.name in _REORDERED]
    yield from schedules


def lower_bound(
    placement: Placement,
    num_microbatches: int,
    costs: Sequence[Costs],
    *,
    cap: float = math.inf,
    num_slices: int = 1,
) -> float:
    """A time before which no schedule of a placement ends.

    Each stage has to wait for the first microbatch, do its work, and wait while the last gradient
    goes on to the first layers; it may defer at most as many W as its memory holds. Memory also
    holds every chunk from F until its gradient has come back: the sum of these times, divided by
    the number of chunks that fit, is another bound.

    Args:
      costs: costs of every virtual stage.
      cap: the most chunks in flight on a stage, or slices of them.
      num_slices: slices of a microbatch's sequences; the first is the shortest.

    Example:
      >>> from jaxpipe.schedule.placement import wave
      >>> lower_bound(wave(2), 4, [Costs(1, 1, 1)] * 4, cap=4)
      25.0
    """
    m, average = num_microbatches * num_slices, costs
    costs = [_first_slice(cost, num_slices) for cost in costs]
    down, up = _ways(placement, costs)
    ends = [down[-1] + up[0] + costs[-1].f + costs[0].b + costs[0].w]
    for own_stages in placement.virtual_stages:
        critical = m * math.fsum(average[s].f + average[s].b for s in own_stages)
        weights = m * math.fsum(costs[s].w for s in own_stages)
        reaches = down[own_stages[0]]
        # The last B of the stage is followed by the way of its gradient, or by deferred W.
        leaves = min(up[0] - up[s] + costs[0].b - costs[s].b for s in own_stages) + costs[0].w
        deferred = min(weights, cap * max(costs[s].w for s in own_stages))
        ends.append(reaches + critical + weights - deferred + leaves)
        ends.append(reaches + critical + weights)
        # From the start of F to the end of W: one microbatch on its way to the loss and back.
        lives = math.fsum(
            down[-1] + costs[-1].f + up[s] + costs[s].b + costs[s].w - down[s] for s in own_stages
        )
        ends.append(reaches + m * lives / cap)
    return max(ends)


def gap(timeline: Timeline) -> str:
    """Says how far a schedule is at most from the best on its placement, at its peak in flight."""
    schedule = timeline.schedule
    bound = lower_bound(
        schedule.placement,
        schedule.num_microbatches,
        timeline.costs,
        cap=max(timeline.peak_in_flight),
        num_slices=schedule.num_slices,
    )
    above = max(0.0, timeline.makespan / bound - 1)
    return (
        f"{schedule.name}: {timeline.makespan:.4g}, at most {above:.1%} above the optimum on this "
        "placement at this peak"
    )


def _first_slice(cost: Costs, num_slices: int) -> Costs:
    f, b = (cost.of(kind) + cost.more(kind, 0, num_slices) for kind in (Kind.F, Kind.B))
    return dataclasses.replace(cost, f=f, b=b)


def _ways(placement: Placement, costs: Sequence[Costs]) -> tuple[list[float], list[float]]:
    """Computes, by virtual stage, when the first microbatch's F can start, and how long after the
    end of that microbatch's last F its B can start."""
    crosses = [a != b for a, b in itertools.pairwise(placement.stages)]
    hops = [c.f + (c.message if cross else 0) for c, cross in zip(costs, crosses, strict=False)]
    backs = [c.b + (c.message if cross else 0) for c, cross in zip(costs[1:], crosses, strict=True)]
    down = list(itertools.accumulate(hops, initial=0.0))
    up = list(itertools.accumulate(reversed(backs), initial=0.0))[::-1]
    return down, up
