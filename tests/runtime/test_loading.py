"""Parameters made or read where they belong, and moved from place to place."""

import functools
import itertools
import math

import chex
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from covering import some
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.runtime import new_params

pytestmark = pytest.mark.pipeline

LAYERS, WIDTH = 8, 64
ZERO_3, ZERO_1, STAGES = ("interleaved", 2, 2, 3), ("1f1b", 4, 2, 1), ("1f1b", 8, 1, 0)
"""Schedule, stages, data shards, and ZeRO level."""


def initial(layout: str, *, width: int = WIDTH):
    """An init function: of stacked layers, or of a tuple.

    XLA may round a function of the same random bits otherwise where it computes fewer at once, but
    for numbers that are uniform.
    """

    def layer(key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.uniform(up, (width, 2 * width)),
            "down": jax.random.uniform(down, (2 * width, width)),
            "bias": jnp.zeros(width),
        }

    def init(key):
        embed, *keys = jax.random.split(key, LAYERS + 1)
        made = [layer(key) for key in keys]
        layers = tuple(made) if layout == "tuple" else jax.vmap(layer)(jnp.stack(keys))
        return {"embed": jax.random.uniform(embed, (4, width)), "layers": layers, "head": {}}

    return init


@functools.cache
def made(layout: str) -> dict:
    return jax.device_get(jax.jit(initial(layout))(jax.random.key(1)))


@functools.cache
def pipeline(layout: str, schedule: str, stages: int, data: int, zero: int, *, dtype="float32"):
    def layer(w, x, batch, rng):
        return x + jnp.tanh(x @ w["up"] + w["bias"].mean()) @ w["down"]

    model = jaxpipe.Model(
        lambda outer, batch, rng: batch["x"] @ outer["embed"],
        (layer,) * LAYERS if layout == "tuple" else layer,
        lambda outer, x, batch, rng: jnp.mean(x**2),
    )
    shapes = jax.eval_shape(initial(layout), jax.random.key(0))
    return jaxpipe.Pipeline(
        model,
        jax.tree.map(lambda leaf: leaf.update(dtype=dtype), shapes),
        schedule=schedule,
        mesh=jaxpipe.make_mesh(stage=stages, data=data),
        zero=zero,
        weights="unrolled" if layout == "unrolled" else "stacked",
    )


def device_bytes(tree):
    """The most bytes that one device holds; several arrays may be one buffer."""
    held = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            buffers = held.setdefault(shard.device, {})
            buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return max(sum(buffers.values()) for buffers in held.values())


def assert_same(got, want):
    chex.assert_trees_all_equal(jax.device_get(got), jax.device_get(want))
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.sharding == two.sharding


@pytest.mark.parametrize(
    ("layout", "place"),
    some(
        itertools.product(("stacked", "unrolled", "tuple"), (ZERO_3, ZERO_1, STAGES)),
        *(("stacked", ZERO_1), ("unrolled", STAGES), ("tuple", ZERO_3)),
    ),
)
def test_parameters_made_or_read_by_layer_are_those_that_are_placed(layout, place, monkeypatch):
    """No device holds more than its part and a layer: by what live arrays take while layers are
    written, and what the compiler says of the rest."""
    params, pipe = made(layout), pipeline(layout, *place)
    placed = pipe.place(params)
    assert_same(jaxpipe.init_params(pipe, initial(layout), jax.random.key(1)), placed)

    known = {id(leaf): leaf for leaf in jax.live_arrays()}  # which ids name while it holds them
    peaks, write = [], new_params._Layers._with

    def watched(*args):
        peaks.append(device_bytes([w for w in jax.live_arrays() if id(w) not in known]))
        return write(*args)

    monkeypatch.setattr(new_params._Layers, "_with", watched)
    assert_same(jaxpipe.load_params(pipe, toys.reader(params)), placed)
    layer = sum(w.nbytes for w in jax.tree.leaves(toys.reader(params)("layers", 0)))
    part = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(placed)
    )
    # A layer that differs is packed on the first device.
    assert part < max(peaks) <= part + (2 if layout == "tuple" else 1) * layer
    for placing, tree in (("place", pipe.canonical_params), ("unplace", pipe.placed_params)):
        memory = jax.jit(getattr(pipe, placing)).lower(tree).compile().memory_analysis()
        # Below ZeRO-3, data shards make each a part, and gather them.
        gathered = part if pipe.options.zero == 1 else 0
        assert memory.temp_size_in_bytes <= part + gathered + 3 * layer, placing


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # A vocabulary that stages split, and layers that they do not divide.
        ("untied", {"schedule": "zb-v", "layer_counts": (1, 2, 0, 2)}),
        ("untied", {"schedule": "zb-v", "layer_counts": (1, 2, 0, 2), "weights": "unrolled"}),
        ("adapted tuple", {}),  # not trained, and shared by layers
        ("uneven", {"weights": "unrolled"}),  # with several kinds at a place
    ],
)
def test_every_toy_is_placed_and_comes_back(name, options):
    params = toys.named(name, 5).params
    pipe = toys.pipeline(name, sizes=toys.ON_DATA, num_layers=5, zero=3, **options)
    placed = pipe.place(params)
    chex.assert_trees_all_equal(jax.device_get(pipe.unplace(placed)), params)
    assert_same(jaxpipe.load_params(pipe, toys.reader(params)), placed)
    assert_same(jaxpipe.init_params(pipe, lambda key: params, jax.random.key(0)), placed)
    if pipe.options.weights == "unrolled":
        assert len(placed["layers"]) == pipe.schedule.num_chunks * pipe.table.layers_per_chunk
        assert {w.shape[0] for w in jax.tree.leaves(placed["layers"])} == {2}


