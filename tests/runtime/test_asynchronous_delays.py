"""Which weights an asynchronous run really reads, measured on counters in place of weights.

The layers' weights are counters that every update raises by one, so that what a pass computes shows
the version it has read.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import some

import jaxpipe
from jaxpipe import AsyncPipeline

pytestmark = pytest.mark.pipeline


def counters() -> optax.GradientTransformation:
    """Counts updates in "version" and keeps the last gradient in "probe"."""

    def update(updates, state, params):
        layers = tuple(
            {"version": jnp.ones_like(new["version"]), "probe": new["probe"] - old["probe"]}
            for new, old in zip(updates["layers"], params["layers"], strict=True)
        )
        return updates | {"layers": layers}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def build(layer, loss, P: int, N: int, layers: dict, method="pipemare"):
    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=layer,
        head_loss=lambda outer, x, batch, rng: loss(x, batch),
    )
    params = {"embed": {}, "layers": layers, "head": {}}
    pipe = jaxpipe.Pipeline(
        model,
        params,
        schedule=jaxpipe.schedules.build("1f1b", stages=P, microbatches=N),
        mesh=jaxpipe.make_mesh(stage=P),
    )
    training = AsyncPipeline(pipe, counters(), method=method)
    return training, pipe.place(params)


def expected_delay(P: int, N: int, i: int, j: int) -> int:
    return max(math.ceil((2 * (P - i) + 1 - j) / N), 0)


@pytest.mark.parametrize(("P", "N"), some([(4, 1), (4, 2), (4, 3), (3, 8), (2, 3)], (4, 3)))
def test_forwards_read_weights_as_old_as_the_table_says(P, N):
    """Each minibatch probes one stage with one microbatch: its loss is the version read there."""

    def layer(w, x, batch, rng):
        value = x[:, :1] + x[:, 1:2] * w["version"]
        return jnp.concatenate([value, x[:, 2:], x[:, :1]], axis=1)

    layers = {"version": jnp.zeros(P), "probe": jnp.zeros(P)}
    training, params = build(layer, lambda x, batch: x[:, 0].mean(), P, N, layers)
    np.testing.assert_array_equal(
        training.delays,
        [[expected_delay(P, N, i, j) for j in range(N)] for i in range(1, P + 1)],
    )

    def batch(i: int, j: int) -> dict:
        x = np.zeros((N, P + 2), np.float32)
        x[j, i] = 1  # column 0 is the value, column i tells stage i to add its version
        return {"x": x}

    fill = math.ceil((2 * P - 1) / N)
    probes = [(1, 0)] * fill + [(i, j) for i in range(1, P + 1) for j in range(N)]
    state = training.init(params, training.optimizer.init(params), batch(1, 0))
    step = jax.jit(training.step, donate_argnums=0)
    losses = []
    for probe in probes:
        state, loss = step(state, batch(*probe))
        losses.append(loss)
    state, rest = jax.jit(training.drain)(state)
    found = np.asarray([*losses, *rest])
    versions = found[~np.isnan(found)] * N
    for k, ((i, j), version) in enumerate(zip(probes, versions, strict=True)):
        assert k - version == pytest.approx(min(expected_delay(P, N, i, j), k), abs=1e-4), (i, j, k)
    end = training.pipe.unplace(training.params(state))
    np.testing.assert_array_equal(end["layers"]["version"], np.full(P, len(probes)))


@pytest.mark.parametrize(
    ("P", "N", "method"),
    some(
        [(P, N, m) for P, N in [(3, 2), (3, 1), (2, 4)] for m in ("pipemare", "pipedream")],
        (3, 2, "pipedream"),
    ),
)
def test_backwards_read_the_newest_weights_or_the_stashed(P, N, method):
    """The gradient of a layer's probe is the product of the versions its cotangent went through."""

    def layer(w, x, batch, rng):
        return x * w["version"] + w["probe"] - jax.lax.stop_gradient(w["probe"])

    layers = {"version": jnp.ones(P), "probe": jnp.zeros(P)}
    training, params = build(layer, lambda x, batch: x.mean(), P, N, layers, method=method)
    batch = {"x": np.ones((N, 1), np.float32)}
    state = training.init(params, training.optimizer.init(params), batch)
    step = jax.jit(training.step, donate_argnums=0)
    count = 2 + math.ceil((2 * P - 1) / N)
    for _ in range(count):
        state, _ = step(state, batch)
    state, _ = jax.jit(training.drain)(state)
    probes = training.pipe.unplace(training.params(state))["layers"]["probe"]

    def version(i: int, j: int) -> int:
        late = 0 if method == "pipemare" else expected_delay(P, N, i, j)
        return 1 + (count - 1) - late

    for i in range(1, P + 1):
        behind = [math.prod(version(k, j) for k in range(i + 1, P + 1)) for j in range(N)]
        assert probes[i - 1] == pytest.approx(np.mean(behind), rel=1e-6)
