"""Weights in the dtype that layers compute in: cast once per step, and gathered in it."""

from __future__ import annotations

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
import toys

import jaxpipe
from jaxpipe.runtime.measure.traced import buffers


def rounded(params: dict, *kept: str) -> dict:
    """The parameters with those of layers rounded to bfloat16, but for these."""

    def one(path, w):
        if any(name in jax.tree_util.keystr(path) for name in kept):
            return w
        return w.astype(jnp.bfloat16).astype(w.dtype)

    return params | {"layers": jax.tree.map_with_path(one, params["layers"])}


def pipeline(schedule, layers, zero, **options) -> jaxpipe.Pipeline:
    mesh = jaxpipe.make_mesh(stage=2, data=2)
    return toys.pipeline(schedule, layers, zero, mesh=mesh, microbatches=4, **options)


def check(schedule, layers, zero):
    case, kept = (schedule, layers, zero), () if layers == "tuple" else ("bias",)
    params, batch, rng = toys.params(layers), toys.batch(layers), jax.random.key(1)
    narrow = {"compute_dtype": "bfloat16"}
    if kept:
        narrow["full_precision"] = [f"*{name}*" for name in kept]
    pipe, plain = pipeline(*case, **narrow), pipeline(*case)
    found = jax.jit(pipe.value_and_grad)(pipe.place(params), batch, rng)
    expected = jax.jit(plain.value_and_grad)(plain.place(rounded(params, *kept)), batch, rng)
    chex.assert_trees_all_equal(found, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    weights = jax.tree.leaves(buffers(pipe, batch, rng)["weights"])
    assert {str(leaf.dtype) for leaf in weights} == {"bfloat16"} | ({"float32"} if kept else set())


def test_a_step_is_that_of_rounded_weights():
    check("1f1b-fused", "stacked", 3)


@pytest.mark.slow
@pytest.mark.parametrize("layers", toys.LAYOUTS)
def test_a_step_is_that_of_rounded_weights_everywhere(layers):
    for schedule in ("1f1b-fused", "zb-v", "breadth-first"):
        for zero in (0, 2, 3):
            check(schedule, layers, zero)


def test_a_function_chooses_by_the_shapes_of_canonical_parameters():
    """Of stacked layers, as `trainable` does: a bias has two dimensions."""
    seen = []

    def keeps(path, shape):
        seen.append((path, shape.shape))
        return len(shape.shape) == 2

    pipe = pipeline("1f1b", "stacked", 0, compute_dtype="bfloat16", full_precision=keeps)
    kept = jax.tree.map(lambda leaf: leaf.dtype, buffers(pipe, toys.batch("stacked"))["weights"])
    assert kept == [{"up": "bfloat16", "down": "bfloat16", "bias": "float32"}]
    params = toys.params("stacked")["layers"]
    assert set(seen) == {(f"layers/{name}", w.shape) for name, w in params.items()}


@pytest.mark.parametrize(
    ("zero", "update"),
    [
        (3, "chunk"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, "step"), (3, "step"))),
    ],
)
def test_updates_keep_what_rounding_would_lose(zero, update):
    params, batch = toys.params("stacked"), toys.batch("stacked")
    optimizer = optax.sgd(1e-5)  # a step below the resolution of bfloat16
    pipe = pipeline("1f1b", "stacked", zero, compute_dtype=jnp.bfloat16)
    placed = pipe.place(params)
    _, grads = jax.jit(pipe.value_and_grad)(placed, batch)
    expected, _ = pipe.update(optimizer, grads, pipe.init(optimizer, placed), placed)
    expected = pipe.unplace(expected)
    step = pipe.train_step(optimizer, update=update)
    _, new, _ = step(placed, pipe.init(optimizer, placed), batch)
    chex.assert_trees_all_close(pipe.unplace(new), expected, rtol=0, atol=1e-9)
    moved = jax.tree.map(lambda a, b: (a != b).any(), pipe.unplace(new), params)
    assert all(jax.tree.leaves(moved["layers"]))


