"""Tensor parallelism of models: the same loss and gradients as on one device."""

from __future__ import annotations

import functools

import jax
import pytest

import jaxpipe
from jaxpipe.testing import assert_matches_unpipelined
from models import gpt

SHAPE = {"vocab_size": 13, "sequence_length": 8, "num_layers": 4, "width": 16, "num_heads": 4}
LLAMA = {"num_kv_heads": 2, "mlp_width": 12, "tied": False}
GPT2 = {"positions": "learned", "norm": "layer", "activation": "gelu", "bias": True}
CASES = [
    (LLAMA, "zb-v", 3, "dots", {"weights": "unrolled"}),
    (GPT2, "1f1b-fused", 2, "full", {}),
]


@pytest.mark.pipeline
@pytest.mark.parametrize(("shape", "schedule", "zero", "remat", "options"), CASES)
def test_gpt_equals_the_whole_model(shape, schedule, zero, remat, options):
    config = gpt.GPTConfig(**SHAPE, **shape, dropout=0.2)
    whole = gpt.model(config)
    assert_matches_unpipelined(
        gpt.model(config, vocabulary_axis="stage", tensor_axis="tensor"),
        gpt.init(config, jax.random.key(0)),
        {"tokens": jax.random.randint(jax.random.key(1), (8, 9), 0, 13)},
        schedules=[schedule],
        meshes=[jaxpipe.make_mesh(stage=2, data=2, tensor=2)],
        microbatches=4,
        rng=jax.random.key(2),
        reference=functools.partial(jaxpipe.unpipelined.loss, whole),
        remat=remat,
        zero=zero,
        **options,
    )


def test_what_devices_cannot_share_is_refused_with_both_numbers():
    config = gpt.GPTConfig(**SHAPE, **LLAMA)
    model = gpt.model(config, vocabulary_axis="stage", tensor_axis="tensor")
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    mesh = jaxpipe.make_mesh(stage=2, tensor=4)
    pipe = jaxpipe.Pipeline(model, params, schedule="1f1b", mesh=mesh)
    for length, message in (
        (8, "num_kv_heads=2 is not divisible by the 4 devices along 'tensor', which share it"),
        (6, r"sequence length=6 is not divisible by the 4 devices .*\nNearest valid: 4, 8\."),
    ):
        tokens = jax.ShapeDtypeStruct((4, length + 1), "int32")
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(pipe.value_and_grad, pipe.placed_params, {"tokens": tokens})
