"""Is `auto` ever worse than a named schedule of the same model under the same memory?

Draws configurations at random: stages, microbatches, layers, messages and memory limits. Against
each result it sets every named schedule that fits, on the placements of at most `_MOST_CHUNKS`
chunks per stage that cut the layers into equal chunks, cut into slices with care. Their searches
stop once they cannot end before `auto`.

    python -m benchmarks.auto_quality [--configurations 300] [--seed 0] [--most-stages 16]

Every row is written to ``results/auto_quality.jsonl`` as soon as it is known, and a run goes on
where the last one stopped: delete the file to start over.
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

import tyro

from benchmarks import harness
from jaxpipe.schedule.search.auto import named_for
from jaxpipe.schedule.search.auto_placed import auto_placed
from jaxpipe.schedule.search.cuts import cuts
from jaxpipe.schedule.search.slices import FIRST_TRIAL, OTHER_TRIALS, Uncut, slice_all
from jaxpipe.schedule.simulate import Costs, lock_step

_MOST_CHUNKS = 4
_ROUNDING = 1e-9


def compare(p: int, m: int, layers: int, costs: Costs, limit: float) -> dict[str, str | float]:
    """One row of the table: makespans of equal models, in lock-step."""
    started = time.process_time()
    layer_costs = [costs] * (2 * p * layers)
    found = auto_placed(p, m, layer_costs=layer_costs, memory_limit=limit)
    seconds = time.process_time() - started
    ways = list(cuts(p, layer_costs))
    price = next(cut.costs for cut in ways if cut.placement == found.placement)
    ends = lock_step(found, price).makespan
    uncut = [
        Uncut(schedule, cut.costs, cut.layer_counts)
        for cut in ways
        # Chunks of unequal length are none of the named schedules' doing.
        if len(set(cut.layer_counts)) == 1 and cut.placement.num_chunks <= _MOST_CHUNKS
        for schedule in named_for(cut, m, limit)
    ]
    sliced = slice_all(uncut, FIRST_TRIAL + OTHER_TRIALS, makespan=ends * (1 - _ROUNDING))
    first = min(sliced, key=lambda timeline: timeline.makespan)
    above = ends / first.makespan - 1
    winner = first.schedule if above > _ROUNDING else found
    return {
        "p": p,
        "m": m,
        "layers": layers,
        "message": costs.message,
        "limit": limit,
        "v": found.num_chunks,
        "auto": ends,
        "first": f"{winner.name}, v={winner.num_chunks}",
        "above %": 100 * max(0.0, above),
        "auto s": seconds,
    }


def main(configurations: int = 300, seed: int = 0, most_stages: int = 16) -> None:
    """Prints the table and writes it.

    Args:
      configurations: how many to draw.
      seed: of the draw.
      most_stages: p is at most this.
    """
    os.environ["JAXPIPE_NO_CACHE"] = "1"
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
        axis="makespan in lock-step",
    )


if __name__ == "__main__":
    tyro.cli(main)
