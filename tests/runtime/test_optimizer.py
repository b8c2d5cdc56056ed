"""optax on placed parameters does what it does on canonical ones."""

from __future__ import annotations

from functools import partial

import chex
import jax
import numpy as np
import optax
import pytest
import toy

import jaxpipe

pytestmark = pytest.mark.pipeline


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_clipping_uses_the_norm_over_all_stages(zero):
    params, batch = toy.params(tied=True, num_layers=5), toy.batch(12)
    optimizer = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0))
    pipe = jaxpipe.Pipeline(
        toy.model(tied=True, axis="stage"),
        params,
        schedule=jaxpipe.schedules.build("1f1b", stages=4, microbatches=3),
        mesh=jaxpipe.make_mesh(stage=4, data=2),
        zero=zero,
    )

    def updated(value_and_grad, params):
        grads = value_and_grad(params, batch)[1]
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates), optax.tree.norm(grads)

    oracle = partial(
        jaxpipe.unpipelined.loss,
        toy.model(tied=True, axis=None),
        num_microbatches=3,
        data_shards=2,
    )
    want, norm = jax.jit(partial(updated, jax.value_and_grad(oracle)))(params)
    got, got_norm = jax.jit(partial(updated, pipe.value_and_grad))(pipe.place(params))
    assert norm > 0.1  # far above the limit, or nothing would be clipped
    np.testing.assert_allclose(got_norm, norm, rtol=1e-5)
    step = jax.tree.map(lambda new, old: new - old, pipe.unplace(got), params)
    np.testing.assert_allclose(optax.tree.norm(step), 0.01, rtol=1e-3)
    chex.assert_trees_all_close(pipe.unplace(got), want, rtol=1e-5, atol=1e-6)
