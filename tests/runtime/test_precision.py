"""Weights in the dtype that layers compute in: cast once per step, and gathered in it; matmuls in
8-bit floats."""

import collections
import dataclasses
import functools
import math
import re
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import places
import pytest
import toy
import toys
from covering import some

import jaxpipe
from jaxpipe.runtime.float8 import E4M3, E5M2, quantize
from jaxpipe.runtime.layers.split import split_layer
from jaxpipe.runtime.memory import buffers
from models import blocks


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
    depth, kept = 8 if name == "places" else 9, () if name in ("uneven", "places") else ("bias",)
    given = {"zero": zero, "num_layers": depth}
    toy, rng = toys.named(name, depth), jax.random.key(1)
    narrow = {"compute_dtype": "bfloat16", "full_precision": tuple(f"*{part}*" for part in kept)}
    pipe, plain = pipeline(name, schedule, **given, **narrow), pipeline(name, schedule, **given)
    found = jax.jit(pipe.value_and_grad)(pipe.place(toy.params), toy.batch(16), rng)
    start = plain.place(rounded(toy.params, *kept))
    chex.assert_trees_all_equal(found, jax.jit(plain.value_and_grad)(start, toy.batch(16), rng))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    weights = jax.tree.leaves(buffers(pipe, toy.batch(16), rng)["weights"])
    assert {str(leaf.dtype) for leaf in weights} == {"bfloat16"} | ({"float32"} if kept else set())


