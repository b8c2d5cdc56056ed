"""The study's training with old weights is what the asynchronous executor does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from benchmarks.studies import delayed, pipemare_quality
from jaxpipe.asynchronous import SteadyState

pytestmark = pytest.mark.slow

P, N, ROWS, STEPS, WIDTH = 4, 2, 4, 12, 5
RATE = 0.05


def model(*, metrics):
    def head_loss(outer, x, rows, rng):
        error = x @ outer["head"]["readout"] - rows["targets"]
        loss = jnp.mean(error**2)
        return (loss, {"accuracy": jnp.mean(jnp.abs(error))}) if metrics else loss

    def layer(w, x, rows, rng):
        return x + jnp.tanh(x @ w)

    return jaxpipe.Model(lambda outer, rows, rng: rows["inputs"], (layer,) * P, head_loss)


def drawn(seed=0):
    draw = np.random.default_rng(seed).normal
    params = {
        "embed": {},
        "layers": tuple(np.float32(0.6 * draw(size=(WIDTH, WIDTH))) for _ in range(P)),
        "head": {"readout": np.float32(draw(size=(WIDTH, 3)))},
    }
    rows = {
        "inputs": np.float32(draw(size=(40, WIDTH))),
        "targets": np.float32(draw(size=(40, 3))),
    }
    return params, rows, np.random.default_rng(seed).integers(40, size=(STEPS, N, ROWS))


def executed(method, techniques, params, rows, numbers):
    """The losses of all minibatches in a pipeline."""
    pipe = jaxpipe.Pipeline(
        model(metrics=False), params,
        schedule=jaxpipe.schedules.build("1f1b", stages=P, microbatches=N),
        mesh=jaxpipe.make_mesh(stage=P),
    )  # fmt: skip
    training = jaxpipe.AsyncPipeline(pipe, optax.sgd(RATE), method=method, **techniques)
    batches = [
        jax.tree.map(lambda leaf, chosen=chosen: leaf[chosen.T.reshape(-1)], rows)
        for chosen in numbers
    ]
    placed = pipe.place(params)
    state = training.init(placed, training.optimizer.init(placed), batches[0])
    step, losses = jax.jit(training.step), []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(loss)
    _, left = jax.jit(training.drain)(state)
    found = np.asarray([*losses, *left])
    return found[~np.isnan(found)]


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("method", "techniques"),
    [
        ("pipemare", {"rescheduling_steps": 8, "discrepancy_decay": 0.3}),
        pytest.param("pipedream", {}, marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_the_pipeline_does(method, techniques):
    params, rows, numbers = drawn()
    training = delayed.Training(
        model(metrics=True), params, jax.tree.map(lambda leaf: leaf[numbers[0]], rows),
        optimizer=optax.identity(), oldest=P, every=STEPS,
    )  # fmt: skip
    along = delayed.course(
        SteadyState(P, N, method), np.full(STEPS, RATE), layers=P, microbatches=N, **techniques
    )
    got = training.train(params, rows, rows, numbers, along).losses
    want = executed(method, techniques, params, rows, numbers)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    fresh = delayed.course(None, np.full(STEPS, RATE), layers=P, microbatches=N)
    assert not np.allclose(
        training.train(params, rows, rows, numbers, fresh).losses, want, rtol=1e-2
    )


def test_random_delays_have_the_mean_of_the_pipeline():
    study = pipemare_quality.Study(
        pipemare_quality.resnet.ResNetConfig(depth=20, num_classes=10, channels=1),
        pipemare_quality.Options(steps=2000),
    )
    regular = study.course(pipemare_quality.Method(), steps=2000, rate=1e-3, seed=0)
    random = study.course(pipemare_quality.Method(random=True), steps=2000, rate=1e-3, seed=0)
    late = slice(100, None)
    np.testing.assert_allclose(
        random.forward[late].mean((0, 1)), regular.forward[late].mean((0, 1)), atol=0.35
    )
    assert np.ptp(regular.forward[late, 0, 0]) == 0 < np.ptp(random.forward[late, 0, 0])
