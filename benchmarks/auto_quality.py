"""Is `auto` ever worse than a named schedule of the same model under the same memory?

Draws configurations at random: stages, microbatches, layers, messages and memory limits. Against
each result it sets every named schedule that fits, on the placements of at most `_MOST_CHUNKS`
chunks per stage that cut the layers into equal chunks, each sliced as `auto`'s are. A named one
that is `_HOPELESS` times later than `auto` once it is cut quickly is not cut with care.

    python -m benchmarks.auto_quality [--configurations 300] [--seed 0] [--most-stages 16]
"""

from __future__ import annotations

import os
import random
import time

import tyro

from benchmarks import harness
from jaxpipe.schedule.search.auto import named_for
from jaxpipe.schedule.search.auto_placed import auto_placed
from jaxpipe.schedule.search.cuts import cuts
from jaxpipe.schedule.search.slices import slice_ticks
from jaxpipe.schedule.simulate import Costs, lock_step

_MOST_CHUNKS = 4
_HOPELESS = 1.03
"""A careful cut ends up to so much earlier than a quick one."""


def compare(p: int, m: int, layers: int, costs: Costs, limit: float) -> dict[str, str | float]:
    """One row of the table: makespans of equal models, in lock-step."""
    started = time.process_time()
    layer_costs = [costs] * (2 * p * layers)
    found = auto_placed(p, m, layer_costs=layer_costs, memory_limit=limit)
    seconds = time.process_time() - started
    ways = list(cuts(p, layer_costs))
    price = next(cut.costs for cut in ways if cut.placement == found.placement)
    ends = lock_step(found, price).makespan
    best, name = float("inf"), ""
    for cut in ways:
        # Chunks of unequal length are none of the named schedules' doing.
        if len(set(cut.layer_counts)) > 1 or cut.placement.num_chunks > _MOST_CHUNKS:
            continue
        for schedule in named_for(cut, m, limit):
            for quick in (True, False):
                sliced = slice_ticks(schedule, cut.costs, cut.layer_counts, quick=quick)
                later = lock_step(sliced, cut.costs).makespan
                if later < best:
                    best, name = later, f"{schedule.name}, v={cut.placement.num_chunks}"
                if later > _HOPELESS * ends:
                    break
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


def main(configurations: int = 300, seed: int = 0, most_stages: int = 16, skip: int = 0) -> None:
    """Prints the table and writes it.

    Args:
      configurations: how many to draw.
      seed: of the draw.
      most_stages: p is at most this.
      skip: leaves out so many, which other runs have seen.
    """
    os.environ["JAXPIPE_NO_CACHE"] = "1"
    draw = random.Random(seed)
    rows = []
    for number in range(configurations):
        p, m, layers = draw.randint(2, most_stages), draw.randint(1, 64), draw.randint(1, 12)
        message = draw.choice((0.0, 0.1, 0.5))
        limit = draw.choice([k / 2 for k in range(2, 4 * p + 1)])
        if number < skip:
            continue
        rows.append(
            compare(p, m, layers, Costs(1 / layers, 1.2 / layers, 0.8 / layers, message), limit)
        )
        harness.note(f"{number}: {' '.join(map(str, rows[-1].values()))}")
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
