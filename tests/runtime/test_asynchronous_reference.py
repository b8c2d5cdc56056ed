"""The reference itself: its derivatives, and the stability its delays imply."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asynchronous_reference import Settings, losses
from asynchronous_toy import minibatches, params


@pytest.mark.parametrize("tied", [True, False])
def test_its_synchronous_gradient_is_the_derivative(tied):
    start, (batch,) = params(layers=3, tied=tied), minibatches(1, 6)

    def loss(p):
        x = batch["inputs"] @ p["embed"]["table"]
        for n in range(3):
            w = jax.tree.map(lambda leaf, n=n: leaf[n], p["layers"])
            x = x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"]
        readout = p["embed"]["table"].T if tied else p["head"]["readout"]
        return jnp.mean((x @ readout - batch["targets"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(start)
    (got,), end = losses(Settings(2, 3, "synchronous"), start, [batch])
    np.testing.assert_allclose(got, value, rtol=1e-5)
    jax.tree.map(
        lambda w, v, g: np.testing.assert_allclose(v - w, -0.02 * g, rtol=1e-3, atol=1e-6),
        start,
        end,
        gradients,
    )


def test_what_it_switches_changes_the_losses():
    plain = Settings(3, 2, "pipemare", "momentum")
    variants = [
        plain,
        dataclasses.replace(plain, method="synchronous"),
        dataclasses.replace(plain, method="pipedream"),
        dataclasses.replace(plain, microbatches=5, method="2bw"),
        dataclasses.replace(plain, rescheduling_steps=5),
        dataclasses.replace(plain, discrepancy_decay=0.135),
        dataclasses.replace(plain, remat="full"),
        dataclasses.replace(plain, remat="dots"),
        dataclasses.replace(plain, recompute_segment=2),
        dataclasses.replace(plain, recompute_segment=2, discrepancy_decay=0.135),
        dataclasses.replace(plain, optimizer="adam"),
        dataclasses.replace(plain, microbatches=5, clip_norm=0.5),
    ]
    runs = [losses(v, params(layers=3, tied=True), minibatches(8, 10))[0][-1] for v in variants]
    assert len({round(loss, 6) for loss in runs}) == len(variants)


@pytest.mark.parametrize("tau", [0, 1, 2, 5, 10, 20])
@pytest.mark.parametrize(("margin", "stable"), [(0.97, True), (1.03, False)])
def test_a_delayed_quadratic_is_stable_up_to_the_theoretical_rate(tau, margin, stable):
    """w_{t+1} = w_t - a w_{t-tau} is stable iff a < 2 sin(pi / (4 tau + 2))."""
    rate = margin * 2 * math.sin(math.pi / (4 * tau + 2))
    history = [1.0] * (tau + 1)
    for _ in range(1000 * (tau + 1)):
        history.append(history[-1] - rate * history[-1 - tau])
    tail = max(abs(w) for w in history[-100:])
    assert (tail < 1e-3) if stable else (tail > 1e3)
