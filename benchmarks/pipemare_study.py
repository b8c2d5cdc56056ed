"""What does a pipeline that never drains cost in quality, and gain in time and memory?

Trains one configuration, with as many stages as layers, synchronously, by naive asynchrony, with
PipeMare's techniques one after the other, recomputation included, and by PipeDream and 2BW, each
with several seeds.

    python -m benchmarks.pipemare_study [--config FILE] [--steps 150] [--seeds 3] [--names naive T1]

Time is in minibatches of work of a full pipeline: a synchronous step takes 1/(1 - bubble) of them,
and an asynchronous pipeline drains before its model is read. A tick that also recomputes is longer
by a forward. 2BW cuts the same minibatch into the smallest number of microbatches that it can run
with. Memory is that of the compiled program, in which every stage has the room of the
largest, and as modelled: what the rules require of a stage, averaged over all stages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import harness
from jaxpipe.runtime import tracing
from jaxpipe.runtime.memory import tree_bytes
from jaxpipe.schedule.simulate import simulate
from train import checks, loop, pipeline_section
from train.command_line import parse
from train.config import Config
from train.errors import ConfigError, NonFiniteLossError
from train.modes import Asynchronous, Synchronous, device_bytes
from train.processes.watchdog import Watchdog
from train.runs import run_folder
from train.step import Setup
from train.watch.goodput import Goodput

_CONFIG = "configs/resnet-digits-pipemare.yaml"
_OFF: dict[str, Any] = {"rescheduling_steps": 0, "discrepancy_decay": 0.0, "warmup_steps": 0}
_OWN: dict[str, Any] = {"rescheduling_steps": None, "discrepancy_decay": None, "warmup_steps": 0}
_T1, _T2, _T3 = "rescheduling_steps", "discrepancy_decay", "warmup_steps"
_EVALUATIONS = 10
_MB = 1e6
_MEMORY = {"weights": "#27518f", "optimizer": "#9dbdf0", "activations": "#1b7468"}
_COLOURS = ("#555555", "#c0392b", "#e08e2b", "#9dbdf0", "#27518f", "#1b7468", "#8e5aa8", "#4d4d00")


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train.

    Args:
      schedule: of the pipeline.
      on: fields of the section ``asynchronous`` that keep the configuration's value.
      recompute_segment: stages of a segment that is recomputed, or None.
    """

    schedule: str
    on: tuple[str, ...] = ()
    recompute_segment: int | None = None


_Name = Literal[
    "synchronous", "naive", "T1", "T1+T2", "T1+T2+T3", "recomputing", "PipeDream", "2BW"
]

