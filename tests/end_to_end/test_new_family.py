"""A model family that one file declares: options, checks, training, checkpoints, resuming."""

from functools import partial

import pytest
import yaml
from command import Trainer, back_to, saved, steps

from train import checks, command_line, errors
from train.config import Config

TOY = "toy_family:Toy"
FIELDS = {"num_layers", "width", "activation", "noise"}


def test_its_shape_is_the_section_of_the_model():
    config = command_line.parse(["--task", TOY, "--model.width", "5"]).config
    assert config.model.model_dump() == {
        "num_layers": 8, "width": 5, "activation": "tanh", "noise": 0.0
    }  # fmt: skip
    assert Config.model_validate(yaml.safe_load(config.to_yaml())) == config


def test_its_help_shows_its_fields_with_their_descriptions(capsys):
    with pytest.raises(SystemExit):
        command_line.parse(["--task", TOY, "--help"])
    shown = capsys.readouterr().out
    for name in FIELDS:
        assert f"--model.{name.replace('_', '-')} " in shown
    assert "Size of the residual stream. (default: 3)" in shown
    assert "{tanh,sin}" in shown
    assert "--model.num-heads" not in shown


def test_what_is_wrong_with_it_is_said_with_all_else(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(f"task: {TOY}\nmodel: {{widht: 3, activation: tan, noise: no}}\n")
    failures = command_line.parse(["--config", str(path)]).failures
    assert [failure.message for failure in failures] == [
        f"model.activation='tan' in {path}: must be one of 'tanh' or 'sin'. Nearest valid: tanh.",
        f"model.noise=False in {path}: must be a number.",
        f"model.widht in {path} is not a field. Nearest valid: model.width, model.noise.",
    ]
    config = Config(
        task=TOY, run_dir=str(tmp_path / "run"), model={"width": 0}, optimizer={"warmup_steps": 999}
    )
    assert [failure.fields for failure in checks.check(config)] == [
        ("model.width",),
        ("optimizer.warmup_steps", "train.steps"),
    ]
    config = Config(task=TOY, run_dir=str(tmp_path / "run"), model={"num_layers": 3})
    (failure,) = checks.check(config)
    assert "model.num_layers=3 cannot fill mesh.stage=4" in failure.message


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("gtp", "'gpt', 'resnet' or 'transformer', or module:Class of your own"),
        ("toy_famly:Toy", "No module named 'toy_famly'"),
        ("toy_family:Numbers", "toy_family defines no Numbers that is one"),
    ],
)
@pytest.mark.parametrize("from_file", [False, True])
def test_families_that_do_not_exist_are_refused(tmp_path, task, expected, from_file):
    path = tmp_path / "toy.yaml"
    path.write_text(f"task: {task}\nmodel: {{depth: 3}}\n" if from_file else "")
    options = ["--config", str(path), *([] if from_file else ["--task", task])]
    if from_file:
        (failure,) = command_line.parse(options).failures
        message = failure.message
    else:
        with pytest.raises(errors.ConfigError) as error:
            command_line.parse(options)
        message = str(error.value)
    assert message.startswith(f"task={task!r} in ")
    assert expected in message


@pytest.mark.end_to_end
def test_train_py_trains_it_saves_it_and_continues_it(tmp_path):
    (tmp_path / "toy.yaml").write_text(
        f"""\
task: {TOY}
model: {{width: 2, activation: sin}}
mesh: {{stage: 2, data: 1}}
pipeline: {{schedule: 1f1b, microbatches: 2}}
optimizer: {{warmup_steps: 1}}
train: {{steps: 4, batch_size: 8, eval_batches: 1, checkpoint_every: 2}}
"""
    )
    run, trainer = tmp_path / "run", Trainer(tmp_path, "toy.yaml")
    train = partial(trainer.run, "--run-dir", run)

    finished = train()
    assert "zero everywhere has about 0.5" in finished.out
    assert "a toy of 128 held-out rows" in finished.out
    assert (run / "toy.txt").exists()
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["activation"] == "sin"
    records = steps(run)
    assert saved(run) == [2, 4]

    assert "toy.txt). " in train(status=2).err  # what another run's report is called is known
    back_to(run, 2)
    assert f"resuming {run} at step 2" in train("--resume").out
    assert steps(run) == records
    finished = train("--resume", "--model.width", 3, "--model.noise", 0.5, status=2)
    assert finished.err.count("\n") == 1, finished.err
    assert "model.width=3 is not the model of the checkpoint" in finished.err
