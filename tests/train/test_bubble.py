"""The bubble and the utilization that the trainer tells, against the tables that it executes."""

from __future__ import annotations

import io

import jax
import numpy as np
import pytest
from rich.console import Console
from tiny_tasks import TINY

from jaxpipe.runtime import assembly
from jaxpipe.runtime.measure.costs import end_costs, layer_costs
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.device_clock import replay
from train import configured, dry_run
from train.config import Config
from train.modes import Asynchronous, Synchronous
from train.step import Setup

COSTS = {Kind.F: 1.0, Kind.B: 1.2, Kind.W: 0.8, Kind.BW: 2.0}
GPT = {"vocab_size": 40, "sequence_length": 8, "width": 8, "num_heads": 2}


@pytest.fixture(autouse=True)
def overlaps(monkeypatch):
    """The tables of GPUs, whose messages travel under layers."""
    monkeypatch.setattr(assembly, "transfers_overlap", lambda mesh: True)


def make(task: str, *, stages: int, microbatches: int = 4, asynchronous=None, model=None, **fields):
    return Setup(
        Config(
            task=task,
            model=(GPT if task == "gpt" else TINY[task]) | (model or {}),
            mesh={"stage": stages, "data": 1},
            pipeline={"microbatches": microbatches, **fields},
            asynchronous=asynchronous or {},
            train={"batch_size": max(8, microbatches), "steps": 20},
        )
    )


def costs_of_chunks(setup: Setup) -> np.ndarray:
    """Of every virtual stage: the FLOPs of its layers, and of what the ends compute beside them;
    the number of its layers where these are alike and all."""
    costs = np.ones(setup.task.num_layers)
    at_ends = not setup.pipe.table.together and not configured.is_asynchronous(setup.config)
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


def printed(show, *args) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(console, *args)
    return console.file.getvalue()


SYNCHRONOUS = [
    ("resnet", 2, {"schedule": "1f1b", "partition": "3,1"}),
    ("transformer", 2, {"schedule": "gpipe-fused", "partition": "1,3"}),
    ("gpt", 4, {"schedule": "1f1b", "vocabulary": "split"}),
    ("gpt", 4, {"schedule": "1f1b", "vocabulary": "ends"}),
    ("gpt", 2, {"schedule": "zb-v", "partition": "4,3,2,1"}),
    ("gpt", 2, {"schedule": "interleaved-fused"}),
    ("resnet", 2, {"schedule": "auto"}),
]


@pytest.mark.parametrize(("task", "stages", "fields"), SYNCHRONOUS)
def test_the_bubble_is_that_of_the_table_that_is_executed(task, stages, fields):
    setup = make(task, stages=stages, **fields, model={"num_layers": 10} if task == "gpt" else {})
    bubble = Synchronous(setup).bubble(1)
    assert bubble == pytest.approx(executed_bubble(setup), abs=1e-9)
    # No stage works longer than the whole, and the fullest has its work to do.
    chunks, held = costs_of_chunks(setup), setup.schedule.placement.virtual_stages
    loads = [chunks[list(own)].sum() for own in held]
    assert bubble >= 1 - np.mean(loads) / np.max(loads) - 1e-9
    shown = printed(dry_run._show_timeline, setup)
    assert f"bubble {bubble:.1%}" in shown.splitlines()[-1]


def test_what_every_chunk_costs_changes_the_bubble_that_is_told():
    balanced, lopsided = (
        make("resnet", stages=4, schedule="1f1b", partition=counts, model={"depth": 20})
        for counts in ("3,2,2,3", "7,1,1,1")
    )
    chunks = costs_of_chunks(lopsided)
    least = 1 - chunks.mean() / chunks.max()
    assert Synchronous(balanced).bubble(1) < 0.5 < least < Synchronous(lopsided).bubble(1)
    for line in printed(dry_run._show_timeline, lopsided).splitlines()[-2:]:
        assert float(line.rsplit("bubble ")[-1].rstrip("%")) >= 100 * least - 0.05


@pytest.mark.parametrize(
    ("task", "stages", "segment", "fields"),
    [
        ("resnet", 4, None, {"schedule": "pipemare"}),
        ("resnet", 2, 1, {"schedule": "pipedream", "partition": "3,1"}),
        ("gpt", 4, None, {"schedule": "pipemare"}),
    ],
)
def test_an_asynchronous_pipeline_waits_for_its_slowest_stage(task, stages, segment, fields):
    setup = make(
        task,
        stages=stages,
        asynchronous={"recompute_segment": segment},
        model={"num_layers": 10} if task == "gpt" else {},
        **fields,
    )
    mode, chunks = Asynchronous(setup), costs_of_chunks(setup)
    most = chunks.mean() / chunks.max()
    assert most < 0.98
    values = {"correction": np.zeros(stages)}
    told = [mode.metrics(step, values)["utilization"] for step in range(1, 5)]
    fill = [mode.steady.work_ratio(k) for k in range(4)]
    assert told == pytest.approx([most * ratio for ratio in fill])
    assert told[-1] == pytest.approx(most)
    assert mode.bubble(4) == pytest.approx(1 - most)
    shown = printed(dry_run._show_steady_state, setup, mode)
    whole = most * 80 / (80 + 2 * stages - 1)  # 20 steps of 4 microbatches
    assert f"utilization: {most:.1%} in the steady state" in shown
    assert f"with filling and draining once {whole:.1%}" in shown


def test_a_drawing_in_text_that_is_too_wide_is_left_out():
    """Layers whose costs are far apart must not end a dry run."""
    setup = make("gpt", stages=2, schedule="1f1b", model={"num_layers": 2})
    setup.layer_costs = [1e-9, 1.0]
    shown = printed(dry_run._show_timeline, setup)
    assert "A drawing in text needs" in shown
    assert "free-running: makespan" in shown
    assert "device: makespan" in shown
