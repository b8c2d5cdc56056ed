"""Every schedule, mesh, ZeRO level and policy gives the unpipelined model's loss and gradients."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import numpy as np
import pytest
import toy
from covering import covering

import jaxpipe

SCHEDULES = ("gpipe", "gpipe-fused", "1f1b", "1f1b-fused")
STAGES, DATA, ZERO = (1, 2, 4), (1, 2), (0, 1, 2, 3)
REMAT, TIED, MICROBATCHES = ("none", "dots", "full"), (True, False), (1, 3, 8)
FULL = [
    case
    for case in itertools.product(SCHEDULES, STAGES, DATA, ZERO, REMAT, TIED, MICROBATCHES)
    if case[2] > 1 or case[3] == 0  # one data shard has nothing to shard
]
COVERING = covering(FULL)


@partial(jax.jit, static_argnames=("tied", "microbatches", "data"))
def unpipelined(params, batch, rng, *, tied, microbatches, data):
    """Loss and gradients; many cases share one program."""
    loss = partial(
        jaxpipe.unpipelined.loss,
        toy.model(tied=tied, axis=None),
        num_microbatches=microbatches,
        data_shards=data,
    )
    return jax.value_and_grad(loss)(params, batch, rng)


def check(
    schedule, stages, data, zero, remat, tied, microbatches, *, num_layers=6, rng=None, **options
):
    """Compares losses and gradients; returns the pipeline."""
    params = toy.params(tied=tied, num_layers=num_layers)
    batch = toy.batch(2 * data * microbatches)
    if isinstance(schedule, str):
        schedule = jaxpipe.schedules.build(schedule, stages=stages, microbatches=microbatches)
    pipe = jaxpipe.Pipeline(
        toy.model(tied=tied, axis="stage"),
        params,
        schedule=schedule,
        mesh=jaxpipe.make_mesh(stage=stages, data=data),
        remat=remat,
        zero=zero,
        poison=True,
        **options,
    )
    placed = pipe.place(params)
    loss, grads = jax.jit(pipe.value_and_grad)(placed, batch, rng)
    expected, expected_grads = unpipelined(
        params, batch, rng, tied=tied, microbatches=microbatches, data=data
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for (path, got), want in zip(
        jax.tree.leaves_with_path(pipe.unplace(grads)), jax.tree.leaves(expected_grads), strict=True
    ):
        # Relative to the leaf's own scale: single entries may cancel to nearly nothing.
        scale = np.abs(want).max()
        np.testing.assert_allclose(
            got, want, rtol=1e-5, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path)
        )
    np.testing.assert_allclose(jax.jit(pipe.loss)(placed, batch, rng), expected, rtol=1e-5)
    return pipe


@pytest.mark.pipeline
@pytest.mark.parametrize("case", COVERING, ids=lambda case: "-".join(map(str, case)))
def test_gradients_equal_the_unpipelined_model(case):
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL, ids=lambda case: "-".join(map(str, case)))
def test_gradients_equal_the_unpipelined_model_everywhere(case):
    check(*case)


@pytest.mark.pipeline
@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-fused"])
def test_randomness_depends_on_microbatch_and_layer_only(schedule, remat):
    rng = jax.random.key(7)
    check(schedule, 4, 2, 3, remat, True, 3, rng=rng)


PIPELINE = pytest.mark.pipeline


@pytest.mark.parametrize(
    "num_layers", [pytest.param(4, marks=PIPELINE), 5, pytest.param(7, marks=PIPELINE)]
)
def test_uneven_chunks_drop_nothing(num_layers):
    check("1f1b", 4, 2, 3, "none", False, 3, num_layers=num_layers)


def test_a_schedule_with_two_copies_of_the_weights_is_only_simulated():
    with pytest.raises(ValueError, match=r"'chimera' can only be simulated: it needs 2 copies"):
        check("chimera", 2, 1, 0, "none", True, 2)
