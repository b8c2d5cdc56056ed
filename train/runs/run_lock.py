"""One run per folder: a lock that says who holds it and that no dead run can keep.

``docs/design/010-checkpoints.md`` gives the reasons for its design.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import datetime
import errno
import fcntl
import functools
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from train.errors import RESTART, ConfigError, Failure

LOCK_FILE = ".lock"
HEARTBEAT_SECONDS = 5.0
"""The time between two signs of life of the holder."""
PATIENCE_SECONDS = 60.0
"""A lock of another machine without a sign of life for this long is stale."""

_NO_FLOCK = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL})
_MOST_BYTES = 1 << 16
"""Bytes that are read of a lock file, which is far shorter."""
_RETRY_SECONDS = 0.5
"""Time before another try: a process that removes a stale lock holds its flock for less."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """The holder of a lock, as the lock file describes it.

    Args:
      host: name of its machine.
      pid: its process.
      since: time at which it took the lock, in ISO 8601.
      slurm_job: the job's number, or None.
      kernel: identifies its running kernel.
      has_flock: whether it also holds the kernel's lock on the file.
      token: identifies this lock.
    """

    host: str
    pid: int
    since: str
    slurm_job: str | None
    kernel: str
    has_flock: bool
    token: str

    def __str__(self) -> str:
        job = "" if self.slurm_job is None else f" (Slurm job {self.slurm_job})"
        return f"process {self.pid} on {self.host} since {self.since}{job}"


class Lock(abc.ABC):
    """The lock of a run, whose holder gives signs of life from a thread.

    Args:
      run: folder or URL of the run.
      heartbeat_seconds: the time between two signs of life.
      patience_seconds: time to watch the lock of another process for a sign of life.

    Attributes:
      owner: this process as the lock describes it, once it is held.

    Example:
      >>> lock = RunLock(Path("runs/gpt"), say=print)  # doctest: +SKIP
      >>> lock.acquire()  # doctest: +SKIP
      >>> lock.release()  # doctest: +SKIP
    """

    def __init__(
        self,
        run: Path | str,
        *,
        say: Callable[[str], None],
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._run, self._say = run, say
        self._heartbeat_seconds, self._patience_seconds = heartbeat_seconds, patience_seconds
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self.owner: Owner

    @abc.abstractmethod
    def acquire(self, former: str | None = None) -> None:
        """Takes the lock, if necessary from a run that has died.

        Args:
          former: token of a lock whose holder this run has given up, dead or not.

        Raises:
          ConfigError: another run holds it.
          OSError: the folder cannot be written, or the store cannot be reached or refuses.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Releases the lock; does nothing if it is not held."""

    @abc.abstractmethod
    def renew(self) -> None:
        """Gives a sign of life; ends this process if another one has taken the lock.

        Raises:
          OSError: the file system or the store cannot be reached.
        """

    def _beat(self) -> None:
        while not self._released.wait(self._heartbeat_seconds):
            with contextlib.suppress(OSError):  # it may be out of reach for a while
                self.renew()

    def _stop_beating(self) -> None:
        if self._thread.ident is not None:
            self._released.set()
            self._thread.join()

    def _looks(self, who: str) -> Iterator[None]:
        """Yields while to look at another's lock for a sign of life.

        The clocks of two machines may differ, so that the time of the last one tells nothing.
        """
        self._say(
            f"run_dir={self._run} has the lock of {who}: waiting up to "
            f"{self._patience_seconds:g} s for a sign of life"
        )
        until = time.monotonic() + self._patience_seconds
        while time.monotonic() < until:
            time.sleep(min(1.0, self._heartbeat_seconds))
            yield


class RunLock(Lock):
    """The lock of a run folder, which is made if it is missing, and removed if it stays empty."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self._path = folder.absolute() / LOCK_FILE
        self._missing = missing_folders(self._path.parent)
        self._descriptor: int | None = None

    def acquire(self, former: str | None = None) -> None:
        watched = False
        while True:
            if not self._create():
                watched |= self._clear(former)
                continue
            if not watched:
                break
            # Another process that watched the same silent lock may have removed this one
            # instead. A heartbeat later, the process that came last has the lock.
            time.sleep(self._heartbeat_seconds)
            if self._is_own():
                break
            self._close()
        self._thread.start()

    def release(self) -> None:
        if self._descriptor is not None:
            self._stop_beating()
            # A lock that cannot be removed is stale once this process has ended.
            with contextlib.suppress(OSError):
                if self._is_own():
                    self._path.unlink()
            self._close()
        remove_folders(self._missing)

    def _close(self) -> None:
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._descriptor = None

    def _create(self) -> bool:
        """Writes the lock file; returns False if there already is one."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            # A broken link cannot be read, so its owner cannot be waited for.
            if not self._path.parent.is_dir() or self._path.is_symlink():
                raise
            return False
        except FileNotFoundError:  # the folder has been removed
            return False
        try:
            # The flock is taken before the name is written, so that a file that names this kernel
            # always has it. A process that tries to clear the file may hold it for a moment.
            self.owner = this_process(has_flock=_flock(self._descriptor, waits=True) is True)
            text = json.dumps(dataclasses.asdict(self.owner))
            os.write(self._descriptor, f"{text}\n".encode())
            os.fsync(self._descriptor)
        except OSError:
            self._path.unlink(missing_ok=True)
            self._close()
            raise
        return True

    def _clear(self, former: str | None) -> bool:
        """Removes the lock of a run that has died.

        Returns:
          Whether its owner may be alive, as no flock shows that it has ended.

        Raises:
          ConfigError: the run may still be alive, and is not given up.
        """
        seen = _read(self._path)
        if seen is None or (_is_local(seen.owner) and self._clear_ended(seen)):
            return False
        if seen.owner is not None and seen.owner.token == former:
            self._path.unlink(missing_ok=True)
            self._say(f"removed the lock of {seen.who}, which this run has given up")
        elif _is_local(seen.owner):
            raise ConfigError([in_use(self._run, seen.who)])
        else:
            self._clear_silent(seen)
        return True

    def _clear_ended(self, seen: _Reading) -> bool:
        """Asks the kernel, which frees the flock of every process that ends."""
        for attempt in range(2):
            time.sleep(attempt * _RETRY_SECONDS)
            with contextlib.suppress(FileNotFoundError), _opened(self._path) as descriptor:
                is_free, now = _flock(descriptor), _read(self._path)
                if now is None or now.owner != seen.owner:
                    return True
                # Nobody else removes this file while this process holds its flock.
                if is_free:
                    self._path.unlink()
                    self._say(f"removed the lock of {seen.who}, which has ended")
                    return True
        return False

    def _clear_silent(self, seen: _Reading) -> None:
        for _ in self._looks(seen.who):
            now = _read(self._path)
            if now is None or now.owner != seen.owner:
                return
            if now != seen:
                raise ConfigError([in_use(self._run, seen.who)])
        self._path.unlink(missing_ok=True)
        self._say(f"removed the lock of {seen.who}, which showed no sign of life")

    def _is_own(self) -> bool:
        now = _read(self._path)
        return now is not None and now.owner == self.owner

    def renew(self) -> None:
        assert self._descriptor is not None
        os.utime(self._descriptor)
        now = _read(self._path)
        if now is not None and now.owner not in (None, self.owner):
            end_process(self._run, now.who)


def holder(folder: Path) -> str | None:
    """Says which other process holds a run folder's lock, as far as can be told without waiting.

    Args:
      folder: the run folder; it may be missing.

    Returns:
      The process; None if there is none, if it is this one, or if it has ended.
    """
    path = folder / LOCK_FILE
    seen = _read(path)
    if seen is None:
        return None
    if not _is_local(seen.owner):
        return seen.who
    if seen.owner is not None and seen.owner.pid == os.getpid():
        return None
    with contextlib.suppress(FileNotFoundError), _opened(path) as descriptor:
        return seen.who if _flock(descriptor) is False else None
    return None


def in_use(folder: Path | str, who: str) -> Failure:
    """Returns the failure of a folder whose lock another run holds."""
    return Failure(
        f"run_dir={folder} is in use by {who}. Wait until that run has ended, stop it, or name "
        "another --run-dir.",
        ("run_dir",),
    )


def end_process(folder: Path | str, who: str) -> NoReturn:
    """Ends this process at once: it was silent for too long and has lost its folder."""
    text = f"run_dir={folder} was silent for too long and is now in use by {who}"
    print(f"error: {text}: this run ends and writes nothing more", file=sys.stderr, flush=True)
    os._exit(RESTART)


def missing_folders(folder: Path) -> list[Path]:
    """Returns the folder and its parents that do not exist, deepest first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_folders(folders: Sequence[Path]) -> None:
    """Removes folders that are empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


@dataclasses.dataclass(frozen=True)
class _Reading:
    """A lock file at one moment; that of a living run changes with every sign of life."""

    inode: int
    touched_nanoseconds: int
    owner: Owner | None

    @property
    def who(self) -> str:
        return "an unknown process" if self.owner is None else str(self.owner)


def _read(path: Path) -> _Reading | None:
    """Opens a lock file anew, as network file systems require; None if there is none."""
    try:
        with path.open("rb") as file:
            state, text = os.fstat(file.fileno()), file.read(_MOST_BYTES)
    except FileNotFoundError:
        return None
    owner = None
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        owner = Owner(**json.loads(text))
    return _Reading(state.st_ino, state.st_mtime_ns, owner)


def _is_local(owner: Owner | None) -> bool:
    """Says whether the flock of a lock file shows if its owner is alive."""
    return owner is not None and owner.has_flock and owner.kernel == _kernel()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _flock(descriptor: int, *, waits: bool = False) -> bool | None:
    """Tries to lock a file; returns whether it did, or None if the file system has no flock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return None
        raise
    return True


def this_process(*, has_flock: bool) -> Owner:
    """Describes this process as the holder of a new lock."""
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        since=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        slurm_job=os.environ.get("SLURM_JOB_ID"),
        kernel=_kernel(),
        has_flock=has_flock,
        token=secrets.token_hex(8),
    )


@functools.cache
def _kernel() -> str:
    """Identifies the running kernel, even if two machines have the same name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return socket.gethostname()
