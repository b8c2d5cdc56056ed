"""The search: all plans of a model on a cluster, why most are out, the best, and the Pareto front.

Plans are taken up in the order of what they take at least, which needs no schedule. Each is then
timed with the published order of its schedule; the search ends when no plan that is left can be
among the best. Those are timed again as they would run, with orders made for their costs.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence

from jaxpipe.planning import candidates, memory, step
from jaxpipe.planning.candidates import plans
from jaxpipe.planning.devices import Cluster
from jaxpipe.planning.found import OBJECTIVES, Found, Goal, front
from jaxpipe.planning.plans import OnHost, Placed, Plan
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.schedule.problems import ArgumentError, Problem, refuse

FINALISTS = 8
"""Plans that are timed as they would run, a fifth of a second to some seconds each: of every mesh,
schedule and policy the best one."""
_MOST_OF_FRONT = 6
"""Other plans of the Pareto front that are, the leanest among them."""
_NEAR = 0.25
"""What a plan of the Pareto front may have more than another one that was not looked at."""
_ERROR = 1.02
"""How much more than predicted a plan may compile into: of 99 plans the most was 1.4%."""

REASONS = {
    "rows": "rows, shards and microbatches do not divide the batch",
    "layers": "fewer layers than chunks",
    "memory": "more memory than the limit",
    "compiled": "compiles into more memory than the limit",
    "schedule": "the schedule refuses this number of microbatches",
    "slower": "slower than the best, even without a bubble, and hardly leaner",
    "late": "slower than the best, with its bubble",
}
"""Why plans are out, in a word, and the word explained."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a search found.

    Args:
      best: the finalists, the best first.
      front: the Pareto front of time, memory and cost, by time.
      excluded: how many plans are out, by `REASONS`.
      considered: how many there were.
    """

    best: tuple[Found, ...]
    front: tuple[Found, ...]
    excluded: Counter[str]
    considered: int


def search(
    model: ModelSizes,
    clusters: Sequence[Cluster],
    goal: Goal,
    *,
    finalists: int = FINALISTS,
    on_host: OnHost | None = None,
    allowed: Callable[[Plan], bool] = lambda plan: True,
    progress: Callable[[float], None] = lambda share: None,
) -> Result:
    """Finds the best plans.

    Args:
      clusters: that may be used; they differ in the number of devices.
      finalists: how many of the best plans that differ in mesh, schedule or policy to time as they
        would run.
      on_host: what lies on the host; None for what is best there.
      allowed: which plans may be taken.
      progress: told which share of the work is done, 0 to 1.

    Raises:
      ArgumentError: no plan exists, or none fits the memory.
    """
    excluded: Counter[str] = Counter()
    placed = [
        placements(Placed(plan, model, cluster))[0]
        for cluster in clusters
        for plan in plans(
            model,
            cluster,
            goal.batches,
            excluded,
            on_host=candidates.on_host(model, cluster) if on_host is None else [on_host],
        )
        if allowed(plan)
    ]
    considered = len(placed) + excluded.total()
    _refuse_none(placed, clusters, goal)
    progress(0.05)
    fitting = [one for one in placed if memory.least_bytes(one) <= _room(one)]
    excluded["memory"] += len(placed) - len(fitting)
    if not fitting:
        _refuse_memory(placed)
    found = _screened(fitting, goal, finalists, excluded, progress)
    if not found:
        _refuse_memory(fitting)
    objective = OBJECTIVES[goal.objective]
    of_kind = {_kind(one): one for one in sorted(found, key=objective, reverse=True)}
    first = sorted(of_kind.values(), key=objective)[:finalists]
    rest = [one for one in front(found) if one not in first][::-1]
    chosen = [*first, *rest[:: max(1, -(-len(rest) // _MOST_OF_FRONT))]]
    timed = []
    for n, one in enumerate(chosen, start=1):
        timed.append(exact(one))
        progress(0.6 + 0.4 * n / len(chosen))
    # Orders that are made for costs may keep more in flight than published ones.
    fit = [one for one in timed if _fits(one)]
    if not fit:
        _refuse_memory(fitting)
    named = {one.plan for one in timed[: len(first)]}
    best = sorted((one for one in fit if one.plan in named), key=objective) or fit
    shown = {one.plan for one in (*best, *front(fit))}
    excluded["memory"] += len(timed) - len(fit)
    excluded["late"] += len(found) - (len(timed) - len(fit)) - len(shown)
    return Result(tuple(best), front(fit), excluded, considered)


def _kind(found: Found) -> tuple[object, ...]:
    """What plans have in common that differ only in rows, slots, ZeRO level or replicas."""
    plan = found.plan
    mesh = plan.stage, plan.data, plan.expert, plan.context, plan.tensor
    return *mesh, plan.schedule, plan.remat


def _screened(
    fitting: list[Placed],
    goal: Goal,
    finalists: int,
    excluded: Counter[str],
    progress: Callable[[float], None],
) -> list[Found]:
    """The plans that may be among the best, and lean ones, with published orders."""
    objective = OBJECTIVES[goal.objective]
    bounds = {one: _bound(one, goal) for one in fitting}
    fitting = sorted(fitting, key=bounds.__getitem__)
    found: list[Found] = []
    values: dict[tuple[object, ...], float] = {}
    worst, closed = math.inf, len(fitting)
    for n, one in enumerate(fitting):
        if bounds[one] > worst:
            closed = n
            break
        if (plan := _better_placed(one, goal, excluded)) is not None:
            found.append(plan)
            values[_kind(plan)] = min(objective(plan), values.get(_kind(plan), math.inf))
            worst = sorted([*values.values(), *[math.inf] * finalists])[finalists - 1]
        progress(0.05 + 0.5 * n / (n + 500))
    return found + _lean(fitting[closed:], found, goal, excluded, progress)


def _lean(
    left: Sequence[Placed],
    found: Sequence[Found],
    goal: Goal,
    excluded: Counter[str],
    progress: Callable[[float], None],
) -> list[Found]:
    """Those of the plans that are left without which no plan that was found may be near in time,
    memory and cost at once, with published orders. Those that promise most come first."""
    promised = [(_least_seconds(one, goal), memory.least_bytes(one), one) for one in left]
    near = [_measures(one) for one in front(found)]
    more: list[Found] = []
    for n, (seconds, needed, one) in enumerate(sorted(promised, key=lambda p: p[0] * p[1])):
        progress(0.55 + 0.05 * n / len(left))
        dollars = seconds * one.cluster.dollars_per_second
        most = [(1 + _NEAR) * least for least in (seconds, needed, dollars)]
        if any(a <= most[0] and b <= most[1] and c <= most[2] for a, b, c in near):
            excluded["slower"] += 1
        elif (plan := _better_placed(one, goal, excluded)) is not None:
            more.append(plan)
            near.append(_measures(plan))
    return more


def _measures(found: Found) -> tuple[float, float, float]:
    return found.train_seconds, found.device_bytes, found.dollars


def _bound(placed: Placed, goal: Goal) -> float:
    """The least that the objective can be."""
    if goal.objective == "memory":
        return memory.least_bytes(placed)
    seconds = _least_seconds(placed, goal)
    cost = goal.objective == "cost"
    return seconds * placed.cluster.dollars_per_second if cost else seconds


def _least_seconds(placed: Placed, goal: Goal) -> float:
    """That the training takes at least."""
    steps = goal.steps(placed.plan.batch_rows * placed.model.tokens_per_row)
    return steps * step.least_seconds(placed)


def placements(placed: Placed) -> list[Placed]:
    """Lists a plan with its embedding and head split over the stages and at the ends.

    One stage has no ends, and a model without a split vocabulary has nothing to split.
    """
    several = placed.plan.stage > 1
    choices = (False, True) if several and placed.sizes.outer_split > 0 else (several,)
    return [
        dataclasses.replace(placed, plan=dataclasses.replace(placed.plan, ends=ends))
        for ends in choices
    ]


def evaluated(placed: Placed, goal: Goal, excluded: Counter[str]) -> Found | None:
    """Times a plan with its published order; None, with the reason counted, if it is out."""
    program, limit = step.program_of(placed, published=True), _room(placed)
    try:
        fits = memory.least_bytes(placed, program) <= limit
    except ArgumentError:
        excluded["schedule"] += 1
        return None
    if not fits or step.total(parts := memory.device_bytes(placed, program)) > limit:
        excluded["memory"] += 1
        return None
    steps = goal.steps(placed.plan.batch_rows * placed.model.tokens_per_row)
    return Found(placed, step.step_seconds(placed, program), parts, steps, exact=False)


def _better_placed(placed: Placed, goal: Goal, excluded: Counter[str]) -> Found | None:
    """Times a plan with embedding and head where that is better, or counts why it is out."""
    reasons: Counter[str] = Counter()
    evaluations = [evaluated(choice, goal, reasons) for choice in placements(placed)]
    fitting = [plan for plan in evaluations if plan is not None]
    if not fitting:
        excluded[next(iter(reasons))] += 1
    return min(fitting, key=OBJECTIVES[goal.objective], default=None)


def exact(found: Found) -> Found:
    """A plan as it would run, its order made for its costs."""
    placed = found.placed
    program = step.program_of(placed)
    seconds = step.step_seconds(placed, program)
    return found._replace(seconds=seconds, bytes=memory.device_bytes(placed, program), exact=True)


def exact_best(placed: Placed) -> Found:
    """Times a plan as it would run, with embedding and head where that is faster and fits."""
    timed = [exact(Found(choice, {}, {}, 1.0, exact=False)) for choice in placements(placed)]
    return min(timed, key=lambda plan: (not _fits(plan), plan.step_seconds))


def compiled(
    result: Result, measure: Callable[[Found], float], *, count: int, goal: Goal
) -> Result:
    """Replaces the predicted memory of the best plans by what they are compiled into.

    Args:
      result: of a search.
      measure: bytes of a device of a plan.
      count: how many plans to compile; only these are among the best then.

    Raises:
      ArgumentError: none of them fits the memory.
    """
    known = {one.plan: one._replace(compiled_bytes=measure(one)) for one in result.best[:count]}
    fit = [one for one in known.values() if _fits(one)]
    if not fit:
        _refuse_compiled([*known.values()])
    shown = [known.get(one.plan, one) for one in result.front]
    excluded = result.excluded + Counter(compiled=len(known) - len(fit))
    best = sorted(fit, key=OBJECTIVES[goal.objective])
    kept = front([one for one in shown if _fits(one)])
    return dataclasses.replace(result, best=tuple(best), front=kept, excluded=excluded)


def _room(placed: Placed) -> float:
    """Bytes that may be predicted for a plan, so that what it compiles into fits."""
    return placed.cluster.memory_bytes / _ERROR


def _fits(found: Found) -> bool:
    compiled = found.compiled_bytes is not None
    room = found.placed.cluster.memory_bytes if compiled else _room(found.placed)
    return found.device_bytes <= room


def _refuse_none(placed: Sequence[Placed], clusters: Sequence[Cluster], goal: Goal) -> None:
    if placed:
        return
    devices = clusters[0].count
    rule = "divides into no mesh and microbatches; a batch must have rows for the data shards"
    refuse([Problem("batch", goal.batches[0], rule, (devices * 4,), {"devices": devices})])


def _refuse_memory(placed: Sequence[Placed]) -> None:
    least = min(placed, key=memory.least_bytes)
    limit, count = least.cluster.memory_bytes, least.cluster.count
    rule = (
        "is too little for any plan: the leanest needs at least "
        f"{_ERROR * memory.least_bytes(least):.3g} bytes on each of {count} devices"
    )
    note = "More devices (--devices), or rows split over tensor devices, need less."
    refuse([Problem("memory", f"{limit:.3g}", rule, note=note)])


def _refuse_compiled(found: Sequence[Found]) -> None:
    least = min(found, key=lambda one: one.device_bytes)
    rule = (
        f"is too little for the {len(found)} plans that were compiled: the leanest takes "
        f"{least.device_bytes:.4g} bytes, where {step.total(least.bytes):.4g} were predicted"
    )
    note = "A lower --memory leads to leaner plans; --measure compiles more of them."
    refuse([Problem("memory", f"{least.placed.cluster.memory_bytes:.3g}", rule, note=note)])
