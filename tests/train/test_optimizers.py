"""Optimizers and schedules by name, and steps that are skipped."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_tasks import rows

from train import optimizers
from train.config import Config
from train.step import Setup


def _config(stage=2, data=2, **optimizer):
    shape = {"vocab_size": 64, "sequence_length": 8, "num_layers": 4, "width": 16, "num_heads": 2}
    return Config.model_validate(
        {
            "model": shape,
            "mesh": {"stage": stage, "data": data},
            "pipeline": {"schedule": "1f1b", "microbatches": 2},
            "optimizer": {"warmup_steps": 1, "peak_lr": 1e-2, **optimizer},
            "train": {"batch_size": 8, "steps": 9},
        }
    )


def _messages(**optimizer):
    config = Config.model_validate({"optimizer": optimizer})
    return [failure.message for failure in optimizers.failures(config)]


def test_every_name_is_taken_or_says_what_it_needs():
    """Those that need more than gradients are refused before anything compiles."""
    refused = {name for name in optimizers.named() if name != "adamw" and _messages(name=name)}
    assert refused == {"lbfgs", "momo", "momo_adam", "sophia"}
    assert {"adafactor", "lamb", "lion", "muon", "sgd"} <= optimizers.named().keys() - refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "muno"}, "optimizer.name=muno is none of optax .* Nearest valid: muon"),
        ({"name": "lbfgs"}, "does not suit optimizer.name=lbfgs .TypeError: .*'value_fn'"),
        ({"name": "muon", "arguments": {"decay": 1}}, "unexpected keyword argument 'decay'"),
        ({"name": "muon", "beta1": 0.5}, "optimizer.beta1=0.5 has no effect with optimizer.name="),
        ({"arguments": {"b1": 0.5}}, "has no effect with optimizer.name=adamw"),
        ({"schedule": "cosine"}, "optimizer.schedule=cosine is none of optax"),
        ({"schedule": "constant_schedule"}, "missing 1 required positional argument: 'value'"),
        (
            {"schedule": "constant_schedule", "schedule_arguments": {"value": 1.0}, "peak_lr": 1.0},
            "optimizer.peak_lr=1.0 has no effect with optimizer.schedule=constant_schedule",
        ),
        ({"skip_above": 1.0}, "optimizer.skip_above=1.0 has no effect with optimizer.max_skipped"),
        ({"offload": True, "max_skipped": 3}, "Nearest valid: .* optimizer.max_skipped=0"),
    ],
)
def test_what_optax_does_not_take_is_refused(fields, message):
    (found,) = _messages(**fields)
    assert re.search(message, found), found
    assert "\n" not in found


def test_updates_that_are_scaled_afterwards_have_no_average():
    fields = {"optimizer": {"ema_decay": 0.9}, "pipeline": {"schedule": "pipemare"}}
    (failure,) = optimizers.failures(Config.model_validate(fields))
    assert "Nearest valid: optimizer.ema_decay=0." in failure.message


def test_a_schedule_by_name():
    arguments = {"init_value": 0.0, "peak_value": 0.5, "warmup_steps": 5}
    config = _config(schedule="warmup_constant_schedule", schedule_arguments=arguments).optimizer
    rate = optimizers.learning_rate(config, num_steps=9)
    expected = optax.warmup_constant_schedule(**arguments)
    assert [float(rate(n)) for n in range(9)] == [float(expected(n)) for n in range(9)]


TOY = {"task": "toy_family:Toy", "model": {"num_layers": 4, "width": 3}}


@pytest.mark.pipeline
@pytest.mark.parametrize("name", ["muon", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_the_layout_does_not_change_what_an_optimizer_does(name):
    """Muon and Adafactor look at the shapes of parameters, which lie stacked and sharded."""
    results = []
    for stage, data in ((2, 2), (1, 1)):
        setup = Setup(Config(**_config(stage, data, name=name).model_dump() | TOY))
        state = setup.init()
        for _ in range(2):
            state, _ = setup.train_step(state, rows(setup), None)
        results.append(jax.device_get(setup.to_canonical(state)))
    chex.assert_trees_all_close(*results, rtol=2e-4, atol=2e-5)


@pytest.mark.pipeline
@pytest.mark.parametrize("zero", [3, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("update", ["chunk", pytest.param("step", marks=pytest.mark.slow)])
def test_the_average_of_the_weights(update, zero):
    """After n steps, step i counts decay ** (n - i), and the initial weights nothing."""
    config = _config(ema_decay=0.75, clip_norm=0.0).model_dump() | TOY
    config["pipeline"] |= {"schedule": "modular", "chunks": 2, "update": update, "zero": zero}
    setup = Setup(Config(**config))
    state, after = setup.init(), []
    for _ in range(3):
        state, _ = setup.train_step(state, rows(setup), None)
        after.append(jax.device_get(setup.to_canonical(state)))
    average = after[-1].optimizer[optimizers.AVERAGE]
    assert average.count == 3
    weights = np.array([0.75**2, 0.75, 1.0])
    expected = jax.tree.map(
        lambda *leaves: np.tensordot(weights / weights.sum(), leaves, axes=1),
        *(saved.params for saved in after),
    )
    unbiased = jax.tree.map(lambda leaf: leaf / (1 - 0.75**3), average.ema)
    chex.assert_trees_all_close(unbiased, expected, rtol=1e-6)


@pytest.mark.pipeline
def test_a_skipped_step_changes_nothing():
    setup = Setup(Config(**_config(max_skipped=2, skip_above=1e9).model_dump() | TOY))
    start, batch = jax.device_get(setup.init()), rows(setup)
    state, values = setup.train_step(setup.init(), batch, None)
    assert not values["skipped"]
    state, _ = setup.train_step(state, batch, None)
    assert not np.array_equal(start.params["head"], state.params["head"])
    before = jax.device_get(state)

    params = state.params | {"head": state.params["head"] * jnp.nan}
    broken = jax.device_put(
        type(state)(params, state.optimizer, state.layers), setup.state_shardings
    )
    kept, values = setup.train_step(broken, batch, None)
    assert values["skipped"]
    assert not np.isfinite(values["loss"])
    chex.assert_trees_all_equal(jax.device_get(kept.optimizer), before.optimizer)
    chex.assert_trees_all_equal(jax.device_get(kept.params["layers"]), before.params["layers"])


def test_the_rate_ends_with_the_run_and_only_matrices_decay():
    config = _config(weight_decay=0.5, min_lr_ratio=0.25).optimizer
    rate = optimizers.learning_rate(config, num_steps=9)
    assert [float(rate(n)) for n in (0, 1, 9)] == pytest.approx([0, 1e-2, 0.25e-2])
    assert float(rate(8)) > 1.01 * float(rate(9))
    optimizer = optimizers.make_optimizer(config, lambda step: 0.1)
    params = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(2)}
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    chex.assert_trees_all_close(
        updates, {"matrix": -0.05 * params["matrix"], "vector": jnp.zeros(2)}
    )
