"""SIGTERM ends a process whose main thread XLA blocks, and lets another one finish its step."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import limits
import pytest

ROOT = Path(__file__).parents[2]

# As XLA does where other devices never come, it waits for a lock and lets no handler run.
BLOCKED = """
import ctypes, threading
from train import stop

stop.GRACE_SECONDS = {grace}
request = stop.StopRequest()
assert not request.after(1)
lock, library = ctypes.create_string_buffer(256), ctypes.CDLL(None)
library.pthread_mutex_lock(lock)
threading.Timer(1, print, ["blocked"], {{"flush": True}}).start()
library.pthread_mutex_lock(lock)
"""
STEPS = """
import time
from train import stop

stop.GRACE_SECONDS = 0.0
request = stop.StopRequest()
request.after(1)
time.sleep(1)
request.after(2)
print("stepping", flush=True)
time.sleep(0.5)
assert request.after(3)
time.sleep(2)  # saving may take longer than a step
print("saved")
"""
EVALUATION = """
import time
from train import stop

stop.GRACE_SECONDS = 0.2
request = stop.StopRequest()
request.after(1)
print("evaluating", flush=True)
for _ in range(20):
    time.sleep(0.1)
assert request.after(2)
print("saved")
"""


def _start(code: str, line: str) -> subprocess.Popen[str]:
    """A process that has printed a line."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == f"{line}\n"
    return process


def _finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=limits.hang())
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_blocked_process_ends_after_the_grace_time(number):
    process = _start(BLOCKED.format(grace=0.2), "blocked")
    process.send_signal(number)
    _, error = _finish(process)
    assert process.returncode == 128 + number
    assert "error: a request to stop has been blocked for 0 s" in error


def test_a_second_signal_ends_a_blocked_process_at_once():
    process = _start(BLOCKED.format(grace=10 * limits.hang()), "blocked")
    # Two of the same kind may arrive as one.
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    _finish(process)
    assert process.returncode > 128


def test_an_evaluation_that_takes_longer_than_the_grace_time_ends_with_a_checkpoint():
    process = _start(EVALUATION, "evaluating")
    process.send_signal(signal.SIGTERM)
    out, error = _finish(process)
    assert (process.returncode, out) == (0, "saved\n"), error


def test_a_step_as_long_as_others_and_saving_have_time():
    process = _start(STEPS, "stepping")
    process.send_signal(signal.SIGTERM)
    out, error = _finish(process)
    assert (process.returncode, out) == (0, "saved\n"), error
