"""How long does a large schedule take from its name to its tick table?

Measures generation, validation, simulation and lowering of every closed-form schedule at p=64,
m=1024, and the most memory of a fresh process that does all four. A schedule should need less than
5 s from generation to lowering, and a few hundred MB.

    python -m benchmarks.schedule_speed [--stages 64] [--microbatches 1024] [--names 1f1b gpipe]
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import resource
import time

import tyro

from benchmarks import harness
from jaxpipe.schedule import catalog
from jaxpipe.schedule.check import validate
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.simulate import Costs, simulate

_SEARCHES = {"auto", "controllable-memory"}
"""Not closed-form: they search for an order, and have their own limits on time."""


def measure(name: str, stages: int, microbatches: int) -> dict[str, str | float]:
    """One row of the table; "total s" is generation, validation and lowering."""
    before = _memory_mb()
    started = time.perf_counter()
    schedule = catalog.build(name, stages=stages, microbatches=microbatches)
    seconds = [time.perf_counter() - started]
    for step in (
        lambda: validate(schedule),
        lambda: lower(schedule, (1,) * schedule.placement.num_virtual_stages),
        lambda: simulate(schedule, Costs(1, 1.2, 0.8)),
    ):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    generated, validated, lowered, simulated = seconds
    return {
        "schedule": name,
        "actions": sum(len(order) for order in schedule.orders),
        "generate s": generated,
        "validate s": validated,
        "lower s": lowered,
        "total s": generated + validated + lowered,
        "simulate s": simulated,
        "memory MB": _memory_mb() - before,
    }


def _memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(stages: int = 64, microbatches: int = 1024, names: tuple[str, ...] = ()) -> None:
    """Prints the table and writes it.

    Args:
      stages: p.
      microbatches: m.
      names: schedules to measure; all closed-form ones by default.
    """
    chosen = names or tuple(name for name in harness.every_schedule() if name not in _SEARCHES)
    fresh = multiprocessing.get_context("spawn")
    rows = []
    for name in chosen:
        harness.note(name)
        # A separate process for each, whose memory is the schedule's alone.
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh) as pool:
            rows.append(pool.submit(measure, name, stages, microbatches).result())
    harness.report(
        "schedule_speed",
        rows,
        title=f"from a name to a tick table, p={stages} m={microbatches}",
        label=["schedule"],
        bars=["generate s", "validate s", "lower s"],
        axis="seconds",
    )


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
