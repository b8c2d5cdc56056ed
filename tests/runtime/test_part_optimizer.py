"""Optimizers that can update one part at a time, and the reasons why others cannot."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from jaxpipe.runtime.update.part_optimizer import PARTS, PartOptimizer, apply

PARAMS = {
    "embed": {"table": jnp.linspace(-1, 1, 20).reshape(5, 4)},
    "layers": {
        "bias": jnp.linspace(0.1, 1, 6).reshape(2, 3),
        "up": jnp.linspace(-1, 0.5, 24).reshape(2, 3, 4),
    },
    "head": {"scale": jnp.ones(4)},
}
DECAYS = {
    "embed": {"table": True},
    "layers": {"bias": False, "up": True},
    "head": {"scale": False},
}
LABELS = {
    "embed": {"table": "slow"},
    "layers": {"bias": "fast", "up": "slow"},
    "head": {"scale": "fast"},
}

PER_ELEMENT = {
    "sgd": optax.sgd(0.1),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(optax.linear_schedule(0.1, 0, 5), mask=DECAYS),
    "amsgrad": optax.amsgrad(0.01),
    "lion": optax.lion(0.01),
    "rmsprop": optax.rmsprop(0.01),
    "adagrad": optax.adagrad(0.1),
    "clipped values": optax.chain(optax.clip(0.2), optax.nadam(0.01)),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
    "partitioned": optax.partition(
        {"slow": optax.adam(0.01), "fast": optax.sgd(0.1, momentum=0.9)}, LABELS
    ),
}
MIXING = {
    "reduce_sum": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01)),
    "lamb": optax.lamb(0.01),
    "adafactor": optax.adafactor(0.01),
    "finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "accumulating": optax.MultiSteps(optax.adam(0.01), 2),
}


@pytest.mark.parametrize("optimizer", PER_ELEMENT.values(), ids=PER_ELEMENT)
def test_parts_updated_one_by_one_end_where_the_whole_does(optimizer):
    parts = PartOptimizer(optimizer, PARAMS)
    params, state = PARAMS, optimizer.init(PARAMS)
    whole, whole_state = params, state
    owned, rest = parts.split(state)
    rests = dict.fromkeys(PARTS, rest)
    for step in range(3):
        gradients = jax.tree.map(lambda w, k=step: jnp.sin(7 * w + k), PARAMS)
        updates, whole_state = optimizer.update(gradients, whole_state, whole)
        whole = optax.apply_updates(whole, updates)
        for name in ("head", "layers", "embed"):
            updates, owned, rests[name] = parts.update(
                name, gradients[name], owned, rests[name], params
            )
            params = params | {name: apply(params[name], updates)}
    chex.assert_trees_all_close(params, whole, rtol=1e-6)
    for name in PARTS:
        joined = parts.join(owned, rests[name])
        assert jax.tree.structure(joined) == jax.tree.structure(whole_state)
        chex.assert_trees_all_close(joined, whole_state, rtol=1e-6)


@pytest.mark.parametrize("optimizer", MIXING.values(), ids=MIXING)
def test_an_optimizer_that_mixes_elements_is_refused_with_its_reason(optimizer):
    with pytest.raises(
        ValueError, match=r"cannot update a model part by part.* reads .* through \w+"
    ) as e:
        PartOptimizer(optimizer, PARAMS)
    assert "clip_norm" in str(e.value)
