"""``jaxpipe plan``: which mesh, schedule and options train a model soonest on given devices."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress

from jaxpipe.commands.options import read_sizes
from jaxpipe.commands.printing import (
    output_console,
    prefixed,
    print_differences,
    print_parts,
    progress_bar,
    say,
    written,
)
from jaxpipe.planning import configurations, cost
from jaxpipe.planning.configurations import COMPILED_FOR, Configured
from jaxpipe.planning.cost import Prediction
from jaxpipe.planning.devices import DEVICES, LAUNCH_SECONDS, USABLE_MEMORY, Cluster, cluster, find
from jaxpipe.planning.search import FINALISTS, REASONS, Goal, Result, compiled, is_usual, search
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.schedule.problems import Problem, below_one, refuse

_DAY = 86400
_AS_GOOD = 1.02
"""Factor up to which a plan is as good as the best."""


def plan(
    *,
    devices: tuple[int, ...],
    device: str,
    config: Path | None = None,
    sizes: Path | None = None,
    link: str | None = None,
    context: int = 1,
    slices: int = 1,
    memory: float | None = None,
    tokens: float | None = None,
    batch: tuple[int, ...] | None = None,
    critical_batch: float | None = None,
    objective: Literal["time", "cost", "memory"] = "time",
    out: Path | None = None,
    measure: int | None = None,
    write_sizes: Path | None = None,
) -> None:
    """Choose mesh, schedule, microbatches, rematerialization, ZeRO level and offload for a model.

    Everything is predicted: layers from traces and the rates of the device, messages and transfers
    from the tick table that would run. Nothing runs, and only --measure compiles.

    Args:
      devices: number of devices; several numbers are compared.
      device: v100, a100, h100, h200, b200, b300, gb200, gb300, mi300x, mi355x, v7x; cpu for
        devices that jax simulates; or a .json file that `jaxpipe measure` wrote.
      config: the trainer's configuration, which has the model and the batch.
      sizes: a file that --write-sizes wrote, in place of a configuration.
      link: links such as nvlink:8,ib:400: within hosts, nvlink or pcie and the number of devices;
        between hosts, ib or eth and the Gb/s of a device's port. By default the device's usual
        links.
      context: most devices that may share a sequence; each number takes seconds to trace.
      slices: most slices per sequence; each number takes seconds to trace.
      memory: bytes of a device's memory that a plan may use; by default 92% of it.
      tokens: tokens to train on, for time and cost of the training; by default those of one step.
      batch: rows of a step; several numbers are compared. By default that of the configuration.
      critical_batch: critical batch size B_crit in tokens, as a run's noise scale estimates it.
        Training on T tokens in batches of B then takes T (1/B + 1/B_crit) steps.
      objective: the quantity that the best plan minimizes.
      out: file for the best plan, as a configuration.
      measure: number of best plans to compile without devices, which takes half a minute to minutes
        each. The compiler's figures then replace the predicted memory, and plans over the limit
        are ruled out; times remain predictions. h100, h200 and b200 need jax's CUDA plugin, cpu
        nothing.
      write_sizes: file for what the model computes and keeps, to be read by --sizes.
    """
    refuse(
        [
            *_problems(config, sizes, out),
            *below_one({"context": context, "slices": slices}),
            *(problem for n in devices for problem in below_one(devices=n)),
            *(problem for n in batch or () for problem in below_one(batch=n)),
            *_wrong_tokens(tokens, critical_batch),
        ]
    )
    found = find(device)
    kind = found if isinstance(found, str) else found.name
    refuse(_unmeasurable(measure, kind, config))
    clusters = [cluster(found, count, link=link, memory=memory) for count in devices]
    with progress_bar() as bar:
        counting = bar.add_task("counting the model", total=1.0)
        configured = None if config is None else configurations.read(config)
        if configured is not None:
            model = configured.sizes(
                devices, context, slices, lambda share: bar.update(counting, completed=share)
            )
        else:
            assert sizes is not None
            model = read_sizes(sizes, option="sizes")
        bar.update(counting, completed=1.0)
        if write_sizes is not None:
            write_sizes.write_text(model.to_json(), encoding="utf-8")
        if model.multiplies_blocks and not clusters[0].device.multiplies_blocks:
            rule = "has no matmuls with a scale for each 32 values, as the model's MXFP8 needs"
            refuse([Problem("device", kind, rule, ("b200", "gb200", "b300", "gb300"))])
        searching = bar.add_task("searching", total=1.0)
        goal = Goal(tokens, batch or (model.batch_rows,), critical_batch, objective)
        result = search(
            model,
            clusters,
            goal,
            finalists=max(FINALISTS, measure or 0),
            progress=lambda share: bar.update(searching, completed=share),
        )
        if measure is not None:
            assert configured is not None
            result = _compiled(result, configured, measure, kind, goal, bar)
    console = output_console()
    _report(console, model, clusters, goal, result)
    if out is not None:
        assert configured is not None
        best = result.best[0]
        steps = None if tokens is None else round(best.steps)
        text = configured.write(best.plan, cost.chunk_costs(best.placed), steps)
        out.write_text(text, encoding="utf-8")
        console.print(f"the first plan is written to {out}")


def _compiled(
    result: Result, configured: Configured, count: int, device: str, goal: Goal, bar: Progress
) -> Result:
    """Compiles the best plans of a result, without their devices."""
    compiling = bar.add_task("compiling", total=min(count, len(result.best)))

    def taken(candidate: Prediction) -> int:
        costs = cost.chunk_costs(candidate.placed)
        size = configured.compiled_bytes(candidate.plan, costs, device)
        bar.advance(compiling)
        return size

    return compiled(result, taken, count=count, goal=goal)


def _problems(config: Path | None, sizes: Path | None, out: Path | None) -> list[Problem]:
    problems = []
    if (config is None) == (sizes is None):
        rule = "or $sizes must be given, and not both"
        problems.append(Problem("config", config, rule, (), {"sizes": None}))
    if out is not None and config is None:
        problems.append(
            Problem("out", out, "needs $config, which it changes", (), {"config": None})
        )
    if out is not None and config is not None and out.suffix != config.suffix:
        rule = f"must end in {config.suffix}: it is written as $config is"
        nearest = (str(out.with_suffix(config.suffix)),)
        problems.append(Problem("out", str(out), rule, nearest, {"config": str(config)}))
    return problems


def _wrong_tokens(tokens: float | None, critical_batch: float | None) -> list[Problem]:
    problems = []
    for name, number in (("tokens", tokens), ("critical_batch", critical_batch)):
        if number is not None and not number > 0:
            problems.append(Problem(name, number, "must be a number of tokens above 0"))
    if critical_batch is not None and tokens is None:
        rule = "decides how many steps $tokens take, which are not given"
        problems.append(Problem("critical_batch", critical_batch, rule, (None,), {"tokens": None}))
    return problems


def _unmeasurable(measure: int | None, device: str, config: Path | None) -> list[Problem]:
    if measure is None:
        return []
    problems = below_one(measure=measure)
    if config is None:
        problems.append(Problem("measure", measure, "needs $config", (None,), {"config": None}))
    if device not in COMPILED_FOR:
        rule = f"compiles for {', '.join(COMPILED_FOR)}, and $device is none of them"
        problems.append(Problem("measure", measure, rule, (None,), {"device": device}))
    return problems


def _report(
    console: Console, model: ModelSizes, clusters: Sequence[Cluster], goal: Goal, result: Result
) -> None:
    devices = clusters[0]
    counts = ", ".join(str(cluster.count) for cluster in clusters)
    kind = devices.device
    basis = "assumed" if kind in DEVICES.values() else "measured"
    for text in _in_words(result, goal):
        say(console, text)
    say(
        console,
        f"{model.name}, {model.num_parameters / 1e9:.3g}B parameters, {kind.name} x {counts}: "
        f"{basis} are {prefixed(devices.flops, 'FLOP/s')} of "
        f"matmuls ({devices.flops / kind.flops:.0%} of the peak), "
        f"{prefixed(devices.bandwidth, 'B/s')} of memory ({kind.efficiency.memory:.0%}), "
        f"{prefixed(devices.within, 'B/s')} within hosts of {devices.per_host} "
        f"({kind.efficiency.link:.0%}), {prefixed(devices.across, 'B/s')} between them, "
        f"{LAUNCH_SECONDS * 1e6:.0f} us per kernel, "
        f"{kind.latency * 1e6:.0f} us per message beyond its bytes, "
        f"{devices.memory_bytes / 1e9:.3g} GB of memory (of a device's, {USABLE_MEMORY:.0%} unless "
        f"--memory says more), ${kind.dollars_per_hour:g} per device and hour; peaks from: "
        f"{kind.source}",
    )
    _print_plans(console, "best plans", result.best[:5], goal)
    front = sorted(result.front, key=lambda candidate: candidate.device_bytes)
    _print_plans(console, "no other plan is better in time, memory and cost", front, goal)
    best = [(str(number), plan) for number, plan in enumerate(result.best[:5], start=1)]
    print_parts(console, "milliseconds of a step", "plan", best, "seconds", 1e3)
    print_parts(console, "GB of a device", "plan", best, "bytes", 1e-9)
    out = result.excluded.total()
    console.print(f"{result.considered} plans were looked at; {out} are out:")
    for reason, count in result.excluded.most_common():
        if count:
            console.print(f"  {count} {reason}: {REASONS[reason]}")


def _in_words(result: Result, goal: Goal) -> Iterator[str]:
    """Says what the best plan is, and how far the best ones of other kinds are from it."""
    best, plain, usual = result.best[0], result.without_stages, result.usual
    yield f"best: {_described(best)}"
    staged = next((other for other in result.best if other.plan.stage > 1), None)
    if best.plan.stage == 1:
        if staged is not None:
            yield f"with stages: {_beside(staged, best)}"
            yield "no pipeline is needed here: data, tensor or context devices alone do better"
    elif plain is None:
        yield (
            "without stages, on data, tensor and context devices alone, no plan fits: "
            "the batch has too few rows, or a device too little memory"
        )
    else:
        yield f"without stages: {_beside(plain, best)}"
        if goal.value(plain.measures) <= _AS_GOOD * goal.value(best.measures):
            yield f"that is within {_AS_GOOD - 1:.0%} of the best, and simpler"
    if usual is not None and best.plan.stage > 1 and not is_usual(best.plan):
        yield f"as Megatron-LM is mostly run, with 1F1B and ZeRO-1: {_beside(usual, best)}"


def _beside(other: Prediction, best: Prediction) -> str:
    """Describes a plan, and what it loses most by."""
    more = {name: seconds - best.seconds[name] for name, seconds in other.seconds.items()}
    more["doubt"] = other.doubt - best.doubt
    cause = max(more, key=more.__getitem__)
    return f"{_described(other)}; it takes {written(more[cause])} s more of {cause}"


def _described(prediction: Prediction) -> str:
    plan = prediction.plan
    axes = {
        "stages": plan.stage, "replicas": plan.replica, "data shards": plan.parts,
        "context devices": plan.context, "tensor devices": plan.tensor,
    }  # fmt: skip
    mesh = " x ".join(f"{count} {axis}" for axis, count in axes.items() if count > 1)
    mesh += f" with experts over {plan.expert} data shards" if plan.expert > 1 else ""
    chunks = f" with {plan.chunks} chunks per stage" if plan.chunks > 1 else ""
    slices = f" with {plan.slices} slices per sequence" if plan.slices > 1 else ""
    schedule = f"{plan.schedule}{chunks}{slices}, " if plan.stage > 1 else ""
    least, most = prediction.range_seconds
    return (
        f"{mesh or 'one device'}, {schedule}microbatches x rows {plan.microbatches} x {plan.rows}, "
        f"remat {plan.remat}, ZeRO-{plan.zero}: {written(prediction.step_seconds)} s per step, "
        f"{written(least)} to {written(most)}, "
        f"{prediction.model_flops_share:.1%} of the model FLOPs of the peak, "
        f"{written(prediction.device_bytes / 1e9)} GB of a device"
    )


def _print_plans(console: Console, title: str, plans: Sequence[Prediction], goal: Goal) -> None:
    training = goal.tokens is not None
    axes = {
        axis: [getattr(candidate.plan, axis) for candidate in plans]
        for axis in ("stage", "replica", "parts", "context", "tensor")
    }
    used = [axis for axis, sizes in axes.items() if axis == "stage" or max(sizes) > 1]
    names = " x ".join("data" if axis == "parts" else axis for axis in used)
    title += f"; a mesh is {names}"
    experts = any(candidate.plan.expert > 1 for candidate in plans)
    sliced = any(candidate.plan.slices > 1 for candidate in plans)
    columns = ["plan", "devices", "mesh", *(["expert"] * experts)]
    columns += ["schedule", "v", *(["slices"] * sliced), "m x rows", "remat", "head", "ZeRO"]
    columns += ["host", "step, s", "at most", "MFU", "GB", *(["days", "$"] * training)]
    rows = []
    for number, candidate in enumerate(plans, start=1):
        p = candidate.plan
        shown = [str(number), str(candidate.placed.cluster.count)]
        shown.append(" x ".join(str(getattr(p, axis)) for axis in used))
        shown += [str(p.expert)] * experts
        shown += [p.schedule, str(p.chunks), *([str(p.slices)] * sliced)]
        shown += [f"{p.microbatches} x {p.rows}", p.remat]
        shown += ["ends" if p.ends else "split", str(p.zero), str(p.on_host)]
        shown += [written(candidate.step_seconds), written(candidate.range_seconds[1])]
        shown.append(f"{candidate.model_flops_share:.1%}")
        shown.append(written(candidate.device_bytes / 1e9))
        if training:
            shown += [f"{candidate.train_seconds / _DAY:.2f}", f"{candidate.dollars:,.0f}"]
        rows.append(shown)
    print_differences(console, columns, rows, title=title)
