"""A plan for devices that are not there trains a narrower model on simulated ones."""

import dataclasses
from importlib.metadata import EntryPoint

import pytest
from command import steps

from jaxpipe import cli
from jaxpipe.planning import configurations
from train.command_line import parse

pytestmark = pytest.mark.end_to_end

MODEL = "model: {vocab_size: 300, sequence_length: 8, num_layers: 8, width: 8192, num_heads: 1}\n"
TRAIN = "train: {batch_size: 16, steps: 4, eval_every: 4, eval_batches: 1, log_every: 1}\n"
NARROW = "--model.width", 32


def test_the_best_plan_of_a_model_that_fits_no_device_trains(
    trainer, tmp_path, capsys, monkeypatch
):
    point = EntryPoint("train", "train.plan:read", configurations.GROUP)
    monkeypatch.setattr(configurations, "entry_points", lambda group: [point])
    config, out, run = tmp_path / "large.yaml", tmp_path / "plan.yaml", tmp_path / "run"
    data = f"data: {{path: {trainer.folder / 'data'}}}\n"
    config.write_text(f"{data}{MODEL}{TRAIN}optimizer: {{warmup_steps: 1, peak_lr: 1.0e-2}}\n")
    arguments = ["plan", "--config", str(config), "--device", "h100", "--link", "pcie:1,eth:100"]
    assert cli.main([*arguments, "--devices", "1"]) == 2
    assert "is too little for any plan" in capsys.readouterr().err
    assert cli.main([*arguments, "--devices", "8", "--out", str(out)]) == 0
    assert parse(["--config", str(out)]).config.mesh.num_devices == 8
    dataclasses.replace(trainer, name=str(out)).run(*NARROW, "--run-dir", run)
    losses = [record["loss"] for record in steps(run)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
