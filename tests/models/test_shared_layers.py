"""Layers that tensor or context devices share: what each keeps, exchanges and returns."""

import collections
import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.runtime import memory, tracing
from jaxpipe.runtime.memory import tree_bytes
from models import gpt
from models.attention import attend, causal_attention
from models.context import Context

SHAPE = {"vocab_size": 13, "sequence_length": 8, "num_layers": 4, "width": 16, "num_heads": 4}
LLAMA = {"num_kv_heads": 2, "mlp_width": 12, "tied": False}


def pipeline(config, schedule="1f1b", params=None, remat="none", **shared) -> jaxpipe.Pipeline:
    """A pipeline on two stages with these axes; by shapes alone without ``params``."""
    axes = {f"{name}_axis": name for name in shared}
    return jaxpipe.Pipeline(
        gpt.model(config, vocabulary_axis="stage", **axes),
        params or jax.eval_shape(lambda: gpt.init(config, jax.random.key(0))),
        schedule=schedule,
        mesh=jaxpipe.make_mesh(stage=2, **shared),
        microbatches=4,
        remat=remat,
    )


def tokens(rows: int, length: int) -> dict:
    return {"tokens": jax.ShapeDtypeStruct((rows, length + 1), "int32")}


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 4), (16, 4)])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"soft_cap": 0.5, "window": 5}])
def test_attention_sees_the_whole_sequence(options, heads, kv_heads):
    """Four devices, each with two early and two late ones of 16 tokens."""
    context = Context("context")
    documents = jnp.tile(jnp.array([0, 0, 0, 1, 1, 1, 1, 2]), (2, 2)) if options else None
    sinks = jnp.linspace(-1.0, 1.0, heads) if options else None
    attention = functools.partial(causal_attention, scale=0.7, **options)

    def shared(q, k, v):
        own = tuple(context.own(w, 1) for w in (q, k, v))
        return attend(context, attention, own, documents, None, 0, sinks_N=sinks)[0]

    def whole(q, k, v):
        return attention(q, k, v, documents_BS=documents, sinks_N=sinks)

    mesh, out = jaxpipe.make_mesh(stage=1, context=4), P(None, "context")
    on_devices = jax.shard_map(shared, mesh=mesh, in_specs=P(), out_specs=out, check_vma=False)
    q = jax.random.normal(jax.random.key(0), (2, 16, heads, 4))
    k, v = jax.random.normal(jax.random.key(1), (2, 2, 16, kv_heads, 4))
    exchanges = "all_to_all" in str(jax.make_jaxpr(on_devices)(q, k, v))
    assert exchanges == (heads == 8)  # 8 + 4 heads are at most 4 x 4
    found, want = jax.jit(on_devices)(q, k, v), jax.jit(whole)(q, k, v)
    order = jnp.array([0, 7, 1, 6, 2, 5, 3, 4])
    want = want.reshape(2, 8, 2, heads, 4)[:, order].reshape(found.shape)
    chex.assert_trees_all_close(found, want, rtol=1e-5, atol=1e-6)


def test_outputs_are_whole_sequences_in_order():
    config = gpt.GPTConfig(**SHAPE | {"num_layers": 2}, **LLAMA)
    params, found = jax.jit(gpt.init, static_argnums=0)(config, jax.random.key(0)), []
    batch = {"tokens": jax.random.randint(jax.random.key(1), (8, 9), 0, 13)}
    for shared in ({}, {"context": 2, "tensor": 2}):
        pipe = pipeline(config, params=params, **shared)
        found.append(jax.jit(pipe.outputs)(pipe.place(params), batch))
    chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("axis", "kv_heads", "remat"),
    [
        *(("context", 2, "none"), ("context", 2, "full"), ("context", 8, "dots")),
        *(("context", 8, "full"), ("tensor", 8, "none")),
    ],
)
def test_four_devices_keep_a_quarter_each(axis, kv_heads, remat):
    wide = {"width": 64, "num_heads": 8, "mlp_width": 256, "sequence_length": 64}
    wide["num_kv_heads"] = kv_heads
    config, batch, found = gpt.GPTConfig(**SHAPE | wide), tokens(8, 64), []
    for devices in (1, 4):
        pipe = pipeline(config, "zb-h1", remat=remat, **{axis: devices})
        kept = memory.buffers(pipe, batch)
        kept["residuals"] = [kept.pop(name, []) for name in ("until_b", "until_w")]
        found.append({name: tree_bytes(tree) for name, tree in kept.items()})
    whole, part = found
    assert 4 * part["x"] == whole["x"]
    # Tensor devices have the whole width between layers, in norms.
    share = 0.29 if (axis, remat) == ("tensor", "none") else 0.251
    assert part["residuals"] <= share * whole["residuals"]
    assert part["crossing"] <= (0.29 if axis == "tensor" else 0.26) * whole["crossing"]
    if axis == "context":
        split = tracing.traced_layers(pipe, batch)[0].kinds[0].split
        forward, b = collectives(split.traced.forward), collectives(split.b)
        if kv_heads == 8:  # as many heads as can be exchanged
            assert forward == {"all_to_all": 4}
            assert b == {"all_to_all": 8 if remat == "full" else 4}  # B then repeats F
        else:
            again = 0 if remat == "none" else 2  # likewise, or gathers what F kept first
            assert forward == {"all_gather": 2}
            assert b == +collections.Counter(all_gather=again, reduce_scatter=2)
        assert not collectives([*split.again, *split.w])


def collectives(eqns) -> collections.Counter[str]:
    names = ("all_gather", "reduce_scatter", "psum", "pmax", "ppermute", "all_to_all")
    return collections.Counter(e.primitive.name for e in eqns if e.primitive.name in names)


@pytest.mark.parametrize(
    ("options", "axis", "length", "message"),
    [
        (
            *({"num_heads": 12, "num_kv_heads": 3, "head_size": 4}, "tensor", 8),
            r"3 key heads of 4 are not divisible by the 4 devices .*\nNearest valid: 2, 4\.",
        ),
        (
            *({}, "tensor", 6),
            r"sequence length=6 is not divisible by the 4 devices .*\nNearest valid: 4, 8\.",
        ),
        (
            *(LLAMA | {"sequence_length": 12}, "context", 12),
            r"length=12 is not divisible by 8: each of the 4 devices along 'context' has an early "
            r"and a late part of it\.\nNearest valid: 8, 16\.",
        ),
    ],
)
def test_what_devices_cannot_share_is_refused_with_both_numbers(options, axis, length, message):
    pipe = pipeline(gpt.GPTConfig(**SHAPE | options), **{axis: 4})
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(pipe.value_and_grad, pipe.placed_params, tokens(8, length))
