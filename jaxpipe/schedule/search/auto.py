"""`auto`: the schedule that ends first on devices, under a memory limit; and a bound on all.

A search has a budget. Every step has a price, its actions times what one takes, and a step that
costs more than what is left is not taken: the best so far is the result.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxpipe.schedule.actions import Action, Kind, Schedule, split_backwards
from jaxpipe.schedule.check import peak_in_flight
from jaxpipe.schedule.generators.breadth_first import breadth_first, gpipe
from jaxpipe.schedule.generators.depth_first import (
    eager_1f1b,
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
from jaxpipe.schedule.offload import parts_of, within_limit
from jaxpipe.schedule.pacing import of_ticks, soonest_on_devices
from jaxpipe.schedule.partition import cut_layers
from jaxpipe.schedule.placement import Placement, linear, looped, wave
from jaxpipe.schedule.problems import Problem, counted, plain, refuse
from jaxpipe.schedule.search.controllable_memory import controllable_memory
from jaxpipe.schedule.search.order_search import rules, search_orders
from jaxpipe.schedule.search.tick_search import TickSearch, read_promptly
from jaxpipe.schedule.simulate import UNIT, Costs, Timeline, makespan

_FEW_CHUNKS, _NUM_PROMISING = 4, 6
"""Named schedules are tried where chunks are few, and on so many placements of least bounds."""
_MOST_VIRTUAL_STAGES = 256
"""Placements of more are left out, unless their chunks are few: the time to order actions on them
grows faster than the square of this number."""
_SEARCHED_CHUNKS = 2
"""Orders are searched on the best placement so far, and on those of at most so many chunks."""
_SECONDS = 2.0
"""Time of a search on one core of a server of 2021, if no single step of it takes longer. Actions
are counted, not time, so that the result does not depend on the machine."""
_PUBLISHED, _PACED, _PROMPT = 9.0, 50.0, 18.0
_MOVED, _REORDER, _REORDER_V = 60.0, 130.0, 270.0
"""Microseconds per action: to make and time a schedule, to pace it, to find ticks in which all
messages are prompt, to choose what waits on the host, to order a schedule anew with `in_time`, and
to order a V schedule or a wave anew."""
_TRIALS = 10
"""Schedules that the search for a building block may time: about the price of a V schedule."""
_ORDERING_SHARE = 0.2
"""Largest share of the time left that reordering the schedules of a placement may take."""
_PACED_SHARE = 0.08
"""Largest share of the time left in which schedules of a placement are paced."""
_BEST_SHARE, _SEARCHING_SHARE = 0.55, 0.15
"""Shares of the time left in which orders are searched: on the best placement so far, unless late
messages take longer than an action, and on others."""
_NUM_FUSED = 20
"""Rules for orders with every W after its B."""
_PROMPTLY = Costs(1, 1, 0.01)
"""Costs in whose time orders have prompt messages."""
_ROUNDS = (8, 0.4), (3, 0.5), (1, 1.0)
"""Numbers of best schedules whose orders and ticks are changed, and shares of the time left."""
_LEAST_MICROSECONDS = 5e4
"""Orders are not searched, nor ticks changed, in less time."""
_GAIN, _BEHIND = 0.005, 0.1
"""Share of the time for which no search is worth it, and how much later than the best the schedules
of a placement may end that is searched."""
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
    offload: float | None = None,
    seconds: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Schedule:
    """Finds the schedule that ends first on the device clock under a memory limit.

    Candidates are the schedules of this package that fit, as published and in another order for the
    costs, and the orders of a search (`search_orders`), which knows whole sequences, on every
    placement that the model allows, of up to 256 virtual stages or 4 chunks. `lower_bound` says how
    much is left. Nothing is searched where the bound says that at most 0.5% can be won.

    Args:
      costs: costs of half a stage. A stage holds two such chunks, on the V or in a loop, or one
        that takes twice as long.
      layer_costs: costs of every layer, instead of ``costs``, in model order; at least p. Then the
        number of chunks is chosen as well.
      memory_limit: peak in flight per stage, in microbatches of a full stage; None for p.
      offload: time in which the residuals of a chunk move to the host, or back, as a share of its
        F. The limit is then of what a device keeps while others wait on the host, as with
        ``Pipeline(residuals=memory_limit)``; W of published schedules run as early as that asks,
        and orders are searched of which nothing moves. None leaves all on the device.
      num_slices: slices of a microbatch's sequences; costs are then those of the average slice.
      seconds: about how long this takes, unless one schedule takes longer; 0 for the first that
        fits, None for 2.0.
      progress: called with a few words on what the search does next.

    Raises:
      ValueError: the memory limit is too small, or there are fewer layers than stages.

    Example:
      >>> from jaxpipe.schedule.device_clock import device_clock
      >>> costs = Costs(1, 1.2, 0.8)
      >>> schedule = auto(2, 4, costs=costs)
      >>> schedule.num_chunks, round(device_clock(schedule, costs).makespan, 1)
      (2, 25.2)
    """
    limit = num_stages if memory_limit is None else memory_limit
    layers = [costs] * (2 * num_stages) if layer_costs is None else layer_costs
    models = _models(num_stages, num_microbatches, num_slices, layers, limit, offload)
    search = find_soonest(models, progress, seconds)
    if search.makespan == math.inf:
        _refuse_limit(models, limit)
    return dataclasses.replace(
        search.schedule, name="auto", peak_in_flight=peak_in_flight(search.schedule)
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
    current, larger = Search(), Search()
    current.offer(next(m for m in models if m.placement == schedule.placement), [schedule])
    _offer_named(larger, models)
    return larger.schedule, 1 - larger.makespan / current.makespan


def find_soonest(
    models: Sequence[PlacedModel],
    progress: Callable[[str], None] | None = None,
    seconds: float | None = None,
) -> Search:
    """Searches the schedule of a model that ends first, on any of these placements; with slices,
    there may be none."""
    search = Search(seconds, progress)
    published = _offer_named(search, models)
    if models[0].num_slices == 1:
        _offer_searched(search, models, published)
    return search


class PlacedModel(NamedTuple):
    """A model on a placement, with the costs of its virtual stages.

    Args:
      cap: the most chunks in flight on a stage.
      bound: time before which no schedule ends.
      parts: parts in which residuals move to the host; 0 if none do.
    """

    placement: Placement
    num_microbatches: int
    costs: tuple[Costs, ...]
    cap: int
    bound: float
    num_slices: int = 1
    parts: int = 0

    @property
    def num_actions(self) -> int:
        passes = self.num_microbatches * self.num_slices
        return 3 * self.placement.num_virtual_stages * passes

    @property
    def chunk(self) -> Costs:
        """Costs of every chunk, or the unit if they differ."""
        return self.costs[0] if len(set(self.costs)) == 1 else UNIT


class Search:
    """The schedule that ends first on the device clock so far, and the time that is left."""

    schedule: Schedule
    model: PlacedModel
    makespan = math.inf

    def __init__(
        self, seconds: float | None = None, progress: Callable[[str], None] | None = None
    ) -> None:
        self.microseconds = 1e6 * (_SECONDS if seconds is None else seconds)
        self._progress = progress
        self._paced: list[tuple[float, PlacedModel, Schedule]] = []

    def say(self, what: str, model: PlacedModel) -> None:
        """Tells what is done next."""
        if self._progress is not None:
            p, v = model.placement.num_stages, model.placement.num_chunks
            place = "looped" if v > 1 and model.placement.stages[p] == 0 else "V" if v > 1 else ""
            self._progress(f"{what}, {counted(v, 'chunk')} per stage {place}".rstrip())

    def may_gain(self, model: PlacedModel) -> bool:
        """Whether a placement is worth the search: its bound leaves room, and its schedules are not
        far behind."""
        first = min((end for end, placed, _ in self._paced if placed is model), default=0.0)
        return max(model.bound * (1 + _GAIN), first / (1 + _BEHIND)) < self.makespan

    def offer(
        self,
        model: PlacedModel,
        schedules: Iterable[Schedule],
        *,
        price: float = _PUBLISHED,
        share: float = 1.0,
    ) -> list[Schedule]:
        """Takes schedules of one placement that fit, as many as there is time for.

        Args:
          price: microseconds per action that making one takes.
          share: of the time left, what making all of them may take.

        Returns:
          Those that were made and fit.
        """
        timed: list[tuple[float, int, Schedule]] = []
        rest, until = iter(schedules), self.microseconds * (1 - share)
        # There is always one: without a schedule, the search goes on.
        while (self.makespan == math.inf and not timed) or (
            self.microseconds - price * model.num_actions >= until
        ):
            if (schedule := next(rest, None)) is None:
                break
            self.microseconds -= price * model.num_actions
            fits: Schedule | None = schedule
            if max(peak_in_flight(schedule)) > model.cap:
                fits = self._moved(model, schedule)
            if fits is not None:
                timed.append((makespan(fits, model.costs), len(timed), fits))
        # No schedule ends sooner on devices than free-running, and that time is quick to compute.
        seen = set[tuple[tuple[Action, ...], ...]]()
        until = self.microseconds * (1 - _PACED_SHARE)
        for least, _, schedule in sorted(timed):
            if least >= self.makespan or (self.microseconds <= until and self.makespan < math.inf):
                break
            if schedule.orders in seen:
                continue
            seen.add(schedule.orders)
            self.microseconds -= _PACED * model.num_actions
            self._take(model, *soonest_on_devices([schedule], model.costs))
            if model.num_slices == 1 and not model.parts:
                self.microseconds -= _PROMPT * model.num_actions
                if (prompt := read_promptly(schedule, model.costs)) is not None:
                    self._take(model, *prompt)
        return [schedule for *_, schedule in timed]

    def improve(self) -> None:
        """Changes orders and ticks of the best schedules, and goes on with the best of these, in
        the time that is left."""
        # Those that end at the same time mostly are the same.
        distinct = {
            (end, model): (end, model, schedule)
            for end, model, schedule in reversed(self._paced)
            if max(peak_in_flight(schedule)) <= model.cap and self.may_gain(model)
        }
        ranked = sorted(distinct.values(), key=operator.itemgetter(0))
        most = 1 + max(0, int(_ROUNDS[0][1] * self.microseconds / _LEAST_MICROSECONDS))
        starts = ranked[: min(most, _ROUNDS[0][0])] if self.microseconds > 0 else []
        searches = [(model, TickSearch(s, model.costs, model.cap)) for _, model, s in starts]
        for num_searches, share in _ROUNDS:
            searches = sorted(searches, key=lambda pair: pair[1].end)[:num_searches]
            microseconds = share * self.microseconds / max(1, len(searches))
            for model, search in searches:
                self.microseconds -= microseconds
                search.improve(model.bound, 1e-6 * microseconds)
        for model, search in searches:
            self._take(model, search.found(), search.end)

    def _take(self, model: PlacedModel, schedule: Schedule, end: float) -> None:
        self._paced.append((end, model, schedule))
        if end < self.makespan:
            self.schedule, self.model, self.makespan = schedule, model, end

    def _moved(self, model: PlacedModel, schedule: Schedule) -> Schedule | None:
        """A schedule that keeps too much, if it fits while some of that waits on the host."""
        if not model.parts:
            return None
        self.microseconds -= _MOVED * model.num_actions
        return within_limit(schedule, limit=model.cap, parts=model.parts)


def _models(
    num_stages: int,
    num_microbatches: int,
    num_slices: int,
    layer_costs: Sequence[Costs],
    memory_limit: float,
    offload: float | None = None,
) -> list[PlacedModel]:
    """Lists the model on every placement that it allows; refuses what cannot be searched for."""
    problems = []
    if len(layer_costs) < num_stages:
        rule = f"{counted(len(layer_costs), 'layer')} cannot fill $num_stages: each needs a layer"
        others = {"num_stages": num_stages}
        problems.append(Problem("layer_costs", None, rule, (), others, "auto"))
    if not memory_limit >= 1:
        rule = "a stage keeps all chunks of a microbatch at once"
        problems.append(Problem("memory_limit", memory_limit, rule, (1,), schedule="auto"))
    if offload is not None and not offload > 0:
        problems.append(Problem("offload", offload, "must be above 0", schedule="auto"))
    refuse(problems)
    moved = 0 if offload is None else parts_of(offload, layer_costs)
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
        in_flight = math.inf if moved else cap
        bound = lower_bound(place, m, costs, cap=in_flight, num_slices=k)
        models.append(PlacedModel(place, m, costs, cap, bound, k, moved))
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


def _offer_named(
    search: Search, models: Sequence[PlacedModel]
) -> dict[PlacedModel, list[Schedule]]:
    """Offers the schedules of this package, from the V and then the placements of the least bounds
    on; returns the published ones."""
    v = wave(models[0].placement.num_stages)
    ranked = sorted(models, key=lambda model: (model.placement != v, model.bound))
    few = [model for model in ranked if model.placement.num_chunks <= _FEW_CHUNKS]
    published = {}
    for model in dict.fromkeys([*few, *ranked[:_NUM_PROMISING]]):
        if search.may_gain(model):
            search.say("named schedules", model)
            published[model] = search.offer(model, published_schedules(model))
    for model in published:
        if search.may_gain(model):
            search.say("orders for the costs", model)
            waves = model.placement.stages[-1] == 0
            price = _REORDER_V if waves else _REORDER
            search.offer(model, _made_anew(model), price=price, share=_ORDERING_SHARE)
    return published


def _offer_searched(
    search: Search,
    models: Sequence[PlacedModel],
    published: Mapping[PlacedModel, list[Schedule]],
) -> None:
    """Offers orders that are searched for on the best placement and on those of few chunks, each in
    a share of the time that is left, and improves the best in the rest."""
    few = (model for model in models if model.placement.num_chunks <= _SEARCHED_CHUNKS)
    candidates = [*filter(search.may_gain, dict.fromkeys([search.model, *few]))]
    for model in candidates:
        kinds = dict.fromkeys((model.costs, tuple(map(of_ticks, model.costs))))
        if len(kinds) > 1:
            search.offer(model, _fused(model), share=_ORDERING_SHARE)
        longest = model is candidates[0] and len(kinds) == 1
        share = _BEST_SHARE if longest else _SEARCHING_SHARE
        seconds = 1e-6 * share * search.microseconds
        if not search.may_gain(model) or 1e6 * seconds < _LEAST_MICROSECONDS:
            continue
        search.say("searching orders", model)
        found = published.get(model) or search.offer(model, published_schedules(model))
        # The search moves nothing to the host.
        seeds = [one for one in found if max(peak_in_flight(one)) <= model.cap]
        if not seeds:
            continue
        for costs in kinds:
            orders = search_orders(
                model.placement,
                model.num_microbatches,
                costs=costs,
                cap=model.cap,
                seeds=map(split_backwards, seeds),
                bound=model.bound,
                seconds=seconds / len(kinds),
            )
            search.offer(model, orders, price=0.0)
        search.microseconds -= 1e6 * seconds
    search.improve()


def published_schedules(model: PlacedModel) -> Iterator[Schedule]:
    """Yields the published schedules, and one by a rule, which always fits."""
    yield from _named(model)
    if model.num_slices == 1:
        place, m = model.placement, model.num_microbatches
        yield Schedule("auto", place, m, dispatch(place, m, model.costs, model.cap, _RULE))


def _named(model: PlacedModel, costs: Costs = UNIT) -> Iterator[Schedule]:
    """Yields the schedules of this package on a placement, as published, or for other costs of a
    chunk as `jaxpipe.schedule.catalog.build` orders them anew.

    Fused variants are left out: those with B and W end no later.
    """
    p, m, v = model.placement.num_stages, model.num_microbatches, model.placement.num_chunks
    k = model.num_slices
    schedules: Iterable[Schedule] = ()
    if v == 1 and model.placement == linear(p):
        made = zb_h2, zb_h1, one_f_one_b, eager_1f1b, gpipe
        schedules = (make(p, m, num_slices=k) for make in made)
    elif model.placement == looped(p, num_chunks=v):
        looping = interleaved_zb, interleaved, breadth_first
        groups = range(-(-p // 2), p) if k == 1 else ()
        schedules = itertools.chain(
            (make(p, m, num_chunks=v, num_slices=k) for make in looping),
            (interleaved(p, m, num_chunks=v, group=group) for group in groups),
        )
    elif v % 2 == 0 and model.placement == wave(p, num_waves=v // 2):
        if v == 2:
            yield from (make(p, m, costs=costs) for make in (zb_v, v_half, v_min))
        yield hanayo(p, m, num_chunks=v, memory_limit=model.cap / v, costs=costs)
        if v == 2:
            schedules = (make(p, m) for make in (dualpipe_v, one_f_one_b_v))
    if costs != UNIT:
        schedules = (in_time(s, costs) for s in schedules if s.name in _REORDERED)
    yield from schedules


def _made_anew(model: PlacedModel) -> Iterator[Schedule]:
    """Yields what is made for the costs and the limit: the best building block, and the schedules
    of this package in other orders."""
    p, m = model.placement.num_stages, model.num_microbatches
    on_v = model.placement == wave(p) and model.num_slices == 1
    if on_v and min(max(v_min(p, m).peak_in_flight or ()), 2 * m) <= model.cap < 2 * p:
        limit, trials = model.cap / 2, _TRIALS * model.num_actions
        yield controllable_memory(p, m, memory_limit=limit, costs=model.chunk, trial_actions=trials)
    for costs in dict.fromkeys((model.chunk, of_ticks(model.chunk))):
        if costs != UNIT:
            yield from _named(model, costs)


def _fused(model: PlacedModel) -> Iterator[Schedule]:
    """Yields orders with every W after its B: for ticks as long as a late message, which a W alone
    would not fill, and for prompt messages, which go on from tick to tick."""
    place, m = model.placement, model.num_microbatches
    for costs in ([*map(of_ticks, model.costs)], [_PROMPTLY] * len(model.costs)):
        for rule in rules(place)[:_NUM_FUSED]:
            orders = dispatch(place, m, costs, model.cap, rule, fused=True)
            yield split_backwards(Schedule("auto", place, m, orders))


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
        f"{schedule.name}: {plain(timeline.makespan)}, at most {above:.1%} above the optimum on "
        "this placement at this peak"
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
