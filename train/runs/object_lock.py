"""One run per URL: a lock in an object store that no dead run can keep.

The lock is an object that is never deleted. Each change of it names the version that it replaces,
so that of several processes one succeeds. Its holder changes it at every heartbeat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable

from train.errors import ConfigError
from train.object_store import ObjectStore, Stored, StoreError
from train.runs.run_lock import (
    HEARTBEAT_SECONDS,
    LOCK_FILE,
    PATIENCE_SECONDS,
    Owner,
    end_process,
    in_use,
    this_process,
)


class ObjectLock:
    """The lock of a run in an object store.

    Args:
      heartbeat_seconds: the time between two signs of life.
      patience_seconds: time to watch the lock of another process for a sign of life.

    Attributes:
      owner: this process as the lock describes it.

    Example:
      >>> lock = ObjectLock(ObjectStore("s3://bucket/runs/gpt"), say=print)  # doctest: +SKIP
      >>> lock.acquire()  # doctest: +SKIP
      >>> lock.release()  # doctest: +SKIP
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        say: Callable[[str], None],
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.store, self._say = store, say
        self._heartbeat_seconds, self._patience_seconds = heartbeat_seconds, patience_seconds
        self.owner, self._beats = this_process(has_flock=False), 0
        self._version: bytes | None = None
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)

    def acquire(self, former: str | None = None) -> None:
        """Takes the lock, if necessary from a run that has died.

        Args:
          former: token of a lock whose holder this run has given up, dead or not.

        Raises:
          ConfigError: another run holds it.
          StoreError: the store cannot be reached, or refuses.
        """
        seen = self.store.read(LOCK_FILE)
        owner = _owner(seen)
        is_former = owner is not None and owner.token == former
        if seen.content is not None and not _is_free(seen) and not is_former:
            seen = self._watch(seen)
        now = self._write(seen.version)
        if _owner(now) != self.owner:
            raise ConfigError([in_use(self.store.url, _who(now))])
        self._version = now.version
        self._thread.start()

    def release(self) -> None:
        """Releases the lock; does nothing if it is not held."""
        if self._version is not None:
            self._released.set()
            self._thread.join()
            # A lock that cannot be released is silent once this process has ended.
            with contextlib.suppress(StoreError):
                self.store.replace(LOCK_FILE, b"{}\n", version=self._version)
            self._version = None

    def _watch(self, seen: Stored) -> Stored:
        """Waits for a sign of life, since clocks of two machines may differ.

        Returns:
          The lock of a run that has ended or died.

        Raises:
          ConfigError: there is one.
        """
        who, url = _who(seen), self.store.url
        self._say(
            f"run_dir={url} has the lock of {who}: waiting up to {self._patience_seconds:g} s for "
            "a sign of life"
        )
        until = time.monotonic() + self._patience_seconds
        while time.monotonic() < until:
            time.sleep(min(1.0, self._heartbeat_seconds))
            now = self.store.read(LOCK_FILE)
            if _is_free(now):
                return now
            if now.version != seen.version:
                raise ConfigError([in_use(url, _who(now))])
        self._say(f"taking over the lock of {who}, which showed no sign of life")
        return seen

    def _write(self, version: bytes) -> Stored:
        """Writes the lock in place of a version; returns the lock that there is then."""
        self._beats += 1
        lock = {"owner": dataclasses.asdict(self.owner), "beats": self._beats}
        content = f"{json.dumps(lock)}\n".encode()
        written = self.store.replace(LOCK_FILE, content, version=version)
        # A write that is repeated since its answer was lost finds its own version.
        return self.store.read(LOCK_FILE) if written is None else Stored(content, written)

    def _beat(self) -> None:
        while not self._released.wait(self._heartbeat_seconds):
            with contextlib.suppress(StoreError):  # the store may be out of reach for a while
                self.renew()

    def renew(self) -> None:
        """Gives a sign of life; ends this process if another one has taken the lock.

        Raises:
          StoreError: the store cannot be reached.
        """
        assert self._version is not None
        now = self._write(self._version)
        if _owner(now) != self.owner:
            end_process(self.store.url, _who(now))
        self._version = now.version


def _is_free(seen: Stored) -> bool:
    return seen.content == b"{}\n"


def _owner(seen: Stored) -> Owner | None:
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        return Owner(**json.loads(seen.content or b"")["owner"])
    return None


def _who(seen: Stored) -> str:
    return str(_owner(seen) or "an unknown process")
