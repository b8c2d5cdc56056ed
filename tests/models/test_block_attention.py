"""Attention over blocks equals attention with a mask, as a loop and as kernels for GPUs."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe import unpipelined
from jaxpipe.planning.without_devices import attention_of_gpus
from jaxpipe.runtime.layers.split import split_layer
from models import block_attention, flash_kernels, gpt
from models.attention import attend
from models.block_attention import Scores
from models.context import Context

ROWS, LENGTH, HEADS, WIDTH = 2, 40, 4, 24  # kernels have heads of 16, 32, ...
SCALE = 0.3

KEYS = jax.random.split(jax.random.key(0), 6)
DOCUMENTS = jnp.sort(jax.random.randint(KEYS[5], (ROWS, LENGTH), 0, 5))
SINKS = jax.random.normal(KEYS[3], (HEADS,))

ALL, SLICE = jnp.arange(LENGTH), 20 + jnp.arange(16)
TWO_PARTS = jnp.concatenate((jnp.arange(8), 32 + jnp.arange(8)))
CASES: dict[str, tuple[jax.Array, dict[str, Any]]] = {
    "causal": (ALL, {}),
    "documents": (ALL, {"documents_BS": DOCUMENTS}),
    "windowed slice of documents": (SLICE, {"documents_BS": DOCUMENTS, "window": 7}),
    "sinks": (ALL, {"sinks_N": SINKS, "window": 5}),
    "soft cap, two parts": (TWO_PARTS, {"soft_cap": 1.5}),
    "slice with sinks": (SLICE, {"sinks_N": SINKS, "documents_BS": DOCUMENTS}),
}


def arrays(num_queries: int) -> list[jax.Array]:
    shapes = (num_queries, HEADS), (LENGTH, 2), (LENGTH, 2)
    return [
        jax.random.normal(key, (ROWS, length, heads, WIDTH))
        for key, (length, heads) in zip(KEYS, shapes, strict=False)
    ]


def masked(q, k, v, positions, *, window=0, soft_cap=0.0, documents_BS=None, sinks_N=None):
    """Attention from its definition."""
    distance = positions[:, None] - jnp.arange(LENGTH)
    seen = ((distance >= 0) & (distance < (window or LENGTH)))[None]
    if documents_BS is not None:
        seen = seen & (documents_BS[:, positions][:, :, None] == documents_BS[:, None])
    k, v = (jnp.repeat(w, HEADS // w.shape[2], axis=2) for w in (k, v))
    scores = SCALE * jnp.einsum("btnh,bsnh->bnts", q, k)
    scores = soft_cap * jnp.tanh(scores / soft_cap) if soft_cap else scores
    weights = jnp.exp(jnp.where(seen[:, None], scores, -jnp.inf))
    total = weights.sum(axis=-1, keepdims=True)
    if sinks_N is not None:
        total += jnp.exp(sinks_N)[:, None, None]
    return jnp.einsum("bnts,bsnh->btnh", weights / total, v)


def in_blocks(q, k, v, positions, *, window=0, soft_cap=0.0, **seen):
    scores = Scores(SCALE, window, soft_cap)
    return block_attention.block_attention(q, k, v, positions, scores, **seen)


def results(attention, case: str, dtype=jnp.float32):
    positions, options = CASES[case]
    dmixed = jax.random.normal(KEYS[4], (ROWS, len(positions), HEADS, WIDTH))
    sinks = {name: w for name, w in options.items() if name == "sinks_N"}

    def product(qkv, sinks):
        mixed = attention(*qkv, positions, **options | sinks)
        return jnp.vdot(dmixed, mixed.astype(jnp.float32)), mixed

    qkv = [w.astype(dtype) for w in arrays(len(positions))]
    grads, mixed = jax.jit(jax.grad(product, (0, 1), has_aux=True))(qkv, sinks)
    return [mixed, *jax.tree.leaves(grads)]


@functools.cache
def expected(case: str):
    return results(masked, case)


def assert_close(found, expected, tolerance):
    for w, reference in zip(found, expected, strict=True):
        assert jnp.abs(w - reference).max() <= tolerance * jnp.abs(reference).max()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernels", [False, True], ids=["loop", "kernels"])
def test_blocks_give_what_a_mask_gives(monkeypatch, case, kernels):
    monkeypatch.setattr(block_attention, "BLOCK", 16)  # 40 keys are no whole blocks
    monkeypatch.setattr(flash_kernels, "BLOCK", (8, 8))
    monkeypatch.setattr(block_attention, "_in_kernels", lambda q, k: kernels)
    assert_close(results(in_blocks, case), expected(case), 1e-5)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_devices_of_a_context_compute_equally_many_blocks(devices):
    """Half of all pairs, shared evenly, and half a block of each on the diagonal."""
    part, context = 512, Context("context")
    length = 2 * devices * part

    def num_blocks(q, k, v, positions_T, **options):
        seen = block_attention._Seen.of(positions_T, None, k.shape[:2], 0, flash_kernels.BLOCK)
        return (seen.hi - seen.lo).sum(keepdims=True)[0]

    def shared(w_BSNH):
        return attend(context, num_blocks, [context.own(w_BSNH, 1)] * 3, None, None, 0)[0]

    mesh = jaxpipe.make_mesh(stage=1, context=devices)
    on_devices = jax.shard_map(
        shared, mesh=mesh, in_specs=P(), out_specs=P("context"), check_vma=False
    )
    per_device = jax.jit(on_devices)(jnp.zeros((1, length, 1, 1)))
    assert per_device.min() == per_device.max()
    computed = per_device.sum() * flash_kernels.BLOCK[0] * flash_kernels.BLOCK[1]
    assert computed <= 1.1 * length**2 / 2


def test_blocks_of_other_documents_are_left_out():
    documents = jnp.arange(4096)[None] // 512
    seen = block_attention._Seen.of(
        jnp.arange(4096), documents, documents.shape, 0, flash_kernels.BLOCK
    )
    pairs = int((seen.hi - seen.lo).sum()) * flash_kernels.BLOCK[0] * flash_kernels.BLOCK[1]
    assert pairs <= 1.25 * 8 * 512**2 / 2


def test_a_policy_of_dots_keeps_what_attention_returns():
    qkv = [jnp.zeros((1, 8, 2, 4))] * 3

    def layer(w, x):
        q, k, v = (x * one for one in w)
        return in_blocks(q, k, v, jnp.arange(8))

    split = split_layer(layer, qkv, qkv[0], remat="dots")
    kept = [leaf.shape for leaf in (*split.until_b, *split.until_w)]
    assert (1, 2, 8) in kept  # the sums of weights: without them, B would attend again
    names = [str(eqn.params.get("name")) for eqn in (*split.b, *split.w)]
    assert functools.reduce(lambda n, name: n + ("attention" in name), names, 0) == 1


HEADS_ON_GPUS = {
    "documents": {"num_kv_heads": 1},
    "sinks and windows": {"attention_sinks": True, "window": 64, "global_every": 2},
    "soft cap": {"attention_soft_cap": 50.0},
    "heads of 80": {"head_size": 80},
    "latent attention, heads of 192": {
        "kv_rank": 32, "head_size": 128, "rotary_size": 64, "value_size": 128
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS_ON_GPUS)
@pytest.mark.parametrize("on_gpus", [False, True], ids=["loop", "kernels"])
def test_no_array_of_a_layer_has_queries_and_keys(name, on_gpus):
    """Nor of its gradient; on GPUs, that runs three kernels."""
    length = 1024
    config = gpt.GPTConfig(
        vocab_size=8, sequence_length=length, num_layers=1, width=64, num_heads=2,
        dtype="bfloat16", mlp_width=96, **HEADS_ON_GPUS[name],
    )  # fmt: skip
    model = gpt.model(config)
    rows = jnp.zeros((1, length), jnp.int32)
    batch = {"tokens": rows, "targets": rows, "documents": rows}

    def gradients(params):
        return jax.grad(functools.partial(unpipelined.loss, model))(params, batch)

    with attention_of_gpus() if on_gpus else contextlib.nullcontext():
        params = jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0))
        program = str(jax.make_jaxpr(gradients)(params))
    assert f"{length},{length}]" not in program
    assert program.count("pallas_call[") == (3 if on_gpus else 0)
