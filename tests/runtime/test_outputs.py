"""Outputs of a batch, from forwards alone, in the order of its rows."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
import toy
import uneven
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


@functools.cache
def unpipelined(microbatches, data):
    """Outputs of the rows of a batch, with dropout."""
    function = functools.partial(
        jaxpipe.unpipelined.outputs, model(None), num_microbatches=microbatches, data_shards=data
    )
    start, batch = toy.params(tied=False, num_layers=5), toy.batch(2 * microbatches * data)
    return batch, jax.jit(function)(start, batch, jax.random.key(3))


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
    pipe = jaxpipe.Pipeline(
        model(axis),
        toy.params(tied=False, num_layers=5),
        schedule=jaxpipe.schedules.build(schedule, stages=stages, microbatches=3),
        mesh=jaxpipe.make_mesh(stage=stages, data=data),
        zero=zero,
        poison=True,
    )
    batch, expected = unpipelined(3, data)
    placed = pipe.place(toy.params(tied=False, num_layers=5))
    got = jax.jit(pipe.outputs)(placed, batch, jax.random.key(3))
    np.testing.assert_array_equal(got["first"], batch["tokens"][:, 0])
    chex.assert_trees_all_equal_dtypes(got, expected)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-5)
    for leaf in jax.tree.leaves(got):
        assert leaf.sharding.is_equivalent_to(pipe.batch_sharding, leaf.ndim)
    assert pipe.batch_sharding.spec == P("data")


def test_without_a_function_outputs_are_the_last_activation():
    pipe = jaxpipe.Pipeline(
        uneven.model(stateful=True),
        uneven.params(),
        schedule=jaxpipe.schedules.build("1f1b", stages=2, microbatches=2),
        mesh=jaxpipe.make_mesh(stage=2, data=2),
        states=uneven.states(),
    )
    batch, placed = uneven.batch(8), pipe.place(uneven.params())
    got = jax.jit(pipe.outputs)(placed, batch, states=pipe.place_states(uneven.states()))
    expected = jaxpipe.unpipelined.outputs(
        pipe.model,
        uneven.params(),
        batch,
        num_microbatches=2,
        data_shards=2,
        states=uneven.states(),
    )
    assert got.keys() == {"main", "kept"}
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("output", "found"),
    [(lambda x: x.mean(), "float32[]"), (lambda x: {"x": x[1:]}, "{'x': float32[1, 5, 8]}")],
)
def test_what_does_not_begin_with_rows_is_refused(output, found):
    pipe = small(dataclasses.replace(model(None), output=lambda outer, x, batch, rng: output(x)))
    with pytest.raises(ValueError, match="arrays whose first dimension is the 2 rows") as error:
        jax.eval_shape(pipe.outputs, pipe.layout.placed_shapes(), toy.batch(4))
    assert str(error.value).startswith(f"Model.output returns {found}; ")


def test_a_derivative_of_outputs_is_refused():
    pipe = small(model(None))

    def largest(placed):
        return pipe.outputs(placed, toy.batch(4))["logits"].max()

    with pytest.raises(ValueError, match="it only runs forward") as error:
        jax.eval_shape(jax.grad(largest), pipe.layout.placed_shapes())
    assert "differentiate `Pipeline.loss`" in str(error.value)


def small(of: jaxpipe.Model) -> jaxpipe.Pipeline:
    return jaxpipe.Pipeline(
        of,
        toy.params(tied=False, num_layers=2),
        schedule=jaxpipe.schedules.build("1f1b", stages=2, microbatches=2),
        mesh=jaxpipe.make_mesh(stage=2),
    )