@pytest.mark.parametrize(("dtype", "bits"), [("float32", np.uint32), ("bfloat16", np.uint16)])
def test_the_sign_of_a_zero_and_every_bit_of_a_number_stay(dtype, bits):
    pipe = pipeline("stacked", *ZERO_3, dtype=dtype)
    drawn = np.random.default_rng(0).integers(np.iinfo(bits).max, size=9999, dtype=bits)
    values = drawn.view(jnp.dtype(dtype))
    values[~np.isfinite(np.float32(values))] = -0.0
    params = jax.tree.map(lambda leaf: np.resize(values, leaf.shape), made("stacked"))
    back = jax.device_get(pipe.unplace(pipe.place(params)))
    for one, two in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one.view(bits), two.view(bits))


def test_nnx_layers_are_made_in_place():
    def layers(rngs):
        return jaxpipe.nnx.stack(lambda r: nnx.Linear(8, 8, rngs=r), num_layers=4, rngs=rngs)

    def init(key):
        return {"embed": {}, "layers": layers(nnx.Rngs(key))[1], "head": {}}

    apply, _ = layers(nnx.Rngs(0))
    model = jaxpipe.Model(
        lambda outer, batch, rng: batch["x"],
        lambda w, x, batch, rng: apply(w, x),
        lambda outer, x, batch, rng: jnp.mean(x),
    )
    key, mesh = jax.random.key(3), jaxpipe.make_mesh(stage=4)
    pipe = jaxpipe.Pipeline(model, jax.eval_shape(init, key), schedule="1f1b", mesh=mesh)
    found, expected = jaxpipe.init_params(pipe, init, key), pipe.place(jax.jit(init)(key))
    chex.assert_trees_all_close(found, expected, rtol=2e-7, atol=1e-7)  # see `initial`


def test_what_does_not_fit_is_refused_before_anything_is_made():
    pipe, params = pipeline("stacked", "1f1b", 2, 1, 0), made("stacked")
    narrow = params | {"embed": params["embed"].astype(np.float16)}
    for function, *given, found in (
        (
            *(jaxpipe.init_params, initial("stacked", width=6), jax.random.key(0)),
            r"init\(key\)\['embed'\] is float32\[4, 6\]; expected",
        ),
        (
            *(jaxpipe.load_params, lambda name, n=None: params[name]),
            r"read\('layers', 0\)\['bias'\] is float32\[8, 64\]; expected",
        ),
        (
            *(jaxpipe.load_params, toys.reader(narrow)),
            r"read\('embed'\) is float16\[4, 64\]; expected float32",
        ),
    ):
        with pytest.raises(ValueError, match=found):
            function(pipe, *given)


# Moves.


WARNING = "Involuntary full rematerialization"
SIZES = {"stage": 2, "data": 4}


def test_xla_warns_of_a_transition_that_it_cannot_make(capfd):
    """If this fails, the test below sees nothing whatever happens."""
    mesh = jaxpipe.make_mesh(**SIZES)
    source, target = (NamedSharding(mesh, spec) for spec in (P("stage"), P(None, "data")))
    x = jax.device_put(jnp.ones((8, 8)), source)
    jax.jit(lambda x: jax.lax.with_sharding_constraint(x, target) * 2)(x).block_until_ready()
    assert WARNING in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "zero"),
    some([("tied", 0), ("unrolled", 3), ("stateful", 1), ("stateful", 3)], ("tied", 0)),
)
def test_nothing_is_gathered_whole_from_the_first_parameters_to_the_checkpoint(name, zero, capfd):
    """The tied vocabulary does not divide by the stages."""
    toy, optimizer = toys.named(name), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    pipe = toys.pipeline(name, "1f1b", SIZES, microbatches=3, zero=zero)
    placing, placed, states = pipe.optimizer_placing(optimizer), pipe.place(toy.params), None
    state = pipe.init(optimizer, placed)
    if name == "stateful":
        states = pipe.place_states(toy.options["states"])
        jax.jit(pipe.unplace_states)(states)
    rng = None if name == "stateful" else jax.random.key(2)
    step = pipe.train_step(optimizer)
    _, placed, state = step(placed, state, toy.batch(24), rng, states)

    # To a checkpoint and back, by themselves and as parts of larger programs.
    saved = pipe.unplace(placed), placing.unplace(state)
    pipe.place(saved[0]), placing.place(saved[1])

    @jax.jit
    def there_and_back(placed, state):
        canonical = pipe.unplace(placed), placing.unplace(state)
        return canonical, pipe.place(canonical[0]), placing.place(canonical[1])

    there_and_back(placed, state)
    kept = jax.tree.map(lambda leaf: leaf.sharding, (pipe.canonical_params, placing.canonical))
    canonical = jax.jit(lambda *given: there_and_back(*given)[0], out_shardings=kept)(placed, state)
    jax.jit(lambda params, state: (pipe.place(params), placing.place(state)))(*canonical)
    jax.block_until_ready(placed)
    assert WARNING not in capfd.readouterr().err
