"""The configuration: strict names and types, all failures at once, the command line wins."""

import contextlib
import itertools
import re

import pytest
import yaml

from train import checks, command_line, config, config_file, errors, tasks
from train.processes import distributed
from train.runs import checkpoint

TAGS = [name for name in yaml.SafeLoader.yaml_constructors if name is not None]


def _write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _messages(path, *options):
    invocation = command_line.parse(["--config", str(path), *options])
    return [failure.message for failure in invocation.failures]


def test_the_command_line_wins_over_the_file_over_the_defaults(tmp_path):
    path = _write(tmp_path, "mesh: {stage: 2}\ntrain: {steps: 7, seed: 3}\n")
    invocation = command_line.parse(["--config", str(path), "--train.steps", "9", "--resume"])
    found = invocation.config
    assert invocation.resume
    assert not invocation.dry_run
    assert (found.mesh.stage, found.train.steps, found.train.seed) == (2, 9, 3)
    assert found.mesh.data == config.MeshConfig().data
    assert invocation.failures == ()


SCRIPTED = (
    *("--run-dir=a", "--mesh.stage=2", "--mesh.data=1", "--pipeline.schedule=gpipe"),
    *("--pipeline.chunks=2", "--pipeline.microbatches=4", "--pipeline.remat=full"),
    *("--pipeline.zero=1", "--train.steps=5", "--train.batch-size=16", "--train.seed=1"),
)


def test_names_that_others_script_against():
    values = command_line.parse(list(SCRIPTED)).config.flat()
    for option in SCRIPTED:
        name, text = option.removeprefix("--").split("=")
        assert str(values[name.replace("-", "_")]) == text


def test_yaml_round_trip(tmp_path):
    first = command_line.parse(["--optimizer.peak-lr", "3e-4", "--sample.top-k", "None"]).config
    again = command_line.parse(["--config", str(_write(tmp_path, first.to_yaml()))])
    assert again.failures == ()
    assert again.config == first
    assert again.config.sample.top_k is None


def test_numbers_as_people_write_them_and_sections_that_are_merged(tmp_path):
    for number in ("3e-4", "3E-4", "3.0e-4", "+3e-4"):
        path = _write(tmp_path, f"optimizer: {{peak_lr: {number}}}")
        assert command_line.parse(["--config", str(path)]).config.optimizer.peak_lr == 3e-4
    path = _write(tmp_path, "mesh: {stage: 3, <<: {data: 1}}\n")
    mesh = command_line.parse(["--config", str(path)]).config.mesh
    assert (mesh.stage, mesh.data) == (3, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mesh: {stages: 2}", "mesh.stages in {path} is not a field. Nearest valid: mesh.stage"),
        ("train: {microbatches: 2}", "is not a field. Nearest valid: pipeline.microbatches"),
        ("optimiser: {}", "optimiser in {path} is not a field. Nearest valid: optimizer"),
        ("mesh: {data: two}", "mesh.data='two' in {path}: must be an integer."),
        ("train: {steps: 1.5}", "train.steps=1.5 in {path}: must be an integer."),
        ("train: {steps: true}", "train.steps=True in {path}: must be an integer."),
        ("train: {steps: 1:30}", "train.steps='1:30' in {path}: must be an integer."),
        ("train: {steps: 010}", "train.steps='010' in {path}: must be an integer."),
        ("optimizer: {peak_lr: 1:30.5}", "optimizer.peak_lr='1:30.5' in {path}: must be a number."),
        ("optimizer: {peak_lr: fast}", "optimizer.peak_lr='fast' in {path}: must be a number."),
        ("model: {tied: 1}", "model.tied=1 in {path}: must be true or false."),
        ("run_dir: 5", "run_dir=5 in {path}: must be text."),
        ("task: [gpt]\nmodel: {depth: 3}", "task=['gpt'] in {path}: must be text,"),
        (
            "pipeline: {partition: [3, 2]}",
            'pipeline.partition=[3, 2] in {path}: must be text, such as "3,2".',
        ),
        (
            "pipeline: {residuals: disk}",
            "pipeline.residuals='disk' in {path}: must be one of 'device' or 'host', or a number. "
            "Nearest valid: device.",
        ),
        ("task: gtp\nmodel: {depth: 3}", "or module:Class of your own. Nearest valid: gpt."),
        ("task: mesh\nmesh: {stage: 2}", "task='mesh' in {path}: must be one of 'bert', 'gpt', "),
        (
            "task: resnet\nresnet: {dept: 14}",
            "model.dept in {path} is not a field. Nearest valid: m",
        ),
        ("task: resnet\nmodel: 3", "model=3 in {path}: must be a section with fields."),
        ("pipeline: 1f1b", "pipeline='1f1b' in {path}: must be a section with fields."),
        ("mesh:", "mesh=null in {path}: must be a section with fields."),
        (
            "pipeline: {remat: ful}",
            "must be one of 'auto', 'none', 'dots' or 'full'. Nearest valid: full.",
        ),
    ],
)
def test_wrong_names_and_types_name_the_field(tmp_path, text, expected):
    path = _write(tmp_path, text)
    (message,) = _messages(path)
    assert expected.format(path=path) in message


