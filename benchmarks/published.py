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
import zlib
from collections import Counter
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
    cluster_of,
    counted,
    runs,
    system_bytes,
    system_seconds,
)
from benchmarks.studies import common
from jaxpipe.planning import devices
from jaxpipe.planning.cost import Prediction, kernel_seconds, layer_passes
from jaxpipe.planning.plans import NOTHING, Offload, Plan
from jaxpipe.planning.search import Goal, search
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.schedule.problems import ArgumentError

PAGE = FOLDER.parent / "docs" / "published.md"
_MOST_COMPARED = 64
"""GPUs of a run beside which jaxpipe's program is predicted; more take minutes each."""
MOST_SHARING = 16
"""Devices that share a layer, at most: 8 over tensor, 2 over context."""
RANGES = (0.5, 0.0), (1.2, 1.0)
"""Ends of the ranges in which the sustained and the exposed share are fitted."""
FITTED = 3
"""Rates are fitted to the dense models whose name's CRC-32 this number divides, and held against
all others; each of the models counts the same, however many runs it has."""

# Steps of jaxpipe.


def own_prediction(run: Run, rates: Rates) -> Prediction:
    """Predicts jaxpipe's program of the run's mesh and batch: the best plan of its planner, which
    uses the host's memory only where nothing fits without."""
    remats = ("full",) if run.remat == "full" else _REMATS
    model, cluster = _model(run, (run.tensor,), remats, run.context), cluster_of(run, rates)

    def best(on_host: Offload | None) -> Prediction:
        goal = Goal(None, (run.batch,))
        return search(model, [cluster], goal, on_host=on_host, allowed=on_its_mesh).best[0]

    def on_its_mesh(plan: Plan) -> bool:
        return (plan.stage, plan.data) == (run.stages, run.data)

    try:
        return best(NOTHING)
    except ArgumentError:
        return best(None)


def _model(run: Run, tensors: Sequence[int], remats: Sequence[str], context: int) -> ModelSizes:
    """Counts a run's model, whose layers are alike."""
    variants = {}
    for tensor, remat in itertools.product(tensors, remats):
        traced = counted(run.shape.config(), tensor, remat, "flash", context, run.precision)
        ((variant, sizes),) = traced.variants.items()
        variants[variant] = sizes._replace(kind_of=(0,) * run.shape.layers)
    return dataclasses.replace(traced, variants=variants)


_REMATS = "none", "dots", "full"


def own_seconds(prediction: Prediction) -> dict[str, float]:
    """The parts of `system_seconds`, and copies into slots, out of them, and of weights. What pairs
    of layers hide is taken off the collectives."""
    placed, seconds = prediction.placed, prediction.seconds
    plan, cluster = placed.plan, placed.cluster
    passes = plan.microbatches * placed.model.num_layers / plan.stage
    layer = placed.sizes.layers[0].passes
    kernels = sum(kernel_seconds(k, plan.rows, cluster) for one in layer for k in one.kernels)
    collectives = layer_passes(placed).communication
    rest = seconds["layers"] - passes * (kernels + collectives)
    return {
        "kernels": passes * kernels,
        "collectives": passes * collectives + min(0.0, rest),
        "copies": max(0.0, rest),
        "waits": seconds["waits"] + seconds["ticks"] + seconds["head"],
        "data": seconds["transfers"] + seconds["update"],
    }


# The board.


def fitted(every: Sequence[Run]) -> list[Run]:
    """Selects the runs to which rates are fitted."""
    return [r for r in every if not r.shape.experts and zlib.crc32(r.model.encode()) % FITTED == 0]


def straggling(every: Sequence[Run]) -> float:
    """Measures by how much steps grow with each doubling, in runs that differ in nothing but data
    shards, batch and GPUs."""
    series: dict[Run, list[Run]] = {}
    for run in every:
        alike = run._replace(id="", gpus=0, data=0, batch=0, step_seconds=None, mfu=None)
        series.setdefault(alike, []).append(run)
    slopes = []
    for of_one in series.values():
        few, many = (pick(of_one, key=lambda run: run.gpus) for pick in (min, max))
        if many.gpus > few.gpus:
            doublings = math.log2(many.gpus / few.gpus)
            slopes.append(math.log(many.measured / few.measured) / doublings)
    return float(np.mean(slopes))


