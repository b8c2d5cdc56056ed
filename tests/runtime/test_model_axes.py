"""Model axes: layers that several devices share."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import split_toy
import toys
from compilations import refusal
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.measure import layer_costs
from jaxpipe.runtime.memory import buffers, tree_bytes
from jaxpipe.testing import assert_matches_unpipelined

SPLIT, SIZES = toys.named("split"), {"stage": 2, "tensor": 2}
LAYOUTS = {
    "stacked": ("split", {}),
    "unrolled": ("split", {"weights": "unrolled"}),
    "tuple": ("split tuple", {}),
}


def pipeline(layout="stacked", *, tensor=2, zero=3) -> jaxpipe.Pipeline:
    name, options = LAYOUTS[layout]
    sizes = {"stage": 2, "data": 2, "tensor": tensor}
    return toys.pipeline(name, "1f1b", sizes, microbatches=2, zero=zero, **options)


def test_optimizers_see_whole_parameters():
    """A factored state has the means of rows and columns, which tensor devices split."""
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    clip = optax.clip_by_global_norm(0.1)
    optimizer = optax.chain(clip, factored, optax.scale_by_param_block_rms(), optax.scale(-1e-2))
    gradients = jax.tree.map(lambda w: w**2 - 0.1, SPLIT.params)
    found = toys.updated(pipeline(), optimizer, SPLIT.params, gradients)
    expected = toys.expected_update(optimizer, SPLIT.params, gradients)
    chex.assert_trees_all_close(found, expected, rtol=2e-5, atol=1e-6)


def ring(x, axis="tensor"):
    return jax.lax.ppermute(x, axis, [(0, 1), (1, 0)])


@jax.custom_vjp
def ring_backwards(x):
    return x


ring_backwards.defvjp(lambda x: (x, None), lambda _, dx: (ring(dx),))


@jax.custom_vjp
def only_evaluated(x):
    return jax.lax.psum(x, "stage")


only_evaluated.defvjp(lambda x: (2 * x, None), lambda _, dy: (2 * dy,))


def nested(x):
    def either(x, _):
        return jax.lax.cond(x.sum() > 0, ring, jnp.negative, x), None

    return jax.jit(lambda x: jax.lax.scan(either, x, length=2)[0])(x)


def traced(**changes):
    """Traces a step of the model with other functions."""
    model = dataclasses.replace(SPLIT.model, **changes)
    pipe = jaxpipe.Pipeline(model, SPLIT.params, schedule="1f1b", mesh=jaxpipe.make_mesh(**SIZES))
    return jax.eval_shape(pipe.value_and_grad, pipe.placed_params, SPLIT.batch(8))


WHOLE = split_toy.model(split=False)
AT_ENDS = {
    "stage_split": None,
    "axis_split": {"embed": None, "layers": split_toy.LAYERS, "head": None},
    "embed": WHOLE.embed,
    "head_loss": lambda outer, x, *_: x.mean(),
}


def layer_with(function):
    return {"layer": lambda w, x, batch, rng: x + function(x)}


# fmt: off
WAITING = [
    (layer_with(lambda x: jax.lax.psum(x, "stage")), r"Layer 0 calls psum along 'stage' \(.*\)\."),
    (layer_with(ring), r"ppermute along 'tensor' \(.*test_model_axes\.py:\d+.*\(ring\)\)"),
    (layer_with(ring_backwards), "ppermute along 'tensor'"),
    (layer_with(nested), r"ppermute along 'tensor' \(.*, within <lambda> / scan / cond\)"),
    (layer_with(only_evaluated), r"psum along 'stage' \(.*only_evaluated"),
    ({"embed": SPLIT.model.embed}, r"Model\.embed calls psum along 'stage' \("),
    ({"head_loss": lambda outer, x, *_: ring(x).mean()},
     r"Model\.head_loss calls ppermute along 'tensor' .* if `Model.stage_split` is given"),
    ({"embed": lambda *args: ring_backwards(WHOLE.embed(*args))},
     r"Model\.embed calls ppermute along 'tensor'"),
    ({"embed": lambda *args: only_evaluated(WHOLE.embed(*args))},
     r"Model\.embed calls psum along 'stage' \(.*only_evaluated"),
    ({"head_loss": lambda outer, x, *_: ring_backwards(x).mean()},
     r"Model\.head_loss calls ppermute along 'tensor'"),
]
MISFITS = [
    ({"stage": 2, "tensor": 3}, {},
     "params['layers']['bias'] has 12 elements in dimension 0 (joined of (8, 4)), which the 3 "
     "devices along 'tensor' do not divide", "Nearest valid: 2, 4 devices."),
    ({"stage": 2}, {}, "mesh has the axes {'data': 1, 'stage': 2}, and none is 'tensor'"),
    (SIZES, {"axes": (), "axis_split": None},
     "would compute the same on all 2 devices along 'tensor'"),
    (SIZES, {"axis_split": {"layers": split_toy.LAYERS | {"up": P(None, "rows")}}},
     "split over 'rows', which is none of Model.axes=('tensor',)"),
    (SIZES, {"axis_split": {"layers": {}}}, "Model.axis_split must be a dictionary like params"),
    (SIZES, {"axis_split": P()}, "not a dictionary"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "message"), WAITING)
def test_layers_embedding_and_head_may_not_wait_for_other_stages(changes, message):
    given = changes if "layer" in changes else AT_ENDS | changes
    assert re.search(message, refusal(traced, **given))


def test_embedding_and_head_may_where_all_stages_compute_them():
    model = SPLIT.model
    traced(
        embed=lambda *args: ring(ring(model.embed(*args)), "stage"),
        head_loss=lambda outer, x, *args: model.head_loss(outer, ring(ring(x), "stage"), *args),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_go_to_their_devices_and_back(layout):
    pipe, params = pipeline(layout), toys.named(LAYOUTS[layout][0]).params
    placed = pipe.place(params)
    chex.assert_trees_all_equal(pipe.unplace(placed), params)

    chex.assert_trees_all_equal(jaxpipe.load_params(pipe, toys.reader(params)), placed)
    whole = pipeline(layout, tensor=1).place(params)
    own = [
        sum(w.addressable_shards[0].data.size for w in jax.tree.leaves(tree["layers"]))
        for tree in (placed, whole)
    ]
    assert own[0] < 0.6 * own[1]


def test_costs_and_memory_are_those_of_a_part():
    of_part, of_whole = (pipeline(tensor=tensor, zero=0) for tensor in (2, 1))
    given = SPLIT.batch(8), jax.random.key(0)
    costs = [layer_costs(pipe, *given)[0] for pipe in (of_part, of_whole)]
    assert costs[0].w == pytest.approx(costs[1].w / 2, rel=0.1)
    part, whole = (buffers(pipe, *given) for pipe in (of_part, of_whole))
    assert 2 * tree_bytes(part["x"]) == tree_bytes(whole["x"])
    assert 2 * tree_bytes(part["gradients"]) < 1.1 * tree_bytes(whole["gradients"])


class Feed(nnx.Module):
    """Two matmuls, by columns and by rows over "tensor" if they are split."""

    def __init__(self, *, split: bool, rngs: nnx.Rngs):
        self.split = split
        names = ((None, "tensor"), ("tensor", None)) if split else ((), ())
        self.up, self.down = (
            nnx.Linear(*sizes, use_bias=False, kernel_metadata={"out_sharding": axes}, rngs=rngs)
            for sizes, axes in zip(((4, 8), (8, 4)), names, strict=True)
        )

    def __call__(self, x):
        y = self.down(jnp.tanh(self.up(x)))
        return x + (jax.lax.psum(y, "tensor") if self.split else y)


def converted(*, split: bool):
    with nnx.use_eager_sharding(False):
        layers = [Feed(split=split, rngs=nnx.Rngs(n)) for n in range(2)]
    return jaxpipe.nnx.model(
        {},
        layers=layers,
        embed=lambda module, batch: batch["x"],
        loss=lambda module, x, batch: jnp.mean((x - batch["y"]) ** 2),
        axes=("tensor",) if split else (),
    )


def test_modules_say_themselves_how_they_are_split():
    model, params, _ = converted(split=True)
    kernels = {name: model.axis_split["layers"][name]["kernel"] for name in ("up", "down")}
    assert kernels == {"up": P(None, "tensor"), "down": P("tensor", None)}
    pipe = jaxpipe.Pipeline(model, params, schedule="1f1b", mesh=jaxpipe.make_mesh(**SIZES))
    batch = {name: jnp.ones((4, 4)) for name in "xy"}
    _, grads = jax.eval_shape(pipe.value_and_grad, pipe.placed_params, batch)
    assert jax.tree.map(jnp.shape, grads["layers"]) == jax.tree.map(
        jnp.shape, pipe.placed_params["layers"]
    )
    assert converted(split=False).model.axis_split is None


BOTH = ("context", "tensor")


def over_both_axes(*, split: bool) -> jaxpipe.Model:
    """Two matmuls, the first of them two in one, shared by the devices of two axes."""

    def layer(w, x, batch, rng):
        h = x @ w["up"]
        cut = h.shape[-1] * 2 // 3
        y = jnp.tanh(h[..., :cut]) * jnp.repeat(h[..., cut:], 2, axis=-1) @ w["down"]
        return x + (jax.lax.psum(y, BOTH) if split else y)

    return jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=layer,
        head_loss=lambda outer, x, batch, rng: jnp.mean((x - batch["y"]) ** 2),
        axes=BOTH if split else (),
        axis_split={"layers": {"up": jaxpipe.Joined(P(None, BOTH), (8, 4)), "down": P(BOTH)}}
        if split
        else None,
    )


def test_two_axes_split_a_joined_dimension():
    draw = functools.partial(jax.random.normal, jax.random.key(0))
    layers = {"up": draw((2, 4, 12)), "down": draw((2, 8, 4))}
    params = {"embed": {}, "layers": jax.device_get(layers), "head": {}}
    (pipe,) = assert_matches_unpipelined(
        over_both_axes(split=True),
        params,
        {name: jax.random.normal(jax.random.key(n), (4, 4)) for n, name in enumerate("xy")},
        schedules=["zb-h1"],
        meshes=[jaxpipe.make_mesh(stage=2, context=2, tensor=2)],
        microbatches=2,
        reference=functools.partial(jaxpipe.unpipelined.loss, over_both_axes(split=False)),
    )

    chex.assert_trees_all_equal(jaxpipe.load_params(pipe, toys.reader(params)), pipe.place(params))


def weighted(*, split: bool) -> jaxpipe.Model:
    """A loss with weights of which devices along "context" have half of each row's tokens."""

    def own(x):
        n = x.shape[1] // 2
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("context") * n, n, 1)

    part = own if split else lambda x: x

    def head_loss(outer, x, batch, rng):
        mask, errors = part(batch["mask"]), (x - part(batch["y"])) ** 2
        loss = jaxpipe.Weighted((mask * errors).sum(), mask.sum())
        count = jax.lax.psum(mask.sum(), "context") if split else mask.sum()
        return loss, {
            "error": jaxpipe.Weighted(errors.sum(), errors.size),
            "seen": jaxpipe.Sum(count),
        }

    return jaxpipe.Model(
        embed=lambda outer, batch, rng: part(batch["x"]),
        layer=lambda w, x, batch, rng: x + jnp.tanh(w.sum() * x),
        head_loss=head_loss,
        axes=("context",) if split else (),
    )


