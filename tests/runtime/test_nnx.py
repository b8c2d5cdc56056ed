"""flax nnx modules as pure functions, and whole models of them, in a pipeline and back."""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import refusal
from flax import nnx

import jaxpipe
from jaxpipe import testing
from jaxpipe.nnx import functional, stack, stateful
from jaxpipe.runtime.layers.split import REMAT_POLICIES, split_layer

VOCAB, WIDTH, DEPTH = 7, 4, 4


class Block(nnx.Module):
    """A residual layer with dropout, and running statistics where wanted."""

    def __init__(self, *, rngs, activation=jnp.tanh, norm=False, hidden=WIDTH):
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.activation = activation

    def __call__(self, x):
        y = x if self.norm is None else self.norm(x)
        return x + self.dropout(self.down(self.activation(self.up(y))))


class Net(nnx.Module):
    """One large module: layers in a list, a bare parameter, a table that is read twice, streams."""

    def __init__(self, *, rngs, depth=DEPTH, make=Block):
        self.rngs = rngs
        self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.shift = nnx.Param(0.1 * jnp.ones(WIDTH))
        self.scales = jnp.linspace(0.5, 1.5, WIDTH)  # no parameter
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.blocks = nnx.List([make(rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = embed(self, {"tokens": tokens})
        for block in self.blocks:
            x = block(x)
        return self.table.attend(self.norm(x))


# A module as a function.


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(1), (3, WIDTH))


def test_without_a_key_it_is_the_deterministic_module_and_else_depends_on_the_key_alone(x):
    module = Block(rngs=nnx.Rngs(0))
    apply, params = functional(module)
    assert not module.dropout.deterministic
    assert set(params) == {"up", "down"}
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    run = jax.jit(apply)
    first = run(params, x, rng=jax.random.key(5))
    np.testing.assert_array_equal(first, run(params, x, rng=jax.random.key(5)))
    np.testing.assert_array_equal(first, run(params, x, rng=jax.random.PRNGKey(5)))
    assert not np.array_equal(first, run(params, x, rng=jax.random.key(6)))
    actual = apply(params, x)
    module.eval()
    np.testing.assert_array_equal(actual, module(x))


@pytest.mark.parametrize("remat", REMAT_POLICIES)
@pytest.mark.parametrize("training", [True, False])
def test_only_in_evaluation_does_a_batch_norm_read_its_statistics(x, training, remat):
    apply, params, state = stateful(Block(rngs=nnx.Rngs(0), norm=True))

    def layer(params, x, state):
        return apply(params, state, x, train=training)

    split = split_layer(layer, params, x, state=state, remat=remat)
    assert split.reads_state is not training


def test_running_statistics_are_those_of_the_module(x):
    apply, params, state = stateful(Block(rngs=nnx.Rngs(0), norm=True))
    assert jax.tree.map(jnp.shape, state) == {"norm": {"mean": (WIDTH,), "var": (WIDTH,)}}
    assert set(params) == {"up", "down", "norm"}
    assert stateful(Block(rngs=nnx.Rngs(0)))[2] == {}
    module = nnx.view(Block(rngs=nnx.Rngs(0), norm=True), deterministic=True)
    for scale in (1.0, 3.0):
        y, state = apply(params, state, scale * x)
        np.testing.assert_allclose(y, module(scale * x), rtol=1e-6)
    np.testing.assert_allclose(state["norm"]["mean"], module.norm.mean[...], rtol=1e-6)
    np.testing.assert_allclose(state["norm"]["var"], module.norm.var[...], rtol=1e-6)

    y, unchanged = apply(params, state, x, train=False)
    module.eval()
    np.testing.assert_allclose(y, module(x), rtol=1e-6)
    chex.assert_trees_all_equal(unchanged, state)
    dropped, _ = apply(params, state, x, train=False, rng=jax.random.key(5))
    assert not np.array_equal(dropped, y)


def test_stacked_layers_run_as_a_scan(x):
    apply, layers = stack(lambda rngs: Block(rngs=rngs), num_layers=3, rngs=nnx.Rngs(0))
    kernels = layers["up"]["kernel"]
    assert kernels.shape == (3, WIDTH, WIDTH)
    assert not np.array_equal(kernels[0], kernels[1])
    y, _ = jax.lax.scan(lambda x, layer: (apply(layer, x), None), x, layers)
    expected = x
    for i in range(3):
        expected = apply(jax.tree.map(lambda leaf, i=i: leaf[i], layers), expected)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"num_layers=0 must be at least 1\.\nNearest valid: 1"):
        stack(lambda rngs: Block(rngs=rngs), num_layers=0, rngs=nnx.Rngs(0))


# Whole models.


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("window", [(1, 2), (2, 2)]),
        ("activation", [nnx.relu, nnx.gelu]),
        ("dtype", [jnp.float32, jnp.bfloat16]),
        ("parts", [nnx.List([nnx.Dict(rate=rate)]) for rate in (0.0, 0.1)]),
    ],
)
def test_layers_that_differ_in_an_attribute_alone_say_so(name, values, caplog):
    layers = [Block(rngs=nnx.Rngs(n)) for n in range(2)]
    for layer, value in zip(layers, values, strict=True):
        setattr(layer.up, name, value)
    functions = {"embed": lambda net, batch: batch["x"], "loss": lambda net, x, batch: x.mean()}
    converted = jaxpipe.nnx.model({}, layers=layers, **functions)
    assert isinstance(converted.params["layers"], tuple)
    path = f"up.{name}" + "[0].rate" * (name == "parts")
    assert f"differ in {path}, so that" in caplog.text
    assert f"`layer.{path} = None`" in caplog.text
    caplog.clear()
    for layer in layers:
        setattr(layer.up, name, None)
    converted = jaxpipe.nnx.model({}, layers=layers, **functions)
    assert isinstance(converted.params["layers"], dict)
    assert not caplog.text


