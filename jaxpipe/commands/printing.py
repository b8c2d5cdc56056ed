"""Tables on a terminal of any width: no cell is cut short, and no name is broken."""

import math
import os
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxpipe.planning.cost import Prediction

_PIPE_WIDTH = 240
"""Columns of a table that goes to a file or another program, which have no terminal width."""
_TEXT_WIDTH = 100
_DECIMALS = 2
"""Decimals of a part's number, or more where the largest sum would have fewer than three digits."""


def output_console() -> Console:
    """Standard output, as wide as its terminal or COLUMNS."""
    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if fits else _PIPE_WIDTH, markup=False)


def say(console: Console, text: str) -> None:
    """Prints text in lines of the terminal, of at most 100 columns."""
    width = min(console.width, _TEXT_WIDTH)
    console.print(text, overflow="fold", highlight=False, width=width)


def written(value: float) -> str:
    """Writes three digits, or all before the point: 15910, 22.8, 0.84, 0."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def prefixed(value: float, unit: str) -> str:
    """Writes three digits with the prefix of a unit: 801 TFLOP/s, 3.02 TB/s, 41 GFLOP/s."""
    size, prefix = next((s, p) for s, p in ((1e12, "T"), (1e9, "G"), (0, "M")) if value >= s)
    return f"{written(value / (size or 1e6))} {prefix}{unit}"


def print_table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = ""
) -> None:
    """Prints rows as a table, or one below the other if the terminal has no room for the columns.
    The first column names the rows."""
    # Without lines between columns a terminal of 80 has room for the longest names.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    if title:
        say(console, title)
    unlimited = console.options.update(width=_PIPE_WIDTH)
    for right in (1, 0):  # columns are two spaces apart, or one
        table.padding = 0, right, 0, 0
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            console.print(table)
            return
    for name, *cells in rows:
        lines = (f"  {what}: {cell}" for what, cell in zip(columns[1:], cells, strict=True))
        say(console, "\n".join([name, *lines]))


def print_differences(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str
) -> None:
    """Prints a table without the columns whose cells are all equal, which the title names once. The
    first column names the rows, and stays."""
    alike = {
        column: cells[0]
        for column, *cells in zip(columns, *rows, strict=True)
        if len(set(cells)) == 1 < len(cells) and column != columns[0]
    }
    if alike:
        title = f"{title}; all have {', '.join(f'{name} {cell}' for name, cell in alike.items())}"
    kept = [number for number, column in enumerate(columns) if column not in alike]
    print_table(
        console,
        [columns[number] for number in kept],
        [[cells[number] for number in kept] for cells in rows],
        title=title,
    )


def print_parts(
    console: Console,
    title: str,
    label: str,
    plans: Sequence[tuple[str, Prediction]],
    which: str,
    scale: float,
) -> None:
    """Prints the "seconds" or the "bytes" of plans by part, and all of them, in the unit to which
    ``scale`` is the factor. ``label`` heads the column of the plans' names."""
    parts = [
        {**getattr(plan, which), "all": sum(getattr(plan, which).values())} for _, plan in plans
    ]
    if which == "bytes" and any(plan.compiled_bytes is not None for _, plan in plans):
        for row, (_, plan) in zip(parts, plans, strict=True):
            row["compiled"] = plan.device_bytes
    largest = scale * max(row["all"] for row in parts)
    decimals = max(_DECIMALS, _DECIMALS - math.floor(math.log10(largest)))
    least = 0.5 * 10.0**-decimals
    shown = [name for name in parts[0] if any(scale * row[name] >= least for row in parts)]
    rows = [
        (name, *(_rounded(scale * row[part], decimals) for part in shown))
        for (name, _), row in zip(plans, parts, strict=True)
    ]
    print_table(console, [label, *shown], rows, title=title)


def _rounded(value: float, decimals: int) -> str:
    """Writes three digits or all before the point, and at most so many decimals: 15910, 22.8, 0."""
    if value < 0.5 * 10.0**-decimals:
        return "0"
    return f"{value:.{min(decimals, max(0, 2 - math.floor(math.log10(value))))}f}"


def progress_bar() -> Progress:
    """Makes a progress bar on stderr, if that is a terminal; it disappears at the end."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
