"""What is refused, in the names of Python, of the command line and of a configuration's fields."""

from __future__ import annotations

import pickle
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jaxpipe
from jaxpipe.asynchronous import SteadyState
from jaxpipe.commands import options
from jaxpipe.runtime.layers.split import split_layer
from jaxpipe.schedule import catalog
from jaxpipe.schedule.formats import user
from jaxpipe.schedule.generators.depth_first import interleaved
from jaxpipe.schedule.generators.hanayo import hanayo
from jaxpipe.schedule.partition import Memory, partition
from jaxpipe.schedule.placement import linear
from jaxpipe.schedule.problems import ArgumentError, Problem
from jaxpipe.schedule.search.auto import auto
from jaxpipe.schedule.search.controllable_memory import controllable_memory
from models import gpt
from train import errors


def build(name: str, **numbers) -> partial:
    return partial(catalog.build, name, **{"stages": 4, "microbatches": 8, **numbers})


READ_BY = "Read by hanayo, hanayo-fused, controllable-memory, auto."
SURFACES = [
    (
        build("gpipe", stages=0, microbatches=-1),
        "stages=0 must be at least 1.\nNearest valid: 1.\n"
        "microbatches=-1 must be at least 1.\nNearest valid: 1.",
        "--stages 0 must be at least 1.\nNearest valid: 1.\n"
        "--microbatches -1 must be at least 1.\nNearest valid: 1.",
        "mesh.stage=0 must be at least 1. Nearest valid: 1.\n"
        "pipeline.microbatches=-1 must be at least 1. Nearest valid: 1.",
    ),
    (
        build("interleaved", group=1),
        "group=1 does not fit schedule 'interleaved': it must be at least half of stages=4.\n"
        "Nearest valid: 2.",
        "--group 1 does not fit schedule 'interleaved': it must be at least half of --stages 4.\n"
        "Nearest valid: 2.",
        "pipeline.group=1 does not fit schedule 'interleaved': it must be at least half of "
        "mesh.stage=4. Nearest valid: 2.",
    ),
    (
        build("zb-h1", memory_limit=2),
        "memory_limit=2 does not fit schedule 'zb-h1': it does not read it.\n"
        f"Nearest valid: leave it out. {READ_BY}",
        "--memory-limit 2 does not fit schedule 'zb-h1': it does not read it.\n"
        f"Nearest valid: leave it out. {READ_BY}",
        "pipeline.memory_limit=2 does not fit schedule 'zb-h1': it does not read it. "
        f"Nearest valid: leave it out. {READ_BY}",
    ),
    (
        build("pipemare"),
        "name='pipemare' never drains the pipeline, so no order of actions describes it: "
        "AsyncPipeline and train.py train with it.\nNearest valid: '1f1b'.",
        "'pipemare' never drains the pipeline, so no order of actions describes it: "
        "AsyncPipeline and train.py train with it.\nNearest valid: '1f1b'.",
        "pipeline.schedule='pipemare' never drains the pipeline, so no order of actions describes "
        "it: AsyncPipeline and train.py train with it. Nearest valid: '1f1b'.",
    ),
    (
        partial(SteadyState, 4, 2, "2bw"),
        "method='2bw' keeps two weight versions: num_microbatches=2 on 4 stages needs more.\n"
        "Nearest valid: num_microbatches=7.",
        "'2bw' keeps two weight versions: --microbatches 2 on 4 stages needs more.\n"
        "Nearest valid: --microbatches 7.",
        "pipeline.schedule='2bw' keeps two weight versions: pipeline.microbatches=2 on 4 stages "
        "needs more. Nearest valid: pipeline.microbatches=7.",
    ),
    (
        partial(user.load, "a.csv", num_stages=2, num_microbatches=None, num_chunks=1, group=2),
        "name='a.csv' is a schedule as it stands: leave out num_chunks, group.",
        "'a.csv' is a schedule as it stands: leave out --chunks, --group.",
        "pipeline.schedule='a.csv' is a schedule as it stands: leave out pipeline.chunks, "
        "pipeline.group.",
    ),
]


