"""Is `auto` ever worse than a named schedule of the same model under the same memory?

Draws configurations at random: stages, microbatches, layers, messages and memory limits. Against
each result it sets every named schedule that fits, in its best order for the costs, of at most
`_MOST_CHUNKS` chunks per stage that have equally many layers.

    python -m benchmarks.auto_quality [--configurations 300] [--seed 0] [--most-stages 16]

Every row is written to ``results/auto_quality.jsonl`` as soon as it is known, and a run goes on
where the last one stopped: delete the file to start over.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tyro

from benchmarks import harness
from jaxpipe.schedule import Costs, Schedule, build, device_clock
from jaxpipe.schedule.catalog import entries
from jaxpipe.schedule.check import peak_in_flight
from jaxpipe.schedule.partition import cut_layers
from jaxpipe.schedule.problems import ArgumentError

_MOST_CHUNKS = 4
_ROUNDING = 1e-9


def named(p: int, m: int, layers: Sequence[Costs], limit: float) -> Iterator[Schedule]:
    """Every named schedule of equal chunks that fits the limit."""
    found = {}
    for entry in entries():
        for chunks in range(1, _MOST_CHUNKS + 1):
            if entry.name == "auto" or len(layers) % (p * chunks):
                continue
            with contextlib.suppress(ArgumentError):
                one = build(entry.name, stages=p, microbatches=m, chunks=chunks, layer_costs=layers)
                found[entry.name, one.num_chunks] = one
    for one in found.values():
        if max(peak_in_flight(one)) <= limit * one.num_chunks + _ROUNDING:
            yield one


def end(schedule: Schedule, layers: Sequence[Costs]) -> float:
    """When the model is done, on the device clock."""
    return device_clock(schedule, cut_layers(layers, schedule.placement)[1]).makespan


def compare(p: int, m: int, layers: int, costs: Costs, limit: float) -> dict[str, str | float]:
    """One row of the table: makespans of equal models on the device clock."""
    started = time.process_time()
    model = [costs] * (2 * p * layers)
    found = build("auto", stages=p, microbatches=m, layer_costs=model, memory_limit=limit)
    seconds = time.process_time() - started
    ends = end(found, model)
    others = [(end(one, model), one) for one in named(p, m, model, limit)]
    least, first = min(others, key=lambda pair: pair[0], default=(ends, found))
    winner = first if ends > least + _ROUNDING else found
    return {
        "p": p,
        "m": m,
        "layers": layers,
        "message": costs.message,
        "limit": limit,
        "v": found.num_chunks,
        "auto": ends,
        "first": f"{winner.name}, v={winner.num_chunks}",
        "above %": 100 * max(0.0, ends / least - 1),
        "auto s": seconds,
    }


def main(configurations: int = 300, seed: int = 0, most_stages: int = 16) -> None:
    """Prints the table and writes it.

    Args:
      configurations: how many to draw.
      seed: of the draw.
      most_stages: p is at most this.
    """
    draw, rows = random.Random(seed), []
    path = harness.RESULTS / "auto_quality.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    known: dict[str, dict[str, Any]] = dict(map(json.loads, lines))
    for number in range(configurations):
        p, m, layers = draw.randint(2, most_stages), draw.randint(1, 64), draw.randint(1, 12)
        message = draw.choice((0.0, 0.1, 0.5))
        limit = draw.choice([k / 2 for k in range(2, 4 * p + 1)])
        key = f"{p} {m} {layers} {message} {limit}"
        if key not in known:
            costs = Costs(1 / layers, 1.2 / layers, 0.8 / layers, message)
            known[key] = compare(p, m, layers, costs, limit)
            with path.open("a") as file:
                file.write(json.dumps([key, known[key]]) + "\n")
            harness.note(f"{number}: {' '.join(map(str, known[key].values()))}")
        rows.append(known[key])
    harness.report(
        "auto_quality",
        rows,
        title="auto, and whatever named schedule of the same model in the same memory ends first",
        label=("p", "m", "layers", "message", "limit"),
        bars=("auto",),
        axis="makespan on the device clock",
    )


if __name__ == "__main__":
    tyro.cli(main)
