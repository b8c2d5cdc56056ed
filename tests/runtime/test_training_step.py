"""Training steps: sharded as the ZeRO level says, compiled once, and updated chunk by chunk."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from compilations import AS_USED, refusal
from covering import some

import jaxpipe
from jaxpipe import testing
from jaxpipe.runtime.memory import compiled

pytestmark = pytest.mark.pipeline

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    # A hyperparameter that is a Python number, moments of one part alone, and factored ones.
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2, mu_dtype="bfloat16"),
    "by part": optax.partition(
        {"a": optax.adam(1e-2), "b": optax.adafactor(1e-2, min_dim_size_to_factor=8)},
        {"embed": "a", "layers": "a", "head": "b"},
    ),
}
TOY = toys.named("ends", 4)


def share(leaf: jax.Array) -> int:
    """The part of an array that a device holds, as one in how many."""
    (shard,) = {shard.data.size for shard in leaf.addressable_shards}
    return leaf.size // shard


@pytest.mark.parametrize(
    ("name", "stages", "data", "zero"),
    some(
        [
            *(("adamw", 2, 2, 0), ("adamw", 2, 2, 1), ("momentum", 2, 2, 2), ("adamw", 2, 2, 3)),
            *(("momentum", 2, 1, 0), ("injected", 1, 2, 1), ("by part", 2, 2, 1)),
        ],
        ("adamw", 2, 2, 3),
    ),
)
def test_a_step_is_compiled_once_and_leaves_everything_where_it_was(name, stages, data, zero):
    sizes, optimizer = {"stage": stages, "data": data}, OPTIMIZERS[name]
    pipe = toys.pipeline("ends", "1f1b", sizes, num_layers=4, microbatches=2, zero=zero)
    batch, params, placing = TOY.batch(8), pipe.place(TOY.params), pipe.optimizer_placing(optimizer)
    old = now = params, pipe.init(optimizer, params)
    chex.assert_trees_all_equal(placing.unplace(old[1]), optimizer.init(TOY.params))
    placed = pipe.placed_params, placing.placed
    shardings = jax.tree.map(lambda leaf: leaf.sharding, placed)
    with testing.compilations() as found:
        for _ in range(3):
            assert jax.tree.map(lambda leaf: leaf.sharding, now) == shardings
            _, *now = pipe.train_step(optimizer)(*now, batch)
            now = tuple(now)
    assert found.count("jit(step)") == 1
    assert jax.tree.map(lambda leaf: leaf.sharding, now) == shardings
    params, state = now
    layers = {share(leaf) for leaf in jax.tree.leaves(params["layers"])}
    assert layers == {stages * (data if zero == 3 else 1)}
    shapes = {w.shape for w in jax.tree.leaves(params["layers"])}
    moments = {share(leaf) for leaf in jax.tree.leaves(state) if leaf.shape in shapes}
    assert moments == {stages * (data if zero >= 1 else 1)}

    jax.eval_shape(pipe.train_step(optimizer), *now, batch)  # tracers are never deleted
    for run in (
        lambda: pipe.train_step(optimizer)(*old, batch),
        lambda: pipe.value_and_grad(old[0], batch),
    ):
        assert "['positions'] has been deleted: a training step" in refusal(run)


def test_a_learning_rate_that_is_put_into_the_state_does_not_compile_the_step_again():
    """Whatever kind of number it is; with 0 for once, which is an integer, nothing moves."""
    pipe, optimizer = toys.pipeline("ends", num_layers=4, microbatches=2), OPTIMIZERS["injected"]
    batch, params = TOY.batch(8), pipe.place(TOY.params)
    state, step = pipe.init(optimizer, params), pipe.train_step(optimizer)
    rates = [0.02, 0, np.float32(0.03), jnp.asarray(0.04), jnp.float32(0.05), np.array(0.06)]
    with testing.compilations() as found:
        for rate in rates:
            before = pipe.unplace(params)
            state.hyperparams["learning_rate"] = rate
            _, params, state = step(params, state, batch)
            assert state.hyperparams["learning_rate"] == np.float32(rate)
            moved = before["head"]["scale"] != pipe.unplace(params)["head"]["scale"]
            assert moved.all() == moved.any() == (rate != 0)
    assert found.count("jit(step)") == 1


def test_a_step_is_made_once_for_an_optimizer():
    pipe, optimizer = toys.pipeline("ends"), optax.adam(1e-2)
    assert pipe.train_step(optimizer) is pipe.train_step(optimizer, update="step")
    assert pipe.train_step(optimizer, update="chunk") is not pipe.train_step(optimizer)


def test_weak_types_are_left_behind_when_parameters_are_placed():
    start = {"embed": {}, "layers": jnp.full((2, 3, 3), 0.1), "head": {"scale": 1.0}}
    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=lambda w, x, batch, rng: jnp.tanh(x @ w),
        head_loss=lambda outer, x, batch, rng: outer["head"]["scale"] * jnp.mean(x**2),
    )
    pipe = jaxpipe.Pipeline(model, start, schedule="1f1b", mesh=jaxpipe.make_mesh(stage=1))
    placed = pipe.place(start)
    state = pipe.init(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), placed)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((placed, state)))


# Chunk by chunk.


@pytest.mark.parametrize(
    ("name", "schedule", "options", "data", "zero"),
    some(
        [
            *(("tied", "modular", {"chunks": 3}, 2, 3), ("tied", "modular-fused", {}, 1, 0)),
            *(("tied", "breadth-first-descending", {}, 2, 2), ("tied", "modular", {}, 2, 1)),
            *(("tied", "zb-v", {}, 2, 3), ("tied", "1f1b", {}, 2, 0)),
            ("mixture tuple", "modular-fused", {}, 2, 1),
            *(("stateful", "modular", {}, 2, zero) for zero in (0, 1, 3)),
        ],
        *(("tied", "zb-v", {}, 2, 3), ("mixture tuple", "modular-fused", {}, 2, 1)),
    ),
)
def test_a_chunk_is_updated_in_the_step_as_it_would_be_after_it(
    name, schedule, options, data, zero
):
    """Two steps both ways, with moments, a count, a rate's schedule, and a decay of the weights."""
    toy = toys.named(name)
    adamw = optax.adamw(optax.linear_schedule(0.1, 0.01, 5), weight_decay=0.1)
    pipe = toys.pipeline(
        name,
        jaxpipe.schedules.build(schedule, stages=2, microbatches=3, **options),
        {"stage": 2, "data": data},
        zero=zero,
        weight_slots=2 if schedule == "zb-v" else 1,
        remat="dots",
    )
    batch, rng = toy.batch(12), jax.random.key(2) if name == "tied" else None

    @jax.jit
    def separate(params, state, states):
        value, grads = pipe.value_and_grad(params, batch, rng, states=states)
        return value, *pipe.update(adamw, grads, state, params)

    chunk_by_chunk = pipe.train_step(adamw, update="chunk")

    def together(params, state, states):
        return chunk_by_chunk(params, state, batch, rng, states)

    placed = pipe.place(toy.params)
    states = pipe.place_states(toy.options["states"]) if toy.options else None
    runs = dict.fromkeys((separate, together), (placed, pipe.init(adamw, placed), states))
    for _ in range(2):
        results = []
        for step, (placed, state, kept) in runs.items():
            value, placed, state = step(placed, state, kept)
            runs[step] = placed, state, kept if states is None else value[1]
            seen = pipe.unplace(placed), pipe.optimizer_placing(adamw).unplace(state)
            results.append((value, *seen))
        chex.assert_trees_all_close(*results, rtol=2e-5, atol=1e-6)


