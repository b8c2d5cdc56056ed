"""Does the planner's model put plans in the order in which they run?

A group of equal model, batch and devices: every schedule that `jaxpipe plan` searches, with its
chunks, in the order that it would run with. Layers sleep, with one process per stage
(`benchmarks.processes`). Predicted is the clock of the table that CPUs run, on which no message is
late and both ends of each meet; tables for GPUs have late ones, and cannot run here. Messages of a
few bytes take no time.

The exit status is 1 if the rank correlation is below .95, the predicted winner takes more than 2%
longer than the best, or a step differs from its prediction by more than 5%.

    python -m benchmarks.plan_ranking [--stages 4] [--microbatches 8]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np
import tyro

from benchmarks import harness
from benchmarks.processes import Case, measured, row
from jaxpipe.planning.plans import SCHEDULES, Program, relative, table_of
from jaxpipe.schedule import Costs

LEAST_CORRELATION, MOST_LOSS, MOST_ERROR = 0.95, 0.02, 0.05


def plans(
    stages: int, microbatches: int, layers: int, stage: Costs
) -> Iterator[tuple[str, Program]]:
    """Every plan of a group by its name."""
    for name, searched in SCHEDULES.items():
        for chunks in searched.chunks:
            if layers % (stages * chunks):
                continue
            share = Costs(stage.f / chunks, stage.b / chunks, stage.w / chunks)
            shape = name, stages, chunks, microbatches, layers
            options = {"weight_slots": 1, "own_slots": False, "shares": 0, "sums_in_slots": False}
            yield f"{name}, v={chunks}", Program(*shape, relative(share), **options)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's.

    Example:
      >>> round(rank_correlation([1, 2, 3], [10, 30, 20]), 6)
      0.5
    """
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def failures(rows: Sequence[dict[str, float]]) -> list[str]:
    """Lists the targets that a group misses."""
    predicted = [row["predicted s"] for row in rows]
    executed = [row["executed s"] for row in rows]
    correlation = rank_correlation(predicted, executed)
    loss = executed[int(np.argmin(predicted))] / min(executed) - 1
    error = max(abs(e / p - 1) for e, p in zip(executed, predicted, strict=True))
    harness.note(
        f"rank correlation {correlation:.3f}, predicted winner {loss:+.1%} of the best, largest "
        f"difference {error:.1%}"
    )
    found = [f"rank correlation {correlation:.3f}"] if correlation < LEAST_CORRELATION else []
    found += [f"the predicted winner takes {loss:.1%} longer"] if loss > MOST_LOSS else []
    return found + ([f"a step differs by {error:.1%}"] if error > MOST_ERROR else [])


def main(
    stages: int = 4,
    microbatches: int = 8,
    layers: int = 16,
    costs: tuple[float, float, float] = (1.0, 1.2, 0.8),
    stage_seconds: float = 0.2,
    rounds: int = 2,
) -> None:
    """Runs all plans, and prints and writes their table.

    Args:
      stages: p.
      microbatches: m.
      layers: of the model.
      costs: of F, B and W of a stage, relative.
      stage_seconds: the time of one unit.
      rounds: of which the shortest counts.
    """
    stage = Costs(*(stage_seconds * cost for cost in costs))
    layer = Costs(*(cost * stage_seconds * stages / layers for cost in costs))
    names, cases = [], []
    for name, program in plans(stages, microbatches, layers, stage):
        table = table_of(program)
        # A chunk sleeps once, for all its layers.
        chunks = [Costs(n * layer.f, n * layer.b, n * layer.w) for n in table.layer_counts]
        names.append(name)
        cases.append(Case(table.schedule, tuple(chunks)))
    rows = []
    for name, case, times in zip(names, cases, measured(cases, rounds), strict=True):
        timed = row(case, *times)
        executed, expected = timed["executed s"], timed["program s"]
        rows.append(
            {
                "plan": name,
                "ticks": times[0],
                "predicted s": expected,
                "executed s": executed,
                "executed / predicted": executed / expected,
            }
        )
        harness.note(f"{name}: {executed:.3g} s, predicted {expected:.3g} s")
    harness.report(
        f"plan-ranking-p{stages}",
        rows,
        title=f"p={stages} m={microbatches}, {layers} layers",
        label=["plan"],
        bars=["predicted s", "executed s"],
        axis="seconds of a step",
    )
    if missed := failures(rows):
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
