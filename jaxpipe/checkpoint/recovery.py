"""Finds the checkpoint to resume from: the newest one that is whole. Nothing is deleted."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxpipe.checkpoint import checksums
from jaxpipe.checkpoint.checksums import DamagedError
from jaxpipe.files import read_json

STATE, DATA, RUN = "state", "data", "run"
"""The items of a checkpoint: arrays, the position in the data, the description of the run."""
CHECKSUMS = "checksums"
"""The entry of the description that says that the checkpoint has checksums."""

Older: TypeAlias = Callable[[Any], object]
"""Takes the description of a checkpoint without checksums; raises if no run could continue it."""

Fetch: TypeAlias = Callable[[int], object]
"""Completes the files of a step; the folder need only hold those that tell what to keep."""

_JSON_FILE = "metadata"
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
      has_checksums: whether that checkpoint has checksums; older versions wrote none.
      damaged: newer checkpoints that are not whole, newest first.
    """

    latest: int | None
    has_checksums: bool
    damaged: tuple[Damaged, ...]

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Found:
        """Undoes `dataclasses.asdict`, also after a round trip through JSON."""
        damaged = tuple(Damaged(**checkpoint) for checkpoint in fields["damaged"])
        return cls(fields["latest"], fields["has_checksums"], damaged)

    @property
    def reasons(self) -> str:
        """The reasons why checkpoints are damaged, in one line."""
        return "; ".join(f"checkpoint {bad.step}: {bad.reason}" for bad in self.damaged)

    def notes(self) -> list[str]:
        """Returns one line for every checkpoint that is skipped or cannot be verified."""
        lines = [
            f"skipping checkpoint {bad.step}: {bad.reason}; it is kept as {bad.aside}"
            for bad in self.damaged
        ]
        if self.latest is not None and not self.has_checksums:
            lines.append(
                f"checkpoint {self.latest} carries no checksums: an older version wrote it, so "
                "flipped bits in its arrays would go unnoticed"
            )
        return lines


def steps(folder: Path) -> list[int]:
    """Returns every step that has a checkpoint, whole or not, in ascending order."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir()]
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def find(folder: Path, older: Older | None = None, fetch: Fetch | None = None) -> Found:
    """Verifies checkpoints, newest first, until one is whole; changes nothing.

    Args:
      folder: folder of the checkpoints; it need not exist.
      older: accepts checkpoints without checksums; None for a folder that never had any.
      fetch: called with a step before its files are read.
    """
    damaged: list[Damaged] = []
    for step in reversed(steps(folder)):
        if fetch is not None:
            fetch(step)
        try:
            has_checksums = verify(folder / str(step), older)
        except DamagedError as error:
            damaged.append(Damaged(step, str(error), _free_name(folder / f"{step}.damaged")))
        else:
            return Found(step, has_checksums, tuple(damaged))
    return Found(None, False, tuple(damaged))


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


def verify(folder: Path, older: Older | None) -> bool:
    """Reads every file of a checkpoint; returns whether it has checksums.

    Args:
      folder: folder of one step.
      older: as for `find`.

    Raises:
      DamagedError: the checkpoint is not whole.
    """
    with reading("it"):
        if not folder.is_dir():
            raise DamagedError("it is not a folder")
        names = {path.name for path in folder.iterdir()}
        if not names:
            raise DamagedError("its folder is empty")
        if checksums.CHECKSUMS_FILE in names:
            checksums.verify_checksums(folder)
            return True
        run = read_json(folder / RUN / _JSON_FILE)
        if older is None or CHECKSUMS in run:
            raise DamagedError(f"{checksums.CHECKSUMS_FILE} is missing")
        older(run)
        _read_all(folder)
    return False


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


def _read_all(folder: Path) -> None:
    """Reads a checkpoint without checksums, into the memory of this process alone."""
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    read_json(folder / DATA / _JSON_FILE)
    state = folder / STATE
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    tree = handler.metadata(state).tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    handler.restore(state, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    handler.close()