def test_no_gradient_is_kept_but_that_of_the_chunk_in_work():
    width = 128  # so that weights are much larger than activations
    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=lambda w, x, batch, rng: jnp.tanh(x @ w),
        head_loss=lambda outer, x, batch, rng: jnp.mean(x**2),
    )
    adam = optax.adam(0.1)  # reads its moments twice: to move them, and to move the weights
    batch = {"x": jnp.ones((2, width))}

    def saved(layers):
        """Bytes of temporaries that updates by chunk save, with one layer per chunk."""
        params = {"embed": {}, "layers": jnp.ones((layers, width, width)), "head": {}}
        pipe = jaxpipe.Pipeline(
            model,
            params,
            schedule=jaxpipe.schedules.build(
                "modular-fused", stages=2, microbatches=2, chunks=layers // 2
            ),
            mesh=jaxpipe.make_mesh(stage=2),
        )
        by_step, by_chunk = (
            compiled(pipe, batch, updates=(adam, update), options=AS_USED).memory_analysis()
            for update in ("step", "chunk")
        )
        return by_step.temp_size_in_bytes - by_chunk.temp_size_in_bytes

    of_layer = width * width * 4
    assert saved(16) - saved(8) >= 0.95 * 4 * of_layer  # a stage has four chunks more


MIXING = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))


@pytest.mark.parametrize(
    ("name", "options", "optimizer", "pattern"),
    [
        (
            "interleaved",
            {},
            optax.sgd(0.1),
            r"'interleaved'.*gradient \d times.*2 chunks.*\n.*modular",
        ),
        ("breadth-first", {"group": 1}, optax.sgd(0.1), r"'breadth-first'.*2 chunks.*\n.*modular"),
        ("modular", {}, MIXING, "part by part.*add reads grads.* and grads"),
    ],
)
def test_what_cannot_be_updated_chunk_by_chunk_is_refused(name, options, optimizer, pattern):
    schedule = jaxpipe.schedules.build(name, stages=2, microbatches=4, chunks=2, **options)
    pipe = toys.pipeline("ends", schedule, num_layers=4)
    assert re.search(pattern, refusal(pipe.train_step, optimizer, update="chunk"))
