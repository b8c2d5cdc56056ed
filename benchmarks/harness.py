"""Shared by all benchmarks: simulated devices, and rows as a table, as JSON and as a plot."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from jaxpipe.schedule import catalog

RESULTS = Path(__file__).parent / "results"
_COLOURS = ("#9dbdf0", "#27518f", "#1b7468", "#4f7f30")
_XLA_FLAGS = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
"""By default XLA orders a CPU program to run several operations at once, not for least memory: the
temporaries of a rematerialised layer are then a quarter larger, and steps are no faster."""
_UNSTABLE = ("Creator", "Date", "Format", "Type")
"""Metadata of a picture that say when and with which version it was drawn."""


def simulate(num_devices: int) -> None:
    """Makes the CPU appear as this many devices; to be called before anything runs."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    os.environ["XLA_FLAGS"] = f"{_XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}"


def every_schedule() -> tuple[str, ...]:
    """The names of all schedules."""
    return tuple(entry.name for entry in catalog.entries())


def chosen(names: Sequence[str]) -> Sequence[str]:
    """The names of an option; "all" stands for every schedule."""
    return every_schedule() if tuple(names) == ("all",) else names


def note(text: str) -> None:
    """Reports progress to the waiting user."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def save(drawn: Figure, path: Path) -> Path:
    """Writes a figure as SVG and returns the path; the same figure gives the same bytes."""
    # Without a fixed salt and date every SVG would differ. Text as outlines is ten times as long.
    fixed = {"svg.hashsalt": "jaxpipe", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
    written = io.StringIO()
    with matplotlib.rc_context(fixed):
        drawn.savefig(written, format="svg", metadata=dict.fromkeys(_UNSTABLE))
    path.write_text(_shortened(written.getvalue()), encoding="utf-8")
    return path


def _shortened(svg: str) -> str:
    """Puts each path on one line, in hundredths of a point, and takes single elements out of groups
    and comments."""
    svg = re.sub(r' d="[^"]*"', lambda path: f" {' '.join(path[0].split())}", svg)
    svg = re.sub(r"(?<=\d\.\d\d)\d+(?=[^\"<>]*\")", "", svg)
    svg = re.sub(r"\s*\n\s*", "\n", re.sub(r"<!-- .* -->", "", svg))
    alone = re.compile(r'<g(?: id="[\w.]+")?>\n(<(?!g).*>)\n</g>')
    while (fewer := alone.sub(r"\1", svg)) != svg:
        svg = fewer
    return svg


def seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """Wall time of one run until its results are ready, and the CPU time of all its threads.

    The CPU time hardly depends on other work on the machine.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(run())
    return time.perf_counter() - wall, time.process_time() - cpu


def report(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str,
    label: Sequence[str],
    bars: Sequence[str],
    axis: str,
) -> None:
    """`write` with the rows as bars.

    Args:
      name: of the files.
      rows: all with the same keys, which are the table's columns.
      title: of the table and the plot.
      label: columns that name a row.
      bars: columns to plot, in one unit.
      axis: the name of that unit.
    """
    labels = [", ".join(str(row[key]) for key in label) for row in rows]
    figure = _figure(title, labels, {bar: [row[bar] for row in rows] for bar in bars}, axis)
    write(name, rows, title=title, figure=figure)


def write(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str,
    figure: Figure,
    details: Any = None,
) -> None:
    """Prints the rows and writes them to ``results/<name>.json`` and ``results/<name>.svg``.

    The JSON also says how busy the machine was.

    Args:
      name: of the files.
      rows: all with the same keys, which are the table's columns.
      title: of the table.
      figure: the plot.
      details: further contents of the JSON.
    """
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    wide = sum(max(len(str(key)), 7) + 3 for key in rows[0]) + 30
    Console(width=max(100, wide)).print(table)
    RESULTS.mkdir(exist_ok=True)
    machine = {"cores": os.cpu_count(), "load": os.getloadavg(), "jax": jax.__version__}
    contents = {"title": title, "command": sys.argv, "machine": machine, "rows": rows}
    if details is not None:
        contents["details"] = details
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    save(figure, path.with_suffix(".svg"))
    print(f"written to {path} and {path.with_suffix('.svg').name}; load {machine['load']}")


def _figure(
    title: str, labels: Sequence[str], series: Mapping[str, Sequence[float]], axis: str
) -> Figure:
    """Bars to the right, one group per label."""
    drawn = Figure(figsize=(8.5, 1.4 + 0.2 * (len(series) + 1) * len(labels)), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots()
    height = 0.8 / len(series)
    for number, ((name, values), colour) in enumerate(zip(series.items(), _COLOURS, strict=False)):
        shift = height * (number - (len(series) - 1) / 2)
        places = [place + shift for place in range(len(labels))]
        bars = axes.barh(places, values, height=height, color=colour, label=name)
        axes.bar_label(bars, fmt="%.3g", fontsize=6, padding=2)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel(axis, fontsize=8)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", labelsize=8)
    drawn.suptitle(title, fontsize=9)
    drawn.legend(loc="outside lower center", ncols=len(series), frameon=False, fontsize=8)
    return drawn
