"""The search: all plans of a model on a cluster, why most are out, the best, and the Pareto front.

Plans are taken up in the order of what they take at least, which needs no schedule. Each is then
timed with the published order of its schedule; the search ends when no plan that is left can be
among the best. The finalists are timed again as they would run, with orders made for their costs.
"""

import contextlib
import dataclasses
import gc
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from jaxpipe.planning import cost, plans
from jaxpipe.planning.cost import Measures, Prediction
from jaxpipe.planning.devices import Cluster
from jaxpipe.planning.memory import device_bytes, least_bytes
from jaxpipe.planning.plans import Family, Offload, PlacedPlan, Plan
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.schedule.problems import ArgumentError, Problem, refuse

FINALISTS = 5
"""Plans that are timed as they would run, a fifth of a second to some seconds each: the best of
every mesh, schedule and policy."""
_MOST_OF_FRONT = 6
"""Other plans of the Pareto front that are shown, the leanest among them."""
_MOST_CHUNKS = {"v-half": 16, "v-min": 16}
"""Most chunks for which an order is made for costs; 48 for others. These try many patterns: one of
32 chunks takes up to 10 s and gains 0.5%, where 40 interleaved chunks gain 24% in seconds."""
_NEAR = 1.25
"""Factor by which a plan that was predicted may exceed the bounds of one that was not."""
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


@dataclasses.dataclass(frozen=True)
class Goal:
    """The training to plan for.

    Args:
      tokens: tokens to see, at a batch far below the critical one; None for one step.
      batches: rows of a step that may be chosen.
      critical_tokens: the critical batch; None if every token counts the same in any batch.
      objective: name of the measure to minimize, a field of `jaxpipe.planning.cost.Measures`.
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

    def steps_of(self, placed: PlacedPlan) -> float:
        return self.steps(placed.plan.batch_rows * placed.model.tokens_per_row)

    def value(self, measures: Measures) -> float:
        """Looks up what the objective minimizes."""
        return float(getattr(measures, self.objective))


ONE_STEP = Goal(None, ())


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of a search.

    Args:
      best: the finalists, the best first.
      without_stages: the best plan of one stage, timed as it would run: data, tensor and context
        devices alone; None if none fits the batch and the memory.
      usual: likewise the best plan as Megatron-LM is mostly run (`is_usual`).
      front: the Pareto front of time, memory and cost, by time.
      excluded: how many plans are out, by `REASONS`.
    """

    best: tuple[Prediction, ...]
    without_stages: Prediction | None
    usual: Prediction | None
    front: tuple[Prediction, ...]
    excluded: Counter[str]
    considered: int


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collects no cycles meanwhile: searches and traces make few, but objects by the hundred
    thousand, and collecting would take a fifth of the time of a search and a tenth of a trace's."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_garbage_collection()
