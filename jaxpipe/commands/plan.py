"""``jaxpipe plan``: which mesh, schedule and options train a model soonest on given devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jaxpipe.commands.predictions import print_parts, read_sizes
from jaxpipe.commands.printing import output_console, print_table, say
from jaxpipe.planning import configurations, cost
from jaxpipe.planning.configurations import COMPILED_FOR, Configured
from jaxpipe.planning.cost import Prediction
from jaxpipe.planning.devices import DEVICES, LAUNCH_SECONDS, USABLE_MEMORY, Cluster, cluster, find
from jaxpipe.planning.plans import Plan
from jaxpipe.planning.search import FINALISTS, REASONS, Goal, Result, compiled, search
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.schedule.problems import ArgumentError, Problem, below_one, refuse
from jaxpipe.schedule.show import svg

_DAY = 86400


def plan(
    *,
    devices: tuple[int, ...],
    device: str,
    config: Path | None = None,
    sizes: Path | None = None,
    link: str = "nvlink:8,ib:400",
    context: int = 1,
    memory: float | None = None,
    tokens: float | None = None,
    batch: tuple[int, ...] | None = None,
    critical_batch: float | None = None,
    objective: Literal["time", "cost", "memory"] = "time",
    out: Path | None = None,
    picture: Path | None = None,
    measure: int | None = None,
    write_sizes: Path | None = None,
) -> None:
    """Choose mesh, schedule, microbatches, rematerialization, ZeRO level and offload for a model.

    Everything is predicted: layers from their trace at the peaks of the device, messages and
    transfers from the tick table that would run. Nothing is run, and only --measure compiles.

    Args:
      devices: number of devices; several numbers are compared.
      device: v100, a100, h100, h200, b200; cpu for devices that jax simulates; or a .json file that
        `jaxpipe measure` wrote.
      config: a configuration of the trainer, whose model and batch are meant.
      sizes: a file that --write-sizes wrote, in place of a configuration.
      link: links within hosts and between them: nvlink or pcie with the devices of a host, ib or
        eth with the Gb/s of each device's port.
      context: most devices that may share a sequence; each number of them takes seconds to count.
      memory: bytes of a device that a plan may take; by default 92% of what it has.
      tokens: tokens to train on, for time and cost of the training; by default those of one step.
      batch: rows of a step; several numbers are compared. By default that of the configuration.
      critical_batch: tokens of the critical batch, by which larger batches need fewer steps; the
        noise scale that a run prints is an estimate.
      objective: the quantity that the best plan minimises.
      out: file to write the best plan to, as a configuration.
      measure: number of the best plans to compile without devices, half a minute to minutes each.
        Their memory is then the compiler's, and plans beyond the limit are out; times stay those
        that were predicted. For h100 and h200 it needs jax's CUDA plugin, for cpu nothing.
      picture: file to draw the Pareto front in, .svg.
      write_sizes: file to write what the model computes and keeps to, for --sizes.
    """
    refuse(
        [
            *_problems(config, sizes, out),
            *_below_one(devices, context, batch),
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
            model = configured.sizes(context, lambda share: bar.update(counting, completed=share))
        else:
            assert sizes is not None
            model = read_sizes(sizes, option="sizes")
        bar.update(counting, completed=1.0)
        if write_sizes is not None:
            write_sizes.write_text(model.to_json(), encoding="utf-8")
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
    if picture is not None:
        svg.save(figure(result, _title(model, clusters[0])), picture)
        console.print(f"the Pareto front is drawn in {picture}")


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
    return problems


def _below_one(devices: Sequence[int], context: int, batch: Sequence[int] | None) -> list[Problem]:
    problems = below_one(context=context)
    problems += [Problem("devices", n, "must be at least 1", (1,)) for n in devices if n < 1]
    problems += [Problem("batch", n, "must be at least 1", (1,)) for n in batch or () if n < 1]
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


def progress_bar() -> Progress:
    """Makes a progress bar on stderr, if that is a terminal; it disappears at the end."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _title(model: ModelSizes, devices: Cluster) -> str:
    return f"{model.name}, {model.num_parameters / 1e9:.3g}B parameters, {devices.device.name}"


