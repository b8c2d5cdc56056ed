"""Matmuls in 8-bit floats: a step equals one of layers that quantize by hand."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toys

import jaxpipe
from jaxpipe.runtime import float8
from jaxpipe.runtime.layers.split import split_layer
from jaxpipe.runtime.measure.traced import buffers
from models import blocks

TIED = toys.named("tied")


def quantized(x, dtype):
    """Rounds a tensor to 8-bit floats, times the power of two nearest to its largest value, over
    that of the dtype."""
    own = {jnp.float8_e4m3fn: 8, jnp.float8_e5m2: 15}[dtype]
    fraction, exponent = jnp.frexp(jnp.abs(x).max())
    scale = jnp.ldexp(jnp.float32(1), exponent - (fraction < 0.75) - own)
    return (x / scale).astype(dtype).astype(jnp.float32) * scale


@jax.custom_vjp
def matmul(x, w):
    return forward(x, w)[0]


def forward(x, w):
    x, w = quantized(x, jnp.float8_e4m3fn), quantized(w, jnp.float8_e4m3fn)
    return x @ w, (x, w)


def backward(kept, dy):
    x, w = kept
    dy = quantized(dy, jnp.float8_e5m2)
    return dy @ w.T, jnp.einsum("...i,...o->io", x, dy)


matmul.defvjp(forward, backward)


def layer(w, x, batch, rng, *, matmul=matmul):
    """The toy's layer, with a matmul of its own."""
    hidden = jnp.tanh(matmul(x, w["up"]) + w["bias"])
    if rng is not None:
        hidden = jnp.where(jax.random.bernoulli(rng, 0.8, hidden.shape), hidden / 0.8, 0)
    return x + matmul(hidden, w["down"])


@functools.cache
def expected() -> tuple:
    """Loss and gradients of the toy on one device, with matmuls that quantize."""
    model = dataclasses.replace(toy.model(tied=True, axis=None), layer=layer)
    step = functools.partial(
        jaxpipe.unpipelined.value_and_grad, model, num_microbatches=4, data_shards=2
    )
    return jax.jit(step)(TIED.params, TIED.batch(16), jax.random.key(1))


def pipeline(schedule="1f1b", name="tied", **options) -> jaxpipe.Pipeline:
    options = {"fp8": ["*up", "*down"], "microbatches": 4} | options
    return toys.pipeline(name, schedule, toys.ON_DATA, **options)


def check(schedule, name, zero, remat) -> jaxpipe.Pipeline:
    pipe = pipeline(schedule, name, zero=zero, remat=remat)
    placed = pipe.place(TIED.params)
    loss, gradients = jax.jit(pipe.value_and_grad)(placed, TIED.batch(16), jax.random.key(1))
    found = loss, pipe.unplace(gradients)
    chex.assert_trees_all_close(found, expected(), rtol=1e-5, atol=1e-6)
    return pipe


def test_a_step_is_that_of_layers_that_quantize():
    check("zb-v", "tied", 3, "dots")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "unrolled"])
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-fused", "zb-v", "breadth-first"])
def test_a_step_is_that_of_layers_that_quantize_everywhere(schedule, name):
    for zero, remat in ((0, "none"), (0, "dots"), (2, "full"), (3, "none"), (3, "dots")):
        pipe = check(schedule, name, zero, remat)
    placed, rng = pipe.place(TIED.params), jax.random.key(1)
    found = jax.jit(pipe.loss)(placed, TIED.batch(16), rng)
    chex.assert_trees_all_close(found, expected()[0], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["lora_*", "lora_b"])
def test_adapters_that_are_trained_or_not_are_quantized_alike(trained):
    """Beside integers, and in layers that read what all share."""
    adapted, found = toys.named("adapted"), []
    for schedule, stages, zero in (("1f1b", 1, 0), ("zb-v", 2, 3)):
        pipe = toys.pipeline(
            *("adapted", schedule, {"stage": stages, "data": 2}),
            microbatches=4,
            zero=zero,
            trainable=["head", "shared/gain", f"layers/{trained}"],
            fp8="layers/lora_*",
        )
        placed = pipe.place(adapted.params)
        loss, gradients = jax.jit(pipe.value_and_grad)(placed, adapted.batch(16))
        found.append(jax.device_get((loss, pipe.unplace(gradients))))
    chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("product", [jnp.matmul, blocks.matmul])
