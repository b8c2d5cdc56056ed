"""Whom a process names that has lost process 0."""

import time

import pytest

from train import watchdog
from train.watchdog import Watchdog


class _EndedError(Exception):
    """In place of the end of the process."""


@pytest.mark.parametrize(
    ("frozen", "silent", "named"),
    [
        pytest.param([], 0, [0], id="process 0 died"),
        pytest.param([3], 0, [3], id="process 0 ended because another is frozen"),
        pytest.param([3], 9, [0], id="process 0 had not answered for long"),
    ],
)
def test_who_is_missing_after_the_connection_is_lost(monkeypatch, frozen, silent, named):
    found = []

    def end(_, missing, *, reason):
        found.append((missing, reason))
        raise _EndedError

    monkeypatch.setattr(Watchdog, "_end", end)
    monkeypatch.setattr(watchdog, "_address", lambda: "localhost:1")  # nobody listens there
    dog, now = Watchdog(60), time.monotonic()
    dog._answered = now - silent
    heard = dog._heard[0]
    dog._heard = {n: heard._replace(at=now - 9 * (n in frozen)) for n in range(4)}
    with pytest.raises(_EndedError):
        dog._aborted()
    assert found == [(named, "connection lost")]
