"""The tokens of a file, read as they are needed, and checked once against a vocabulary.

Files are read by calls and not mapped into memory: where a mapped file is cut short, the operating
system ends the process without a word.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.files import read_json
from train.errors import ConfigError, Failure

# Tokens read at a time, so that memory stays flat however long the file is.
BLOCK = 1 << 22


class TokenFile:
    """Integers ``[num_tokens]`` in a file, of which slices can be read.

    The file stays open, so that one that is deleted meanwhile can still be read.

    Args:
      path: path of the file.
      dtype: dtype of a token.
      offset: bytes before the first token.
      count: number of tokens.

    Raises:
      ConfigError: on reading, the file has been cut short.
    """

    def __init__(self, path: Path, *, dtype: np.dtype[Any], offset: int, count: int) -> None:
        self._path, self.dtype, self._offset, self._count = path, dtype, offset, count
        self._file = path.open("rb", buffering=0)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(self._count)
        assert step == 1
        size = max(stop - start, 0) * self.dtype.itemsize
        parts, position = [], self._offset + start * self.dtype.itemsize
        while size:
            read = self._read(size, position)
            parts.append(read)
            position, size = position + len(read), size - len(read)
        return np.frombuffer(b"".join(parts), self.dtype)

    def _read(self, size: int, position: int) -> bytes:
        try:
            content = os.pread(self._file.fileno(), size, position)
            reason = "it has been cut short"
        except OSError as error:
            content, reason = b"", str(error.strerror)
        if not content:
            text = (
                f"data.path={self._path.parent}: {self._path.name} can no longer be read: {reason} "
                "since the run began. Put the data back as it was and continue with --resume."
            )
            raise ConfigError([Failure(text, ("data.path",))])
        return content


def record_of(name: str) -> str:
    """Names the file beside a token file that records its check."""
    return f".{name}.checked"


def check(path: Path, tokens: TokenFile, *, vocab_size: int) -> None:
    """Raises ValueError if a token is not below ``vocab_size``.

    The file is read once: its largest token is kept beside it, with the size and the time of
    change by which a later run knows that it is the same file.
    """
    record = path.with_name(record_of(path.name))
    status = path.stat()
    identity = {"bytes": status.st_size, "changed_ns": status.st_mtime_ns}
    largest = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = read_json(record)
        if {name: kept[name] for name in identity} == identity:
            largest = int(kept["largest"])
    if largest is None:
        blocks = range(0, len(tokens), BLOCK)
        largest = max(int(tokens[start : start + BLOCK].max()) for start in blocks)
        # A folder that cannot be written is checked by every run.
        with contextlib.suppress(OSError):
            partial = record.with_name(f"{record.name}.{os.getpid()}")
            partial.write_text(json.dumps({**identity, "largest": largest}) + "\n")
            os.replace(partial, record)
    if largest >= vocab_size:
        raise ValueError(
            f"data.path={path.parent}: {path.name} holds token {largest}, but its tokenizer knows "
            f"{vocab_size} tokens, 0 to {vocab_size - 1}: the files are not from one preparation. "
            "Prepare the folder again."
        )
