"""Weights in the dtype that layers compute in: cast once per step, and gathered in it."""

from __future__ import annotations

import re

import chex
import compilations
import jax
import jax.numpy as jnp
import layouts
import optax
import pytest
import toy
from covering import covering, some

import jaxpipe
from jaxpipe.runtime.measure.traced import buffers

CASES = [
    (schedule, layers, zero)
    for schedule in ("1f1b-fused", "zb-v", "breadth-first")
    for layers in layouts.LAYOUTS
    for zero in (0, 2, 3)
]

FEW = covering([case for case in CASES if case[0] != "breadth-first" and case[2] != 2])


def rounded(params: dict, *kept: str) -> dict:
    """The parameters with those of layers rounded to bfloat16, but for these."""

    def one(path, w):
        if any(name in jax.tree_util.keystr(path) for name in kept):
            return w
        return w.astype(jnp.bfloat16).astype(w.dtype)

    return params | {"layers": jax.tree.map_with_path(one, params["layers"])}


def pipeline(schedule, layers, zero, **options) -> jaxpipe.Pipeline:
    mesh = jaxpipe.make_mesh(stage=2, data=2)
    return layouts.pipeline(schedule, layers, zero, mesh=mesh, microbatches=4, **options)


@pytest.mark.parametrize(("schedule", "layers", "zero"), some(CASES, *FEW))
def test_a_step_is_that_of_rounded_weights(schedule, layers, zero):
    case, differ = (schedule, layers, zero), layers == "tuple"
    params, batch, rng = layouts.params(layers), layouts.batch(layers), jax.random.key(1)
    kept = () if differ else ("bias",)
    narrow = {"compute_dtype": "bfloat16", "full_precision": [f"*{name}*" for name in kept]}
    pipe, plain = (
        pipeline(*case, **narrow if kept else {"compute_dtype": "bfloat16"}),
        pipeline(*case),
    )
    found = jax.jit(pipe.value_and_grad)(pipe.place(params), batch, rng)
    expected = jax.jit(plain.value_and_grad)(plain.place(rounded(params, *kept)), batch, rng)
    chex.assert_trees_all_equal(found, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    weights = jax.tree.leaves(buffers(pipe, batch, rng)["weights"])
    assert {str(leaf.dtype) for leaf in weights} == {"bfloat16"} | ({"float32"} if kept else set())


def test_a_function_chooses_by_the_shapes_of_canonical_parameters():
    """Of stacked layers, as `trainable` does: a bias has two dimensions."""
    seen = []

    def keeps(path, shape):
        seen.append((path, shape.shape))
        return len(shape.shape) == 2

    pipe = pipeline("1f1b", "stacked", 0, compute_dtype="bfloat16", full_precision=keeps)
    kept = jax.tree.map(lambda leaf: leaf.dtype, buffers(pipe, layouts.batch("stacked"))["weights"])
    assert kept == [{"up": "bfloat16", "down": "bfloat16", "bias": "float32"}]
    params = layouts.params("stacked")["layers"]
    assert set(seen) == {(f"layers/{name}", w.shape) for name, w in params.items()}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("update", ["step", "chunk"])
def test_updates_keep_what_rounding_would_lose(zero, update):
    params, batch = layouts.params("stacked"), layouts.batch("stacked")
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
    step = (
        jax.jit(pipe.value_and_grad).lower(pipe.placed_params, layouts.batch("stacked")).as_text()
    )
    wide = 2 * toy.WIDTH
    found = re.findall(rf"all_gather.*-> tensor<(?:\d+x)*(?:{wide}x)+(?:\d+x)*(\w+)>", step)
    assert set(found) == {"f32" if compute_dtype is None else "bf16"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_dtype": "bf17"}, "compute_dtype='bf17' is no dtype.\nNearest valid: 'bfloat16'"),
        ({"compute_dtype": "int8"}, "compute_dtype='int8' is not floating point"),
        ({"compute_dtype": "float32"}, "compute_dtype='float32' is as wide as the layers'"),
        ({"full_precision": "*bias*"}, "full_precision needs compute_dtype"),
        (
            {"compute_dtype": "bfloat16", "full_precision": "*norm*"},
            "full_precision: '*norm*' is the path of no parameter",
        ),
    ],
)
def test_a_dtype_that_does_not_fit_is_refused(options, message):
    layouts.params("stacked")
    assert message in compilations.refusal(pipeline, "1f1b", "stacked", 0, **options)
