"""The time of a run by cause, over all processes that continued it, and its goodput.

Goodput is the share of the time that went into steps which the run keeps, as in Google Cloud's
"ML Productivity Goodput" (2024). The clock stands beside the losses in ``metrics.jsonl``, so that a
resumed run adds to what the process before it had recorded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

CAUSES = "step", "start", "compile", "evaluation", "checkpoint", "restart", "lost"
STEP, START, COMPILE, EVALUATION, CHECKPOINT, RESTART, LOST = CAUSES
SECONDS, UNIX_TIME = "seconds", "unix_time"
"""The entries of a record with the seconds by cause, and with the time of its writing."""


class Goodput:
    """The clock of a run: at any time one cause is counted.

    ====================  ==========================================================================
    ``step``              training steps that the run keeps
    ``start``             imports, devices, data, weights, and whatever precedes the first step
    ``compile``           programs for steps and evaluations, and measured timelines
    ``evaluation``        held-out batches
    ``checkpoint``        saving, as long as steps wait for it, and restoring
    ``restart``           from the last record of a process to the start of the next
    ``lost``              steps after the checkpoint that a process continued from
    ====================  ==========================================================================

    Example:
      >>> goodput = Goodput()
      >>> with goodput.on(COMPILE):
      ...     pass
      >>> sorted(goodput.seconds()) == sorted(CAUSES)
      True
    """

    def __init__(self) -> None:
        self._began = time.time()
        self._cause, self._since = START, time.monotonic()
        self._seconds = dict.fromkeys(CAUSES, 0.0)

    def enter(self, cause: str) -> str:
        """Counts another cause from now on; returns the one before."""
        now, before = time.monotonic(), self._cause
        self._seconds[before] += now - self._since
        self._cause, self._since = cause, now
        return before

    @contextlib.contextmanager
    def on(self, cause: str) -> Iterator[None]:
        """Counts another cause during the block."""
        before = self.enter(cause)
        try:
            yield
        finally:
            self.enter(before)

    def resume(self, records: Iterable[Mapping[str, Any]], *, step: int, ended: bool) -> None:
        """Adds the time of the processes before this one.

        Args:
          records: the records of ``metrics.jsonl``, also those after the step.
          step: the step to continue from.
          ended: whether the run had done all its steps; the time since is then none of its own.
        """
        last, end, kept = None, 0.0, 0.0
        for record in records:
            end = record.get(UNIX_TIME, end)
            if SECONDS in record:
                last = record
                kept = record[SECONDS][STEP] if record["step"] <= step else kept
        if last is None:  # the records are of a version without a clock
            return
        for cause, seconds in last[SECONDS].items():
            self._seconds[cause] += seconds
        # Steps after the last printed line are in no clock.
        self._seconds[STEP] += end - last[UNIX_TIME]
        lost = self._seconds[STEP] - kept
        self._seconds[STEP] -= lost
        self._seconds[LOST] += lost
        self._seconds[RESTART] += 0.0 if ended else max(self._began - end, 0.0)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each cause until now."""
        self.enter(self._cause)
        return dict(self._seconds)

    @property
    def share(self) -> float:
        """The share of steps that the run keeps in all its time."""
        seconds = self.seconds()
        return seconds[STEP] / max(sum(seconds.values()), 1e-9)

    def __str__(self) -> str:
        seconds = self.seconds()
        parts = ", ".join(f"{cause} {value:.1f} s" for cause, value in seconds.items() if value)
        return f"goodput {self.share:.1%}: {parts}"