def _report(
    console: Console, model: ModelSizes, clusters: Sequence[Cluster], goal: Goal, result: Result
) -> None:
    devices = clusters[0]
    counts = ", ".join(str(cluster.count) for cluster in clusters)
    kind = devices.device
    basis = "assumed" if kind in DEVICES.values() else "measured"
    console.print(
        f"{_title(model, devices)} x {counts}: {basis} are {devices.flops / 1e12:.0f} TFLOP/s of "
        f"matmuls ({kind.efficiency.flops:.0%} of the peak), {devices.bandwidth / 1e12:.2f} TB/s "
        f"of memory ({kind.efficiency.memory:.0%}), {devices.within / 1e9:.0f} GB/s within hosts "
        f"of {devices.per_host} ({kind.efficiency.link:.0%}), "
        f"{devices.across / 1e9:.0f} GB/s between them, {LAUNCH_SECONDS * 1e6:.0f} us per kernel, "
        f"{kind.latency * 1e6:.0f} us per message beyond its bytes, "
        f"{devices.memory_bytes / 1e9:.3g} GB of memory (of a device's, {USABLE_MEMORY:.0%} unless "
        f"--memory says more), ${kind.dollars_per_hour:g} per device and hour; peaks from: "
        f"{kind.source}"
    )
    _print_best(console, result.best[0], _of_data_alone(model, clusters, goal))
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


def _print_plans(console: Console, title: str, plans: Sequence[Prediction], goal: Goal) -> None:
    """Prints plans in the columns in which they differ; what all share is said above."""
    rows = [_cells(candidate, goal) for candidate in plans]
    names = [name for name in rows[0] if name in _ALWAYS or len({row[name] for row in rows}) > 1]
    shared = [f"{name} {value}" for name, value in rows[0].items() if name not in names]
    say(console, f"\n{title}; meshes are stage x data x context x tensor")
    if shared:
        say(console, f"all: {', '.join(shared)}")
    numbered = [
        (str(number), *(row[name] for name in names)) for number, row in enumerate(rows, start=1)
    ]
    print_table(console, ["#", *names], numbered)


_ALWAYS = ("mesh", "schedule", "step, s", "MFU", "GB", "days", "$")
"""Columns that are shown even if all plans agree."""


def _cells(candidate: Prediction, goal: Goal) -> dict[str, str]:
    """Makes a plan's cells by column."""
    p = candidate.plan
    cells = {
        "devices": str(candidate.placed.cluster.count),
        "mesh": f"{p.stage}x{p.data}x{p.context}x{p.tensor}",
        "expert": str(p.expert),
        "schedule": p.schedule,
        "v": str(p.chunks),
        "m x rows": f"{p.microbatches} x {p.rows}",
        "remat": p.remat,
        "head": "ends" if p.ends else "split",
        "ZeRO": str(p.zero),
        "replica": str(p.replica),
        "weights": f"{p.weights} {p.weight_slots}",
        "on host": str(p.on_host),
        "step, s": f"{candidate.step_seconds:.3f}",
        "MFU": f"{candidate.model_flops_share:.1%}",
        "GB": f"{candidate.device_bytes / 1e9:.3g}",
    }
    if goal.tokens is not None:
        cells["days"] = f"{candidate.train_seconds / _DAY:.2f}"
        cells["$"] = f"{candidate.dollars:,.0f}"
    return cells


def _in_words(candidate: Prediction) -> str:
    """Describes a plan: its mesh, schedule and policy, and what it takes."""
    p = candidate.plan
    axes = {"stages": p.stage, "data shards": p.data, "context": p.context, "tensor": p.tensor}
    mesh = " x ".join(f"{size} {name}" for name, size in axes.items() if size > 1) or "1 device"
    experts = f", experts over {p.expert}" if p.expert > 1 else ""
    zero = f", ZeRO-{p.zero}" if p.zero else ""
    return (
        f"{mesh}{experts}, {p.schedule}, remat {p.remat}{zero}: "
        f"{candidate.step_seconds:.2f} s a step, {candidate.model_flops_share:.0%} MFU, "
        f"{candidate.device_bytes / 1e9:.3g} GB"
    )


