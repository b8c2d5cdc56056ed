"""Which makespans are the best possible? Proves optima of small cases with a constraint solver.

Writes tests/schedule/optima.json, which the tests read. OR-Tools is no dependency of the project:
install it in an environment of its own.

    pip install ortools
    python -m benchmarks.proven_optima [--seconds 30] [--workers 2]

The model: one interval per action, none of a stage's overlap; what `dependencies` says, plus the
time of messages; a chunk is in flight from the start of its F to the end of its W. Microbatches go
through every virtual stage in order, which loses nothing: those of one chunk cost the same.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from ortools.sat.python import cp_model

from jaxpipe.schedule.actions import Action, Kind, dependencies
from jaxpipe.schedule.placement import Placement, linear, looped, wave

FILE = Path(__file__).parents[1] / "tests" / "schedule" / "optima.json"
COSTS = ((1, 1, 1, 0), (5, 6, 4, 0), (5, 6, 4, 2), (2, 4, 1, 0), (4, 3, 2, 1))
"""F, B, W and a message; of integers, so that an optimum is exact."""


def cases() -> list[tuple[Placement, int, int]]:
    """Placements, microbatches, and limits in chunks."""
    found = [
        (wave(p), m, limit)
        for p, counts, limits in (
            (2, (3, 4, 8), (2, 3, 4)),
            (3, (4, 8), (2, 3, 4, 6)),
            (4, (5, 8), (2, 3, 4, 6, 8)),
        )
        for m in counts
        for limit in limits
    ]
    found += [(linear(p), m, limit) for p, m in ((3, 6), (4, 8)) for limit in (1, 2, p, 2 * p - 1)]
    found += [(looped(p, num_chunks=2), 8, limit) for p in (2, 3) for limit in (2, 3, 2 * p)]
    found += [(wave(2, num_waves=2), 6, limit) for limit in (4, 6, 8)]
    return found


def optimum(
    placement: Placement,
    num_microbatches: int,
    limit: int,
    costs: list[tuple[int, int, int, int]],
    *,
    seconds: float,
    workers: int,
) -> tuple[int, int]:
    """The best makespan found, and what is proven to be a lower bound.

    Args:
      costs: of every virtual stage.
    """
    model, depth = cp_model.CpModel(), placement.num_virtual_stages
    # All one after another, with every message.
    total = 2 * sum(map(sum, costs)) * num_microbatches
    end = model.new_int_var(0, total, "makespan")
    starts: dict[Action, Any] = {}
    rows: list[list[Any]] = [[] for _ in range(placement.num_stages)]
    held: list[list[Any]] = [[] for _ in range(placement.num_stages)]
    kinds = (Kind.F, Kind.B, Kind.W)
    for s, d in enumerate(placement.stages):
        for i in range(num_microbatches):
            for kind, cost in zip(kinds, costs[s], strict=False):
                action = Action(s, kind, i)
                start = starts[action] = model.new_int_var(0, total, str(action))
                rows[d].append(model.new_fixed_size_interval_var(start, cost, str(action)))
                model.add(start + cost <= end)
                if i:
                    model.add(start >= starts[Action(s, kind, i - 1)] + cost)
            first, last = starts[Action(s, Kind.F, i)], starts[Action(s, Kind.W, i)] + costs[s][2]
            size = model.new_int_var(0, total, "")
            held[d].append(model.new_interval_var(first, size, last, ""))
    for action, start in starts.items():
        for needed in dependencies(action, num_virtual_stages=depth):
            f, b, _, message = costs[needed.virtual_stage]
            lag = f if needed.kind is Kind.F else b
            if placement.stages[needed.virtual_stage] != placement.stages[action.virtual_stage]:
                lag += message
            model.add(start >= starts[needed] + lag)
    for row, intervals in zip(rows, held, strict=True):
        model.add_no_overlap(row)
        model.add_cumulative(intervals, [1] * len(intervals), limit)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 0
    solver.solve(model)
    return round(solver.objective_value), round(solver.best_objective_bound)


def main() -> None:
    """Proves what can be proven in the given time for each case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    # What is proven stays.
    known = json.loads(FILE.read_text()) if FILE.exists() else []
    proven = {
        (tuple(r["placement"]), r["microbatches"], r["limit_chunks"], tuple(r["costs"])): r
        for r in known
    }
    records = []
    for placement, m, limit in cases():
        for costs in COSTS:
            if limit > m * placement.num_chunks:
                continue
            key = (placement.stages, m, limit, costs)
            if key in proven:
                records.append(proven.pop(key))
                continue
            started = time.perf_counter()
            found, bound = optimum(
                placement, m, limit, [costs] * placement.num_virtual_stages, **vars(options)
            )
            print(*key, found, bound, f"{time.perf_counter() - started:.1f} s", flush=True)
            if found != bound:
                continue
            records.append(
                {
                    "placement": placement.stages,
                    "microbatches": m,
                    "limit_chunks": limit,
                    "costs": costs,
                    "optimum": found,
                }
            )
    records += proven.values()
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")


if __name__ == "__main__":
    main()
