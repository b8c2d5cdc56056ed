"""ResNets: kinds of layers, norms, and running statistics."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe
from models import resnet
from models.resnet import ResNetConfig

pytestmark = pytest.mark.pipeline

TINY = ResNetConfig(depth=8, num_classes=5, channels=1, width=4)
BATCH_NORM = dataclasses.replace(TINY, norm="batch")
IMAGENET = ResNetConfig(depth=18, num_classes=5, style="imagenet", channels=1, width=4)

logits = jax.jit(resnet.logits, static_argnums=0)


@pytest.fixture(scope="module")
def params():
    return jax.jit(resnet.init, static_argnums=0)(TINY, jax.random.key(0))


@pytest.fixture(scope="module")
def images():
    return jax.random.normal(jax.random.key(1), (6, 8, 8, 1))


@pytest.mark.parametrize(
    ("config", "dtype", "shape"),
    [
        (TINY, "float32", (2, 2, 16)),
        (TINY, "bfloat16", (2, 2, 16)),
        (IMAGENET, "bfloat16", (1, 1, 32)),
        (dataclasses.replace(IMAGENET, depth=50), "bfloat16", (1, 1, 128)),
    ],
    ids=["cifar", "cifar-bfloat16", "basic", "bottleneck"],
)
def test_shapes_and_dtypes(config, dtype, shape):
    """Each group halves the image; the ImageNet stem divides it by four."""
    config = dataclasses.replace(config, dtype=dtype)
    params = jax.eval_shape(functools.partial(resnet.init, config), jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    images = jax.ShapeDtypeStruct((3, 8, 8, 1), jnp.float32)

    def last(params, images):
        model, batch = resnet.model(config), {"images": images}
        x = model.embed({}, batch, None)
        for layer, w in zip(model.layer, params["layers"], strict=True):
            x = layer(w, x, None, None)
        return x, model.head_loss(params, x, batch | {"labels": jnp.zeros(3, int)}, None)

    x, loss = jax.eval_shape(last, params, images)
    assert (x.shape, x.dtype) == ((3, *shape), jnp.dtype(dtype))
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


def test_layers_of_equal_shape_share_their_function():
    config = ResNetConfig(depth=20, num_classes=10)
    layers = resnet.model(config).layer
    assert len(layers) == config.num_layers == 10
    assert [layers.index(layer) for layer in layers] == [0, 1, 1, 1, 4, 5, 5, 7, 8, 8]


def test_a_cifar_shortcut_keeps_every_other_pixel_and_adds_zeros(params, images):
    """With branches that give nothing, a block is its shortcut behind a ReLU."""
    model = resnet.model(TINY)
    x = jax.random.normal(jax.random.key(2), (2, 8, 8, 4))
    silent = jax.tree.map(jnp.zeros_like, params["layers"][2])
    y = model.layer[2](silent, x, None, None)
    np.testing.assert_array_equal(y[..., :4], jax.nn.relu(x[:, ::2, ::2]))
    np.testing.assert_array_equal(y[..., 4:], 0)


def test_the_loss_is_the_mean_cross_entropy_of_rows_that_do_not_touch_each_other(params, images):
    labels = jnp.arange(6) % 5
    scores = logits(TINY, params, images)
    expected = -jax.nn.log_softmax(scores)[jnp.arange(6), labels].mean()
    batch = {"images": images, "labels": labels}
    loss = jax.jit(functools.partial(jaxpipe.unpipelined.loss, resnet.model(TINY)))(params, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    others = logits(TINY, params, images.at[1:].multiply(2))
    np.testing.assert_allclose(others[:1], scores[:1], rtol=1e-5, atol=1e-6)
    assert not np.allclose(others[1:], scores[1:])


# BatchNorm.


def run(model, params, images, state):
    x, renewed = images, []
    for layer, w, s in zip(model.layer, params["layers"], state, strict=True):
        x, s = layer(w, x, None, None, s)
        renewed.append(s)
    return x, tuple(renewed)


def test_states_are_running_statistics_that_move_a_tenth_of_the_way(params, images):
    """Checked for the stem, whose convolution is applied by itself here."""
    state = resnet.init_state(BATCH_NORM)
    assert resnet.model(BATCH_NORM).stateful
    assert not resnet.model(TINY).stateful
    assert resnet.init_state(TINY) == ({},) * TINY.num_layers
    _, renewed = jax.jit(functools.partial(run, resnet.model(BATCH_NORM)))(params, images, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(renewed, state)
    kernel = params["layers"][0]["conv"]["conv"]["kernel"]
    y = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    norm = renewed[0]["conv"]["norm"]
    np.testing.assert_allclose(norm["mean"], 0.1 * y.mean((0, 1, 2)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norm["var"], 0.9 + 0.1 * y.var((0, 1, 2)), rtol=1e-4)


def test_evaluation_uses_running_statistics_and_leaves_them(params, images):
    """After many looks at the same rows, running statistics are those of the rows."""
    forward, evaluate = (
        jax.jit(functools.partial(run, resnet.model(BATCH_NORM, train=mode)))
        for mode in (True, False)
    )
    state = resnet.init_state(BATCH_NORM)
    for _ in range(150):
        expected, state = forward(params, images, state)
    x, same = evaluate(params, images, state)
    np.testing.assert_allclose(x, expected, rtol=1e-3, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, same, state)
    x, _ = evaluate(params, images, resnet.init_state(BATCH_NORM))
    assert not np.allclose(x, expected, rtol=1e-2, atol=1e-2)


def test_batch_norm_does_not_evaluate_without_statistics(params, images):
    with pytest.raises(ValueError, match=r"norm='batch'.*pass state"):
        resnet.logits(BATCH_NORM, params, images)
