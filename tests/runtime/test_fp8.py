"""Matmuls in 8-bit floats: a step equals one of layers that quantize by hand."""

from __future__ import annotations

import dataclasses
import functools
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

WEIGHTS = ["*up", "*down"]


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
def expected(name: str) -> tuple:
    """Loss and gradients of the toy on one device, with matmuls that quantize."""
    model = dataclasses.replace(toy.model(tied=True, axis=None), layer=layer)
    step = functools.partial(
        jaxpipe.unpipelined.value_and_grad, model, num_microbatches=4, data_shards=2
    )
    return jax.jit(step)(toys.params(name), toys.batch(name), jax.random.key(1))


def pipeline(schedule, zero=0, layers="stacked", **options) -> jaxpipe.Pipeline:
    options = {"fp8": WEIGHTS, "mesh": jaxpipe.make_mesh(stage=2, data=2)} | options
    return toys.pipeline(schedule, layers, zero, microbatches=4, **options)


def check(schedule, zero, layers, remat) -> jaxpipe.Pipeline:
    pipe = pipeline(schedule, zero, layers, remat=remat)
    placed = pipe.place(toys.params(layers))
    found = jax.jit(pipe.value_and_grad)(placed, toys.batch(layers), jax.random.key(1))
    found = found[0], pipe.unplace(found[1])
    chex.assert_trees_all_close(found, expected("stacked"), rtol=1e-5, atol=1e-6)
    return pipe


def test_a_step_is_that_of_layers_that_quantize():
    check("zb-v", 3, "stacked", "dots")


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["stacked", "unrolled"])
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-fused", "zb-v", "breadth-first"])
def test_a_step_is_that_of_layers_that_quantize_everywhere(schedule, layers):
    for zero, remat in ((0, "none"), (0, "dots"), (2, "full"), (3, "none"), (3, "dots")):
        pipe = check(schedule, zero, layers, remat)
    placed, batch, rng = pipe.place(toys.params(layers)), toys.batch(layers), jax.random.key(1)
    loss, _ = expected("stacked")
    chex.assert_trees_all_close(jax.jit(pipe.loss)(placed, batch, rng), loss, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["lora_*", "lora_b"])
def test_adapters_that_are_trained_or_not_are_quantized_alike(trained):
    """Beside integers, and in layers that read what all share."""
    model, _, params, batch, _ = toys.named("adapted")
    found = []
    for schedule, stages, zero in (("1f1b", 1, 0), ("zb-v", 2, 3)):
        pipe = jaxpipe.Pipeline(
            *(model, params),
            schedule=schedule,
            mesh=jaxpipe.make_mesh(stage=stages, data=2),
            microbatches=4,
            zero=zero,
            trainable=["head", "shared/gain", f"layers/{trained}"],
            fp8="layers/lora_*",
        )
        loss, gradients = jax.jit(pipe.value_and_grad)(pipe.place(params), batch(16))
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
    programs = split.traced.forward.jaxpr.eqns, split.b, split.w
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


def gathered(compute: dict) -> dict[str, int]:
    """Bytes of layers' weights that a program gathers with each dtype, as lowered: XLA for CPUs
    widens them."""
    pipe = pipeline("1f1b", 3, **compute)
    text = jax.jit(pipe.value_and_grad).lower(pipe.placed_params, toys.batch("stacked")).as_text()
    sizes, counts = {"f32": 4, "bf16": 2, "f8E4M3FN": 1}, {}
    for shape, dtype in re.findall(r"all_gather.*-> tensor<((?:\d+x)+)(\w+)>", text):
        if f"x{2 * toy.WIDTH}x" in f"x{shape}":
            size = np.prod([int(n) for n in shape.split("x") if n])
            counts[dtype] = counts.get(dtype, 0) + sizes[dtype] * int(size)
    return counts


def test_half_as_many_bytes_of_weights_are_gathered():
    narrow = {"compute_dtype": "bfloat16"}
    both = 2 * toy.WIDTH * 2 * toy.WIDTH  # elements of a layer's matrices
    assert gathered(narrow | {"full_precision": "*bias", "fp8": ()})["bf16"] == 2 * both
    assert gathered(narrow)["f8E4M3FN"] == both


def test_full_precision_excepts_weights():
    pipe = pipeline("1f1b", fp8="*", full_precision="*bias", compute_dtype="bfloat16")
    weights = buffers(pipe, toys.batch("stacked"))["weights"]
    (dtypes,) = jax.tree.map(lambda leaf: leaf.dtype, weights)
    assert dtypes == {"up": "float8_e4m3fn", "down": "float8_e4m3fn", "bias": "float32"}


def test_what_is_read_otherwise_is_refused():
    pipe = pipeline("1f1b", fp8="*")
    with pytest.raises(ValueError, match="fp8 chooses layers/bias, which is read by 'add'"):
        jax.eval_shape(pipe.value_and_grad, pipe.placed_params, toys.batch("stacked"))
