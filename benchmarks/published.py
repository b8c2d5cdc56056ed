"""Published training runs beside what the planner's model predicts for them.

Two predictions per run tell errors of the model and losses of the program apart: one for the system
that ran (its order on the free-running clock, with what it overlaps), and one for jaxpipe's own
program on the same mesh (its tick table on the device clock, where layers wait for collectives).
Both count layers from the same traces, and take the same rates of the devices.

    python -m benchmarks.published

Runs and the model of other systems: `benchmarks.published_systems`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tyro
from scipy.optimize import least_squares

from benchmarks import harness
from benchmarks.published_systems import (
    FOLDER,
    Rates,
    Run,
    Shape,
    cluster_of,
    counted,
    runs,
    system_bytes,
    system_seconds,
)
from benchmarks.studies import common
from jaxpipe.planning import devices
from jaxpipe.planning.cost import Prediction, kernel_seconds
from jaxpipe.planning.plans import NOTHING, PlacedPlan, Plan, who_computes_ends
from jaxpipe.planning.search import Goal, fits, predicted, search
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.runtime.zero import Zero

PAGE = FOLDER.parent / "docs" / "published.md"
MOST_SHARING = 16
"""Devices that share a layer, at most: 8 over tensor, 2 over context."""
RANGE = 0.1, 1.0
"""Range in which rates are fitted."""
_AT_AN_END = 0.0005
"""Distance at which a rate is printed like an end of the range."""
FITTED = 2
"""Rates are fitted to the runs of every third model, from the third on."""

# Steps of jaxpipe.


def own_prediction(run: Run, rates: Rates) -> Prediction:
    """Predicts jaxpipe's program of the mesh: the fastest that fits, or else of the leanest.

    Rematerialization, who computes the ends, and ZeRO-2 in place of 1 may be chosen; schedule and
    microbatches are those of the run, and so are chunks where the layers fill them. Where they do
    not, fewer and larger ones differ less.
    """
    made = []
    layers, most = run.shape.layers, min(run.chunks, run.shape.layers // run.stages)
    fewest = most if layers % (run.stages * run.chunks) == 0 else min(2, most)
    for remat in ("full",) if run.remat == "full" else _REMATS:
        model = _model(run, (run.tensor,), (remat,), run.context)
        (variant,) = model.variants
        choices = itertools.product(
            who_computes_ends(model, variant, run.stages),
            (1, 2) if run.zero and run.data > 1 else (0,),
            range(fewest, most + 1),
        )
        for ends, zero, chunks in choices:
            plan = Plan(
                stage=run.stages, data=run.data, context=run.context, tensor=run.tensor,
                replica=1, schedule=run.schedule.replace("zb-2p", "zb-h2"), chunks=chunks,
                microbatches=run.microbatches, rows=run.rows, remat=remat, zero=Zero(zero),
                weight_slots=min(zero or 1, chunks), weights="unrolled", ends=ends,
            )  # fmt: skip
            made.append(predicted(PlacedPlan(plan, model, cluster_of(run, rates))))
    least = min(one.device_bytes for one in made)
    allowed = list(filter(fits, made)) or [m for m in made if m.device_bytes <= _NEAR * least]
    return min(allowed, key=lambda one: one.step_seconds)


def best_plan(run: Run, rates: Rates) -> Prediction:
    """Predicts jaxpipe's best plan on the GPUs of a run, with nothing on the hosts."""
    heads = run.shape.kv_heads
    model = _model(run, [t for t in _TENSORS if heads % t == 0], _REMATS, 1)
    goal = Goal(None, (run.batch,))
    return search(model, [cluster_of(run, rates)], goal, finalists=1, on_host=NOTHING).best[0]


def _model(run: Run, tensors: Sequence[int], remats: Sequence[str], context: int) -> ModelSizes:
    """Counts a run's model, whose layers are alike."""
    variants = {}
    for tensor, remat in itertools.product(tensors, remats):
        traced = counted(run.shape.config(), tensor, remat, "flash", context, run.precision)
        ((variant, sizes),) = traced.variants.items()
        variants[variant] = sizes._replace(kind_of=(0,) * run.shape.layers)
    return dataclasses.replace(traced, variants=variants)


