"""``jaxpipe show`` and ``jaxpipe validate``: one schedule, in any format."""

import functools
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from jaxpipe.asynchronous import (
    ASYNCHRONOUS_METHODS,
    SteadyState,
    steady_text,
)
from jaxpipe.commands.options import (
    DEFAULT_COSTS,
    check_size,
    check_table,
    layers_of_model,
    parse_costs,
    say_written,
)
from jaxpipe.schedule import catalog, formats
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.check import peak_in_flight
from jaxpipe.schedule.device_clock import Clock, device_clock, timelines
from jaxpipe.schedule.formats import read_csv, write_csv
from jaxpipe.schedule.offload import kept_on_devices, parts_of
from jaxpipe.schedule.partition import cut_layers
from jaxpipe.schedule.problems import ArgumentError, Problem, refuse
from jaxpipe.schedule.search.auto import gain_of_memory, gap
from jaxpipe.schedule.show import draw
from jaxpipe.schedule.show.page import page
from jaxpipe.schedule.simulate import UNIT, Costs

_ENDINGS = {f".{name}": name for name in ("svg", "csv", "html")}
"""The format that a file's ending means."""
_NOT_ASYNCHRONOUS = {
    "chunks": (1, "each of its stages holds 1 chunk"),
    "group": (None, "its microbatches enter one by one"),
    "slices": (None, "it runs whole sequences"),
    "costs": (
        DEFAULT_COSTS,
        "its picture counts ticks, each with a forward and a backward on every stage",
    ),
    "format": ("text", "it never drains, and text alone shows its steady state"),
    "offload": (None, "what is in flight is a part of its state"),
    "memory_limit": (None, "it always keeps 2(p-d) microbatches in flight on stage d"),
}
"""The only value of an option that `show` takes with an asynchronous method, and the reason."""

_WORTH_SAYING = 0.01
"""The least share of the time for which `auto` tells of a little more memory."""

_Format = Literal["text", "svg", "html", "csv"]


