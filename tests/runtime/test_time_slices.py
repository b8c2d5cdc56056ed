"""Actions cut into time slices give the unpipelined model's loss and gradients."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
import toy

import jaxpipe
from jaxpipe.schedule.controllable_memory import zb_v
from jaxpipe.schedule.lower import partition
from jaxpipe.schedule.one_f_one_b import one_f_one_b
from jaxpipe.schedule.simulate import Costs
from jaxpipe.schedule.slices import slice_ticks


@pytest.mark.parametrize(
    ("schedule", "data", "zero"),
    [(zb_v(2, 4), 2, 3), (one_f_one_b(4, 7), 1, 0), (one_f_one_b(2, 4, fused=True), 2, 2)],
    ids=["zb-v-zero-3", "1f1b", "1f1b-fused-zero-2"],
)
def test_sliced_schedules_equal_the_unpipelined_model(schedule, data, zero):
    layers = partition(10, schedule.placement.num_virtual_stages)
    cut = slice_ticks(schedule, Costs(1, 1.2, 0.8), layers)
    assert cut.slices is not None
    params = toy.params(tied=True, num_layers=10)
    batch = toy.batch(2 * data * schedule.num_microbatches)
    pipe = jaxpipe.Pipeline(
        toy.model(tied=True, axis="stage"),
        params,
        schedule=cut,
        mesh=jaxpipe.make_mesh(stage=schedule.num_stages, data=data),
        zero=zero,
        poison=True,
    )
    loss, grads = jax.jit(pipe.value_and_grad)(pipe.place(params), batch, None)
    oracle = partial(
        jaxpipe.unpipelined.loss,
        toy.model(tied=True, axis=None),
        num_microbatches=schedule.num_microbatches,
        data_shards=data,
    )
    expected, expected_grads = jax.jit(jax.value_and_grad(oracle))(params, batch, None)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for got, want in zip(
        jax.tree.leaves(pipe.unplace(grads)), jax.tree.leaves(expected_grads), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    evaluated = jax.jit(pipe.loss)(pipe.place(params), batch, None)
    np.testing.assert_allclose(evaluated, expected, rtol=1e-5)
