"""F, B and W together are `jax.vjp`, and keep no weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.runtime.split import REMAT_POLICIES, split_layer


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


@pytest.mark.parametrize("remat", REMAT_POLICIES)
@pytest.mark.parametrize("seed", [None, 3])
def test_parts_equal_the_vjp(remat, seed):
    rng = None if seed is None else jax.random.key(seed)
    params, x, dy = arguments()
    expected_y, vjp = jax.vjp(lambda w, x: layer(w, x, rng), params, x)
    expected_dparams, expected_dx = vjp(dy)

    split = split_layer(layer, params, x, rng, remat=remat)
    y, until_b, until_w = split.forward(params, x, rng)
    dx, crossing = split.backward_input(params, until_b, until_w, dy, rng)
    dparams = split.backward_weights(params, until_w, crossing, rng)
    fused_dx, fused_dparams = split.backward_fused(params, until_b, until_w, dy, rng)

    got = (y, dx, dparams, fused_dx, fused_dparams)
    want = (expected_y, expected_dx, expected_dparams, expected_dx, expected_dparams)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_residuals_hold_no_weights_and_no_dropout_masks(remat):
    params, x, _ = arguments()
    split = split_layer(layer, params, x, jax.random.key(0), remat=remat)
    rows = x.shape[0]
    for leaf in (*split.until_b, *split.until_w, *split.crossing):
        assert leaf.shape[0] == rows
        assert leaf.dtype == x.dtype


def test_stricter_policies_save_less():
    params, x, _ = arguments()

    def saved(remat):
        split = split_layer(layer, params, x, remat=remat)
        return sum(leaf.size for leaf in (*split.until_b, *split.until_w))

    assert saved("none") > saved("dots") > saved("full") == x.size


def test_backward_for_the_input_computes_no_weight_gradient():
    params, x, dy = arguments()
    split = split_layer(layer, params, x)
    _, until_b, until_w = split.forward(params, x, None)
    _, crossing = split.backward_input(params, until_b, until_w, dy, None)

    def matmuls(fn, *args):
        return str(jax.make_jaxpr(fn)(*args)).count("dot_general")

    assert matmuls(split.backward_input, params, until_b, until_w, dy, None) == 2
    assert matmuls(split.backward_weights, params, until_w, crossing, None) == 2


def test_layer_that_changes_shape_is_refused():
    with pytest.raises(ValueError, match=r"float32\[3, 6\] to float32\[3, 2\]"):
        split_layer(lambda w, x, rng: x[:, :2], jnp.ones(2), jnp.ones((3, 6)))


def test_unknown_policy_names_the_known_ones():
    with pytest.raises(ValueError, match="none, dots, full"):
        split_layer(lambda w, x, rng: x, jnp.ones(2), jnp.ones((3, 6)), remat="some")
