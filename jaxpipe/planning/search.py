"""The search: all plans of a model on a cluster, why most are out, the best, and the Pareto front.

Plans are taken up in the order of what they take at least, which needs no schedule. Each is then
timed with the published order of its schedule; the search ends when no plan that is left can be
among the best. The finalists are timed again as they would run, with orders made for their costs.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from jaxpipe.planning import cost, plans
from jaxpipe.planning.cost import Prediction
from jaxpipe.planning.devices import Cluster
from jaxpipe.planning.plans import OnHost, Placed, Plan
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.schedule.problems import ArgumentError, Problem, refuse

FINALISTS = 8
"""Plans that are timed as they would run, a fifth of a second to some seconds each: the best of
every mesh, schedule and policy."""
_MOST_OF_FRONT = 6
"""Other plans of the Pareto front that are, the leanest among them."""
_NEAR = 0.25
"""Share by which a plan of the Pareto front may exceed one that was not looked at."""
MARGIN = 1.08
"""Factor of the predicted bytes that must fit, for what the compiler adds."""

REASONS = {
    "rows": "rows, shards and microbatches do not divide the batch",
    "layers": "fewer layers than chunks",
    "memory": "more memory than the limit",
    "compiled": "compiles into more memory than the limit",
    "schedule": "the schedule refuses this number of microbatches",
    "slower": "slower than the best, even without a bubble, and hardly leaner",
    "late": "slower than the best, with its bubble",
}
"""Reasons why plans are out, in a word, and the word explained."""

OBJECTIVES: Mapping[str, Callable[[Prediction], float]] = {
    "time": lambda prediction: prediction.train_seconds,
    "cost": lambda prediction: prediction.dollars,
    "memory": lambda prediction: prediction.device_bytes,
}


@dataclasses.dataclass(frozen=True)
class Goal:
    """The training to plan for.

    Args:
      tokens: tokens to see, at a batch far below the critical one; None for one step.
      batches: rows of a step that may be chosen.
      critical_tokens: the critical batch; None if every token counts the same in any batch.
      objective: a name in `OBJECTIVES`.
    """

    tokens: float | None
    batches: tuple[int, ...]
    critical_tokens: float | None = None
    objective: str = "time"

    def steps(self, batch_tokens: float) -> float:
        """Counts optimizer steps: E_min (1 / B + 1 / B_crit) of McCandlish et al. 2018, equation
        2.11.

        Example:
          >>> Goal(1e9, (8,), critical_tokens=1e6).steps(1e6)
          2000.0
        """
        if self.tokens is None:
            return 1.0
        per_token = 1 / batch_tokens
        if self.critical_tokens is not None:
            per_token += 1 / self.critical_tokens
        return self.tokens * per_token

    def steps_of(self, placed: Placed) -> float:
        """Counts optimizer steps with a plan's batch."""
        return self.steps(placed.plan.batch_rows * placed.model.tokens_per_row)


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of a search.

    Args:
      best: the finalists, the best first.
      front: the Pareto front of time, memory and cost, by time.
      excluded: how many plans are out, by `REASONS`.
      considered: how many there were.
    """

    best: tuple[Prediction, ...]
    front: tuple[Prediction, ...]
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
        for plan in plans.plans(
            model,
            cluster,
            goal.batches,
            excluded,
            on_host=plans.on_host(model, cluster) if on_host is None else [on_host],
        )
        if allowed(plan)
    ]
    considered = len(placed) + excluded.total()
    _refuse_none(placed, clusters, goal)
    progress(0.05)
    fitting = [one for one in placed if cost.least_bytes(one) <= _room(one)]
    excluded["memory"] += len(placed) - len(fitting)
    if not fitting:
        _refuse_memory(placed)
    screened = _screened(fitting, goal, finalists, excluded, progress)
    if not screened:
        _refuse_memory(fitting)
    objective = OBJECTIVES[goal.objective]
    by_kind = {_kind(one): one for one in sorted(screened, key=objective, reverse=True)}
    first = sorted(by_kind.values(), key=objective)[:finalists]
    others = [one for one in front(screened) if one not in first][::-1]
    chosen = [*first, *others[:: max(1, -(-len(others) // _MOST_OF_FRONT))]]
    timed = []
    for number, prediction in enumerate(chosen, start=1):
        timed.append(as_run(prediction))
        progress(0.6 + 0.4 * number / len(chosen))
    # Orders that are made for costs may keep more in flight than published ones.
    fit = [one for one in timed if _fits(one)]
    if not fit:
        _refuse_memory(fitting)
    named = {one.plan for one in timed[: len(first)]}
    best = sorted((one for one in fit if one.plan in named), key=objective) or fit
    shown = {one.plan for one in (*best, *front(fit))}
    excluded["memory"] += len(timed) - len(fit)
    excluded["late"] += len(screened) - (len(timed) - len(fit)) - len(shown)
    return Result(tuple(best), front(fit), excluded, considered)


def front(predictions: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """Selects the plans that no other one beats in time, memory and cost at once, by time."""
    kept: list[Prediction] = []
    for one in sorted(predictions, key=lambda one: (one.train_seconds, one.device_bytes)):
        beaten = any(
            other.device_bytes <= one.device_bytes and other.dollars <= one.dollars
            for other in kept
        )
        if not beaten:
            kept.append(one)
    return tuple(kept)


def _kind(prediction: Prediction) -> tuple[object, ...]:
    """Collects what plans share that differ only in rows, slots, ZeRO level or replicas."""
    plan = prediction.plan
    mesh = plan.stage, plan.data, plan.expert, plan.context, plan.tensor
    return *mesh, plan.schedule, plan.remat


def _screened(
    fitting: list[Placed],
    goal: Goal,
    finalists: int,
    excluded: Counter[str],
    progress: Callable[[float], None],
) -> list[Prediction]:
    """Predicts, with published orders, the plans that may be among the best, and lean ones."""
    objective = OBJECTIVES[goal.objective]
    bounds = {one: _bound(one, goal) for one in fitting}
    fitting = sorted(fitting, key=bounds.__getitem__)
    predictions: list[Prediction] = []
    values: dict[tuple[object, ...], float] = {}
    worst, closed = math.inf, len(fitting)
    for number, placed in enumerate(fitting):
        if bounds[placed] > worst:
            closed = number
            break
        if (better := _better_placed(placed, goal, excluded)) is not None:
            predictions.append(better)
            kind = _kind(better)
            values[kind] = min(objective(better), values.get(kind, math.inf))
            worst = sorted([*values.values(), *[math.inf] * finalists])[finalists - 1]
        progress(0.05 + 0.5 * number / (number + 500))
    return predictions + _lean(fitting[closed:], predictions, goal, excluded, progress)


def _lean(
    remaining: Sequence[Placed],
    predictions: Sequence[Prediction],
    goal: Goal,
    excluded: Counter[str],
    progress: Callable[[float], None],
) -> list[Prediction]:
    """Screens the remaining plans for those that may extend the Pareto front of predictions.

    A plan may, if its bounds of time, memory and cost are not near to those of a plan of the front.
    """
    bounds = [(_least_seconds(one, goal), cost.least_bytes(one), one) for one in remaining]
    near = [_measures(one) for one in front(predictions)]
    lean: list[Prediction] = []
    promising = sorted(bounds, key=lambda bound: bound[0] * bound[1])
    for number, (seconds, least, placed) in enumerate(promising):
        progress(0.55 + 0.05 * number / len(remaining))
        dollars = seconds * placed.cluster.dollars_per_second
        most = [(1 + _NEAR) * bound for bound in (seconds, least, dollars)]
        if any(a <= most[0] and b <= most[1] and c <= most[2] for a, b, c in near):
            excluded["slower"] += 1
        elif (better := _better_placed(placed, goal, excluded)) is not None:
            lean.append(better)
            near.append(_measures(better))
    return lean


def _measures(prediction: Prediction) -> tuple[float, float, float]:
    return prediction.train_seconds, prediction.device_bytes, prediction.dollars


def _bound(placed: Placed, goal: Goal) -> float:
    """Bounds the objective from below."""
    if goal.objective == "memory":
        return cost.least_bytes(placed)
    seconds = _least_seconds(placed, goal)
    dollars = goal.objective == "cost"
    return seconds * placed.cluster.dollars_per_second if dollars else seconds


def _least_seconds(placed: Placed, goal: Goal) -> float:
    """Bounds the seconds of the training from below."""
    return goal.steps_of(placed) * cost.least_seconds(placed)


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


def evaluated(placed: Placed, goal: Goal, excluded: Counter[str]) -> Prediction | None:
    """Predicts a plan with its published order; None, with the reason counted, if it is out."""
    program, room = cost.program_of(placed, published=True), _room(placed)
    try:
        fits = cost.least_bytes(placed, program) <= room
    except ArgumentError:
        excluded["schedule"] += 1
        return None
    if not fits or sum((parts := cost.device_bytes(placed, program)).values()) > room:
        excluded["memory"] += 1
        return None
    return Prediction(placed, cost.step_seconds(placed, program), parts, goal.steps_of(placed))


def _better_placed(placed: Placed, goal: Goal, excluded: Counter[str]) -> Prediction | None:
    """Predicts a plan with embedding and head where that is better, or counts why it is out."""
    reasons: Counter[str] = Counter()
    evaluations = [evaluated(choice, goal, reasons) for choice in placements(placed)]
    fitting = [one for one in evaluations if one is not None]
    if not fitting:
        excluded[next(iter(reasons))] += 1
    return min(fitting, key=OBJECTIVES[goal.objective], default=None)


def as_run(prediction: Prediction) -> Prediction:
    """Predicts a plan again as it would run, its order made for its costs."""
    placed = prediction.placed
    program = cost.program_of(placed)
    seconds = cost.step_seconds(placed, program)
    return prediction._replace(seconds=seconds, bytes=cost.device_bytes(placed, program))


def better_as_run(placed: Placed) -> Prediction:
    """Predicts a plan as it would run, with embedding and head where that is faster and fits."""
    timed = [as_run(Prediction(choice, {}, {}, 1.0)) for choice in placements(placed)]
    return min(timed, key=lambda one: (not _fits(one), one.step_seconds))


def compiled(
    result: Result, measure: Callable[[Prediction], float], *, count: int, goal: Goal
) -> Result:
    """Replaces the predicted memory of the best plans by the compiler's.

    Args:
      result: result of a search.
      measure: compiles a plan, and returns its bytes of a device.
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
    """Bytes that may be predicted for a plan."""
    return placed.cluster.memory_bytes / MARGIN