METHODS: dict[_Name, Method] = {
    "synchronous": Method("1f1b"),
    "naive": Method("pipemare"),
    "T1": Method("pipemare", (_T1,)),
    "T1+T2": Method("pipemare", (_T1, _T2)),
    "T1+T2+T3": Method("pipemare", (_T1, _T2, _T3)),
    # Each stage by itself, which needs the least room; one program gives all stages the same.
    "recomputing": Method("pipemare", (_T1, _T2, _T3), recompute_segment=1),
    "PipeDream": Method("pipedream"),
    "2BW": Method("2bw"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compare.

    Args:
      config: a configuration with ``pipeline.schedule: pipemare``.
      steps: optimizer steps of every run; None for the configuration's.
      seeds: runs of every method.
      names: of the methods.
    """

    config: str = _CONFIG
    steps: int | None = None
    seeds: int = 3
    names: tuple[_Name, ...] = tuple(METHODS)


def configure(base: Config, method: Method, *, steps: int, seed: int, folder: Path) -> Config:
    """The configuration of one run."""
    tree = base.model_dump()
    synchronous = method.schedule == "1f1b"
    kept = {field: tree["asynchronous"][field] for field in method.on}
    own = {"recompute_segment": method.recompute_segment}
    tree["asynchronous"] = (_OWN if synchronous else _OFF) | kept | own
    tree["pipeline"]["schedule"] = method.schedule
    if method.schedule == "2bw":
        rows, needed = tree["train"]["batch_size"], 2 * base.mesh.stage - 1
        fitting = [n for n in range(needed, rows + 1) if rows % (n * base.mesh.data) == 0]
        if not fitting:
            raise ValueError(
                f"train.batch_size={rows} cannot be cut into the {needed} or more microbatches "
                f"that 2BW needs with mesh.stage={base.mesh.stage}.\nNearest valid: "
                f"{needed * base.mesh.data}, or --names without 2BW."
            )
        tree["pipeline"]["microbatches"] = fitting[0]
    every = max(steps // _EVALUATIONS, 1)
    tree["train"] |= {"steps": steps, "seed": seed, "eval_every": every, "checkpoint_every": steps}
    return Config.model_validate(tree | {"run_dir": str(folder)})


def train(config: Config) -> dict[str, Any]:
    """One run: its held-out losses by step, and the score that the task reports.

    A run whose loss is not finite has the losses until then, and no score.
    """
    score, finished = None, True
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            score = loop.run(
                config, Watchdog(config.distributed.patience_seconds), Goodput(), resume=False
            )
    except NonFiniteLossError:
        finished = False
    path = Path(config.run_dir) / run_folder.METRICS_FILE
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    losses = {r["step"]: r["eval_loss"] for r in records if "eval_loss" in r}
    corrections = [max(r["correction"]) for r in records if "correction" in r]
    return {
        "seed": config.train.seed,
        "finished": finished,
        "losses": losses,
        "score": score,
        "correction": max(corrections, default=0.0),
    }


def work(config: Config) -> dict[str, float]:
    """The pipeline's utilization under a method, and its compiled memory in MB per device."""
    setup = Setup(config)
    full = synchronous = 1 - Synchronous(setup).bubble(1)
    drain, tick = 0.0, 1.0  # a tick in mean times of a microbatch on a stage
    if pipeline_section.is_asynchronous(config):
        mode = Asynchronous(setup)
        carried, compiled = mode.carried_bytes(), mode.compile()
        weights = carried.pop("weights") + carried.pop("T2's mean steps", 0)
        optimizer, kept = carried.pop("optimizer state"), sum(carried.values())
        warmup = config.asynchronous.warmup_steps
        steps = config.train.steps - warmup
        chunks = setup.chunk_costs
        ticks = warmup / synchronous + steps / mode.steady.utilization(steps, chunks)
        tick /= mode.steady.full_utilization(chunks)
        drain = mode.steady.drain_ticks / mode.steady.num_microbatches
        full = config.train.steps / ticks
        if config.asynchronous.recompute_segment is not None:
            costs = pipeline_section.costs(config)
            tick *= 1 + costs.f / (costs.f + costs.b + costs.w)
    else:
        compiled, kept = setup.compile(), 0
        weights = device_bytes(setup.state_shapes.params)
        optimizer = device_bytes(setup.state_shapes.optimizer)
    return {
        "synchronous": synchronous,
        "utilization": full,
        "drain": drain,
        "tick": tick,
        "weights_mb": weights / _MB,
        "optimizer_mb": optimizer / _MB,
        "activations_mb": (kept + compiled.memory_analysis().temp_size_in_bytes) / _MB,
        **{f"modelled_{name}_mb": size / _MB for name, size in modelled(setup).items()},
    }


def modelled(setup: Setup) -> dict[str, float]:
    """The memory that the method's rules require for the layers of a stage, the mean in bytes.

    A separate program for every stage would need this. Activations include a gradient sum.
    """
    config, batch = setup.config, setup.batch_shapes
    rng = jax.eval_shape(lambda: setup.rng(0))
    layers, _ = tracing.traced_layers(setup.pipe, batch, rng)
    splits, own = [layers.kinds[kind].split for kind in layers.kind_of], setup.pipe.layout.layers
    parameters = [tree_bytes(own.local.shape_of(n)) for n in range(len(splits))]
    residuals = [tree_bytes([split.until_b, split.until_w]) for split in splits]
    peaks = simulate(setup.schedule, pipeline_section.costs(config)).peak_in_flight
    weights = activations = first = 0
    for d, count in enumerate(setup.layer_counts):
        own, kept = sum(parameters[first : first + count]), sum(residuals[first : first + count])
        entered = layers.activations[layers.kinds[layers.kind_of[first]].x]
        versions, microbatches, inputs = 1, peaks[d], 0
        if pipeline_section.is_asynchronous(config):
            steady = pipeline_section.steady_state(config)
            part, corrects = steady.stage(d), pipeline_section.techniques(config)[1] is not None
            delay = {"pipemare": int(corrects), "2bw": 1}
            versions += delay.get(steady.method, steady.delay(part, 0))
            begins = part.forward
            if part.recompute is not None:
                begins = part.recompute
                inputs = (begins - part.forward) * steady.begins_segment(d)
            microbatches = part.backward - begins + 1
        weights += versions * own
        activations += microbatches * kept + inputs * tree_bytes(entered) + own
        first += count
    stages = len(setup.layer_counts)
    return {"weights": weights / stages, "activations": activations / stages}


def time_of(step: int, config: Config, costs: Mapping[str, float]) -> float:
    """The time at which a step is done, in minibatches of work of a full pipeline."""
    warmup = config.train.steps
    if pipeline_section.is_asynchronous(config):
        warmup = min(step, config.asynchronous.warmup_steps)
    synchronous = min(step, warmup)
    drain = costs["drain"] if step > warmup else 0
    asynchronous = (step - synchronous + drain) * costs["tick"]
    return synchronous / costs["synchronous"] + asynchronous


def row(name: str, method: Mapping[str, Any], target: float) -> dict[str, Any]:
    """A method's row of the table: the mean of its seeds, and the spread from best to worst."""
    runs, costs, config = method["runs"], method["costs"], method["config"]
    last = [list(run["losses"].values())[-1] for run in runs if run["finished"]]
    scores = [run["score"] for run in runs if run["score"] is not None]
    times = []
    for run in runs:
        reached = [step for step, loss in run["losses"].items() if loss <= target]
        times += [time_of(step, config, costs) for step in reached[:1]]
    return {
        "method": name,
        "N": config.pipeline.microbatches,
        **_summary("loss", last),
        **_summary("score", scores),
        "diverged": len(runs) - len(last),
        "utilization": costs["utilization"],
        "time_to_target": statistics.mean(times) if len(times) == len(runs) else "never",
        **{key: value for key, value in costs.items() if key.endswith("_mb")},
    }


def _summary(name: str, values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {name: "-", f"{name}_spread": "-"}
    return {name: statistics.mean(values), f"{name}_spread": max(values) - min(values)}


def half_way(methods: Mapping[str, Mapping[str, Any]]) -> tuple[str, float]:
    """The first method that never diverged, and its held-out loss after half of its steps."""
    for name, method in methods.items():
        losses = [list(run["losses"].values()) for run in method["runs"]]
        if all(run["finished"] for run in method["runs"]):
            return name, statistics.mean(run[(len(run) - 1) // 2] for run in losses)
    raise ValueError("Every method diverged: lower optimizer.peak_lr.")


def figure(methods: Mapping[str, Mapping[str, Any]], target: float) -> Figure:
    """Held-out loss over time, with the spread of the seeds; and memory."""
    drawn = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(drawn)
    curves, memory = drawn.subplots(1, 2, width_ratios=(3, 2))
    for (name, method), colour in zip(methods.items(), _COLOURS, strict=False):
        runs, costs, config = method["runs"], method["costs"], method["config"]
        steps = sorted(set.intersection(*(set(run["losses"]) for run in runs)))
        times = [time_of(step, config, costs) for step in steps]
        values = [[run["losses"][step] for run in runs] for step in steps]
        curves.plot(times, [statistics.mean(v) for v in values], color=colour, label=name)
        low, high = [min(v) for v in values], [max(v) for v in values]
        curves.fill_between(times, low, high, color=colour, alpha=0.15, linewidth=0)
    curves.axhline(target, color="#999999", linewidth=0.7, linestyle=":", label="target")
    curves.set_yscale("log")
    curves.set_xlabel("time, minibatches of work of a full pipeline")
    curves.set_ylabel("held-out loss, nats")
    curves.legend(frameon=False, fontsize=8)
    left = [0.0] * len(methods)
    for kind, colour in _MEMORY.items():
        sizes = [method["costs"][f"{kind}_mb"] for method in methods.values()]
        memory.barh(list(methods), sizes, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    memory.invert_yaxis()
    memory.set_xlabel("compiled memory per device, MB\n(activations with gradients)")
    memory.legend(frameon=False, fontsize=8)
    for axes in (curves, memory):
        axes.spines[["top", "right"]].set_visible(False)
    return drawn


def study(options: Options, base: Config, steps: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Everything measured, by the method's name."""
    found: dict[str, dict[str, Any]] = {}
    for name in options.names:
        configs = [
            configure(
                *(base, METHODS[name]),
                steps=steps,
                seed=seed,
                folder=folder / f"{name}-{seed}",
            )
            for seed in range(options.seeds)
        ]
        if failures := checks.check(configs[0]):
            raise ConfigError(failures)
        costs, runs = work(configs[0]), []
        for config in configs:
            runs.append(train(config))
            losses = list(runs[-1]["losses"].values())
            harness.note(f"{name}, seed {config.train.seed}: held-out loss {losses[-1:]}")
        found[name] = {"config": configs[0], "costs": costs, "runs": runs}
    return found


def main(options: Options) -> None:
    parsed = parse(["--config", options.config])
    if parsed.failures:
        raise ConfigError(parsed.failures)
    if options.seeds < 1:
        raise ValueError(f"--seeds {options.seeds} must be at least 1.")
    base = parsed.config
    steps = base.train.steps if options.steps is None else options.steps
    harness.simulate(base.mesh.stage * base.mesh.data)
    with tempfile.TemporaryDirectory() as folder:
        # Seeds differ only in their data: one compilation serves them all.
        jax.config.update("jax_compilation_cache_dir", f"{folder}/cache")
        methods = study(options, base, steps, Path(folder))
    first, target = half_way(methods)
    rows = [row(name, method, target) for name, method in methods.items()]
    title = (
        f"{Path(options.config).stem}: {base.mesh.stage} stages, {steps} steps, "
        f"{options.seeds} seeds; target {target:.3f}, {first} after half of its steps"
    )
    harness.write(
        f"pipemare_study-{Path(options.config).stem}",
        rows,
        title=title,
        figure=figure(methods, target),
        details={
            name: {
                "asynchronous": method["config"].asynchronous.model_dump(),
                "runs": method["runs"],
            }
            for name, method in methods.items()
        },
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
