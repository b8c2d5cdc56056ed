"""Finds the checkpoint to resume from: the newest one that is whole. Nothing is deleted."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxpipe.checkpoint import checksums
from jaxpipe.checkpoint.checksums import DamagedError

STATE, DATA, RUN = "state", "data", "run"
"""The items of a checkpoint: arrays, the position in the data, the description of the run."""
_REASON_WIDTH = 300
"""Characters of a reason that are shown: error messages of tensorstore are long."""


@dataclasses.dataclass(frozen=True)
class Damaged:
    """A checkpoint that cannot be resumed from.

    Args:
      step: step of the checkpoint.
      reason: what is wrong with it.
      aside: the name that it gets as soon as a run writes to the folder.
    """

    step: int
    reason: str
    aside: str


@dataclasses.dataclass(frozen=True)
class Found:
    """The checkpoints that a folder holds.

    Args:
      latest: the newest step whose checkpoint is whole, or None.
      damaged: newer checkpoints that are not whole, newest first.
    """

    latest: int | None
    damaged: tuple[Damaged, ...]

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Found:
        """Undoes `dataclasses.asdict`, also after a round trip through JSON."""
        damaged = tuple(Damaged(**checkpoint) for checkpoint in fields["damaged"])
        return cls(fields["latest"], damaged)

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


def find(folder: Path) -> Found:
    """Verifies checkpoints, newest first, until one is whole; changes nothing.

    Args:
      folder: folder of the checkpoints; it need not exist.
    """
    damaged: list[Damaged] = []
    for step in reversed(steps(folder)):
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
    """Renames damaged checkpoints, so that their steps can be saved again.

    Args:
      folder: folder of the checkpoints.
      damaged: damaged checkpoints, from `find`.
    """
    for checkpoint in damaged:
        (folder / str(checkpoint.step)).rename(folder / checkpoint.aside)


def verify(folder: Path) -> None:
    """Reads every file of a checkpoint.

    Args:
      folder: folder of one step.

    Raises:
      DamagedError: the checkpoint is not whole.
    """
    with reading("it"):
        if not folder.is_dir():
            raise DamagedError("it is not a folder")
        names = {path.name for path in folder.iterdir()}
        if not names:
            raise DamagedError("its folder is empty")
        if checksums.FILE not in names:
            raise DamagedError(f"{checksums.FILE} is missing")
        checksums.verify_checksums(folder)


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns the many errors that orbax and tensorstore raise for damaged files into one kind.

    Args:
      what: name of what is read, for the message.
    """
    try:
        yield
    except (DamagedError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        why = textwrap.shorten(str(error), _REASON_WIDTH, placeholder=" ...")
        raise DamagedError(f"{what} cannot be read ({type(error).__name__}: {why})") from error