def embed(net, batch):
    return net.dropout(net.scales * net.table(batch["tokens"])) + net.shift


def loss(net, x, batch):
    return cross_entropy(net.table.attend(net.norm(x)), batch)


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def batch(rows: int = 16) -> dict:
    tokens = np.random.default_rng(0).integers(VOCAB, size=(rows, 4), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def convert(net, **options):
    return jaxpipe.nnx.model(net, layers=net.blocks, embed=embed, loss=loss, **options)


@nnx.jit
def logits_of(net):
    return net(batch()["tokens"])


def whole(net):
    """Loss and gradients of the module itself, in its own names; without dropout."""
    net = nnx.view(net, deterministic=True, use_running_average=False, raise_if_not_found=False)
    graph, params, rest = nnx.split(net, nnx.Param, ...)

    @jax.jit
    def run(params):
        net = nnx.merge(graph, params, rest, copy=True)
        return cross_entropy(net(batch()["tokens"]), batch())

    value, gradients = jax.value_and_grad(run)(params)
    return value, nnx.to_pure_dict(gradients)


HIDDEN = itertools.cycle((WIDTH + 1, WIDTH))


def different(*, rngs):
    return Block(rngs=rngs, hidden=next(HIDDEN))


@pytest.mark.parametrize("make", [Block, different])
def test_loss_and_gradients_are_those_of_the_module(make):
    net = Net(rngs=nnx.Rngs(0), make=make)
    model, params, states = convert(net)
    assert states is None
    assert model.layers_are_alike == (make is Block)
    of_model = functools.partial(jaxpipe.unpipelined.value_and_grad, model)
    value, gradients = jax.jit(of_model)(params, batch())
    expected, expected_gradients = whole(net)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    # What the module calls its parameters is what `update` writes.
    of_net = nnx.clone(net)
    jaxpipe.nnx.update(of_net, gradients, layers=of_net.blocks)
    got = nnx.to_pure_dict(nnx.state(of_net, nnx.Param))
    chex.assert_trees_all_close(got, expected_gradients, rtol=1e-5, atol=1e-6)
    dropping = jax.jit(functools.partial(jaxpipe.unpipelined.loss, model))
    dropped = [dropping(params, batch(), jax.random.key(seed)) for seed in (1, 1, 2)]
    assert dropped[0] == dropped[1]
    assert len({float(kept) for kept in (value, *dropped)}) == 3


def forgetful(net, x, batch):
    """A loss without the last norm of `Net.__call__`."""
    return cross_entropy(net.table.attend(x), batch)


def test_a_part_of_the_module_that_is_forgotten_is_named_and_found_by_its_own_loss():
    net = Net(rngs=nnx.Rngs(0))
    net.norm.bias[...] = jnp.linspace(-1, 1, WIDTH)
    own = jaxpipe.nnx.reference(
        net, lambda net, rows: cross_entropy(net(rows["tokens"]), rows), layers=net.blocks
    )
    model, params, _ = convert(net)
    changed = jax.tree.map(lambda w: 1.1 * w, params)
    expected, gradients = jax.jit(jax.value_and_grad(own))(changed, batch())
    of_model = functools.partial(jaxpipe.unpipelined.value_and_grad, model)
    value, found = jax.jit(of_model)(changed, batch())
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    chex.assert_trees_all_close(found, gradients, rtol=1e-5, atol=1e-6)
    model, params, _ = jaxpipe.nnx.model(net, layers=net.blocks, embed=embed, loss=forgetful)
    forgets = jax.jit(functools.partial(jaxpipe.unpipelined.loss, model))
    assert abs(forgets(changed, batch()) - expected) > 0.01
    pipe = jaxpipe.Pipeline(model, params, schedule="1f1b", mesh=jaxpipe.make_mesh(stage=2))
    with pytest.warns(UserWarning, match=r"not depend on embed/norm/bias, embed/norm/scale: the"):
        jax.eval_shape(pipe.value_and_grad, pipe.placed_params, batch())
    assert "without rng" in refusal(own, params, batch(), jax.random.key(0))


@pytest.mark.pipeline
def test_running_statistics_come_back_into_the_modules():
    net = Net(rngs=nnx.Rngs(0), make=lambda rngs: Block(rngs=rngs, norm=True))
    model, params, states = convert(net)
    assert model.stateful
    assert jax.tree.map(jnp.shape, states) == ({"norm": {"mean": (4,), "var": (4,)}},) * DEPTH
    given = {"schedules": ["1f1b-fused"], "meshes": [jaxpipe.make_mesh(stage=2, data=2)]}
    given |= {"states": states, "rng": jax.random.key(3)}  # with dropout
    testing.assert_matches_unpipelined(model, params, batch(), **given)
    # One microbatch renews the statistics as the module in training does.
    _, new = jax.jit(functools.partial(jaxpipe.unpipelined.loss, model))(
        params, batch(), states=states
    )
    trained = nnx.clone(net)
    jaxpipe.nnx.update(trained, params, layers=trained.blocks, states=new)
    logits_of(nnx.view(net, deterministic=True, use_running_average=False))
    got, expected = (nnx.to_pure_dict(nnx.state(m, nnx.BatchStat)) for m in (trained, net))
    chex.assert_trees_all_close(got, expected, rtol=1e-5)
    # A model that evaluates reads them.
    evaluating = convert(trained, train=False)
    value, unchanged = jax.jit(functools.partial(jaxpipe.unpipelined.loss, evaluating.model))(
        evaluating.params, batch(), states=evaluating.states
    )
    chex.assert_trees_all_equal(unchanged, evaluating.states)
    logits = logits_of(nnx.view(trained, deterministic=True, use_running_average=True))
    np.testing.assert_allclose(value, cross_entropy(logits, batch()), rtol=1e-6)


@pytest.mark.pipeline
def test_trained_parameters_come_back_into_the_modules():
    net = Net(rngs=nnx.Rngs(0))
    model, params, _ = convert(net, output=lambda net, x, batch: net.table.attend(net.norm(x)))
    mesh, optimizer = jaxpipe.make_mesh(stage=2), optax.adam(1e-2)
    pipe = jaxpipe.Pipeline(model, params, schedule="1f1b", mesh=mesh)
    placed = pipe.place(params)
    state, step = pipe.init(optimizer, placed), pipe.train_step(optimizer)
    losses = []
    for number in range(20):
        value, placed, state = step(placed, state, batch(), jax.random.key(number))
        losses.append(float(value))
    assert losses[-1] < 0.8 * losses[0]
    jaxpipe.nnx.update(net, pipe.unplace(placed), layers=net.blocks)
    net.eval()
    logits = logits_of(net)
    got = jax.jit(pipe.outputs)(placed, batch())
    np.testing.assert_allclose(got, logits, rtol=1e-4, atol=1e-5)


def test_modules_that_are_only_shapes():
    net = nnx.eval_shape(lambda: Net(rngs=nnx.Rngs(0)))
    net.scales = nnx.data(jnp.linspace(0.5, 1.5, WIDTH))
    model, shapes, _ = convert(net)
    made = jax.jit(lambda key: convert(Net(rngs=nnx.Rngs(key))).params)(jax.random.key(0))
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, made)
    jaxpipe.Pipeline(model, shapes, schedule="1f1b", mesh=jaxpipe.make_mesh(stage=2))
    concrete = Net(rngs=nnx.Rngs(1))
    jaxpipe.nnx.update(concrete, made, layers=concrete.blocks)
    expected = jax.jit(functools.partial(jaxpipe.unpipelined.loss, model))(made, batch())
    np.testing.assert_allclose(whole(concrete)[0], expected, rtol=1e-6)


