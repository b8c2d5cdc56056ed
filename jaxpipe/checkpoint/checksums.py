"""Checksums of the files of a checkpoint: written with it, verified before anything is read.

CRC-32 detects every flipped bit, and is the fastest that Python has.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FILE = "checksums.json"

_READ_BYTES = 1 << 22
_STEP_METADATA = "_CHECKPOINT_METADATA"
"""Orbax goes on writing this file until it renames the folder, and nothing reads it to restore."""


class DamagedError(Exception):
    """A checkpoint is not as it was saved; the message says which file, and what is wrong."""


def write(folder: Path) -> None:
    """Writes the checksum of every file in a folder to a file in it.

    Args:
      folder: of one step; nothing in it changes any more but orbax's metadata of the step.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != _STEP_METADATA]
    names = sorted(str(path.relative_to(folder)) for path in files)
    with ThreadPoolExecutor() as pool:
        sums = pool.map(lambda name: _checksum(folder / name), names)
        text = json.dumps(dict(zip(names, sums, strict=True)), indent=1)
    (folder / FILE).write_text(text, encoding="utf-8")


def verify(folder: Path, names: Sequence[str] | None = None) -> None:
    """Compares files with their checksums. Files that came later are ignored, but orbax's metadata
    of the step must be as it writes them.

    Args:
      folder: `write` has been called for it.
      names: relative paths of the files to read; all by default.

    Raises:
      DamagedError: a file is missing, unreadable or different.
    """
    try:
        sums = json.loads((folder / FILE).read_bytes())
        expected = {name: sums[name] for name in (sums if names is None else names)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{FILE} cannot be read ({error})") from error
    if not expected:
        raise DamagedError(f"{FILE} lists no file")
    if names is None:
        _verify_step_metadata(folder, {name.partition("/")[0] for name in expected if "/" in name})
    with ThreadPoolExecutor() as pool:
        for problem in pool.map(lambda item: _problem(folder, *item), expected.items()):
            if problem is not None:
                raise DamagedError(problem)


def _verify_step_metadata(folder: Path, items: set[str]) -> None:
    """Looks whether orbax's metadata name the items of the step, one folder each."""
    try:
        found = set(json.loads((folder / _STEP_METADATA).read_bytes())["item_handlers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{_STEP_METADATA} cannot be read ({error})") from error
    if found != items:
        raise DamagedError(f"{_STEP_METADATA} names {sorted(found)}, and there are {sorted(items)}")


def _problem(folder: Path, name: str, expected: int) -> str | None:
    try:
        if _checksum(folder / name) == expected:
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