class Fit(NamedTuple):
    """Rates, and to first order the ends between which they lie without one of the models."""

    rates: Rates
    least: Rates
    most: Rates


def fit(runs: Sequence[Run]) -> Fit:
    """Fits the rates: straggling to series of runs, the others to the logarithms of steps."""
    grows, shares = straggling(runs), Counter(run.model for run in runs)

    def errors(values: np.ndarray) -> list[float]:
        rates = Rates(*values, grows)
        return [math.log1p(_error(run, rates)) / math.sqrt(shares[run.model]) for run in runs]

    found = least_squares(errors, Rates()[:2], bounds=RANGES, diff_step=1e-2, ftol=1e-3, xtol=1e-3)
    without = []
    for model in shares:
        kept = [n for n, run in enumerate(runs) if run.model != model]
        step, *_ = np.linalg.lstsq(found.jac[kept], -found.fun[kept])
        without.append(found.x + step)
    ends = (Rates(*map(float, pick(without, axis=0)), grows) for pick in (np.min, np.max))
    return Fit(Rates(*map(float, found.x), grows), *ends)


def _error(run: Run, rates: Rates) -> float:
    return sum(system_seconds(run, rates).values()) / run.measured - 1


class Row(NamedTuple):
    """A row of the board.

    Args:
      run: the published run.
      fitted: whether the rates were fitted to it.
      system: seconds of the system that ran, by part.
      prediction: of jaxpipe's program of the same mesh; None where `compared` leaves the run out.
      gigabytes: memory predicted for the system; None where the source has none.
    """

    run: Run
    fitted: bool
    system: Mapping[str, float]
    prediction: Prediction | None
    gigabytes: float | None

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
            return cells
        plan, own = self.prediction.plan, own_seconds(self.prediction)
        more = {name: seconds - self.system.get(name, 0.0) for name, seconds in own.items()}
        causes = [name for name in sorted(more, key=lambda name: -more[name]) if more[name] > 0]
        ratio = sum(own.values()) / self.predicted
        words = ", ".join(f"{name} {more[name]:.2g}" for name in causes[:_CAUSES])
        host = f", {plan.on_host} on the host" if any(plan.on_host) else ""
        return cells | {
            "jaxpipe": f"{sum(own.values()):.3g}",
            "ratio": f"{ratio:.2f}",
            "plan": f"{plan.schedule}, v={plan.chunks}, m={plan.microbatches}, {plan.remat}"
            + (f", ZeRO-{plan.zero}" if plan.zero else "")
            + host,
            "loses": words if ratio > 1 else "",
        }


_CAUSES = 2
"""Parts that are named per run."""


def compared(every: Sequence[Run]) -> list[Run]:
    """Selects the runs beside which jaxpipe's program is predicted, on few H100s and A100s: of each
    model, precision, mesh and schedule, the one with the fewest GPUs and rows."""
    fewest: dict[tuple[object, ...], Run] = {}
    for run in sorted(every, key=lambda run: (run.gpus, run.batch)):
        own = run.precision in ("bf16", "fp8") and run.zero < 3 and not run.shape.experts
        if own and run.device in ("a100", "h100") and run.gpus <= _MOST_COMPARED:
            mesh = run.tensor, run.stages, run.chunks, run.context, run.schedule
            fewest.setdefault((run.shape, run.precision, *mesh), run)
    return list(fewest.values())


