"""Pictures of the examples' pipelines at the counted costs of their layers: examples/images.

python -m benchmarks.example_pictures
"""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jaxpipe
from jaxpipe import measure, testing
from jaxpipe.schedule import Costs, device_clock, draw

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


class _BuiltError(Exception):
    """A pipeline is built, which is all that is needed of an example."""


def pipeline_of(path: Path) -> tuple[jaxpipe.Pipeline, Any]:
    """Runs an example until it has its pipeline; returns it with the batch of its comparison."""
    batches, pipes = [], []

    def compare(model: jaxpipe.Model, params: Any, batch: Any, **_: Any) -> None:
        batches.append(batch)

    def train_step(pipe: jaxpipe.Pipeline, optimizer: Any) -> None:
        pipes.append(pipe)
        raise _BuiltError

    with (
        mock.patch.object(testing, "assert_matches_unpipelined", compare),
        mock.patch.object(jaxpipe.Pipeline, "train_step", train_step),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
    ):
        try:
            runpy.run_path(str(path))
        except _BuiltError:
            return pipes[-1], batches[-1]
    raise AssertionError(f"{path} makes no training step.")


def chunk_costs(layers: list[Costs], counts: tuple[int, ...]) -> list[Costs]:
    """Sums layers into chunks, to two digits; an average chunk's F takes 1."""
    unit = math.fsum(cost.f for cost in layers) / len(counts)
    chunks, rest = [], iter(layers)
    for count in counts:
        own = [next(rest) for _ in range(count)]
        sums = (round(math.fsum(getattr(cost, name) for cost in own) / unit, 2) for name in "fbw")
        chunks.append(Costs(*sums))
    return chunks


def main() -> None:
    loop = EXAMPLES / "nnx_training_loop.py"  # has a plain loop in place of a comparison
    for path in sorted({*EXAMPLES.glob("*.py")} - {loop}):
        pipe, batch = pipeline_of(path)
        costs = chunk_costs(measure.layer_costs(pipe, batch), pipe.table.layer_counts)
        timeline = device_clock(pipe.schedule, costs)
        picture = EXAMPLES / "images" / f"{path.stem}.svg"
        picture.write_text(draw.figure(timeline), encoding="utf-8")
        print(picture)


if __name__ == "__main__":
    main()
