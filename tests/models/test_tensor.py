"""Tensor parallelism of models: the same loss and gradients as on one device."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from batches import batch_of

import jaxpipe
from jaxpipe.runtime.measure import traced
from jaxpipe.runtime.measure.memory import tree_bytes
from jaxpipe.schedule import catalog
from jaxpipe.testing import assert_matches_unpipelined
from models import bert, gpt, transformer

SHAPE = {"vocab_size": 13, "sequence_length": 8, "num_layers": 4, "width": 16, "num_heads": 4}
QWEN = {"num_kv_heads": 1, "mlp_width": 12, "tied": False, "qk_norm": True, "qkv_bias": True}
GPT2 = {"positions": "learned", "norm": "layer", "activation": "gelu", "bias": True}
CASES = [
    (QWEN, "zb-v", 3, "dots", {"weights": "unrolled"}),  # both devices have the one key head
    (GPT2, "1f1b-fused", 2, "full", {}),
]


BERT = bert.BERTConfig(
    vocab_size=19, sequence_length=8, num_layers=2, width=16, num_heads=4, mlp_width=12,
    next_sentence=True, dropout=0.2,
)  # fmt: skip
TRANSFORMER = transformer.TransformerConfig(
    vocab_size=19, sequence_length=8, num_encoder_layers=1, num_decoder_layers=1, width=16,
    num_heads=4, mlp_width=12, dropout=0.2,
)  # fmt: skip
ENCODERS = [
    (bert, BERT, ("1f1b", 3, "dots", "unrolled")),
    (transformer, TRANSFORMER, ("1f1b-fused", 2, "full", "stacked")),
]
EVERY = [
    (module, config, (entry.name, n % 4, ("none", "dots", "full")[n // 2 % 3], "stacked"))
    for n, entry in enumerate(catalog.executable())
    for module, config in (
        (bert, dataclasses.replace(BERT, num_layers=8)),
        (
            transformer,
            dataclasses.replace(TRANSFORMER, num_encoder_layers=4, num_decoder_layers=4),
        ),
    )
]


@pytest.mark.pipeline
@pytest.mark.parametrize(("shape", "schedule", "zero", "remat", "options"), CASES)
def test_gpt_equals_the_whole_model(shape, schedule, zero, remat, options):
    config = gpt.GPTConfig(**SHAPE, **shape, dropout=0.2)
    whole = gpt.model(config)
    batch = {"tokens": jax.random.randint(jax.random.key(1), (8, 9), 0, 13)}
    if shape is GPT2:  # every row holds three documents, and the sequence is cut within one
        batch["documents"] = jnp.tile(jnp.array([0, 0, 0, 1, 1, 1, 1, 2]), (8, 1))
    assert_matches_unpipelined(
        gpt.model(config, vocabulary_axis="stage", tensor_axis="tensor"),
        gpt.init(config, jax.random.key(0)),
        batch,
        schedules=[schedule],
        meshes=[jaxpipe.make_mesh(stage=2, data=2, tensor=2)],
        microbatches=4,
        rng=jax.random.key(2),
        reference=functools.partial(jaxpipe.unpipelined.loss, whole),
        remat=remat,
        zero=zero,
        **options,
    )


@pytest.mark.pipeline
@pytest.mark.parametrize("case", ENCODERS, ids=["bert", "transformer"])
def test_encoders_equal_the_whole_model(case):
    module, config, (schedule, zero, remat, weights) = case
    batch = batch_of(config, 16)
    if module is transformer:  # as many inputs as devices divide
        batch["target"] = jnp.pad(batch["target"], ((0, 0), (0, 1)))
    assert_matches_unpipelined(
        module.model(config, vocabulary_axis="stage", tensor_axis="tensor"),
        module.init(config, jax.random.key(0)),
        batch,
        schedules=[schedule],
        meshes=[jaxpipe.make_mesh(stage=2, data=2, tensor=2)],
        microbatches=4,
        rng=jax.random.key(2),
        reference=functools.partial(jaxpipe.unpipelined.loss, module.model(config)),
        floor=1e-3,  # the bias of keys has no gradient but rounding
        remat=remat,
        zero=zero,
        weights=weights,
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=lambda case: f"{case[0].__name__}-{case[2][0]}")
def test_encoders_equal_the_whole_model_everywhere(case):
    test_encoders_equal_the_whole_model(case)


def test_what_devices_cannot_share_is_refused_with_both_numbers():
    shape = {"num_heads": 12, "num_kv_heads": 3, "head_size": 4}
    config = gpt.GPTConfig(**SHAPE | shape)
    model = gpt.model(config, vocabulary_axis="stage", tensor_axis="tensor")
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    mesh = jaxpipe.make_mesh(stage=2, tensor=4)
    pipe = jaxpipe.Pipeline(model, params, schedule="1f1b", mesh=mesh)
    for length, message in (
        (8, r"3 key heads of 4 are not divisible by the 4 devices .*\nNearest valid: 2, 4\."),
        (6, r"sequence length=6 is not divisible by the 4 devices .*\nNearest valid: 4, 8\."),
    ):
        tokens = jax.ShapeDtypeStruct((4, length + 1), "int32")
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(pipe.value_and_grad, pipe.placed_params, {"tokens": tokens})


@pytest.mark.parametrize(("remat", "share"), [("none", 0.29), ("dots", 0.251), ("full", 0.251)])
def test_four_devices_keep_a_quarter_each(remat, share):
    config = gpt.GPTConfig(**SHAPE | {"num_heads": 8, "width": 64, "mlp_width": 256})
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    model = gpt.model(config, vocabulary_axis="stage", tensor_axis="tensor")
    found = []
    for devices in (4, 1):
        mesh = jaxpipe.make_mesh(stage=2, tensor=devices)
        pipe = jaxpipe.Pipeline(
            model, params, schedule="zb-h1", mesh=mesh, microbatches=4, remat=remat
        )
        kept = traced.buffers(pipe, {"tokens": jax.ShapeDtypeStruct((8, 9), "int32")})
        kept["residuals"] = [kept.pop(name, []) for name in ("until_b", "until_w")]
        found.append({name: tree_bytes(tree) for name, tree in kept.items()})
    part, whole = found
    assert 4 * part["x"] == whole["x"]
    assert part["residuals"] <= share * whole["residuals"]
    assert part["crossing"] <= 0.29 * whole["crossing"]