_REMATS = "none", "dots", "full"
_TENSORS = 1, 2, 4, 8
_MOST_SEARCHED = 512
"""GPUs of a run for which plans are searched; more take a minute each."""
_NEAR = 1.1
"""Factor of the least memory up to which a program is among the leanest."""


def own_seconds(prediction: Prediction) -> dict[str, float]:
    """The parts of `system_seconds`, and copies into slots, out of them, and of weights."""
    placed, seconds = prediction.placed, prediction.seconds
    plan, cluster = placed.plan, placed.cluster
    passes = plan.microbatches * placed.model.num_layers / plan.stage
    layer = placed.sizes.layers[0].passes
    kernels = sum(kernel_seconds(k, plan.rows, cluster) for one in layer for k in one.kernels)
    collectives = sum(
        c.sent.at(plan.rows) / placed.sharing_links.along(c.axis)
        for one in layer
        for c in one.collectives
    )
    return {
        "kernels": passes * kernels,
        "collectives": passes * collectives,
        "copies": seconds["layers"] - passes * (kernels + collectives),
        "waits": seconds["waits"] + seconds["head"],
        "data": seconds["transfers"] + seconds["update"],
    }


# The board.


def thirds(every: Sequence[Run]) -> list[list[Run]]:
    """Splits the dense runs by their models, of which every third is in the same part."""
    dense = [run for run in every if not run.shape.experts]
    names = list(dict.fromkeys(run.model for run in dense))
    return [[run for run in dense if names.index(run.model) % 3 == part] for part in range(3)]


def fit(runs: Sequence[Run], start: Rates) -> Rates:
    """Fits the rates to the logarithms of steps."""

    def errors(values: np.ndarray) -> list[float]:
        return [math.log1p(_error(run, Rates(*values))) for run in runs]

    found = least_squares(errors, start, bounds=RANGE, diff_step=1e-3, ftol=1e-4, xtol=1e-3)
    return Rates(*map(float, found.x))


def _error(run: Run, rates: Rates) -> float:
    return sum(system_seconds(run, rates).values()) / run.measured - 1


class Row(NamedTuple):
    """A row of the board.

    Args:
      run: the published run.
      fitted: whether the rates were fitted to it.
      system: seconds of the system that ran, by part.
      prediction: of jaxpipe's program of the same mesh; None for mixtures.
      gigabytes: memory predicted for the system; None where the source has none.
      best: jaxpipe's best plan on as many GPUs; None where none was searched.
    """

    run: Run
    fitted: bool
    system: Mapping[str, float]
    prediction: Prediction | None
    gigabytes: float | None
    best: Prediction | None

    @property
    def predicted(self) -> float:
        return sum(self.system.values())

    @property
    def error(self) -> float:
        return self.predicted / self.run.measured - 1

    def cells(self) -> dict[str, str]:
        """Makes the cells of the table, by column."""
        cells = {
            "run": self.run.id + ("*" if self.fitted else ""),
            "measured": f"{self.run.measured:.3g}",
            "predicted": f"{self.predicted:.3g}",
            "error": f"{100 * self.error:+.0f}%",
        }
        if self.prediction is None:
            return cells | dict.fromkeys(("jaxpipe", "ratio", "loses", "best plan"), "")
        plan, own = self.prediction.plan, own_seconds(self.prediction)
        more = {name: seconds - self.system.get(name, 0.0) for name, seconds in own.items()}
        causes = [name for name in sorted(more, key=lambda name: -more[name]) if more[name] > 0]
        ratio = sum(own.values()) / self.predicted
        gigabytes = self.prediction.device_bytes / 1e9
        words = [f"{name} {more[name]:.2g}" for name in causes[:_CAUSES]]
        words += [] if fits(self.prediction) else [f"{gigabytes:.0f} GB"]
        return cells | {
            "jaxpipe": f"{sum(own.values()):.3g}, {plan.remat}"
            + (f", ZeRO-{plan.zero}" if plan.zero else "")
            + (f", v={plan.chunks}" if plan.chunks != self.run.chunks else ""),
            "ratio": f"{ratio:.2f}",
            "loses": ", ".join(words) if ratio > 1 else "",
            "best plan": "" if self.best is None else _described(self.best),
        }


