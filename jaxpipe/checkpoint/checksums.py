"""Checksums of the files of a checkpoint: written with it, verified before anything is read.

CRC-32 detects every flipped bit, and is the fastest that Python has.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxpipe.files import num_bytes, read_json
from jaxpipe.schedule.problems import printable

CHECKSUMS_FILE = "checksums.json"
_STEP, _FILES = "step", "files"

_READ_BYTES = 1 << 22
_STEP_METADATA = "_CHECKPOINT_METADATA"
"""Orbax goes on writing this file until it renames the folder, and nothing reads it to restore."""


class DamagedError(ValueError):
    """A checkpoint is not as it was saved; the message says which file, and what is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def write_checksums(folder: Path, step: int) -> None:
    """Writes the step, and the checksum and size of every file in a folder, to a file in it.

    Args:
      folder: folder of the step; only orbax's metadata of the step still changes in it.
      step: step by which the folder will be named.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != _STEP_METADATA]
    names = sorted(str(path.relative_to(folder)) for path in files)
    with ThreadPoolExecutor() as pool:
        sums = pool.map(lambda name: [_checksum(folder / name), num_bytes(folder / name)], names)
        record = {_STEP: step, _FILES: dict(zip(names, sums, strict=True))}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(record, indent=1), encoding="utf-8")


def verify_checksums(folder: Path, names: Sequence[str] | None = None) -> None:
    """Compares files with their checksums. Files that came later are ignored, but orbax's metadata
    of the step must be as it writes them.

    Args:
      folder: `write_checksums` has been called for it; its name is the step.
      names: relative paths of the files to read; all by default.

    Raises:
      DamagedError: a file is missing, unreadable or different, or all are of another step.
    """
    try:
        record = read_json(folder / CHECKSUMS_FILE)
        # Older versions wrote checksums alone, without the step and sizes.
        step, sums = record.get(_STEP), record.get(_FILES, record)
        expected = {name: sums[name] for name in (sums if names is None else names)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{CHECKSUMS_FILE} cannot be read ({error})") from error
    if not expected:
        raise DamagedError(f"{CHECKSUMS_FILE} lists no file")
    if step is not None and str(step) != folder.name:
        raise DamagedError(f"its files are those of step {step}, under another name")
    if names is None:
        _verify_step_metadata(folder, {name.partition("/")[0] for name in expected if "/" in name})
    with ThreadPoolExecutor() as pool:
        for problem in pool.map(lambda item: _problem(folder, *item), expected.items()):
            if problem is not None:
                raise DamagedError(problem)


def _verify_step_metadata(folder: Path, items: set[str]) -> None:
    """Checks that orbax's metadata names the items of the step, one folder each."""
    try:
        named = set(read_json(folder / _STEP_METADATA)["item_handlers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{_STEP_METADATA} cannot be read ({error})") from error
    if named != items:
        raise DamagedError(f"{_STEP_METADATA} names {sorted(named)}, and there are {sorted(items)}")


def _problem(folder: Path, name: str, expected: Any) -> str | None:
    checksum, size = expected if isinstance(expected, list) else (expected, None)
    try:
        # Another size is enough to tell, and a device has no end to be read to.
        actual = num_bytes(folder / name)
        if size in (None, actual) and _checksum(folder / name) == checksum:
            return None
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return f"{name} does not have its checksum (flipped or truncated)"


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