def test_a_step_is_that_of_rounded_weights():
    check("tied", "1f1b-fused", 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*toys.LAYOUTS, "places"])
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
    new, grads = jax.device_get((pipe.unplace(new), pipe.unplace(grads)))
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
    some(
        [("unrolled", 1, "step"), ("tuple", 2, "step"), ("stacked", 3, "chunk")],
        ("stacked", 3, "chunk"),
    ),
)
def test_gradients_of_narrow_parameters_are_summed_in_float32(layers, zero, update):
    pipe, params = summing(layers, zero=zero)
    optimizer, placed = optax.sgd(1.0), pipe.place(params)
    step = pipe.train_step(optimizer, update=update)
    _, new, _ = step(placed, pipe.init(optimizer, placed), BATCH)
    chex.assert_trees_all_equal(pipe.unplace(new), summed(params))
    sums = jax.tree.leaves(buffers(pipe, BATCH)["gradients"])
    assert {str(leaf.dtype) for leaf in sums} == {"float32"}  # as memory is predicted
    whole = functools.partial(jaxpipe.unpipelined.value_and_grad, pipe.model, data_shards=2)
    run = jax.jit(functools.partial(whole, num_microbatches=len(SUMMANDS) // 2))
    _, gradients = run(params, BATCH)
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


# Matmuls in 8-bit floats: a step equals one of layers that quantize by hand.


def quantized(x, dtype):
    """Rounds a tensor to 8-bit floats, times the power of two nearest to its largest value, over
    that of the dtype."""
    own = {jnp.float8_e4m3fn: 8, jnp.float8_e5m2: 15}[dtype]
    fraction, exponent = jnp.frexp(jnp.abs(x).max())
    scale = jnp.ldexp(jnp.ones((), x.dtype), exponent - (fraction < 0.75) - own)
    return (x / scale).astype(dtype).astype(x.dtype) * scale


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


def float8(name="tied", schedule="1f1b", **options) -> jaxpipe.Pipeline:
    return pipeline(name, schedule, **{"fp8": ["*up", "*down"]} | options)


def check_float8(schedule, name, zero, remat) -> jaxpipe.Pipeline:
    pipe = float8(name, schedule, zero=zero, remat=remat)
    placed = pipe.place(TIED.params)
    loss, gradients = jax.jit(pipe.value_and_grad)(placed, TIED.batch(16), jax.random.key(1))
    found = loss, pipe.unplace(gradients)
    chex.assert_trees_all_close(found, expected(), rtol=1e-5, atol=1e-6)
    return pipe


def test_a_step_is_that_of_layers_that_quantize():
    check_float8("zb-v", "tied", 3, "dots")


def test_layers_of_two_kinds_quantize_and_run_in_pairs():
    def plain(w, x, batch, rng):
        return x + jnp.tanh(matmul(x, w["kernel"]) + batch["shift"])

    def gated(w, x, batch, rng):
        return x + w["gain"] * matmul(jnp.tanh(matmul(x, w["up"])), w["down"])

    model, params, batch = places.model(6), places.params(6), places.batch(24)
    by_hand = dataclasses.replace(model, layer=(plain, gated) * 3)
    reference = functools.partial(
        jaxpipe.unpipelined.value_and_grad, by_hand, num_microbatches=6, data_shards=2
    )
    expected = jax.jit(reference)(params, batch)
    pipe = jaxpipe.Pipeline(
        model,
        params,
        schedule="dualpipe-v-published",
        microbatches=6,
        mesh=jaxpipe.make_mesh(**toys.ON_DATA),
        zero=3,
        fp8=["*kernel", "*up", "*down"],
        pair_layers=True,
    )
    assert pipe.table.pairs
    loss, gradients = jax.jit(pipe.value_and_grad)(pipe.place(params), batch)
    found = loss, pipe.unplace(gradients)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
    (weights,) = buffers(pipe, batch)["weights"]
    # The last chunk of one stage is a plain layer, that of the other a gated one.
    assert [len(row) for row in weights.values()] == [1, 3, 4, 0]
    assert {str(w.dtype) for row in weights.values() for w in row} == {"float8_e4m3fn", "float32"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "unrolled"])
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-fused", "zb-v", "breadth-first"])
def test_a_step_is_that_of_layers_that_quantize_everywhere(schedule, name):
    for zero, remat in ((0, "none"), (0, "dots"), (2, "full"), (3, "none"), (3, "dots")):
        pipe = check_float8(schedule, name, zero, remat)
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

    @jax.jit
    def expected(params, x):
        y, pullback = jax.vjp(by_hand, params, x)
        return y, *pullback(x)

    y, dparams, dx = expected(params, x)
    split = split_layer(plain, params, x, frozen=frozen, quantized=[None, "down", "up"])
    pairs = {name: quantize(params[name], E4M3) for name in ("down", "up")}
    given = params | {name: pair.values for name, pair in pairs.items()}
    given = given, [pair.scale for pair in pairs.values()]
    found, until_b, until_w = jax.jit(split.forward)(given, x)
    chex.assert_trees_all_close(found, y, rtol=1e-6)
    found = jax.jit(split.backward_fused)(given, until_b, until_w, x)
    chex.assert_trees_all_close(found, (dx, dparams | {"down": None}), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_largest_and_the_smallest_floats_have_scales(dtype):
    largest = jnp.finfo(jnp.float32).max
    for x in (jnp.array([largest, -0.9 * largest]), jnp.zeros(2), jnp.full(2, 2.0**-100)):
        values, scale = quantize(x, dtype)
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
    pipe, found = float8(zero=3, **compute), collections.Counter()
    text = jax.jit(pipe.value_and_grad).lower(pipe.placed_params, TIED.batch(16)).as_text()
    for shape, dtype in re.findall(r"all_gather.*-> tensor<((?:\d+x)+)(\w+)>", text):
        sizes = [int(n) for n in shape.split("x") if n]
        if 2 * toy.WIDTH in sizes:  # of a layer
            found[dtype] += math.prod(sizes)
    assert found == elements


def test_full_precision_excepts_weights():
    pipe = float8(fp8="*", full_precision="*bias", compute_dtype="bfloat16")
    weights = buffers(pipe, TIED.batch(16))["weights"]
    (dtypes,) = jax.tree.map(lambda leaf: leaf.dtype, weights)
    assert dtypes == {"up": "float8_e4m3fn", "down": "float8_e4m3fn", "bias": "float32"}


def test_what_is_read_otherwise_is_refused():
    pipe = float8(fp8="*")
    with pytest.raises(ValueError, match="fp8 chooses layers/bias, which is read by 'add'"):
        jax.eval_shape(pipe.value_and_grad, pipe.placed_params, TIED.batch(16))


# MXFP8: 32 values of each sum share a scale, so that both matmuls of an operand round it.


def in_blocks(x, dim):
    """Rounds each 32 values along a dimension like a tensor of their own."""
    cuts = [*range(32, x.shape[dim], 32)]
    one = functools.partial(quantized, dtype=jnp.float8_e4m3fn)
    rows = jnp.split(jnp.moveaxis(x, dim, -1), cuts, axis=-1)
    rounded = [jax.vmap(one)(w.reshape(-1, w.shape[-1])).reshape(w.shape) for w in rows]
    return jnp.moveaxis(jnp.concatenate(rounded, axis=-1), -1, dim)


@jax.custom_vjp
def block_matmul(x, w):
    return in_blocks(x, -1) @ in_blocks(w, 0)


def block_backward(kept, dy):
    (x, w), tokens = kept, dy.size // dy.shape[-1]
    dw = in_blocks(x.reshape(tokens, -1), 0).T @ in_blocks(dy.reshape(tokens, -1), 0)
    return in_blocks(dy, -1) @ in_blocks(w, 1).T, dw


block_matmul.defvjp(lambda x, w: (block_matmul(x, w), (x, w)), block_backward)


def wide_toy():
    """A model whose sums are 64 and 80 features, and 30 tokens: blocks divide some of them."""
    draw = np.random.default_rng(0).normal
    layers = {"up": 0.2 * draw(size=(5, 64, 80)), "down": 0.2 * draw(size=(5, 80, 64))}
    params = {"embed": np.ones(64), "layers": layers | {"bias": np.full((5, 80), 0.1)}, "head": {}}
    batch = {"x": draw(size=(16, 15, 64)), "y": draw(size=(16, 15, 64))}
    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"] * outer["embed"],
        layer=functools.partial(layer, matmul=jnp.matmul),
        head_loss=lambda outer, x, batch, rng: jnp.mean((x - batch["y"]) ** 2),
    )
    return model, params, batch


@pytest.mark.parametrize(
    ("schedule", "zero", "remat"),
    some(
        [("1f1b", 0, "none"), ("zb-v", 2, "dots"), ("interleaved-fused", 3, "full")],
        ("zb-v", 3, "dots"),
    ),
)
def test_a_step_in_mxfp8_is_that_of_layers_that_quantize(schedule, zero, remat):
    """In float64, in which no sum in another order is rounded to another number of 8 bits."""
    with jax.enable_x64(True):
        model, params, batch = wide_toy()
        by_hand = dataclasses.replace(model, layer=functools.partial(layer, matmul=block_matmul))
        expected = jaxpipe.unpipelined.value_and_grad(
            by_hand, params, batch, num_microbatches=4, data_shards=2
        )
        pipe = jaxpipe.Pipeline(
            model,
            params,
            schedule=schedule,
            microbatches=4,
            mesh=jaxpipe.make_mesh(**toys.ON_DATA),
            zero=zero,
            remat=remat,
            fp8=["*up", "*down"],
            fp8_recipe="mxfp8",
        )
        placed = pipe.place(params)
        loss, gradients = jax.jit(pipe.value_and_grad)(placed, batch)
        found = loss, pipe.unplace(gradients)
        chex.assert_trees_all_close(found, expected, rtol=1e-9, atol=1e-12)
        chex.assert_trees_all_close(jax.jit(pipe.loss)(placed, batch), loss, rtol=1e-9)
        if remat != "full":
            kept = {leaf.dtype.name for leaf in jax.tree.leaves(buffers(pipe, batch)["until_w"])}
            assert kept == {"float8_e4m3fn", "float8_e8m0fnu"}


@pytest.mark.parametrize(
    ("capability", "refusals"), [("9.0", 1), ("10.0", 0), ("12.1", 0), ("gfx942", 1)]
)
def test_mxfp8_needs_gpus_that_multiply_in_blocks(capability, refusals):
    gpu = types.SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="GPU")
    mesh = types.SimpleNamespace(devices=np.array([gpu]))
    options = jaxpipe.Options(fp8="*", fp8_recipe="mxfp8")
    assert len([one for one in options.problems(mesh) if one.argument == "fp8_recipe"]) == refusals
