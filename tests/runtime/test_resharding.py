"""No program of a normal run makes XLA gather an array whole where a part would do.

XLA says so on the standard error of the process, below Python.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
import toy
import uneven
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe

pytestmark = pytest.mark.pipeline
WARNING = "Involuntary full rematerialization"
STAGES, DATA = 2, 4


def of_layers_alike(zero: int, weights: str):
    """A pipeline whose split vocabulary does not divide by its stages."""
    params = toy.params(tied=True, num_layers=7)
    pipe = jaxpipe.Pipeline(
        toy.model(tied=True, axis="stage"),
        params,
        schedule=jaxpipe.schedules.build("1f1b", stages=STAGES, microbatches=3),
        mesh=jaxpipe.make_mesh(stage=STAGES, data=DATA),
        zero=zero,
        weights=weights,
    )
    return pipe, params, None, (toy.batch(24), jax.random.key(2))


def of_layers_that_differ(zero: int):
    params, states = uneven.params(), uneven.states()
    pipe = jaxpipe.Pipeline(
        uneven.model(stateful=True),
        params,
        schedule=jaxpipe.schedules.build("1f1b", stages=STAGES, microbatches=3),
        mesh=jaxpipe.make_mesh(stage=STAGES, data=DATA),
        zero=zero,
        states=states,
    )
    return pipe, params, states, (uneven.batch(24), None)


def test_xla_warns_of_a_transition_that_it_cannot_make(capfd):
    """If this fails, the test below sees nothing whatever happens."""
    mesh = jaxpipe.make_mesh(stage=STAGES, data=DATA)
    source, target = (NamedSharding(mesh, spec) for spec in (P("stage"), P(None, "data")))
    x = jax.device_put(jnp.ones((8, 8)), source)
    jax.jit(lambda x: jax.lax.with_sharding_constraint(x, target) * 2)(x).block_until_ready()
    assert WARNING in capfd.readouterr().err


@pytest.mark.parametrize(
    "made",
    [
        lambda: of_layers_alike(0, "stacked"),
        pytest.param(lambda: of_layers_that_differ(1), marks=pytest.mark.slow),
        pytest.param(lambda: of_layers_alike(3, "unrolled"), marks=pytest.mark.slow),
        pytest.param(lambda: of_layers_that_differ(3), marks=pytest.mark.slow),
    ],
    ids=["zero 0", "uneven, zero 1", "unrolled, zero 3", "uneven, zero 3"],
)
def test_nothing_is_gathered_whole_from_the_first_parameters_to_the_checkpoint(made, capfd):
    pipe, params, states, (batch, rng) = made()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    placing = pipe.optimizer_placing(optimizer)
    placed = pipe.place(params)
    state = pipe.init(optimizer, placed)
    if states is not None:
        states = pipe.place_states(states)
        jax.jit(pipe.unplace_states)(states)
    step = pipe.train_step(optimizer)
    _, placed, state = step(placed, state, batch, rng, states)

    # To a checkpoint and back, by themselves and as parts of larger programs.
    saved = pipe.unplace(placed), placing.unplace(state)
    pipe.place(saved[0]), placing.place(saved[1])

    @jax.jit
    def there_and_back(placed, state):
        canonical = pipe.unplace(placed), placing.unplace(state)
        return canonical, pipe.place(canonical[0]), placing.place(canonical[1])

    there_and_back(placed, state)
    kept = jax.tree.map(lambda leaf: leaf.sharding, (pipe.canonical_params, placing.canonical))
    canonical = jax.jit(lambda *given: there_and_back(*given)[0], out_shardings=kept)(placed, state)
    jax.jit(lambda params, state: (pipe.place(params), placing.place(state)))(*canonical)
    jax.block_until_ready(placed)
    assert WARNING not in capfd.readouterr().err
