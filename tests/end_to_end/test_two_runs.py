"""Two runs in one folder: one goes on undisturbed, the other says who holds it."""

import os
import signal
import socket

import pytest
from command import assert_same_run, finish, kill_when, num_lines

from train.run_lock import LOCK_FILE

pytestmark = pytest.mark.end_to_end


def test_a_second_run_is_refused_and_the_first_goes_on(unbroken_toy, toy_trainer, tmp_path):
    run = tmp_path / "run"
    first = toy_trainer.start("--config", toy_trainer.config, "--run-dir", run)
    try:
        assert kill_when(first, lambda: num_lines(run) >= 3, number=signal.SIGSTOP)
        # Its threads may still write until all of them have stopped.
        assert os.WIFSTOPPED(os.waitpid(first.pid, os.WUNTRACED)[1])
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        who = f"in use by process {first.pid} on {socket.gethostname()} since "
        second = toy_trainer.run("--run-dir", run, "--resume", status=2)
        assert second.err.startswith(f"error: run_dir={run} is {who}")
        fresh = toy_trainer.run("--run-dir", run, status=2)
        assert fresh.err.startswith(f"error: run_dir={run} already holds a run (")
        assert who in fresh.err
        for refused in (second, fresh):
            assert refused.out == ""
            assert refused.err.count("\n") == 1
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
        toy_trainer.run("--run-dir", run, "--dry-run")
    finally:
        first.send_signal(signal.SIGCONT)
        finished = finish(first)
    assert finished.status == 0, str(finished)
    assert_same_run(run, unbroken_toy)
    assert not (run / LOCK_FILE).exists()


def test_of_two_that_start_together_one_trains(unbroken_toy, toy_trainer, tmp_path):
    """To the same bits without a cache: programs compiled twice are one program, on which
    resuming rests."""
    run = tmp_path / "run"
    command = "--config", toy_trainer.config, "--run-dir", run
    both = [toy_trainer.start(*command, cached=False) for _ in range(2)]
    finished = [finish(process) for process in both]
    assert sorted(each.status for each in finished) == [0, 2], "\n".join(map(str, finished))
    (refused,) = (each for each in finished if each.status == 2)
    assert refused.err.startswith(f"error: run_dir={run} ")
    assert refused.err.count("\n") == 1
    assert_same_run(run, unbroken_toy)
