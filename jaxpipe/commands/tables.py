"""``jaxpipe schedules`` and ``jaxpipe compare``: many schedules in one table."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxpipe.commands.options import DEFAULT_COSTS, build, check_size, message, parse_costs
from jaxpipe.schedule import catalog
from jaxpipe.schedule.generators.pipemare import ASYNCHRONOUS_METHODS
from jaxpipe.schedule.problems import below_one, refuse
from jaxpipe.schedule.show import comparison, draw
from jaxpipe.schedule.show.report import timelines

_PIPE_WIDTH = 240
"""Columns of a table that goes to a file or another program, which have no terminal width."""
_CAPTION = (
    "Bubble: added to m(F+B+W) of work of a full stage, free-running; at F=B=W=1 if no cost is "
    "named. Peak: on stage d, in microbatches of a full stage."
)


def schedules() -> None:
    """List the schedules, with bubble, peak in flight, constraints and source."""
    columns = "name", "what it does", "bubble", "peak in flight", "constraints", "source"
    table = Table(*columns, caption=_CAPTION)
    for e in catalog.entries():
        table.add_row(e.name, e.summary, e.bubble, e.peak, e.constraints, e.source)
    _print(table)
    methods = list(ASYNCHRONOUS_METHODS)
    print(
        f"Asynchronous: {', '.join(methods[:-1])} and {methods[-1]}. They never drain the pipeline "
        "and have no bubble if all stages cost the same; "
        f"`jaxpipe show {methods[0]} --stages 4 --microbatches 8` draws the steady state, and "
        "train.py trains with them (pipeline.schedule)."
    )


def compare(
    *,
    stages: int,
    microbatches: int,
    costs: str = DEFAULT_COSTS,
    layers_per_chunk: int | None = None,
    out: Path | None = None,
) -> None:
    """Compare all schedules that fit one shape: bubble on every clock, and peak in flight.

    Args:
      stages: p, pipeline stages.
      microbatches: m, microbatches per batch.
      costs: time of F,B,W of one chunk, and optionally of one message: 1,1,1 or 1,1.2,0.8,0.1.
      layers_per_chunk: cut lock-step ticks into slices at the granularity of this many layers.
      out: a picture of the comparison to write, .svg or .png.
    """
    parsed = parse_costs(costs)
    shape = {"stages": stages, "microbatches": microbatches, "layers_per_chunk": layers_per_chunk}
    refuse(below_one(**shape))
    check_size(stages, microbatches, 1)
    rows, reasons = [], {}
    for entry in catalog.entries():
        try:
            schedule = build(entry.name, costs=parsed, **shape)
        except ValueError as error:
            reasons[entry.name] = message(error)
            continue
        rows.append(comparison.row(timelines(schedule, parsed, layers_per_chunk=layers_per_chunk)))
    if not rows:
        raise ValueError("\n".join(dict.fromkeys(reasons.values())))
    if out is not None:
        title = f"p={stages}, m={microbatches}, costs of one chunk {costs}"
        draw.save(comparison.figure(rows, title), out)
    clocks = (f"{clock} bubble" for clock in ("free-running", "neighbor", "lock-step"))
    table = Table("schedule", "chunks", "peak in flight", *clocks)
    for row in rows:
        ratios = row.free_running, row.neighbor, row.lock_step
        shown = ("" if ratio is None else f"{ratio:.1%}" for ratio in ratios)
        table.add_row(row.name, str(row.num_chunks), f"{row.peak_in_flight:g}", *shown)
    _print(table)
    print(
        "Clocks: free-running waits for inputs alone; neighbor, as on GPUs, for the stages at both "
        "ends of a message; lock-step, as on simulated devices, for all stages in every tick."
    )
    print("Peak in flight: of the stage that keeps the most, in microbatches of a full stage.")
    for name, reason in reasons.items():
        print(f"{name} does not fit: {reason}")


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, markup=False).print(table)
