"""What is refused, in the names of Python, of the command line and of a configuration's fields."""

import ast
import pickle
import re
from functools import partial
from pathlib import Path

import pytest

import jaxpipe
from jaxpipe.asynchronous import SteadyState
from jaxpipe.commands import options
from jaxpipe.schedule import catalog, formats
from jaxpipe.schedule.problems import ArgumentError, Problem
from models import gpt
from train import errors


def build(name: str, **numbers) -> partial:
    return partial(catalog.build, name, **{"stages": 4, "microbatches": 8, **numbers})


SURFACES = {
    "several": (
        build("gpipe", stages=0, microbatches=-1),
        "stages=0 must be at least 1.\nNearest valid: 1.\n"
        "microbatches=-1 must be at least 1.\nNearest valid: 1.",
    ),
    "two in one": (
        build("interleaved", group=1),
        "group=1 does not fit schedule 'interleaved': it must be at least half of stages=4.\n"
        "Nearest valid: 2.",
    ),
    "left out": (
        build("zb-h1", memory_limit=2),
        "memory_limit=2 does not fit schedule 'zb-h1': the schedule has no such option.\n"
        "Leave memory_limit out. Used by hanayo, hanayo-fused, controllable-memory, auto.",
    ),
    "schedule": (
        build("pipemare"),
        "name='pipemare' never drains the pipeline, so it has no order of actions: "
        "use it with AsyncPipeline or train.py.\nNearest valid: '1f1b'.",
    ),
    "asynchronous": (
        partial(SteadyState, 4, 2, "2bw"),
        "method='2bw' keeps two weight versions: num_microbatches=2 on 4 stages needs more.\n"
        "Nearest valid: num_microbatches=7.",
    ),
}
NAMES = {
    "stages": ("--stages ", "mesh.stage="),
    "num_microbatches": ("--microbatches ", "pipeline.microbatches="),
    "microbatches": ("--microbatches ", "pipeline.microbatches="),
    "group": ("--group ", "pipeline.group="),
    "memory_limit": ("--memory-limit ", "pipeline.memory_limit="),
    "name": ("", "pipeline.schedule="),
    "method": ("", "pipeline.schedule="),
}
"""What stands before a value on the command line and in the trainer's messages, by argument."""


@pytest.mark.parametrize(("call", "python"), SURFACES.values(), ids=SURFACES)
def test_a_problem_is_told_in_the_names_of_each_surface(call, python):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value) == python
    assert str(pickle.loads(pickle.dumps(caught.value))) == python
    command_line = trainer = python
    for name, (option, field) in NAMES.items():
        leave = f"Leave {name} out"
        command_line = re.sub(rf"\b{name}=", option, command_line)
        command_line = command_line.replace(leave, f"Leave {option.strip()} out")
        trainer = re.sub(rf"(?<!\.)\b{name}=", field, trainer)
        trainer = trainer.replace(leave, f"Leave {field.strip('=')} out")
    assert options.message(caught.value) == command_line
    failures = list(errors.of_pipeline(caught.value, caught.value.problems[0].schedule or ""))
    found = [failure.message for failure in failures]
    assert found == re.sub(r"\n(?=Nearest|Leave)", " ", trainer).splitlines()


def test_arguments_that_have_no_place_are_told_in_the_names_of_each_surface():
    with pytest.raises(ArgumentError) as caught:
        formats.load("a.csv", num_stages=2, num_microbatches=None, num_chunks=1, group=2)
    assert str(caught.value).endswith("stands: leave out num_chunks, group.")
    assert options.message(caught.value).endswith("stands: leave out --chunks, --group.")
    (failure,) = errors.of_pipeline(caught.value, "a.csv")
    assert failure.message.endswith("stands: leave out pipeline.chunks, pipeline.group.")


def test_the_library_knows_no_names_of_the_trainer():
    """No text of its code, other than of commands, holds a field of a configuration."""
    folder = Path(jaxpipe.__file__).parent
    field = re.compile(r"(?<![\w.])(pipeline|mesh|model|asynchronous)\.[a-z]")
    for path in {*folder.rglob("*.py")} - {*(folder / "commands").iterdir()}:
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
        texts = {node for node in nodes if isinstance(node, ast.Constant)} - {*docstrings}
        assert not [node.value for node in texts if field.search(str(node.value))], path


def test_the_trainer_knows_which_fields_a_rule_reads():
    with pytest.raises(ArgumentError) as caught:
        SteadyState(4, 2, "2bw")
    (failure,) = errors.of_pipeline(caught.value, "2bw")
    assert set(failure.fields) == {"pipeline.schedule", "mesh.stage", "pipeline.microbatches"}


def test_the_trainer_names_the_schedule_it_was_asked_for():
    with pytest.raises(ArgumentError) as caught:
        catalog.build("1f1b", stages=2, microbatches=2, group=2)
    (failure,) = errors.of_pipeline(caught.value, "pipemare")
    assert "pipeline.group=2 does not fit schedule 'pipemare'" in failure.message


def test_a_model_names_its_own_fields_and_the_trainer_those_of_its_section():
    with pytest.raises(ArgumentError) as caught:
        gpt.GPTConfig(vocab_size=8, sequence_length=8, num_layers=1, width=8, num_heads=3)
    assert str(caught.value) == "num_heads=3 must divide width=8.\nNearest valid: 2, 4."
    (failure,) = errors.of_model(caught.value)
    assert failure.message == "model.num_heads=3 must divide model.width=8. Nearest valid: 2, 4."
    assert failure.fields == ("model.num_heads",)


def test_the_trainer_writes_patterns_as_its_field_has_them():
    problem = Problem("fp8", ["*up", "*down"], "needs layers that are alike", ((),))
    (failure,) = errors.of_pipeline(ArgumentError([problem]), "1f1b")
    rule = "needs layers that are alike. Leave pipeline.fp8 out."
    assert failure.message == f"pipeline.fp8='*up,*down' {rule}"


def test_what_a_value_says_is_not_read_as_an_argument():
    problem = Problem("name", "$num_stages {}", "costs 5$: $num_stages", (), {"num_stages": 2})
    assert problem.lines() == ["name='$num_stages {}' costs 5$: num_stages=2."]