def test_separate_modules_in_a_dictionary():
    """What a layer sows is for its function to return."""

    class Sowing(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            y = self.linear(x)
            self.sow(nnx.Intermediate, "size", jnp.mean(y**2))
            return y

    def with_size(layer, x, batch):
        y, sown = nnx.capture(layer, nnx.Intermediate)(x)
        return jaxpipe.WithLoss(y, sown["size"][0])

    rngs = nnx.Rngs(0)
    layers = [Sowing(rngs=rngs) for _ in range(12)]
    modules = {"table": nnx.Embed(VOCAB, WIDTH, rngs=rngs), "heads": [nnx.LayerNorm(4, rngs=rngs)]}
    model, params, states = jaxpipe.nnx.model(
        modules,
        layers=layers,
        embed=lambda modules, batch: modules["table"](batch["tokens"]),
        loss=lambda modules, x, batch: jnp.mean(modules["heads"][0](x) ** 3 + x),
        layer=with_size,
    )
    assert states is None
    x, sizes = modules["table"](batch()["tokens"]), []
    for layer in layers:
        x = layer.linear(x)
        sizes.append(jnp.mean(x**2))
    expected = jnp.mean(modules["heads"][0](x) ** 3 + x) + sum(sizes)
    found = jax.jit(functools.partial(jaxpipe.unpipelined.loss, model))(params, batch())
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# What is refused.


def refused(net, **options) -> list[str]:
    given = {"layers": net.blocks, "embed": embed, "loss": loss} | options
    return refusal(jaxpipe.nnx.model, net, **given).split("\n")


def test_what_makes_no_model_is_refused():
    net = Net(rngs=nnx.Rngs(0))
    assert refused(net, layers=[net.blocks[0], jnp.tanh])[0].startswith("module is <PjitFunction")
    assert refused(net, layers=net.blocks[0])[0].startswith("layers is a ")
    assert refused(net, layers=[]) == ["layers is empty; a pipeline needs at least one."]
    shared = "layers[1].up.kernel is a parameter of another layer, too."
    assert shared in refused(net, layers=[net.blocks[1]] * 2)
    net.blocks[2].up = net.blocks[1].up
    net.blocks[0].table = net.table
    net.statistics = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))
    found = refused(net)
    assert "layers[2].up.kernel is a parameter of another layer, too." in found
    assert "module.table.embedding is a parameter of a layer, too." in found
    assert any(
        line.startswith("module.statistics.mean is state (BatchStat) outside the layers; only lay")
        for line in found
    )
    assert "What layers share goes into params['shared'] of a jaxpipe.Model, by hand." in found
    assert len(found) == 6
    found = refusal(functional, net.statistics)
    assert re.search(r"BatchNorm keeps state.*mean \(BatchStat\).*GroupNorm", found)


def test_trees_that_do_not_fit_the_modules_are_refused():
    net = Net(rngs=nnx.Rngs(0))
    params = convert(net).params
    embed, layers = params["embed"], params["layers"]
    for wrong, texts in (
        (
            params | {"embed": embed | {"shift": np.ones(3)}},
            ["params['embed']['shift'] is float32[3]; "],
        ),
        (
            params | {"layers": jax.tree.map(lambda w: np.asarray(w)[:-1], layers)},
            ["params['layers']['", "]; expected float32"],
        ),
        ({"embed": embed}, ["params['layers']", " is missing"]),
        (None, ["params['embed']", " is missing"]),
    ):
        found = refusal(jaxpipe.nnx.update, net, wrong, layers=net.blocks)
        assert all(text in found for text in texts)
