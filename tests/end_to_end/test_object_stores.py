"""Runs in an object store, against moto's server of the S3 interface.

Losses and weights equal those of an unbroken run in a folder, to the bit.
"""

import functools
import logging
import os
import shutil
import signal
import urllib.request

import pytest
from command import (
    CHECKPOINT_EVERY,
    NUM_STEPS,
    assert_same_run,
    finish,
    flip_a_bit,
    kill_when,
    saved,
    steps,
)
from moto.server import ThreadedMotoServer

from train.errors import ConfigError
from train.object_store import ObjectStore, StoreError
from train.runs import object_lock, run_folder
from train.runs.mirror import Copy, Mirror
from train.runs.object_lock import ObjectLock

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def bucket():
    """The URL of a bucket in a store of this machine, which the environment leads to."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (keys | {"AWS_ENDPOINT_URL": address}).items():
            patch.setenv(name, value)
        yield "s3://bucket"
    server.stop()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch, tmp_path):
    quick = functools.partial(ObjectLock, heartbeat_seconds=0.1, patience_seconds=0.5)
    monkeypatch.setattr(run_folder, "ObjectLock", quick)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def _downloaded(url, folder):
    """Every object of a run, as files."""
    store = ObjectStore(url)
    for name in store.names():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(store.read(name).content)
    return folder


def _checkpoints(store):
    return {name.split("/")[1] for name in store.names() if name.startswith("checkpoints/")}


def test_a_run_is_killed_continued_damaged_and_read(toy_trainer, unbroken_toy, bucket, tmp_path):
    url = f"{bucket}/runs/one"
    store = ObjectStore(url)
    longer = "--train.steps", 400, "--train.keep-every", 3
    process = toy_trainer.start("--run-dir", url, *longer)

    def has_saved():
        return f"checkpoints/{CHECKPOINT_EVERY}/checksums.json" in store.names()

    assert kill_when(process, has_saved, number=signal.SIGKILL), str(finish(process, None))
    finish(process, -signal.SIGKILL)
    later = _checkpoints(store) - {str(CHECKPOINT_EVERY)}
    store.delete(name for name in store.names() if name.split("/")[1:2] in [[n] for n in later])
    store.write("checkpoints/6/data/metadata", b"{}")

    fresh = toy_trainer.run("--run-dir", url, status=2)
    assert f"run_dir={url} already holds a run (config.yaml, " in fresh.err
    resumed = toy_trainer.run("--run-dir", url, "--resume")
    assert f"taking over the lock of process {process.pid} on " in resumed.out
    assert f"ignoring {url}/checkpoints/6, which a run has not written to its end" in resumed.out
    assert f"resuming {url} at step {CHECKPOINT_EVERY}" in resumed.out
    assert_same_run(_downloaded(url, tmp_path / "resumed"), unbroken_toy)
    assert _checkpoints(store) == {str(step) for step in saved(unbroken_toy)}
    assert list(tmp_path.glob("jaxpipe-*/*")) == []  # no copy is left

    path = flip_a_bit(tmp_path / "resumed" / "checkpoints" / str(NUM_STEPS))
    name = f"checkpoints/{NUM_STEPS}/{path}"
    store.write(name, (tmp_path / "resumed" / name).read_bytes())
    again = toy_trainer.run("--run-dir", url, "--resume")
    assert f"skipping checkpoint {NUM_STEPS}: {path} does not have its checksum" in again.out
    assert_same_run(_downloaded(url, tmp_path / "again"), unbroken_toy)
    assert f"checkpoints/{NUM_STEPS}.damaged/{path}" in store.names()

    evaluated = toy_trainer.run("--evaluate", "--init-from", f"{url}@{NUM_STEPS}")
    assert f", step {NUM_STEPS}" in evaluated.out
    assert f"held-out loss {steps(unbroken_toy)[-1]['eval_loss']:.4f}" in evaluated.out


def test_a_store_that_is_not_there_is_said_at_once(toy_trainer, bucket):
    for url, said in (
        ("s3://buckets/one", "cannot be reached or used (NOT_FOUND: "),
        ("s3:///one", "names no bucket. Name a bucket that exists, "),
        ("az://bucket/one", "is in no store that is known: az://. Nearest valid: s3"),
    ):
        finished = toy_trainer.run("--run-dir", url, status=2)
        assert f"error: run_dir={url} {said}" in finished.err


# Files of a run, without the run.


@pytest.fixture
def store(bucket, request):
    return ObjectStore(f"{bucket}/stores/{request.node.name}")


@pytest.fixture
def make(store):
    """Makes locks that soon find a silent one stale; all are released."""
    locks = []

    def make(**options):
        options = {"heartbeat_seconds": 0.05, "patience_seconds": 0.5} | options
        locks.append(ObjectLock(store, say=said.append, **options))
        return locks[-1]

    said = make.said = []
    yield make
    for lock in locks:
        lock.release()


@pytest.fixture
def lock(make):
    lock = make()
    lock.acquire()
    return lock


def test_names_that_are_no_paths_in_the_folder_are_not_copied(store, tmp_path):
    step = "checkpoints/3"
    whole = f"{step}/checksums.json"
    for name in ("", f"{step}/", f"{step}/../../../up", whole, "a", "b.partial"):
        store.write(name, b"{}")
    copy = Copy(store, tmp_path / "copy")
    copy.fetch(3)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    found = {str(path.relative_to(tmp_path)) for path in files}
    assert found == {f"copy/{whole}", "copy/a"}


def test_a_checkpoint_that_takes_the_place_of_another_is_written(store, lock, tmp_path):
    """As after a damaged one was moved aside; what a killed process left is deleted."""
    for name in ("3/checksums.json", "6/half", "9/half"):
        store.write(f"checkpoints/{name}", b"{}")
    said, copy = [], Copy(store, tmp_path / "copy")
    step = tmp_path / "copy" / "checkpoints" / "3"
    shutil.rmtree(step)
    with Mirror(copy, lock, said.append) as mirror:
        for content, name in (("old", "3.damaged"), ("new", "6")):
            step.mkdir()
            (step / "checksums.json").write_text("{}")
            (step / content).write_text(content)
            mirror.sync()
            step.rename(step.with_name(name))
    assert said == [
        f"ignoring {store.url}/checkpoints/{n}, which a run has not written to its end"
        for n in (6, 9)
    ]
    assert [name for name in store.names() if name.startswith("checkpoints/")] == [
        *("checkpoints/3.damaged/checksums.json", "checkpoints/3.damaged/old"),
        *("checkpoints/6/checksums.json", "checkpoints/6/new"),
    ]


def test_an_outage_at_the_end_keeps_the_copy(store, lock, tmp_path, monkeypatch):
    def fail(*_):
        raise StoreError("it is out of reach")

    file = tmp_path / "copy" / "metrics.jsonl"
    mirror = Mirror(Copy(store, tmp_path / "copy"), lock, pytest.fail).__enter__()
    file.write_text("{}")
    monkeypatch.setattr(ObjectStore, "write", fail)
    with pytest.raises(ConfigError, match=r"lacks the end of this run: it is out of reach\. T"):
        mirror.__exit__(None, None, None)
    assert file.exists()


# Its lock.


def test_one_run_holds_it_until_it_ends(make):
    first, second = make(), make()
    first.acquire()
    with pytest.raises(ConfigError, match=rf"is in use by process {os.getpid()} on "):
        second.acquire()
    first.release()
    second.acquire()


def test_a_silent_one_is_taken_over_and_its_run_ends(make, monkeypatch):
    ended = []
    monkeypatch.setattr(object_lock, "end_process", lambda url, who: ended.append(who))
    first, second = make(heartbeat_seconds=3600), make()
    first.acquire()
    second.acquire()
    assert "showed no sign of life" in make.said[-1]
    first.renew()
    assert ended == [str(second.owner)]


def test_a_run_takes_it_at_once_from_a_process_that_it_has_given_up(make, monkeypatch):
    ended = []
    monkeypatch.setattr(object_lock, "end_process", lambda url, who: ended.append(who))
    first, second = make(heartbeat_seconds=3600), make()
    first.acquire()
    second.acquire(first.owner.token)
    assert not any("waiting" in line for line in make.said)
    first.renew()
    assert ended == [str(second.owner)]


def test_of_two_that_find_a_silent_one_one_takes_it(make, monkeypatch):
    make(heartbeat_seconds=3600).acquire()
    second, third = make(), make()
    replace = ObjectStore.replace

    def late(self, *args, **kwargs):
        monkeypatch.setattr(ObjectStore, "replace", replace)
        third.acquire()
        return replace(self, *args, **kwargs)

    monkeypatch.setattr(ObjectStore, "replace", late)
    with pytest.raises(ConfigError, match="is in use by process"):
        second.acquire()


def test_a_repeated_heartbeat_is_its_own(make, monkeypatch):
    monkeypatch.setattr(object_lock, "end_process", pytest.fail)
    lock = make(heartbeat_seconds=3600)
    lock.acquire()
    old = lock._version
    lock.renew()
    lock._version = old  # as if the answer was lost
    lock.renew()
    lock.renew()