@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
def test_weights_are_gathered_in_the_dtype_that_layers_compute_in(compute_dtype):
    """As lowered: XLA for CPUs gathers no bfloat16 and widens it."""
    pipe = pipeline("1f1b", "stacked", 3, compute_dtype=compute_dtype)
    step = jax.jit(pipe.value_and_grad).lower(pipe.placed_params, toys.batch("stacked")).as_text()
    wide = 2 * toy.WIDTH
    found = re.findall(rf"all_gather.*-> tensor<(?:\d+x)*(?:{wide}x)+(?:\d+x)*(\w+)>", step)
    assert set(found) == {"f32" if compute_dtype is None else "bf16"}


SMALL = 2.0**-9
SUMMANDS = np.asarray([1, SMALL, SMALL / 2, SMALL / 2, 0, SMALL, SMALL / 2, SMALL / 2])
"""Gradients of eight microbatches, or of two data shards' four, that bfloat16 sums to 1."""
TOTAL = 1 + 2.0**-7


def summing(layers: str) -> tuple[jaxpipe.Model, dict]:
    """A model whose parameters all have these gradients, what is shared once for each layer."""

    def layer(w, x, batch, rng):
        own, shared = w
        return x + (own + shared) * batch

    def head_loss(outer, x, batch, rng):
        return len(SUMMANDS) * (x + outer["head"] * batch).sum(dtype=jnp.float32)

    of_layers = jnp.zeros((4, 2), jnp.bfloat16)
    differ = layers == "tuple"
    model = jaxpipe.Model(
        lambda outer, batch, rng: outer["embed"] * batch,
        (layer,) * 4 if differ else layer,
        head_loss,
    )
    outer = dict.fromkeys(("embed", "head", "shared"), of_layers[0])
    return model, outer | {"layers": tuple(of_layers) if differ else of_layers}


def summed(params: dict) -> dict:
    """What one step of SGD, at a rate of 1, makes of the parameters."""
    exact = jax.tree.map(lambda w: jnp.full_like(w, -TOTAL), params)
    return exact | ({"shared": 4 * exact["shared"]} if "shared" in params else {})


@pytest.mark.parametrize(
    ("layers", "zero", "update"),
    [
        *(("unrolled", 1, "step"), ("tuple", 2, "step"), ("stacked", 3, "chunk")),
    ],
)
def test_gradients_of_narrow_parameters_are_summed_in_float32(layers, zero, update):
    model, params = summing(layers)
    data, batch = 2 if zero else 1, jnp.asarray(SUMMANDS[:, None], jnp.bfloat16)
    pipe = jaxpipe.Pipeline(
        model,
        params,
        schedule="1f1b",
        mesh=jaxpipe.make_mesh(stage=2, data=data),
        microbatches=len(SUMMANDS) // data,
        zero=zero,
        weights="unrolled" if layers == "unrolled" else "stacked",
    )
    optimizer, placed = optax.sgd(1.0), pipe.place(params)
    step = pipe.train_step(optimizer, update=update)
    _, new, _ = step(placed, pipe.init(optimizer, placed), batch)
    chex.assert_trees_all_equal(pipe.unplace(new), summed(params))
    sums = jax.tree.leaves(buffers(pipe, batch)["gradients"])
    assert {str(leaf.dtype) for leaf in sums} == {"float32"}  # as memory is predicted
    _, gradients = jaxpipe.unpipelined.value_and_grad(
        model, params, batch, num_microbatches=len(SUMMANDS) // data, data_shards=data
    )
    chex.assert_trees_all_equal(jax.tree.map(jnp.negative, gradients), summed(params))


def test_asynchronous_sums_are_float32():
    model, params = summing("stacked")
    del params["shared"]
    model = dataclasses.replace(model, layer=lambda w, x, batch, rng: x + w * batch)
    batch = jnp.asarray(SUMMANDS[:, None], jnp.bfloat16)
    pipe = jaxpipe.Pipeline(
        model,
        params,
        schedule="1f1b",
        mesh=jaxpipe.make_mesh(stage=2, data=2),
        microbatches=len(SUMMANDS) // 2,
        zero=2,
    )
    training = jaxpipe.AsyncPipeline(pipe, optax.sgd(1.0), method="pipedream")
    placed = pipe.place(params)
    state = training.init(placed, training.optimizer.init(placed), batch)
    state, _ = jax.jit(training.step)(state, batch)
    state, _ = jax.jit(training.drain)(state)
    new, _ = training.finish(state)
    chex.assert_trees_all_equal(pipe.unplace(new), summed(params))
