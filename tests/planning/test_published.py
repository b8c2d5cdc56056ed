"""The published runs of benchmarks/published.py: the file is whole, and predictions make sense."""

import math

import pytest

from benchmarks import published, published_systems
from benchmarks.published_systems import Shape

RUNS = {run.id: run for run in published_systems.runs()}


def test_runs_are_whole():
    assert len(RUNS) >= 70
    for run in RUNS.values():
        assert run.data * run.tensor * run.context * run.stages == run.gpus, run.id
        assert run.batch == run.microbatches * run.data * run.rows, run.id
        assert sum(published_systems.layer_counts(run)) == run.shape.layers, run.id
        assert run.measured > 0, run.id
        assert run.source, run.id


def dgxc_flops(shape: Shape, batch: int) -> float:
    """FLOPs of a step as NVIDIA/dgxc-benchmarking counts them: attention is not halved."""
    s, n, h, v = shape.length, shape.layers, shape.width, shape.vocabulary
    f, keys = shape.mlp_width * max(shape.experts_per_token, 1), shape.kv_heads / shape.heads
    if shape.gated:
        of_layers = 12 * n * h**2 * (1 + keys + s / h) + 18 * n * f * h
    else:
        of_layers = 24 * n * h**2 + 12 * n * h * s + 48 * n * h**2
    return batch * s * (of_layers + 6 * h * v)


def test_step_seconds_give_the_share_of_the_peak_that_sources_print():
    given = [run for run in RUNS.values() if run.mfu is not None and not run.shape.experts]
    assert len(given) >= 20
    for run in given:
        peak = (1979e12 if run.precision == "fp8" else 989e12) * run.gpus
        share = dgxc_flops(run.shape, run.batch) / (run.measured * peak)
        assert 100 * share == pytest.approx(run.mfu, rel=0.01), run.id
    mixture = RUNS["M-mixtral-64"]
    rate = dgxc_flops(mixture.shape, mixture.batch) / (mixture.measured * mixture.gpus)
    assert 1e-12 * rate == pytest.approx(mixture.tflops, rel=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        *("D-1.7B", "F-1.5B-24-1F1B"),
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("A-n15-16", "A-grok-8", "M-mixtral-64")
        ),
    ],
)
def test_predictions_are_finite_and_near_the_measured(name):
    run = RUNS[name]
    seconds = published_systems.system_seconds(run, published_systems.Rates())
    assert all(0 <= part < math.inf for part in seconds.values()), seconds
    assert sum(seconds.values()) == pytest.approx(run.measured, rel=0.25)


def test_parts_of_jaxpipes_program_add_up_to_its_step():
    prediction = published.own_prediction(RUNS["F-1.5B-24-1F1B"], published_systems.Rates())
    seconds = published.own_seconds(prediction)
    assert sum(seconds.values()) == pytest.approx(prediction.step_seconds)
    assert all(0 <= part < math.inf for part in seconds.values()), seconds


def test_memory_is_near_the_measured():
    run = RUNS["F-1.5B-24-1F1B"]
    assert published_systems.system_bytes(run) / 1e9 == pytest.approx(run.memory_gb, rel=0.1)