def test_weights_and_sums_are_those_of_all_tokens():
    """Devices along an axis that splits no parameter divide all of them, as data shards do."""
    draw = functools.partial(jax.random.normal, shape=(8, 4))
    batch = {name: draw(jax.random.key(n)) for n, name in enumerate("xy")}
    batch["mask"] = (draw(jax.random.key(2)) > 0.5).astype(jnp.float32)
    layers = jnp.array([[0.5, -0.1, 0.2, 0.3], [-1.5, 0.4, 0.1, -0.2]])
    params = {"embed": {}, "layers": layers, "head": {}}
    (pipe,) = assert_matches_unpipelined(
        weighted(split=True),
        params,
        batch,
        schedules=["1f1b"],
        meshes=[jaxpipe.make_mesh(stage=2, data=2, context=2)],
        microbatches=2,
        reference=functools.partial(jaxpipe.unpipelined.loss, weighted(split=False)),
        zero=3,
    )

    placed = pipe.place(params)
    (kept,) = jax.tree.leaves(placed)
    assert kept.addressable_shards[0].data.size == 1
    chex.assert_trees_all_equal(pipe.unplace(placed), params)


def test_too_many_devices_and_asynchronous_pipelines_are_refused():
    found = refusal(jaxpipe.make_mesh, stage=2, data=2, tensor=4)
    assert "data=2 x stage=2 x tensor=4 needs 16 devices, but there" in found
    assert "simulate them: jaxpipe.testing.simulate_devices(16)" in found
    found = refusal(jaxpipe.AsyncPipeline, pipeline(), optax.sgd(0.1))
    assert "An asynchronous pipeline splits no layer over devices" in found


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_axes_do_not_fit_is_refused(misfit):
    sizes, changes, *texts = misfit
    model = dataclasses.replace(SPLIT.model, **changes)
    given = {"schedule": "1f1b", "mesh": jaxpipe.make_mesh(**sizes)}
    found = refusal(jaxpipe.Pipeline, model, SPLIT.params, **given)
    assert all(text in found for text in texts), found


def test_devices_that_share_a_sequence_share_no_layer_with_a_state():
    """One device along the axis is enough for any layer."""
    model = dataclasses.replace(
        weighted(split=True), layer=lambda w, x, batch, rng, state: (w * x, state), stateful=True
    )
    params = {"embed": {}, "layers": np.ones(2, np.float32), "head": {}}
    given = {"schedule": "1f1b", "states": ({}, {})}
    jaxpipe.Pipeline(model, params, mesh=jaxpipe.make_mesh(stage=2, context=1), **given)
    mesh = jaxpipe.make_mesh(stage=2, context=2)
    found = refusal(jaxpipe.Pipeline, model, params, mesh=mesh, **given)
    assert "'context', along which 2 devices have a part" in found
    assert "Nearest valid: a mesh with one device along 'context'" in found
