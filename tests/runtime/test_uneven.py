"""Layers that differ: what is refused, and dtypes. Their results are in `test_equivalence`."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import pytest
import uneven

import jaxpipe


def pipeline(model, params, **options) -> jaxpipe.Pipeline:
    mesh = jaxpipe.make_mesh(stage=2, data=options.pop("data", 1))
    return jaxpipe.Pipeline(model, params, schedule="1f1b", microbatches=2, mesh=mesh, **options)


def test_a_layer_that_cannot_take_what_the_one_before_returns_is_named():
    params, model = uneven.params(), uneven.model()
    params["layers"] = params["layers"][:5] + params["layers"][:1] + params["layers"][6:]
    pipe = pipeline(model, params)
    with pytest.raises(
        ValueError,
        match=r"Layer 5 reads the key 'main', .*\n.*\n.*\n  x, from layer 4: .*float32\[2, 2",
    ):
        jax.eval_shape(pipe.value_and_grad, pipe.layout.placed_shapes(), uneven.batch(4))


def test_whole_numbers_do_not_travel():
    model = uneven.model()
    model = jaxpipe.Model(lambda outer, batch, rng: jnp.arange(3), model.layer, model.head_loss)
    pipe = pipeline(model, uneven.params())
    with pytest.raises(ValueError, match=r"The embedding returns int32\[3\]; only floating"):
        jax.eval_shape(pipe.value_and_grad, pipe.layout.placed_shapes(), uneven.batch(4))


def test_functions_and_trees_must_be_as_many():
    params, model = uneven.params(), uneven.model()
    params["layers"] = params["layers"][:-1]
    with pytest.raises(ValueError, match=r"has 8 functions and params\['layers'\] 7 trees"):
        pipeline(model, params)


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
    pipe = pipeline(model, params, data=2, zero=2)
    placed = pipe.place(params)
    chex.assert_trees_all_equal(pipe.unplace(placed), params)
    _, grads = jax.eval_shape(pipe.value_and_grad, placed, {"x": jnp.ones((8, 3))})
    assert {name: w.dtype for name, w in grads["layers"].items()} == {
        name: w.dtype for name, w in placed["layers"].items()
    }
