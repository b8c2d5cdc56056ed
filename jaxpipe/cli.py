"""The ``jaxpipe`` command: look at schedules without a device and without jax.

Messages for the user's mistakes go to stderr with exit status 2.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from jaxpipe.schedule import catalog, draw
from jaxpipe.schedule.simulate import Costs, Timeline, lock_step, simulate

_PIPE_WIDTH = 240
"""Columns of a table that goes to a file or another program, where there is no terminal to ask."""


def show(
    name: tyro.conf.Positional[str],
    /,
    *,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    costs: str = "1,1,1",
    format: Literal["text", "svg", "png", "json"] = "text",
    out: Path | None = None,
) -> None:
    """Draw one schedule, or write it as a picture or as JSON.

    Args:
      name: the schedule; `jaxpipe schedules` lists them.
      stages: p, pipeline stages.
      microbatches: m, microbatches a batch.
      chunks: v, chunks a stage.
      costs: time of F,B,W of one chunk, and optionally of one message: 1,1,1 or 1,1.2,0.8,0.1.
      format: what to write.
      out: the file to write; svg and png need one, text and json go to standard output without it.
    """
    parsed = parse_costs(costs)
    schedule = catalog.build(name, stages=stages, microbatches=microbatches, chunks=chunks)
    free, locked = simulate(schedule, parsed), lock_step(schedule, parsed)
    if format in draw.FORMATS:
        if out is None or out.suffix.lower() != f".{format}":
            raise ValueError(
                f"--format {format} needs a file that ends in .{format}, and --out is {out}.\n"
                f"Nearest valid: --out {(out or Path(name)).with_suffix(f'.{format}')}"
            )
        draw.save(free, out)
        return
    if format == "json":
        written = json.dumps(as_json(free, locked), indent=2)
    else:
        colour = out is None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
        captions = "\n".join([draw.caption(free), draw.caption(locked)])
        peaks = ", ".join(str(count) for count in free.peak_in_flight)
        written = (
            f"{draw.text(free, colour=colour)}\n{captions}\npeak in flight, per stage: {peaks}"
        )
    if out is None:
        print(written)
    else:
        out.write_text(written + "\n", encoding="utf-8")


def schedules() -> None:
    """List the schedules, with bubble, peak in flight, constraints and source."""
    table = Table(
        "name",
        "what it does",
        "bubble",
        "peak in flight",
        "constraints",
        "source",
        caption="Bubble: added to m(F+B+W) of work, free-running. Peak: activations on stage d.",
    )
    for entry in catalog.entries():
        table.add_row(
            entry.name, entry.summary, entry.bubble, entry.peak, entry.constraints, entry.source
        )
    _print(table)


def compare(*, stages: int, microbatches: int, costs: str = "1,1,1") -> None:
    """Compare all schedules at one shape: time and bubble on both clocks, and peak in flight.

    Args:
      stages: p, pipeline stages.
      microbatches: m, microbatches a batch.
      costs: time of F,B,W of one stage, and optionally of one message: 1,1,1 or 1,1.2,0.8,0.1.
    """
    parsed = parse_costs(costs)
    table = Table("schedule", "peak in flight")
    for clock in ("free-running", "lock-step"):
        table.add_column(f"{clock} makespan", justify="right")
        table.add_column("bubble", justify="right")
    for entry in catalog.entries():
        schedule = catalog.build(entry.name, stages=stages, microbatches=microbatches)
        free, locked = simulate(schedule, parsed), lock_step(schedule, parsed)
        times = [
            cell for t in (free, locked) for cell in (f"{t.makespan:g}", f"{t.bubble_ratio:.1%}")
        ]
        table.add_row(entry.name, str(max(free.peak_in_flight)), *times)
    _print(table)


def parse_costs(text: str) -> Costs:
    """Reads "F,B,W" or "F,B,W,message".

    Raises:
      ValueError: the text is not three or four numbers, or a number is out of range.

    Example:
      >>> parse_costs("1,1.2,0.8")
      Costs(f=1.0, b=1.2, w=0.8, message=0.0)
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (3, 4):
        raise ValueError(
            f"--costs {text} must be three or four numbers, F,B,W or F,B,W,message.\n"
            "Nearest valid: 1,1,1."
        )
    return Costs(*numbers)


def as_json(free: Timeline, locked: Timeline) -> dict[str, Any]:
    """What ``jaxpipe show --format json`` writes.

    Args:
      free: the schedule on the free-running clock; ``actions`` has its times.
      locked: the same schedule and costs on the lock-step clock.

    Returns:
      A tree of plain values. A fused backward is one action of kind "BW".
    """
    schedule, costs = free.schedule, free.costs
    clocks = {
        key: {
            "makespan": timeline.makespan,
            "bubble_ratio": timeline.bubble_ratio,
            "stage_bubble_ratios": list(timeline.stage_bubble_ratios),
            "stage_spans": list(timeline.stage_spans),
        }
        for key, timeline in (("free_running", free), ("lock_step", locked))
    }
    actions = [
        [
            {
                "kind": timed.action.kind.value,
                "chunk": schedule.placement.chunks[timed.action.virtual_stage],
                "virtual_stage": timed.action.virtual_stage,
                "microbatch": timed.action.microbatch,
                "start": timed.start,
                "end": timed.end,
            }
            for timed in row
        ]
        for row in free.rows
    ]
    edges = [
        {"sender": sender, "receiver": receiver, "count": count}
        for (sender, receiver), count in free.messages.items()
    ]
    return {
        "schedule": schedule.name,
        "stages": schedule.num_stages,
        "chunks": schedule.num_chunks,
        "microbatches": schedule.num_microbatches,
        "costs": {"f": costs.f, "b": costs.b, "w": costs.w, "message": costs.message},
        **clocks,
        "peak_in_flight": list(free.peak_in_flight),
        "actions": actions,
        "messages": {"total": sum(free.messages.values()), "edges": edges},
    }


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, markup=False).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      arguments: the command line after the program's name; None for the process's own.

    Returns:
      The exit status: 0, or 2 for a mistake of the user's.
    """
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"show": show, "schedules": schedules, "compare": compare},
            prog="jaxpipe",
            description="Draw, list and compare pipeline schedules.",
            args=arguments,
        )
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
