"""What a dry run says about parameters and memory."""

import io
import types

import jax
import pytest
from rich.console import Console

from jaxpipe.runtime.measure.traced import buffers
from models import gpt
from train import dry_run
from train.config import Config
from train.loop import headline
from train.step import Setup

pytestmark = pytest.mark.pipeline


def made(mesh, **pipeline):
    tree = {
        "model": {
            "vocab_size": 64, "sequence_length": 8, "num_layers": 5, "width": 16, "num_heads": 2,
        },
        "mesh": mesh,
        "pipeline": {"schedule": "1f1b", "microbatches": 2, "zero": 0, "partition": "3,2"}
        | pipeline,
        "train": {"batch_size": 8},
    }  # fmt: skip
    return Setup(Config.model_validate(tree))


@pytest.fixture(scope="module")
def setup():
    return made({"stage": 2, "data": 2})


def test_devices_share_layers_along_the_axes_that_are_asked_for(setup):
    assert setup.mesh.axis_names == ("data", "stage")
    shared = made({"stage": 2, "data": 1, "context": 2, "tensor": 2})
    assert dict(shared.mesh.shape) == {"data": 1, "stage": 2, "context": 2, "tensor": 2}
    assert shared.pipe.axes.model == ("tensor", "context")
    assert "2 stages x 1 data shards x 2 context devices x 2 tensor devices" in headline(shared)


def _shown(show, *arguments, width=200):
    console = Console(file=io.StringIO(), width=width)
    show(console, *arguments)
    return console.file.getvalue()


def test_parameters_are_counted_by_chunk_and_device(setup):
    shown = _shown(dry_run.show_parameters, setup)
    layers = jax.eval_shape(setup.task.init, jax.random.key(0))["layers"]
    layer = sum(leaf.size for leaf in jax.tree.leaves(layers)) // 5
    whole = gpt.num_parameters(setup.task.shape)
    assert f"{whole:,} parameters: {5 * layer:,} in 5 layers, {whole - 5 * layer:,} in" in shown
    for own, stage, held in ((3, 0, "0 to 2"), (2, 1, "3 to 4")):
        assert f"│ {stage}     │ 0     │ {held} │ {own * layer:,}" in shown
    # ZeRO-0: a device holds the layers of its stage, padded to the fullest, and half of each table.
    outer = whole - 5 * layer - 64 * 16
    assert f"Each device holds {3 * layer + 64 * 16 // 2 + outer:,} between steps." in shown


def test_every_part_of_the_memory_has_words(setup):
    from jaxpipe.measure import predicted_bytes

    rng = jax.eval_shape(lambda: setup.rng(0))
    found = predicted_bytes(setup.pipe, setup.batch_shapes, rng)
    assert found.keys() <= dry_run._PARTS.keys()


def test_slices_are_parts_of_microbatches_in_what_is_shown():
    sliced = made({"stage": 2, "data": 1}, sequence_slices=4)
    assert buffers(sliced.pipe, sliced.batch_shapes).keys() <= dry_run._PARTS.keys()
    shown = _shown(dry_run._show_timeline, sliced)
    assert "microbatches in flight at most, stage by stage: 1.25 1\n" in shown


@pytest.mark.parametrize(
    ("kind", "limit", "total", "said"),
    [
        ("gpu", 80e9, 60e9, "needs 60 GB of memory: this fits, at 75% of the 80 GB"),
        ("gpu", 80e9, 90e9, "needs 90 GB of memory: this DOES NOT FIT into the 80 GB"),
        ("gpu", 0, 90e9, "needs 90 GB of memory; how much there is, is not known"),
    ],
)
def test_the_verdict_compares_with_the_devices(setup, kind, limit, total, said):
    import numpy as np

    device = types.SimpleNamespace(
        platform=kind, device_kind="H", process_index=0, memory_stats=lambda: {"bytes_limit": limit}
    )
    there = types.SimpleNamespace(
        mesh=types.SimpleNamespace(devices=np.array([device] * 4, dtype=object))
    )
    assert said in dry_run.verdict(there, int(total))
    assert "4 simulated devices of 1e-09 GB each need" in dry_run.verdict(setup, 1)


def test_no_line_is_wider_than_the_terminal(setup):
    stats = types.SimpleNamespace(
        argument_size_in_bytes=10**6, temp_size_in_bytes=0, output_size_in_bytes=9,
        alias_size_in_bytes=9,
    )  # fmt: skip
    parts = dict.fromkeys(dry_run._PARTS.values(), 10**9)
    shown = _shown(dry_run.show_memory, setup, parts, stats, width=60)
    shown += _shown(dry_run.show_parameters, setup, width=60)
    assert max(map(len, shown.splitlines())) <= 60
    assert "all, compiled" in shown
    assert "1.00" in shown
