"""Processes of a run: what launchers start, how they meet, whom they miss, and how they stop."""

import concurrent.futures
import contextlib
import signal
import socket
import threading
import time
from pathlib import Path

import jax
import limits
import pytest
import yaml
from command import LOOPBACK, TOP, Finished, finish, free_address, start

from train import command_line, errors
from train.processes import calls, distributed, watchdog
from train.processes.watchdog import Watchdog

CONFIGS = TOP / "configs"


def test_processes_from_flags_and_launchers(make):
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    mpi = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
    given = {"coordinator": "localhost:1", "num_processes": 2, "process_id": 0}
    flags = make({f"distributed.{name}": value for name, value in given.items()})
    find = distributed.find_processes
    assert find(make(), {}) == distributed.Processes(1, 0)
    assert find(make(), slurm) == distributed.Processes(2, 1)
    assert find(make(), mpi) == distributed.Processes(4, 3)
    assert find(flags, mpi) == distributed.Processes(2, 0, "localhost:1")
    # The batch script of a job is one process; only a step's variables count.
    assert find(make(), {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}).count == 1
    # More simulated devices than jax can start are those of the user's own XLA_FLAGS.
    many = make({"mesh.stage": 4, "mesh.data": 1000})
    own = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1000"}
    assert find(many, slurm | {"SLURM_STEP_NUM_TASKS": "4"} | own).count == 4


@pytest.mark.parametrize(
    ("fields", "tasks", "message"),
    [
        ({}, "2x", "variable SLURM_STEP_NUM_TASKS='2x' must be a nu"),
        ({}, "3", r"4 devices cannot .* Nearest valid: 3 or 6"),
        (
            {"mesh.stage": 4, "mesh.data": 1000},
            "4",
            "^mesh.stage=4 x mesh.data=1000 = 4000 devices are more than 512 for each of distribut"
            "ed.num_processes=4. Nearest valid: mesh.stage=2 or mesh.data=512.$",
        ),
        ({"distributed.coordinator": "a:1"}, None, r"num_processes \(now None\).*launcher"),
    ],
)
def test_processes_that_do_not_fit_are_refused_before_jax_starts(make, fields, tasks, message):
    variables = {"SLURM_STEP_NUM_TASKS": tasks, "SLURM_PROCID": "0"} if tasks else {}
    with pytest.raises(errors.ConfigError, match=message):
        distributed.find_processes(make(fields), variables)


def test_a_launcher_without_an_address(monkeypatch):
    def initialize(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    with pytest.raises(errors.ConfigError, match=r"--distributed\.coordinator HOST:PORT"):
        distributed.start(distributed.Processes(2, 0), run="runs/a", patience_seconds=60)


# Launchers: they start what the trainer accepts, and restart what can be restarted.


def _check_process(options, *, count, number, coordinator, gpus):
    found = command_line.parse(options)
    assert found.resume
    assert not found.failures
    processes = distributed.find_processes(found.config, {})
    assert processes == distributed.Processes(count, number, coordinator)
    assert found.config.mesh.num_devices == gpus * count


def test_the_kubernetes_manifest_starts_every_process_of_the_mesh(monkeypatch):
    monkeypatch.chdir(TOP)
    manifest = yaml.safe_load((CONFIGS / "kubernetes" / "jobset.yaml").read_text())
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    program, script, *options = container["command"]
    assert (program, script) == (".venv/bin/python", "train/train.py")
    # A pod's name is that of its job set, job, replica and index; its domain is the job set.
    own, port = manifest["metadata"]["name"], container["ports"][0]["containerPort"]
    first = f"{own}-{replicated['name']}-0-0.{own}:{port}"
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    for number in range(job["completions"]):
        given = [option.replace("$(JOB_COMPLETION_INDEX)", str(number)) for option in options]
        count = job["parallelism"]
        _check_process(given, count=count, number=number, coordinator=first, gpus=gpus)
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2]  # and so not errors.RESTART


