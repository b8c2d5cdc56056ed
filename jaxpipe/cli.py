"""The ``jaxpipe`` command: look at schedules. It needs no device and does not import jax.

Messages for the user's mistakes go to stderr with exit status 2.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from jaxpipe import __version__
from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.formats import user
from jaxpipe.schedule.formats.csv_format import read_csv, write_csv
from jaxpipe.schedule.generators import pipemare
from jaxpipe.schedule.show import comparison, draw, pipemare_draw
from jaxpipe.schedule.show.report import report, timelines
from jaxpipe.schedule.show.trace import trace
from jaxpipe.schedule.simulate import Costs

_PIPE_WIDTH = 240
"""Columns of a table that goes to a file or another program, which have no terminal width."""
_MAX_PASSES = 5_000_000
"""Forward passes of the largest schedule the command builds, about 5 GB: more is a typo."""
_MAX_VIRTUAL_STAGES = 4096
"""Of the longest pipeline: beyond every machine, and some generators take quadratic time."""
_DEFAULT_COSTS = "1,1,1"
_ENDINGS = {".svg": ("svg",), ".png": ("png",), ".csv": ("csv",), ".json": ("json", "trace")}
"""The formats that a file's ending allows; the first is the default."""
_NOT_ASYNCHRONOUS = {
    "chunks": "each of its stages holds 1 chunk",
    "group": "its microbatches enter one by one",
    "costs": "its picture counts ticks, each with a forward and a backward on every stage",
    "layers-per-chunk": "its ticks run whole actions",
    "memory-limit": "it always keeps 2(p-d) microbatches in flight on stage d",
}
"""Why `show` of an asynchronous method does not take such an option."""

_Format = Literal["text", "svg", "png", "trace", "csv", "json"]


def show(
    name: tyro.conf.Positional[str],
    /,
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    group: int | None = None,
    costs: str = _DEFAULT_COSTS,
    layers_per_chunk: int | None = None,
    memory_limit: float | None = None,
    recompute_segment: int | None = None,
    format: _Format | None = None,
    out: Path | None = None,
) -> None:
    """Draw one schedule, or write it as a picture, a trace, CSV or JSON.

    Args:
      name: the schedule; `jaxpipe schedules` lists them. Or your own: FILE.csv, module:function. Or
        pipemare, pipedream or 2bw: the steady state, with delays and weight versions.
      stages: p, pipeline stages; every schedule but a file needs it.
      microbatches: m, microbatches per batch; every schedule but a file needs it.
      chunks: v, chunks per stage; the schedule's own default without it.
      group: microbatches that interleaved and breadth-first schedules take together.
      costs: time of F,B,W of one chunk, and optionally of one message: 1,1,1 or 1,1.2,0.8,0.1.
      layers_per_chunk: cut lock-step ticks into slices at the granularity of this many layers.
      memory_limit: peak in flight per stage, in microbatches of a full stage, for a search.
      recompute_segment: for an asynchronous method, stages that run forward again together.
      format: what to write; by default the format of --out's ending, or else text.
      out: the file to write; svg and png need one, the others go to standard output without it.
    """
    written = _chosen_format(format, out, name)
    if name in pipemare.METHODS:
        unread = {
            "chunks": None if chunks == 1 else chunks,
            "group": group,
            "costs": None if costs == _DEFAULT_COSTS else costs,
            "layers-per-chunk": layers_per_chunk,
            "memory-limit": memory_limit,
        }
        text = _steady_state(name, stages, microbatches, recompute_segment, written, unread)
        _write(text, out)
        return
    if recompute_segment is not None:
        raise ValueError(
            f"--recompute-segment {recompute_segment} does not fit {name!r}: segments are for "
            f"{', '.join(pipemare.METHODS)}.\nNearest valid: leave it out."
        )
    parsed = parse_costs(costs)
    schedule = _build(
        name,
        costs=parsed,
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        group=group,
        layers_per_chunk=layers_per_chunk,
        memory_limit=memory_limit,
    )
    if written in draw.FORMATS:
        assert out is not None
        free, _ = timelines(schedule, parsed)
        draw.save(draw.figure(free), out)
    else:
        _write(_in_format(schedule, parsed, layers_per_chunk, written, out is None), out)