_CAUSES = 2
"""Parts that are named per run."""


def _described(prediction: Prediction) -> str:
    plan = prediction.plan
    schedule = f"{plan.schedule}, " if plan.stage > 1 else ""
    mesh = f"{plan.stage}x{plan.data}x{plan.tensor}"
    return f"{prediction.step_seconds:.3g}, {mesh}, {schedule}{plan.remat}"


def searched(every: Sequence[Run]) -> list[Run]:
    """Selects the dense run of each model and precision with the fewest GPUs and rows, for which a
    search takes seconds."""
    fewest: dict[tuple[Shape, str], Run] = {}
    for run in sorted(every, key=lambda run: (run.gpus, run.batch)):
        if not run.shape.experts and run.gpus <= _MOST_SEARCHED:
            fewest.setdefault((run.shape, run.precision), run)
    return list(fewest.values())


def board(every: Sequence[Run], rates: Rates) -> list[Row]:
    """Makes a row per run."""
    rows, fitted, chosen = [], thirds(every)[FITTED], searched(every)
    for run in every:
        prediction = None if run.shape.experts else own_prediction(run, rates)
        gigabytes = None if run.memory_gb is None else system_bytes(run) / 1e9
        best = best_plan(run, rates) if run in chosen else None
        system = system_seconds(run, rates)
        rows.append(Row(run, run in fitted, system, prediction, gigabytes, best))
        harness.note(f"{run.id}: {run.measured:.4g} s, predicted {rows[-1].predicted:.4g}")
    return rows


def ranked(rows: Sequence[Row]) -> tuple[int, int]:
    """Counts pairs of schedules, of one model and batch, that are ordered as measured, and all."""
    right = total = 0
    for one, other in itertools.combinations(rows, 2):
        same = (one.run.model, one.run.batch) == (other.run.model, other.run.batch)
        if same and one.run.gpus == other.run.gpus and one.run.schedule != other.run.schedule:
            total += 1
            by = one.run.measured - other.run.measured, one.predicted - other.predicted
            right += by[0] * by[1] >= 0
    return right, total


def summary(rows: Sequence[Row], rates: Rates) -> list[str]:
    """Says in words how good the predictions are."""
    dense, every = [row for row in rows if not row.run.shape.experts], [row.run for row in rows]
    fitted = sum(row.fitted for row in dense)
    shown = ", ".join(f"{name} {value:.3f}" for name, value in rates._asdict().items())
    least, most = RANGE
    ends = [name for name, n in rates._asdict().items() if min(n - least, most - n) < _AT_AN_END]
    if ends:
        shown += f" ({' and '.join(ends)} at an end of the range, {least} to {most})"
    lines = [
        f"Fitted to {fitted} dense runs, those of every third model, marked *: {shown}. The "
        f"absolute error of the other {len(dense) - fitted}: "
        f"{_quantiles([row.error for row in dense if not row.fitted])}."
    ]
    for part in (0, 1):
        of_part = thirds(every)[part]
        other = fit(of_part, rates)
        errors = [_error(run, other) for run in every if not run.shape.experts | (run in of_part)]
        lines.append(
            f"Fitted to the {len(of_part)} of the {('first', 'second')[part]} of three models "
            f"instead: {_quantiles(errors)}."
        )
    mixtures = [row.error for row in rows if row.run.shape.experts]
    pairs, memory = ranked(rows), [row for row in rows if row.gigabytes is not None]
    off = [abs(row.gigabytes / row.run.memory_gb - 1) for row in memory]
    room = devices.DEVICES["a100"].memory_bytes / 1e9
    wrong = sum(row.gigabytes > room for row in memory)
    return [
        *lines,
        f"{len(mixtures)} mixtures, none fitted: {_quantiles(mixtures)}.",
        f"Of {pairs[1]} pairs of schedules with the same model and batch, {pairs[0]} are ordered "
        "as measured.",
        f"Memory of {len(off)} runs: {np.median(off):.1%} off in the median, {max(off):.1%} at "
        f"most; {wrong} that ran are predicted not to fit. No source names a run out of memory.",
    ]