def _script(path: Path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_the_skypilot_task_starts_every_process_of_the_mesh(monkeypatch, tmp_path):
    task = yaml.safe_load((CONFIGS / "skypilot" / "train.yaml").read_text())
    _script(tmp_path / ".venv" / "bin" / "python", 'printf "%s\\n" "$@"')
    monkeypatch.chdir(TOP)
    gpus, count = int(task["resources"]["accelerators"].partition(":")[2]), task["num_nodes"]
    for number in range(count):
        variables = {
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "SKYPILOT_NUM_NODES": str(count),
            "SKYPILOT_NODE_RANK": str(number),
        }
        done = finish(start("bash", "-c", task["run"], folder=tmp_path, **variables))
        script, *options = done.out.splitlines()
        assert script == "train/train.py"
        _check_process(options, count=count, number=number, coordinator="10.0.0.1:8476", gpus=gpus)
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [errors.RESTART]}


@pytest.mark.parametrize(
    ("status", "restarts", "is_queued"),
    [
        *((0, 0, False), (75, 0, True), (70, 0, True), (137, 3, True)),
        *((75, 10, False), (1, 1, False), (2, 0, False)),
    ],
)
def test_the_slurm_script_continues_and_queues_again_what_can_go_on(
    tmp_path, status, restarts, is_queued
):
    _script(tmp_path / "srun", f'echo srun "$@"\nexit {status}')
    _script(tmp_path / "scontrol", 'echo scontrol "$@"')
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    variables |= {"SLURM_RESTART_COUNT": str(restarts), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = "bash", CONFIGS / "slurm.sh", "--config", "my.yaml"
    done = finish(start(*command, **variables), status)
    assert done.err == ""
    started, *after = done.out.splitlines()
    resumed = " --resume" if restarts else ""
    assert started.endswith(f"train/train.py --config my.yaml{resumed}")
    assert after == (["scontrol requeue 7"] if is_queued else [])


# Processes meet, and those that do not come are named to all others.


def _meet(numbers, *, count, seconds):
    """What each of these processes finds."""
    coordinator = free_address()

    def one(number):
        distributed.meet(coordinator, run="runs/a", count=count, number=number, seconds=seconds)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return [future.exception() for future in [pool.submit(one, n) for n in numbers]]


@pytest.mark.parametrize("host", LOOPBACK)
def test_all_have_come_whoever_else_connects(host, monkeypatch):
    """Strangers say nothing, or numbers; a process of another run is told that this is not its."""
    monkeypatch.setattr(calls, "_TOKEN_SECONDS", 0.5)
    with calls.listen(host) as probe:
        address = probe.getsockname()[:2]

    def meet(number, run="runs/a", seconds=None):
        given = {"run": run, "count": 4, "number": number, "seconds": seconds or limits.hang()}
        return pool.submit(distributed.meet, calls.written(address), **given)

    with concurrent.futures.ThreadPoolExecutor() as pool, contextlib.ExitStack() as open_:
        first = meet(0)
        for said in (b"", b"1", b"-1", b"99", b"2\n", b"3" * 64, b"GET / HTTP/1.1\r\n\r\n", b""):
            open_.enter_context(_connected(address)).sendall(said)
        other = meet(1, "runs/b", seconds=1).exception()
        assert not first.done()
        found = [future.exception() for future in [*map(meet, (2, 1, 3)), first]]
    assert found == [None] * 4
    named = f"; what answers at {calls.written(address)} is another run or program. Start all"
    assert other.missing == (0,)
    assert named in str(other)


def _connected(address):
    until = time.monotonic() + limits.hang()
    while time.monotonic() < until:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(address)
        time.sleep(0.01)
    raise TimeoutError


def test_a_number_that_comes_twice_is_named():
    found = _meet([0, 1, 1], count=3, seconds=2)
    assert found[0].missing == (2,)
    assert "have come" not in str(found[0])
    assert (
        "within 2 s (distributed.patience_seconds), but several as 1 (distributed.process_id)."
        in (str(found[0]))
    )
    (refused,) = (error for error in found[1:] if isinstance(error, errors.ConfigError))
    assert "distributed.process_id=1: another process of this run has this number" in str(refused)


def test_who_came_and_ended_is_waited_for(monkeypatch):
    """Such as a process that its launcher has started anew."""
    coordinator, call = free_address(), calls.call

    def ended(*arguments, **fields):
        raise ConnectionResetError if call(*arguments, **fields).close() is None else AssertionError

    with concurrent.futures.ThreadPoolExecutor() as pool:
        given = {"run": "runs/a", "count": 2, "seconds": limits.hang()}
        first = pool.submit(distributed.meet, coordinator, number=0, **given)
        with monkeypatch.context() as patch:
            patch.setattr(calls, "call", ended)
            with pytest.raises(errors.MissingProcessError):
                distributed.meet(coordinator, number=1, **(given | {"seconds": 1}))
        time.sleep(0.5)
        assert not first.done()
        distributed.meet(coordinator, number=1, **given)
        assert first.result() is None


def test_a_port_that_is_taken_is_named():
    with calls.listen() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.ConfigError, match=rf"coordinator=h:{port}: process 0 cannot li"):
            distributed.meet(f"h:{port}", run="runs/a", count=2, number=0, seconds=1)


