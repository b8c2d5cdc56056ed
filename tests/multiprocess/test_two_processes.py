"""Two processes of four simulated devices on loopback: one run, the losses of one process."""

import json
import os
import re
import shutil
import sys

import jax
import numpy as np
import pytest
import yaml
from command import (
    CHECKPOINT_EVERY,
    NUM_STEPS,
    TOP,
    Finished,
    back_to,
    finish,
    flip_a_bit,
    free_address,
    saved,
    start,
    steps,
    weights,
)
from jax.tree import leaves_with_path

from models import hugging_face
from train import export
from train.errors import Failure
from train.runs.run_lock import RunLock

pytestmark = pytest.mark.end_to_end

# Eight devices: each process holds a data shard, and so a pipeline of its own.
_LAYOUT = ("--mesh.stage=4", "--mesh.data=2")
# The losses are equal to the bit here; the gradients' sums are added in another order.
_TOLERANCE = 1e-5


def _run_two(toy_trainer, *options, status=0) -> list[Finished]:
    """Runs a command as two processes; when one fails, neither is left."""
    with toy_trainer.processes(2, *_LAYOUT, *options) as processes:
        return [finish(process, status) for process in processes]


@pytest.fixture(scope="module")
def alone(toy_trainer, tmp_path_factory):
    """The same run by one process of eight devices."""
    run = tmp_path_factory.mktemp("alone") / "run"
    toy_trainer.run("--run-dir", run, *_LAYOUT, "--train.keep", 9)
    return run


def _assert_close(run, other):
    for pair in zip(steps(run), steps(other), strict=True):
        record, expected = ({str(path): v for path, v in leaves_with_path(r)} for r in pair)
        assert record == pytest.approx(expected, rel=_TOLERANCE)


