"""A run in an object store: its copy in a folder, where the run works, and the way back.

Orbax, TensorBoard and profiles need a file system. A thread writes what changes in the folder to
the store: metrics and the like, then checkpoints, each with its checksums last; then it deletes
those that the run keeps no longer. A checkpoint without checksums is half-written, and never read.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from jax.experimental import multihost_utils

from jaxpipe.checkpoint import CHECKSUMS_FILE, LOSS_FILE, Fetch
from train.config import Config
from train.errors import ConfigError, refused
from train.object_store import ObjectStore
from train.processes import distributed
from train.runs.object_lock import ObjectLock
from train.runs.run_folder import CHECKPOINTS, PROGRESS_FILE, unwritable
from train.runs.run_lock import Lock

SYNC_SECONDS = 30.0
"""Time after which files other than checkpoints are written."""
_LOOK_SECONDS = 1.0
"""Time between two looks for new checkpoints."""
_FILES_AT_ONCE = 4
"""Files in transit, of which each is in memory; orbax's largest have about 2 GiB."""
_PASSING = re.compile(r"\.lock|.*\.partial|.*\.orbax-checkpoint-tmp.*")
"""Names of files and folders that are of this moment only."""


class Copy:
    """The copy of a run: its small files, and of each checkpoint what tells which ones to keep.

    Args:
      folder: a folder that does not exist.

    Raises:
      OSError: the store cannot be reached, or the folder cannot be written.
    """

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self.store, self.folder = store, folder
        # Other names are those of folders, which some tools make, or lead out of this folder.
        self._names = [name for name in store.names() if not {"", ".", ".."} & {*name.split("/")}]
        whole = re.compile(rf"({CHECKPOINTS}/[^/]+)/{re.escape(CHECKSUMS_FILE)}")
        self.checkpoints = [match[1] for name in self._names if (match := whole.fullmatch(name))]
        (folder / CHECKPOINTS).mkdir(parents=True)
        losses = {f"{name}/{LOSS_FILE}" for name in self.checkpoints}
        self._fetch(
            name
            for name in self._names
            if name in losses
            or whole.fullmatch(name)
            or not ("/" in name or _PASSING.fullmatch(name))
        )

    def fetch(self, step: int) -> None:
        """Completes a checkpoint; does nothing if all of its files are there."""
        self._fetch(name for name in self._names if name.startswith(f"{CHECKPOINTS}/{step}/"))

    def half_written(self) -> list[str]:
        """Lists the checkpoints in the store that have no checksums."""
        paths = (name.split("/") for name in self._names)
        names = {"/".join(path[:2]) for path in paths if path[0] == CHECKPOINTS}
        return sorted(names - {*self.checkpoints})

    def _fetch(self, names: Iterable[str]) -> None:
        missing = [name for name in names if not (self.folder / name).exists()]
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            list(pool.map(self._fetch_file, missing))

    def _fetch_file(self, name: str) -> None:
        content = self.store.read(name).content
        if content is not None:  # otherwise it was deleted meanwhile
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


