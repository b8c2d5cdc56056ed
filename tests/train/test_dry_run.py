"""What a dry run shows: the bubble of the tables that are executed, parameters and memory."""

import io
import types

import jax
import numpy as np
import pytest
from rich.console import Console
from tiny_tasks import config

from jaxpipe.measure import predicted_bytes
from jaxpipe.runtime import assembly
from jaxpipe.runtime.layer_costs import end_costs, layer_costs
from jaxpipe.runtime.memory import buffers
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.device_clock import replay
from models import gpt
from train import dry_run, pipeline_section
from train.loop import headline
from train.modes import Asynchronous, Synchronous
from train.step import Setup

COSTS = {Kind.F: 1.0, Kind.B: 1.2, Kind.W: 0.8, Kind.BW: 2.0}


def shown(show, *args, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(console, *args)
    return console.file.getvalue()


@pytest.fixture
def overlaps(monkeypatch):
    """The tables of GPUs, whose messages travel under layers."""
    monkeypatch.setattr(assembly, "transfers_overlap", lambda mesh: True)


def make(task: str, *, stages: int, asynchronous=(), model=(), **fields) -> Setup:
    model = {} if task == "transformer" else {"num_layers": 10} | dict(model)
    mesh, pipeline = {"stage": stages, "data": 1}, {"microbatches": 4, **fields}
    asynchronous = dict(asynchronous)
    return Setup(config(task, model=model, mesh=mesh, pipeline=pipeline, asynchronous=asynchronous))


def costs_of_chunks(setup: Setup) -> np.ndarray:
    """Of every virtual stage: the FLOPs of its layers, and of what the ends compute beside them;
    the number of its layers where these are alike and all."""
    costs = np.ones(setup.task.num_layers)
    at_ends = not setup.pipe.table.together and not pipeline_section.is_asynchronous(setup.config)
    if isinstance(setup.shapes["layers"], tuple) or at_ends:
        rng = jax.eval_shape(lambda: setup.rng(0))
        parts = layer_costs(setup.pipe, setup.batch_shapes, rng)
        costs = np.array([part.f + part.b + part.w for part in parts])
    if at_ends:
        embed, head = end_costs(setup.pipe, setup.batch_shapes, rng)
        costs[0], costs[-1] = costs[0] + embed, costs[-1] + head
    ends = np.cumsum(setup.layer_counts)
    return np.array([part.sum() for part in np.split(costs, ends[:-1])])


def executed_bubble(setup: Setup) -> float:
    """Of the table that the executor runs, on the device clock."""
    table, chunks = setup.pipe.table, costs_of_chunks(setup)
    held = setup.schedule.placement.virtual_stages
    work = np.zeros((table.num_ticks, len(held)))
    for kind, columns in table.passes.items():
        for tick, stage in np.argwhere(columns.layers > 0):
            s = held[stage][columns.chunk[tick, stage]]
            assert columns.layers[tick, stage] == setup.layer_counts[s]
            work[tick, stage] += COSTS[kind] * chunks[s]
    return 1 - work.sum() / (len(held) * replay(table, work)[-1].max())


@pytest.mark.parametrize(
    ("task", "stages", "fields"),
    [
        ("toy_family:Uneven", 2, {"schedule": "1f1b", "partition": "7,3"}),
        ("gpt", 4, {"schedule": "1f1b", "vocabulary": "split"}),
        ("toy_family:Toy", 2, {"schedule": "zb-v", "partition": "4,3,2,1"}),
        ("toy_family:Toy", 2, {"schedule": "interleaved-fused"}),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("transformer", 2, {"schedule": "gpipe-fused", "partition": "1,3"}),
                ("gpt", 4, {"schedule": "1f1b", "vocabulary": "ends"}),
                ("toy_family:Uneven", 2, {"schedule": "auto"}),
            )
        ),
    ],
)
def test_the_bubble_is_that_of_the_table_that_is_executed(overlaps, task, stages, fields):
    setup = make(task, stages=stages, **fields)
    bubble = Synchronous(setup).bubble(1)
    assert bubble == pytest.approx(executed_bubble(setup), abs=1e-9)
    # No stage works longer than the whole, and the fullest has its work to do.
    chunks, held = costs_of_chunks(setup), setup.schedule.placement.virtual_stages
    loads = [chunks[list(own)].sum() for own in held]
    assert bubble >= 1 - np.mean(loads) / np.max(loads) - 1e-9
    said = shown(dry_run._show_timeline, setup)
    assert f"bubble {bubble:.1%}" in said.splitlines()[-1]


def test_what_every_chunk_costs_changes_the_bubble_that_is_told(overlaps):
    balanced, lopsided = (
        make("toy_family:Uneven", stages=4, schedule="1f1b", partition=counts)
        for counts in ("3,2,2,3", "7,1,1,1")
    )
    chunks = costs_of_chunks(lopsided)
    least = 1 - chunks.mean() / chunks.max()
    assert Synchronous(balanced).bubble(1) < least < Synchronous(lopsided).bubble(1)
    for line in shown(dry_run._show_timeline, lopsided).splitlines()[-2:]:
        assert float(line.rsplit("bubble ")[-1].rstrip("%")) >= 100 * least - 0.05


