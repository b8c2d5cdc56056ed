"""One run per folder: who gets the lock, who is refused, and which locks are stale."""

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from command import finish, start

from train import errors, loop
from train.config import Config
from train.errors import ConfigError
from train.runs import run_folder, run_lock
from train.runs.run_lock import LOCK_FILE, RunLock

_HOLD = """
import sys, time
from pathlib import Path
from train.runs.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), say=print, heartbeat_seconds=0.05)
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""
_ELSEWHERE = {
    "host": "node7",
    "pid": 4711,
    "since": "2030-01-01T00:00:00+00:00",
    "slurm_job": "99",
    "kernel": "another kernel",
    "has_flock": True,
    "token": "forged",
}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "run"


@pytest.fixture
def make(folder):
    """Makes locks that soon find a silent one stale; those still held at the end are released."""
    with contextlib.ExitStack() as made:

        def make(*, say=lambda _: None, patience_seconds=0.3, heartbeat_seconds=0.05):
            seconds = {"heartbeat_seconds": heartbeat_seconds, "patience_seconds": patience_seconds}
            lock = RunLock(folder, say=say, **seconds)
            made.callback(lock.release)
            return lock

        yield make


@pytest.fixture
def other(folder):
    """Another process that holds the lock."""
    process = start("python", "-c", _HOLD, folder)
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def _forge(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "forged"
    partial.write_text(text)
    partial.replace(folder / LOCK_FILE)


@contextlib.contextmanager
def _touching(folder):
    """A heart that beats, as that of a run on another machine."""
    stopped = threading.Event()

    def touch():
        while not stopped.wait(0.02):
            os.utime(folder / LOCK_FILE)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _take(lock, folder, *, resume=False):
    loop.take_folder(lock, Config(run_dir=str(folder)), resume=resume)


def _refused(lock):
    with pytest.raises(ConfigError) as caught:
        lock.acquire()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_lock_names_its_holder_and_leaves_nothing(make, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    lock = make()
    lock.acquire()
    message = _refused(make())
    who = f"process {os.getpid()} on {socket.gethostname()} since "
    assert message.startswith(f"run_dir={folder} is in use by {who}")
    assert re.search(r" since \d{4}-\d\d-\d\dT[\d:]{8}[+-]\d\d:\d\d \(Slurm job 123\)\. ", message)
    assert "name another --run-dir" in message
    assert os.listdir(folder) == [LOCK_FILE]
    lock.release()
    assert run_lock.holder(folder) is None
    assert os.listdir(tmp_path) == []
    # A folder with files stays.
    again = make()
    again.acquire()
    (folder / "metrics.jsonl").touch()
    again.release()
    again.release()
    assert os.listdir(folder) == ["metrics.jsonl"]


def test_a_stopped_process_keeps_its_lock_and_that_of_a_killed_one_is_taken(make, folder, other):
    (folder / run_folder.CONFIG_FILE).touch()
    other.send_signal(signal.SIGSTOP)
    time.sleep(0.5)  # long enough for the silence of another machine
    assert f"process {other.pid} on {socket.gethostname()}" in _refused(make())
    (failure,) = run_folder.failures(Config(run_dir=str(folder)), resume=False)
    assert f"a run (config.yaml) and is in use by process {other.pid} on " in failure.message
    other.kill()
    other.wait()
    (failure,) = run_folder.failures(Config(run_dir=str(folder)), resume=False)
    assert "in use" not in failure.message
    record = json.loads((folder / LOCK_FILE).read_text())
    said = []
    lock = make(say=said.append)
    lock.acquire()
    (line,) = said
    assert re.fullmatch(rf"removed the lock of process {other.pid} on .*, which has ended", line)
    assert f"process {os.getpid()} " in _refused(make())
    lock.release()
    # A process id that is used again means nothing.
    _forge(folder, json.dumps(record | {"pid": os.getpid()}))
    make().acquire()


@pytest.mark.parametrize(
    ("text", "who"),
    [
        (json.dumps(_ELSEWHERE), "process 4711 on node7 since 2030-01-01T00:00:00+00:00 (Slurm jo"),
        ("", "an unknown process"),
        ('{"host": "node', "an unknown process"),
        ('{"host": "node7"}', "an unknown process"),
        ("[1]", "an unknown process"),
        ("[" * 10**5, "an unknown process"),
        ("\0" * 100, "an unknown process"),
    ],
    ids=["another machine", "empty", "half", "other fields", "a list", "nested", "zeros"],
)
def test_a_lock_that_is_silent_is_taken_over_and_a_living_one_is_not(make, folder, text, who):
    _forge(folder, text)
    said = []
    with _touching(folder):
        message = _refused(make(patience_seconds=60, say=said.append))
    assert f"is in use by {who}" in message
    assert f"has the lock of {who}" in said[0]
    assert "waiting up to 60 s for a sign of life" in said[0]
    said.clear()
    make(say=said.append).acquire()
    assert "which showed no sign of life" in said[1]
    assert f"process {os.getpid()} " in _refused(make())


def test_a_wrong_clock_keeps_no_lock_alive_and_one_given_back_is_not_waited_for(make, folder):
    _forge(folder, json.dumps(_ELSEWHERE))
    os.utime(folder / LOCK_FILE, (time.time() + 1e6, time.time() + 1e6))
    first = make()
    first.acquire()
    first.release()
    _forge(folder, json.dumps(_ELSEWHERE))
    gone = threading.Timer(0.2, (folder / LOCK_FILE).unlink)
    gone.start()
    make(patience_seconds=600).acquire()
    gone.join()
    assert f"process {os.getpid()} " in _refused(make())


def test_without_flock_the_heartbeat_alone_decides(make, folder, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = make()
    lock.acquire()
    assert f"process {os.getpid()} " in _refused(make(patience_seconds=60))
    text = (folder / LOCK_FILE).read_text()
    lock.release()
    _forge(folder, text)
    make().acquire()


def test_a_run_takes_the_lock_of_a_process_that_it_has_given_up_which_ends(make, folder, other):
    """On this machine, which shows that the process is alive, and on another one."""
    token = json.loads((folder / LOCK_FILE).read_text())["token"]
    with pytest.raises(ConfigError, match=f"is in use by process {other.pid} "):
        make().acquire("another token")
    lock = make(patience_seconds=60)
    lock.acquire(token)
    ended = finish(other, errors.RESTART)
    assert f"is now in use by process {os.getpid()} on " in ended.err
    lock.release()
    _forge(folder, json.dumps(_ELSEWHERE))
    with _touching(folder):
        make(patience_seconds=60).acquire(_ELSEWHERE["token"])


@pytest.mark.parametrize("kind", ["nothing", "a dead process", "a silent one", "other machines"])
def test_of_many_that_start_at_the_same_instant_one_gets_the_lock(make, folder, kind, monkeypatch):
    """Whatever a dead run has left; other machines know no process of this one."""
    taken_over = []
    monkeypatch.setattr(run_lock, "end_process", lambda _, who: taken_over.append(who))
    here = {"kernel": run_lock._kernel()} if kind == "a dead process" else {}
    if kind != "nothing":
        _forge(folder, json.dumps(_ELSEWHERE | here))
    if kind == "other machines":
        monkeypatch.setattr(run_lock, "_kernel", lambda: f"kernel {threading.get_ident()}")
    locks = [make(patience_seconds=1.5, heartbeat_seconds=0.25) for _ in range(8)]
    barrier, outcomes = threading.Barrier(8), []

    def contend(lock):
        barrier.wait()
        try:
            lock.acquire()
            outcomes.append("held")
        except ConfigError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=contend, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [outcome for outcome in outcomes if outcome != "held"]
    assert (len(outcomes), len(refused)) == (8, 7), outcomes
    # Not the dead one is named, but the one that got it.
    assert all(f"in use by process {os.getpid()} " in message for message in refused), refused
    assert taken_over == []


def test_a_run_whose_lock_was_taken_over_ends_at_once(folder, other):
    _forge(folder, json.dumps(_ELSEWHERE))
    done = finish(other, errors.RESTART)
    assert done.out == ""
    assert re.fullmatch(
        r"error: run_dir=\S+ was silent .* in use by process 4711 on node7.*\n", done.err
    )
    assert (folder / LOCK_FILE).exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    with pytest.raises(ConfigError, match=r"^run_dir=\S+ cannot be written: Not a dir.*$"):
        _take(RunLock(folder, say=print), folder)


@pytest.mark.parametrize("make_it", [Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_lock_is_not_waited_for_for_ever(make, folder, make_it):
    folder.mkdir(parents=True)
    make_it(folder / LOCK_FILE)
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"\.lock must be a file, and is .*Move it away"):
            _take(make(), folder, resume=resume)


def test_a_full_disk_leaves_no_lock(make, folder, tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lock = make()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
            _take(lock, folder)
    lock.release()
    assert os.listdir(tmp_path) == []


def test_a_run_that_ended_before_the_lock_was_free_is_not_written_over(make, folder):
    folder.mkdir(parents=True)
    (folder / run_folder.CONFIG_FILE).touch()
    lock = make()
    with pytest.raises(ConfigError, match=r"already holds a run \(config.yaml\). Continue it"):
        _take(lock, folder)
    lock.release()
    assert os.listdir(folder) == [run_folder.CONFIG_FILE]
    _take(make(), folder, resume=True)
    assert sorted(os.listdir(folder)) == [LOCK_FILE, run_folder.CONFIG_FILE]
