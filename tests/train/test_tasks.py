"""Every model family in the trainer: its data, one optimizer step, its state there and back."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import optax
import pytest
from covering import some
from tiny_tasks import TINY, assert_same_first_step, layer_by_layer, rows

import jaxpipe
from train import checks, tasks
from train.config import Config
from train.data import stream
from train.optimizers import make_optimizer
from train.prepare import images
from train.step import Setup, named


def config(task: str, *, zero: int = 3, weights: str = "stacked", **sections) -> Config:
    return Config(
        task=task,
        model=TINY[task],
        mesh={"stage": 2, "data": 2},
        pipeline={"schedule": "1f1b", "microbatches": 2, "zero": zero, "weights": weights},
        optimizer={"clip_norm": 0.05, "warmup_steps": 0, "weight_decay": 0.5},
        train={"batch_size": 8, "steps": 20, "eval_batches": 1},
        **sections,
    )


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("task", "zero", "weights"),
    some(
        [
            ("toy_family:Running", 3, "stacked"),
            *((task, 3, "stacked") for task in ("gpt", "resnet", "bert", "transformer")),
            *(("gpt", 0, "stacked"), ("gpt", 1, "stacked"), ("gpt", 2, "unrolled")),
        ],
        ("toy_family:Running", 3, "stacked"),
    ),
)
def test_a_step_is_adamw_on_the_canonical_parameters(task, zero, weights):
    setup = Setup(config(task, zero=zero, weights=weights))
    batch, state = rows(setup), setup.init()
    before = jax.tree.map(np.asarray, setup.to_canonical(state))
    assert jax.tree.map(np.shape, before.params) == jax.tree.map(np.shape, setup.shapes)
    got, metrics = setup.train_step(state, batch, None)
    got = setup.to_canonical(got)

    oracle = partial(
        jaxpipe.unpipelined.loss,
        type(setup.task)(config(task)).model(train=True, axis=None),
        num_microbatches=2,
        data_shards=2,
        states=before.layers,
    )
    value, grads = jax.jit(jax.value_and_grad(oracle, has_aux=setup.pipe.model.stateful))(
        before.params, batch
    )
    expected_values, layers = named(value, before.layers)
    np.testing.assert_allclose(metrics["loss"], expected_values["loss"], rtol=1e-5)
    close = partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(close, metrics.get("metrics"), expected_values.get("metrics"))
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    optimizer = make_optimizer(setup.config.optimizer, setup.learning_rate)
    params, grads = layer_by_layer(before.params), layer_by_layer(grads)
    updates, _ = jax.jit(optimizer.update)(grads, jax.jit(optimizer.init)(params), params)
    expected = optax.apply_updates(params, updates)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), got.layers, layers)
    assert_same_first_step(layer_by_layer(got.params), expected, grads)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "task", ["toy_family:Running", pytest.param("resnet", marks=pytest.mark.slow)]
)
def test_evaluated_metrics_are_those_of_the_unpipelined_model(task):
    setup = Setup(config(task))
    state, batch = setup.init(), rows(setup)
    params, states = jax.device_get(setup.to_canonical_weights(state))
    value = jaxpipe.unpipelined.loss(
        type(setup.task)(config(task)).model(train=False, axis=None),
        params,
        batch,
        num_microbatches=2,
        data_shards=2,
        states=states,
    )
    expected, _ = named(value, states)
    got = setup.evaluate(state, batch)
    close = partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(close, got["metrics"], expected["metrics"])


def test_images_become_the_batches_the_step_wants(tmp_path):
    images.prepare(images.ImageOptions(out=tmp_path / "digits"))
    settings = config(
        "resnet", data={"path": str(tmp_path / "digits")}, run_dir=str(tmp_path / "run")
    )
    assert checks.check(settings) == []
    task = tasks.make(settings)
    train, heldout = task.load()
    batch = next(stream.batches(train, batch_size=8, seed=0))
    shapes = jax.tree.map(lambda leaf: ((8, *leaf.shape), leaf.dtype), task.row_shapes())
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()} == shapes
    assert "most frequent class is right in 9" in task.baseline(train, heldout)
    larger = settings.model.model_copy(update={"image_size": 16})
    (failure,) = checks.check(settings.model_copy(update={"model": larger}))
    assert "holds images of [8, 8, 1] in 10 classes, not [16, 16, 1] in 10" in failure.message
    assert "model.image_size=8" in failure.message


def test_a_partition_that_does_not_fit_is_refused(tmp_path):
    settings = config("resnet", data={"path": f"{tmp_path}/no"}, run_dir=f"{tmp_path}/run")
    for partition, message in (
        ("flop", "must be equal, flops, measured, or the layers"),
        ("2,3", "must be 2 counts of at least 1"),
        ("4,0", "must be 2 counts of at least 1"),
    ):
        pipeline = settings.pipeline.model_copy(update={"partition": partition})
        (failure,) = checks.check(settings.model_copy(update={"pipeline": pipeline}), reads=False)
        assert message in failure.message
