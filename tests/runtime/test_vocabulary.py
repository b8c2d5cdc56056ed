"""The vocabulary split over four devices against the whole table on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.vocabulary import cross_entropy, lookup

STAGES = 4
VOCAB, PADDED, WIDTH = 13, 16, 6  # the last slice holds three rows of padding


KEYS = jax.random.split(jax.random.key(0), 6)
PADDING = jnp.full((PADDED - VOCAB, WIDTH), 50.0)
"""Large on purpose: reading a row would show."""
TABLE, HEAD = (
    jnp.concatenate([jax.random.normal(key, (VOCAB, WIDTH)), PADDING]) for key in KEYS[:2]
)
IDS, TARGETS = (jax.random.randint(key, (3, 5), 0, VOCAB) for key in KEYS[2:4])
X, MIX = jax.random.normal(KEYS[4], (3, 5, WIDTH)), jax.random.normal(KEYS[5], (WIDTH, WIDTH))


def split_run(function, specs, out_specs):
    """``function`` under shard_map, as the pipeline runs it."""
    mesh = jax.make_mesh((STAGES,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": specs, "out_specs": out_specs}
    return jax.jit(jax.shard_map(function, mesh=mesh, check_vma=False, **specs))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lookup_of_a_split_table_is_plain_indexing(dtype):
    """Devices exchange rows of the dtype that is asked for: a row is one device's alone, and to
    round it before the sum is to round the row."""

    def rows(table, ids, axis="stage"):
        return lookup(table, ids, axis=axis, dtype=dtype)

    split = split_run(rows, (P("stage"), P()), P())
    for found in (split(TABLE, IDS), rows(TABLE, IDS, axis=None)):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, TABLE.astype(dtype)[IDS])
    name = {jnp.float32: "f32", jnp.bfloat16: "bf16"}[dtype]
    assert f":{name}[3,5,6] = psum[" in str(jax.make_jaxpr(split)(TABLE, IDS))


def test_columns_of_a_table_are_exchanged_for_parts_of_the_sequence():
    table, ids = MIX[:, :STAGES], jnp.arange(2 * STAGES).reshape(1, -1) % WIDTH

    def rows(table, ids):
        return lookup(table, ids, sequence_axis="stage", by_width=True)

    split = split_run(rows, (P(None, "stage"), P()), P(None, "stage"))
    np.testing.assert_array_equal(split(table, ids), table[ids])
    cotangent = jnp.tanh(table[ids[:, ::-1]])
    (found,), (expected,) = (
        jax.vjp(function, table)[1](cotangent)
        for function in (lambda table: split(table, ids), lambda table: table[ids])
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_split_gradients_equal_whole_gradients(tied):
    params = {"table": TABLE, "mix": MIX}
    specs = {"table": P("stage"), "mix": P()}
    if not tied:
        params["head"], specs["head"] = HEAD, P("stage")

    def loss(params, ids, targets, axis):
        x = jnp.tanh(lookup(params["table"], ids, axis=axis) @ params["mix"])
        head = params["table" if tied else "head"]
        return cross_entropy(x, head, targets, vocab_size=VOCAB, axis=axis)

    def on_each_stage(params, ids, targets):
        value, grads = jax.value_and_grad(loss)(params, ids, targets, "stage")
        # One row a device, to see that every device holds the complete gradient.
        return value[None], grads | {"mix": grads["mix"][None]}

    of_whole = jax.jit(jax.value_and_grad(loss), static_argnames="axis")
    expected, expected_grads = of_whole(params, IDS, TARGETS, axis=None)
    out_specs = P("stage"), specs | {"mix": P("stage")}
    values, grads = split_run(on_each_stage, (specs, P(), P()), out_specs)(params, IDS, TARGETS)

    np.testing.assert_allclose(values, jnp.full(STAGES, expected), rtol=1e-6)
    for copy in grads.pop("mix"):
        np.testing.assert_allclose(copy, expected_grads["mix"], rtol=1e-5, atol=1e-6)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected_grads[name], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(grad[VOCAB:], 0)


@pytest.mark.parametrize("axis", [None, "stage"])
@pytest.mark.parametrize(
    ("vocab", "smoothing", "cap"), [(VOCAB, 0.0, None), (VOCAB, 0.1, 2.0), (5, 0.1, None)]
)
def test_loss_and_gradients_follow_their_formula(vocab, smoothing, cap, axis):
    """Some targets of weight 0 are no rows at all, as padding marks are. With a vocabulary of five,
    two slices are nothing but padding. Half the loss has half a cotangent.

    The formula is computed in float64. The cap leaves tanh unsaturated: near 1, its slope is the
    difference of nearly equal float32 numbers, on some processors more than 1e-7 off.
    """
    bias = jnp.concatenate([jnp.linspace(-1, 1, VOCAB), jnp.full(PADDED - VOCAB, 50.0)])
    weights = jnp.array([[1, 2, 0, 0, 1], [0] * 5, [0.5, 0, 1, 1, 0]])
    targets = jnp.where(weights == 0, jnp.array([-1, 0, 1, 15, 99]), TARGETS % vocab)

    def explicit(x, table, bias):
        scores = x @ table[:vocab].T + bias[:vocab]
        scores = jax.nn.log_softmax(scores if cap is None else cap * jnp.tanh(scores / cap))
        wanted = (1 - smoothing) * jax.nn.one_hot(targets, vocab) + smoothing / vocab
        return -0.5 * jnp.sum(weights * (wanted * scores).sum(axis=-1)) / weights.sum()

    def fused(x, table, bias):
        options = {"weights": weights, "label_smoothing": smoothing, "vocab_size": vocab}
        options["soft_cap"] = cap
        return 0.5 * cross_entropy(x, table, targets, bias=bias, axis=axis, **options)

    run, slices = jax.value_and_grad(fused, argnums=(0, 1, 2)), (P(), P(axis), P(axis))
    run = jax.jit(run) if axis is None else split_run(run, slices, (P(), slices))
    with jax.enable_x64(True):
        exact = (jnp.asarray(np.asarray(value, np.float64)) for value in (X, HEAD, bias))
        of_formula = jax.jit(jax.value_and_grad(explicit, argnums=(0, 1, 2)))
        expected, expected_grads = of_formula(*exact)
    loss, grads = run(X, HEAD, bias)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, wanted, rtol=1e-5, atol=1e-7)


def whole_loss(x, table=HEAD, **options):
    return cross_entropy(x, table, TARGETS, vocab_size=VOCAB, **options)


def test_no_weight_at_all_is_no_loss_and_no_gradient():
    value, grad = jax.value_and_grad(whole_loss)(X, weights=jnp.zeros((3, 5)))
    assert value == 0
    np.testing.assert_array_equal(grad, 0)


def test_large_logits_do_not_overflow():
    assert jnp.isfinite(whole_loss(1e4 * jnp.ones((3, 5, WIDTH))))


def test_bfloat16_inputs_keep_float32_loss_and_table_gradient_and_logits_are_computed_once():
    """Three matmuls: logits, dx and dtable; the backward does not compute the logits again."""
    step, x = jax.value_and_grad(whole_loss, argnums=(0, 1)), X.astype(jnp.bfloat16)
    value, (dx, dtable) = step(x, HEAD)
    assert (value.dtype, dx.dtype, dtable.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    assert str(jax.make_jaxpr(step)(X, HEAD)).count("dot_general[") == 3


def test_float64_inputs_give_a_loss_and_gradients_in_float64():
    with jax.enable_x64(True):
        x, head = (np.asarray(value, np.float64) for value in (X, HEAD))
        weights = jnp.linspace(0.5, 1.5, TARGETS.size).reshape(TARGETS.shape)

        def explicit(x, table):
            scores = jax.nn.log_softmax(x @ table[:VOCAB].T)
            picked = jnp.take_along_axis(scores, TARGETS[..., None], -1)[..., 0]
            return -jnp.sum(weights * picked) / weights.sum()

        found, expected = (
            jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(x, head)
            for function in (functools.partial(whole_loss, weights=weights), explicit)
        )
    for value, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert value.dtype == np.float64
        np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-14)
