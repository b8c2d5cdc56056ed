"""Attention over blocks equals attention with a mask, as a loop and as kernels for GPUs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.runtime.layers.split import split_layer
from models import block_attention, flash_kernels
from models.block_attention import Scores

ROWS, LENGTH, HEADS, WIDTH = 2, 40, 4, 16
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


def assert_close(found, expected, tolerance):
    for w, reference in zip(found, expected, strict=True):
        assert jnp.abs(w - reference).max() <= tolerance * jnp.abs(reference).max()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernels", [False, True], ids=["loop", "kernels"])
def test_blocks_give_what_a_mask_gives(monkeypatch, case, kernels):
    monkeypatch.setattr(block_attention, "_BLOCK", 16)  # 40 keys are no whole blocks
    monkeypatch.setattr(flash_kernels, "BLOCK", (8, 8))
    monkeypatch.setattr(block_attention, "_in_kernels", lambda q, k: kernels)
    assert_close(results(in_blocks, case), results(masked, case), 1e-5)


def test_keys_behind_the_last_query_have_no_influence(monkeypatch):
    monkeypatch.setattr(block_attention, "_BLOCK", 16)
    q, *kv = arrays(len(SLICE))
    filled = [jnp.where(jnp.arange(LENGTH)[:, None, None] > SLICE[-1], 1e4, w) for w in kv]

    def loss(kv):
        return jnp.square(in_blocks(q, *kv, SLICE)).sum()

    for found, expected in zip(jax.grad(loss)(filled), jax.grad(loss)(kv), strict=True):
        assert jnp.array_equal(found, expected)
        assert not found[:, SLICE[-1] + 1 :].any()


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_devices_of_a_context_compute_equally_many_blocks(devices):
    """2 c + 1 of a part's pairs, where half a part of each diagonal is not needed."""
    part, num_blocks = 1024, []
    for device in range(devices):
        starts = part * device, part * (2 * devices - 1 - device)
        seen = [
            block_attention._Seen.of(
                start + jnp.arange(part),
                None,
                (1, 2 * devices * part),
                0,
                flash_kernels.BLOCK,
            )
            for start in starts
        ]
        num_blocks.append(sum(int((s.hi - s.lo).sum()) for s in seen))
    pairs = num_blocks[0] * flash_kernels.BLOCK[0] * flash_kernels.BLOCK[1]
    assert len(set(num_blocks)) == 1
    assert pairs <= 1.1 * 2 * devices * part**2


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