def test_every_matmul_of_a_weight_has_operands_of_8_bits(product, remat):
    """Whoever wrote its derivative; what is kept for W has 8 bits, too."""
    params = jax.tree.map(lambda w: w[0], toy.params(tied=True, num_layers=1)["layers"])
    x = jnp.ones((2, toy.LENGTH, toy.WIDTH))
    one = functools.partial(layer, batch=None, rng=None, matmul=product)
    split = split_layer(one, params, x, quantized=[None, "down", "up"], remat=remat)
    programs = split.traced.forward, split.b, split.w
    found = [
        sorted(str(v.aval.dtype) for v in eqn.invars)
        for eqns in programs
        for eqn in eqns
        if eqn.primitive.name == "dot_general"
    ]
    of_f, of_b_or_w = ["float8_e4m3fn"] * 2, ["float8_e4m3fn", "float8_e5m2"]
    again = {"full": 1}.get(remat, 0)  # the layer's first matmul, whose result B needs
    assert sorted(found) == [of_f] * (2 + again) + [of_b_or_w] * 4
    wide = [shape for shape in (*split.until_w, *split.crossing) if shape.dtype.itemsize > 1]
    assert all(shape.size <= toy.WIDTH * 2 for shape in wide)  # scales, and the bias's gradient


def test_weights_that_are_not_trained_are_quantized_too():
    params = jax.tree.map(lambda w: w[0], toy.params(tied=True, num_layers=1)["layers"])
    frozen = {"bias": None, "down": params["down"], "up": None}
    x = jnp.linspace(-1, 1, 2 * toy.WIDTH).reshape(2, toy.WIDTH)
    by_hand, plain = (
        functools.partial(layer, batch=None, rng=None, matmul=product)
        for product in (matmul, jnp.matmul)
    )
    y, pullback = jax.vjp(by_hand, params, x)
    dparams, dx = pullback(x)
    split = split_layer(plain, params, x, frozen=frozen, quantized=[None, "down", "up"])
    pairs = {name: float8.quantize(params[name], float8.E4M3) for name in ("down", "up")}
    given = params | {name: pair.values for name, pair in pairs.items()}
    given = given, [pair.scale for pair in pairs.values()]
    found, until_b, until_w = split.forward(given, x)
    chex.assert_trees_all_close(found, y, rtol=1e-6)
    found = split.backward_fused(given, until_b, until_w, x)
    chex.assert_trees_all_close(found, (dx, dparams | {"down": None}), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [float8.E4M3, float8.E5M2])
def test_the_largest_and_the_smallest_floats_have_scales(dtype):
    largest = jnp.finfo(jnp.float32).max
    for x in (jnp.array([largest, -0.9 * largest]), jnp.zeros(2), jnp.full(2, 2.0**-100)):
        values, scale = float8.quantize(x, dtype)
        exact = np.float64(np.float32(values)) * np.float64(scale)
        np.testing.assert_allclose(exact, np.float64(x), rtol=0.1)


@pytest.mark.parametrize(
    ("compute", "elements"),
    [
        ({"fp8": ()}, {"f32": 272}),
        (
            {"fp8": (), "compute_dtype": "bfloat16", "full_precision": "*bias"},
            {"bf16": 256, "f32": 16},
        ),
        ({"compute_dtype": "bfloat16"}, {"f8E4M3FN": 256, "bf16": 16}),
    ],
)
def test_weights_are_gathered_in_the_dtype_that_layers_multiply_in(compute, elements):
    """As lowered: XLA for CPUs gathers neither bfloat16 nor 8-bit floats."""
    pipe, found = pipeline(zero=3, **compute), collections.Counter()
    text = jax.jit(pipe.value_and_grad).lower(pipe.placed_params, TIED.batch(16)).as_text()
    for shape, dtype in re.findall(r"all_gather.*-> tensor<((?:\d+x)+)(\w+)>", text):
        sizes = [int(n) for n in shape.split("x") if n]
        if 2 * toy.WIDTH in sizes:  # of a layer
            found[dtype] += math.prod(sizes)
    assert found == elements


def test_full_precision_excepts_weights():
    pipe = pipeline(fp8="*", full_precision="*bias", compute_dtype="bfloat16")
    weights = buffers(pipe, TIED.batch(16))["weights"]
    (dtypes,) = jax.tree.map(lambda leaf: leaf.dtype, weights)
    assert dtypes == {"up": "float8_e4m3fn", "down": "float8_e4m3fn", "bias": "float32"}


def test_what_is_read_otherwise_is_refused():
    pipe = pipeline(fp8="*")
    with pytest.raises(ValueError, match="fp8 chooses layers/bias, which is read by 'add'"):
        jax.eval_shape(pipe.value_and_grad, pipe.placed_params, TIED.batch(16))
