"""The asynchronous executor trains exactly as a slow loop over a weight history does."""

from __future__ import annotations

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asynchronous_reference import Settings, losses
from asynchronous_toy import minibatches, packed, params, pipeline, train

pytestmark = pytest.mark.pipeline


@dataclasses.dataclass
class Case:
    """A run to compare; its layers are of two kinds if they ``differ``."""

    settings: Settings
    tied: bool = True
    layers: int | None = None
    data: int = 1
    zero: int = 0
    fused: bool = False
    differ: bool = False


T1, T2 = {"rescheduling_steps": 6}, {"discrepancy_decay": 0.135}
FEW = {
    # More stages than microbatches. With few of them later stages are minibatches ahead, and their
    # norms with them.
    "naive, clipped, drained": Case(
        Settings(4, 3, "pipemare", "sgd", clip_norm=0.3, drains=(6,)), tied=False, layers=5
    ),
    "T1 and T2, a minibatch of one": Case(
        Settings(3, 1, "pipemare", "momentum", **T1, **T2, remat="full"), layers=5, fused=True
    ),
    "T1 and T2, recomputing, clipped, ZeRO-3, layers that differ": Case(
        Settings(3, 2, "pipemare", "adam", **T1, **T2, clip_norm=0.3, recompute_segment=2),
        data=2,
        zero=3,
        differ=True,
    ),
    "PipeDream after a warm-up, ZeRO-1": Case(
        Settings(2, 2, "pipedream", "adamw", **T1, warm_up=3), layers=3, data=2, zero=1
    ),
    "2BW, recomputing, more microbatches than stages": Case(
        Settings(3, 5, "2bw", "adam", recompute_segment=2, remat="dots"), tied=False
    ),
}
MANY = [
    *(Case(Settings(4, 3, optimizer=name)) for name in ("momentum", "adam", "adamw")),
    *(
        Case(Settings(3, 2, optimizer="momentum", **T2, remat=remat), layers=7, fused=fused)
        for remat in ("none", "dots")
        for fused in (False, True)
    ),
    *(
        Case(Settings(P, N, optimizer="adamw", recompute_segment=segment, **options), layers=P + 2)
        for segment, P, N, options in (
            *((1, 4, 2, {}), (3, 4, 8, {**T1, **T2, "clip_norm": 0.5}), (4, 4, 1, T2)),
            (2, 5, 2, {"warm_up": 3, "drains": (6,), "remat": "dots", **T1, **T2}),
        )
    ),
    *(
        Case(Settings(2, 2, method, "adam", warm_up=1, drains=(4,)), layers=3, data=2, zero=zero)
        for method in ("pipemare", "pipedream")
        for zero in range(4)
    ),
    *(
        Case(Settings(P, N, optimizer="momentum", clip_norm=0.3), layers=5, data=data)
        for P, N, data in ((3, 4, 1), (3, 4, 2), (4, 1, 1), (4, 2, 1))
    ),
    Case(Settings(2, 3, "2bw", "sgd", 7, warm_up=1, drains=(4, 7))),
]


def check(case: Case) -> None:
    settings, layers = case.settings, case.layers or case.settings.stages
    start = packed(5) if case.differ else params(layers=layers, tied=case.tied)
    batches = minibatches(10, 2 * case.data * settings.microbatches)
    training = pipeline(settings, start, data=case.data, zero=case.zero, fused=case.fused)
    got, end, _ = train(settings, training, start, batches)
    want, want_end = losses(dataclasses.replace(settings, shards=case.data), start, batches)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert np.ptp(want) > 0.01 * abs(np.mean(want))
    chex.assert_trees_all_close(end, want_end, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", FEW)
def test_it_trains_as_the_reference(name):
    check(FEW[name])


@pytest.mark.slow
def test_it_trains_as_the_reference_everywhere():
    for case in MANY:
        check(case)


@pytest.mark.parametrize(("P", "N"), [(4, 1), (4, 3), (3, 8), (2, 3)])
def test_delays_are_those_of_the_table(P, N):
    """Updates that the forward of a microbatch misses; the reference counts them by itself."""
    expected = [
        [max(math.ceil((2 * (P - i) + 1 - j) / N), 0) for j in range(N)] for i in range(1, P + 1)
    ]
    training = pipeline(Settings(P, N), params(layers=P, tied=True))
    np.testing.assert_array_equal(training.delays, expected)


# The reference itself.


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
    expected = jax.tree.map(lambda w, g: w - 0.02 * g, start, gradients)
    chex.assert_trees_all_close(jax.tree.map(np.float32, end), expected, rtol=1e-5, atol=1e-6)


def test_what_it_switches_changes_the_losses():
    plain = Settings(3, 2, "pipemare", "momentum")
    variants = [
        {},
        *({"method": "synchronous"}, {"method": "pipedream"}, {"method": "2bw", "microbatches": 5}),
        *(T1, T2, {"remat": "full"}, {"remat": "dots"}),
        *({"recompute_segment": 2}, {"recompute_segment": 2, **T2}),
        *({"optimizer": "adam"}, {"microbatches": 5, "clip_norm": 0.5}),
    ]
    ends = {
        round(losses(settings, params(layers=3, tied=True), minibatches(8, 10))[0][-1], 6)
        for settings in (dataclasses.replace(plain, **variant) for variant in variants)
    }
    assert len(ends) == len(variants)
