"""Parameters made or read where they belong: those that `place` gives, one layer at a time."""

from __future__ import annotations

import itertools
import math

import adapted
import chex
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toys
import uneven
from covering import some

import jaxpipe
from jaxpipe.runtime import load_params as loading

pytestmark = pytest.mark.pipeline

LAYERS, WIDTH = 8, 64
ROUNDING = 2e-7
"""XLA may round a function of the same random bits otherwise where it computes fewer at once."""
ZERO_3 = {"stage": 2, "data": 2, "zero": 3, "schedule": "interleaved"}
ZERO_1 = {"stage": 4, "data": 2, "zero": 1, "schedule": "1f1b"}
STAGES = {"stage": 8, "data": 1, "zero": 0, "schedule": "1f1b"}
LAYOUTS = toys.LAYOUTS
FEW = [("stacked", ZERO_1), ("unrolled", STAGES), ("tuple", ZERO_3)]
everywhere = pytest.mark.parametrize(
    ("layout", "mesh"),
    some(itertools.product(LAYOUTS, (ZERO_3, ZERO_1, STAGES)), *FEW),
)


def initial(layout, *, width=WIDTH):
    """An init function: of stacked layers, or of a tuple."""

    def layer(key):
        up, down = jax.random.split(key)
        return {
            "up": 0.1 * jax.random.normal(up, (width, 2 * width)),
            "down": 0.1 * jax.random.normal(down, (2 * width, width)),
            "bias": jnp.zeros(width),
        }

    def init(key):
        embed, *keys = jax.random.split(key, LAYERS + 1)
        made = [layer(key) for key in keys]
        layers = tuple(made) if layout == "tuple" else jax.vmap(layer)(jnp.stack(keys))
        return {"embed": jax.random.normal(embed, (4, width)), "layers": layers, "head": {}}

    return init


def pipeline(layout, params, *, stage, data, zero, schedule):
    def layer(w, x, batch, rng):
        return x + jnp.tanh(x @ w["up"] + w["bias"].mean()) @ w["down"]

    model = jaxpipe.Model(
        lambda outer, batch, rng: batch["x"] @ outer["embed"],
        (layer,) * LAYERS if layout == "tuple" else layer,
        lambda outer, x, batch, rng: jnp.mean(x**2),
    )
    return jaxpipe.Pipeline(
        model,
        params,
        schedule=schedule,
        mesh=jaxpipe.make_mesh(stage=stage, data=data),
        zero=zero,
        weights="unrolled" if layout == "unrolled" else "stacked",
    )


def shapes(layout, **options):
    return jax.eval_shape(initial(layout, **options), jax.random.key(0))


def device_bytes(tree):
    """The most bytes that one device holds; several arrays may be one buffer."""
    held = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            buffers = held.setdefault(shard.device, {})
            buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return max(sum(buffers.values()) for buffers in held.values())


def share(tree):
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def assert_same(got, want, *, rtol=0.0):
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=rtol, atol=rtol / 2)
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.sharding == two.sharding


@everywhere
def test_parameters_made_in_place_are_those_that_are_placed(layout, mesh):
    init, key = initial(layout), jax.random.key(1)
    pipe = pipeline(layout, shapes(layout), **mesh)
    assert_same(jaxpipe.init_params(pipe, init, key), pipe.place(jax.jit(init)(key)), rtol=ROUNDING)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_bits_are_the_same_wherever_they_are_drawn(layout):
    def init(key):
        start, draw = shapes(layout), jax.random.split(key, 99)
        leaves, tree = jax.tree.flatten(start)
        keys = list(draw[: len(leaves)])
        return tree.unflatten(
            [
                jax.random.uniform(key, leaf.shape, leaf.dtype)
                for key, leaf in zip(keys, leaves, strict=True)
            ]
        )

    pipe = pipeline(layout, shapes(layout), **ZERO_3)
    key = jax.random.key(1)
    assert_same(jaxpipe.init_params(pipe, init, key), pipe.place(jax.jit(init)(key)))


@everywhere
def test_parameters_read_by_layer_are_those_that_are_placed(layout, mesh):
    params = jax.device_get(jax.jit(initial(layout))(jax.random.key(1)))
    pipe = pipeline(layout, shapes(layout), **mesh)
    assert_same(jaxpipe.load_params(pipe, toys.reader(params)), pipe.place(params))


@pytest.mark.parametrize("weights", ["stacked", "unrolled"])
def test_a_vocabulary_that_stages_split_and_layers_that_they_do_not_divide(weights):
    params = toy.params(tied=False, num_layers=5)
    options = {"mesh": jaxpipe.make_mesh(stage=2, data=2), "zero": 3, "weights": weights}
    model = toy.model(tied=False, axis="stage")
    pipe = jaxpipe.Pipeline(model, params, schedule="zb-v", layer_counts=(1, 2, 0, 2), **options)
    assert_same(jaxpipe.load_params(pipe, toys.reader(params)), pipe.place(params))
    chex.assert_trees_all_equal(jax.device_get(pipe.unplace(pipe.place(params))), params)