def _print_best(console: Console, best: Prediction, sharded: Prediction | None) -> None:
    """Says in words which plan is best, and what data shards alone would take."""
    say(console, f"best: {_in_words(best)}")
    if sharded is None:
        say(console, "data shards alone do not fit")
    elif sharded.plan != best.plan:
        as_good = best.step_seconds >= _AS_GOOD * sharded.step_seconds
        note = "data shards alone are as good" if as_good else "data shards alone"
        say(console, f"{note}: {_in_words(sharded)}")


_AS_GOOD = 0.98
"""Share of the time of data shards alone from which a pipeline is not worth its trouble."""


def _of_data_alone(model: ModelSizes, clusters: Sequence[Cluster], goal: Goal) -> Prediction | None:
    """Finds the best plan that has no stages and shares no layer; None if none fits."""

    def allowed(plan: Plan) -> bool:
        return plan.stage * plan.sharing * plan.expert == 1

    try:
        return search(model, clusters, goal, finalists=1, allowed=allowed).best[0]
    except ArgumentError:
        return None


def figure(result: Result, title: str) -> str:
    """Draws time against memory of the Pareto front, and of the best plans, as SVG."""
    left, width, height = 60.0, 440.0, max(300.0, 12.0 * len(result.front))
    best = [candidate for candidate in result.best if candidate not in result.front]
    candidates = [*best, *result.front]
    gigabytes = [candidate.device_bytes / 1e9 for candidate in candidates]
    seconds = [candidate.step_seconds for candidate in candidates]

    def place(candidate: Prediction) -> tuple[float, float]:
        x, y = candidate.device_bytes / 1e9, candidate.step_seconds
        right = (x - min(gigabytes)) / (max(gigabytes) - min(gigabytes) or 1)
        down = (max(seconds) - y) / (max(seconds) - min(seconds) or 1)
        return left + width * (0.03 + 0.94 * right), 30 + height * (0.03 + 0.94 * down)

    drawn, front = [svg.text(left, 12, title, size=10)], [*map(place, result.front)]
    drawn.append(svg.line(sorted(front), "#27518f", 1.2))
    # In a column of their own, from slow to fast as the points lie, names never overlap.
    for n, candidate in enumerate(sorted(result.front, key=lambda c: -c.step_seconds)):
        p, y = candidate.plan, 30 + height * (n + 0.5) / len(result.front)
        drawn.append(svg.line([place(candidate), (left + width + 16, y)], "#bbbbbb", 0.5))
        name = f"{p.schedule} {p.stage}x{p.data}x{p.sharing}, {p.remat}, ZeRO-{p.zero}"
        drawn.append(svg.text(left + width + 18, y, name, size=7))
    for places, colour in ((map(place, best), "#9dbdf0"), (front, "#27518f")):
        drawn += [svg.element("circle", cx=x, cy=y, r=3, fill=colour) for x, y in places]
    bottom = 30 + height
    drawn.append(svg.line([(left, 30), (left, bottom), (left + width, bottom)], svg.GREY))
    for x, value in ((0.03, min(gigabytes)), (0.97, max(gigabytes))):
        drawn.append(svg.text(left + width * x, bottom + 10, f"{value:.3g}", anchor="middle"))
    for y, value in ((0.97, min(seconds)), (0.03, max(seconds))):
        drawn.append(svg.text(left - 4, 30 + height * y, f"{value:.3g}", anchor="end"))
    middle = left + width / 2
    drawn.append(svg.text(middle, bottom + 10, "GB of a device", anchor="middle"))
    drawn.append(svg.text(left, 24, "seconds of a step", size=7))
    for x, colour, meaning in (
        (left, "#27518f", "Pareto front"),
        (left + 100, "#9dbdf0", "other best plans"),
    ):
        drawn.append(svg.element("circle", cx=x, cy=bottom + 26, r=3, fill=colour))
        drawn.append(svg.text(x + 8, bottom + 26, meaning))
    return svg.document(left + width + 220, bottom + 36, drawn)
