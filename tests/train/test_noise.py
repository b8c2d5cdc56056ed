"""The noise scale: its estimates against known noise, and the gradient of one microbatch."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest

import jaxpipe
from models import gpt
from train import checks
from train.config import Config
from train.noise import Noise, failures, microbatch_norm
from train.step import Setup

CONFIG = {
    "model": {"vocab_size": 50, "sequence_length": 8, "num_layers": 4, "width": 8, "num_heads": 2},
    "mesh": {"stage": 2, "data": 2},
    "pipeline": {"schedule": "1f1b", "microbatches": 3},
    "train": {"batch_size": 12, "steps": 20, "noise_every": 5},
}


def changed(**sections) -> Config:
    return Config(**{name: CONFIG.get(name, {}) | sections.get(name, {}) for name in
                     (*CONFIG, *sections)})  # fmt: skip


def test_the_estimates_are_those_of_a_regression_whose_noise_is_known():
    """Rows x ~ N(0, I) and y = x.v + s e, at weights that are off by d.

    A row's gradient is x (x.d - s e), of mean d and variance (n + 1) |d|^2 + n s^2.
    """
    rng = np.random.default_rng(0)
    off, spread, few, many = rng.normal(size=20), 3.0, 4, 32
    gradient = off @ off
    variance = (off.size + 1) * gradient + off.size * spread**2
    found = Noise()
    gradients, variances = [], []
    for _ in range(4000):
        x, e = rng.normal(size=(many, off.size)), rng.normal(size=many)
        rows = x * (x @ off - spread * e)[:, None]
        norms = {n: float(np.linalg.norm(rows[:n].mean(0))) for n in (many, few)}
        one = Noise().after(norms)
        gradients.append(one.gradient)
        variances.append(one.variance)
        found = found.after(norms)
    # Within four standard errors of the mean, as the estimates are unbiased.
    for values, truth in ((gradients, gradient), (variances, variance)):
        error = np.std(values) / math.sqrt(len(values))
        assert abs(np.mean(values) - truth) < 4 * error < 0.2 * truth
    assert found.estimates == 4000


def test_first_estimates_count_alike_and_later_ones_fade():
    norms = [{1: 3.0 + n, 2: 2.0 + n} for n in range(40)]
    alone = [Noise().after(one).variance for one in norms]
    found = Noise()
    for n, one in enumerate(norms, start=1):
        found = found.after(one)
        if n <= 10:
            assert found.variance == pytest.approx(np.mean(alone[:n]))
    faded = sum(0.1 * 0.9**k * value for k, value in enumerate(reversed(alone[10:])))
    assert found.variance == pytest.approx(faded + 0.9**30 * np.mean(alone[:10]))


def test_there_is_no_scale_while_noise_hides_the_gradient():
    assert Noise(gradient=-1.0, variance=2.0, estimates=1).rows is None
    assert Noise(gradient=0.5, variance=2.0, estimates=1).rows == 4.0


@pytest.mark.pipeline
@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 3), ("zb-v", 0)])
def test_the_norm_is_that_of_the_first_microbatch_of_all_data_shards(schedule, zero):
    chunks = {"chunks": 2} if schedule == "zb-v" else {}
    pipeline = {"schedule": schedule, "zero": zero, "microbatches": 3} | chunks
    setup = Setup(changed(pipeline=pipeline))
    state = setup.init()
    tokens = np.random.default_rng(0).integers(50, size=(12, 9), dtype=np.int32)
    given = jax.device_put({"tokens": tokens}, setup.pipe.batch_sharding)
    found = microbatch_norm(setup)(state, given, setup.rng(0))
    # A shard has six rows, of which every third belongs to a microbatch.
    own = tokens[[0, 3, 6, 9]]
    model = gpt.model(gpt.GPTConfig(**CONFIG["model"]))
    params = jax.tree.map(np.asarray, setup.to_canonical(state).params)
    gradients = jax.jit(jax.grad(lambda params: jaxpipe.unpipelined.loss(
        model, params, {"tokens": own}, num_microbatches=1
    )))(params)  # fmt: skip
    norm = math.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradients)))
    assert float(found) == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    ("pipeline", "text"),
    [
        ({"microbatches": 1}, "pipeline.microbatches=1. Nearest valid: pipeline.microbatches=2"),
        ({"update": "chunk"}, "pipeline.update=chunk does not know"),
        ({"schedule": "pipemare"}, "pipeline.schedule=pipemare are of several"),
    ],
)
def test_what_gives_no_two_norms_is_refused(pipeline, text):
    config = changed(pipeline=pipeline)
    (found,) = failures(config)
    assert text in found.message
    assert found in checks.check(config, writes=False, reads=False)
    assert not list(failures(changed(pipeline=pipeline, train={"noise_every": 0})))


@pytest.mark.end_to_end
def test_a_run_estimates_it_and_a_resumed_run_goes_on(toy_trainer, tmp_path):
    def records(run):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return {one["step"]: one["noise"] for one in map(json.loads, lines) if "noise" in one}

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = ["--train.noise-every", "3", "--train.batch-size", "8"]
    toy_trainer.run("--run-dir", whole, *options)
    found = records(whole)
    assert sorted(found) == [3, 6, 9]
    assert [found[step]["estimates"] for step in sorted(found)] == [1, 2, 3]
    toy_trainer.run("--run-dir", cut, *options, "--train.steps", "6")
    toy_trainer.run("--run-dir", cut, *options, "--resume")
    assert records(cut)[9]["estimates"] == 3
