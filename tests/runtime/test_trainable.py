"""Parameters that are not trained, and parameters that layers share."""

import functools

import adapted
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from compilations import refusal
from covering import some
from toys import assert_close

import jaxpipe
from jaxpipe.runtime.filters import split_trainable
from jaxpipe.runtime.memory import buffers
from jaxpipe.runtime.trees import combine

TOY = toys.named("adapted")


def pipeline(name="adapted", schedule="1f1b", **options) -> jaxpipe.Pipeline:
    return toys.pipeline(name, schedule, toys.ON_DATA, microbatches=4, **options)


def reference(trainable=adapted.TRAINABLE) -> tuple:
    """Loss and gradients of the unpipelined step."""
    step = functools.partial(
        jaxpipe.unpipelined.value_and_grad,
        TOY.model,
        trainable=trainable,
        num_microbatches=4,
        data_shards=2,
    )
    return jax.jit(step)(TOY.params, TOY.batch(16))


@pytest.mark.parametrize(
    ("weights", "zero"), some([("stacked", 3), ("unrolled", 0)], ("stacked", 3))
)
def test_an_optimizer_sees_only_what_is_trained(weights, zero):
    pipe, params = pipeline(weights=weights, zero=zero), TOY.params
    mask = functools.partial(jax.tree.map, lambda w: w.ndim > 1)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, mask=mask))
    trained, frozen = split_trainable(params, adapted.TRAINABLE)
    gradients = jax.tree.map(lambda w: w**2 - 0.1, trained)
    new = toys.updated(pipe, optimizer, params, combine(gradients, frozen))
    moved, kept = split_trainable(new, adapted.TRAINABLE)
    assert_close(moved, toys.expected_update(optimizer, trained, gradients))
    chex.assert_trees_all_equal(kept, frozen)
    held = sum(leaf.size for leaf in jax.tree.leaves(pipe.optimizer_placing(optimizer).canonical))
    assert held == 2 * sum(leaf.size for leaf in jax.tree.leaves(trained)) + 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adapted", {}),
        ("adapted", {"zero": 3, "weights": "unrolled"}),
        ("adapted tuple", {"zero": 3}),
    ],
)
def test_what_is_not_trained_has_no_gradient_buffer(name, options):
    pipe = pipeline(name, **options)
    kept = buffers(pipe, TOY.batch(16))
    sums = [kept[part] for part in ("gradients", "reduced") if part in kept]
    assert not any(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(sums))
    trained, _ = split_trainable(pipe.canonical_params, adapted.TRAINABLE)
    sizes = [leaf.size for leaf in jax.tree.leaves(trained["layers"])]
    assert all(leaf.size <= 6 * max(sizes) for leaf in jax.tree.leaves(sums))
    _, grads = jax.eval_shape(pipe.value_and_grad, pipe.placed_params, TOY.batch(16))
    assert sum(leaf.size for leaf in jax.tree.leaves(grads["layers"])) <= 2 * 3 * sum(sizes)


def test_only_the_head_is_trained():
    pipe = pipeline(schedule="zb-h1", zero=3, trainable="head")
    loss, grads = jax.jit(pipe.value_and_grad)(pipe.place(TOY.params), TOY.batch(16))
    expected_loss, expected = reference(lambda path, leaf: path == "head")
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_close(pipe.unplace(grads), expected)


def test_gradients_by_jax_are_of_what_is_trained_and_update_it():
    pipe, optimizer = pipeline(), optax.sgd(0.1)
    placed = pipe.place(TOY.params)
    grads = jax.jit(jax.grad(pipe.loss, allow_int=True))(placed, TOY.batch(16))
    found = [
        pipe.update(optimizer, tree, pipe.init(optimizer, placed), placed)[0]
        for tree in (grads, grads | {"frozen": jax.tree.map(jnp.zeros_like, placed["frozen"])})
    ]
    trained, frozen = split_trainable(TOY.params, adapted.TRAINABLE)
    moved = jax.tree.map(lambda w, g: w - 0.1 * g, trained, reference()[1])
    for new in map(pipe.unplace, found):
        assert_close(new, combine(moved, frozen))


def test_an_asynchronous_pipeline_says_what_it_cannot_train():
    said = refusal(jaxpipe.AsyncPipeline, pipeline(), optax.sgd(0.1))
    assert "without `trainable`" in said
    assert "params['shared']" in said


# What nothing reads.


def of_linear(w, x, batch, rng):
    """Layers that read their kernel, and of what they share the gain."""
    own, shared = w
    return x + shared["gain"] * jnp.tanh(x @ own["kernel"])


def biased(w, x, batch, rng):
    return of_linear(w, x, batch, rng) + w[0]["bias"]


@pytest.mark.parametrize(
    ("layer", "trainable", "named"),
    [
        (of_linear, None, "embed/first, head/last, shared/shift, layers/bias"),
        ((of_linear, biased), None, "embed/first, head/last, shared/shift, layers/0/bias"),
        ((biased, biased), ["layers/*", "shared/*"], "shared/shift"),
    ],
)
def test_trained_parameters_that_the_loss_does_not_read_are_named(layer, trainable, named):
    """Parameters that only a metric reads are named; a stopped gradient is deliberate."""
    tree = {"kernel": jnp.ones((3, 3)), "bias": jnp.ones(3)}
    layers = (tree, tree) if isinstance(layer, tuple) else jax.tree.map(lambda w: w[None], tree)
    params = {
        "embed": {"scale": jnp.ones(3), "first": jnp.ones(3)},
        "layers": layers,
        "head": {"stopped": jnp.ones(3), "last": jnp.ones(3)},
        "shared": {"gain": jnp.ones(()), "shift": jnp.ones(())},
    }

    def head_loss(outer, x, batch, rng):
        x = jax.jit(jnp.multiply)(x, jax.lax.stop_gradient(outer["head"]["stopped"]))
        return jnp.mean(x**2), {"size": jnp.mean(x * outer["head"]["last"])}

    model = jaxpipe.Model(
        lambda outer, batch, rng: batch["x"] * outer["embed"]["scale"], layer, head_loss
    )
    stages = len(layers) if isinstance(layers, tuple) else 1
    given = {"schedule": "1f1b", "mesh": jaxpipe.make_mesh(stage=stages), "trainable": trainable}
    pipe = jaxpipe.Pipeline(model, params, **given)
    step = functools.partial(jax.eval_shape, pipe.value_and_grad, pipe.placed_params)
    with pytest.warns(UserWarning, match=f"does not depend on {named}: "):
        step({"x": jnp.ones((4, 3))})