def show(
    name: tyro.conf.Positional[str],
    /,
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    group: int | None = None,
    slices: int | None = None,
    costs: str = DEFAULT_COSTS,
    layers: int | None = None,
    layer_costs: str | None = None,
    memory_limit: float | None = None,
    offload: float | None = None,
    recompute_segment: int | None = None,
    clock: Clock | None = None,
    format: _Format | None = None,
    out: Path | None = None,
) -> None:
    """Draw the ticks of one schedule, or write them as a picture, a page or CSV.

    A timeline shows actions, idle time, messages, and which messages arrive a tick late.

    Args:
      name: one of `jaxpipe schedules`, or your own: FILE.csv or module:function. pipemare,
        pipedream and 2bw print their steady state as text, with delays and weight versions.
      stages: p, pipeline stages; required unless the schedule is a file.
      microbatches: m, microbatches per batch; required unless the schedule is a file.
      chunks: v, chunks per stage; by default the schedule's own.
      group: number of microbatches per group, for interleaved and breadth-first schedules.
      slices: k, slices per sequence, for gpipe, 1f1b, eager-1f1b, interleaved, breadth-first,
        modular, zb-h1, zb-h2, interleaved-zb and auto. A slice is drawn as a microbatch, and costs
        are those of a slice.
      costs: time of F,B,W of one chunk (for `auto`, of half a stage), and optionally of one
        message: 1,1,1 or 1,1.2,0.8,0.1. A fifth number is what an overlapped pair saves on the
        free clock, as a share of its shorter action: 1,1.2,0.8,0.1,0.5. A sixth is the share of
        attention in F and B; attention takes longer for later slices. The word rendezvous at the
        end (1,1.2,0.8,0.1,rendezvous) makes senders wait for receivers on the device clock.
      layers: layers of the whole model, with --layer-costs in place of --costs; `auto` then also
        chooses the number of chunks.
      layer_costs: time of F,B,W of one of these layers, and optionally of one message.
      memory_limit: largest peak in flight per stage that a search may use, in microbatches, of
        which a chunk keeps 1/v; with --offload, the most that a device keeps, for any schedule.
      offload: time to move the residuals of an F to the host, or back, as a share of F: 0.8. Those
        that wait longest then move while layers run, until --memory-limit holds.
      recompute_segment: stages per segment, for asynchronous methods; each segment runs forward
        again before its backward.
      clock: device, the clock of the program on GPUs; or free, the clock of papers, on which stages
        wait only for inputs. A page has both.
      format: what to write; by default the format of --out's extension, or else text. html is an
        interactive page: zoom, and the contents and memory of each tick.
      out: the file to write; without it, the schedule goes to standard output.
    """
    written = _chosen_format(format, out)
    options: dict[str, Any] = {
        "chunks": chunks,
        "group": group,
        "slices": slices,
        "memory_limit": memory_limit,
        "offload": offload,
    }
    parsed = parse_costs(costs)
    if name in ASYNCHRONOUS_METHODS:
        asked = options | {"costs": costs, "format": written}
        steady = _steady_state(name, stages, microbatches, recompute_segment, asked)
        _write(steady_text(steady), out)
        return
    if recompute_segment is not None:
        methods = ", ".join(ASYNCHRONOUS_METHODS)
        rule = f"does not fit $name: segments are for {methods}"
        others = {"name": name}
        refuse([Problem("recompute_segment", recompute_segment, rule, (None,), others)])
    priced: Sequence[Costs] | None = None
    if layers is not None or layer_costs is not None:
        if costs != DEFAULT_COSTS:
            rule = "is of a chunk: $layers and $layer_costs say it of the model"
            of_model = {"layers": None, "layer_costs": None}
            refuse([Problem("costs", costs, rule, (None,), of_model)])
        priced = layers_of_model(stages or 1, layers=layers, layer_costs=layer_costs)
    elif name == "auto" and stages is not None:
        check_size(stages, microbatches or 1, 2)
        priced = [parsed] * (2 * stages)
    if stages is not None and microbatches is not None:
        own = [entry.default_chunks for entry in catalog.entries() if entry.name == name] or [1]
        check_size(stages, microbatches * max(slices or 1, 1), chunks or own[0])
    options |= {"costs": parsed} if priced is None else {"layer_costs": priced}
    options |= {"stages": stages, "microbatches": microbatches}
    if name != "auto" and offload is not None:
        del options["memory_limit"], options["offload"]
    schedule = catalog.build(name, **options, progress=_say)
    of_chunks = parsed if priced is None else cut_layers(priced, schedule.placement)[1]
    if written == "csv":
        _write(write_csv(schedule), out)
        return
    check_table(schedule)
    if name == "auto":
        _say("timing and drawing")
    text = _in_format(schedule, of_chunks, clock, written, printed=out is None)
    if offload is not None and written == "text":
        priced_chunks = [of_chunks] if isinstance(of_chunks, Costs) else of_chunks
        text += _kept(schedule, parts_of(offload, priced_chunks), memory_limit)
    if written == "text" and name == "auto" and offload is None:
        assert priced is not None
        _say("named schedules with half a microbatch more")
        text += _worth_of_memory(schedule, priced, memory_limit)
    if written == "text" and any(e.name == name and e.reordered for e in catalog.entries()):
        published = catalog.build(f"{name}{catalog.PUBLISHED}", **options)
        if published.orders != schedule.orders:
            text += f"also {draw.caption(device_clock(published, of_chunks))}\n"
        elif of_chunks != UNIT:
            text += "in the published order: none for these costs ends sooner on the device clock\n"
    _write(text, out)


def _say(what: str) -> None:
    """Says on standard error what `auto` does next: a long search would be silent."""
    print(f"auto: {what}", file=sys.stderr, flush=True)


def _kept(schedule: Schedule, parts: int, limit: float | None) -> str:
    """Says what devices keep where the rest waits on the host; refuses what they cannot."""
    full = schedule.num_chunks * schedule.num_slices
    fewest = [count / full for count in kept_on_devices(schedule, parts)]
    limit = max(fewest) if limit is None else limit
    if limit < max(fewest):
        rule = "is less than a device must keep, if all others wait on the host"
        near = (max(fewest),)
        refuse([Problem("memory_limit", limit, rule, near, schedule=schedule.name)])
    peaks = [count / full for count in peak_in_flight(schedule)]
    kept = ", ".join(f"{min(peak, limit):g}" for peak in peaks)
    moves = "one action" if parts == 1 else f"{parts} actions"
    return f"kept on devices, per stage, moved beside {moves}: {kept}\n"


