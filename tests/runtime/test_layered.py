"""Updating every chunk within the step gives what gradients and an optimizer give after it."""

from __future__ import annotations

import chex
import jax
import optax
import pytest
import toy
import uneven
from compilations import AS_USED
from covering import some

import jaxpipe

pytestmark = pytest.mark.pipeline


def optimizer() -> optax.GradientTransformation:
    """One with moments, a count and a schedule, and a decay that reads the weights."""
    return optax.adamw(optax.linear_schedule(0.1, 0.01, 5), weight_decay=0.1)


def check(pipe: jaxpipe.Pipeline, params, batch, *, states=None, rng=None) -> None:
    """Takes two steps both ways."""
    adamw = optimizer()

    @jax.jit
    def separate(params, state, states):
        value, grads = pipe.value_and_grad(params, batch, rng, states=states)
        return value, *pipe.update(adamw, grads, state, params)

    chunk_by_chunk = pipe.train_step(adamw, update="chunk")

    def together(params, state, states):
        return chunk_by_chunk(params, state, batch, rng, states)

    placed = pipe.place(params)
    state = pipe.init(adamw, placed)
    runs = dict.fromkeys((separate, together), (placed, state, states))
    for _ in range(2):
        results = []
        for step, (placed, state, kept) in runs.items():
            value, placed, state = step(placed, state, kept)
            runs[step] = placed, state, kept if states is None else value[1]
            seen = pipe.unplace(placed), pipe.optimizer_placing(adamw).unplace(state)
            results.append((value, *seen))
        chex.assert_trees_all_close(*results, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "data", "zero", "slots"),
    some(
        [
            *(("modular", {"chunks": 3}, 2, 3, 1), ("breadth-first-descending", {}, 2, 2, 1)),
            *(("modular-fused", {}, 1, 0, 1), ("zb-v", {}, 2, 3, 2), ("modular", {}, 2, 1, 1)),
            ("1f1b", {}, 2, 0, 1),
        ],
        ("zb-v", {}, 2, 3, 2),
    ),
)
def test_a_chunk_is_updated_in_the_step_as_it_would_be_after_it(name, options, data, zero, slots):
    pipe = jaxpipe.Pipeline(
        toy.model(tied=True, axis="stage"),
        toy.params(tied=True, num_layers=7),
        schedule=jaxpipe.schedules.build(name, stages=2, microbatches=3, **options),
        mesh=jaxpipe.make_mesh(stage=2, data=data),
        zero=zero,
        weight_slots=slots,
        remat="dots",
    )
    check(pipe, toy.params(tied=True, num_layers=7), toy.batch(12), rng=jax.random.key(2))


@pytest.mark.parametrize(
    ("name", "stateful", "zero"),
    some(
        [("modular-fused", False, 1), *(("modular", True, zero) for zero in (0, 1, 3))],
        ("modular-fused", False, 1),
    ),
)
def test_layers_that_differ_are_updated_in_their_own_columns(name, stateful, zero):
    states = uneven.states() if stateful else None
    pipe = jaxpipe.Pipeline(
        uneven.model(stateful=stateful),
        uneven.params(),
        schedule=name,
        mesh=jaxpipe.make_mesh(stage=2, data=2),
        microbatches=2,
        zero=zero,
        states=states,
    )
    placed_states = pipe.place_states(states) if stateful else None
    check(pipe, uneven.params(), uneven.batch(8), states=placed_states)


def test_no_gradient_is_kept_but_that_of_the_chunk_in_work():
    layers, width, chunks = 8, 64, 4
    params = {"embed": {}, "layers": jax.numpy.ones((layers, width, width)), "head": {}}
    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=lambda w, x, batch, rng: jax.numpy.tanh(x @ w),
        head_loss=lambda outer, x, batch, rng: jax.numpy.mean(x**2),
    )
    schedule = jaxpipe.schedules.build("modular-fused", stages=2, microbatches=2, chunks=chunks)
    pipe = jaxpipe.Pipeline(model, params, schedule=schedule, mesh=jaxpipe.make_mesh(stage=2))
    adam = optax.adam(0.1)  # reads its moments twice: to move them, and to move the weights
    placed = pipe.place(params)
    batch, state = {"x": jax.numpy.ones((4, width))}, pipe.init(adam, placed)

    def temporaries(update: str) -> int:
        lowered = pipe.train_step(adam, update=update).lower(placed, state, batch)
        return lowered.compile(AS_USED).memory_analysis().temp_size_in_bytes

    one_layer = width * width * 4
    per_stage = layers // 2
    saved = temporaries("step") - temporaries("chunk")
    assert saved >= 0.95 * (per_stage - 1) * one_layer  # all layers' sums but one


@pytest.mark.parametrize(
    ("name", "options"), [("interleaved", {}), ("breadth-first", {"group": 1})]
)
def test_a_schedule_that_comes_back_to_a_chunk_is_refused(name, options):
    pipe = jaxpipe.Pipeline(
        toy.model(tied=False, axis=None),
        toy.params(tied=False, num_layers=4),
        schedule=jaxpipe.schedules.build(name, stages=2, microbatches=4, chunks=2, **options),
        mesh=jaxpipe.make_mesh(stage=2),
    )
    with pytest.raises(ValueError, match=rf"'{name}'.*gradient \d times.*2 chunks.*\n.*modular"):
        pipe.train_step(optax.sgd(0.1), update="chunk")


def test_an_optimizer_that_mixes_layers_is_refused():
    pipe = jaxpipe.Pipeline(
        toy.model(tied=False, axis=None),
        toy.params(tied=False, num_layers=4),
        schedule=jaxpipe.schedules.build("modular", stages=2, microbatches=4, chunks=2),
        mesh=jaxpipe.make_mesh(stage=2),
    )
    mixing = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"part by part.*add reads grads.* and grads"):
        pipe.train_step(mixing, update="chunk")