def test_those_that_have_not_come_are_named_to_all():
    found = _meet([0, 2], count=4, seconds=1)
    assert all(isinstance(error, errors.MissingProcessError) for error in found), found
    assert [error.missing for error in found] == [(1, 3), (1, 3)]
    assert "processes 1, 3 of this run have not come within 1 s" in str(found[0])
    (error,) = _meet([1], count=2, seconds=0.5)
    assert error.missing == (0,)


class _EndedError(Exception):
    """In place of the end of the process."""


def _watched(monkeypatch, *, patience, step_seconds, alive, beats=lambda clock: {}):
    """Whom a process names, and after how long, when some of four say nothing from now on."""
    clock = [1000.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])

    def end(_, named, *, reason, alive=False):
        raise _EndedError(named, reason, clock[0] - 1000)

    monkeypatch.setattr(Watchdog, "_end", end)
    dog = Watchdog(patience)
    dog._heard = {n: dog._heard.get(0)._replace(at=clock[0]) for n in range(4)}
    dog._is_stepping, dog._longest = True, step_seconds

    class Seconds:
        """In place of the event: a second passes, and who is alive has said so."""

        def wait(self, _):
            clock[0] += 1
            for n, heard in dog._heard.items():
                if n in alive or not dog._is_late(watchdog._GONE_SECONDS):
                    beat = beats(clock[0]).get(n, heard.beat)
                    dog._heard[n] = watchdog._Heard(beat, clock[0])
            if 0 in alive:
                dog._answered = clock[0]
            return False

    dog._ended = Seconds()
    with pytest.raises(_EndedError) as caught:
        dog._watch()
    return caught.value.args


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize(("patience", "step_seconds"), [(8, 0.1), (8, 4.5), (30, 1), (60, 30)])
def test_a_frozen_process_is_silent_however_long_steps_are(
    monkeypatch, frozen, patience, step_seconds
):
    alive = {*range(4)} - {frozen}
    given = {"patience": patience, "step_seconds": step_seconds, "alive": alive}
    named, reason, after = _watched(monkeypatch, **given)
    assert (named, reason) == ([frozen], "no answer")
    assert patience < after < patience + 7


def test_those_behind_are_named_where_all_are_alive(monkeypatch):
    def beats(clock):
        return {n: watchdog.Beat(int(clock), "step 8", 8 if n == 3 else 7) for n in range(4)}

    found = _watched(monkeypatch, patience=9, step_seconds=2, alive={*range(4)}, beats=beats)
    assert found == ([0, 1, 2], "no progress", 12)


