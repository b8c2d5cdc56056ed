"""ResNets: sizes, kinds of layers, norms, running statistics, and that they learn."""

import dataclasses
import functools

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

init = jax.jit(resnet.init, static_argnums=0)
logits = jax.jit(resnet.logits, static_argnums=0)


@pytest.fixture(scope="module")
def params():
    return init(TINY, jax.random.key(0))


@pytest.fixture(scope="module")
def images():
    return jax.random.normal(jax.random.key(1), (6, 8, 8, 1))


def test_depth_counts_the_layers_with_weights():
    """Convolutions outside shortcuts, and the classifier."""
    for config in (ResNetConfig(depth=32, num_classes=10), ResNetConfig.resnet50()):
        shapes = jax.eval_shape(functools.partial(resnet.init, config), jax.random.key(0))
        paths = [path for path, x in jax.tree.leaves_with_path(shapes) if len(x.shape) in (2, 4)]
        assert sum("shortcut" not in str(path) for path in paths) == config.depth


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (TINY, (2, 2, 16)),
        (ResNetConfig(depth=18, num_classes=5, style="imagenet", channels=1, width=4), (1, 1, 32)),
        (ResNetConfig(depth=50, num_classes=5, style="imagenet", channels=1, width=4), (1, 1, 128)),
    ],
    ids=["cifar", "basic", "bottleneck"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shapes_and_dtypes(config, shape, dtype):
    """Each group halves the image; the ImageNet stem divides it by four."""
    config = dataclasses.replace(config, dtype=dtype)
    params = jax.eval_shape(functools.partial(resnet.init, config), jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    model = resnet.model(config)
    batch = {"images": jax.ShapeDtypeStruct((3, 8, 8, 1), jnp.float32)}
    x = jax.eval_shape(lambda batch: model.embed({}, batch, None), batch)
    for layer, layer_params in zip(model.layer, params["layers"], strict=True):
        x = jax.eval_shape(lambda w, x, layer=layer: layer(w, x, None, None), layer_params, x)
    assert (x.shape, x.dtype) == ((3, *shape), jnp.dtype(dtype))
    scores = jax.eval_shape(functools.partial(resnet.logits, config), params, batch["images"])
    assert (scores.shape, scores.dtype) == ((3, 5), jnp.float32)


def test_layers_of_equal_shape_share_their_function():
    config = ResNetConfig(depth=20, num_classes=10)
    layers = resnet.model(config).layer
    assert len(layers) == config.num_layers == 10
    assert [layers.index(layer) for layer in layers] == [0, 1, 1, 1, 4, 5, 5, 7, 8, 8]


def test_rows_do_not_touch_each_other_with_group_norm(params, images):
    alone = logits(TINY, params, images[:1])
    np.testing.assert_allclose(logits(TINY, params, images)[:1], alone, rtol=1e-5, atol=1e-6)


def test_a_cifar_shortcut_keeps_every_other_pixel_and_adds_zeros(params, images):
    """With branches that give nothing, a block is its shortcut behind a ReLU."""
    model = resnet.model(TINY)
    x = jax.random.normal(jax.random.key(2), (2, 8, 8, 4))
    silent = jax.tree.map(jnp.zeros_like, params["layers"][2])
    y = model.layer[2](silent, x, None, None)
    np.testing.assert_array_equal(y[..., :4], jax.nn.relu(x[:, ::2, ::2]))
    np.testing.assert_array_equal(y[..., 4:], 0)


def test_the_loss_is_the_mean_cross_entropy(params, images):
    labels = jnp.arange(6) % 5
    scores = jax.nn.log_softmax(logits(TINY, params, images))
    loss = jaxpipe.unpipelined.loss(
        resnet.model(TINY), params, {"images": images, "labels": labels}
    )
    np.testing.assert_allclose(loss, -scores[jnp.arange(6), labels].mean(), rtol=1e-5)


# BatchNorm.


def run(model, params, images, state):
    x, renewed = images, []
    for layer, w, s in zip(model.layer, params["layers"], state, strict=True):
        x, s = layer(w, x, None, None, s)
        renewed.append(s)
    return x, tuple(renewed)


def test_state_has_the_tree_of_what_a_layer_returns(params, images):
    state = resnet.init_state(BATCH_NORM)
    assert resnet.model(BATCH_NORM).stateful
    assert not resnet.model(TINY).stateful
    assert resnet.init_state(TINY) == ({},) * TINY.num_layers
    _, renewed = jax.eval_shape(
        functools.partial(run, resnet.model(BATCH_NORM)), params, images, state
    )
    assert jax.tree.structure(renewed) == jax.tree.structure(state)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(lambda x: x.shape, renewed)


def test_running_statistics_move_a_tenth_of_the_way(params, images):
    """Of the stem, whose convolution is applied by itself here."""
    state = resnet.init_state(BATCH_NORM)
    _, renewed = run(resnet.model(BATCH_NORM), params, images, state)
    kernel = params["layers"][0]["conv"]["conv"]["kernel"]
    y = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    norm = renewed[0]["conv"]["norm"]
    np.testing.assert_allclose(norm["mean"], 0.1 * y.mean((0, 1, 2)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norm["var"], 0.9 + 0.1 * y.var((0, 1, 2)), rtol=1e-4)


def test_evaluation_uses_running_statistics_and_leaves_them(params, images):
    """After many looks at the same rows, running statistics are those of the rows."""
    train, evaluate = (resnet.model(BATCH_NORM, train=mode) for mode in (True, False))
    state = resnet.init_state(BATCH_NORM)
    forward = jax.jit(functools.partial(run, train))
    for _ in range(150):
        expected, state = forward(params, images, state)
    x, same = jax.jit(functools.partial(run, evaluate))(params, images, state)
    np.testing.assert_allclose(x, expected, rtol=1e-3, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, same, state)
    x, _ = run(evaluate, params, images, resnet.init_state(BATCH_NORM))
    assert not np.allclose(x, expected, rtol=1e-2, atol=1e-2)


def test_batch_norm_does_not_evaluate_without_statistics(params, images):
    with pytest.raises(ValueError, match=r"norm='batch'.*pass state"):
        resnet.logits(BATCH_NORM, params, images)
