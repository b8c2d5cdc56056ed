"""Layers of different shapes, values that travel past layers, side inputs and states."""

from __future__ import annotations

import itertools
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import pytest
import uneven
from covering import covering

import jaxpipe
from jaxpipe.testing import assert_matches_unpipelined

SCHEDULES = ("1f1b", "1f1b-fused", "gpipe", "zb-v", "interleaved", "breadth-first-fused", "hanayo")
FULL = [
    case
    for case in itertools.product(SCHEDULES, (2, 4), (1, 2), (0, 1, 2, 3), ("none", "dots", "full"))
    if case[2] > 1 or case[3] == 0
]
FEW = covering([case for case in FULL if case[0] in ("zb-v", "breadth-first-fused")])


@cache
def reference(stateful):
    """Many cases share one program."""
    return partial(jaxpipe.unpipelined.loss, uneven.model(stateful=stateful))


def check(schedule, stages, data, zero, remat, *, microbatches=4, stateful=False, **options):
    params = uneven.params()
    (pipe,) = assert_matches_unpipelined(
        uneven.model(stateful=stateful),
        params,
        uneven.batch(2 * data * microbatches),
        schedules=[schedule],
        meshes=[jaxpipe.make_mesh(stage=stages, data=data)],
        microbatches=microbatches,
        states=uneven.states() if stateful else None,
        reference=reference(stateful),
        remat=remat,
        zero=zero,
        **options,
    )
    chex.assert_trees_all_equal(pipe.unplace(pipe.place(params)), params)


@pytest.mark.pipeline
@pytest.mark.parametrize("case", FEW, ids=lambda case: "-".join(map(str, case)))
def test_gradients_equal_the_unpipelined_model(case):
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", covering(FULL), ids=lambda case: "-".join(map(str, case)))
def test_gradients_equal_the_unpipelined_model_everywhere(case):
    check(*case)


@pytest.mark.pipeline
def test_states_are_renewed_in_microbatch_order():
    check("zb-v", 4, 2, 3, "full", stateful=True)


@pytest.mark.pipeline
def test_randomness_and_a_partition_of_ones_own():
    counts = (1, 4, 2, 1)
    check("1f1b", 4, 2, 3, "none", rng=jax.random.key(3), layer_counts=counts)


def test_a_layer_that_cannot_take_what_the_one_before_returns_is_named():
    params, model = uneven.params(), uneven.model()
    params["layers"] = params["layers"][:5] + params["layers"][:1] + params["layers"][6:]
    pipe = jaxpipe.Pipeline(
        model,
        params,
        schedule=jaxpipe.schedules.build("1f1b", stages=2, microbatches=2),
        mesh=jaxpipe.make_mesh(stage=2),
    )
    with pytest.raises(
        ValueError,
        match=r"Layer 5 reads the key 'main', .*\n.*\n.*\n  x, from layer 4: .*float32\[2, 2",
    ):
        jax.eval_shape(pipe.value_and_grad, pipe.layout.placed_shapes(), uneven.batch(4))


def test_whole_numbers_do_not_travel():
    model = uneven.model()
    model = jaxpipe.Model(lambda outer, batch, rng: jnp.arange(3), model.layer, model.head_loss)
    pipe = jaxpipe.Pipeline(
        model,
        uneven.params(),
        schedule=jaxpipe.schedules.build("1f1b", stages=2, microbatches=2),
        mesh=jaxpipe.make_mesh(stage=2),
    )
    with pytest.raises(ValueError, match=r"The embedding returns int32\[3\]; only floating"):
        jax.eval_shape(pipe.value_and_grad, pipe.layout.placed_shapes(), uneven.batch(4))


def test_functions_and_trees_must_be_as_many():
    params, model = uneven.params(), uneven.model()
    params["layers"] = params["layers"][:-1]
    with pytest.raises(ValueError, match=r"has 8 functions and params\['layers'\] 7 trees"):
        jaxpipe.Pipeline(
            model,
            params,
            schedule=jaxpipe.schedules.build("1f1b", stages=2, microbatches=2),
            mesh=jaxpipe.make_mesh(stage=2),
        )


def test_layers_may_have_dtypes_that_other_layers_lack():
    def layer(w, x, batch, rng):
        return x + jnp.tanh(x @ w.astype(x.dtype))

    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=(layer,) * 4,
        head_loss=lambda outer, x, batch, rng: jnp.mean(x**2),
    )
    layers = tuple(jnp.ones((3, 3), dtype) for dtype in ("float32", "bfloat16") * 2)
    params = {"embed": {}, "layers": layers, "head": {}}
    pipe = jaxpipe.Pipeline(
        model,
        params,
        schedule=jaxpipe.schedules.build("1f1b", stages=2, microbatches=2),
        mesh=jaxpipe.make_mesh(stage=2, data=2),
        zero=2,
    )
    placed = pipe.place(params)
    chex.assert_trees_all_equal(pipe.unplace(placed), params)
    _, grads = jax.eval_shape(pipe.value_and_grad, placed, {"x": jnp.ones((8, 3))})
    assert {name: w.dtype for name, w in grads["layers"].items()} == {
        name: w.dtype for name, w in placed["layers"].items()
    }