def search(
    model: ModelSizes,
    clusters: Sequence[Cluster],
    goal: Goal,
    *,
    finalists: int = FINALISTS,
    on_host: Offload | None = None,
    allowed: Callable[[Plan], bool] | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Result:
    """Finds the best plans.

    Args:
      clusters: that may be used; they differ in the number of devices.
      finalists: how many of the best plans that differ in mesh, schedule or policy to time as they
        would run.
      on_host: what lies on the host; None for what is best there.
      allowed: which plans may be taken; None for all.
      progress: told which share of the work is done, 0 to 1.
    """
    excluded: Counter[str] = Counter()
    families = [
        family
        for cluster in clusters
        for family in plans.families(
            model,
            cluster,
            goal.batches,
            excluded,
            on_host=plans.on_host(model, cluster) if on_host is None else [on_host],
        )
    ]
    if allowed is not None:
        kept = ([one for one in family if allowed(one.plan)] for family in families)
        families = [family for family in kept if family]
    if not families:
        devices = clusters[0].count
        rule = "divides into no mesh and microbatches; a batch must have rows for the data shards"
        refuse([Problem("batch", goal.batches[0], rule, (devices * 4,), {"devices": devices})])
    progress(0.05)
    screened = screen(families, goal, finalists, excluded, progress)
    if not screened:
        _refuse_memory([one for family in families for one in plans.leanest(family)])

    def value(prediction: Prediction) -> tuple[float, float]:
        return goal.value(prediction.measures), prediction.measures.memory

    first, _ = _finalists(screened, value, finalists)
    considered = len(screened) + excluded.total()

    def best_of(kind: Callable[[Plan], bool]) -> Prediction | None:
        kept = [[one for one in family if kind(one.plan)] for family in families]
        found = screen([family for family in kept if family], goal, 1, Counter())
        fastest = sorted(found, key=value)[:1]
        timed = [predicted(one.placed, goal) for one in fastest]
        return min([*timed, *(one for one in best if kind(one.plan))], key=value, default=None)

    first, others = _finalists(screened, value, finalists)

    def as_they_run(screened: Sequence[Prediction]) -> list[Prediction]:
        timed = []
        for number, prediction in enumerate(screened, start=1):
            timed.append(predicted(prediction.placed, goal))
            progress(0.6 + 0.4 * number / len(screened))
        # Orders that are made for costs may keep more in flight than published ones.
        excluded["memory"] += len(timed) - sum(map(fits, timed))
        return sorted(filter(fits, timed), key=value)

    best = as_they_run(first) or as_they_run(others)
    if not best:
        _refuse_memory([prediction.placed for prediction in (*first, *others)])
    known = {prediction.plan: prediction for prediction in (*others, *best)}
    shown = front(list(known.values()))
    late = {one.plan for one in screened} - {one.plan for one in (*first, *best, *shown)}
    excluded["late"] += len(late)
    without_stages = best_of(lambda plan: plan.stage == 1)
    return Result(tuple(best), without_stages, best_of(is_usual), shown, excluded, considered)


def is_usual(plan: Plan) -> bool:
    """Whether a plan is one that many have run: stages with 1F1B, ZeRO-1, nothing on the host."""
    common = plan.schedule in ("1f1b-fused", "interleaved-fused") and plan.zero <= 1
    return plan.stage > 1 and common and not any(plan.on_host)


def _finalists(
    screened: Sequence[Prediction], value: Callable[[Prediction], tuple[float, float]], count: int
) -> tuple[Sequence[Prediction], Sequence[Prediction]]:
    """Selects the best of every mesh, schedule and policy, and other plans of the Pareto front."""
    ranked = sorted(screened, key=value, reverse=True)
    by_kind = {_kind(prediction): prediction for prediction in ranked}
    best = sorted(by_kind.values(), key=value)[:count]
    others = [prediction for prediction in front(screened) if prediction not in best][::-1]
    return best, others[:: max(1, -(-len(others) // _MOST_OF_FRONT))]


def front(predictions: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """Selects the plans that no other one beats in time, memory and cost at once, by time."""
    kept: list[Prediction] = []
    measures: list[Measures] = []
    for prediction in sorted(predictions, key=lambda prediction: prediction.measures):
        if not any(better.near(prediction.measures) for better in measures):
            kept.append(prediction)
            measures.append(prediction.measures)
    return tuple(kept)


def _kind(prediction: Prediction) -> tuple[object, ...]:
    """Collects what plans share that differ only in rows, slots, ZeRO level or replicas."""
    plan = prediction.plan
    mesh = plan.stage, plan.data, plan.expert, plan.context, plan.tensor
    return *mesh, plan.schedule, plan.remat


def screen(
    families: Sequence[Family],
    goal: Goal,
    finalists: int,
    excluded: Counter[str],
    progress: Callable[[float], None] = lambda share: None,
) -> list[Prediction]:
    """Predicts, with published orders, the plans that may be finalists or extend the Pareto front.

    Families and then halves of them are taken up in the order of their bounds, and plans of many
    stages once more after `cost.coarse_seconds`. As soon as these are above the finalists, the only
    plans left are those whose bounds are not near to all three measures of a prediction.
    """
    queue: list[tuple[float, int, Measures, Family, bool]] = []
    numbers = itertools.count()

    def add(family: Family, least: Measures, *, refined: bool = False) -> None:
        if least.memory > room(family[0]):
            excluded["memory"] += len(family)
        else:
            heapq.heappush(queue, (goal.value(least), next(numbers), least, family, refined))

    predictions: list[Prediction] = []
    values: dict[tuple[object, ...], float] = {}
    pareto: list[Measures] = []
    worst = math.inf

    def slower(least: Measures, factor: float = 1.0) -> bool:
        return goal.value(least) > worst and any(best.near(least, factor) for best in pareto)

    for family in families:
        add(family, _least(family, goal))
    while queue:
        _, number, least, family, refined = heapq.heappop(queue)
        progress(0.05 + 0.55 * number / (number + 1 + len(queue)))
        if slower(least, _NEAR):
            excluded["slower"] += len(family)
        elif len(family) > 1:
            half = len(family) // 2
            for part in (family[:half], family[half:]):
                add(part, _least(part, goal))
        elif not refined and family[0].plan.stage >= 2 * cost.COARSE_STAGES:
            try:
                seconds, doubt = cost.coarse_seconds(family[0])
            except ArgumentError:
                excluded["schedule"] += 1
            else:
                doubt += cost.doubt_of_hosts(family[0])
                add(family, _measures(family[0], goal, seconds, least.memory, doubt), refined=True)
        elif (prediction := evaluated(family[0], goal, excluded, slower)) is not None:
            predictions.append(prediction)
            new = prediction.measures
            if not any(best.near(new) for best in pareto):
                pareto = [new, *(best for best in pareto if not new.near(best))]
            kind, value = _kind(prediction), goal.value(new)
            values[kind] = min(value, values.get(kind, math.inf))
            worst = sorted([*values.values(), *[math.inf] * finalists])[finalists - 1]
    return predictions


def _least(family: Family, goal: Goal) -> Measures:
    """Bounds what each plan of a family takes from below."""
    placed = family[0]
    if len(family) == 1:
        doubt = cost.least_doubt(placed) + cost.doubt_of_hosts(placed)
        seconds, memory = cost.least_seconds(placed), least_bytes(placed)
        return _measures(placed, goal, seconds, memory, doubt)
    fastest = {one.plan.schedule: one for one in reversed(family)}
    memory = min(least_bytes(one, among=(*fastest,)) for one in plans.leanest(family))
    return min(
        _measures(one, goal, cost.least_of_family(one), memory, cost.least_doubt(one))
        for one in fastest.values()
    )


def _measures(
    placed: PlacedPlan, goal: Goal, seconds: float, memory: float, doubt: float
) -> Measures:
    """Extends seconds of a step without stragglers, and those in doubt, to the training and its
    cost."""
    seconds = ((1 + placed.cluster.straggling) * seconds + doubt) * goal.steps_of(placed)
    return Measures(seconds, memory, seconds * placed.cluster.dollars_per_second)


def evaluated(
    placed: PlacedPlan,
    goal: Goal,
    excluded: Counter[str],
    slower: Callable[[Measures], bool] = lambda least: False,
) -> Prediction | None:
    """Predicts a plan with its published order; None, with the reason counted, if it is out."""
    program = cost.program_of(placed, published=True)
    try:
        least = least_bytes(placed, program)
    except ArgumentError:
        excluded["schedule"] += 1
        return None
    if least <= room(placed):
        seconds = cost.seconds_of_order(placed, program)
        doubt = cost.doubt(placed, program, seconds)
        if slower(_measures(placed, goal, sum(seconds.values()), least, doubt)):
            excluded["slower"] += 1
            return None
        parts = device_bytes(placed, program)
        if sum(parts.values()) <= room(placed):
            seconds = cost.step_seconds(placed, program)
            return Prediction(placed, seconds, parts, goal.steps_of(placed), doubt)
    excluded["memory"] += 1
    return None


def predicted(placed: PlacedPlan, goal: Goal = ONE_STEP) -> Prediction:
    """Predicts a plan as it would run, its order made for its costs unless that takes too long."""
    most = _MOST_CHUNKS.get(placed.plan.schedule, 48)
    program = cost.program_of(placed, published=placed.plan.num_chunks > most)
    seconds, parts = cost.step_seconds(placed, program), device_bytes(placed, program)
    doubt = cost.doubt(placed, program, seconds)
    return Prediction(placed, seconds, parts, goal.steps_of(placed), doubt)


def compiled(
    result: Result, measure: Callable[[Prediction], float], *, count: int, goal: Goal
) -> Result:
    """Replaces the predicted memory of the best plans by the compiler's, which ``measure`` returns.

    Args:
      count: how many plans to compile; only these are among the best then.
    """
    known = {
        prediction.plan: prediction._replace(compiled_bytes=measure(prediction))
        for prediction in result.best[:count]
    }
    fit = list(filter(fits, known.values()))
    if not fit:
        least = min(known.values(), key=lambda prediction: prediction.device_bytes)
        rule = (
            f"is too little for the {len(known)} plans that were compiled: the leanest takes "
            f"{least.device_bytes:.4g} bytes, where {sum(least.bytes.values()):.4g} were predicted"
        )
        note = "A lower --memory leads to leaner plans; --measure compiles more of them."
        refuse([Problem("memory", f"{least.placed.cluster.memory_bytes:.3g}", rule, note=note)])
    shown = [known.get(prediction.plan, prediction) for prediction in result.front]
    excluded = result.excluded + Counter(compiled=len(known) - len(fit))
    best = sorted(fit, key=lambda prediction: goal.value(prediction.measures))
    kept = front(list(filter(fits, shown)))
    return dataclasses.replace(result, best=tuple(best), front=kept, excluded=excluded)


def room(placed: PlacedPlan) -> float:
    """Bytes that may be predicted for a plan."""
    return placed.cluster.memory_bytes / MARGIN


def fits(prediction: Prediction) -> bool:
    """Whether a plan's memory, as compiled or else as predicted, is within the limit."""
    compiled = prediction.compiled_bytes
    placed, parts = prediction.placed, sum(prediction.bytes.values())
    return parts <= room(placed) if compiled is None else compiled <= placed.cluster.memory_bytes


def _refuse_memory(placed: Sequence[PlacedPlan]) -> None:
    least = min(placed, key=least_bytes)
    limit, count = least.cluster.memory_bytes, least.cluster.count
    rule = (
        "is too little for any plan: the leanest needs at least "
        f"{MARGIN * least_bytes(least):.3g} bytes on each of {count} devices"
    )
    note = "More devices (--devices), or rows split over tensor devices, need less."
    refuse([Problem("memory", f"{limit:.3g}", rule, note=note)])
