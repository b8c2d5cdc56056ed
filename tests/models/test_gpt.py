"""The GPT: shapes, causality, grouped queries, sizes, randomness, and the split vocabulary."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe
from jaxpipe.runtime.layers.split import split_layer
from models import blocks, gpt, rotary
from models.gpt import GPTConfig

TINY = GPTConfig(
    vocab_size=61, sequence_length=12, num_layers=2, width=16, num_heads=4, num_kv_heads=2
)
GPT2 = dataclasses.replace(
    TINY, num_kv_heads=None, positions="learned", norm="layer", activation="gelu", bias=True
)

GEMMA = dataclasses.replace(
    TINY, num_layers=3, head_size=6, activation="geglu", post_norm=True, qk_norm=True,
    scaled_embedding=True, query_scalar=5, attention_soft_cap=1.5, logit_soft_cap=0.3, window=4,
    global_every=3, local_rope_theta=100.0,
)  # fmt: skip

pytestmark = pytest.mark.pipeline
FAMILIES = [TINY, GPT2, dataclasses.replace(TINY, tied=False, norm="layer")]
ids = pytest.mark.parametrize("config", FAMILIES, ids=["llama", "gpt2", "untied"])


# Compiled once a config: run operation by operation, the same calls take most of the suite's time.
init = jax.jit(gpt.init, static_argnums=0)
logits = jax.jit(gpt.logits, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def loss_of(config, params, batch):
    return jaxpipe.unpipelined.loss(gpt.model(config), params, batch)


def tokens(config, *, rows=3, extra=0):
    shape = (rows, config.sequence_length + extra)
    return jax.random.randint(jax.random.key(9), shape, 0, config.vocab_size)


@ids
def test_a_position_sees_no_later_token(config):
    params = init(config, jax.random.key(0))
    before = tokens(config)
    after = before.at[:, 7].add(1) % config.vocab_size
    scores, changed = (logits(config, params, t) for t in (before, after))
    np.testing.assert_array_equal(scores[:, :7], changed[:, :7])
    assert not np.allclose(scores[:, 7:], changed[:, 7:])


def test_rotary_scores_depend_on_distance_only():
    """Heads that are the same vector everywhere: rotated scores are constant along diagonals."""
    head = jax.random.normal(jax.random.key(0), (8,))
    turns = rotary.frequencies(dataclasses.replace(TINY, head_size=8, rope_theta=100.0))
    rotated = rotary.rotate(jnp.broadcast_to(head, (1, 6, 1, 8)), turns, jnp.arange(6))[0, :, 0]
    scores = rotated @ rotated.T
    for distance in range(6):
        diagonal = jnp.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0] * jnp.ones_like(diagonal), rtol=1e-5)


def test_flops_count_what_is_multiplied():
    """Without its lookups and attention a model does 6 operations a parameter and token."""
    attention = 12 * TINY.num_layers * TINY.width * TINY.sequence_length
    assert gpt.flops_per_token(TINY) == 6 * gpt.num_parameters(TINY) + attention
    for other in (
        dataclasses.replace(TINY, tied=False),
        dataclasses.replace(TINY, positions="learned"),
    ):
        assert gpt.flops_per_token(other) == gpt.flops_per_token(TINY)
    window = dataclasses.replace(TINY, window=TINY.sequence_length // 2, global_every=2)
    assert gpt.flops_per_token(window) == 6 * gpt.num_parameters(TINY) + attention * 3 // 4


@pytest.mark.parametrize("config", [GPT2, GEMMA], ids=["gpt2", "gemma"])
def test_model_and_logits_are_the_same_function(config):
    params = init(config, jax.random.key(0))
    batch = {"tokens": tokens(config, extra=1)}
    scores = jax.nn.log_softmax(logits(config, params, batch["tokens"][:, :-1]))
    expected = -jnp.take_along_axis(scores, batch["tokens"][:, 1:, None], axis=-1).mean()
    np.testing.assert_allclose(loss_of(config, params, batch), expected, rtol=1e-6)


def test_a_local_layer_sees_its_window_and_a_global_one_sees_all():
    """Two local layers of 4 tokens reach 6 tokens back; a global one after them, to the first."""
    local = dataclasses.replace(TINY, window=4)
    mixed = dataclasses.replace(local, num_layers=3, global_every=3, attention_soft_cap=1.5)
    assert [kind.is_local for kind in mixed.layer_kinds] == [True, True, False]
    before = tokens(TINY)
    after = before.at[:, 2].add(1) % TINY.vocab_size
    for config, last in ((local, 8), (mixed, 11)):
        params = init(config, jax.random.key(0))
        changed = np.abs(logits(config, params, before) - logits(config, params, after)).max((0, 2))
        np.testing.assert_array_equal(changed > 0, [2 <= n <= last for n in range(12)])


def test_caps_bound_logits_and_scaled_embeddings_have_the_size_of_the_width():
    params = jax.tree.map(lambda leaf: 40 * leaf, init(GEMMA, jax.random.key(0)))
    assert 0.29 < np.abs(logits(GEMMA, params, tokens(GEMMA))).max() <= 0.3
    batch = {"tokens": tokens(GEMMA, extra=1)}
    x, plain = (
        gpt.model(config).embed(params, batch, None)
        for config in (GEMMA, dataclasses.replace(GEMMA, scaled_embedding=False))
    )
    np.testing.assert_allclose(x, 4 * plain, rtol=1e-6)


def test_stretched_wavelengths():
    """All of them, or those only that fit seldom into the original length (Llama 3)."""
    plain = dataclasses.replace(TINY, head_size=16, rope_theta=500.0)
    stretched = dataclasses.replace(plain, rope_factor=8.0)
    llama3 = dataclasses.replace(stretched, rope_original_length=64)
    kept, every, some = (rotary.frequencies(config) for config in (plain, stretched, llama3))
    np.testing.assert_allclose(every, kept / 8, rtol=1e-6)
    fits = 64 * kept / (2 * math.pi)
    assert {*(fits > 4).tolist()} == {*(fits < 1).tolist()} == {True, False}
    np.testing.assert_allclose(some[fits > 4], kept[fits > 4], rtol=1e-6)
    np.testing.assert_allclose(some[fits < 1], every[fits < 1], rtol=1e-6)
    local = dataclasses.replace(stretched, window=4, local_rope_theta=100.0)
    apart = rotary.frequencies(dataclasses.replace(plain, rope_theta=100.0))
    np.testing.assert_array_equal(rotary.frequencies(local, is_local=True), apart)
    between = (fits >= 1) & (fits <= 4)
    assert np.all((some[between] > every[between]) & (some[between] < kept[between]))


def test_residual_projections_start_smaller():
    config = dataclasses.replace(TINY, width=64, num_layers=8)
    layers = init(config, jax.random.key(0))["layers"]
    np.testing.assert_allclose(layers["attention"]["qkv"]["kernel"].std(), 0.02, rtol=0.05)
    np.testing.assert_allclose(layers["mlp"]["down"]["kernel"].std(), 0.02 / 4, rtol=0.05)


@ids
def test_weight_half_of_the_backward_is_the_weight_matmuls_only(config):
    model = gpt.model(config)
    params = jax.tree.map(lambda leaf: leaf[0], init(config, jax.random.key(0))["layers"])
    x = jax.random.normal(jax.random.key(1), (2, config.sequence_length, config.width))
    split = split_layer(model.layer, params, x, None, None)
    program = jax.make_jaxpr(lambda *args: split.backward_weights(*args, None, None))(
        params, split.until_w, split.crossing
    )
    matrices = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2]
    assert str(program).count("dot_general[") == len(matrices)


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (blocks.matmul, jnp.matmul),
        (functools.partial(blocks.einsum, "ij,jk->ik"), functools.partial(jnp.einsum, "ij,jk->ik")),
    ],
    ids=["matmul", "einsum"],
)
def test_kernel_gradients_are_those_of_a_plain_matmul(ours, plain):
    x, kernel = jax.random.normal(jax.random.key(0), (2, 5, 5))
    found, wanted = (
        jax.grad(lambda *args, matmul=matmul: jnp.sin(matmul(*args)).sum(), (0, 1))(x, kernel)
        for matmul in (ours, plain)
    )
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [TINY, GPT2], ids=["rotary", "learned"])
def test_documents_of_a_row_do_not_see_each_other(config):
    """The loss of two documents in a row is the mean of their own."""
    row = tokens(config, rows=2, extra=1)
    # At the initial scale, attention hardly matters.
    params = jax.tree.map(lambda leaf: 8 * leaf, init(config, jax.random.key(0)))
    half = config.sequence_length // 2
    documents = jnp.broadcast_to(jnp.arange(2 * half) // half, (2, 2 * half))
    packed = loss_of(config, params, {"tokens": row, "documents": documents})
    alone = jnp.concatenate([row[:, : half + 1], row[:, half:]])
    assert packed == pytest.approx(float(loss_of(config, params, {"tokens": alone})), rel=1e-5)
    assert packed != pytest.approx(float(loss_of(config, params, {"tokens": row})), rel=1e-3)


def test_the_token_after_the_next_is_predicted_where_the_next_one_is():
    """Equation 24 of DeepSeek-V3's report, token by token; -1 marks what is not predicted."""
    config = dataclasses.replace(TINY, mtp_loss=0.5)
    model, params = gpt.model(config), init(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    tokens, targets = (rng.integers(0, config.vocab_size, (2, 7)) for _ in range(2))
    targets[0, 3] = targets[1, 6] = -1
    batch = {"tokens": tokens, "targets": targets}
    x = model.embed(params, batch, None)
    np.testing.assert_array_equal(x[1][:, :-1], params["embed"]["table"][tokens[:, 1:]])
    for layer, own in zip(model.layer, params["layers"], strict=True):
        x = layer(own, x, batch, None)
    log_probs = [jax.nn.log_softmax(y @ params["embed"]["table"].T) for y in x]
    places = [(row, t) for row in range(2) for t in range(7) if targets[row, t] >= 0]
    following = [(row, t) for row, t in places if t < 6 and targets[row, t + 1] >= 0]
    first = -sum(log_probs[0][row, t, targets[row, t]] for row, t in places)
    second = -sum(log_probs[1][row, t, targets[row, t + 1]] for row, t in following)

    loss, metrics = model.head_loss(params, x, batch, None)
    assert len(places) == loss.weight == 12
    assert len(following) == metrics["mtp"].weight == 9
    np.testing.assert_allclose(loss.total, first + 0.5 * second, rtol=1e-5)
    np.testing.assert_allclose(metrics["mtp"].total, second, rtol=1e-5)
    evaluated = gpt.model(config.without_layer_losses()).head_loss(params, x, batch, None)
    np.testing.assert_allclose(evaluated.total, first, rtol=1e-5)