@pytest.mark.parametrize(("call", "python", "command_line", "trainer"), SURFACES)
def test_a_problem_is_told_in_the_names_of_each_surface(call, python, command_line, trainer):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value) == python
    assert options.message(caught.value) == command_line
    name = caught.value.problems[0].schedule or ""
    failures = list(errors.of_schedule(caught.value, name))
    assert "\n".join(failure.message for failure in failures) == trainer
    assert str(pickle.loads(pickle.dumps(caught.value))) == python


def test_the_trainer_knows_which_fields_a_rule_reads():
    with pytest.raises(ArgumentError) as caught:
        SteadyState(4, 2, "2bw")
    (failure,) = errors.of_schedule(caught.value, "2bw")
    assert set(failure.fields) == {"pipeline.schedule", "mesh.stage", "pipeline.microbatches"}


def test_the_trainer_names_the_schedule_it_was_asked_for():
    with pytest.raises(ArgumentError) as caught:
        catalog.build("1f1b", stages=2, microbatches=2, group=2)
    (failure,) = errors.of_schedule(caught.value, "pipemare")
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
    (failure,) = errors.of_fp8(ArgumentError([problem]))
    rule = "needs layers that are alike. Nearest valid: leave it out."
    assert failure.message == f"pipeline.fp8='*up,*down' {rule}"


def test_what_a_value_says_is_not_read_as_an_argument():
    problem = Problem("name", "$num_stages {}", "costs 5$: $num_stages", (), {"num_stages": 2})
    assert problem.lines() == ["name='$num_stages {}' costs 5$: num_stages=2."]


def one_layer(**given):
    """A pipeline of one layer on one stage."""
    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=lambda w, x, batch, rng: jnp.tanh(x @ w),
        head_loss=lambda outer, x, batch, rng: jnp.mean(x**2),
    )
    params = {"embed": {}, "layers": jnp.ones((1, 3, 3)), "head": {}}
    schedule = catalog.build("1f1b", stages=given.pop("stages", 1), microbatches=2)
    return jaxpipe.Pipeline(
        model, params, schedule=schedule, mesh=jaxpipe.make_mesh(stage=1), **given
    )


REFUSED = {
    "unknown name": build("1f1d"),
    "asynchronous": build("2bw"),
    "out of range": build("1f1b", stages=0, microbatches=0, chunks=0, group=0, memory_limit=0),
    "chunks": build("gpipe", chunks=2),
    "group": build("gpipe", group=2),
    "multiple": build("hanayo", chunks=3),
    "small group": build("interleaved", group=1),
    "small limit": build("auto", memory_limit=0.5),
    "interleaved": partial(interleaved, 4, 8, group=1),
    "hanayo": partial(hanayo, 4, 8, memory_limit=0.5),
    "controllable memory": partial(controllable_memory, 8, 32, memory_limit=1),
    "auto": partial(auto, 3, 4, memory_limit=0),
    "method": partial(SteadyState, 4, 8, "gpipe"),
    "2bw": partial(SteadyState, 4, 2, "2bw"),
    "segment": partial(SteadyState, 2, 2, recompute_segment=3),
    "few layers": partial(partition, [1] * 3, linear(4)),
    "memory": partial(partition, [1] * 4, linear(4), memory=Memory([1] * 4, [1] * 4, 1, 1)),
    "registered": partial(catalog.register, "1f1b"),
    "own file": partial(user.load, "mine.csv", num_stages=4, num_microbatches=8),
    "own function": partial(user.load, "mine:f", num_stages=None, num_microbatches=8),
    "mesh": partial(jaxpipe.make_mesh, stage=0, data=-1),
    "devices": partial(jaxpipe.make_mesh, stage=1000, data=1000),
    "stages": partial(one_layer, stages=2),
    "pipeline": partial(one_layer, zero=4, remat="ful", weights="rows", weight_slots=0),
    "layer counts": partial(one_layer, layer_counts=[2]),
    "remat": partial(split_layer, jax.lax.mul, 1.0, 1.0, remat="ful"),
    "asynchronous pipeline": lambda: jaxpipe.AsyncPipeline(
        one_layer(), None, rescheduling_steps=0, discrepancy_decay=2.0, clip_norm=0.0
    ),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_the_library_knows_no_names_of_the_trainer(call):
    with pytest.raises(ValueError, match=r"\w") as caught:
        call()
    assert not re.search(r"\b(pipeline|mesh|model|asynchronous)\.\w", str(caught.value))
