"""BERT: sizes, attention in both directions, masks, segments, its two losses."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpipe
from models import bert
from models.bert import BERTConfig

pytestmark = pytest.mark.pipeline

TINY = BERTConfig(
    vocab_size=61, sequence_length=12, num_layers=2, width=16, num_heads=4, mlp_width=32
)
NEXT = dataclasses.replace(TINY, next_sentence=True)

init = jax.jit(bert.init, static_argnums=0)
logits = jax.jit(bert.logits, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0, static_argnames="axis")
def loss_of(config, params, batch, rng=None, *, axis=None):
    return jaxpipe.unpipelined.loss(bert.model(config, vocabulary_axis=axis), params, batch, rng)


@pytest.fixture(scope="module")
def params():
    """Of both heads, drawn large enough for differences to show."""
    params = init(NEXT, jax.random.key(0))
    return jax.tree.map(lambda leaf: 5 * leaf if leaf.ndim > 1 else leaf + 0.1, params)


@pytest.fixture(scope="module")
def batch():
    """Three rows; the second ends in padding, four tokens are to be predicted."""
    tokens = jax.random.randint(jax.random.key(9), (3, 12), 0, TINY.vocab_size)
    mask = jnp.ones((3, 12), int).at[1, 8:].set(0)
    segments = jnp.zeros((3, 12), int).at[:, 6:].set(1)
    targets = jnp.full((3, 12), -1).at[0, 2].set(5).at[0, 3].set(7).at[1, 1].set(60)
    return {
        "tokens": tokens, "mask": mask, "segments": segments,
        "targets": targets.at[2, 9].set(0), "next_sentence": jnp.array([0, 1, 1]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "millions"),
    [(BERTConfig.base(), 110), (BERTConfig.large(), 340)],
    ids=["base", "large"],
)
def test_presets_have_about_the_published_sizes(config, millions):
    """Devlin et al. 2019, section 3."""
    assert bert.num_parameters(config) == pytest.approx(millions * 1e6, rel=0.012)


def test_shapes_and_dtypes(params, batch):
    assert {leaf.shape[0] for leaf in jax.tree.leaves(params["layers"])} == {TINY.num_layers}
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    for dtype in ("float32", "bfloat16"):
        config = dataclasses.replace(NEXT, dtype=dtype)
        assert bert.model(config).embed(params, batch, None).dtype == jnp.dtype(dtype)
        scores = jax.eval_shape(functools.partial(bert.logits, config), params, batch)
        assert (scores.shape, scores.dtype) == ((3, 12, TINY.vocab_size), jnp.float32)
        pairs = jax.eval_shape(functools.partial(bert.next_sentence_logits, config), params, batch)
        assert (pairs.shape, pairs.dtype) == ((3, 2), jnp.float32)
        loss = jax.eval_shape(functools.partial(loss_of, config), params, batch)
        assert (loss.shape, loss.dtype) == ((), jnp.float32)


def test_every_position_sees_every_other(params, batch):
    row = {"tokens": batch["tokens"][:1]}
    before = logits(TINY, params, row)
    for place in (0, 11):
        after = logits(TINY, params, {"tokens": row["tokens"].at[:, place].add(1) % 61})
        assert (np.abs(before - after).max(axis=-1) > 1e-5).all()


def test_nothing_attends_to_padding(params, batch):
    before = logits(TINY, params, batch)
    changed = batch | {"tokens": batch["tokens"].at[1, 8:].set(3)}
    np.testing.assert_allclose(
        logits(TINY, params, changed)[1, :8], before[1, :8], rtol=1e-5, atol=1e-5
    )
    short = {name: leaf[1:2, :8] for name, leaf in batch.items() if leaf.ndim == 2}
    np.testing.assert_allclose(logits(TINY, params, short)[0], before[1, :8], rtol=1e-4, atol=1e-5)


def test_left_out_segments_and_mask_are_zeros_and_ones(params, batch):
    given = {"mask": jnp.ones((3, 12), int), "segments": jnp.zeros((3, 12), int)}
    tokens = {"tokens": batch["tokens"]}
    plain = logits(TINY, params, tokens)
    np.testing.assert_allclose(logits(TINY, params, tokens | given), plain, rtol=1e-6, atol=1e-6)
    assert not np.allclose(logits(TINY, params, tokens | {"segments": batch["segments"]}), plain)


def test_the_loss_is_the_mean_over_the_tokens_to_predict(params, batch):
    scores = jax.nn.log_softmax(logits(TINY, params, batch))
    wanted = batch["targets"] >= 0
    expected = -scores[wanted, batch["targets"][wanted]].mean()
    assert wanted.sum() == 4
    np.testing.assert_allclose(loss_of(TINY, params, batch), expected, rtol=1e-5)


def test_the_next_sentence_loss_is_added(params, batch):
    scores = jax.nn.log_softmax(bert.next_sentence_logits(NEXT, params, batch))
    expected = -scores[jnp.arange(3), batch["next_sentence"]].mean()
    added = loss_of(NEXT, params, batch) - loss_of(TINY, params, batch)
    np.testing.assert_allclose(added, expected, rtol=1e-4)


def test_loss_at_init_is_that_of_a_uniform_guess(batch):
    params = init(TINY, jax.random.key(0))
    loss = loss_of(TINY, params, batch | {"targets": batch["tokens"]})
    np.testing.assert_allclose(loss, math.log(TINY.vocab_size), rtol=0.02)


def test_without_targets_there_is_no_loss(params, batch):
    assert loss_of(TINY, params, batch | {"targets": jnp.full((3, 12), -1)}) == 0


def test_dropout_depends_on_the_key_alone(params, batch):
    config = dataclasses.replace(TINY, dropout=0.3)
    first, again, other = (loss_of(config, params, batch, jax.random.key(k)) for k in (1, 1, 2))
    assert first == again != other
    np.testing.assert_allclose(
        loss_of(config, params, batch), loss_of(TINY, params, batch), rtol=1e-6
    )


def test_split_vocabulary_gives_the_same_loss_and_gradients(params, batch):
    """Table and output bias in four slices, the last with three rows of padding."""
    config, rng = dataclasses.replace(NEXT, dropout=0.2), jax.random.key(3)
    expected, expected_grads = jax.jit(
        jax.value_and_grad(lambda params: loss_of(config, params, batch, rng))
    )(params)
    split = bert.model(config, vocabulary_axis="stage").stage_split | {
        "layers": jax.tree.map(lambda _: None, params["layers"])
    }
    specs = jax.tree.map(
        lambda dim: P() if dim is None else P("stage"), split, is_leaf=lambda x: x is None
    )
    assert specs["embed"]["table"] == specs["head"]["bias"] == P("stage")

    def pad(spec, leaf):
        return jnp.pad(leaf, [(0, 3 if spec else 0)] + [(0, 0)] * (leaf.ndim - 1))

    run = jax.shard_map(
        jax.value_and_grad(lambda params: loss_of(config, params, batch, rng, axis="stage")),
        mesh=jax.make_mesh((4,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=(specs,),
        out_specs=(P(), specs),
        check_vma=False,
    )
    loss, grads = jax.jit(run)(jax.tree.map(lambda s, w: pad(s == P("stage"), w), specs, params))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    jax.tree.map(
        lambda grad, wanted: np.testing.assert_allclose(
            grad[: len(wanted)], wanted, rtol=1e-4, atol=1e-6
        ),
        grads,
        expected_grads,
    )


def test_it_learns_to_copy_what_stands_beside_the_mask():
    """Rows are pairs of equal tokens; the one beside a mask, on either side, tells the answer."""
    config = dataclasses.replace(TINY, vocab_size=12, sequence_length=6, width=32, mlp_width=64)
    optimizer = optax.adam(optax.warmup_constant_schedule(0.0, 3e-3, 30))

    def rows(key):
        words, place = jax.random.split(key)
        pairs = jnp.repeat(jax.random.randint(words, (64, 3), 1, 12), 2, axis=1)
        hidden = jnp.arange(6) == jax.random.randint(place, (64, 1), 0, 6)
        return {"tokens": jnp.where(hidden, 0, pairs), "targets": jnp.where(hidden, pairs, -1)}

    @jax.jit
    def train(params, keys):
        def step(carry, key):
            params, state = carry
            grads = jax.grad(lambda params: loss_of(config, params, rows(key)))(params)
            updates, state = optimizer.update(grads, state)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), keys)[0][0]

    params = train(init(config, jax.random.key(0)), jax.random.split(jax.random.key(1), 900))
    held_out = rows(jax.random.key(2))
    guesses = logits(config, params, held_out).argmax(axis=-1)
    wanted = held_out["targets"] >= 0
    assert (guesses == held_out["targets"])[wanted].mean() > 0.9


def test_all_failures_come_in_one_message():
    with pytest.raises(ValueError, match="must divide") as error:
        dataclasses.replace(TINY, num_heads=3, dropout=-0.1, dtype="float16")
    text = str(error.value)
    assert "num_heads=3 must divide width=16.\nNearest valid: 2, 4." in text
    assert "dropout=-0.1" in text
    assert "dtype='float16' must be one of: float32, bfloat16." in text


def test_longer_rows_than_the_model_has_positions_for_are_refused(params):
    with pytest.raises(ValueError, match=r"13 inputs per row.*sequence_length=12"):
        bert.logits(TINY, params, {"tokens": jnp.zeros((1, 13), int)})