@pytest.mark.slow
def test_two_processes_skip_the_same_damaged_checkpoint_and_train_as_one(
    toy_trainer, alone, tmp_path
):
    run = shutil.copytree(alone, tmp_path / "run")
    back_to(run, 2 * CHECKPOINT_EVERY)
    flip_a_bit(run / "checkpoints" / str(2 * CHECKPOINT_EVERY))
    first, second = _run_two(toy_trainer, "--run-dir", run, "--resume")
    # Process 0 alone speaks, and both write checkpoints.
    assert "(cpu, 2 processes)" in first.out
    assert f"skipping checkpoint {2 * CHECKPOINT_EVERY}: state/" in first.out
    assert f"resuming {run} at step {CHECKPOINT_EVERY}" in first.out
    assert "held-out loss" in first.out
    assert "loss" not in second.out
    assert "Traceback" not in first.err + second.err
    for pair in zip(steps(run), steps(alone), strict=True):
        record, expected = ({str(path): v for path, v in leaves_with_path(r)} for r in pair)
        assert record == pytest.approx(expected, rel=_TOLERANCE)
    assert saved(run)[-1] == NUM_STEPS
    for (name, one), (_, two) in zip(weights(run, 9), weights(alone, 9), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_one_process_continues_what_two_have_saved(toy_trainer, tmp_path):
    """The checkpoint of two has its checksums as well."""
    run = tmp_path / "run"
    _run_two(toy_trainer, "--run-dir", run, "--train.steps", NUM_STEPS)
    more = "--train.steps", NUM_STEPS + 2
    finished = toy_trainer.run("--run-dir", run, "--resume", *_LAYOUT, *more)
    assert f"resuming {run} at step {NUM_STEPS}" in finished.out
    assert len(steps(run)) == NUM_STEPS + 2
    assert "skipping" not in finished.out
    assert "carries no checksums" not in finished.out


@pytest.mark.slow
def test_two_processes_stream_what_one_does(trainer, tmp_path):
    """A checkpoint of two has the places of the readers of both; one process continues it."""
    rows, one, two = (tmp_path / name for name in ("rows", "one", "two"))
    rows.mkdir()
    for number, path in enumerate(sorted(trainer.folder.glob("text/*.txt"))):
        (rows / f"{number}.jsonl").write_text(json.dumps({"text": path.read_text()}))
    options = *_LAYOUT, "--data.rows", rows
    trainer.run("--run-dir", one, *options)
    with trainer.processes(2, "--run-dir", two, *options) as processes:
        for process in processes:
            finish(process)
    _assert_close(two, one)
    back_to(two, 9)
    trainer.run("--run-dir", two, "--resume", *options)
    _assert_close(two, one)


@pytest.mark.slow
def test_processes_that_cannot_start_do_not_wait(toy_trainer, tmp_path):
    run = tmp_path / "run"
    for finished in _run_two(toy_trainer, "--run-dir", run, "--pipeline.microbatches=3", status=2):
        assert "pipeline.microbatches=3 does not divide train.batch_size=8" in finished.err
    lock = RunLock(run, say=print)
    lock.acquire()
    try:
        for finished in _run_two(toy_trainer, "--run-dir", run, "--resume", status=2):
            assert f"error: run_dir={run} is in use by process {os.getpid()} on " in finished.err
    finally:
        lock.release()
    assert not run.exists()


@pytest.mark.slow
def test_pods_of_the_jobset_train_and_publish(trainer, tmp_path):
    """With the variables that the manifest sets and no others; each writes its stages' layers."""
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    manifest = yaml.safe_load((TOP / "configs" / "kubernetes" / "jobset.yaml").read_text())
    (job,) = manifest["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    names = [variable["name"] for variable in container["env"]]
    assert names == ["JOB_COMPLETION_INDEX"]
    run, served, address = tmp_path / "run", tmp_path / "served", free_address()
    here = {
        ".venv/bin/python": sys.executable,
        "train/train.py": TOP / "train" / "train.py",
        "--config": f"--config={trainer.config}",
        "--run-dir": f"--run-dir={run}",
        "--data.path": f"--data.path={trainer.folder / 'data'}",
        "--distributed.coordinator": f"--distributed.coordinator={address}",
    }
    own = [here.get(word.partition("=")[0], word) for word in container["command"]]
    processes = []
    try:
        for number in map(str, range(2)):
            words = [str(word).replace("$(JOB_COMPLETION_INDEX)", number) for word in own]
            command = [*words, f"--publish.path={served}", "--publish.every=5"]
            variables = f"JOB_COMPLETION_INDEX={number}"
            processes.append(start("env", "-i", variables, *command))
        for process in processes:
            finish(process)
    finally:
        for process in processes:
            process.kill()
    assert len(steps(run)) == NUM_STEPS
    assert sorted(path.name for path in served.iterdir()) == ["latest", "step_10", "step_5"]
    index = json.loads((served / "latest" / "model.safetensors.index.json").read_text())
    files = {re.sub(r".*layers\.(\d).*", r"\1", n): f for n, f in index["weight_map"].items()}
    of_stages = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert [files[layer] for layer in "0123"] == [name for name in of_stages for _ in range(2)]
    export.export(export.Options(run=str(run), out=tmp_path / "exported"))
    expected, read = (hugging_face.load(f) for f in (tmp_path / "exported", served / "latest"))
    jax.tree.map(np.testing.assert_array_equal, read.params, expected.params)


_DIFFER = """
import sys
from train.processes import distributed
from train.errors import ConfigError, Failure
number = int(sys.argv[2])
distributed.start(distributed.Processes(2, number, sys.argv[1]), run="a", patience_seconds=60)
print(distributed.from_first(lambda: {"number": number, "text": "\u00e4" * 9}), flush=True)
def refuse():
    raise ConfigError([Failure(f"of {number}", ("a",)), Failure("more", ())])
try:
    distributed.from_first(refuse)
except ConfigError as error:
    print(error.failures, flush=True)
distributed.from_first(lambda: 1 // number)
"""


def test_what_processes_would_decide_differently_the_first_decides():
    command = "python", "-c", _DIFFER, free_address()
    first, second = (
        finish(process, 1) for process in [start(*command, number) for number in range(2)]
    )
    for finished in (first, second):
        assert [line for line in finished.out.splitlines() if "Gloo" not in line] == [
            str({"number": 0, "text": "\u00e4" * 9}),
            str((Failure("of 0", ("a",)), Failure("more", ()))),
        ]
    assert "ZeroDivisionError" in first.err
    # The second one does not wait for the first, which has failed.
    assert "RuntimeError: process 0 failed: ZeroDivisionError" in second.err