@pytest.mark.parametrize("differ", [False, True])
def test_parameters_that_are_not_trained_and_those_that_layers_share(differ):
    params = jax.device_get(adapted.params(differ=differ))
    options = {"schedule": "interleaved", "mesh": jaxpipe.make_mesh(stage=2, data=2), "zero": 3}
    model = adapted.model(differ=differ)
    pipe = jaxpipe.Pipeline(model, params, trainable=adapted.TRAINABLE, **options)
    placed = pipe.place(params)
    chex.assert_trees_all_equal(jax.device_get(pipe.unplace(placed)), params)
    assert_same(jaxpipe.load_params(pipe, toys.reader(params)), placed)
    made = jaxpipe.init_params(pipe, lambda key: params, jax.random.key(0))
    assert_same(made, placed)


def test_layers_of_several_shapes():
    params, mesh = uneven.params(), jaxpipe.make_mesh(stage=2, data=2)
    pipe = jaxpipe.Pipeline(uneven.model(), params, schedule="interleaved", mesh=mesh, zero=3)
    assert_same(jaxpipe.load_params(pipe, toys.reader(params)), pipe.place(params))


@pytest.mark.parametrize(("dtype", "bits"), [("float32", np.uint32), ("bfloat16", np.uint16)])
def test_the_sign_of_a_zero_and_every_bit_of_a_number_stay(dtype, bits):
    start = jax.tree.map(lambda leaf: leaf.update(dtype=dtype), shapes("stacked"))
    drawn = np.random.default_rng(0).integers(np.iinfo(bits).max, size=9999, dtype=bits)
    values = drawn.view(jnp.dtype(dtype))
    values[~np.isfinite(np.float32(values))] = -0.0
    params = jax.tree.map(lambda leaf: np.resize(values, leaf.shape), start)
    pipe = pipeline("stacked", start, **ZERO_3)
    back = jax.device_get(pipe.unplace(pipe.place(params)))
    for one, two in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one.view(bits), two.view(bits))


@everywhere
def test_no_device_holds_more_than_its_part_and_a_layer(layout, mesh, monkeypatch):
    """By what live arrays take while layers are written, and what the compiler says of the rest."""
    params = jax.device_get(jax.jit(initial(layout))(jax.random.key(1)))
    pipe = pipeline(layout, shapes(layout), **mesh)
    before, peaks, write = jax.live_arrays(), [], loading._Layers._with
    known = set(map(id, before))

    def watched(*args):
        peaks.append(device_bytes([w for w in jax.live_arrays() if id(w) not in known]))
        return write(*args)

    monkeypatch.setattr(loading._Layers, "_with", watched)
    jaxpipe.load_params(pipe, toys.reader(params))
    layer = sum(w.nbytes for w in jax.tree.leaves(toys.reader(params)("layers", 0)))
    part = share(pipe.placed_params)
    # A layer that differs is packed on the first device.
    assert part < max(peaks) <= part + (2 if layout == "tuple" else 1) * layer
    for placing, tree in [("place", pipe.canonical_params), ("unplace", pipe.placed_params)]:
        memory = jax.jit(getattr(pipe, placing)).lower(tree).compile().memory_analysis()
        # Below ZeRO-3, data shards make each a part, and gather them.
        gathered = part if mesh["zero"] == 1 else 0
        assert memory.temp_size_in_bytes <= part + gathered + 3 * layer, placing


def test_nnx_layers_are_made_in_place():
    def layers(rngs):
        return jaxpipe.nnx.stack(lambda r: nnx.Linear(8, 8, rngs=r), num_layers=4, rngs=rngs)

    def init(key):
        return {"embed": {}, "layers": layers(nnx.Rngs(key))[1], "head": {}}

    start = jax.eval_shape(init, jax.random.key(0))
    apply, _ = layers(nnx.Rngs(0))
    model = jaxpipe.Model(
        lambda outer, batch, rng: batch["x"],
        lambda w, x, batch, rng: apply(w, x),
        lambda outer, x, batch, rng: jnp.mean(x),
    )
    pipe = jaxpipe.Pipeline(model, start, schedule="1f1b", mesh=jaxpipe.make_mesh(stage=4))
    key = jax.random.key(3)
    assert_same(jaxpipe.init_params(pipe, init, key), pipe.place(jax.jit(init)(key)), rtol=ROUNDING)


def test_what_does_not_fit_is_refused_before_anything_is_made():
    pipe = pipeline("stacked", shapes("stacked"), stage=2, data=1, zero=0, schedule="1f1b")
    with pytest.raises(ValueError, match=r"init\(key\)\['embed'\] is float32\[4, 6\]; expected"):
        jaxpipe.init_params(pipe, initial("stacked", width=6), jax.random.key(0))
    params = jax.device_get(initial("stacked")(jax.random.key(0)))

    def whole(name, n=None):
        return params[name]

    with pytest.raises(ValueError, match=r"read\('layers', 0\)\['bias'\] is float32\[8, 64\]; exp"):
        jaxpipe.load_params(pipe, whole)
    params["embed"] = params["embed"].astype(np.float16)
    with pytest.raises(ValueError, match=r"read\('embed'\) is float16\[4, 64\]; expected float32"):
        jaxpipe.load_params(pipe, whole)
