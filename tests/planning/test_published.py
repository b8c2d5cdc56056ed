"""The published runs of benchmarks/published.py: the file is whole, and predictions make sense."""

import math
import re

import pytest

from benchmarks import published, published_systems
from benchmarks.published_systems import Shape

RUNS = {run.id: run for run in published_systems.runs()}


def test_runs_are_whole():
    mixtures = sum(run.shape.experts > 0 for run in RUNS.values())
    assert mixtures >= 40
    assert len(RUNS) - mixtures >= 130
    for run in RUNS.values():
        assert re.fullmatch(r"20\d\d-[01]\d", run.date), run.id
        assert run.data * run.tensor * run.context * run.stages == run.gpus, run.id
        assert run.batch == run.microbatches * run.data * run.rows, run.id
        layers = run.shape.layers + run.shape.further
        assert sum(published_systems.layer_counts(run)) == layers, run.id
        assert run.measured > 0 if run.fits else run.memory_gb is None, run.id
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


def test_the_mixture_of_67b_has_its_parameters_and_takes_the_time_that_was_measured():
    shape = RUNS["K-snow-256"].shape
    per_expert = 3 * shape.width * shape.mlp_width
    shared, head = 3 * shape.width * 2560, 128
    attention = 2 * shape.width * head * (shape.heads + shape.kv_heads)
    of_layer = shape.experts * (per_expert + shape.width) + shared + attention
    assert shape.layers * of_layer + 2 * shape.vocabulary * shape.width == pytest.approx(
        67_078_882_816, rel=2e-3
    )
    run = RUNS["K-snow-256"]
    seconds = published_systems.system_seconds(run, published_systems.Rates())
    assert sum(seconds.values()) == pytest.approx(run.measured, rel=0.1)


def test_the_slowest_chunk_counts_where_layers_do_not_divide():
    counts = published_systems.layer_counts(RUNS["K-snow-256"])
    assert (sum(counts), set(counts)) == (26, {1, 2})
    ends = published_systems.layer_counts(RUNS["A-l405-512-fp8"])
    assert (ends[0], ends[1], ends[-1]) == (1, 2, 1)


def test_fitted_models_are_whole_and_few():
    models = {run.model for run in published.fitted(list(RUNS.values()))}
    dense = {run.model for run in RUNS.values() if not run.shape.experts}
    assert 2 < len(models) < len(dense) / 2
    assert all(run.device != "b200" for run in published.fitted(list(RUNS.values())))


def test_memory_is_near_the_measured():
    run = RUNS["F-1.5B-24-1F1B"]
    assert published_systems.system_bytes(run) / 1e9 == pytest.approx(run.memory_gb, rel=0.1)
