"""Writes a data folder: whole or not at all, and never over something else."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxpipe.errors import printable
from train.data.folder import META_FILE


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions(abc.ABC):
    """The options that every kind of data has."""

    out: Path
    """Folder to write."""
    heldout_fraction: float = 0.05
    """Share of the examples that is held out for evaluation, between 0 and 1."""
    force: bool = False
    """Replace data that was prepared with other settings."""

    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """Returns the options that decide the content, as ``meta.json`` stores them."""

    def problems(self) -> list[str]:
        """Says which options are out of range; empty if none is."""
        if 0 < self.heldout_fraction < 1:
            return []
        given = f"--heldout-fraction={self.heldout_fraction:g}"
        return [f"{given} must lie between 0 and 1, for example 0.05."]


OptionsT = TypeVar("OptionsT", bound=DataOptions)
MetaT = TypeVar("MetaT")


def prepare(
    options: OptionsT,
    write: Callable[[OptionsT, Console], MetaT],
    *,
    files: frozenset[str],
    read_meta: Callable[[Path], MetaT],
    check_whole: Callable[[OptionsT, MetaT], object] = lambda options, meta: None,
    console: Console | None,
) -> MetaT:
    """Writes a data folder, or leaves it alone when it is already there and whole.

    Args:
      write: writes ``options.out``, and says what it holds.
      files: names of the files that a folder of this kind holds.
      read_meta: reads ``meta.json``; raises ValueError if it cannot.
      check_whole: raises ValueError unless files that `read_meta` does not read are those that
        ``meta.json`` describes.

    Returns:
      What the folder holds.

    Raises:
      ValueError: an option is out of range, the data cannot be used, a package is not installed, or
        ``options.out`` holds something else, or data of other settings.
      OSError: the folder cannot be written.
    """
    console = console or Console()
    if problems := options.problems():
        raise ValueError("\n".join(problems))
    meta = _existing(options, files, read_meta, check_whole, console)
    return write(options, console) if meta is None else meta


def _existing(
    options: OptionsT,
    files: frozenset[str],
    read_meta: Callable[[Path], MetaT],
    check_whole: Callable[[OptionsT, MetaT], object],
    console: Console,
) -> MetaT | None:
    """Returns the meta of ``options.out`` if the folder can stay, None if it must be written."""
    out = options.out
    if not out.exists():
        return None
    if not out.is_dir():
        raise ValueError(f"--out={out} is a file. Name a new folder, or one prepared before.")
    foreign = sorted({path.name for path in out.iterdir()} - files)
    if foreign:
        raise ValueError(
            f"--out={out} holds other files ({', '.join(foreign[:3])}), which would be lost. "
            f"Name a new folder."
        )
    if options.force or not any(out.iterdir()):
        return None
    try:
        meta: Any = read_meta(out)
        # Before the other files are checked: damaged data of other settings is not replaced.
        different = [
            f"{key} is {meta.settings.get(key)!r} there and {value!r} here"
            for key, value in options.settings().items()
            if meta.settings.get(key) != value
        ]
        if not different:
            check_whole(options, meta)
            say(console, f"{out} is already prepared with these settings.")
            return meta
    except ValueError as error:
        say(console, f"{out} is not whole and is prepared again: {error}")
        return None
    raise ValueError(
        f"--out={out} was prepared with other settings ({'; '.join(different)}). Use the same "
        "ones, another --out, or --force to replace it."
    )


def name_hash(purpose: str, name: str) -> int:
    """Returns 64 bits of a name; those of different purposes are independent."""
    digest = hashlib.sha256(f"{purpose}:{name}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big")


def is_heldout(name: str, fraction: float) -> bool:
    """Says whether a name belongs to the held-out side, whatever the other names are."""
    return name_hash("split", name) < fraction * 2**64


def digest(parts: Iterable[str | bytes]) -> str:
    """Returns the hex SHA-256 of some texts or bytes, including their boundaries."""
    result = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        result.update(len(data).to_bytes(8, "little") + data)
    return result.hexdigest()


def write_meta(folder: Path, kind: str, meta: Any) -> None:
    """Writes a dataclass as ``meta.json``."""
    fields = {"kind": kind} | dataclasses.asdict(meta)
    write_text(folder / META_FILE, json.dumps(fields, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file and waits until it is on disk."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file and waits until it is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def say(console: Console, text: str) -> None:
    """Prints a line as it is, without line breaks inside; brackets are not colours."""
    console.print(printable(text), soft_wrap=True, markup=False, highlight=False)


def progress_bar(console: Console) -> Progress:
    """Returns progress bars for long tasks."""
    return Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


@contextlib.contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """Yields a hidden folder that becomes ``out`` if the body succeeds and vanishes if it fails."""
    out = out.resolve()
    parent = out.parent
    parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out.name}.partial-"
    for path in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        # A killed process leaves no lock: a folder that can be locked belongs to no process.
        with contextlib.suppress(OSError), _locked(path):
            shutil.rmtree(path)
    partial = parent / f"{prefix}{os.getpid()}"
    partial.mkdir()
    with _locked(partial):
        try:
            yield partial
            _replace(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _replace(new: Path, out: Path) -> None:
    """Renames ``new`` to ``out``; an old folder steps aside first, as only empty ones give way."""
    if not out.exists():
        new.rename(out)
        return
    old = new.with_name(f"{new.name}-old")
    out.rename(old)
    new.rename(out)
    shutil.rmtree(old)
