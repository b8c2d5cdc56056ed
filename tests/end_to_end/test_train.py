"""train.py as a user starts it: what a run leaves, and that nothing can break one."""

import json
import math
import os
import re
import shutil
import signal
import socket
import types

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
    saved,
    steps,
)
from prometheus_client.parser import text_string_to_metric_families

from train import loop
from train.runs.run_lock import LOCK_FILE, RunLock

pytestmark = pytest.mark.end_to_end


@pytest.fixture
def at_step(monkeypatch):
    """Has something happen when a run in this process records a step."""

    def change(step, event):
        write = loop.Metrics.write

        def write_and_change(metrics, number, values):
            write(metrics, number, values)
            if number == step:
                event()

        monkeypatch.setattr(loop.Metrics, "write", write_and_change)

    return change


def _times(run):
    return {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def test_a_run_leaves_everything_it_should(unbroken):
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
    gauges = text_string_to_metric_families((run / "metrics.prom").read_text())
    newest = {sample.name: (sample.labels, sample.value) for g in gauges for sample in g.samples}
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for name, value in {
        "step": NUM_STEPS,
        "loss": last["loss"],
        "eval_loss": last["eval_loss"],
        **{f"seconds_{cause}": seconds for cause, seconds in last["seconds"].items()},
        **{f"speed_{part}": number for part, number in last["speed"].items()},
        **{name: last[name] for name in ("goodput", "unix_time")},
    }.items():
        assert newest[f"jaxpipe_{name}"] == ({"run": run.name}, value)
    # Every checkpoint competes for the best, also one that is not evaluated for the record.
    losses = {
        step: json.loads((run / "checkpoints" / str(step) / "metrics/metrics").read_text())
        for step in saved(run)
    }
    assert all(math.isfinite(loss["eval_loss"]) for loss in losses.values())
    assert losses[NUM_STEPS]["eval_loss"] == pytest.approx(records[-1]["eval_loss"])


def test_what_is_refused_is_said_at_once_and_nothing_is_written(toy_trainer, copy):
    """Numbers below their range, rules of a configuration, a run that is there or goes on."""

    def refused(*options, run=copy):
        before = _times(copy)
        finished = toy_trainer.run("--run-dir", run, *options, status=2)
        assert _times(copy) == before
        return finished.err

    run = copy.parent / "run"
    lines = refused("--mesh.stage", 0, "--mesh.data", -1, "--train.steps", -3, run=run).splitlines()
    assert lines == [
        "error: mesh.stage=0 must be at least 1. Nearest valid: 1.",
        "error: mesh.data=-1 must be at least 1. Nearest valid: 1.",
        "error: train.steps=-3 must be at least 1. Nearest valid: 1.",
    ]
    options = "--pipeline.microbatches", 3, "--pipeline.schedule", "1f1", "--mesh.stage", 99
    found = refused(*options, run=run)
    for part in ("microbatches=3", "'1f1'", "num_layers=4 cannot fill"):
        assert part in found
    found = refused("--resume", "--model.width", 32, "--train.steps", 4)
    assert "model.width=32 is not the model of the checkpoint" in found
    assert "train.steps=4 is less than the 10 steps that run_dir=" in found
    assert not run.exists()
    found = refused()
    assert found.startswith(f"error: run_dir={copy} already holds a run (")
    assert "toy.txt)" in found  # what the report of its family is called is known
    lock = RunLock(copy, say=print)
    lock.acquire()
    who = f"in use by process {os.getpid()} on {socket.gethostname()} since "
    assert refused("--resume").startswith(f"error: run_dir={copy} is {who}")
    lock.release()


def test_resume_skips_half_a_line_and_a_damaged_checkpoint(unbroken_toy, toy_trainer, copy):
    """One flipped bit of the newest checkpoint's weights; after the end nothing is left to do."""
    damaged = flip_a_bit(copy / "checkpoints" / str(NUM_STEPS))
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    finished = toy_trainer.run("--run-dir", copy, "--resume")
    assert f"skipping checkpoint {NUM_STEPS}: state/" in finished.out
    assert f"it is kept as {NUM_STEPS}.damaged" in finished.out
    assert f"resuming {copy} at step 9" in finished.out
    assert_same_run(copy, unbroken_toy)
    assert (copy / "checkpoints" / f"{NUM_STEPS}.damaged" / damaged).exists()

    finished = toy_trainer.run("--run-dir", copy, "--resume")
    assert f"resuming {copy} at step {NUM_STEPS}" in finished.out
    assert_same_run(copy, unbroken_toy)


def test_sigkill_during_a_checkpoint_write(unbroken_toy, toy_trainer, tmp_path):
    """Half a checkpoint and the lock of the killed run are removed by the next one."""
    run = tmp_path / "run"
    folder = run / "checkpoints"

    def left():
        return [path.name for path in folder.glob("*") if not path.name.isdigit()]

    def is_writing():
        return any(name.startswith(f"{2 * CHECKPOINT_EVERY}.") for name in left())

    process = toy_trainer.start("--run-dir", run)
    assert kill_when(process, is_writing, number=signal.SIGKILL)
    finish(process, -signal.SIGKILL)
    assert saved(run) == [CHECKPOINT_EVERY]
    assert left()
    assert (run / LOCK_FILE).exists()
    finished = toy_trainer.run("--run-dir", run, "--resume")
    assert f"removed the lock of process {process.pid} on " in finished.out
    assert "waiting" not in finished.out
    assert f"resuming {run} at step {CHECKPOINT_EVERY}" in finished.out
    assert re.search(r"\ngoodput \d+\.\d%: step .* restart .* lost ", finished.out)
    assert_same_run(run, unbroken_toy)
    assert left() == []
    assert not (run / LOCK_FILE).exists()


def test_sigterm_saves_the_run(unbroken_toy, toy_trainer, tmp_path, at_step):
    run = tmp_path / "run"
    at_step(4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    finished = toy_trainer.run("--run-dir", run)
    stopped = saved(run)[-1]
    assert f"saved step {stopped}; continue with --resume" in finished.out
    assert stopped == len(steps(run)) < NUM_STEPS
    assert not (run / LOCK_FILE).exists()
    finished = toy_trainer.run("--run-dir", run, "--resume")
    assert f"resuming {run} at step {stopped}" in finished.out
    assert_same_run(run, unbroken_toy)


def test_a_loss_that_is_not_finite_stops_the_run(unbroken_toy, toy_trainer, copy):
    back_to(copy, 9)
    options = ["--optimizer.peak-lr", 1e38, "--train.steps", 20]
    finished = toy_trainer.run("--run-dir", copy, "--resume", *options, status=1)
    assert "changed since: optimizer.peak_lr 0.01 -> 1e+38" in finished.out
    assert "error: step 10: the held-out loss is inf; training stopped." in finished.err
    assert "The checkpoint of step 9 is kept; --resume continues from it once" in finished.err
    assert "Traceback" not in finished.err
    # What would only repeat is not started; anything else is.
    again = toy_trainer.run("--run-dir", copy, "--resume", *options, status=2)
    assert "was stopped at step 10 (the held-out loss is inf), and would be again" in again.err
    assert again.err.count("\n") == 1, again.err
    assert saved(copy) == [9]
    assert not (copy / LOCK_FILE).exists()
    toy_trainer.run("--run-dir", copy, "--resume")
    assert_same_run(copy, unbroken_toy)


def test_the_layer_that_made_it_is_named(toy_trainer, tmp_path):
    options = ["--task", "toy_family:Spoilt", "--run-dir", tmp_path / "run"]
    finished = toy_trainer.run(*options, "--train.eval-every", 0, status=1)
    step = int(re.search(r"error: step (\d+): the loss is nan", finished.err)[1])
    kept = step - 1 - (step - 1) % CHECKPOINT_EVERY
    assert f"running steps {kept + 1} to {step} again" in finished.out
    named = (
        r"not finite is of layer 0, forward, microbatch \d \(stage 0, data shard \d\): nan .* log"
    )
    assert re.search(named, finished.err), finished.err
    assert "toy_family.py" in finished.err


def test_a_run_that_lost_its_checkpoints_does_not_start_over(toy_trainer, copy):
    """All of the folder, as without the record of older versions, and its contents alone."""
    before = steps(copy)
    back_to(copy, 0)
    finished = toy_trainer.run("--run-dir", copy, "--resume", status=2)
    assert f"run_dir={copy} has done at least {NUM_STEPS} steps, but " in finished.err
    assert "Put its checkpoints back, or name another --run-dir" in finished.err
    assert finished.err.count("\n") == 1, finished.err
    (copy / "progress.json").unlink()
    shutil.rmtree(copy / "checkpoints")
    assert toy_trainer.run("--run-dir", copy, "--resume", status=2).err == finished.err
    assert steps(copy) == before


@pytest.mark.parametrize("name", [".", "checkpoints"])
def test_a_run_folder_that_is_removed_ends_the_run_in_an_error(
    toy_trainer, tmp_path, at_step, name
):
    run = tmp_path / "run"
    at_step(4, lambda: run.joinpath(name).rename(tmp_path / "aside"))
    finished = toy_trainer.run("--run-dir", run, status=2)
    assert f"error: run_dir={run}" in finished.err
    assert "Traceback" not in finished.err


def test_resume_onto_another_layout(unbroken_toy, toy_trainer, copy):
    back_to(copy, 9)
    layout = {"mesh.stage": 4, "mesh.data": 1, "pipeline.schedule": "gpipe"}
    options = [f"--{path}={value}" for path, value in layout.items()]
    finished = toy_trainer.run("--run-dir", copy, "--resume", *options)
    for path, value in layout.items():
        assert re.search(rf"changed since: {path} \S+ -> {value}\n", finished.out)
    for record, expected in zip(steps(copy), steps(unbroken_toy), strict=True):
        for name in ("loss", "grad_norm"):
            assert record[name] == pytest.approx(expected[name], rel=1e-5)


@pytest.mark.slow
def test_dropout_draws_the_same_after_a_resume(trainer, tmp_path):
    runs = [tmp_path / name for name in ("whole", "broken")]
    for run in runs:
        trainer.run("--run-dir", run, "--model.dropout", 0.2)
    back_to(runs[1], 9)
    trainer.run("--run-dir", runs[1], "--model.dropout", 0.2, "--resume")
    assert_same_run(runs[1], runs[0])


def test_streamed_text_goes_on_where_it_was(trainer, tmp_path):
    rows, whole, broken = (tmp_path / name for name in ("rows.jsonl", "whole", "broken"))
    texts = [path.read_text() for path in sorted(trainer.folder.glob("text/*.txt"))]
    rows.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    trainer.run("--run-dir", whole, "--data.rows", rows)
    shutil.copytree(whole, broken)
    back_to(broken, 9)
    trainer.run("--run-dir", broken, "--data.rows", rows, "--resume")
    assert_same_run(broken, whole)
    finished = trainer.run("--run-dir", broken, "--resume", status=2)
    assert "error: data.rows=null cannot continue the order of the checkpoint" in finished.err


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


def test_a_run_goes_on_with_updates_by_chunk(unbroken_toy, toy_trainer, copy):
    """The loss of its first step is that of updates by step."""
    back_to(copy, NUM_STEPS - 1)
    layout = "--pipeline.schedule", "modular", "--pipeline.chunks", 2, "--optimizer.clip-norm", 0
    finished = toy_trainer.run("--run-dir", copy, "--resume", *layout, "--pipeline.update=chunk")
    assert "changed since: pipeline.update step -> chunk" in finished.out
    assert finished.err == ""
    before, record = (steps(run)[-1] for run in (unbroken_toy, copy))
    assert record["loss"] == pytest.approx(before["loss"], rel=1e-5)
    assert record["metrics"] == pytest.approx(before["metrics"], rel=1e-5)
    assert record.keys() == before.keys() - {"grad_norm"}


def test_a_disk_too_small_from_the_start(toy_trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(loop.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=9))
    finished = toy_trainer.run("--run-dir", tmp_path / "run", status=2)
    assert f"run_dir={tmp_path}/run has 0.0 MB free, but 2 checkpoints need" in finished.err
    assert not (tmp_path / "run").exists()


def test_data_cut_short_during_a_run_keeps_its_checkpoint(trainer, tmp_path, at_step):
    run, data = tmp_path / "run", shutil.copytree(trainer.folder / "data", tmp_path / "data")
    at_step(5, lambda: os.truncate(data / "train.tokens", 30))
    finished = trainer.run("--run-dir", run, "--data.path", data, status=2)
    assert f"error: data.path={data}: train.tokens can no longer be read" in finished.err
    assert finished.err.count("\n") == 1, finished.err
    assert saved(run)
