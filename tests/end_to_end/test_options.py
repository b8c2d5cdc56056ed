"""Options of a run: a profile, skipped steps, averages, recorded schedules, plans."""

import json
import re
from importlib.metadata import EntryPoint

import jax
import numpy as np
import pytest
from command import NUM_STEPS, assert_same_run, assert_same_weights, back_to, saved, steps, weights

from jaxpipe import cli
from jaxpipe.planning import configurations
from jaxpipe.schedule.formats import to_json
from jaxpipe.schedule.generators.depth_first import zb_h1
from train import checks
from train.command_line import parse
from train.step import Setup

pytestmark = pytest.mark.end_to_end


def test_speed_a_profile_and_checkpoints_by_time(toy_trainer, tmp_path):
    """Then its best checkpoint is evaluated, which writes nothing."""
    run = tmp_path / "run"
    options = (
        *("--train.keep", 9, "--train.checkpoint-every", 100),
        *("--train.checkpoint-minutes", 1e-9, "--train.profile-from", 3, "--train.profile-to", 4),
        *("--train.timeline-at", 2),
    )
    finished = toy_trainer.run("--run-dir", run, *options)
    assert saved(run) == [1, 2, 4, 5, 6, 8, NUM_STEPS]  # every printed line
    (profile,) = (run / "profile").rglob("*.xplane.pb")
    for name in (b"tick_forward/while/body/F/", b"tick_backward/while/body/B/"):
        assert name in profile.read_bytes()
    written = (run / "timeline.html").read_text().split('id="data">')[1].split("</script>")[0]
    _, predicted, ran = (t["parts"] for t in json.loads(written)["schedules"][0]["timelines"])
    assert [[part[0] for part in row] for row in predicted] == [
        [part[0] for part in row] for row in ran
    ]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "stage_seconds" in record] == [2]
    seconds = [sum(end - start for *_, start, end, _ in row) for row in ran]
    recorded = np.array(records[1]["stage_seconds"])
    np.testing.assert_allclose(recorded, seconds, rtol=1e-3)
    line = re.search(r"\nstage (\d) is the slowest: (\S+) ms .* layers, (\S+) times", finished.out)
    assert line, finished.out
    found = int(line[1]), float(line[2]), float(line[3])
    expected = recorded.argmax(), 1e3 * recorded.max(), recorded.max() / recorded.mean()
    assert found == pytest.approx(expected, abs=0.01)
    speeds = [record["speed"] for record in records if "speed" in record]
    assert len(speeds) == 7
    for speed in speeds:
        assert speed["rows_per_second"] == pytest.approx(8 / speed["step_seconds"])
        assert speed["memory_bytes"] > 0
    assert finished.err == ""

    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    config = toy_trainer.folder / toy_trainer.name
    for source in ((), ("--init-from", f"{run}@{NUM_STEPS}")):
        finished = toy_trainer.run("--run-dir", run, "--evaluate", "--config", config, *source)
        loss = records[-1]["eval_loss"]
        assert f"weights of {run}, step {NUM_STEPS}\n" in finished.out
        assert f"held-out loss {loss:.4f}, largest_error" in finished.out
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_too_many_skipped_steps_end_the_run(toy_trainer, tmp_path):
    run = tmp_path / "run"
    skips = "--optimizer.max-skipped", 2, "--optimizer.skip-above", 1e-9
    finished = toy_trainer.run("--run-dir", run, *skips, status=1)
    assert finished.out.count(" was skipped: the loss is ") == 2
    assert "error: step 3: the loss is" in finished.err
    assert "2 steps before it were skipped" in finished.err
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [1, 2]


def test_a_run_that_keeps_much_on_the_host_is_the_same_run(toy_trainer, unbroken_toy, tmp_path):
    """And goes on as any other, with it on the devices."""
    run = tmp_path / "run"
    toy_trainer.run("--run-dir", run, "--optimizer.offload", "--pipeline.residuals", "host")
    assert_same_run(run, unbroken_toy)
    back_to(run, 9)
    assert "resuming" in toy_trainer.run("--run-dir", run, "--resume").out
    assert_same_run(run, unbroken_toy)


