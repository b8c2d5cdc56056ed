"""Processes that freeze, die or never come: the others name them and end, and the run goes on."""

import re
import signal
import time

import limits
import pytest
from command import finish, num_lines, saved, start, steps

pytestmark = pytest.mark.end_to_end

PATIENCE = limits.scaled(6)
RESTART = 75
# Two processes hold the stages 0, 1 and 2, 3.
_LAYOUT = ("--mesh.stage=4", "--mesh.data=1", "--train.checkpoint-every=1")


def _started(toy_trainer, count, *options):
    patience = f"--distributed.patience-seconds={PATIENCE}"
    return toy_trainer.processes(count, *_LAYOUT, patience, *options)


def _wait_for(run, step):
    until = time.monotonic() + limits.hang()
    while num_lines(run) < step:
        assert time.monotonic() < until
        time.sleep(0.02)


def _strike(toy_trainer, run, number, *, at, victim, count=2):
    """Sends a signal to a process of a run; returns how the others end."""
    options = ("--run-dir", run, "--resume", "--train.steps=1000000")
    with _started(toy_trainer, count, *options) as processes:
        _wait_for(run, at)
        processes[victim].send_signal(number)
        struck = time.monotonic()
        others = [finish(one, RESTART) for n, one in enumerate(processes) if n != victim]
    assert time.monotonic() - struck < PATIENCE + limits.scaled(15)
    for other in others:
        assert "Traceback" not in other.err
        assert f"ends with status {RESTART}: start all processes again" in other.err
    return others


@pytest.mark.slow
def test_a_frozen_process_is_named_and_the_run_continues(toy_trainer, tmp_path):
    run = tmp_path / "run"
    (first,) = _strike(toy_trainer, run, signal.SIGSTOP, at=3, victim=1)
    named = r"error: process 1 \(stages 2, 3\) is missing: it was last heard of \d+ s ago, at "
    assert re.search(named, first.err), str(first)
    assert saved(run)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_whoever_freezes_or_dies_the_next_start_continues(toy_trainer, tmp_path, count):
    """Until the losses of the whole run are those of an unbroken one; Ctrl-C saves as well."""
    run, last = tmp_path / "run", count - 1
    for number, victim in [
        (signal.SIGSTOP, last),
        (signal.SIGKILL, last),
        (signal.SIGSTOP, 0),
        (signal.SIGKILL, 0),
    ]:
        done = num_lines(run)
        others = _strike(toy_trainer, run, number, at=done + 2, victim=victim, count=count)
        for other in others:
            assert f"error: process {victim} " in other.err, str(other)
    unbroken = tmp_path / "unbroken"
    for folder, enough in ((run, num_lines(run) + 2), (unbroken, num_lines(run))):
        options = ("--run-dir", folder, "--resume", "--train.steps=1000000")
        with _started(toy_trainer, count, *options) as processes:
            _wait_for(folder, enough)
            processes[last].send_signal(signal.SIGINT)
            ended = [finish(process) for process in processes]
        assert "asked to stop: saved step" in ended[0].out
        assert saved(folder)[-1] == len(steps(folder))
    losses, expected = ([record["loss"] for record in steps(folder)] for folder in (run, unbroken))
    common = min(len(losses), len(expected))
    assert common > 8
    assert losses[:common] == expected[:common]


_KILLED_AT = """
import os, sys
import jax
from jax.experimental import multihost_utils
from train import train
{} = lambda *_, **__: os.kill(os.getpid(), 9)
train.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("where", "said"),
    [
        pytest.param("jax.distributed.initialize", "was lost while jax co", marks=pytest.mark.slow),
        (
            "multihost_utils.broadcast_one_to_all",
            "error: process 1 is missing: it was last ",
        ),
    ],
)
def test_a_process_that_is_lost_before_training_is_missed(toy_trainer, tmp_path, where, said):
    """At every start, and so where processes go on without another one and lose a second."""
    patience = f"--distributed.patience-seconds={PATIENCE}"
    options = "--run-dir", tmp_path / "run", "--resume", patience, *_LAYOUT
    with toy_trainer.processes(1, *options, "--distributed.num-processes=2") as (first,):
        given = list(map(str, first.args[first.args.index("--config") :]))
        code = _KILLED_AT.format(where)
        second = start("python", "-c", code, *given, "--distributed.process-id=1")
        finish(second, -signal.SIGKILL)
        ended = finish(first, RESTART)
    assert said in ended.err, str(ended)
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_a_process_that_never_comes_is_named(toy_trainer, tmp_path):
    run = tmp_path / "run"
    with _started(toy_trainer, 2, "--run-dir", run) as processes:
        processes[1].kill()
        first = finish(processes[0], RESTART)
    assert first.err == (
        f"error: process 1 of this run has not come within {PATIENCE} s "
        "(distributed.patience_seconds). Start all processes again.\n"
    )
    assert not run.exists()
