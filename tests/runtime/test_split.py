"""F, B and W together are `jax.vjp`, and keep no weights."""

import functools
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import pytest

from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.split import REMAT_POLICIES, rematerialized, split_layer


def layer(w, x, rng):
    scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    hidden = jax.nn.gelu((x * scale * w["scale"]) @ w["up"].astype(x.dtype))
    if rng is not None:
        hidden = jnp.where(jax.random.bernoulli(rng, 0.9, hidden.shape), hidden, 0)
    return x + hidden @ w["down"]


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": jax.random.normal(keys[0], (6, 10)),
        "down": jax.random.normal(keys[1], (10, 6)),
        "scale": jnp.linspace(0.5, 1.5, 6),
    }
    return params, jax.random.normal(keys[2], (3, 6)), jax.random.normal(keys[3], (3, 6))


def tree_layer(w, x, batch, rng, state):
    """A layer of trees with a side input, dropout and a state."""
    mean = jnp.mean(x["moving"], 0)
    moved = layer(w, x["moving"] - mean + batch["shift"], rng) + x["standing"] @ w["side"]
    return {"moving": moved[:, :4], "standing": x["standing"]}, 0.9 * state + 0.1 * mean


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_parts_equal_the_vjp(remat, seed):
    rng = None if seed is None else jax.random.key(seed)
    params, moving, _ = arguments()
    params |= {"side": jnp.linspace(-1, 1, 30).reshape(5, 6)}
    x = {"moving": moving, "standing": jnp.linspace(0, 1, 15).reshape(3, 5)}
    batch, state = {"shift": jnp.arange(6.0)}, jnp.ones(6)
    dy = {"moving": jnp.ones((3, 4)), "standing": jnp.full((3, 5), 2.0)}
    run = functools.partial(tree_layer, batch=batch, rng=rng, state=state)
    (y, new_state), vjp = jax.vjp(run, params, x)
    dparams, dx = vjp((dy, jnp.zeros(6)))

    split = split_layer(tree_layer, params, x, batch, rng, state=state, remat=remat)
    out, until_b, until_w = split.forward(params, x, batch, rng, state=state)
    got_dx, crossing = split.backward_input(params, until_b, until_w, dy, batch, rng)
    got_dparams = split.backward_weights(params, until_w, crossing, batch, rng)
    fused = split.backward_fused(params, until_b, until_w, dy, batch, rng)

    got, want = (out, got_dx, got_dparams, fused), ((y, new_state), dx, dparams, (dx, dparams))
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_residuals_hold_no_weights_and_no_dropout_masks(remat):
    params, x, _ = arguments()
    split = split_layer(layer, params, x, jax.random.key(0), remat=remat)
    finished = [leaf for leaf in split.crossing if leaf.shape == params["scale"].shape]
    assert len(finished) == 1
    for leaf in (*split.until_b, *split.until_w, *split.crossing):
        assert leaf in finished or leaf.shape[0] == x.shape[0]
        assert leaf.dtype == x.dtype


def test_stricter_policies_save_less():
    params, x, _ = arguments()

    def saved(remat):
        split = split_layer(layer, params, x, None, remat=remat)
        return sum(leaf.size for leaf in (*split.until_b, *split.until_w))

    assert saved("none") > saved("dots") > saved("full") == x.size


def test_what_arithmetic_makes_of_kept_values_is_not_kept():
    """Keeps a gate's matmul and its logistic, but not their products."""
    split = split_layer(lambda w, x: jax.nn.silu(x @ w), jnp.ones((6, 10)), jnp.ones((3, 6)))
    assert [leaf.shape for leaf in split.until_b] == [(3, 10), (3, 10)]


def by_hand(w, x, rng):
    """A layer with a derivative by hand of an operation that states its FLOPs."""
    squares = jax.lax.composite(lambda x, *, flops: x * x, "squares")
    stated = functools.partial(squares, flops=(7.0,))
    squared = jax.custom_vjp(stated)
    squared.defvjp(lambda x: (stated(x), x), lambda x, dy: (2 * x * dy,))
    return layer(w, squared(jnp.sin(x)), rng)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("of", [layer, by_hand])
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_a_policy_cuts_a_traced_layer_as_one_that_is_traced_with_it(remat, of, early):
    params, x, _ = arguments()
    given = of, params, x.astype(jnp.bfloat16), jax.random.key(0)
    want = split_layer(*given, remat=remat, early=early)
    got = rematerialized(split_layer(*given, early=early), remat, early=early)

    def operations(split):
        """Names and results, for a policy does not change the order in which devices run them."""
        run = [*split.kept_until_b, *split.kept_until_w, *split.traced.outputs]
        parts = jaxprs.needed(split.traced.forward, run), split.b, split.w
        return [
            Counter((eqn.primitive.name, *jaxprs.shapes_of_variables(eqn.outvars)) for eqn in part)
            for part in parts
        ]

    assert operations(got) == operations(want)
    for name in ("until_b", "until_w", "crossing"):
        assert Counter(getattr(got, name)) == Counter(getattr(want, name))


def test_loops_return_other_values_under_another_policy():
    def repeated(w, x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x * w), None), x, None, length=2)[0]

    split = split_layer(repeated, jnp.ones(4), jnp.ones((2, 4)))
    assert rematerialized(split, "full", early=True) is None


def test_backward_for_the_input_computes_no_weight_gradient():
    params, x, dy = arguments()
    split = split_layer(layer, params, x, None)
    _, until_b, until_w = split.forward(params, x, None)
    _, crossing = split.backward_input(params, until_b, until_w, dy, None)

    def matmuls(fn, *args):
        return str(jax.make_jaxpr(fn)(*args)).count("dot_general")

    assert matmuls(split.backward_input, params, until_b, until_w, dy, None) == 2
    assert matmuls(split.backward_weights, params, until_w, crossing, None) == 2


@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_w_reads_the_operands_of_its_matmuls_and_finished_sums_alone(remat):
    """B multiplies x by its scales and sums up their gradient, so that no float32 x is left."""

    def layer(w, x):
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True)) * w["scale"]
        hidden = normed.astype(x.dtype) @ w["up"].astype(x.dtype)
        gated = jax.nn.silu(hidden) * hidden
        return x + gated @ w["down"].astype(x.dtype) + w["bias"].astype(x.dtype)

    params, x, _ = arguments()
    split = split_layer(layer, params | {"bias": jnp.ones(6)}, x.astype(jnp.bfloat16), remat=remat)
    operands = {(3, 6): 2, (3, 10): 2}  # normed and dy; gated and the cotangent of hidden
    for shape, count in operands.items():
        kept = [leaf for leaf in (*split.until_w, *split.crossing) if leaf.shape == shape]
        assert [leaf.dtype for leaf in kept] == [jnp.bfloat16] * count
    others = [leaf.shape for leaf in split.crossing if leaf.shape not in operands]
    assert [shape[-1:] for shape in others] == [(6,)]  # of scale; that of bias needs dy alone
    assert all(leaf.shape in operands for leaf in split.until_w)


def test_what_a_layer_only_passes_on_is_not_saved():
    params, moving, _ = arguments()
    x = {"moving": moving, "standing": jnp.ones((3, 5))}

    def layer(w, x):
        return x | {"moving": jnp.tanh(x["moving"] @ w["up"] @ w["down"])}

    split = split_layer(layer, params, x)
    sizes = [leaf.shape for leaf in (*split.until_b, *split.until_w, *split.crossing)]
    assert (3, 6) in sizes
    assert (3, 5) not in sizes
