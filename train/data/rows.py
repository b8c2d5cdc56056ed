"""Texts in the rows of Parquet files, as data sets on the Hugging Face Hub have them, of JSON
Lines, or of a data set that a function makes: read shard by shard, so that memory stays flat."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from jaxpipe.errors import shortened, shown
from train.data.folder import require
from train.data.tokenizer import is_whole

ENDINGS = (".parquet", ".jsonl")
GROUP_BYTES = 64_000_000
"""Bytes of text in a group."""
MOST_CHARACTERS = 1 << 26
"""Characters of a row, or of a line of JSON."""
_DECODED = 16
"""Rows of a Parquet file that are decoded at a time: all of them may be large."""
_END: Any = object()


@dataclasses.dataclass(frozen=True)
class Shard:
    """Rows that are read one after the other: of a row group, a file, or a shard of a data set.

    Args:
      source: the option that names the data, and its value, for messages.
      name: name of the file or of the shard.
      first: number of rows of the file that are before the shard.
      read: yields the values of the column from a row of the shard on.
    """

    source: str
    name: str
    first: int
    read: Callable[[int], Iterator[Any]]

    def texts(self, start: int = 0) -> Iterator[tuple[str, str]]:
        """Yields the name and the text, "" if it has none, of every row from one on.

        Raises:
          ValueError: the rows cannot be read, or hold something else.
        """
        rows = self.read(start)
        for number in itertools.count(self.first + start + 1):
            try:
                text = next(rows, _END)
            except (OSError, ValueError, RecursionError) as error:
                reason = shortened(" ".join(str(error).split()))
                raise self._broken(f"{reason}, at row {number}") from error
            if text is _END:
                return
            if problem := _problem(text):
                raise self._broken(f"row {number} {problem}")
            yield f"{self.name} row {number}", text or ""

    def _broken(self, reason: str) -> ValueError:
        return ValueError(f"{self.source}: {self.name} cannot be read: {reason}.")


def _problem(text: Any) -> str | None:
    """Finds the reason why a value is no text, if there is one."""
    if not isinstance(text, str | None):
        return f"holds no text, but {shown(text)}"
    if text and len(text) > MOST_CHARACTERS:
        return f"has {len(text)} characters. At most {MOST_CHARACTERS} are read"
    return (
        None if text is None or is_whole(text) else "holds half of a character (a lone surrogate)"
    )


def find_files(path: Path) -> list[Path]:
    """Lists the files of a folder at any depth, by name; a file is its own list."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in ENDINGS and file.is_file())


def find_shards(source: str, column: str, *, option: str) -> list[Shard]:
    """Lists the shards of a data set: row groups of Parquet files, JSON Lines files, or its own.

    Args:
      source: a file; a folder of files; or ``module:function``, imported from Python's path or the
        working directory, which returns a ``datasets.IterableDataset``.
      column: name of the column, or of the field of each line, that holds the text.
      option: name of the option that gives the source, for messages.

    Returns:
      At least one, in the order of the files' names.

    Raises:
      ValueError: there are none, or a file cannot be read or has no such column.
    """
    path, given = Path(source), f"{option}={source}"
    if ":" in source and not path.exists():
        return _of_function(source, column, given)
    shards = list[Shard]()
    for file in find_files(path):
        name = file.relative_to(path if path.is_dir() else file.parent).as_posix()
        if file.suffix == ".parquet":
            shards += _row_groups(file, column, given, name)
        else:
            shards.append(Shard(given, name, 0, partial(_lines, file, column)))
    if not shards:
        raise ValueError(
            f"{given} is neither a file nor a folder with rows in files that end in "
            f"{' or '.join(ENDINGS)}, nor module:function."
        )
    return shards


def groups(
    shards: list[Shard], limit: float, skipped: Counter[str]
) -> Iterator[list[tuple[str, str]]]:
    """Yields names and texts of rows, in the order of the shards, in groups of `GROUP_BYTES`.

    Args:
      limit: most bytes of text; nothing is read after the first row beyond it.
      skipped: counts the rows left out, by reason.

    Raises:
      ValueError: a shard cannot be read.
    """
    group, size, used = list[tuple[str, str]](), 0, 0
    for name, text in itertools.chain.from_iterable(shard.texts() for shard in shards):
        length = len(text.encode())
        if not text:
            skipped["empty"] += 1
            continue
        if used + length > limit:
            skipped[f"over --max-megabytes, as all after {name}"] += 1
            break
        group.append((name, text))
        size, used = size + length, used + length
        if size > GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _row_groups(file: Path, column: str, given: str, name: str) -> Iterator[Shard]:
    try:
        with _parquet().ParquetFile(file) as opened:
            names, metadata = opened.schema_arrow.names, opened.metadata
        if column not in names:
            raise ValueError(f"it has no column {column!r}, but {', '.join(names)}")
    except (OSError, ValueError) as error:
        raise ValueError(f"{given}: {name} cannot be read: {error}.") from error
    first = 0
    for number in range(metadata.num_row_groups):
        yield Shard(given, name, first, partial(_values, file, number, column))
        first += metadata.row_group(number).num_rows


def _parquet() -> Any:
    return require("pyarrow.parquet", extra="parquet", needed_by="Reading Parquet files")


def _values(file: Path, group: int, column: str, start: int) -> Iterator[Any]:
    try:
        with _parquet().ParquetFile(file, buffer_size=1 << 20) as opened:
            batches = opened.iter_batches(_DECODED, row_groups=[group], columns=[column])
            values = (value.as_py() for batch in batches for value in batch.column(0))
            yield from itertools.islice(values, start, None)
    except NotImplementedError as error:  # a damaged file may ask for an encoding that there is not
        raise ValueError(str(error)) from error


def read_lines(file: TextIO) -> Iterator[str]:
    """Yields the lines of a file; raises ValueError at one of more than `MOST_CHARACTERS`."""
    while line := file.readline(MOST_CHARACTERS + 1):
        if len(line) > MOST_CHARACTERS:
            raise ValueError(f"a line has more than {MOST_CHARACTERS} characters")
        yield line


def _lines(file: Path, column: str, start: int) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        for line in itertools.islice(filter(str.strip, read_lines(lines)), start, None):
            fields = json.loads(line)
            if not isinstance(fields, dict) or column not in fields:
                raise ValueError(f"a line has no field {column!r}: {shortened(line)}")
            yield fields[column]


def _of_function(source: str, column: str, given: str) -> list[Shard]:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a script's path begins with its own folder
    try:
        data = pkgutil.resolve_name(source)()
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise ValueError(f"{given} cannot be imported and called: {error}.") from error
    if not hasattr(data, "num_shards") or not hasattr(data, "shard"):
        raise ValueError(
            f"{given} returned a {type(data).__name__}, and not a datasets.IterableDataset, such "
            "as datasets.load_dataset(..., streaming=True, split='train')."
        )

    def read(number: int, start: int) -> Iterator[Any]:
        for row in data.shard(num_shards=data.num_shards, index=number).skip(start):
            if column not in row:
                raise ValueError(f"it has no column {column!r}, but {', '.join(row)}")
            yield row[column]

    return [
        Shard(given, f"shard {number}", 0, partial(read, number))
        for number in range(data.num_shards)
    ]