def _fits(prediction: Prediction) -> bool:
    is_compiled = prediction.compiled_bytes is not None
    limit = prediction.placed.cluster.memory_bytes
    return prediction.device_bytes <= (limit if is_compiled else _room(prediction.placed))


def _refuse_none(placed: Sequence[Placed], clusters: Sequence[Cluster], goal: Goal) -> None:
    if placed:
        return
    devices = clusters[0].count
    rule = "divides into no mesh and microbatches; a batch must have rows for the data shards"
    refuse([Problem("batch", goal.batches[0], rule, (devices * 4,), {"devices": devices})])


def _refuse_memory(placed: Sequence[Placed]) -> None:
    least = min(placed, key=cost.least_bytes)
    limit, count = least.cluster.memory_bytes, least.cluster.count
    rule = (
        "is too little for any plan: the leanest needs at least "
        f"{MARGIN * cost.least_bytes(least):.3g} bytes on each of {count} devices"
    )
    note = "More devices (--devices), or rows split over tensor devices, need less."
    refuse([Problem("memory", f"{limit:.3g}", rule, note=note)])


def _refuse_compiled(predictions: Sequence[Prediction]) -> None:
    least = min(predictions, key=lambda one: one.device_bytes)
    rule = (
        f"is too little for the {len(predictions)} plans that were compiled: the leanest takes "
        f"{least.device_bytes:.4g} bytes, where {sum(least.bytes.values()):.4g} were predicted"
    )
    note = "A lower --memory leads to leaner plans; --measure compiles more of them."
    refuse([Problem("memory", f"{least.placed.cluster.memory_bytes:.3g}", rule, note=note)])
