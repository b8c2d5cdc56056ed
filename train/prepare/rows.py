"""Texts in the rows of Parquet files, as data sets on the Hugging Face Hub have them, or of JSON
Lines: read a group at a time, so that memory stays flat however many there are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpipe.errors import shortened, shown
from train.data.folder import require

ENDINGS = (".parquet", ".jsonl")
GROUP_BYTES = 64_000_000
"""Bytes of text in a group."""
_ROWS = 1024
"""Rows of a Parquet file that are read at once."""


def find_files(path: Path) -> list[Path]:
    """Lists the files of a folder at any depth, by name; a file is its own list."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in ENDINGS and file.is_file())


def groups(
    path: Path, column: str, limit: float, skipped: Counter[str]
) -> Iterator[list[tuple[str, str]]]:
    """Yields names and texts of rows, in the order of the files, in groups of `GROUP_BYTES`.

    Args:
      path: a file, or a folder of files.
      column: name of the column, or of the field of each line, that holds the text.
      limit: most bytes of text.
      skipped: counts the rows left out, by reason.

    Raises:
      ValueError: a file cannot be read, or has no such column.
    """
    group, size, used = list[tuple[str, str]](), 0, 0
    for file in find_files(path):
        name = file.relative_to(path if path.is_dir() else file.parent).as_posix()
        read = _parquet if file.suffix == ".parquet" else _lines
        try:
            for number, text in enumerate(read(file, column), 1):
                if not text:
                    skipped["empty"] += 1
                    continue
                if not isinstance(text, str):
                    raise ValueError(f"row {number} holds no text, but {shown(text)}")
                length = len(text.encode())
                if used + length > limit:
                    skipped["over --max-megabytes"] += 1
                    continue
                group.append((f"{name} row {number}", text))
                size, used = size + length, used + length
                if size > GROUP_BYTES:
                    yield group
                    group, size = [], 0
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"--rows={path}: {name} cannot be read: {error}.") from error
    if group:
        yield group


def _parquet(file: Path, column: str) -> Iterator[Any]:
    parquet = require("pyarrow.parquet", extra="parquet", needed_by="--rows with Parquet files")
    with parquet.ParquetFile(file) as opened:
        names = opened.schema_arrow.names
        if column not in names:
            raise ValueError(f"it has no column {column!r}, but {', '.join(names)}")
        for batch in opened.iter_batches(batch_size=_ROWS, columns=[column]):
            yield from batch.column(0).to_pylist()


def _lines(file: Path, column: str) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        for line in filter(str.strip, lines):
            fields = json.loads(line)
            if not isinstance(fields, dict) or column not in fields:
                raise ValueError(f"a line has no field {column!r}: {shortened(line)}")
            yield fields[column]