def board(every: Sequence[Run], rates: Rates) -> list[Row]:
    """Makes a row per run that ran."""
    rows, of_fit, own = [], fitted(every), compared(every)
    for run in every:
        prediction = own_prediction(run, rates) if run in own else None
        gigabytes = None if run.memory_gb is None else system_bytes(run) / 1e9
        system = system_seconds(run, rates)
        rows.append(Row(run, run in of_fit, system, prediction, gigabytes))
        harness.note(f"{run.id}: {run.measured:.4g} s, predicted {rows[-1].predicted:.4g}")
    return rows


def ranked(rows: Sequence[Row]) -> tuple[int, int]:
    """Counts pairs of runs that differ in the schedule and are ordered as measured, and all."""
    right = total = 0

    def others(run: Run) -> tuple[object, ...]:
        return run.model, run.batch, run.gpus, run.stages, run.tensor, run.precision, run.date

    for one, other in itertools.combinations(rows, 2):
        if others(one.run) == others(other.run) and one.run.schedule != other.run.schedule:
            total += 1
            by = one.run.measured - other.run.measured, one.predicted - other.predicted
            right += by[0] * by[1] >= 0
    return right, total


def summary(rows: Sequence[Row], found: Fit) -> list[str]:
    """Says in words how good the predictions are."""
    shown = ", ".join(
        f"{name} {value:.4f}" + (f" ({least:.4f} to {most:.4f})" if most > least else "")
        for name, value, least, most in zip(Rates._fields, *found, strict=True)
    )
    dense = [row.error for row in rows if not (row.fitted or row.run.shape.experts)]
    mixtures = [row.error for row in rows if row.run.shape.experts]
    pairs, memory = ranked(rows), [row for row in rows if row.gigabytes is not None]
    off = [abs(row.gigabytes / row.run.memory_gb - 1) for row in memory]
    lines = [
        f"The fit to {sum(row.fitted for row in rows)} dense runs, marked * below, gives {shown}. "
        "The ranges in brackets come from fits that leave out one of the models. Straggling comes "
        "from series of runs that differ only in the number of GPUs.",
        f"**On {len(dense)} dense runs that were not fitted: {_quantiles(dense)}.**",
        f"On {len(mixtures)} mixtures, none of which was fitted: {_quantiles(mixtures)}.",
        f"Of {pairs[1]} pairs of runs that differ only in the schedule, {pairs[0]} are predicted "
        "in the measured order.",
        f"The predicted memory of {len(off)} runs is off by {np.median(off):.1%} in the median and "
        f"by {max(off):.1%} at most.",
    ]
    for run in runs():
        if not run.fits:
            limit = devices.DEVICES[run.device].memory_bytes / 1e9
            lines.append(
                f"{run.id} ran out of memory; {system_bytes(run) / 1e9:.0f} of {limit:.0f} GB are "
                "predicted."
            )
    return lines


def _quantiles(errors: Sequence[float]) -> str:
    off = np.abs(errors)
    return (
        f"a median error of {np.median(off):.1%}, 90% within {np.quantile(off, 0.9):.1%}, a signed "
        f"mean of {np.mean(errors):+.1%}, and {np.mean(off <= 0.12):.0%} within 12%"
    )


