"""Checkpoints: the latest and the best stay, also for a run that resumes."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from train import checkpoint
from train.checkpoint import checkpoints_in
from train.config import Config
from train.step import TrainState


def _state(step):
    return TrainState({"weight": jnp.full(3, float(step))}, {"count": jnp.asarray(step)})


def _save(checkpoints, step, eval_loss=None):
    checkpoint.save(
        checkpoints, step, _state(step), data={"next": step}, run={}, eval_loss=eval_loss
    )
    checkpoints.wait()


def test_a_checkpoint_comes_back(tmp_path):
    with checkpoints_in(tmp_path / "c") as checkpoints:
        assert checkpoints.latest is None
        _save(checkpoints, 3)
    with checkpoints_in(tmp_path / "c", read_only=True) as checkpoints:
        assert checkpoints.latest == 3
        state, data = checkpoint.restore(checkpoints, 3, _state(0))
    np.testing.assert_array_equal(state.params["weight"], np.full(3, 3.0))
    assert int(state.optimizer["count"]) == 3
    assert data == {"next": 3}


@pytest.mark.parametrize("reopens", [False, True])
def test_the_latest_and_the_best_are_kept(tmp_path, reopens):
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: None, 6: 2.5}
    checkpoints = checkpoints_in(tmp_path / "c", keep=2)
    for step, loss in losses.items():
        _save(checkpoints, step, loss)
        if reopens:
            checkpoints.__exit__()
            checkpoints = checkpoints_in(tmp_path / "c", keep=2)
    assert checkpoints.steps == [2, 5, 6]
    checkpoints.__exit__()


def test_reading_makes_and_removes_nothing(tmp_path):
    folder = tmp_path / "c"
    folder.mkdir()
    half = folder / "7.orbax-checkpoint-tmp"
    half.mkdir()
    with checkpoints_in(folder, read_only=True) as checkpoints:
        assert checkpoints.latest is None
    assert list(folder.iterdir()) == [half]


@pytest.mark.parametrize("lost", ["metrics", "state", "_CHECKPOINT_METADATA", "commit_success.txt"])
def test_an_old_checkpoint_half_removed_does_not_matter(tmp_path, lost):
    """A kill may come while an old checkpoint is being removed."""
    with checkpoints_in(tmp_path / "c", keep=3) as checkpoints:
        for step in (1, 2):
            _save(checkpoints, step, 1.0 + step)
    path = tmp_path / "c" / "1" / lost
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
    with checkpoints_in(tmp_path / "c", keep=1) as checkpoints:
        assert checkpoints.latest == 2
        _, data = checkpoint.restore(checkpoints, 2, _state(0))
        assert data == {"next": 2}
        _save(checkpoints, 3, 0.5)
        assert checkpoints.latest == 3


def test_the_latest_the_best_and_every_fourth_are_kept(tmp_path):
    for steps in ((1, 2, 3, 4, 5), (6, 7, 8, 9, 10)):  # the second run continues the first
        with checkpoints_in(tmp_path / "c", keep=2, keep_every=4) as checkpoints:
            for step in steps:
                _save(checkpoints, step, abs(step - 3.0))
    assert list(checkpoints.steps) == [3, 4, 8, 9, 10]


def test_another_model_names_every_field(tmp_path):
    config = Config(run_dir=str(tmp_path))
    saved = checkpoint.describe(config, data_sha256="a")
    assert checkpoint.other_model(saved, config, data_sha256="a") == []
    other = Config(run_dir=str(tmp_path), model={"width": 64, "tied": False, "dropout": 0.1})
    found = checkpoint.other_model(saved, other, data_sha256="b")
    assert [failure.fields for failure in found] == [
        ("model.width",),
        ("model.tied",),
        ("data.path",),
    ]
    assert "model.width=64 is not the model of the checkpoint" in found[0].message
    assert "Nearest valid: 128, or another --run-dir." in found[0].message
    assert "has another tokenizer than the checkpoint" in found[2].message


def test_changes_are_said():
    saved = checkpoint.describe(Config(), data_sha256="a")
    other = Config(run_dir="elsewhere", train={"seed": 1}, mesh={"stage": 2})
    found = checkpoint.changes(saved, other)
    assert found == ["mesh.stage 4 -> 2", "train.seed 0 -> 1"]
    assert checkpoint.changes(saved, Config()) == []
    assert checkpoint.changes(saved, Config(pipeline={"remat": "none"})) == []
    assert "task gpt -> bert" in checkpoint.changes(saved, Config(task="bert"))
