"""train.py as a user starts it: what a run leaves, and that nothing can break one."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import time

import limits
import pytest
import yaml
from command import (
    CHECKPOINT_EVERY,
    NUM_STEPS,
    assert_same_run,
    back_to,
    finish,
    flip_a_bit,
    kill_when,
    num_lines,
    saved,
    steps,
)

from train.run_lock import LOCK_FILE

pytestmark = pytest.mark.end_to_end


def _copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def test_every_checkpoint_competes_for_the_best(unbroken_toy):
    """Also those of steps that are not evaluated for the record."""
    folder = unbroken_toy / "checkpoints"
    losses = {
        step: json.loads((folder / str(step) / "metrics" / "metrics").read_text())["eval_loss"]
        for step in saved(unbroken_toy)
    }
    recorded = {r["step"]: r["eval_loss"] for r in steps(unbroken_toy) if "eval_loss" in r}
    assert losses.keys() - recorded.keys()
    assert all(map(math.isfinite, losses.values()))
    assert losses[NUM_STEPS] == pytest.approx(recorded[NUM_STEPS])


def test_a_run_leaves_everything_it_should(unbroken, trainer):
    run, finished = unbroken
    assert finished.err == ""
    assert "schedule 1f1b, 2 microbatches, remat none, ZeRO-3" in finished.out
    assert f"step {NUM_STEPS}/{NUM_STEPS}  loss " in finished.out
    assert "held-out loss" in finished.out
    assert "a unigram model of the same tokens:" in finished.out
    records = steps(run)
    assert len(records) == NUM_STEPS
    assert [r["step"] for r in records if "eval_loss" in r] == [5, 10]
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["eval_loss"] < records[4]["eval_loss"]
    assert saved(run) == [9, 10]
    resolved = yaml.safe_load((run / "config.yaml").read_text())
    assert resolved["run_dir"] == str(run)
    assert resolved["model"]["width"] == 16
    assert resolved["optimizer"]["beta1"] == 0.9
    assert "<svg" in (run / "schedule.svg").read_text()
    assert (run / "sample.txt").read_text().startswith("the ")
    (events,) = (run / "tensorboard").iterdir()
    assert b"grad_norm" in events.read_bytes()


def test_a_mesh_without_devices_is_refused_with_all_else_that_is_wrong(trainer, tmp_path):
    finished = trainer.run(
        *("--mesh.stage", 0, "--mesh.data", -1, "--train.steps", -3, "--run-dir", tmp_path / "run"),
        status=2,
    )
    assert finished.err.splitlines() == [
        "error: mesh.stage=0 must be at least 1. Nearest valid: 1.",
        "error: mesh.data=-1 must be at least 1. Nearest valid: 1.",
        "error: train.steps=-3 must be at least 1. Nearest valid: 1.",
    ]
    assert not (tmp_path / "run").exists()


def test_resume_skips_half_a_line_and_a_damaged_checkpoint(unbroken, trainer, tmp_path):
    """One flipped bit of the newest checkpoint's weights; after the end nothing is left to do;
    then both checkpoints are damaged."""
    run = _copy(unbroken[0], tmp_path)
    damaged = flip_a_bit(run / "checkpoints" / str(NUM_STEPS))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    finished = trainer.run("--run-dir", run, "--resume")
    assert f"skipping checkpoint {NUM_STEPS}: state/" in finished.out
    assert f"it is kept as {NUM_STEPS}.damaged" in finished.out
    assert f"resuming {run} at step 9" in finished.out
    assert_same_run(run, unbroken[0])
    assert (run / "checkpoints" / f"{NUM_STEPS}.damaged" / damaged).exists()

    sample = (run / "sample.txt").read_text()
    finished = trainer.run("--run-dir", run, "--resume")
    assert f"resuming {run} at step {NUM_STEPS}" in finished.out
    assert_same_run(run, unbroken[0])
    assert (run / "sample.txt").read_text() == sample

    flip_a_bit(run / "checkpoints" / str(NUM_STEPS))
    (run / "checkpoints" / "9" / "data" / "metadata").write_text("")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    finished = trainer.run("--run-dir", run, "--resume", status=2)
    assert finished.err.startswith(f"error: run_dir={run} has no whole checkpoint to resume from (")
    assert f"checkpoint {NUM_STEPS}: state/" in finished.err
    assert "checkpoint 9: data/metadata does not have its checksum" in finished.err
    assert finished.err.count("\n") == 1, finished.err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_sigkill_at_random_moments(unbroken_toy, toy_trainer, tmp_path):
    """A run that is killed and continued, four times."""
    random_, run = random.Random(0), tmp_path / "run"
    for first in (0, 2, 4, 7):
        goal, delay = random_.randint(first, first + 1), random_.uniform(0, 0.05)
        process = toy_trainer.start("--config", toy_trainer.config, "--run-dir", run, "--resume")
        kill_when(
            process,
            lambda goal=goal: num_lines(run) >= goal,
            number=signal.SIGKILL,
            delay_seconds=delay,
        )
        assert finish(process).status == -signal.SIGKILL
    toy_trainer.run("--run-dir", run, "--resume")
    assert_same_run(run, unbroken_toy)


def test_sigkill_during_a_checkpoint_write(unbroken_toy, toy_trainer, tmp_path):
    """Half a checkpoint and the lock of the killed run are removed by the next one."""
    run = tmp_path / "run"
    folder = run / "checkpoints"

    def is_writing(step):
        names = os.listdir(folder) if folder.is_dir() else []
        return any(name.startswith(f"{step}.") for name in names)

    def assert_continues(killed, finished, step):
        assert f"removed the lock of process {killed.pid} on " in finished.out
        assert "waiting" not in finished.out
        assert f"resuming {run} at step {step}" in finished.out

    killed = None
    for step in (CHECKPOINT_EVERY, 2 * CHECKPOINT_EVERY):
        process = toy_trainer.start("--config", toy_trainer.config, "--run-dir", run, "--resume")
        assert kill_when(process, lambda step=step: is_writing(step), number=signal.SIGKILL)
        finished = finish(process)
        assert finished.status == -signal.SIGKILL
        if killed:
            assert_continues(killed, finished, step - 2 * CHECKPOINT_EVERY)
        assert step not in saved(run)
        left = [path.name for path in folder.iterdir() if not path.name.isdigit()]
        assert left  # it was killed while it wrote
        assert (run / LOCK_FILE).exists()
        killed = process
    assert_continues(killed, toy_trainer.run("--run-dir", run, "--resume"), CHECKPOINT_EVERY)
    assert_same_run(run, unbroken_toy)
    assert [path.name for path in folder.iterdir() if not path.name.isdigit()] == []
    assert not (run / LOCK_FILE).exists()


def test_sigterm_saves_and_resume_continues(unbroken_toy, toy_trainer, tmp_path):
    run = tmp_path / "run"
    process = toy_trainer.start("--config", toy_trainer.config, "--run-dir", run)
    assert kill_when(process, lambda: num_lines(run) >= 1, number=signal.SIGTERM)
    finished = finish(process)
    assert finished.status == 0, str(finished)
    (stopped,) = [
        s for s in saved(run) if f"saved step {s}; continue with --resume" in finished.out
    ]
    assert 1 < stopped < NUM_STEPS
    assert len(steps(run)) == stopped
    assert not (run / LOCK_FILE).exists()
    finished = toy_trainer.run("--run-dir", run, "--resume")
    assert f"resuming {run} at step {stopped}" in finished.out
    assert_same_run(run, unbroken_toy)


def test_a_loss_that_is_not_finite_stops_the_run(unbroken_toy, toy_trainer, tmp_path):
    run = _copy(unbroken_toy, tmp_path)
    back_to(run, 9)
    options = ["--optimizer.peak-lr", 1e38, "--train.steps", 20]
    finished = toy_trainer.run("--run-dir", run, "--resume", *options, status=1)
    assert "changed since: optimizer.peak_lr 0.01 -> 1e+38" in finished.out
    assert "error: step 10: the held-out loss is inf; training stopped." in finished.err
    assert "The checkpoint of step 9 is kept; --resume continues from it once" in finished.err
    assert "Traceback" not in finished.err
    # What would only repeat is not started; anything else is.
    again = toy_trainer.run("--run-dir", run, "--resume", *options, status=2)
    assert "was stopped at step 10 (the held-out loss is inf), and would be again" in again.err
    assert again.err.count("\n") == 1, again.err
    assert saved(run) == [9]
    assert not (run / LOCK_FILE).exists()
    toy_trainer.run("--run-dir", run, "--resume")
    assert_same_run(run, unbroken_toy)


def test_a_run_that_lost_its_checkpoints_does_not_start_over(unbroken_toy, toy_trainer, tmp_path):
    """All of the folder, as without the record of older versions, and its contents alone."""
    run = _copy(unbroken_toy, tmp_path)
    before = steps(run)
    back_to(run, 0)
    finished = toy_trainer.run("--run-dir", run, "--resume", status=2)
    assert f"run_dir={run} has done at least {NUM_STEPS} steps, but " in finished.err
    assert "Put its checkpoints back, or name another --run-dir" in finished.err
    assert finished.err.count("\n") == 1, finished.err
    (run / "progress.json").unlink()
    shutil.rmtree(run / "checkpoints")
    assert toy_trainer.run("--run-dir", run, "--resume", status=2).err == finished.err
    assert steps(run) == before


@pytest.mark.parametrize("what", [".", "checkpoints"])
def test_a_run_folder_that_is_removed_ends_the_run_in_an_error(toy_trainer, tmp_path, what):
    run = tmp_path / "run"
    options = ("--config", toy_trainer.config, "--run-dir", run, "--train.steps", 2000)
    process = toy_trainer.start(*options)
    until = time.monotonic() + limits.hang()
    while num_lines(run) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    run.joinpath(what).rename(tmp_path / "aside")
    finished = finish(process)
    assert finished.status == 2, str(finished)
    assert f"error: run_dir={run}" in finished.err
    assert "Traceback" not in finished.err


def _assert_close(run, other):
    for record, expected in zip(steps(run), steps(other), strict=True):
        assert record == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        "--mesh.stage=1 --mesh.data=1 --mesh.context=2 --mesh.tensor=2 --pipeline.remat=full",
        pytest.param(
            "--mesh.stage=4 --mesh.data=1 --pipeline.schedule=gpipe", marks=pytest.mark.slow
        ),
        pytest.param("--mesh.stage=1 --mesh.data=4 --pipeline.zero=1", marks=pytest.mark.slow),
        pytest.param("--mesh.stage=3 --pipeline.zero=0", marks=pytest.mark.slow),
        pytest.param("--pipeline.microbatches=4", marks=pytest.mark.slow),
    ],
)
def test_resume_onto_another_layout(unbroken, trainer, tmp_path, layout):
    run = _copy(unbroken[0], tmp_path)
    back_to(run, 9)
    finished = trainer.run("--run-dir", run, "--resume", *layout.split())
    for option in layout.split():
        path, value = option.removeprefix("--").split("=")
        assert f"changed since: {path} " in finished.out
        assert f" -> {value}" in finished.out
    for record, expected in zip(steps(run), steps(unbroken[0]), strict=True):
        assert record == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_dropout_draws_the_same_after_a_resume(trainer, tmp_path):
    runs = [tmp_path / name for name in ("whole", "broken")]
    for run in runs:
        trainer.run("--run-dir", run, "--model.dropout", 0.2)
    back_to(runs[1], 9)
    trainer.run("--run-dir", runs[1], "--model.dropout", 0.2, "--resume")
    assert_same_run(runs[1], runs[0])


def test_a_checkpoint_that_cannot_be_continued(unbroken, trainer, tmp_path):
    """Another model, and fewer steps than there are."""
    run = _copy(unbroken[0], tmp_path)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    options = "--model.width", 32, "--train.steps", 4
    finished = trainer.run("--run-dir", run, "--resume", *options, status=2)
    assert "model.width=32 is not the model of the checkpoint" in finished.err
    assert "train.steps=4 is less than the 10 steps that run_dir=" in finished.err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_bad_input_ends_with_status_2_and_writes_nothing(trainer, tmp_path):
    run = tmp_path / "run"
    options = ["--pipeline.microbatches", 3, "--model.vocab-size", 7, "--mesh.stage", 99]
    finished = trainer.run("--run-dir", run, "--pipeline.schedule", "1f1", *options, status=2)
    for part in ("microbatches=3", "vocab_size=7", "'1f1'", "num_layers=4 cannot fill"):
        assert part in finished.err
    assert finished.out == ""
    assert not run.exists()


def test_a_run_is_not_written_over(unbroken, trainer):
    run, _ = unbroken
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    finished = trainer.run("--run-dir", run, status=2)
    assert f"run_dir={run} already holds a run" in finished.err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_dry_run_writes_nothing(toy_trainer, tmp_path):
    run = tmp_path / "run"
    slots = "--pipeline.schedule", "zb-v", "--pipeline.weight-slots", "2"
    finished = toy_trainer.run("--run-dir", run, "--dry-run", *slots)
    words = " ".join(finished.out.split())
    assert "in embedding and head. Each device holds " in words
    assert re.search(r"compiling the training step ... compiled in \d+\.\d s", words)
    assert re.search(r"activations kept from F to [BW] │ +\d+\.\d\d │", words)
    assert re.search(r"need [\d.e-]+ GB of memory: this fits, at \d+% of the \d+", words)
    assert "a stage gathers up to 2 chunks of weights and reduces up to 2 of gradients" in words
    assert max(map(len, finished.out.splitlines()[1:])) <= 120  # the first is the library's
    assert "dry run: nothing was trained or written" in finished.out
    assert finished.err == ""
    assert not run.exists()


def test_a_run_goes_on_with_updates_by_chunk(toy_trainer, tmp_path):
    """The losses are those of updates by step, and a dry run says what it saves."""
    layout = "--pipeline.schedule", "modular", "--pipeline.chunks", 2, "--optimizer.clip-norm", 0
    run = tmp_path / "run"
    toy_trainer.run("--run-dir", run, *layout, "--train.keep", 4)
    other = shutil.copytree(run, tmp_path / "other")
    back_to(other, CHECKPOINT_EVERY)
    by_chunk = *layout, "--pipeline.update", "chunk"
    finished = toy_trainer.run("--run-dir", other, "--resume", *by_chunk)
    assert "changed since: pipeline.update step -> chunk" in finished.out
    assert finished.err == ""
    for before, record in zip(steps(run), steps(other), strict=True):
        assert record["loss"] == pytest.approx(before["loss"], rel=1e-5)
        assert record["metrics"] == pytest.approx(before["metrics"], rel=1e-5)
        assert ("grad_norm" in record) == (record["step"] <= CHECKPOINT_EVERY)
        assert ("eval_metrics" in record) == ("eval_loss" in record)
    finished = toy_trainer.run("--run-dir", other, "--dry-run", *by_chunk)
    words = " ".join(finished.out.split())
    assert "pipeline.update=chunk: gradients of 1 of 2 chunks are kept at once" in words
    interleaved = "--pipeline.schedule", "interleaved", "--pipeline.microbatches", 4
    options = *by_chunk, *interleaved
    finished = toy_trainer.run("--run-dir", tmp_path / "third", *options, status=2)
    assert "pipeline.schedule='interleaved' comes back to a chunk" in finished.err


def _small_disk(folder, kilobytes):
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(["mount", *options], check=False).returncode:
        pytest.skip("a small disk needs the right to mount one")


def test_a_full_disk(unbroken, trainer, tmp_path):
    size = sum(path.stat().st_size for path in unbroken[0].rglob("*")) // 1000
    disk = tmp_path / "disk"
    _small_disk(disk, size * 3 // 4)
    try:
        finished = trainer.run("--run-dir", disk / "run", status=2)
        assert finished.err.startswith(f"error: run_dir={disk}/run cannot be written: No space")
        assert finished.err.count("\n") == 1, finished.err
        run = _copy(disk / "run", tmp_path)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    # With more room it goes on from the last whole checkpoint.
    trainer.run("--run-dir", run, "--resume")
    assert_same_run(run, unbroken[0])


def test_a_disk_too_small_from_the_start(trainer, tmp_path):
    disk = tmp_path / "disk"
    _small_disk(disk, 200)
    try:
        finished = trainer.run("--run-dir", disk / "run", status=2)
        assert f"run_dir={disk}/run has " in finished.err
        assert "MB free, but 2 checkpoints need" in finished.err
        assert os.listdir(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_data_cut_short_during_a_run_keeps_its_checkpoint(trainer, tmp_path):
    run, data = tmp_path / "run", shutil.copytree(trainer.folder / "data", tmp_path / "data")
    options = ("--run-dir", run, "--data.path", data)
    process = trainer.start("--config", trainer.config, *options, "--train.steps", 2000)
    until = time.monotonic() + limits.hang()
    while not (run.is_dir() and saved(run)) and time.monotonic() < until:
        time.sleep(0.01)
    os.truncate(data / "train.tokens", 30)
    finished = finish(process)
    assert finished.status == 2, str(finished)
    assert f"error: data.path={data}: train.tokens can no longer be read" in finished.err
    assert finished.err.count("\n") == 1, finished.err
    assert saved(run)
