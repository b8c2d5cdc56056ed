"""A number below its range is one line of the refusal, and hides no other line."""

import pytest

from train import checks, distributed, errors, tasks, train
from train.command_line import Invocation
from train.config import Config, Section
from train.goodput import Goodput


def _integers(section, prefix=""):
    """The path of every integer of the configuration; -1 is out of range for each of them."""
    for name, field in type(section).model_fields.items():
        if isinstance(value := getattr(section, name), Section):
            yield from _integers(value, f"{prefix}{name}.")
        elif not isinstance(value, dict) and "int" in str(field.annotation).replace("'", " "):
            yield f"{prefix}{name}"


COUNTS = [path for path, found in checks.limits(Config()) if found.low == 1]


@pytest.fixture
def refuse(tmp_path, monkeypatch):
    """Starts a run as `train.main` does, and returns the lines with which it is refused."""
    simulated = []
    monkeypatch.setattr(
        distributed, "simulate_devices", lambda config, processes: simulated.append(config.mesh)
    )

    def refuse(fields, *, dry_run=True):
        tree = {"run_dir": str(tmp_path / "run"), "data": {"path": str(tmp_path / "data")}}
        for path, value in fields.items():
            section, name = path.split(".") if "." in path else (None, path)
            (tree if section is None else tree.setdefault(section, {}))[name] = value
        with pytest.raises(errors.ConfigError) as error:
            train._run(Invocation(Config.model_validate(tree), dry_run=dry_run), Goodput())
        # Simulated devices cannot be fewer than one: jax would end in a traceback.
        assert all(mesh.stage > 0 and mesh.data > 0 for mesh in simulated)
        return [failure.message for failure in error.value.failures]

    return refuse


@pytest.mark.parametrize(
    ("task", "schedule"),
    [*zip(tasks.names(), ("interleaved", "interleaved", "pipemare", "pipemare"), strict=True)],
)
def test_every_integer_below_its_range_is_one_line(refuse, task, schedule):
    base = {"task": task, "pipeline.schedule": schedule, "pipeline.microbatches": 8}
    for path in _integers(Config(task=task)):
        for value in (0, -1) if path in COUNTS or path.startswith("model.") else (-1,):
            lines = refuse(base | {"optimizer.clip_norm": -3.0, path: value})
            first, *others = (line for line in lines if "optimizer.clip_norm=-3.0" not in line)
            assert first.startswith(f"{path}={value} "), lines
            assert all(f"{path}={value}" in line for line in others), lines
            assert len(lines) == 2 + len(others), lines


@pytest.mark.parametrize(
    "fields",
    [
        {"mesh.stage": -3, "distributed.num_processes": -1, "distributed.process_id": -1},
        {"mesh.stage": 0, "pipeline.microbatches": 0, "pipeline.chunks": 0, "pipeline.group": 0},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_all_of_them_in_one_message(refuse, fields):
    lines = refuse(fields)
    assert {line.split(" ")[0] for line in lines} == {f"{p}={v}" for p, v in fields.items()}
    assert len(lines) == len(fields)


def test_other_rules_still_speak_beside_a_wrong_mesh(refuse, tmp_path):
    lines = refuse({"mesh.stage": 0, "pipeline.schedule": "1f1p"}, dry_run=False)
    assert [line.split(" ")[0] for line in lines] == [
        "mesh.stage=0",
        "pipeline.schedule='1f1p'",
        f"data.path={tmp_path}/data",
    ]


def test_a_schedule_is_not_held_against_a_default_that_replaces_a_wrong_mesh(refuse):
    """A group of 1 fits two stages, and would not fit the four that are the default."""
    fields = {"pipeline.schedule": "interleaved", "pipeline.group": 1}
    (line,) = refuse(fields | {"mesh.stage": -2, "mesh.data": 1})
    assert line == "mesh.stage=-2 must be at least 1. Nearest valid: 1."


@pytest.mark.parametrize("number", ["0", "1"])
def test_a_wrong_mesh_is_not_shared_by_processes(refuse, monkeypatch, number):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
    monkeypatch.setenv("SLURM_PROCID", number)
    lines = refuse({"mesh.stage": -1, "train.steps": -3}, dry_run=False)
    assert [line.split(" ")[0] for line in lines[:2]] == ["mesh.stage=-1", "train.steps=-3"]
    assert not any("processes" in line for line in lines)