def schedules() -> None:
    """List the schedules, with bubble, peak in flight, constraints and source."""
    table = Table(
        "name",
        "what it does",
        "bubble",
        "peak in flight",
        "constraints",
        "source",
        caption="Bubble: added to m(F+B+W) of work of a full stage, free-running; at F=B=W=1 if "
        "no cost is named. Peak: on stage d, in microbatches of a full stage.",
    )
    for entry in catalog.entries():
        table.add_row(
            entry.name, entry.summary, entry.bubble, entry.peak, entry.constraints, entry.source
        )
    _print(table)
    methods = list(pipemare.METHODS)
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
    costs: str = _DEFAULT_COSTS,
    layers_per_chunk: int | None = None,
    out: Path | None = None,
) -> None:
    """Compare all schedules that fit one shape: bubble on both clocks, and peak in flight.

    Args:
      stages: p, pipeline stages.
      microbatches: m, microbatches per batch.
      costs: time of F,B,W of one chunk, and optionally of one message: 1,1,1 or 1,1.2,0.8,0.1.
      layers_per_chunk: cut lock-step ticks into slices at the granularity of this many layers.
      out: a picture of the comparison to write, .svg or .png.
    """
    parsed = parse_costs(costs)
    _check_ranges(stages=stages, microbatches=microbatches, layers_per_chunk=layers_per_chunk)
    _check_size(stages, microbatches, 1)
    rows, reasons = [], {}
    for entry in catalog.entries():
        try:
            schedule = _build(
                entry.name,
                costs=parsed,
                stages=stages,
                microbatches=microbatches,
                layers_per_chunk=layers_per_chunk,
            )
        except ValueError as error:
            reasons[entry.name] = str(error)
            continue
        rows.append(comparison.row(*timelines(schedule, parsed, layers_per_chunk=layers_per_chunk)))
    if not rows:
        raise ValueError("\n".join(dict.fromkeys(reasons.values())))
    if out is not None:
        title = f"p={stages}, m={microbatches}, costs of one chunk {costs}"
        draw.save(comparison.figure(rows, title), out)
    table = Table("schedule", "chunks", "peak in flight", "free-running bubble", "lock-step bubble")
    for row in rows:
        table.add_row(
            row.name,
            str(row.num_chunks),
            f"{row.peak_in_flight:g}",
            f"{row.free_running:.1%}",
            f"{row.lock_step:.1%}",
        )
    _print(table)
    print("Peak in flight: of the stage that keeps the most, in microbatches of a full stage.")
    for name, reason in reasons.items():
        print(f"{name} does not fit: {reason}")


def validate(
    file: tyro.conf.Positional[Path],
    /,
    *,
    costs: str = _DEFAULT_COSTS,
    layers_per_chunk: int | None = None,
    format: Literal["text", "json"] = "text",
) -> None:
    """Check a schedule in PyTorch's CSV of actions, and report it as `show` does.

    Args:
      file: one row per stage, cells such as 0F3, 1I2 (backward for the input), 2W0, 1B2 (both).
      costs: time of F,B,W of one chunk, and optionally of one message: 1,1,1 or 1,1.2,0.8,0.1.
      layers_per_chunk: cut lock-step ticks into slices at the granularity of this many layers.
      format: what to write.
    """
    parsed = parse_costs(costs)
    _check_ranges(layers_per_chunk=layers_per_chunk)
    shown = _in_format(read_csv(file), parsed, layers_per_chunk, format, True, must_draw=False)
    _write(shown, None)


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
            f"Nearest valid: {_DEFAULT_COSTS}."
        )
    return Costs(*numbers)


def _chosen_format(format: _Format | None, out: Path | None, name: str) -> str:
    """The requested format, or that of the file's ending."""
    fits = _ENDINGS.get(out.suffix.lower()) if out is not None else None
    if format is None:
        return fits[0] if fits else "text"
    if format in fits if fits else format not in draw.FORMATS:
        return format
    ending = {"text": ".txt", "trace": ".json"}.get(format, f".{format}")
    seen = "there is no --out" if out is None else f"--out is {out}"
    raise ValueError(
        f"--format {format} needs a file that ends in {ending}, and {seen}.\n"
        f"Nearest valid: --out {(out or Path(name)).with_suffix(ending)}"
    )


def _check_ranges(**numbers: Any) -> None:
    problems = catalog.range_problems(**numbers)
    if problems:
        raise ValueError("\n".join(problems))


def _check_size(stages: int, microbatches: int, chunks: int) -> None:
    """Refuses schedules that would take all memory, or hours."""
    pipeline = f"--stages {stages}" + f" and --chunks {chunks}" * (chunks != 1)
    for made, limit, options, what in (
        (stages * chunks, _MAX_VIRTUAL_STAGES, pipeline, "virtual stages"),
        (
            stages * chunks * microbatches,
            _MAX_PASSES,
            f"{pipeline} and --microbatches {microbatches}",
            "forward passes",
        ),
    ):
        if made > limit:
            nearest = f"a product of {limit}" if " and " in options else f"--stages {limit}"
            raise ValueError(
                f"{options}: {made} {what}, beyond {limit}: such a schedule does not fit in "
                f"memory.\nNearest valid: {nearest}."
            )


