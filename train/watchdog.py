"""The watch over several processes, which names a missing one and ends a run for a restart.

Every process tells process 0 once a second what it is doing, from a thread that XLA does not block.
When a process makes no progress, another thread looks at what the others say: one that says nothing
is dead or frozen, and one that says the same for too long waits for something that never comes.
The process then names it and ends with `RESTART`; whoever starts all of them again continues from
the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from train import calls

RESTART = 75
"""The exit status of a run that another process kept from going on: EX_TEMPFAIL of sysexits.h."""

_BEAT_SECONDS = 1.0
_GONE_SECONDS = 4 * _BEAT_SECONDS
"""Time of silence after which a process counts as the cause of an error."""
_FAREWELL_SECONDS = _GONE_SECONDS + 2 * _BEAT_SECONDS
"""Time for which process 0 says who is missing before it ends: the others need it to ask."""
_KEY = "jaxpipe/watchdog/"
_MOST_AT_ONCE = 64
"""Number of processes that may ask process 0 about all others every second."""

_ABORT_SECONDS = 30
"""Time after which SIGALRM ends a handler of SIGABRT."""


class _Heard(NamedTuple):
    """The last message of a process, and the time at which it was new."""

    beat: dict[str, Any]
    at: float


class Watchdog:
    """Watches the other processes; does nothing in a run of one.

    Use it as a context manager around all that the processes do together.

    Args:
      patience_seconds: time for which a process may be silent, and by which a step may take longer
        than the longest step so far.

    Attributes:
      stages: the stages of every process, in words, once there is a mesh.
      leave: goes on without a missing process, in place of ending for a restart; None if it cannot.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience, self._longest = patience_seconds, 0.0
        self.stages: Mapping[int, str] = {}
        self.leave: Callable[[], NoReturn] | None = None
        self._count, self._own = jax.process_count(), jax.process_index()
        self._doing, self._step, self._since = "the start", 0, time.monotonic()
        self._is_stepping = False
        self._answered = now = time.monotonic()
        self._missing: list[int] | None = None
        start = {"doing": "the start", "step": 0, "missing": []}
        self._heard = {n: _Heard(start, now) for n in range(self._count)}
        self._asks, self._stride = False, 1 + self._count // _MOST_AT_ONCE
        self._ended = threading.Event()

    def __enter__(self) -> Watchdog:
        if self._count > 1:
            self._client = client()
            if self._own != 0:
                _on_abort(self._aborted)
            for run in (self._say, self._watch):
                threading.Thread(target=run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def at(self, doing: str) -> None:
        """Notes that something begins whose usual time is not known, such as compiling."""
        self._doing, self._since, self._is_stepping = doing, time.monotonic(), False

    def done(self, step: int) -> None:
        """Notes that the numbers of a step have come."""
        now = time.monotonic()
        if self._is_stepping:
            self._longest = max(self._longest, now - self._since)
        self._step, self._doing = step, f"step {step + 1}"
        self._since, self._is_stepping = now, True

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Ends the process if the block fails because another process is gone."""
        try:
            yield
        # Orbax, gloo and jax's barriers raise many kinds of errors when a process is gone.
        except Exception as error:
            if self._count > 1:
                self._asks = True
                time.sleep(_GONE_SECONDS)
                if gone := self._silent(_GONE_SECONDS - _BEAT_SECONDS):
                    self._end(gone, reason=type(error).__name__)
            raise

    # Messages of the processes.

    def _say(self) -> None:
        number = 0
        while not self._ended.wait(_BEAT_SECONDS):
            number += 1
            beat = {"beat": number, "doing": self._doing, "step": self._step}
            beat["missing"] = self._missing or []
            listens = (self._asks or self._is_late(_GONE_SECONDS)) and number % self._stride == 0
            try:
                self._client.key_value_set(
                    f"{_KEY}{self._own}", json.dumps(beat), allow_overwrite=True
                )
                messages = self._client.key_value_dir_get(_KEY) if listens else []
            except jax.errors.JaxRuntimeError:
                continue  # process 0 is gone, or ending
            now = self._answered = time.monotonic()
            for key, text in messages:
                process, heard = int(key.rpartition("/")[2]), json.loads(text)
                if heard != self._heard[process].beat:
                    self._heard[process] = _Heard(heard, now)
            # A process that has not been asked is not silent.
            if not (self._asks or self._is_late(_GONE_SECONDS)):
                self._heard = {n: last._replace(at=now) for n, last in self._heard.items()}

    def _is_late(self, seconds: float) -> bool:
        return time.monotonic() > self._since + seconds

    # Conclusions from the messages.

    def _watch(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            if told := self._heard[0].beat["missing"]:
                self._end(told, reason="no answer")
            if not self._is_late(self._patience):
                continue
            if silent := self._silent(self._patience):
                self._end(silent, reason="no answer")
            usual = self._longest if self._is_stepping else 0.0
            if usual and self._is_late(self._patience + usual):
                least = min(last.beat["step"] for last in self._heard.values())
                behind = [n for n, last in self._heard.items() if last.beat["step"] == least]
                self._end(behind, reason="no progress", alive=True)

    def _silent(self, seconds: float) -> list[int]:
        """Lists the processes that were not heard of; only process 0 if it does not answer."""
        now = time.monotonic()
        if now > self._answered + seconds:
            return [0]
        return [n for n, last in self._heard.items() if now > last.at + seconds]

    def _end(self, missing: list[int], *, reason: str, alive: bool = False) -> NoReturn:
        if self._missing is None:
            self._missing = [] if alive else missing
            self._explain(missing, reason, alive)
        if self.leave is not None and not alive:
            self.leave()  # does not return
        if self._own == 0:
            # Without process 0 the others would learn nothing more and take it for the missing one.
            time.sleep(_FAREWELL_SECONDS)
        os._exit(RESTART)

    def _explain(self, missing: list[int], reason: str, alive: bool) -> None:
        waited = time.monotonic() - self._since
        lines = [f"error: {self._described(n, alive)}" for n in missing]
        end = f"ends with status {RESTART}: start all processes again with --resume to continue."
        if self.leave is not None and not alive:
            end = "starts anew with those that are left, which have copies of the state."
        lines.append(
            f"error: process {self._own} has waited {waited:.0f} s at {self._doing} ({reason}) and "
            f"{end}"
        )
        with contextlib.suppress(OSError):  # nobody may be reading
            os.write(2, "".join(f"{line}\n" for line in lines).encode())

    def _described(self, process: int, alive: bool) -> str:
        where = self.stages.get(process)
        stages = "" if where is None else f" ({where})"
        beat, at = self._heard[process]
        if alive:
            return f"process {process}{stages} is alive, but does not get beyond {beat['doing']}."
        silent = time.monotonic() - at
        return (
            f"process {process}{stages} is missing: it was last heard of {silent:.0f} s ago, at "
            f"{beat['doing']}."
        )

    def _aborted(self) -> NoReturn:
        """Ends a process that XLA aborts: most often it has lost process 0."""
        try:
            socket.create_connection(calls.parsed(_address()), timeout=_GONE_SECONDS).close()
        except OSError:
            if not self._ended.is_set():
                # Process 0 may have been the first to end because of another.
                self._end(self._silent(_GONE_SECONDS) or [0], reason="connection lost")
        os._exit(128 + signal.SIGABRT)


def stages_by_process(mesh: jax.sharding.Mesh) -> dict[int, str]:
    """Returns the stages that each process has devices of, in words."""
    stages_of: dict[int, set[int]] = {}
    axis = mesh.axis_names.index("stage")
    for index, device in np.ndenumerate(mesh.devices):
        stages_of.setdefault(device.process_index, set()).add(index[axis])
    return {
        n: f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, sorted(stages)))}"
        for n, stages in stages_of.items()
    }


# jax has no public names for the key-value store that its processes share, and its address.


def client() -> Any:
    """Returns the client of the store that processes share."""
    from jax._src import distributed

    return distributed.global_state.client


def _address() -> str:
    from jax._src import distributed

    return str(distributed.global_state.coordinator_address)


def own_host() -> str:
    """Returns the address of this host by which others on its network reach it."""
    host, _, port = _address().rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host.strip("[]"), int(port)))  # sends nothing
        return str(probe.getsockname()[0])


def _on_abort(handle: Any) -> None:
    """Calls a function instead of what SIGABRT does.

    XLA aborts a process that loses process 0, and offers no other end: its callback cannot be
    written in Python (jaxlib 0.10 fails with std::bad_cast).
    """

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handler(_: int) -> None:
        signal.alarm(_ABORT_SECONDS)
        handle()

    _handlers.append(handler)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)


_handlers: list[Any] = []
"""Handlers that C calls, kept alive here."""