def _quantiles(errors: Sequence[float]) -> str:
    off = np.abs(errors)
    return (
        f"median {np.median(off):.1%}, 90th percentile {np.quantile(off, 0.9):.1%}, "
        f"{np.mean(off <= 0.15):.0%} within 15%"
    )


_INTRODUCTION = """\
# Published runs

`make published` writes this page. Seconds of a step that others measured stand beside two
predictions: for the system that ran, and for jaxpipe's program on the same mesh. Both count layers
from traces ([planner](design/009-planner.md)) and take the same rates. The system's order runs on
the free-running clock, its communication overlaps as noted below, and nothing is copied into slots.
jaxpipe's program runs its tick table in the run's precision, with cuDNN's attention and weights
unrolled; of policies, and of ZeRO-1 and 2, it has the fastest for which at most 68 of 80 GB are
predicted, or else of the leanest. Its chunks hold a layer at least: where a system fills them with
embedding and loss, too, it has v chunks per stage, of those up to the run's the fastest. "best
plan" is jaxpipe's fastest on the same GPUs, with its stages x data x tensor devices, searched once
per model and precision, for the fewest GPUs, at most 512, and rows. "ratio" is jaxpipe's step on
the same mesh by that predicted for the system. Where it is above 1, "loses" names what loses most,
in seconds, and the memory if it is more:

- kernels: XLA fuses less, or computes again;
- collectives: layers wait for all of theirs;
- copies: values into slots and out of them, and sums of gradients;
- waits: for other stages, messages and the head, and, where v is given, for chunks of more layers;
- data: over data shards, and the optimizer.

Rates are shares: of the peak, for large matmuls on H100s and A100s; of the memory's bandwidth; and
of tensor collectives, how much is exposed in systems that overlap them.

"""
_ENDING = """
A are runs on H100s (NVIDIA/dgxc-benchmarking), D Megatron-LM of 2021 on A100s with full
rematerialization, F Zero Bubble (arXiv 2401.10241) on A100s, whose ZB-2p, a searched order, is
predicted as ZB-H2, M Megatron Core's Mixtral 8x7B, K JaxPP (marin#7024), of assumed widths. It is
assumed that A overlaps its tensor collectives and messages, and that D and 1F1B of F wait for
messages. Configurations and sources: `benchmarks/published_runs.csv` and `published_models.csv`.
"""


def page(rows: Sequence[Row], said: Sequence[str]) -> str:
    """Writes docs/published.md."""
    cells = [row.cells() for row in rows]
    lines = [cells[0], dict.fromkeys(cells[0], "---"), *cells]
    lines[0] = {name: name for name in cells[0]}
    table = "\n".join(f"|{'|'.join(line.values())}|" for line in lines)
    return f"{_INTRODUCTION}{textwrap.fill(' '.join(said), 100)}\n\n{table}\n{_ENDING}"


def main() -> None:
    """Prints the board, and writes docs/published.md."""
    every = runs()
    harness.simulate(MOST_SHARING)
    rates = fit(thirds(every)[FITTED], Rates())
    rows = board(every, rates)
    drawn, (axes,) = common.figure(columns=1)
    axes.plot([row.run.measured for row in rows], [row.predicted for row in rows], ".")
    axes.set_xlabel("seconds of a step, measured", fontsize=8)
    axes.set_ylabel("predicted", fontsize=8)
    axes.loglog()
    details = [
        {"run": row.run.id, "system": row.system}
        | ({"jaxpipe": own_seconds(row.prediction)} if row.prediction else {})
        for row in rows
    ]
    cells = [row.cells() for row in rows]
    title = "published runs, seconds of a step"
    harness.write("published", cells, title=title, figure=drawn, details=details)
    said = summary(rows, rates)
    print("\n".join(said))
    PAGE.write_text(page(rows, said), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