def _steady_state(
    name: str,
    stages: int | None,
    microbatches: int | None,
    recompute_segment: int | None,
    format: str,
    unread: Mapping[str, int | float | str | None],
) -> str:
    """An asynchronous pipeline, which has no makespan: one period of it, as text."""
    problems = [
        f"--{option} {value} does not fit {name!r}: {_NOT_ASYNCHRONOUS[option]}.\n"
        "Nearest valid: leave it out."
        for option, value in unread.items()
        if value is not None
    ]
    if problems:
        raise ValueError("\n".join(problems))
    if stages is None or microbatches is None:
        raise ValueError(f"Schedule {name!r} needs --stages and --microbatches.")
    if format != "text":
        raise ValueError(
            f"--format {format} is for schedules that end; {name!r} never drains.\n"
            "Nearest valid: --format text."
        )
    _check_size(stages, microbatches, 1)
    try:
        steady = pipemare.SteadyState(stages, microbatches, name, recompute_segment)
    except ValueError as error:
        # Its message names its own arguments.
        message = (
            str(error)
            .replace("method='2bw'", "2bw")
            .replace("microbatches=", "--microbatches ")
            .replace("recompute_segment=", "--recompute-segment ")
        )
        raise ValueError(message.replace("stages=", "--stages ")) from None
    return pipemare_draw.text(steady)


def _build(
    name: str,
    *,
    stages: int | None,
    microbatches: int | None,
    costs: Costs,
    layers_per_chunk: int | None,
    **options: Any,
) -> Schedule:
    """Builds a schedule, or loads a user's own, with the given options.

    Costs and layers are also used by the clocks.
    """
    given = {option: value for option, value in options.items() if value is not None}
    clock: dict[str, Any] = {"costs": costs}
    if layers_per_chunk is not None:
        clock["layers_per_chunk"] = layers_per_chunk
    if user.is_users(name):
        _check_ranges(
            stages=stages, microbatches=microbatches, layers_per_chunk=layers_per_chunk, **given
        )
        if stages is not None and microbatches is not None:
            _check_size(stages, microbatches, given.get("chunks", 1))
        if "chunks" in given:
            given["num_chunks"] = given.pop("chunks")
        return user.load(name, stages=stages, microbatches=microbatches, clock=clock, **given)
    if stages is None or microbatches is None:
        raise ValueError(f"Schedule {name!r} needs --stages and --microbatches.")
    own = [entry.default_chunks for entry in catalog.entries() if entry.name == name]
    _check_size(stages, microbatches, given.get("chunks", own[0] if own else 1))
    return catalog.build(name, stages=stages, microbatches=microbatches, **given, **clock)


def _in_format(
    schedule: Schedule,
    costs: Costs,
    layers_per_chunk: int | None,
    format: str,
    printed: bool,
    *,
    must_draw: bool = True,
) -> str:
    """The schedule in any of the formats that are text."""
    if format == "csv":
        return write_csv(schedule)
    if format == "json":
        shown = report(schedule, costs, layers_per_chunk=layers_per_chunk)
        return json.dumps(shown, indent=2) + "\n"
    free, locked = timelines(schedule, costs, layers_per_chunk=layers_per_chunk)
    if format == "trace":
        return json.dumps(trace(free)) + "\n"
    colour = printed and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    peaks = ", ".join(f"{free.in_full_stages(count):g}" for count in free.peak_in_flight)
    try:
        drawing = draw.text(free, colour=colour)
    except draw.TooWideError as error:
        if must_draw:
            raise
        drawing = f"Valid, but not drawn. {error}"
    return (
        f"{drawing}\n{draw.caption(free)}\n{draw.caption(locked)}\n"
        f"peak in flight, per stage: {peaks}\n"
    )


def _write(text: str, out: Path | None) -> None:
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, markup=False).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      arguments: the command line after the program's name; None for the process's own.

    Returns:
      The exit status: 0, or 2 for a mistake of the user's.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if list(given) == ["--version"]:
        print(f"jaxpipe {__version__}")
        return 0
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"show": show, "schedules": schedules, "compare": compare, "validate": validate},
            prog="jaxpipe",
            description="Draw, list, compare and check pipeline schedules, or print --version.",
            args=given,
        )
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
