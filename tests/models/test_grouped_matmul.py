"""Grouped matmuls and their gradients, beside a loop over groups and over experts."""

import dataclasses
import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_experts
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpipe.planning.without_devices import attention_of_gpus
from jaxpipe.runtime.layers import jaxprs, split
from models import experts
from models.grouped_matmul import grouped_matmul

CONFIG = dataclasses.replace(test_experts.CONFIG, sequence_length=16, shared_width=None)


def loop(x, kernels, sizes):
    """One group after another; rows behind the last one are zeros."""
    ends = np.cumsum(sizes)
    groups = [x[end - size : end] @ k for size, end, k in zip(sizes, ends, kernels, strict=True)]
    rest = jnp.zeros((len(x) - ends[-1], kernels.shape[2]), x.dtype)
    return jnp.concatenate([*groups, rest])


@pytest.mark.parametrize(
    "sizes",
    [[5, 0, 11, 3], [0, 0, 40, 0], [0, 0, 0, 0], [100, 33, 40, 1]],
    ids=str,
)
def test_products_and_gradients_are_those_of_a_loop_over_groups(sizes):
    """Also where there are more rows than groups have."""
    num_rows = max(40, sum(sizes))
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = (jax.random.normal(key, (num_rows, 6)) for key in keys[:2])
    kernels = jax.random.normal(keys[2], (4, 6, 6))

    def found(x, kernels):
        return grouped_matmul(x, kernels, jnp.array(sizes), sum(sizes))

    y, vjp = jax.vjp(jax.jit(found), x, kernels)
    expected, expected_vjp = jax.vjp(jax.jit(functools.partial(loop, sizes=sizes)), x, kernels)
    chex.assert_trees_all_close((y, *vjp(dy)), (expected, *expected_vjp(dy)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[70, 0, 20, 30], [70, 0, 100, 30]], ids=["as expected", "more"])
def test_the_kernel_for_hopper_gives_what_the_loop_gives(sizes):
    """In jax's interpreter, which knows F but not the transposed tiles of B and W."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (256, 64)).astype(jnp.bfloat16)
    kernels = jax.random.normal(keys[1], (4, 64, 128)).astype(jnp.bfloat16)
    expected = grouped_matmul(x, kernels, jnp.array(sizes), 103)
    interpreted = functools.partial(plgpu.kernel, interpret=InterpretGPUParams())
    with mock.patch.object(plgpu, "kernel", interpreted), attention_of_gpus():
        found = grouped_matmul(x, kernels, jnp.array(sizes), 103)
    chex.assert_trees_all_close(found, expected, rtol=2**-7, atol=2**-7)


def test_gradients_of_kernels_are_summed_in_float32():
    x, dy = jnp.full((4096, 1), 1, jnp.bfloat16), jnp.full((4096, 1), 1, jnp.bfloat16)
    kernels, sizes = jnp.ones((2, 1, 1)), jnp.array([4095, 1])
    _, vjp = jax.vjp(lambda kernels: grouped_matmul(x, kernels, sizes, 4096), kernels)
    assert vjp(dy)[0].ravel().tolist() == [4095, 1]


@pytest.mark.parametrize("likely", [None, 2], ids=["idle", "one-expert"])
def test_gradients_of_a_mixture_are_those_of_a_loop_over_experts(likely):
    """Compares parameters and x; one expert is idle, or all tokens choose the same two."""
    apply, params, x = test_experts.mixture_of(CONFIG)
    kernel = params["router"]["kernel"]
    x = x.at[..., 0].set(5.0)
    chosen = jnp.array([0, -50, 0, 0]) if likely is None else jnp.array([0, 0, 50, 20])
    params["router"]["kernel"] = kernel.at[0].add(chosen / 5)

    factors = jax.random.normal(jax.random.key(1), (32, CONFIG.width))

    def expected(params, x):
        rows = x.reshape(-1, CONFIG.width)
        scores, chosen = jax.lax.top_k(jax.nn.softmax(rows @ params["router"]["kernel"]), 2)
        scores = scores / scores.sum(axis=1, keepdims=True)
        y, count = 0.0, []
        for expert in range(CONFIG.num_experts):
            up, gate, down = (
                params["experts"][name]["kernel"][expert] for name in ("up", "gate", "down")
            )
            weight = jnp.where(chosen == expert, scores, 0).sum(axis=1, keepdims=True)
            y += weight * ((jax.nn.silu(rows @ gate) * (rows @ up)) @ down)
            count.append((chosen == expert).sum())
        return (y * factors).sum(), jnp.stack(count)

    def found(params, x):
        return (apply(params, x)[0].reshape(factors.shape) * factors).sum()

    of_loop = jax.jit(jax.value_and_grad(expected, (0, 1), has_aux=True))
    (y, counts), gradients = of_loop(params, x)
    assert counts[1] == 0
    assert (likely is None) != (counts.tolist() == [0, 0, 32, 32])
    results = jax.jit(jax.value_and_grad(found, (0, 1)))(params, x)
    chex.assert_trees_all_close(results, (y, gradients), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_each_pass_has_the_grouped_matmuls_that_it_needs(remat):
    """Three in F, B and W each; B repeats two under "full" and none where results are kept."""
    apply, params, x = test_experts.mixture_of(CONFIG)
    layer = split.split_layer(lambda params, x: apply(params, x)[0], params, x, remat=remat)

    def names(eqns):
        found = (eqn for eqn in eqns if eqn.primitive.name == "composite")
        return sorted(eqn.params["name"].removeprefix("jaxpipe.grouped_matmul") for eqn in found)

    again = 2 if remat == "full" else 0
    assert names(layer.b) == ["", "", ""] + [""] * again
    assert names(layer.w) == ["_of_kernels"] * 3
    assert not any(map(jaxprs.multiplies, layer.again))


@pytest.mark.parametrize("capacity", [None, 3], ids=["dropless", "capacity"])
def test_tokens_are_gathered_in_both_directions(capacity):
    """Compares rows that are sent and returned; nothing is scattered backwards."""
    chosen = jax.random.randint(jax.random.key(0), (6, 2), 0, 4)
    if capacity is None:
        places, _ = experts.shared_room(chosen, 4)
    else:
        places = experts.room(chosen, 4, capacity)

    def there_and_back(x, scores):
        rows = experts.sent(x, places) * experts.sent_scores(scores, places)[..., None]
        return jnp.sin(experts.returned(rows, places)).sum()

    def plain(x, scores):
        kept = places.places < places.pairs.size
        return jnp.sin(x * jnp.where(kept, scores, 0).sum(axis=1, keepdims=True)).sum()

    arguments = jax.random.normal(jax.random.key(1), (6, 5)), jnp.linspace(1, 2, 12).reshape(6, 2)
    backward, expected = (jax.jit(jax.grad(one, (0, 1))) for one in (there_and_back, plain))
    chex.assert_trees_all_close(backward(*arguments), expected(*arguments), rtol=1e-4)
    assert "scatter" not in str(jax.make_jaxpr(backward)(*arguments))
