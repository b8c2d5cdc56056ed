"""Context parallelism of models: the same loss and gradients as on one device."""

from __future__ import annotations

import collections
import functools
import re

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.runtime.measure import traced
from jaxpipe.runtime.measure.memory import tree_bytes
from jaxpipe.schedule import catalog
from jaxpipe.testing import assert_matches_unpipelined
from models import gpt
from models.attention import causal_attention
from models.context import Context

SHAPE = {"vocab_size": 13, "sequence_length": 8, "num_layers": 4, "width": 16, "num_heads": 4}
LLAMA = {"num_kv_heads": 2, "mlp_width": 12, "tied": False}
GPT2 = {"positions": "learned", "norm": "layer", "activation": "gelu", "bias": True}
GEMMA = {"attention_soft_cap": 1.5, "window": 3, "global_every": 2}
SHAPES = {"unrolled": LLAMA, "stacked": GPT2, "tuple": GEMMA}
ZERO, REMAT, LAYOUTS = (3, 0, 1, 2), ("none", "dots", "full"), tuple(SHAPES)
EVERY = [
    (entry.name, axis, ZERO[n % 4], REMAT[n % 3], LAYOUTS[(n + n // 3) % 3])
    for n, entry in enumerate(catalog.executable())
    for axis in ("data", "tensor")
]
FEW = [("zb-v", "data", 3, "none", "stacked"), ("1f1b-fused", "tensor", 2, "full", "unrolled")]


def packed(length: int, *, rows: int) -> jax.Array:
    """Three documents in every row, of which context and tensor devices cut two."""
    return jnp.tile(jnp.array([0, 0, 0, 1, 1, 1, 1, 2]), (rows, length // 8))


@pytest.mark.pipeline
@pytest.mark.parametrize("case", FEW, ids=lambda case: "-".join(map(str, case)))
def test_gpt_equals_the_whole_model(case):
    schedule, axis, zero, remat, layout = case
    config = gpt.GPTConfig(**SHAPE, **SHAPES[layout], dropout=0.2)
    batch = {"tokens": jax.random.randint(jax.random.key(1), (8, 9), 0, 13)}
    if layout != "unrolled":
        batch["documents"] = packed(8, rows=8)
    assert_matches_unpipelined(
        gpt.model(
            config,
            vocabulary_axis="stage",
            tensor_axis="tensor" if axis == "tensor" else None,
            context_axis="context",
        ),
        gpt.init(config, jax.random.key(0)),
        batch,
        schedules=[schedule],
        meshes=[jaxpipe.make_mesh(stage=2, context=2, **{axis: 2})],
        microbatches=4,
        rng=jax.random.key(2),
        reference=functools.partial(jaxpipe.unpipelined.loss, gpt.model(config)),
        remat=remat,
        zero=zero,
        weights="unrolled" if layout == "unrolled" else "stacked",
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=lambda case: "-".join(map(str, case)))
def test_gpt_equals_the_whole_model_everywhere(case):
    test_gpt_equals_the_whole_model(case)


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"soft_cap": 0.5, "window": 5}])
def test_attention_sees_the_whole_sequence(options):
    """Four devices, each with two early and two late ones of 16 tokens."""
    context = Context("context")
    documents = packed(16, rows=2) if options else None
    attention = functools.partial(causal_attention, scale=0.7, documents_BS=documents, **options)

    def shared(q, k, v):
        return context.attend(attention, *(context.own(w, 1) for w in (q, k, v)))

    mesh, out = jaxpipe.make_mesh(stage=1, context=4), P(None, "context")
    on_devices = jax.shard_map(shared, mesh=mesh, in_specs=P(), out_specs=out, check_vma=False)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 2, 4))
    found, want = jax.jit(on_devices)(q, k, v), jax.jit(attention)(q, k, v)
    order = jnp.array([0, 7, 1, 6, 2, 5, 3, 4])
    want = want.reshape(2, 8, 2, 2, 4)[:, order].reshape(found.shape)
    chex.assert_trees_all_close(found, want, rtol=1e-5, atol=1e-6)


def test_what_devices_cannot_share_is_refused_with_both_numbers():
    config = gpt.GPTConfig(**SHAPE | {"sequence_length": 12}, **LLAMA)
    model = gpt.model(config, vocabulary_axis="stage", context_axis="context")
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    pipe = jaxpipe.Pipeline(
        model, params, schedule="1f1b", mesh=jaxpipe.make_mesh(stage=2, context=4)
    )
    batch = {"tokens": jax.ShapeDtypeStruct((8, 13), "int32")}
    message = (
        "sequence length=12 is not divisible by 8: each of the 4 devices along 'context' has an "
        "early and a late part of it.\nNearest valid: 8, 16."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(pipe.value_and_grad, pipe.placed_params, batch)
    with pytest.raises(ValueError, match=r"none is 'context', which Model\.axes names"):
        jaxpipe.Pipeline(model, params, schedule="1f1b", mesh=jaxpipe.make_mesh(stage=2))


def test_outputs_are_whole_sequences_in_order():
    config = gpt.GPTConfig(**SHAPE | {"num_layers": 2}, **LLAMA)
    params, found = gpt.init(config, jax.random.key(0)), []
    tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 13)
    for shared in ({}, {"context": 2, "tensor": 2}):
        axes = {f"{name}_axis": name for name in shared}
        pipe = jaxpipe.Pipeline(
            gpt.model(config, vocabulary_axis="stage", **axes),
            params,
            schedule="1f1b",
            mesh=jaxpipe.make_mesh(stage=2, **shared),
            microbatches=2,
        )
        found.append(jax.jit(pipe.outputs)(pipe.place(params), {"tokens": tokens}))
    chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-5)


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
