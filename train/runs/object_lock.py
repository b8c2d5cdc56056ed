"""One run per URL: a lock in an object store that no dead run can keep.

The lock is an object that is never deleted. Each change of it names the version that it replaces,
so that of several processes one succeeds. Its holder changes it at every heartbeat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

from train.errors import ConfigError
from train.object_store import ObjectStore, Stored, StoreError
from train.runs.run_lock import LOCK_FILE, Lock, Owner, end_process, in_use, this_process


class ObjectLock(Lock):
    """The lock of a run in an object store."""

    def __init__(self, store: ObjectStore, **options: Any) -> None:
        super().__init__(store.url, **options)
        self.store, self.owner, self._beats = store, this_process(has_flock=False), 0
        self._version: bytes | None = None

    def acquire(self, former: str | None = None) -> None:
        seen = self.store.read(LOCK_FILE)
        owner = _owner(seen)
        is_former = owner is not None and owner.token == former
        if seen.content is not None and not _is_free(seen) and not is_former:
            seen = self._watch(seen)
        now = self._write(seen.version)
        if _owner(now) != self.owner:
            raise ConfigError([in_use(self._run, _who(now))])
        self._version = now.version
        self._thread.start()

    def release(self) -> None:
        if self._version is not None:
            self._stop_beating()
            # A lock that cannot be released is silent once this process has ended.
            with contextlib.suppress(StoreError):
                self.store.replace(LOCK_FILE, b"{}\n", version=self._version)
            self._version = None

    def _watch(self, seen: Stored) -> Stored:
        """Returns the lock once its run has ended or died; raises ConfigError if that lives."""
        who = _who(seen)
        for _ in self._looks(who):
            now = self.store.read(LOCK_FILE)
            if _is_free(now):
                return now
            if now.version != seen.version:
                raise ConfigError([in_use(self._run, _who(now))])
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

    def renew(self) -> None:
        assert self._version is not None
        now = self._write(self._version)
        if _owner(now) != self.owner:
            end_process(self._run, _who(now))
        self._version = now.version


def _is_free(seen: Stored) -> bool:
    return seen.content == b"{}\n"


def _owner(seen: Stored) -> Owner | None:
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        return Owner(**json.loads(seen.content or b"")["owner"])
    return None


def _who(seen: Stored) -> str:
    return str(_owner(seen) or "an unknown process")
