"""Is `auto` ever worse than a named schedule of the same model under the same memory?

Draws configurations at random: stages, microbatches, layers, messages and memory limits. Against
each result it sets the best named schedule on any placement that cuts the layers into equal chunks,
cut into slices as `auto`'s is.

    python -m benchmarks.auto_quality [--configurations 300] [--seed 0] [--most-stages 16]
"""

from __future__ import annotations

import os
import random
import time

import tyro

from benchmarks import harness
from jaxpipe.schedule.search.auto_placed import auto_placed, placements
from jaxpipe.schedule.search.candidates import named
from jaxpipe.schedule.search.slices import slice_ticks
from jaxpipe.schedule.simulate import Costs, lock_step


def compare(p: int, m: int, layers: int, costs: Costs, limit: float) -> dict[str, str | float]:
    """One row of the table: makespans of equal models, in lock-step."""
    started = time.process_time()
    layer_costs = [costs] * (2 * p * layers)
    found = auto_placed(p, m, layer_costs=layer_costs, memory_limit=limit)
    seconds = time.process_time() - started
    best, name = float("inf"), ""
    for placement, counts, chunks in placements(p, layer_costs):
        # Chunks of unequal length are none of the named schedules' doing.
        if len(set(counts)) > 1:
            continue
        cap = int(min(limit, m) * placement.num_chunks)
        for schedule in named(placement, m, cap=cap, costs=chunks[0]):
            ends = lock_step(slice_ticks(schedule, chunks, counts), chunks).makespan
            if ends < best:
                best, name = ends, f"{schedule.name}, v={placement.num_chunks}"
    ends = next(
        lock_step(found, chunks).makespan
        for placement, _, chunks in placements(p, layer_costs)
        if placement == found.placement
    )
    return {
        "p": p,
        "m": m,
        "layers": layers,
        "message": costs.message,
        "limit": limit,
        "v": found.num_chunks,
        "auto": ends,
        "best named": best,
        "name": name,
        "above %": 100 * (ends / best - 1),
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
    draw = random.Random(seed)
    rows = []
    for _ in range(configurations):
        p, m, layers = draw.randint(2, most_stages), draw.randint(1, 64), draw.randint(1, 12)
        message = draw.choice((0.0, 0.1, 0.5))
        limit = draw.choice([k / 2 for k in range(2, 4 * p + 1)])
        rows.append(
            compare(p, m, layers, Costs(1 / layers, 1.2 / layers, 0.8 / layers, message), limit)
        )
        print(*rows[-1].values(), flush=True)
    harness.report(
        "auto_quality",
        rows,
        title="auto and the best named schedule of the same model, under the same memory",
        label=("p", "m", "layers", "message", "limit"),
        bars=("auto", "best named"),
        axis="makespan in lock-step",
    )


if __name__ == "__main__":
    tyro.cli(main)
