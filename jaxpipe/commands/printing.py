"""Tables on a terminal of any width: no cell is cut short, and no name is broken."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_PIPE_WIDTH = 240
"""Columns of a table that goes to a file or another program, which have no terminal width."""


def output_console() -> Console:
    """Standard output, as wide as its terminal or COLUMNS."""
    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if fits else _PIPE_WIDTH, markup=False)


def say(console: Console, text: str) -> None:
    """Prints text in lines of the terminal."""
    console.print(text, overflow="fold", highlight=False)


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

    Args:
      console: console to print on.
      columns: headings of the columns; the first column names the rows.
      rows: cells of the rows, one per column.
      title: text above the table.
    """
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
    """Prints a table without the columns whose cells are all equal, which the title names once.

    Args:
      console: console to print on.
      columns: headings of the columns; the first column names the rows, and stays.
      rows: cells of the rows, one per column.
      title: text above the table.
    """
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