def test_all_failures_of_a_file_at_once(tmp_path):
    path = _write(tmp_path, "run_dir: 5\nmesh: {stages: 2, data: two}\ntrain: {steps: 4}\n")
    invocation = command_line.parse(["--config", str(path)])
    fields = {field for failure in invocation.failures for field in failure.fields}
    assert fields == {"run_dir", "mesh.stages", "mesh.data"}
    # What is right is kept, so that it is checked in the same run.
    assert invocation.config.train.steps == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mesh: [", "cannot be read as YAML.*line 1"),
        ("- mesh", "must hold sections such as 'mesh:'"),
        ("mesh: {stage: 1, stage: 2}", "stage is given twice"),
        ("mesh: {stage: 1}\nmesh: {data: 2}", "mesh is given twice"),
        ("? [a, b]\n: 3", "cannot be read as YAML"),
        ("~: 2", "a key must be text, such as 'mesh'"),
        ("mesh: {1: 2}", "a key must be text, such as 'mesh'"),
        (f"train: {{steps: {'9' * 5000}}}", r"'9+\.\.\.9+' is not a valid int"),
        (f"train: {{steps: 0x{'f' * 5000}}}", r"'0xf+\.\.\.f+' is not a valid int"),
        ('run_dir: "\\ud800"', r"'\\ud800' is not a valid str"),
        ('"\\ud800": 1', r"'\\ud800' is not a valid str"),
        (f"run_dir: *{'a' * 5000}", r"undefined alias 'a+\.\.\.a+'"),
        ("[" * 3000 + "]" * 3000, "cannot be read as YAML: it nests too deeply."),
    ],
)
def test_files_that_are_not_a_configuration(tmp_path, text, expected):
    path = _write(tmp_path, text)
    with pytest.raises(errors.ConfigError, match=f"(?s)--config={path} .*{expected}") as error:
        command_line.parse(["--config", str(path)])
    assert len(str(error.value)) < 1000


def test_no_tag_ends_in_a_traceback(tmp_path):
    contents = ("abc", "", "1:9", "2026-11-31", "0x", "_", "\u00e9", "[a]", "{a: 1}", "{? [a] : 1}")
    forms = ("run_dir: !!{} {}", "data: {{mix: {{a: !!{} {} }}}}", "? !!{} {}\n: 1")
    for name, content, form in itertools.product(TAGS, contents, forms):
        path = _write(tmp_path, form.format(name.rpartition(":")[2], content))
        with contextlib.suppress(errors.ConfigError):
            config_file.validate(config_file.load_yaml(path), source="a")


def test_files_that_are_no_text_missing_or_empty(tmp_path):
    path = _write(tmp_path, "")
    assert command_line.parse(["--config", str(path)]).config == config.Config()
    with pytest.raises(errors.ConfigError, match=r"does not exist. Files there: .*run\.yaml"):
        command_line.parse(["--config", str(tmp_path / "runs.yaml")])
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(errors.ConfigError, match="cannot be read as YAML"):
        command_line.parse(["--config", str(path)])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--mesh.stag", "2"], "--mesh.stage"),
        (["--mesh.stage", "two"], "--mesh.stage"),
        (["--pipeline.remat", "ful"], "full"),
        (["--train.steps"], "--train.steps"),
    ],
)
def test_command_line_errors_end_with_status_2(capsys, options, expected):
    with pytest.raises(SystemExit) as exit_:
        command_line.parse(options)
    assert exit_.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("task", [*tasks.names(), "toy_family:Toy"])
def test_help_lists_every_field_of_the_task_and_no_other(capsys, tmp_path, task):
    """Whether the task is that of a file or of the command line."""
    path = _write(tmp_path, f"task: {task}")
    for options in (["--config", str(path)], ["--task", task]):
        with pytest.raises(SystemExit) as exit_:
            command_line.parse(["--help", *options])
        assert exit_.value.code == 0
        printed = capsys.readouterr().out
        shown = set(re.findall(r"^\W (?:-h, )?(--[a-z][\w.-]*)", printed, re.MULTILINE))
        fields = {f"--{path.replace('_', '-')}" for path in config.Config(task=task).flat()}
        assert shown == fields | {"--help", "--config", "--resume", "--dry-run", "--evaluate"}
    if task == "toy_family:Toy":  # whose docstring describes its fields
        assert "Size of the residual stream. (default: 3)" in printed


