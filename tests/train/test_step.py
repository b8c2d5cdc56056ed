"""Steps of every model family: against the unpipelined model, other layouts, and each other."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import some
from tiny_tasks import assert_same_first_step, config, layer_by_layer, rows

from jaxpipe import Checkpoints, unpipelined
from models import gpt
from train import optimizers
from train.errors import ConfigError
from train.modes import Asynchronous
from train.runs import checkpoint
from train.step import Setup, named

_close = partial(np.testing.assert_allclose, rtol=1e-5)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("task", "pipeline"),
    some(
        [
            ("toy_family:Running", {"zero": 3}),
            *((task, {"zero": 3}) for task in ("gpt", "resnet", "bert", "transformer")),
            ("gpt", {"zero": 0}),
            ("gpt", {"zero": 1, "vocabulary": "ends"}),
            ("gpt", {"zero": 2, "weights": "unrolled"}),
        ],
        ("toy_family:Running", {"zero": 3}),
    ),
)
def test_a_step_is_adamw_on_the_canonical_parameters(task, pipeline):
    """And an evaluation before it has the metrics of the unpipelined model."""
    settings = {"clip_norm": 0.05, "weight_decay": 0.5}
    setup = Setup(config(task, pipeline=pipeline, optimizer=settings))
    batch, state = rows(setup), setup.init()
    before = jax.tree.map(np.asarray, setup.to_canonical(state))
    assert jax.tree.map(np.shape, before.params) == jax.tree.map(np.shape, setup.shapes)
    evaluated = setup.evaluate(state, batch)
    got, metrics = setup.train_step(state, batch, None)
    got = setup.to_canonical(got)

    def loss(params, batch, *, train):
        model = type(setup.task)(setup.config).model(train=train, axis=None)
        shape = {"num_microbatches": 2, "data_shards": 2}
        return unpipelined.loss(model, params, batch, states=before.layers, **shape)

    value, grads = jax.jit(
        jax.value_and_grad(partial(loss, train=True), has_aux=setup.pipe.model.stateful)
    )(before.params, batch)
    expected, layers = named(value, before.layers)
    _close(metrics["loss"], expected["loss"])
    jax.tree.map(_close, metrics.get("metrics"), expected.get("metrics"))
    _close(metrics["grad_norm"], jax.jit(optax.tree.norm)(grads))
    value = jax.jit(partial(loss, train=False))(before.params, batch)
    expected, _ = named(value, before.layers)
    _close(evaluated["loss"].mean, expected["loss"])
    for name, value in expected.get("metrics", {}).items():
        _close(evaluated["metrics"][name].mean, value)

    optimizer = optimizers.make_optimizer(setup.config.optimizer, setup.learning_rate)
    params, grads = layer_by_layer(before.params), layer_by_layer(grads)

    @jax.jit
    def first_step(params, grads):
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), got.layers, layers)
    assert_same_first_step(layer_by_layer(got.params), first_step(params, grads), grads)


@pytest.mark.parametrize("documents", ["packed", pytest.param("apart", marks=pytest.mark.slow)])
def test_slices_of_sequences_give_the_loss_of_whole_ones(documents):
    pipeline = {"sequence_slices": 4}
    model, data = {"num_layers": 2}, {"documents": documents}
    setup = Setup(config("gpt", model=model, pipeline=pipeline, data=data))
    state, batch = setup.init(), rows(setup)
    batch["targets"][:, -3:] = -1
    batch["documents"] = np.sort(batch["documents"])
    params = setup.pipe.unplace(state.params)
    expected = jax.jit(partial(unpipelined.loss, gpt.model(setup.task.shape)))(params, batch)
    _, values = setup.train_step(state, batch, None)
    assert np.isclose(values["loss"], expected, rtol=1e-6)


@pytest.mark.slow
def test_a_step_moves_biases_of_experts_towards_equal_use():
    """By the counts of all microbatches and data shards; layers without experts have no bias."""
    experts = {"num_experts": 4, "dense_layers": 1, "router": "sigmoid", "bias_speed": 0.25}
    mesh, pipeline = {"stage": 1}, {"schedule": "1f1b-fused"}
    model = {"num_layers": 2} | experts
    setup = Setup(config("gpt", model=model, mesh=mesh, pipeline=pipeline, train={"batch_size": 4}))
    state, shape = setup.init(), setup.task.shape
    batch = {"tokens": jax.random.randint(jax.random.key(0), (4, 9), 0, 50)}
    params = setup.pipe.unplace(state.params)
    _, (_, last) = unpipelined.loss(gpt.model(shape), params, batch, states=gpt.init_state(shape))
    counts = last["mlp"]["router"]["selection"]["counts"]
    assert counts.sum() == 4 * 8 * 2
    state, _ = setup.train_step(state, batch, None)
    none, last = setup.to_canonical(state).layers
    assert none == {}
    selection = last["mlp"]["router"]["selection"]
    assert selection["bias"].tolist() == (0.25 * np.sign(16 - counts)).tolist()
    assert selection["counts"].tolist() == [0] * 4


# What a step is made of.


def test_embedding_and_head_are_computed_where_that_takes_less_time():
    """A large vocabulary would make the last of few layers late; beside many layers, every sum over
    the stages does."""
    for vocab_size, num_layers, is_split in ((5000, 4, True), (50, 16, False)):
        model = {"vocab_size": vocab_size, "num_layers": num_layers}
        pipeline = {"microbatches": 8, "vocabulary": "auto"}
        mesh, train = {"stage": 4}, {"batch_size": 16}
        setup = Setup(config("gpt", model=model, mesh=mesh, pipeline=pipeline, train=train))
        assert setup.pipe.table.together == is_split


def test_a_step_reports_what_experts_with_a_capacity_drop():
    model = {"num_layers": 2, "num_experts": 4, "expert_every": 2, "capacity_factor": 1.0}
    setup = Setup(config("gpt", model=model))
    shapes = setup.state_shapes, setup.batch_shapes, None
    assert jax.eval_shape(setup.train_step, *shapes)[1]["metrics"].keys() == {"dropped"}


def test_a_schedule_that_comes_back_to_a_chunk_is_refused_in_the_names_of_the_fields():
    def settings(**pipeline):
        by_chunk = {"schedule": "interleaved", "chunks": 2, "microbatches": 4, "update": "chunk"}
        return config(pipeline=by_chunk | pipeline, optimizer={"clip_norm": 0.0})

    with pytest.raises(ConfigError) as caught:
        Setup(settings())
    (failure,) = caught.value.failures
    assert "pipeline.schedule='interleaved' comes back to a chunk" in failure.message
    assert "pipeline.update='chunk' needs each complete" in failure.message
    assert "Nearest valid: pipeline.weight_slots=2." in failure.message
    assert Setup(settings(weight_slots=2))


# Optimizers.


def test_every_optimizer_is_taken_or_says_what_it_needs():
    """Those that need more than gradients are refused before anything compiles."""

    def is_refused(name):
        return any(optimizers.failures(config(optimizer={"name": name})))

    refused = {name for name in optimizers.named() if is_refused(name)}
    assert refused == {"lbfgs", "momo", "momo_adam", "sophia"}
    assert {"adafactor", "lamb", "lion", "muon", "sgd"} <= optimizers.named().keys() - refused


def test_the_rate_ends_with_the_run_and_only_matrices_decay():
    fields = {"warmup_steps": 1, "peak_lr": 1e-2, "weight_decay": 0.5, "min_lr_ratio": 0.25}
    settings = config(optimizer=fields).optimizer
    rate = optimizers.learning_rate(settings, num_steps=9)
    assert [float(rate(n)) for n in (0, 1, 9)] == pytest.approx([0, 1e-2, 0.25e-2])
    assert float(rate(8)) > 1.01 * float(rate(9))
    optimizer = optimizers.make_optimizer(settings, lambda step: 0.1)
    params = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(2)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    expected = {"matrix": -0.05 * params["matrix"], "vector": jnp.zeros(2)}
    chex.assert_trees_all_close(updates, expected)
    # Any schedule of optax has its own arguments.
    arguments = {"init_value": 0.0, "peak_value": 0.5, "warmup_steps": 5}
    fields = {"schedule": "warmup_constant_schedule", "schedule_arguments": arguments}
    rate = optimizers.learning_rate(config(optimizer=fields).optimizer, num_steps=9)
    expected = optax.warmup_constant_schedule(**arguments)
    assert [float(rate(n)) for n in range(9)] == [float(expected(n)) for n in range(9)]


def test_muon_trains_the_matrices_of_layers_and_of_experts():
    def matrix(*shape):
        return jnp.asarray(np.random.default_rng(0).normal(size=shape), "float32")

    layer = {"kernel": matrix(4, 6), "experts": {"kernel": matrix(3, 4, 2), "bias": matrix(3, 2)}}
    grads = {"embed": {"table": matrix(5, 4)}, "layers": (layer,), "head": {"scale": matrix(4)}}
    settings = config(optimizer={"name": "muon", "arguments": {"beta": 0.9}, "clip_norm": 0.0})
    optimizer = optimizers.make_optimizer(settings.optimizer, lambda step: 0.1)

    @partial(jax.jit, static_argnums=0)
    def alone(made, gradient):
        return made.update(gradient, made.init(gradient), gradient)[0]

    updates, muon = alone(optimizer, grads), optax.contrib.muon(0.1, beta=0.9)
    found = updates["layers"][0]
    experts = [alone(muon, one) for one in layer["experts"]["kernel"]]
    expected = {"kernel": alone(muon, layer["kernel"])}
    expected["experts"] = {"kernel": jnp.stack(experts)}
    adam = optax.nadamw(0.1, weight_decay=0.0)
    expected["experts"]["bias"] = alone(adam, layer["experts"]["bias"])
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
    for name in ("embed", "head"):
        chex.assert_trees_all_close(updates[name], alone(adam, grads[name]), rtol=1e-5)


@pytest.mark.pipeline
@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_the_layout_does_not_change_what_an_optimizer_does(name):
    """Muon and Adafactor look at the shapes of parameters, which lie stacked and sharded."""
    results = []
    for stage, data in ((2, 2), (1, 1)):
        optimizer = {"name": name, "peak_lr": 1e-2}
        setup = Setup(config(mesh={"stage": stage, "data": data}, optimizer=optimizer))
        state = setup.init()
        for _ in range(2):
            state, _ = setup.train_step(state, rows(setup), None)
        results.append(jax.device_get(setup.to_canonical(state)))
    chex.assert_trees_all_close(*results, rtol=2e-4, atol=2e-5)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("update", "zero"), some([("chunk", 3), ("chunk", 0), ("step", 3), ("step", 0)], ("chunk", 3))
)
def test_the_average_of_the_weights(update, zero):
    """After n steps, step i counts decay ** (n - i), and the initial weights nothing."""
    optimizer = {"ema_decay": 0.75, "clip_norm": 0.0, "peak_lr": 1e-2}
    pipeline = {"schedule": "modular", "chunks": 2, "update": update, "zero": zero}
    setup = Setup(config(pipeline=pipeline, optimizer=optimizer))
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
    setup = Setup(config(optimizer={"max_skipped": 2, "skip_above": 1e9, "peak_lr": 1e-2}))
    state, batch = setup.init(), rows(setup)
    start = jax.device_get(state.params["head"])
    state, values = setup.train_step(state, batch, None)
    assert not values["skipped"]
    assert not np.array_equal(start, state.params["head"])
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


# Steps that never drain the pipeline.


def _asynchronous(task: str, schedule: str = "pipemare", **sections) -> Setup:
    # So loose that it does not matter which norms a stage knows.
    optimizer = {"clip_norm": 1e9, "weight_decay": 0.5}
    return Setup(config(task, pipeline={"schedule": schedule}, optimizer=optimizer, **sections))


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("task", "schedule", "segment"),
    some(
        [
            ("toy_family:Toy", "pipemare", 2),
            ("gpt", "pipemare", None),
            ("bert", "pipemare", 1),
            ("transformer", "pipemare", 2),
            ("resnet", "pipemare", 2),
            ("resnet", "pipemare", None),
            ("resnet", "pipedream", 1),
        ],
        ("toy_family:Toy", "pipemare", 2),
    ),
)
def test_one_step_and_a_drain_are_a_synchronous_step(task, schedule, segment):
    """No weights are late for the first minibatch: weight decay and states included."""
    settings = {"rescheduling_steps": 0, "recompute_segment": segment}
    setup = _asynchronous(task, schedule, asynchronous=settings)
    batch, mode = rows(setup), Asynchronous(setup)
    carried, _ = mode.compile()(mode.begin(setup.init(), 0), batch, None)
    state, losses = mode.settle(carried)
    want, metrics = setup.train_step(setup.init(), batch, None)
    _close(losses, [metrics["loss"]])
    got, want = setup.to_canonical(state), setup.to_canonical(want)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), got.layers, want.layers)
    assert_same_first_step(got.params, want.params, want.optimizer[1].mu)


@pytest.mark.pipeline
def test_a_checkpoint_from_before_states_had_a_value_for_every_data_shard(tmp_path):
    mode = Asynchronous(_asynchronous("toy_family:Running"))
    saved = mode.to_saved(mode.begin(mode.setup.init(), 0))
    old = {name: leaf for name, leaf in saved.items() if not name.startswith("flight.states")}
    assert 0 < len(old) < len(saved)
    old |= {name: leaf + 1 for name, leaf in saved.items() if name.startswith("states")}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoint.save(checkpoints, 3, old, data={}, run={})
        checkpoints.wait()
        restored, _ = checkpoint.restore(checkpoints, 3, mode.saved_shapes)
    carried = mode.from_saved(restored, 3)
    assert jax.tree.map(jnp.shape, mode.to_saved(carried)) == jax.tree.map(jnp.shape, saved)
    for name, leaf in carried["states"]["layers"].items():
        np.testing.assert_array_equal(leaf, saved[f"states.{name}"] + 1)
        for shard in carried["flight"]["states"][name]:
            np.testing.assert_array_equal(shard, leaf)
