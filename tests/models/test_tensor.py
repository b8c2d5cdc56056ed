"""Tensor parallelism of models: the same loss and gradients as on one device."""

from __future__ import annotations

import functools

import jax
import pytest

import jaxpipe
from jaxpipe.testing import assert_matches_unpipelined
from models import gpt, tensor

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


def test_what_devices_cannot_share_is_said_with_both_numbers():
    (problem,) = tensor.problems(4, num_heads=6, sequence_length=128)
    assert problem.lines() == [
        "num_heads=6 is not divisible by tensor=4, whose devices share it.",
        "Nearest valid: 4, 8.",
    ]
