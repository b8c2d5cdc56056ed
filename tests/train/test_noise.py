"""The noise scale: its estimates against known noise, and the gradient of one microbatch."""

import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from tiny_tasks import config

import jaxpipe
from train.step import Setup
from train.watch.noise import Gauge, Noise, microbatch_norm

CONFIG = config(pipeline={"microbatches": 3}, train={"batch_size": 12, "noise_every": 5})


def test_the_estimates_are_those_of_a_regression_whose_noise_is_known():
    """Rows x ~ N(0, I) and y = x.v + s e, at weights that are off by d.

    A row's gradient is x (x.d - s e), of mean d and variance (n + 1) |d|^2 + n s^2.
    """
    rng = np.random.default_rng(0)
    off, spread, few, many = rng.normal(size=20), 3.0, 4, 32
    gradient = off @ off
    variance = (off.size + 1) * gradient + off.size * spread**2
    means = Noise()
    gradients, variances = [], []
    for _ in range(4000):
        x, e = rng.normal(size=(many, off.size)), rng.normal(size=many)
        rows = x * (x @ off - spread * e)[:, None]
        norms = {n: float(np.linalg.norm(rows[:n].mean(0))) for n in (many, few)}
        estimate = Noise().after(norms)
        gradients.append(estimate.gradient)
        variances.append(estimate.variance)
        means = means.after(norms)
    # Within four standard errors of the mean, as the estimates are unbiased.
    for values, truth in ((gradients, gradient), (variances, variance)):
        error = np.std(values) / math.sqrt(len(values))
        assert abs(np.mean(values) - truth) < 4 * error < 0.2 * truth
    assert means.estimates == 4000


def test_first_estimates_count_alike_and_later_ones_fade():
    norms = [{1: 3.0 + n, 2: 2.0 + n} for n in range(40)]
    alone = [Noise().after(pair).variance for pair in norms]
    means = Noise()
    for n, pair in enumerate(norms, start=1):
        means = means.after(pair)
        if n <= 10:
            assert means.variance == pytest.approx(np.mean(alone[:n]))
    faded = sum(0.1 * 0.9**k * value for k, value in enumerate(reversed(alone[10:])))
    assert means.variance == pytest.approx(faded + 0.9**30 * np.mean(alone[:10]))


def test_there_is_no_scale_while_noise_hides_the_gradient():
    assert Noise(gradient=-1.0, variance=2.0, estimates=1).rows is None
    assert Noise(gradient=0.5, variance=2.0, estimates=1).rows == 4.0


@pytest.mark.pipeline
def test_the_norm_is_that_of_the_first_microbatch_of_all_data_shards():
    setup = Setup(CONFIG)
    state = setup.init()
    rows, _ = setup.task.load()
    batch = rows.read(np.arange(12), None)
    placed = jax.device_put(batch, setup.pipe.batch_sharding)
    norm = float(microbatch_norm(setup)(state, placed, setup.rng(0)))
    # A shard has six rows, of which every third belongs to a microbatch.
    first = jax.tree.map(lambda leaf: leaf[[0, 3, 6, 9]], batch)
    params = jax.tree.map(np.asarray, setup.to_canonical(state).params)
    model = setup.task.model(train=True)
    gradients = jax.jit(jax.grad(lambda params: jaxpipe.unpipelined.loss(model, params, first)[0]))(
        params
    )
    assert norm == pytest.approx(float(optax.tree.norm(gradients)), rel=1e-4)


@pytest.mark.end_to_end
def test_a_run_estimates_it_and_a_resumed_run_goes_on(toy_trainer, tmp_path):
    run = tmp_path / "run"
    alone = ("--mesh.stage", 1, "--mesh.data", 1)
    toy_trainer.run("--run-dir", run, *alone, "--train.noise-every", 3)
    path = run / "metrics.jsonl"
    records = {one["step"]: one for one in map(json.loads, path.read_text().splitlines())}
    noise = {step: record["noise"] for step, record in records.items() if "noise" in record}
    assert sorted(noise) == [3, 6, 9]
    assert [noise[step]["estimates"] for step in sorted(noise)] == [1, 2, 3]
    # A gauge reads what the run has recorded, and adds to its means.
    setup = SimpleNamespace(
        config=CONFIG,
        schedule=SimpleNamespace(num_microbatches=3),
        task=SimpleNamespace(unit="rows", units_per_row=1),
    )
    gauge = Gauge(setup, path)
    means = Noise(*(noise[9][name] for name in ("gradient", "variance", "estimates")))
    assert gauge.scale == means.rows
    after = means.after({4: 3.0, 12: 2.0})
    record = gauge.after({"microbatch_norm": 3.0, "grad_norm": 2.0})["noise"]
    assert record == {
        "scale_rows": after.rows, "gradient": after.gradient,
        "variance": after.variance, "estimates": 4,
    }  # fmt: skip
