"""Stopping on request: SIGTERM and Ctrl-C end a run between two steps."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

import jax
from jax.experimental import multihost_utils

GRACE_SECONDS = 30.0
"""Time that a signal waits for a blocked main thread, beyond that of the longest step so far. Slurm
and Kubernetes kill a process 30 s after SIGTERM, by default."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Notices SIGTERM (and Ctrl-C), so that a run saves and ends between two steps.

    Python runs a signal's handler between two of its own instructions, and so never while XLA
    blocks the main thread. A thread therefore watches for signals, too. It ends the process if the
    handler has not run within `GRACE_SECONDS`, and at once when a second signal comes.

    With several processes jax's preemption service makes all of them stop after the same step, and
    `train.processes.watchdog` ends those that wait for another.
    """

    def __init__(self) -> None:
        self._seen = False
        self._last_step: float | None = None
        self._longest_step = 0.0
        self._is_alone = jax.process_count() == 1
        if self._is_alone:
            arrivals, wakeup = os.pipe()
            os.set_blocking(wakeup, False)
            signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
            for number in _SIGNALS:
                signal.signal(number, self._notice)
            threading.Thread(target=self._watch, args=(arrivals,), daemon=True).start()
        else:
            signal.signal(signal.SIGINT, self._pass_on)

    def _notice(self, number: int, frame: object) -> None:
        del frame
        self._seen = True
        # A second signal ends the process at once.
        signal.signal(number, signal.SIG_DFL)

    def _pass_on(self, number: int, frame: object) -> None:
        """Gives Ctrl-C to jax's service, which knows SIGTERM alone."""
        del number, frame
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _watch(self, arrivals: int) -> None:
        number = _next_signal(arrivals, None)
        grace = GRACE_SECONDS + self._longest_step
        if not _next_signal(arrivals, grace):
            if self._seen:
                return
            message = f"error: a request to stop has been blocked for {grace:.0f} s\n"
            with contextlib.suppress(OSError):  # nobody may be reading
                os.write(2, message.encode())
        os._exit(128 + number)

    def after(self, step: int) -> bool:
        """Says whether to stop now that a step is done; every process must ask after every step."""
        if not self._is_alone:
            return multihost_utils.reached_preemption_sync_point(step)
        now = time.monotonic()
        if self._last_step is not None:
            self._longest_step = max(self._longest_step, now - self._last_step)
        self._last_step = now
        return self._seen


def _next_signal(arrivals: int, seconds: float | None) -> int:
    """Waits for the next signal to stop, and returns its number; 0 if none comes in time."""
    until = None if seconds is None else time.monotonic() + seconds
    while True:
        left = None if until is None else max(until - time.monotonic(), 0.0)
        if not select.select([arrivals], [], [], left)[0]:
            return 0
        number = os.read(arrivals, 1)[0]
        if number in _SIGNALS:
            return number
