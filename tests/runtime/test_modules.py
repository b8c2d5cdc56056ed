"""flax nnx modules as pure functions over plain trees."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpipe.nnx import functional, stack, stateful
from jaxpipe.runtime.layers.remat import REMAT_POLICIES
from jaxpipe.runtime.layers.split import split_layer

WIDTH = 4


class Layer(nnx.Module):
    """A residual layer with two dropouts and a list of submodules."""

    def __init__(self, *, rngs):
        self.linears = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.dropouts = nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for linear, dropout in zip(self.linears, self.dropouts, strict=True):
            x = x + dropout(linear(x))
        return x


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(1), (3, WIDTH))


def test_without_key_it_is_the_deterministic_module(x):
    module = Layer(rngs=nnx.Rngs(0))
    apply, params = functional(module)
    actual = apply(params, x)
    module.eval()
    np.testing.assert_array_equal(actual, module(x))


def test_parameters_are_plain_arrays_and_nothing_else():
    _, params = functional(Layer(rngs=nnx.Rngs(0)))
    assert set(params) == {"linears"}
    assert [leaf.shape for leaf in jax.tree.leaves(params)] == [(4,), (4, 4)] * 2
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))


def test_the_module_itself_is_left_as_it_was(x):
    module = Layer(rngs=nnx.Rngs(0))
    functional(module)
    assert not module.dropouts[0].deterministic


def test_randomness_depends_on_the_key_alone(x):
    apply, params = functional(Layer(rngs=nnx.Rngs(0)))
    first = apply(params, x, rng=jax.random.key(5))
    np.testing.assert_array_equal(first, apply(params, x, rng=jax.random.key(5)))
    np.testing.assert_array_equal(first, jax.jit(apply)(params, x, rng=jax.random.key(5)))
    assert not np.array_equal(first, apply(params, x, rng=jax.random.key(6)))


def test_raw_keys_give_the_same_as_typed_keys(x):
    apply, params = functional(Layer(rngs=nnx.Rngs(0)))
    raw = apply(params, x, rng=jax.random.PRNGKey(5))
    np.testing.assert_array_equal(raw, apply(params, x, rng=jax.random.key(5)))


def test_each_stream_has_its_own_key():
    class TwoMasks(nnx.Module):
        def __init__(self, *, rngs):
            self.first = nnx.Dropout(0.5, rngs=rngs)
            self.second = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.first(x), self.second(x)

    apply, params = functional(TwoMasks(rngs=nnx.Rngs(0)))
    first, second = apply(params, jnp.ones(64), rng=jax.random.key(5))
    assert not np.array_equal(first, second)


def test_gradients_have_the_shape_of_the_parameters(x):
    apply, params = functional(Layer(rngs=nnx.Rngs(0)))
    grads = jax.grad(lambda params: apply(params, x).sum())(params)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)


def test_running_statistics_are_refused_by_name():
    module = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"BatchNorm keeps state.*mean \(BatchStat\).*GroupNorm"):
        functional(module)


class Normed(nnx.Module):
    """A linear layer, a BatchNorm and a dropout."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


@pytest.mark.parametrize("remat", REMAT_POLICIES)
@pytest.mark.parametrize("training", [True, False])
def test_only_in_evaluation_does_a_batch_norm_read_its_statistics(x, training, remat):
    apply, params, state = stateful(Normed(rngs=nnx.Rngs(0)))

    def layer(params, x, state):
        return apply(params, state, x, train=training)

    split = split_layer(layer, params, x, state=state, remat=remat)
    assert split.reads_state is not training


def test_running_statistics_are_those_of_the_module(x):
    apply, params, state = stateful(Normed(rngs=nnx.Rngs(0)))
    module = nnx.view(Normed(rngs=nnx.Rngs(0)), deterministic=True)
    for scale in (1.0, 3.0):
        y, state = apply(params, state, scale * x)
        np.testing.assert_allclose(y, module(scale * x), rtol=1e-6)
    np.testing.assert_allclose(state["norm"]["mean"], module.norm.mean[...], rtol=1e-6)
    np.testing.assert_allclose(state["norm"]["var"], module.norm.var[...], rtol=1e-6)

    y, unchanged = apply(params, state, x, train=False)
    module.eval()
    np.testing.assert_allclose(y, module(x), rtol=1e-6)
    chex.assert_trees_all_equal(unchanged, state)


def test_a_stateful_module_keeps_parameters_and_state_apart(x):
    apply, params, state = stateful(Normed(rngs=nnx.Rngs(0)))
    assert jax.tree.map(jnp.shape, state) == {"norm": {"mean": (WIDTH,), "var": (WIDTH,)}}
    assert set(params) == {"linear", "norm"}
    dropped, _ = jax.jit(apply)(params, state, x, rng=jax.random.key(5))
    assert (np.asarray(dropped) == 0).any()
    assert stateful(Layer(rngs=nnx.Rngs(0)))[2] == {}


def test_stacked_layers_run_as_a_scan(x):
    apply, layers = stack(lambda rngs: Layer(rngs=rngs), num_layers=3, rngs=nnx.Rngs(0))
    kernels = layers["linears"][0]["kernel"]
    assert kernels.shape == (3, WIDTH, WIDTH)
    assert not np.array_equal(kernels[0], kernels[1])

    y, _ = jax.lax.scan(lambda x, layer: (apply(layer, x), None), x, layers)
    expected = x
    for i in range(3):
        expected = apply(jax.tree.map(lambda leaf, i=i: leaf[i], layers), expected)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_stack_works_in_eval_shape():
    shapes = jax.eval_shape(
        lambda key: stack(lambda rngs: Layer(rngs=rngs), num_layers=3, rngs=nnx.Rngs(key))[1],
        jax.random.key(0),
    )
    assert shapes["linears"][1]["bias"].shape == (3, WIDTH)


def test_stack_of_no_layers_is_refused():
    with pytest.raises(ValueError, match=r"num_layers=0 must be at least 1\.\nNearest valid: 1"):
        stack(lambda rngs: Layer(rngs=rngs), num_layers=0, rngs=nnx.Rngs(0))
