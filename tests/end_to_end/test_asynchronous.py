"""train.py with a pipeline that never drains, after a synchronous warm-up (T3)."""

import shutil

import pytest
from command import NUM_STEPS, assert_same_weights, back_to, saved, steps

pytestmark = pytest.mark.end_to_end
SWITCH = 4
OPTIONS = ("--pipeline.schedule", "pipemare", "--asynchronous.warmup-steps", SWITCH)


@pytest.fixture(scope="module")
def whole(toy_trainer, tmp_path_factory):
    """A run with checkpoints on both sides of the switch, and what it printed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    return run, toy_trainer.run("--run-dir", run, *OPTIONS, "--train.keep", 4)


def _until(run, step, tmp_path):
    """A copy of a run as if it was killed after a checkpoint."""
    copy = shutil.copytree(run, tmp_path / "copy")
    back_to(copy, step)
    return copy


def test_an_asynchronous_run_says_what_it_does(whole):
    run, finished = whole
    assert finished.err == ""
    assert f"from step {SWITCH + 1} on pipemare" in finished.out
    assert "F0@0 B1@0+" in (run / "schedule.txt").read_text()
    warm_up, records = steps(run)[:SWITCH], steps(run)[SWITCH:]
    assert all("delays" not in record for record in warm_up)
    # The pipeline fills; then the stages' delays are the table's, for 2 stages and microbatches.
    assert [record["delays"] for record in records[:3]] == [[0, 0], [1, 0.5], [1.5, 0.5]]
    assert [record["utilization"] for record in records[:3]] == [3 / 8, 7 / 8, 1]
    assert "loss" not in records[0]
    assert ["metrics" in record for record in records] == ["loss" in record for record in records]
    assert [record["loss_step"] for record in records[1:]] == list(range(SWITCH + 1, NUM_STEPS))
    assert len(records[-1]["drained_losses"]) == 1
    assert min(records[-1]["correction"]) > 0
    assert records[-1]["weight_versions"] == 1
    assert records[-1]["eval_loss"] < records[0]["eval_loss"]


@pytest.mark.parametrize(
    "step", [pytest.param(3, marks=pytest.mark.slow), 6, pytest.param(9, marks=pytest.mark.slow)]
)
def test_resume_on_either_side_of_the_switch(whole, toy_trainer, tmp_path, step):
    """To the same bits, also if the run is evaluated after every step."""
    assert saved(whole[0]) == [3, 6, 9, 10]
    run = _until(whole[0], step, tmp_path)
    finished = toy_trainer.run("--run-dir", run, "--resume", *OPTIONS, "--train.eval-every", 1)
    assert f"resuming {run} at step {step}" in finished.out
    for record, expected in zip(steps(run), steps(whole[0]), strict=True):
        assert record["step"] <= step or "eval_loss" in record
        names = [name for name in expected if not name.startswith("eval_")]
        assert [record[name] for name in names] == [expected[name] for name in names]
    assert_same_weights(run, whole[0])


def test_a_pipeline_in_mid_flight_fits_its_own_layout_alone(whole, toy_trainer, tmp_path):
    run = _until(whole[0], 9, tmp_path)
    other = ["--mesh.stage", 4, "--pipeline.zero", 1, "--pipeline.schedule", "1f1b"]
    finished = toy_trainer.run("--run-dir", run, "--resume", *other, status=2)
    for path, value in (("mesh.stage", 2), ("pipeline.zero", 3), ("pipeline.schedule", "pipemare")):
        assert f"saved in mid-flight with {path}={value}. Nearest valid: {value}." in finished.err
    assert "resume with the old values and train.steps of at least 10 first" in finished.err


@pytest.mark.slow
def test_a_run_that_has_ended_goes_on_in_any_layout(whole, toy_trainer, tmp_path):
    run = shutil.copytree(whole[0], tmp_path / "copy")
    options = ["--mesh.stage", 4, "--mesh.data", 1, "--pipeline.schedule", "pipedream"]
    toy_trainer.run("--run-dir", run, "--resume", *options, "--train.steps", 14)
    records = steps(run)[NUM_STEPS:]
    assert len(records) == 4
    assert records[-1]["weight_versions"] == 5
    assert records[-1]["eval_loss"] < steps(whole[0])[-1]["eval_loss"]


@pytest.mark.slow
def test_a_dry_run_shows_delays_and_memory(toy_trainer, tmp_path):
    finished = toy_trainer.run("--run-dir", tmp_path / "run", "--dry-run", *OPTIONS)
    for part in ("stage 0  2 1  1.5", "weight versions kept: 1", "T2's mean", "this fits"):
        assert part in finished.out
    assert finished.err == ""
    assert not (tmp_path / "run").exists()