def test_without_evaluation_a_run_trains_the_same_and_has_no_best_checkpoint(
    toy_trainer, unbroken_toy, tmp_path
):
    run = tmp_path / "run"
    finished = toy_trainer.run("--run-dir", run, "--train.eval-every", 0)
    assert "held-out loss" not in finished.out
    assert "eval_loss" not in (run / "metrics.jsonl").read_text()
    assert_same_weights(run, unbroken_toy)
    best = "--evaluate", "--init-from", f"{run}@best"
    assert "has no best checkpoint: none was evaluated" in toy_trainer.run(*best, status=2).err


def test_an_average_of_the_weights_is_evaluated_and_begun_with(toy_trainer, tmp_path):
    """On another layout, and a run without an average has none."""
    run, second = tmp_path / "run", tmp_path / "second"
    decay = "--optimizer.ema-decay", 0.5
    options = "--train.checkpoint-every", 1, "--train.keep", NUM_STEPS, "--train.steps", 4
    toy_trainer.run("--run-dir", run, *decay, *options)
    share = np.array([0.125, 0.25, 0.5, 1.0]) / 1.875
    after = [
        {n: x for n, x in weights(run, step) if n.startswith("['params']")} for step in range(1, 5)
    ]
    expected = {n: np.tensordot(share, [params[n] for params in after], axes=1) for n in after[0]}

    still = "--train.steps", 1, "--optimizer.warmup-steps", 1, "--optimizer.peak-lr", 1e-30
    layout = "--mesh.stage", 4, "--mesh.data", 1, "--pipeline.schedule", "gpipe"
    began = "--init-from", f"{run}@ema"
    finished = toy_trainer.run("--run-dir", second, *began, *still, *layout)
    assert f"average of the weights of {run}, step 4\n" in finished.out
    found = dict(weights(second, 1))
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-6, err_msg=name)

    (record,) = map(json.loads, (second / "metrics.jsonl").read_text().splitlines())
    finished = toy_trainer.run("--evaluate", *began)
    assert f"held-out loss {record['eval_loss']:.4f}, largest_error" in finished.out
    finished = toy_trainer.run("--evaluate", "--init-from", f"{second}@ema", status=2)
    assert "The run keeps no average of its weights: its optimizer.ema_decay is 0." in finished.err
    finished = toy_trainer.run("--run-dir", run, "--resume", "--train.steps", 5, status=2)
    assert "optimizer.ema_decay=0.0 cannot continue the state of the checkpoint" in finished.err


def test_a_resume_keeps_the_recorded_schedule(toy_trainer, copy):
    """As if another version of jaxpipe had chosen it."""
    back_to(copy, 9)
    path, other = copy / "schedule.json", to_json(zb_h1(2, 2))
    record = json.loads(path.read_text()) | {"schedule": other, "layer_counts": [3, 1]}
    path.write_text(json.dumps(record))
    finished = toy_trainer.run("--run-dir", copy, "--resume")
    assert f"schedule and partition as recorded in {path}\n" in finished.out
    assert len(steps(copy)) == NUM_STEPS
    assert json.loads(path.read_text()) == record


@pytest.mark.slow
def test_the_best_plan_of_a_model_that_fits_no_device_trains_a_narrower_one(
    trainer, tmp_path, capsys, monkeypatch
):
    point = EntryPoint("train", "train.plan:read", configurations.GROUP)
    monkeypatch.setattr(configurations, "entry_points", lambda group: [point])
    large, plan = tmp_path / "large.yaml", tmp_path / "plan.yaml"
    large.write_text(
        f"data: {{path: {trainer.folder / 'data'}}}\n"
        "model: {vocab_size: 300, sequence_length: 8, num_layers: 8, width: 8192, num_heads: 1}\n"
        "optimizer: {warmup_steps: 1}\n"
        "train: {batch_size: 16, steps: 4, eval_batches: 1}\n"
    )
    arguments = ["plan", "--config", str(large), "--device", "h100", "--link", "pcie:1,eth:100"]
    assert cli.main([*arguments, "--devices", "1"]) == 2
    assert "is too little for any plan" in capsys.readouterr().err
    assert cli.main([*arguments, "--devices", "8", "--out", str(plan)]) == 0
    config = parse(["--config", str(plan), "--model.width", "32"]).config
    assert config.mesh.num_devices == 8
    assert checks.check(config, writes=False) == []
    setup = Setup(config)
    shapes = setup.state_shapes, setup.batch_shapes, jax.eval_shape(lambda: setup.rng(0))
    _, values = jax.eval_shape(setup.train_step, *shapes)
    assert values["loss"].shape == ()
