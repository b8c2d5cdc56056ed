"""How long does a large schedule take from its name to its tick table?

Every closed-form schedule at p=64, m=1024: generation, validation, simulation and lowering, and the
most memory of a fresh process that does all four. A schedule should need less than 5 s from
generation to lowering, and a few hundred MB.

    python benchmarks/schedule_speed.py [--stages 64] [--microbatches 1024] [--names 1f1b gpipe]
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import resource
import time

import tyro

from jaxpipe.schedule import catalog
from jaxpipe.schedule.lower import lower
from jaxpipe.schedule.simulate import Costs, simulate
from jaxpipe.schedule.validate import validate

_SEARCHES = {"auto", "controllable-memory"}
"""Not closed-form: they look for an order, and have their own limits on time."""
_HEADER = ("schedule", "actions", "generate", "validate", "lower", "total", "simulate", "memory")


def measure(name: str, stages: int, microbatches: int) -> tuple[str, ...]:
    """One row of the table; "total" is generation, validation and lowering, in seconds."""
    before = _memory_mb()
    started = time.perf_counter()
    try:
        schedule = catalog.build(name, stages=stages, microbatches=microbatches)
    except ValueError as error:
        return (name, str(error).replace("\n", " "))
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
    times = (generated, validated, lowered, generated + validated + lowered, simulated)
    actions = sum(len(order) for order in schedule.orders)
    return (name, f"{actions}", *(f"{s:.2f}" for s in times), f"{_memory_mb() - before:.0f} MB")


def _memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(stages: int = 64, microbatches: int = 1024, names: tuple[str, ...] = ()) -> None:
    """Prints the table.

    Args:
      stages: p.
      microbatches: m.
      names: schedules to measure; all closed-form ones without it.
    """
    chosen = names or tuple(e.name for e in catalog.entries() if e.name not in _SEARCHES)
    fresh = multiprocessing.get_context("spawn")
    print(f"p={stages}, m={microbatches}; times in seconds")
    print(_HEADER[0].ljust(20) + "".join(title.rjust(10) for title in _HEADER[1:]))
    for name in chosen:
        # A process of its own for each: the memory is the schedule's alone.
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh) as pool:
            row = pool.submit(measure, name, stages, microbatches).result()
        if len(row) == len(_HEADER):
            print(row[0].ljust(20) + "".join(cell.rjust(10) for cell in row[1:]), flush=True)
        else:
            print(f"{row[0].ljust(20)}  does not fit: {row[1]}", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
