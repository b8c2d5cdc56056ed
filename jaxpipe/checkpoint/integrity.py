"""Finds the checkpoint to resume from: the newest one that is whole. Nothing is deleted.

A checksum of every file is written with a checkpoint, and verified before anything is read. CRC-32
detects every flipped bit, and is the fastest that Python has.
"""

import contextlib
import itertools
import json
import os
import re
import textwrap
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax

from jaxpipe.files import num_bytes, read_json
from jaxpipe.schedule.problems import printable

STATE, DATA, RUN = "state", "data", "run"
"""The items of a checkpoint: arrays, the position in the data, the description of the run."""

Fetch: TypeAlias = Callable[[int], object]
"""Completes the files of a step; the folder need only hold those that tell what to keep."""

_REASON_WIDTH = 300
"""Characters of a reason that are shown: error messages of tensorstore are long."""
CHECKSUMS_FILE = "checksums.json"
_STEP, _FILES = "step", "files"

_READ_BYTES = 1 << 22
_STEP_METADATA = "_CHECKPOINT_METADATA"
"""Orbax goes on writing this file until it renames the folder, and nothing reads it to restore."""


class DamagedError(ValueError):
    """A checkpoint is not as it was saved; the message says which file, and what is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class Damaged(NamedTuple):
    """A checkpoint that cannot be resumed from.

    Args:
      aside: the name that it gets as soon as a run writes to the folder.
    """

    step: int
    reason: str
    aside: str


class Found(NamedTuple):
    """The checkpoints that a folder holds.

    Args:
      latest: the newest step whose checkpoint is whole, or None.
      damaged: newer checkpoints that are not whole, newest first.
    """

    latest: int | None
    damaged: tuple[Damaged, ...]

    @property
    def reasons(self) -> str:
        """The reasons why checkpoints are damaged, in one line."""
        return "; ".join(f"checkpoint {bad.step}: {bad.reason}" for bad in self.damaged)

    def notes(self) -> list[str]:
        """Returns one line for every checkpoint that is skipped."""
        return [
            f"skipping checkpoint {bad.step}: {bad.reason}; it is kept as {bad.aside}"
            for bad in self.damaged
        ]


def steps(folder: Path) -> list[int]:
    """Returns every step that has a checkpoint, whole or not, in ascending order."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir()]
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def find(folder: Path, fetch: Fetch | None = None) -> Found:
    """Verifies checkpoints, newest first, until one is whole; changes nothing. The folder need not
    exist; ``fetch`` is called with a step before its files are read."""
    damaged: list[Damaged] = []
    for step in reversed(steps(folder)):
        if fetch is not None:
            fetch(step)
        try:
            verify(folder / str(step))
        except DamagedError as error:
            damaged.append(Damaged(step, str(error), _free_name(folder / f"{step}.damaged")))
        else:
            return Found(step, tuple(damaged))
    return Found(None, tuple(damaged))


def _free_name(path: Path) -> str:
    names = (path.name if n == 1 else f"{path.name}.{n}" for n in itertools.count(1))
    # A broken link counts as existing, so that it is kept.
    return next(name for name in names if not os.path.lexists(path.parent / name))


def move_aside(folder: Path, damaged: Sequence[Damaged]) -> None:
    """Renames what `find` has found to be damaged, so that its steps can be saved again."""
    for checkpoint in damaged:
        (folder / str(checkpoint.step)).rename(folder / checkpoint.aside)


def verify(folder: Path) -> None:
    """Reads every file of a checkpoint, the folder of one step.

    Raises:
      DamagedError: the checkpoint is not whole.
    """
    with reading("it"):
        if not folder.is_dir():
            raise DamagedError("it is not a folder")
        if not any(folder.iterdir()):
            raise DamagedError("its folder is empty")
        if not os.path.lexists(folder / CHECKSUMS_FILE):
            raise DamagedError(f"{CHECKSUMS_FILE} is missing")
        verify_checksums(folder)


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns the many errors that orbax and tensorstore raise for damaged files into one kind, whose
    message names what is read."""
    try:
        yield
    except (DamagedError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        why = textwrap.shorten(str(error), _REASON_WIDTH, placeholder=" ...")
        raise DamagedError(f"{what} cannot be read ({type(error).__name__}: {why})") from error


def write_checksums(folder: Path, step: int) -> None:
    """Writes the step, and the checksum and size of every file in its folder, to a file in it. Only
    orbax's metadata of the step still changes there."""
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


def _problem(folder: Path, name: str, expected: object) -> str | None:
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
