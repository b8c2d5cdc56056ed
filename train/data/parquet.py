"""The rows of Parquet files, which a small file may have many large ones of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.data.folder import require
from train.data.guarded import Guarded

_DECODED = 16
"""Rows that are decoded at a time: all of them may be large."""
_ROWS, _CHARACTERS = 1024, 1 << 20
"""Rows that are handed over at a time, and after how many characters no further one is."""
_NUM_BYTES = 4 << 30
"""Memory to read with; a page of a file, of which there may be one in a row, has up to 2 GiB."""


def _package() -> Any:
    return require("pyarrow.parquet", extra="parquet", needed_by="Reading Parquet files")


class _Reader:
    """Reads columns of row groups, each on from where it was read before."""

    def __init__(self) -> None:
        self._parquet = _package()
        self._open = dict[tuple[Any, ...], Iterator[Any]]()

    def __call__(self, file: Path, group: int, column: str, start: int) -> tuple[list[Any], bool]:
        """Returns some values from a row on, and whether they are the last."""
        place = file, group, column
        rows = self._open.pop((*place, start), None)
        if rows is None:
            rows = itertools.islice(self._rows(*place), start, None)
        values, size = list[Any](), 0
        for value in itertools.islice(rows, _ROWS):
            values.append(value)
            size += len(value) if isinstance(value, str) else 1
            if size > _CHARACTERS:
                break
        else:
            if len(values) < _ROWS:
                return values, True
        self._open[*place, start + len(values)] = rows
        return values, False

    def _rows(self, file: Path, group: int, column: str) -> Iterator[Any]:
        with self._parquet.ParquetFile(file, buffer_size=1 << 20) as opened:
            batches = opened.iter_batches(_DECODED, row_groups=[group], columns=[column])
            for batch in batches:
                yield from (value.as_py() for value in batch.column(0))


def open_reader() -> Guarded:
    """Starts what `read` takes."""
    return Guarded(_Reader, num_bytes=_NUM_BYTES)


def read(reader: Guarded, file: Path, group: int, column: str, start: int) -> Iterator[Any]:
    """Yields the values of a row group's column, from a row of the group on.

    Raises:
      ValueError: they cannot be read, or not within the limits of a `Guarded`.
    """
    is_last = False
    while not is_last:
        values, is_last = reader(file, group, column, start)
        yield from values
        start += len(values)


def row_groups(file: Path, column: str) -> list[int]:
    """Returns the number of rows of every row group.

    Raises:
      OSError, ValueError: the file cannot be read, or has no such column.
    """
    with _package().ParquetFile(file) as opened:
        names, metadata = opened.schema_arrow.names, opened.metadata
    if column not in names:
        raise ValueError(f"it has no column {column!r}, but {', '.join(names)}")
    return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