def _worth_of_memory(
    schedule: Schedule, layer_costs: Sequence[Costs], memory_limit: float | None
) -> str:
    """Says what half a microbatch more would be worth to `auto`, if that is 1% or more."""
    better, gain = gain_of_memory(schedule, layer_costs=layer_costs, memory_limit=memory_limit)
    if gain < _WORTH_SAYING:
        return ""
    more = (schedule.num_stages if memory_limit is None else memory_limit) + 0.5
    return f"half a microbatch more, --memory-limit {more:g}: {gain:.1%} sooner ({better.name})\n"


def validate(
    file: tyro.conf.Positional[Path],
    /,
    *,
    costs: str = DEFAULT_COSTS,
    clock: Clock | None = None,
) -> None:
    """Check a schedule in PyTorch's CSV format of actions, and draw it as `show` does.

    Args:
      file: one row per stage, cells such as 0F3, 1I2 (backward for the input), 2W0, 1B2 (both).
      costs: as for `show`.
      clock: as for `show`.
    """
    schedule = read_csv(file)
    check_table(schedule)
    _write(_in_format(schedule, parse_costs(costs), clock, "text", must_draw=False), None)


def _chosen_format(format: _Format | None, out: Path | None) -> str:
    """Chooses the requested format, or that of the file's ending."""
    meant = _ENDINGS.get(out.suffix.lower()) if out is not None else None
    if format is None:
        if out is not None and meant is None and out.suffix.lower() not in ("", ".txt"):
            endings = ", ".join([*_ENDINGS, ".txt"])
            raise ValueError(
                f"--out {out} ends in {out.suffix}, which no format has: {endings}.\n"
                f"Nearest valid: --out {out.with_suffix('.svg')}, or --format text."
            )
        return meant or "text"
    if out is None or meant in (None, format):
        return format
    ending = ".txt" if format == "text" else f".{format}"
    raise ValueError(
        f"--format {format} needs a file that ends in {ending}, and --out is {out}.\n"
        f"Nearest valid: --out {out.with_suffix(ending)}"
    )


def _steady_state(
    name: str,
    stages: int | None,
    microbatches: int | None,
    recompute_segment: int | None,
    options: Mapping[str, Any],
) -> SteadyState:
    """Makes the rules of an asynchronous pipeline; refuses what its text cannot show."""
    others = {"name": name}
    refuse(
        Problem(option, options[option], f"does not fit $name: {why}", (None,), others)
        for option, (taken, why) in _NOT_ASYNCHRONOUS.items()
        if options[option] not in (None, taken)
    )
    if stages is None or microbatches is None:
        raise ArgumentError([formats.no_shape(name)])
    steady = SteadyState(stages, microbatches, name, recompute_segment)
    check_size(stages, microbatches, 1)
    return steady


def _in_format(
    schedule: Schedule,
    costs: Costs | Sequence[Costs],
    clock: Clock | None,
    format: str,
    *,
    printed: bool = True,
    must_draw: bool = True,
) -> str:
    """Writes a timeline in any of the formats, which are all text."""
    clocks = free, device = timelines(schedule, costs)
    drawn = free if clock == "free" else device
    if format == "html":
        return page([clocks])
    if format == "svg":
        return draw.figure(drawn)
    at_terminal = printed and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if at_terminal else None
    try:
        colour = at_terminal and "NO_COLOR" not in os.environ
        drawing = draw.text(drawn, colour=colour, width=width)
    except draw.TooWideError as error:
        if must_draw:
            raise
        drawing = f"Valid, but not drawn. {error}"
    other_captions = (f"also {draw.caption(c)}" for c in clocks if c is not drawn)
    peaks = ", ".join(f"{drawn.in_full_stages(count):g}" for count in drawn.peak_in_flight)
    idle = ", ".join(f"{ratio:.1%}" for ratio in drawn.stage_bubble_ratios)
    lines = [
        *(draw.caption(drawn), drawing, *other_captions),
        f"idle, per stage: {idle}",
        f"peak in flight, per stage: {peaks}",
    ]
    if schedule.name == "auto":
        lines.append(gap(device))
    if width is not None:  # a drawing has its own lines, and stays as it is
        wrap = functools.partial(textwrap.fill, width=width, break_long_words=False)
        lines = [line if "\n" in line else wrap(line) for line in lines]
    return "\n".join(lines) + "\n"


def _write(text: str, out: Path | None) -> None:
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")
        say_written(out)