def test_what_strangers_write_to_the_store_ends_no_watch(monkeypatch):
    monkeypatch.setattr(watchdog, "_BEAT_SECONDS", 0.01)
    junk = ["", "3", "null", "[" * 9999, '{"step": "x"}', '{"missing": 4}', '{"missing": ["a"]}']
    key, asked = watchdog._KEY, threading.Semaphore(0)
    messages = [(f"{key}0", text) for text in junk]
    messages += [(f"{key}{name}", '{"step": 1}') for name in ("", "x", "7", "-1", "1/1")]

    class Store:
        def key_value_set(self, *_, **__):
            asked.release()

        def key_value_dir_get(self, _):
            return [*messages, (f"{key}0", '{"beat": 5, "step": 6}')]

    dog = Watchdog(60)
    dog._client, dog._asks = Store(), True
    thread = threading.Thread(target=dog._say)
    thread.start()
    for _ in range(3):
        assert asked.acquire(timeout=limits.hang())
    dog._ended.set()
    thread.join()
    assert dog._heard[0].beat == watchdog.Beat(5, step=6)


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
    monkeypatch.setattr(watchdog, "_coordinator", lambda: ("localhost", 1))  # nobody listens there
    dog, now = Watchdog(60), time.monotonic()
    dog._answered = now - silent
    heard = dog._heard[0]
    dog._heard = {n: heard._replace(at=now - 9 * (n in frozen)) for n in range(4)}
    with pytest.raises(_EndedError):
        dog._aborted()
    assert found == [(named, "connection lost")]


# SIGTERM ends a process whose main thread XLA blocks, and lets another one finish its step.

BEGIN = """
import ctypes, threading, time
from train import stop

def block(seconds):
    # As XLA does where other devices never come, it waits for a lock and lets no handler run.
    lock, library = ctypes.create_string_buffer(256), ctypes.CDLL(None)
    library.pthread_mutex_lock(lock)
    threading.Timer(0.2, print, ["ready"], {"flush": True}).start()
    threading.Timer(seconds, library.pthread_mutex_unlock, [lock]).start()
    library.pthread_mutex_lock(lock)

request = stop.StopRequest()
assert not request.after(1)
"""
BLOCKED = "block(1e5)"
STEPS = """
time.sleep(1.5)
request.after(2)
block(0.6)
assert request.after(3)
time.sleep(2)  # saving may take longer than a step
print("saved")
"""
EVALUATION = """
print("ready", flush=True)
for _ in range(12):
    time.sleep(0.1)
assert request.after(2)
print("saved")
"""


def _signalled(code: str, *numbers: int, grace: float, status: int | None) -> Finished:
    """Sends signals to a process once it is ready."""
    process = start("python", "-c", f"{BEGIN}\nstop.GRACE_SECONDS = {grace}\n{code}")
    assert process.stdout.readline() == "ready\n"
    for number in numbers:
        process.send_signal(number)
    return finish(process, status)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_blocked_process_ends_after_the_grace_time(number):
    done = _signalled(BLOCKED, number, grace=0.2, status=128 + number)
    assert "error: a request to stop has been blocked for 0 s" in done.err


def test_a_second_signal_ends_a_blocked_process_at_once():
    # Two of the same kind may arrive as one.
    done = _signalled(BLOCKED, signal.SIGTERM, signal.SIGINT, grace=1e5, status=None)
    assert done.status > 128


@pytest.mark.parametrize(("code", "grace"), [(STEPS, 0.0), (EVALUATION, 0.2)])
def test_a_long_step_an_evaluation_and_saving_have_time(code, grace):
    """A step as long as others, and more than the grace time where handlers can run."""
    assert _signalled(code, signal.SIGTERM, grace=grace, status=0).out == "saved\n"