@functools.cache
def read_only(url: str) -> Copy:
    """Copies a run that this process only reads, until it ends.

    Raises:
      ValueError: the store cannot be reached, or the copy cannot be written.
    """
    parent = Path(tempfile.mkdtemp(prefix="jaxpipe-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    try:
        copy = Copy(ObjectStore(url), parent / Path(url).name)
    except OSError as error:
        raise ValueError(f"{error}.") from error
    if not copy.checkpoints:
        raise ValueError(f"{url} holds no checkpoint of a run.")
    return copy


class Mirror:
    """The thread that writes a copy back to its store. Use it as a context manager: leaving writes
    the rest, and removes the copy.

    Args:
      lock: the lock of the run, which is renewed before anything is written.
    """

    def __init__(self, copy: Copy, lock: ObjectLock, say: Callable[[str], None]) -> None:
        self._store, self._folder, self._lock, self._say = copy.store, copy.folder, lock, say
        # What the store has of the folder: inodes of checkpoints, times and sizes of other files.
        self._checkpoints = self._local_checkpoints()
        for name in copy.half_written():
            say(f"ignoring {self._store.url}/{name}, which a run has not written to its end")
            if copy.checkpoints:  # it is deleted like any that is not kept, if there are others
                self._checkpoints[name] = 0
        self._files = {name: _version(path) for name, path in self._other_files()}
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def __enter__(self) -> Mirror:
        self._thread.start()
        return self

    def __exit__(self, _: object, raised: BaseException | None, __: object) -> None:
        self._left.set()
        self._thread.join()
        try:
            self.sync()
        except OSError as error:
            text = (
                f"run_dir={self._store.url} lacks the end of this run: {error}. The whole run is "
                f"in {self._folder}. Copy it there before you resume, which replaces that folder."
            )
            if raised is None:
                raise refused(text, "run_dir") from error
            self._say(f"warning: {text}")
        else:
            shutil.rmtree(self._folder)

    def _run(self) -> None:
        reached, last = True, time.monotonic()
        while not self._left.wait(_LOOK_SECONDS):
            try:
                is_time = time.monotonic() > last + SYNC_SECONDS
                if is_time or self._local_checkpoints() != self._checkpoints:
                    self.sync()
                    reached, last = True, time.monotonic()
            except OSError as error:
                if reached:
                    self._say(f"warning: {error}; trying again until the run ends")
                reached = False

    def sync(self) -> None:
        """Writes what has changed since the last time.

        Raises:
          OSError: the store cannot be reached, or the folder cannot be read.
        """
        self._lock.renew()
        # Nothing in the store is ahead of its checkpoints except metrics, which a resume shortens.
        progress = self._folder / PROGRESS_FILE
        content = progress.read_bytes() if progress.exists() else None
        local = self._local_checkpoints()
        for name, path in self._other_files():
            with contextlib.suppress(FileNotFoundError):  # a temporary file
                version = _version(path)
                if self._files.get(name) != version:
                    self._store.write(name, path.read_bytes())
                    self._files[name] = version
        for name, inode in local.items():
            if self._checkpoints.get(name) != inode:
                self._write_checkpoint(name, inode)
        if content is not None:
            self._store.write(PROGRESS_FILE, content)
        for name in [*self._checkpoints]:
            if name not in local:
                self._delete_checkpoint(name)

    def _local_checkpoints(self) -> dict[str, int]:
        """Lists the checkpoints in the folder, also those that were moved aside, and inodes."""
        inodes = {}
        for path in (self._folder / CHECKPOINTS).iterdir():
            with contextlib.suppress(FileNotFoundError):  # it is not kept any more
                inode = path.stat().st_ino
                if path.is_dir() and not _PASSING.fullmatch(path.name):
                    inodes[f"{CHECKPOINTS}/{path.name}"] = inode
        return inodes

    def _other_files(self) -> Iterator[tuple[str, Path]]:
        for root, folders, files in os.walk(self._folder):
            if Path(root) == self._folder:
                folders.remove(CHECKPOINTS)
            paths = [Path(root) / file for file in files if not _PASSING.fullmatch(file)]
            names = {str(path.relative_to(self._folder)): path for path in paths}
            names.pop(PROGRESS_FILE, None)
            yield from names.items()

    def _write_checkpoint(self, name: str, inode: int) -> None:
        self._delete_checkpoint(name)  # one that was moved aside, or is half-written
        paths = [path for path in (self._folder / name).rglob("*") if path.is_file()]
        last = self._folder / name / CHECKSUMS_FILE
        try:
            with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
                list(pool.map(self._write_file, (path for path in paths if path != last)))
            self._write_file(last)
        except FileNotFoundError:  # the run does not keep it any more
            self._delete_checkpoint(name)
        else:
            self._checkpoints[name] = inode

    def _write_file(self, path: Path) -> None:
        self._store.write(str(path.relative_to(self._folder)), path.read_bytes())

    def _delete_checkpoint(self, name: str) -> None:
        files = [file for file in self._store.names() if file.startswith(f"{name}/")]
        # Its checksums first: what a process that is killed here leaves is then half-written.
        self._store.delete(sorted(files, key=lambda file: not file.endswith(CHECKSUMS_FILE)))
        self._checkpoints.pop(name, None)


@contextlib.contextmanager
def mirrored(config: Config, lock: Lock, *, say: Callable[[str], None]) -> Iterator[Fetch | None]:
    """Keeps the copy of a run while it trains; does nothing for a run in a folder.

    Args:
      lock: the lock of the run, which this process holds if it is the first.

    Yields:
      A function that completes a checkpoint, for process 0; None if there is nothing to fetch.

    Raises:
      ConfigError: the store cannot be reached, or processes do not see the same folder.
    """
    if not isinstance(lock, ObjectLock):
        yield None
        return
    store, copies = lock.store, list[Copy]()

    def copy() -> None:
        shutil.rmtree(config.folder, ignore_errors=True)  # of a run that was killed
        try:
            copies.append(Copy(store, config.folder))
        except OSError as error:
            raise ConfigError([unwritable(config, error)]) from error

    distributed.from_first(copy)
    if not np.all(multihost_utils.process_allgather(config.folder.is_dir())):
        raise refused(
            f"run_dir={config.run_dir} is copied to {config.folder}, which some processes do not "
            "see. Let TMPDIR be a folder that all of them share.",
            "run_dir",
        )
    with contextlib.ExitStack() as stack:
        if copies:
            stack.enter_context(Mirror(copies[0], lock, say))
        yield copies[0].fetch if copies else None
        # The others wait for the last upload: jax ends processes that wait longer than minutes.
        distributed.from_first(stack.close)


def _version(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
