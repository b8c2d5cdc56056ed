"""Context parallelism of models: the same loss and gradients as on one device."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import pytest

import jaxpipe
from jaxpipe.runtime.measure import traced
from jaxpipe.runtime.measure.memory import tree_bytes
from jaxpipe.testing import assert_matches_unpipelined
from models import gpt

SHAPE = {"vocab_size": 13, "sequence_length": 8, "num_layers": 2, "width": 16, "num_heads": 4}
LLAMA = {"num_kv_heads": 2, "mlp_width": 12, "tied": False, "num_layers": 4}
GPT2 = {"positions": "learned", "norm": "layer", "activation": "gelu", "bias": True}
GEMMA = {"attention_soft_cap": 1.5, "window": 3}
FEW = [
    (LLAMA, {"data": 2}, "zb-v", 3, "none", {"weights": "unrolled"}),
    (GPT2, {"tensor": 2}, "zb-h1", 0, "dots", {}),
    (GEMMA, {"data": 2}, "1f1b-fused", 2, "full", {}),
]


@pytest.mark.pipeline
@pytest.mark.parametrize(("shape", "mesh", "schedule", "zero", "remat", "options"), FEW)
def test_gpt_equals_the_whole_model(shape, mesh, schedule, zero, remat, options):
    config = gpt.GPTConfig(**SHAPE | shape, dropout=0.2)
    batch = {"tokens": jax.random.randint(jax.random.key(1), (8, 9), 0, 13)}
    if shape is not LLAMA:  # every row holds three documents, and the sequence is cut within two
        batch["documents"] = jnp.tile(jnp.array([0, 0, 0, 1, 1, 1, 1, 2]), (8, 1))
    assert_matches_unpipelined(
        gpt.model(
            config,
            vocabulary_axis="stage",
            tensor_axis="tensor" if "tensor" in mesh else None,
            context_axis="context",
        ),
        gpt.init(config, jax.random.key(0)),
        batch,
        schedules=[schedule],
        meshes=[jaxpipe.make_mesh(stage=2, context=2, **mesh)],
        microbatches=4,
        rng=jax.random.key(2),
        reference=functools.partial(jaxpipe.unpipelined.loss, gpt.model(config)),
        remat=remat,
        zero=zero,
        **options,
    )


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_four_devices_keep_a_quarter_each(remat):
    config = gpt.GPTConfig(**SHAPE | {"sequence_length": 64, "width": 64, "num_heads": 8})
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    model = gpt.model(config, vocabulary_axis="stage", context_axis="context")
    batch = {"tokens": jax.ShapeDtypeStruct((8, 65), "int32")}
    found = []
    for devices in (1, 4):
        mesh = jaxpipe.make_mesh(stage=2, context=devices)
        pipe = jaxpipe.Pipeline(
            model, params, schedule="zb-h1", mesh=mesh, microbatches=4, remat=remat
        )
        kept = traced.buffers(pipe, batch)
        kept["residuals"] = [kept.pop(name, []) for name in ("until_b", "until_w")]
        found.append({name: tree_bytes(tree) for name, tree in kept.items()})
    whole, part = found
    assert 4 * part["x"] == whole["x"]
    assert 4 * part["residuals"] <= whole["residuals"]
    assert part["crossing"] <= 0.26 * whole["crossing"]
    split = traced.layers(pipe, batch)[0].kinds[0].split
    again = 0 if remat == "none" else 2  # B then repeats F, or gathers what F kept before it begins
    assert collectives(split.traced.forward.jaxpr.eqns) == {"all_gather": 2}
    assert collectives(split.b) == +collections.Counter(all_gather=again, reduce_scatter=2)
    assert not collectives([*split.again, *split.w])


def collectives(eqns) -> collections.Counter[str]:
    names = ("all_gather", "reduce_scatter", "psum", "pmax", "ppermute", "all_to_all")
    return collections.Counter(e.primitive.name for e in eqns if e.primitive.name in names)
