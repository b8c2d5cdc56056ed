"""Outputs of a batch, from forwards alone, in the order of its rows."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
import toy
import toys
from compilations import refusal
from covering import some
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpipe

pytestmark = pytest.mark.pipeline


def logits(outer, x, batch, rng, *, axis=None):
    """Logits of every token, gathered where the table is split; and which rows they are of, also as
    booleans."""
    del rng
    z = (x * outer["head"]["scale"]) @ outer["head"]["table"].T
    if axis is not None:
        z = lax.all_gather(z, axis, axis=-1, tiled=True)
    first = batch["tokens"][:, 0]
    return {"logits": z[..., : toy.VOCAB], "first": first, "even": first % 2 == 0}


def model(axis):
    output = functools.partial(logits, axis=axis)
    return dataclasses.replace(toy.model(tied=False, axis=axis), output=output)


@pytest.mark.parametrize(
    ("schedule", "stages", "data", "zero", "axis"),
    some(
        [
            *(("1f1b", 4, 2, 0, "stage"), ("zb-v", 2, 2, 3, "stage")),
            *(("breadth-first", 2, 1, 0, None), ("gpipe", 1, 1, 0, None)),
        ],
        *(("zb-v", 2, 2, 3, "stage"), ("breadth-first", 2, 1, 0, None)),
    ),
)
def test_outputs_are_those_of_the_unpipelined_model_row_by_row(schedule, stages, data, zero, axis):
    """With dropout."""
    params, batch, rng = toys.named("untied").params, toy.batch(6 * data), jax.random.key(3)
    pipe = jaxpipe.Pipeline(
        model(axis),
        params,
        schedule=schedule,
        mesh=jaxpipe.make_mesh(stage=stages, data=data),
        microbatches=3,
        zero=zero,
        poison=True,
    )
    got = jax.jit(pipe.outputs)(pipe.place(params), batch, rng)
    reference = functools.partial(
        jaxpipe.unpipelined.outputs, model(None), num_microbatches=3, data_shards=data
    )
    expected = jax.jit(reference)(params, batch, rng)
    np.testing.assert_array_equal(got["first"], batch["tokens"][:, 0])
    chex.assert_trees_all_equal_dtypes(got, expected)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-5)
    for leaf in jax.tree.leaves(got):
        assert leaf.sharding.is_equivalent_to(pipe.batch_sharding, leaf.ndim)
    assert pipe.batch_sharding.spec == P("data")


def test_without_a_function_outputs_are_the_last_activation():
    """Of layers that differ and keep a state."""
    _, _, params, batch, given = toys.named("stateful")
    pipe = toys.pipeline("stateful", "1f1b", toys.ON_DATA, microbatches=2)
    states = pipe.place_states(given["states"])
    got = jax.jit(pipe.outputs)(pipe.place(params), batch(8), states=states)
    expected = jaxpipe.unpipelined.outputs(
        pipe.model, params, batch(8), num_microbatches=2, data_shards=2, **given
    )
    assert got.keys() == {"main", "kept"}
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("output", "found"),
    [(lambda x: x.mean(), "float32[]"), (lambda x: {"x": x[1:]}, "{'x': float32[1, 5, 8]}")],
)
def test_what_does_not_begin_with_rows_is_refused(output, found):
    pipe = toys.pipeline("ends", microbatches=2)
    pipe.model = dataclasses.replace(model(None), output=lambda outer, x, *_: output(x))
    text = refusal(jax.eval_shape, pipe.outputs, pipe.placed_params, toy.batch(4))
    assert text.startswith(f"Model.output returns {found}; ")
    assert "arrays whose first dimension is the 2 rows" in text


def test_a_derivative_of_outputs_is_refused():
    pipe = toys.pipeline("ends", microbatches=2)
    largest = jax.grad(lambda placed: pipe.outputs(placed, toy.batch(4)).max())
    text = refusal(jax.eval_shape, largest, pipe.placed_params)
    assert "it only runs forward" in text
    assert "differentiate `Pipeline.loss`" in text
