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
import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import jax
import numpy as np
import pydantic

from train.errors import RESTART, ConfigError, NonFiniteLossError
from train.processes import calls

_BEAT_SECONDS = 1.0
_GONE_SECONDS = 4 * _BEAT_SECONDS
"""Time of silence after which a process counts as the cause of an error."""
_KEY = "jaxpipe/watchdog/"
_MOST_AT_ONCE = 64
"""Number of processes that may ask process 0 about all others every second."""

_ABORT_SECONDS = 30
"""Time after which SIGALRM ends a handler of SIGABRT."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """A message of a process.

    Args:
      beat: number of the message.
      doing: what the process does, in words.
      step: optimizer steps done.
      missing: processes that it misses and ends because of.
    """

    beat: int = 0
    doing: str = "the start"
    step: int = 0
    missing: Sequence[int] = ()


_BEAT = pydantic.TypeAdapter(Beat)


class _Heard(NamedTuple):
    """The last message of a process, and the time at which it was new."""

    beat: Beat
    at: float


class Successor(Protocol):
    """Something that continues the run without a missing process."""

    @property
    def has_stood_still(self) -> bool:
        """Whether this process may have stood still for so long that the others gave it up."""

    def leave(self) -> NoReturn:
        """Replaces this program by one that goes on, or ends it."""


class Watchdog:
    """Watches the other processes; does nothing in a run of one.

    Use it as a context manager around all that the processes do together.

    Args:
      patience_seconds: time for which a process may be silent, and by which a step may take longer
        than the longest step so far.

    Attributes:
      stages: the stages of every process, in words, once there is a mesh.
      survivor: goes on without a missing process, in place of ending for a restart; None if it
        cannot.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience, self._longest = patience_seconds, 0.0
        self.stages: Mapping[int, str] = {}
        self.survivor: Successor | None = None
        # `jax.process_count` would wait for the devices of all processes, which need a watch, too.
        self._count, self._own = _state().num_processes, _state().process_id
        self._doing, self._step, self._since = "the start", 0, time.monotonic()
        self._is_stepping = False
        self._answered = now = time.monotonic()
        self._missing: list[int] | None = None
        self._heard = {n: _Heard(Beat(), now) for n in range(self._count)}
        self._asks, self._stride = False, 1 + self._count // _MOST_AT_ONCE
        self._gone_seconds = _GONE_SECONDS + (self._stride - 1) * _BEAT_SECONDS
        self._ended = threading.Event()

    def __enter__(self) -> Watchdog:
        if self._count > 1:
            self._client = _state().client
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
        except (ConfigError, NonFiniteLossError):
            raise
        # Orbax, gloo and jax's barriers raise many kinds of errors when a process is gone.
        except Exception as error:
            if self._count > 1 and not self._asks:
                self._asks = True
                # The first answer may hold a last message of a process that is gone.
                until = time.monotonic() + self._gone_seconds + self._stride * _BEAT_SECONDS
                while time.monotonic() < until:
                    time.sleep(_BEAT_SECONDS)
                    if gone := self._silent(self._gone_seconds - _BEAT_SECONDS):
                        self._end(gone, reason=type(error).__name__)
            raise

    # Messages of the processes.

    def _say(self) -> None:
        number = 0
        while not self._ended.wait(_BEAT_SECONDS):
            number += 1
            beat = Beat(number, self._doing, self._step, self._missing or ())
            listens = (self._asks or self._is_late(_GONE_SECONDS)) and number % self._stride == 0
            try:
                own = _BEAT.dump_json(beat).decode()
                self._client.key_value_set(f"{_KEY}{self._own}", own, allow_overwrite=True)
                messages = self._client.key_value_dir_get(_KEY) if listens else []
            except jax.errors.JaxRuntimeError:
                continue  # process 0 is gone, or ending
            now = self._answered = time.monotonic()
            for key, text in messages:
                with contextlib.suppress(ValueError):  # anyone can write to jax's store
                    process, heard = int(key.removeprefix(_KEY)), _BEAT.validate_json(text)
                    if process in self._heard and heard != self._heard[process].beat:
                        self._heard[process] = _Heard(heard, now)
            # A process that has not been asked is not silent.
            if not (self._asks or self._is_late(_GONE_SECONDS)):
                self._heard = {n: last._replace(at=now) for n, last in self._heard.items()}

    def _is_late(self, seconds: float) -> bool:
        return time.monotonic() > self._since + seconds

    # Conclusions from the messages.

    def _watch(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            if told := [n for n in self._heard[0].beat.missing if n in self._heard]:
                self._end(told, reason="no answer")
            if not self._is_late(self._patience):
                continue
            if silent := self._silent(self._patience):
                self._end(silent, reason="no answer")
            usual = self._longest if self._is_stepping else 0.0
            # Who is silent now has been asked for less than the patience, and is soon missing.
            is_stuck = usual and self._is_late(self._patience + usual)
            if is_stuck and not self._silent(self._gone_seconds):
                least = min(last.beat.step for last in self._heard.values())
                behind = [n for n, last in self._heard.items() if last.beat.step == least]
                self._end(behind, reason="no progress", alive=True)

    def _silent(self, seconds: float) -> list[int]:
        """Lists the processes that were not heard of; only process 0 if it does not answer."""
        now = time.monotonic()
        if now > self._answered + seconds:
            return [0]
        return [n for n, last in self._heard.items() if now > last.at + seconds]

    def _end(self, missing: list[int], *, reason: str, alive: bool = False) -> NoReturn:
        survivor = None if alive else self.survivor
        if survivor is not None and survivor.has_stood_still:
            survivor.leave()  # says that the others have given this process up
        if self._missing is None:
            self._missing = [] if alive else missing
            self._explain(missing, reason, alive)
        if survivor is not None:
            survivor.leave()  # does not return
        if self._own == 0:
            # Without process 0 the others would learn nothing more and take it for the missing one.
            time.sleep(self._gone_seconds + 2 * _BEAT_SECONDS)
        os._exit(RESTART)

    def _explain(self, missing: list[int], reason: str, alive: bool) -> None:
        waited = time.monotonic() - self._since
        lines = [f"error: {self._described(n, alive)}" for n in missing]
        end = f"ends with status {RESTART}: start all processes again with --resume to continue."
        if self.survivor is not None and not alive:
            end = "starts anew with those that are left, which have copies of the state."
        lines.append(
            f"error: process {self._own} has waited {waited:.0f} s at {self._doing} ({reason}) and "
            f"{end}"
        )
        tell("\n".join(lines))

    def _described(self, process: int, alive: bool) -> str:
        where = self.stages.get(process)
        stages = "" if where is None else f" ({where})"
        beat, at = self._heard[process]
        if alive:
            return f"process {process}{stages} is alive, but does not get beyond {beat.doing}."
        silent = time.monotonic() - at
        return (
            f"process {process}{stages} is missing: it was last heard of {silent:.0f} s ago, at "
            f"{beat.doing}."
        )

    def _aborted(self) -> NoReturn:
        """Ends a process that XLA aborts: most often it has lost process 0."""
        try:
            socket.create_connection(_coordinator(), timeout=_GONE_SECONDS).close()
        except OSError:
            if not self._ended.is_set():
                # Process 0 may have been the first to end because of another.
                self._end(self._silent(self._gone_seconds) or [0], reason="connection lost")
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


def _state() -> Any:
    from jax._src import distributed

    return distributed.global_state


def _coordinator() -> calls.Address:
    return calls.parsed(_state().coordinator_address)


def own_host() -> str:
    """Returns the address of this host by which others on its network reach it."""
    for family, kind, _, _, address in socket.getaddrinfo(*_coordinator(), type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    raise OSError(f"no route to {calls.written(_coordinator())}")


def tell(text: str) -> None:
    """Writes to the stream of errors, from any thread or handler."""
    with contextlib.suppress(OSError):  # nobody may be reading
        os.write(2, f"{text}\n".encode())


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Ends this process for a restart if XLA aborts it, because another one did not connect."""

    def end() -> None:
        tell(
            "error: a process of this run was lost while jax connected them: this one ends with "
            f"status {RESTART}. Start all processes again."
        )
        os._exit(RESTART)

    _on_abort(end)
    try:
        yield
    finally:
        ctypes.CDLL(None).signal(int(signal.SIGABRT), None)


def _on_abort(handle: Callable[[], None]) -> None:
    """Calls a function instead of what SIGABRT does.

    XLA aborts a process that loses process 0, and offers no other end: its callback cannot be
    written in Python (jaxlib 0.10 fails with std::bad_cast).
    """

    def call(_: int) -> None:
        signal.alarm(_ABORT_SECONDS)
        handle()

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(call)
    _handlers.append(handler)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)


_handlers: list[Any] = []
"""Handlers that C calls, kept alive here."""