@pytest.mark.parametrize(
    ("task", "stages", "segment", "fields"),
    [
        ("toy_family:Uneven", 4, None, {"schedule": "pipemare"}),
        ("toy_family:Uneven", 2, 1, {"schedule": "pipedream", "partition": "7,3"}),
        ("toy_family:Toy", 4, None, {"schedule": "pipemare"}),
    ],
)
def test_an_asynchronous_pipeline_waits_for_its_slowest_stage(task, stages, segment, fields):
    setup = make(task, stages=stages, asynchronous={"recompute_segment": segment}, **fields)
    mode, chunks = Asynchronous(setup), costs_of_chunks(setup)
    most = chunks.mean() / chunks.max()
    assert most < 0.98
    values = {"correction": np.zeros(stages)}
    told = [mode.metrics(step, values)["utilization"] for step in range(1, 5)]
    fill = [mode.steady.work_ratio(k) for k in range(4)]
    assert told == pytest.approx([most * ratio for ratio in fill])
    assert told[-1] == pytest.approx(most)
    assert mode.bubble(4) == pytest.approx(1 - most)
    said = shown(dry_run._show_steady_state, setup, mode)
    whole = most * 80 / (80 + 2 * stages - 1)  # 20 steps of 4 microbatches
    assert f"utilization: {most:.1%} in the steady state" in said
    assert f"with filling and draining once {whole:.1%}" in said


def test_a_drawing_in_text_that_is_too_wide_is_left_out():
    """Layers whose costs are far apart must not end a dry run."""
    setup = make("gpt", stages=2, schedule="1f1b", model={"num_layers": 2})
    setup.layer_costs = [1e-9, 1.0]
    said = shown(dry_run._show_timeline, setup)
    assert "A drawing in text needs" in said
    assert "free-running clock: makespan" in said
    assert "device clock: makespan" in said


# Parameters and memory.


def made(mesh, **pipeline) -> Setup:
    pipeline = {"zero": 0, "partition": "3,2"} | pipeline
    return Setup(config("gpt", model={"num_layers": 5}, mesh=mesh, pipeline=pipeline))


@pytest.fixture(scope="module")
def setup():
    return made({"stage": 2, "data": 2})


def test_devices_share_layers_along_the_axes_that_are_asked_for(setup):
    assert setup.mesh.axis_names == ("data", "stage")
    shared = made({"stage": 2, "data": 1, "context": 2, "tensor": 2})
    assert dict(shared.mesh.shape) == {"data": 1, "stage": 2, "context": 2, "tensor": 2}
    assert shared.pipe.axes.model == ("tensor", "context")
    assert "2 stages x 1 data shards x 2 context devices x 2 tensor devices" in headline(shared)


@pytest.mark.parametrize(("data", "replica", "level"), [(2, 1, 3), (1, 1, 0), (2, 2, 0)])
def test_the_level_of_zero_is_announced_that_runs(data, replica, level):
    mesh = {"stage": 2, "data": data, "replica": replica}
    made = Setup(config(mesh=mesh, pipeline={"zero": 3}))
    assert headline(made).endswith(f"ZeRO-{level}")


def test_parameters_are_counted_by_chunk_and_device(setup):
    said = shown(dry_run.show_parameters, setup)
    layers = jax.eval_shape(setup.task.init, jax.random.key(0))["layers"]
    layer = sum(leaf.size for leaf in jax.tree.leaves(layers)) // 5
    whole = gpt.num_parameters(setup.task.shape)
    assert f"{whole:,} parameters: {5 * layer:,} in 5 layers, {whole - 5 * layer:,} in" in said
    for own, stage, held in ((3, 0, "0 to 2"), (2, 1, "3 to 4")):
        assert f"│ {stage}     │ 0     │ {held} │ {own * layer:,}" in said
    # ZeRO-0: a device holds the layers of its stage, padded to the fullest, and half of each table.
    table = setup.task.shape.vocab_size * setup.task.shape.width
    each = 3 * layer + table // 2 + whole - 5 * layer - table
    assert f"Each device holds {each:,} between steps." in said


def test_every_part_of_the_memory_has_words(setup):
    rng = jax.eval_shape(lambda: setup.rng(0))
    found = predicted_bytes(setup.pipe, setup.batch_shapes, rng)
    assert found.keys() <= dry_run._PARTS.keys()


def test_slices_are_parts_of_microbatches_in_what_is_shown():
    sliced = made({"stage": 2, "data": 1}, sequence_slices=4)
    assert buffers(sliced.pipe, sliced.batch_shapes).keys() <= dry_run._PARTS.keys()
    said = shown(dry_run._show_timeline, sliced)
    assert "microbatches in flight at most, stage by stage: 1.25 1\n" in said


def test_the_verdict_compares_with_the_devices(setup):
    for limit, total, said in (
        (80, 60, "needs 60 GB of memory: this fits, at 75% of the 80 GB"),
        (80, 90, "needs 90 GB of memory: this DOES NOT FIT into the 80 GB"),
        (0, 90, "needs 90 GB of memory; how much there is, is not known"),
    ):
        device = types.SimpleNamespace(
            platform="gpu",
            device_kind="H",
            process_index=0,
            memory_stats=lambda limit=limit: {"bytes_limit": limit * 1e9},
        )
        mesh = types.SimpleNamespace(devices=np.array([device] * 4, dtype=object))
        assert said in dry_run.verdict(types.SimpleNamespace(mesh=mesh), total * 10**9)
    assert "4 simulated devices of 1e-09 GB each need" in dry_run.verdict(setup, 1)


def test_no_line_is_wider_than_the_terminal(setup):
    stats = types.SimpleNamespace(
        argument_size_in_bytes=10**6, temp_size_in_bytes=0, output_size_in_bytes=9,
        alias_size_in_bytes=9,
    )  # fmt: skip
    parts = dict.fromkeys(dry_run._PARTS.values(), 10**9)
    said = shown(dry_run.show_memory, setup, parts, stats, width=60)
    said += shown(dry_run.show_parameters, setup, width=60)
    assert max(map(len, said.splitlines())) <= 60
    assert "all, compiled" in said
    assert "1.00" in said