def groups(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Makes a line per kind of model, device and precision."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        kind = "mixtures" if row.run.shape.experts else "dense"
        found.setdefault((kind, row.run.device, row.run.precision), []).append(row)
    return [
        {
            "models": kind,
            "device": device,
            "precision": precision,
            "runs": str(len(of_group)),
            "fitted": str(sum(row.fitted for row in of_group)),
            "median error": f"{np.median(np.abs([row.error for row in of_group])):.1%}",
            "signed mean": f"{np.mean([row.error for row in of_group]):+.1%}",
        }
        for (kind, device, precision), of_group in sorted(found.items())
    ]


_INTRODUCTION = """\
# Published runs

`make published` writes this page. It compares the seconds of a step that others measured with two
predictions: one for the system that ran, and one for jaxpipe's program on the same mesh. Both count
layers from traces ([planner](design/009-planner.md)) and use the same rates, which the planner also
uses. Rates of matmuls, memory and links are those of single kernels
(`jaxpipe/planning/devices.py`). Three numbers that no single kernel shows are fitted:

- sustained: the share of a single matmul's rate that is left in a training step;
- exposed: the share of tensor collectives that a system waits for although it overlaps them;
- straggling: the share by which a step grows with each doubling of the GPUs beyond 8.

The system's order runs on the free-running clock, its communication overlaps as noted below, and it
copies nothing into slots. Whether the runs of a model were used for the fit was decided by a
checksum of its name, before any prediction was made.

"""
_OWN = """\
jaxpipe's program is the best plan that `jaxpipe plan` finds for the mesh, the batch and the
precision of the run: any schedule, number of chunks v and of microbatches m, policy of
rematerialization and level of ZeRO, with cuDNN's attention, within 68 of 80 GB. Arrays lie in the
host's memory only where nothing fits without. "ratio" is the predicted step of jaxpipe divided by
the predicted step of the system on the same mesh. If it is above 1, "loses" names the largest
losses in seconds. The losses are kernels (XLA fuses less, or computes values again), collectives
within layers, copies (of values into slots and out of them, and sums of gradients), waits (for
other stages, for messages and for the head), and data (transfers over data shards, and the
optimizer). For each model, precision, mesh and schedule on A100s and H100s, the table shows the run
with the fewest GPUs.

"""
_ENDING = """
The letters name the sources: A are runs on H100s (NVIDIA/dgxc-benchmarking), B are
Megatron-Bridge's runs of 2025 and 2026, D are Megatron-LM's of 2021 on A100s with full
rematerialization, F are Zero Bubble's on A100s (arXiv 2401.10241), K is JaxPP (marin#7024), M is
Megatron Core's Mixtral 8x7B, and N is Primus. F's ZB-2p is a searched order and is predicted as
ZB-H2. We assume that A and B overlap their tensor collectives and messages, and that D and the 1F1B
runs of F wait for messages. `benchmarks/published_runs.csv` and `published_models.csv` hold all
runs with their configurations and dates, and a run of `make published` writes all predictions to
`benchmarks/results/published.json`.

All mixtures in bf16 on Blackwell are gpt-oss-120b in releases from 2026-02 to 2026-05, and took up
to twice as long as predicted. In MXFP8 on 64 GB300s, one plan took 2.47, 4.04 and 2.48 s in three
later releases, and 2.43 s are predicted, so these errors are of the software's age.

The memory of two sources is not compared, because it does not follow from what they publish.
marin's mixture of 67B parameters on 64 H100s took 29.0 GB with FSDP and one row per GPU, and asked
for 101 GiB with four rows. Parameters and Adam's moments alone are 12.6 GB per GPU in float32,
which leaves at most 16.4 GB that can grow with the rows, so four rows would take at most 78 GB. The
second figure must therefore contain something that the first does not. Our 42 GB are 19 of state, 4
of the layers' inputs, and 19 that a layer or the head has live at once. Primus states neither the
length of its sequences nor its rows.
"""


def _table(cells: Sequence[Mapping[str, str]]) -> str:
    lines = [{name: name for name in cells[0]}, dict.fromkeys(cells[0], "---"), *cells]
    return "\n".join(f"|{'|'.join(line.values())}|" for line in lines)


def page(rows: Sequence[Row], said: Sequence[str]) -> str:
    """Writes docs/published.md: what was found, groups of runs, own steps."""
    words = "\n".join(textwrap.fill(line, 100) for line in said)
    own = _table([row.cells() for row in rows if row.prediction is not None])
    return f"{_INTRODUCTION}{words}\n\n{_table(groups(rows))}\n\n{_OWN}{own}\n{_ENDING}"


def main() -> None:
    """Prints the board, and writes docs/published.md."""
    every = [run for run in runs() if run.fits]
    harness.simulate(MOST_SHARING)
    found = fit(fitted(every))
    rows = board(every, found.rates)
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
    said = summary(rows, found)
    print("\n".join(said))
    PAGE.write_text(page(rows, said), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
