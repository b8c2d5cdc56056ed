"""Parameters that are not trained, and parameters that layers share."""

from __future__ import annotations

import functools

import adapted
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from compilations import refusal

import jaxpipe
from jaxpipe.runtime.filters import split_trainable
from jaxpipe.runtime.measure.traced import buffers
from jaxpipe.runtime.trees import combine


def pipeline(schedule: str, layers: str, zero: int, **options):
    differ = layers == "tuple"
    options = {"trainable": adapted.TRAINABLE} | options
    return jaxpipe.Pipeline(
        adapted.model(differ=differ),
        adapted.params(differ=differ),
        schedule=schedule,
        microbatches=4,
        mesh=jaxpipe.make_mesh(stage=2, data=2),
        weights="unrolled" if layers == "unrolled" else "stacked",
        zero=zero,
        poison=True,
        **options,
    )


@functools.cache
def reference(differ: bool):
    """The unpipelined step, compiled once: parameters, what it returns, and its optimizer's."""
    params, batch = adapted.params(differ=differ), adapted.batch(16)
    value_and_grad = functools.partial(
        jaxpipe.unpipelined.value_and_grad,
        adapted.model(differ=differ),
        trainable=adapted.TRAINABLE,
        num_microbatches=4,
        data_shards=2,
    )
    return params, batch, jax.jit(lambda *args: value_and_grad(*args))


def assert_close(got, expected):
    def close(path, a, b):
        scale = np.abs(b).max() if b.size else 1
        np.testing.assert_allclose(
            a, b, atol=1e-5 * scale, rtol=0, err_msg=jax.tree_util.keystr(path)
        )

    chex.assert_trees_all_equal_structs(got, expected)
    jax.tree.map_with_path(close, got, expected)


@pytest.mark.parametrize(("layers", "zero"), [("stacked", 3), ("unrolled", 0)])
def test_an_optimizer_sees_only_what_is_trained(layers, zero):
    pipe, params = pipeline("1f1b", layers, zero), adapted.params(differ=False)
    mask = functools.partial(jax.tree.map, lambda w: w.ndim > 1)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, mask=mask))
    trained, frozen = split_trainable(params, adapted.TRAINABLE)
    gradients = jax.tree.map(lambda w: w**2 - 0.1, trained)
    new = toys.updated(pipe, optimizer, params, combine(gradients, frozen))
    expected = toys.expected_update(optimizer, trained, gradients)
    assert_close(split_trainable(new, adapted.TRAINABLE)[0], expected)
    chex.assert_trees_all_equal(split_trainable(new, adapted.TRAINABLE)[1], frozen)
    held = sum(leaf.size for leaf in jax.tree.leaves(pipe.optimizer_placing(optimizer).canonical))
    assert held == 2 * sum(leaf.size for leaf in jax.tree.leaves(trained)) + 1


@pytest.mark.parametrize(("layers", "zero"), [("stacked", 0), ("unrolled", 3), ("tuple", 3)])
def test_what_is_not_trained_has_no_gradient_buffer(layers, zero):
    pipe = pipeline("1f1b", layers, zero)
    kept = buffers(pipe, adapted.batch(16))
    sums = [kept[name] for name in ("gradients", "reduced") if name in kept]
    assert not any(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(sums))
    trained, _ = split_trainable(pipe.canonical_params, adapted.TRAINABLE)
    largest = max(leaf.size for leaf in jax.tree.leaves(trained["layers"]))
    assert all(leaf.size <= 6 * largest for leaf in jax.tree.leaves(sums))
    _, grads = jax.eval_shape(pipe.value_and_grad, pipe.placed_params, adapted.batch(16))
    assert sum(leaf.size for leaf in jax.tree.leaves(grads["layers"])) <= 2 * 3 * sum(
        leaf.size for leaf in jax.tree.leaves(trained["layers"])
    )


def test_only_the_head_is_trained():
    params, batch, _ = reference(False)
    pipe = pipeline("zb-h1", "stacked", 3, trainable="head")
    loss, grads = jax.jit(pipe.value_and_grad)(pipe.place(params), batch)
    expected_loss, expected = jaxpipe.unpipelined.value_and_grad(
        adapted.model(differ=False),
        params,
        batch,
        trainable=lambda path, leaf: path == "head",
        num_microbatches=4,
        data_shards=2,
    )
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_close(pipe.unplace(grads), expected)


def test_gradients_by_jax_are_of_what_is_trained_and_update_it():
    params, batch, value_and_grad = reference(False)
    pipe = pipeline("1f1b", "stacked", 0)
    placed, optimizer = pipe.place(params), optax.sgd(0.1)
    grads = jax.jit(jax.grad(pipe.loss, allow_int=True))(placed, batch)
    found = [
        pipe.update(optimizer, tree, pipe.init(optimizer, placed), placed)[0]
        for tree in (grads, grads | {"frozen": jax.tree.map(jnp.zeros_like, placed["frozen"])})
    ]
    trained, frozen = split_trainable(params, adapted.TRAINABLE)
    expected = value_and_grad(params, batch)[1]
    moved = jax.tree.map(lambda w, g: w - 0.1 * g, trained, expected)
    for new in map(pipe.unplace, found):
        assert_close(new, combine(moved, frozen))


def test_an_asynchronous_pipeline_says_what_it_cannot_train():
    pipe = pipeline("1f1b", "stacked", 0)
    said = refusal(jaxpipe.AsyncPipeline, pipe, optax.sgd(0.1))
    assert "without `trainable`" in said
    assert "params['shared']" in said