LAUNCH = {"coordinator": "node7:8476", "num_processes": 4, "process_id": 0}
KEPT = {"patience_seconds": 9.0}
RESNET = {"run_dir": "r", "task": "resnet", "mesh": {"data": 4}}
OTHERS = {"model": {"num_heads": 2}, "bert": {}, "transformer": {"width": 8}}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        # As older versions wrote it into run folders and checkpoints: every family's section.
        (RESNET | OTHERS | {"resnet": {"depth": 14}}, RESNET | {"model": {"depth": 14}}),
        # As people wrote it.
        ({"task": "bert", "bert": {"width": 8}}, {"task": "bert", "model": {"width": 8}}),
        ({"task": "gpt", "model": {"width": 8}}, {"task": "gpt", "model": {"width": 8}}),
        ({"model": {"width": 8}, "bert": {"width": 9}}, {"model": {"width": 8}}),
        ({"task": "resnet", "model": {"depth": 14}}, {"task": "resnet", "model": {"depth": 14}}),
        # When actions could be cut into slices.
        ({"pipeline": {"slices": True, "chunks": 2}}, {"pipeline": {"chunks": 2}}),
        # When a run recorded how it was started.
        ({"distributed": LAUNCH | {"patience_seconds": 9.0}}, {"distributed": KEPT}),
    ],
)
def test_files_of_older_versions(tmp_path, raw, expected):
    assert config.upgraded(raw) == expected
    found = command_line.parse(["--config", str(_write(tmp_path, yaml.safe_dump(raw)))])
    assert found.failures == ()
    assert found.config == config.Config(**expected)


def test_a_run_records_no_launch_and_an_older_record_of_one_is_not_repeated(tmp_path, capsys):
    started = config.Config.model_validate({"distributed": LAUNCH | KEPT})
    assert not LAUNCH.keys() & yaml.safe_load(started.to_yaml())["distributed"].keys()
    recorded = checkpoint.describe(started, data_sha256="")["config"]
    assert recorded["distributed"] == KEPT | {"copy_every": 0}

    path = str(_write(tmp_path, yaml.safe_dump({"distributed": LAUNCH})))
    options = ["--distributed.coordinator=a:1", "--distributed.num-processes=2"]
    again = command_line.parse(["--config", path, *options, "--distributed.process-id=1"]).config
    assert distributed.find_processes(again, {}) == distributed.Processes(2, 1, "a:1")
    assert f"warning: {path} says how an earlier run was started" in capsys.readouterr().err
    # A file for all processes is the user's own.
    shared = {name: value for name, value in LAUNCH.items() if name != "process_id"}
    path = str(_write(tmp_path, yaml.safe_dump({"distributed": shared})))
    found = command_line.parse(["--config", path, "--distributed.process-id=3"]).config
    assert distributed.find_processes(found, {}) == distributed.Processes(4, 3, "node7:8476")
    assert capsys.readouterr().err == ""


def test_another_task_than_that_of_the_file(tmp_path):
    path = _write(tmp_path, "task: resnet\nmodel: {depth: 14, norm: batch}\nmesh: {data: 3}\n")
    invocation = command_line.parse(["--config", str(path), "--task", "gpt", "--model.width", "8"])
    fields = [failure.fields for failure in invocation.failures]
    assert sorted(fields) == [("model.depth",), ("model.norm",)]
    assert invocation.config.task == "gpt"
    assert (invocation.config.model.width, invocation.config.mesh.data) == (8, 3)


# A model family of somebody's own.

TOY = "toy_family:Toy"


def test_what_is_wrong_with_it_is_said_with_all_else(tmp_path):
    path = _write(tmp_path, f"task: {TOY}\nmodel: {{widht: 3, activation: tan, noise: no}}\n")
    assert _messages(path) == [
        f"model.activation='tan' in {path}: must be one of 'tanh' or 'sin'. Nearest valid: tanh.",
        f"model.noise=False in {path}: must be a number.",
        f"model.widht in {path} is not a field. Nearest valid: model.width, model.noise.",
    ]
    sections = {"model": {"width": 0, "num_layers": 3}, "optimizer": {"warmup_steps": 999}}
    found = checks.check(config.Config(task=TOY, **sections), writes=False)
    assert [failure.fields[0] for failure in found] == [
        *("model.width", "model.num_layers", "optimizer.warmup_steps"),
    ]


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("gtp", "'resnet', 'transformer' or 'vision_language', or module:Class of your own"),
        ("toy_famly:Toy", "No module named 'toy_famly'"),
        ("toy_family:Numbers", "toy_family defines no Numbers that is one"),
    ],
)
def test_families_that_do_not_exist_are_refused(tmp_path, task, expected):
    """Of a file beside what else is wrong with it; of the command line at once."""
    (message,) = _messages(_write(tmp_path, f"task: {task}\nmodel: {{depth: 3}}\n"))
    path = _write(tmp_path, "")
    with pytest.raises(errors.ConfigError) as error:
        command_line.parse(["--config", str(path), "--task", task])
    for said in (message, str(error.value)):
        assert said.startswith(f"task={task!r} in ")
        assert expected in said
