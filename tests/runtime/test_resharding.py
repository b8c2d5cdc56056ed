"""No program of a normal run makes XLA gather an array whole where a part would do.

XLA says so on the standard error of the process, below Python.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
import toys
from covering import some
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe

pytestmark = pytest.mark.pipeline
WARNING = "Involuntary full rematerialization"
SIZES = {"stage": 2, "data": 4}


def test_xla_warns_of_a_transition_that_it_cannot_make(capfd):
    """If this fails, the test below sees nothing whatever happens."""
    mesh = jaxpipe.make_mesh(**SIZES)
    source, target = (NamedSharding(mesh, spec) for spec in (P("stage"), P(None, "data")))
    x = jax.device_put(jnp.ones((8, 8)), source)
    jax.jit(lambda x: jax.lax.with_sharding_constraint(x, target) * 2)(x).block_until_ready()
    assert WARNING in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "zero"),
    some([("tied", 0), ("unrolled", 3), ("stateful", 1), ("stateful", 3)], ("tied", 0)),
)
def test_nothing_is_gathered_whole_from_the_first_parameters_to_the_checkpoint(name, zero, capfd):
    """The tied vocabulary does not divide by the stages."""
    toy, optimizer = toys.named(name), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    pipe = toys.pipeline(name, "1f1b", SIZES, microbatches=3, zero=zero)
    placing, placed, states = pipe.optimizer_placing(optimizer), pipe.place(toy.params), None
    state = pipe.init(optimizer, placed)
    if name == "stateful":
        states = pipe.place_states(toy.options["states"])
        jax.jit(pipe.unplace_states)(states)
    rng = None if name == "stateful" else jax.random.key(2)
    step = pipe.train_step(optimizer)
    _, placed, state = step(placed, state, toy.batch(24), rng, states)

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
