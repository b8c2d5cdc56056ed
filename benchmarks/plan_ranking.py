"""Do predicted step times put plans in the order in which they run?

Groups of equal model, batch and devices: every schedule that `jaxpipe plan` searches, with its
chunks, in the order and the slices that it would run with. The layers sleep
(`benchmarks/bubble.py`), so that a bubble shows on few cores; messages sleep where stages wait for
them. Predicted is what `jaxpipe plan` predicts for simulated devices. Plans take turns, and the
shortest of a plan's steps counts: other work on the machine only ever makes one longer.

The exit status is 1 if the rank correlation of a group is below .95, the predicted winner takes
more than 2% longer than the best, or a step differs from its prediction by more than 5%.

    python -m benchmarks.plan_ranking [--stages 4] [--microbatches 8] [--message 0 0.2]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np
import tyro

from benchmarks import bubble, harness
from jaxpipe.planning.candidates import SCHEDULES
from jaxpipe.planning.programs import Program, relative, table_of
from jaxpipe.planning.step import replayed
from jaxpipe.schedule.simulate import Costs

LEAST_CORRELATION, MOST_LOSS, MOST_ERROR = 0.95, 0.02, 0.05


def plans(
    stages: int, microbatches: int, layers: int, stage: Costs
) -> Iterator[tuple[str, Program]]:
    """Every plan of a group by its name."""
    for name, searched in SCHEDULES.items():
        for chunks in searched.chunks:
            if stages * chunks > layers:
                continue
            share = Costs(stage.f / chunks, stage.b / chunks, stage.w / chunks, stage.message)
            shape = name, stages, chunks, microbatches, layers
            options = {"weight_slots": 1, "own_slots": False, "shares": 0, "sums_in_slots": False}
            yield (
                f"{name}, v={chunks}",
                Program(*shape, relative(share), **options, cut="sliced", clock="lock-step"),
            )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's.

    Example:
      >>> round(rank_correlation([1, 2, 3], [10, 30, 20]), 6)
      0.5
    """
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def failures(rows: Sequence[dict[str, float]]) -> list[str]:
    """What a group misses."""
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
    message: tuple[float, ...] = (0.0, 0.2),
    stage_seconds: float = 0.6,
    rounds: int = 3,
) -> None:
    """Runs a group for every message time, and prints and writes its table.

    Args:
      stages: p.
      microbatches: m.
      layers: of the model.
      costs: of F, B and W of a stage, relative.
      message: time of a message, in the same unit.
      stage_seconds: the time of one unit.
      rounds: in which every plan runs once.
    """
    harness.simulate(stages)
    missed = []
    for sent in message:
        stage = Costs(*(stage_seconds * c for c in costs), message=stage_seconds * sent)
        layer = Costs(*(getattr(stage, kind) * stages / layers for kind in "fbw"), stage.message)
        group = []
        for name, program in plans(stages, microbatches, layers, stage):
            table = table_of(program)
            step = bubble.compiled(
                table.schedule,
                [layer] * layers,
                message=stage.message,
                layer_counts=table.layer_counts,
            )
            group.append((name, step, replayed(program, layer)))
            harness.note(f"message {sent}: compiled {name}")
        turns = [[step.run() for _, step, _ in group] for _ in range(rounds)]
        rows = [
            {
                "plan": name,
                "ticks": step.ticks,
                "predicted s": predicted,
                "executed s": seconds,
                "executed / predicted": seconds / predicted,
            }
            for (name, step, predicted), seconds in zip(
                group, map(min, zip(*turns, strict=True)), strict=True
            )
        ]
        harness.report(
            f"plan-ranking-p{stages}-message{sent:g}",
            rows,
            title=f"p={stages} m={microbatches}, {layers} layers, message {sent:g}",
            label=["plan"],
            bars=["predicted s", "executed s"],
            axis="seconds of a step",
        )
        missed += [f"message {sent:g}: {what}" for what in failures(rows)]
    if missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
