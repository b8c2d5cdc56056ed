"""Weights in the dtype that layers compute in: cast once per step, and gathered in it."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from covering import some

import jaxpipe
from jaxpipe.runtime.measure.traced import buffers


def rounded(params: dict, *kept: str) -> dict:
    """The parameters with those of layers rounded to bfloat16, but for these."""

    def one(path, w):
        if any(name in jax.tree_util.keystr(path) for name in kept):
            return w
        return w.astype(jnp.bfloat16).astype(w.dtype)

    return params | {"layers": jax.tree.map_with_path(one, params["layers"])}


TIED = toys.named("tied")


def pipeline(name, schedule="1f1b", **options) -> jaxpipe.Pipeline:
    return toys.pipeline(name, schedule, toys.ON_DATA, microbatches=4, **options)


def check(name, schedule, zero):
    toy, rng, kept = toys.named(name), jax.random.key(1), () if name == "uneven" else ("bias",)
    narrow = {"compute_dtype": "bfloat16", "full_precision": [f"*{part}*" for part in kept]}
    pipe, plain = pipeline(name, schedule, zero=zero, **narrow), pipeline(name, schedule, zero=zero)
    found = jax.jit(pipe.value_and_grad)(pipe.place(toy.params), toy.batch(16), rng)
    start = plain.place(rounded(toy.params, *kept))
    chex.assert_trees_all_equal(found, jax.jit(plain.value_and_grad)(start, toy.batch(16), rng))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    weights = jax.tree.leaves(buffers(pipe, toy.batch(16), rng)["weights"])
    assert {str(leaf.dtype) for leaf in weights} == {"bfloat16"} | ({"float32"} if kept else set())


def test_a_step_is_that_of_rounded_weights():
    check("tied", "1f1b-fused", 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", toys.LAYOUTS)
def test_a_step_is_that_of_rounded_weights_everywhere(name):
    for schedule in ("1f1b-fused", "zb-v", "breadth-first"):
        for zero in (0, 2, 3):
            check(name, schedule, zero)


def test_a_function_chooses_by_the_shapes_of_canonical_parameters():
    """Of stacked layers, as `trainable` does: a bias has two dimensions."""
    seen = []

    def keeps(path, shape):
        seen.append((path, shape.shape))
        return len(shape.shape) == 2

    pipe = pipeline("tied", compute_dtype="bfloat16", full_precision=keeps)
    kept = jax.tree.map(lambda leaf: leaf.dtype, buffers(pipe, TIED.batch(16))["weights"])
    assert kept == [{"up": "bfloat16", "down": "bfloat16", "bias": "float32"}]
    layers = TIED.params["layers"]
    assert set(seen) == {(f"layers/{name}", w.shape) for name, w in layers.items()}


@pytest.mark.parametrize(
    ("zero", "update"), some([(3, "chunk"), (0, "step"), (3, "step")], (3, "chunk"))
)
def test_updates_keep_what_rounding_would_lose(zero, update):
    optimizer = optax.sgd(1e-5)  # a step below the resolution of bfloat16
    pipe = pipeline("tied", zero=zero, compute_dtype=jnp.bfloat16)
    placed = pipe.place(TIED.params)
    _, grads = jax.jit(pipe.value_and_grad)(placed, TIED.batch(16))
    step = pipe.train_step(optimizer, update=update)
    _, new, _ = step(placed, pipe.init(optimizer, placed), TIED.batch(16))
    new, grads = pipe.unplace(new), pipe.unplace(grads)
    expected = jax.tree.map(lambda w, g: w - 1e-5 * g, TIED.params, grads)
    chex.assert_trees_all_close(new, expected, rtol=0, atol=1e-9)
    moved = jax.tree.map(lambda a, b: (a != b).any(), new, TIED.params)
    assert all(jax.tree.leaves(moved["layers"]))


SMALL = 2.0**-9
SUMMANDS = np.asarray([1, SMALL, SMALL / 2, SMALL / 2, 0, SMALL, SMALL / 2, SMALL / 2])
"""Gradients of eight microbatches, or of two data shards' four, that bfloat16 sums to 1."""
TOTAL = 1 + 2.0**-7


def summing(layers: str, *, zero: int, shared: bool = True) -> tuple[jaxpipe.Pipeline, dict]:
    """A pipeline whose parameters all have these gradients, what is shared once for each layer, and
    these parameters."""

    def layer(w, x, batch, rng):
        return x + (w[0] + w[1] if shared else w) * batch

    def head_loss(outer, x, batch, rng):
        return len(SUMMANDS) * (x + outer["head"] * batch).sum(dtype=jnp.float32)

    zeros, differ = jnp.zeros((4, 2), jnp.bfloat16), layers == "tuple"
    outer = ("embed", "head", "shared") if shared else ("embed", "head")
    params = dict.fromkeys(outer, zeros[0])
    params["layers"] = tuple(zeros) if differ else zeros
    pipe = jaxpipe.Pipeline(
        jaxpipe.Model(
            lambda outer, batch, rng: outer["embed"] * batch,
            (layer,) * 4 if differ else layer,
            head_loss,
        ),
        params,
        schedule="1f1b",
        mesh=jaxpipe.make_mesh(**toys.ON_DATA),
        microbatches=len(SUMMANDS) // 2,
        zero=zero,
        weights="unrolled" if layers == "unrolled" else "stacked",
    )
    return pipe, params


BATCH = jnp.asarray(SUMMANDS[:, None], jnp.bfloat16)


def summed(params: dict) -> dict:
    """What one step of SGD, at a rate of 1, makes of the parameters."""
    exact = jax.tree.map(lambda w: jnp.full_like(w, -TOTAL), params)
    return exact | ({"shared": 4 * exact["shared"]} if "shared" in params else {})


@pytest.mark.parametrize(
    ("layers", "zero", "update"),
    [("unrolled", 1, "step"), ("tuple", 2, "step"), ("stacked", 3, "chunk")],
)
def test_gradients_of_narrow_parameters_are_summed_in_float32(layers, zero, update):
    pipe, params = summing(layers, zero=zero)
    optimizer, placed = optax.sgd(1.0), pipe.place(params)
    step = pipe.train_step(optimizer, update=update)
    _, new, _ = step(placed, pipe.init(optimizer, placed), BATCH)
    chex.assert_trees_all_equal(pipe.unplace(new), summed(params))
    sums = jax.tree.leaves(buffers(pipe, BATCH)["gradients"])
    assert {str(leaf.dtype) for leaf in sums} == {"float32"}  # as memory is predicted
    _, gradients = jaxpipe.unpipelined.value_and_grad(
        pipe.model, params, BATCH, num_microbatches=len(SUMMANDS) // 2, data_shards=2
    )
    chex.assert_trees_all_equal(jax.tree.map(jnp.negative, gradients), summed(params))


def test_asynchronous_sums_are_float32():
    pipe, params = summing("stacked", zero=2, shared=False)
    training = jaxpipe.AsyncPipeline(pipe, optax.sgd(1.0), method="pipedream")
    placed = pipe.place(params)
    state = training.init(placed, training.optimizer.init(placed), BATCH)
    state, _ = jax.jit(training.step)(state, BATCH)
    state, _ = jax.jit(training.drain)(state)
    new, _ = training.finish(state)
    chex.assert_trees_all_equal(pipe.unplace(new), summed(params))
