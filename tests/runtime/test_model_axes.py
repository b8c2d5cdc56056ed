"""Model axes: layers that several devices share."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
import split_toy
import toys
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.measure import layer_costs, predicted_bytes
from jaxpipe.testing import assert_matches_unpipelined

LAYOUTS = ("stacked", "tuple", "unrolled")


def options(layout, *, num_layers=4):
    """Model, parameters and the form of weights, of layers that lie so."""
    differ = num_layers if layout == "tuple" else 0
    params = split_toy.params(num_layers, differ=bool(differ))
    weights = "unrolled" if layout == "unrolled" else "stacked"
    return split_toy.model(split=True, differ=differ), params, weights


def pipeline(layout, *, tensor=2, zero=3) -> jaxpipe.Pipeline:
    model, params, weights = options(layout)
    mesh = jaxpipe.make_mesh(stage=2, data=2, tensor=tensor)
    given = {"schedule": "1f1b", "mesh": mesh, "zero": zero, "weights": weights}
    return jaxpipe.Pipeline(model, params, microbatches=2, **given)


def test_optimizers_see_whole_parameters():
    """A factored state has the means of rows and columns, which tensor devices split."""
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    clip = optax.clip_by_global_norm(0.1)
    optimizer = optax.chain(clip, factored, optax.scale_by_param_block_rms(), optax.scale(-1e-2))
    params = options("stacked")[1]
    gradients = jax.tree.map(lambda w: w**2 - 0.1, params)
    found = toys.updated(pipeline("stacked"), optimizer, params, gradients)
    expected = toys.expected_update(optimizer, params, gradients)
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
    model, params, _ = options("stacked")
    pipe = jaxpipe.Pipeline(
        dataclasses.replace(model, **changes),
        params,
        schedule="1f1b",
        mesh=jaxpipe.make_mesh(stage=2, tensor=2),
    )
    return jax.eval_shape(pipe.value_and_grad, pipe.placed_params, split_toy.batch(8))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: jax.lax.psum(x, "stage"), r"Layer 0 calls psum along 'stage' \(.*\)\."),
        (ring, r"ppermute along 'tensor' \(.*test_model_axes\.py:\d+.*\(ring\)\)"),
        (ring_backwards, "ppermute along 'tensor'"),
        (nested, r"ppermute along 'tensor' \(.*, within <lambda> / scan / cond\)"),
        (only_evaluated, r"psum along 'stage' \(.*only_evaluated"),
    ],
)
def test_layers_may_not_wait_for_other_stages(function, message):
    with pytest.raises(ValueError, match=message):
        traced(layer=lambda w, x, batch, rng: x + function(x))


def test_embedding_and_head_may_where_all_stages_compute_them():
    model, *_ = options("stacked")
    traced(
        embed=lambda *args: ring(ring(model.embed(*args)), "stage"),
        head_loss=lambda outer, x, *args: model.head_loss(outer, ring(ring(x), "stage"), *args),
    )


def test_embedding_and_head_may_not_at_the_ends():
    whole, at_ends = split_toy.model(split=False), {"embed": None, "layers": split_toy.LAYERS}
    alone = {"stage_split": None, "axis_split": at_ends | {"head": None}, "embed": whole.embed}
    along = "ppermute along 'tensor'"
    for changes, message in (
        ({"embed": options("stacked")[0].embed}, r"Model\.embed calls psum along 'stage' \("),
        (
            {"head_loss": lambda outer, x, *_: ring(x).mean()},
            rf"Model\.head_loss calls {along} .* if `Model.stage_split` is given",
        ),
        (
            {"embed": lambda *args: ring_backwards(whole.embed(*args))},
            rf"Model\.embed calls {along}",
        ),
        (
            {"embed": lambda *args: only_evaluated(whole.embed(*args))},
            r"Model\.embed calls psum along 'stage' \(.*only_evaluated",
        ),
        (
            {"head_loss": lambda outer, x, *_: ring_backwards(x).mean()},
            rf"Model\.head_loss calls {along}",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            traced(**({"head_loss": lambda outer, x, *_: x.mean()} | alone | changes))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_go_to_their_devices_and_back(layout):
    pipe, params = pipeline(layout), options(layout)[1]
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
    of_part, of_whole = (pipeline("stacked", tensor=tensor, zero=0) for tensor in (2, 1))
    rng = jax.random.key(0)
    costs = [layer_costs(pipe, split_toy.batch(8), rng)[0] for pipe in (of_part, of_whole)]
    assert costs[0].w == pytest.approx(costs[1].w / 2, rel=0.1)
    part, whole = (predicted_bytes(pipe, split_toy.batch(8), rng) for pipe in (of_part, of_whole))
    assert 2 * part["x"] == whole["x"]
    assert 2 * part["gradients"] < 1.1 * whole["gradients"]


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
    mesh = jaxpipe.make_mesh(stage=2, tensor=2)
    pipe = jaxpipe.Pipeline(model, params, schedule="1f1b", mesh=mesh)
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
        layer=lambda w, x, batch, rng: x + jnp.tanh(w * x),
        head_loss=head_loss,
        axes=("context",) if split else (),
    )


def test_weights_and_sums_are_those_of_all_tokens():
    draw = functools.partial(jax.random.normal, shape=(8, 4))
    batch = {name: draw(jax.random.key(n)) for n, name in enumerate("xy")}
    batch["mask"] = (draw(jax.random.key(2)) > 0.5).astype(jnp.float32)
    assert_matches_unpipelined(
        weighted(split=True),
        {"embed": {}, "layers": jnp.array([0.5, -1.5]), "head": {}},
        batch,
        schedules=["1f1b"],
        meshes=[jaxpipe.make_mesh(stage=2, data=2, context=2)],
        microbatches=2,
        reference=functools.partial(jaxpipe.unpipelined.loss, weighted(split=False)),
    )


def refused(mesh=None, **changes):
    model, params, _ = options("stacked")
    model = dataclasses.replace(model, **changes)
    mesh = mesh or jaxpipe.make_mesh(stage=2, tensor=2)
    with pytest.raises(ValueError, match=r"ax[ei]s") as error:
        jaxpipe.Pipeline(model, params, schedule="1f1b", mesh=mesh)
    return str(error.value)


def test_what_does_not_fit_is_refused():
    needs = r"data=2 x stage=2 x tensor=4 needs 16 devices, but there"
    remedy = r"simulate them: jaxpipe.testing.simulate_devices\(16\)"
    with pytest.raises(ValueError, match=f"{needs}.*{remedy}"):
        jaxpipe.make_mesh(stage=2, data=2, tensor=4)
    mesh = jaxpipe.make_mesh(stage=2, tensor=3)
    text = refused(mesh)
    assert (
        "params['layers']['bias'] has 12 elements in dimension 0 (joined of (8, 4)), which the 3 "
        "devices along 'tensor' do not divide" in text
    )
    assert "Nearest valid: 2, 4 devices." in text
    assert "mesh has the axes {'data': 1, 'stage': 2}, and none is 'tensor'" in refused(
        jaxpipe.make_mesh(stage=2)
    )
    unused = "would compute the same on all 2 devices along 'tensor'"
    assert unused in refused(axes=(), axis_split=None)
    split = {"layers": {"up": P(None, "rows"), "bias": None, "down": None, "scale": None}}
    assert "split over 'rows', which is none of Model.axes=('tensor',)" in refused(axis_split=split)
    assert "Model.axis_split must be a tree like params" in refused(axis_split={"layers": {}})
    with pytest.raises(ValueError, match="An asynchronous pipeline splits no layer over devices"):
        jaxpipe.AsyncPipeline(pipeline("stacked"), optax.sgd(0.1))


def test_devices_that_share_a_sequence_share_no_layer_with_a_state():
    """One device along the axis is enough for any layer."""

    def layer(w, x, batch, rng, state):
        return w * x, state

    model = dataclasses.replace(weighted(split=True), layer=layer, stateful=True)
    params = {"embed": {}, "layers": jnp.ones(2), "head": {}}

    def build(context):
        mesh = jaxpipe.make_mesh(stage=2, context=context)
        return jaxpipe.Pipeline(model, params, schedule="1f1b", mesh=mesh, states=({}, {}))

    assert build(1)
    with pytest.raises(ValueError, match=r"'context', along which 2 devices have a part") as error:
        build(2)
    assert "Nearest valid: a mesh with one device along 'context'" in str(error.value)
