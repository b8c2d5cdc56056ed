"""The loop of the README: sharded as the ZeRO level says, and compiled once."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
import toy
from covering import some

import jaxpipe
from jaxpipe import testing

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
        *(("adamw", 2, 2, 3), ("by part", 2, 2, 1)),
    ),
)
def test_a_step_is_compiled_once_and_leaves_everything_where_it_was(name, stages, data, zero):
    start, optimizer = toy.params(tied=False, num_layers=4), OPTIMIZERS[name]
    pipe = jaxpipe.Pipeline(
        toy.model(tied=False, axis=None),
        start,
        schedule=jaxpipe.schedules.build("1f1b", stages=stages, microbatches=2),
        mesh=jaxpipe.make_mesh(stage=stages, data=data),
        zero=zero,
    )
    batch = toy.batch(8)
    params = pipe.place(start)
    state = pipe.init(optimizer, params)
    canonical = pipe.optimizer_placing(optimizer).unplace(state)
    chex.assert_trees_all_equal(canonical, optimizer.init(start))
    traces = []

    @jax.jit
    def step(params, state, batch):
        traces.append(None)
        loss, grads = pipe.value_and_grad(params, batch)
        params, state = pipe.update(optimizer, grads, state, params)
        return params, state, loss

    placed = pipe.placed_params, pipe.optimizer_placing(optimizer).placed
    shardings = jax.tree.map(lambda leaf: leaf.sharding, placed)
    with testing.compilations() as compiled:
        for _ in range(3):
            held = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
            assert held == shardings
            params, state, _ = step(params, state, batch)
        assert jax.tree.map(lambda leaf: leaf.sharding, (params, state)) == shardings
    assert (len(traces), step._cache_size(), compiled.count("jit(step)")) == (1, 1, 1)
    layers = {share(leaf) for leaf in jax.tree.leaves(params["layers"])}
    assert layers == {stages * (data if zero == 3 else 1)}
    moments = [
        leaf
        for leaf in jax.tree.leaves(state)
        if leaf.shape in {w.shape for w in jax.tree.leaves(params["layers"])}
    ]
    assert {share(leaf) for leaf in moments} == {stages * (data if zero >= 1 else 1)}


def test_a_step_is_made_once_for_an_optimizer_and_knows_deleted_arrays():
    params, optimizer, batch = toy.params(tied=True, num_layers=2), optax.adam(1e-2), toy.batch(8)
    pipe = jaxpipe.Pipeline(
        toy.model(tied=True, axis=None),
        params,
        schedule="1f1b",
        mesh=jaxpipe.make_mesh(stage=2),
        microbatches=2,
    )
    placed = pipe.place(params)
    old = now = placed, pipe.init(optimizer, placed)
    with testing.compilations() as compiled:
        for _ in range(2):
            _, *now = pipe.train_step(optimizer)(*now, batch)
    assert compiled.count("jit(step)") == 1
    assert pipe.train_step(optimizer) is pipe.train_step(optimizer, update="step")
    assert pipe.train_step(optimizer, update="chunk") is not pipe.train_step(optimizer)
    jax.eval_shape(pipe.train_step(optimizer), *now, batch)  # tracers are never deleted
    for run in (
        lambda: pipe.train_step(optimizer)(*old, batch),
        lambda: pipe.value_and_grad(old[0], batch),
    ):
        with pytest.raises(ValueError, match=r"\['positions'\] has been deleted: a training step"):
            run()


def test_weak_types_are_left_behind_when_parameters_are_placed():
    start = {"embed": {}, "layers": jnp.full((2, 3, 3), 0.1), "head": {"scale": 1.0}}
    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=lambda w, x, batch, rng: jnp.tanh(x @ w),
        head_loss=lambda outer, x, batch, rng: outer["head"]["scale"] * jnp.mean(x**2),
    )
    schedule = jaxpipe.schedules.build("1f1b", stages=1, microbatches=2)
    pipe = jaxpipe.Pipeline(model, start, schedule=schedule, mesh=jaxpipe.make_mesh(stage=1))
    placed = pipe.place(start)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(placed))
    state = pipe.init(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), placed)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
