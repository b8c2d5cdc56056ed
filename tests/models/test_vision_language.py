"""Images in front of a GPT: rows with different numbers of them, and a frozen encoder."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of

import jaxpipe
from jaxpipe.runtime.layer_costs import layer_costs
from jaxpipe.runtime.tracing import traced_layers
from jaxpipe.testing import assert_matches_unpipelined
from models import hugging_face, vision_language
from models.vision_language import VisionLanguageConfig

pytestmark = pytest.mark.pipeline

CONFIG = VisionLanguageConfig(
    vocab_size=19, sequence_length=8, num_layers=2, width=16, num_heads=2, mlp_width=12,
    num_encoder_layers=2, encoder_width=22, encoder_heads=2, max_images=2, patch_size=2,
)  # fmt: skip
HIDDEN = 4 * CONFIG.encoder_width
"""A size that only the encoder's layers have."""
TRAINED = ["layers/[2-9]/*", "embed/table", "head/*"]
"""All but the encoder."""
model = functools.partial(vision_language.model, CONFIG)
logits = jax.jit(functools.partial(vision_language.logits, CONFIG))


@functools.cache
def reference():
    return functools.partial(jaxpipe.unpipelined.loss, model())


@pytest.fixture(scope="module")
def params():
    return jax.jit(functools.partial(vision_language.init, CONFIG))(jax.random.key(0))


@pytest.mark.parametrize(
    ("schedule", "trainable"),
    [
        ("1f1b", None),
        ("zb-v", TRAINED),
        pytest.param("zb-v", None, marks=pytest.mark.slow),
        pytest.param("1f1b", "layers/2/*", marks=pytest.mark.slow),  # nothing has a gradient before
    ],
)
def test_rows_with_different_numbers_of_images(params, schedule, trainable):
    batch = batch_of(CONFIG, 16)
    assert {*batch["num_images"].tolist()} == {0, 1, 2}
    assert_matches_unpipelined(
        model(vocabulary_axis="stage"),
        params,
        batch,
        schedules=[schedule],
        meshes=[jaxpipe.make_mesh(stage=2, data=2)],
        microbatches=4,
        reference=reference(),
        floor=3e-3,  # the bias of keys
        zero=3,
        trainable=trainable,
    )


def test_padding_has_no_influence_and_images_have(params):
    batch = batch_of(CONFIG, 6)
    padding = jnp.arange(2) < 2 - batch["num_images"][:, None]
    before, noise = logits(params, batch), 100 * jax.random.normal(jax.random.key(9), (6, 2))
    changed = [
        logits(params, batch | {"images": jnp.where(mask[..., None, None, None], other, images)})
        for images in [batch["images"]]
        for other in [noise[..., None, None, None] * images]
        for mask in (padding, ~padding)
    ]
    np.testing.assert_array_equal(changed[0], before)
    differs = (changed[1] != before).any((1, 2))
    np.testing.assert_array_equal(differs, batch["num_images"] > 0)


def test_a_frozen_encoder_has_no_backward(params):
    """Neither matmuls nor residuals, though the gradient of the text's table passes it."""
    batch = batch_of(CONFIG, 8)

    def step(trainable):
        mesh = jaxpipe.make_mesh(stage=2)
        pipe = jaxpipe.Pipeline(
            model(), params, schedule="1f1b", mesh=mesh, microbatches=4, trainable=trainable
        )
        return pipe, jax.jit(pipe.value_and_grad).lower(pipe.placed_params, batch)

    (pipe, frozen), (_, whole) = step(TRAINED), step(None)
    of_encoder = rf"dot_general.*x{HIDDEN}(x\d+)?xf32>$"
    counts = [len(re.findall(of_encoder, w.as_text(), re.MULTILINE)) for w in (frozen, whole)]
    assert counts[0] < counts[1]
    of_encoder = rf"\[(?:\d+,)*{HIDDEN}(?:,\d+)*\]\S* dot\(.*op_name=\"(.*?)\""
    dots = re.findall(of_encoder, frozen.compile().as_text())
    assert {"F"} == {name for dot in dots for name in dot.split("/") if name in "FBW"}, dots
    layers, _ = traced_layers(pipe, batch)
    first, projector, *_ = (layers.kinds[n].split for n in layers.kind_of[1:])
    assert first.hands_back
    assert (first.until_b, first.until_w, first.crossing) == ((), (), ())
    assert not projector.hands_back
    cost, *_ = layer_costs(pipe, batch)
    assert cost.b == cost.w == 1 < cost.f  # an operation is the least that is counted


def test_no_family_of_hugging_face_has_its_images(params, tmp_path):
    with pytest.raises(ValueError, match="VisionLanguageConfig, of which the library has no model"):
        hugging_face.save(tmp_path, CONFIG, params)
