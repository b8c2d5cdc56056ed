"""The vocabulary split over four devices against the whole table on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.vocabulary import cross_entropy, lookup

STAGES = 4
VOCAB, PADDED, WIDTH = 13, 16, 6  # the last slice holds three rows of padding


@pytest.fixture
def mesh():
    return jax.make_mesh((STAGES,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture
def case():
    keys = jax.random.split(jax.random.key(0), 5)
    # Padding rows are large on purpose: reading them would show.
    padding = jnp.full((PADDED - VOCAB, WIDTH), 50.0)
    return {
        "table": jnp.concatenate([jax.random.normal(keys[0], (VOCAB, WIDTH)), padding]),
        "head": jnp.concatenate([jax.random.normal(keys[1], (VOCAB, WIDTH)), padding]),
        "mix": jax.random.normal(keys[2], (WIDTH, WIDTH)),
        "ids": jax.random.randint(keys[3], (3, 5), 0, VOCAB),
        "targets": jax.random.randint(keys[4], (3, 5), 0, VOCAB),
    }


def split_run(mesh, function, specs, out_specs):
    """``function`` under shard_map, as the pipeline runs it."""
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    )


def test_lookup_of_a_split_table_is_plain_indexing(mesh, case):
    split = split_run(
        mesh, lambda table, ids: lookup(table, ids, axis="stage"), (P("stage"), P()), P()
    )
    np.testing.assert_array_equal(split(case["table"], case["ids"]), case["table"][case["ids"]])
    np.testing.assert_array_equal(lookup(case["table"], case["ids"]), case["table"][case["ids"]])


def test_devices_exchange_rows_of_the_dtype_that_is_asked_for(mesh, case):
    """A row is one device's alone: rounding it before the sum is rounding the row."""
    split = split_run(
        mesh,
        lambda table, ids: lookup(table, ids, axis="stage", dtype=jnp.bfloat16),
        (P("stage"), P()),
        P(),
    )
    rows = split(case["table"], case["ids"])
    assert rows.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rows, case["table"].astype(jnp.bfloat16)[case["ids"]])
    traced = str(jax.make_jaxpr(split)(case["table"], case["ids"]))
    assert ":bf16[3,5,6] = psum[" in traced


@pytest.mark.parametrize("tied", [True, False])
def test_split_gradients_equal_whole_gradients(mesh, case, tied):
    params = {"table": case["table"], "mix": case["mix"]}
    specs = {"table": P("stage"), "mix": P()}
    if not tied:
        params["head"], specs["head"] = case["head"], P("stage")

    def loss(params, ids, targets, axis):
        x = jnp.tanh(lookup(params["table"], ids, axis=axis) @ params["mix"])
        head = params["table" if tied else "head"]
        return cross_entropy(x, head, targets, vocab_size=VOCAB, axis=axis)

    def on_each_stage(params, ids, targets):
        value, grads = jax.value_and_grad(loss)(params, ids, targets, "stage")
        # One row a device, to see that every device holds the complete gradient.
        return value[None], grads | {"mix": grads["mix"][None]}

    expected, expected_grads = jax.value_and_grad(loss)(params, case["ids"], case["targets"], None)
    split = split_run(
        mesh, on_each_stage, (specs, P(), P()), (P("stage"), specs | {"mix": P("stage")})
    )
    values, grads = split(params, case["ids"], case["targets"])

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
def test_loss_and_gradients_follow_their_formula(mesh, case, vocab, smoothing, cap, axis):
    """Some targets of weight 0 are no rows at all, as padding marks are. With a vocabulary of five,
    two slices are nothing but padding. Half the loss has half a cotangent.

    The formula is computed in float64. The cap leaves tanh unsaturated: near 1, its slope is the
    difference of nearly equal float32 numbers, on some processors more than 1e-7 off.
    """
    x = jax.random.normal(jax.random.key(1), (3, 5, WIDTH))
    bias = jnp.concatenate([jnp.linspace(-1, 1, VOCAB), jnp.full(PADDED - VOCAB, 50.0)])
    weights = jnp.array([[1, 2, 0, 0, 1], [0] * 5, [0.5, 0, 1, 1, 0]])
    targets = jnp.where(weights == 0, jnp.array([-1, 0, 1, 15, 99]), case["targets"] % vocab)

    def explicit(x, table, bias):
        scores = x @ table[:vocab].T + bias[:vocab]
        scores = jax.nn.log_softmax(scores if cap is None else cap * jnp.tanh(scores / cap))
        wanted = (1 - smoothing) * jax.nn.one_hot(targets, vocab) + smoothing / vocab
        return -0.5 * jnp.sum(weights * (wanted * scores).sum(axis=-1)) / weights.sum()

    def fused(x, table, bias):
        options = {"weights": weights, "label_smoothing": smoothing, "vocab_size": vocab}
        options["soft_cap"] = cap
        return 0.5 * cross_entropy(x, table, targets, bias=bias, axis=axis, **options)

    run = jax.value_and_grad(fused, argnums=(0, 1, 2))
    if axis is not None:
        slices = (P(), P(axis), P(axis))
        run = split_run(mesh, run, slices, (P(), slices))
    with jax.enable_x64(True):
        exact = (jnp.asarray(np.asarray(value, np.float64)) for value in (x, case["head"], bias))
        expected, expected_grads = jax.value_and_grad(explicit, argnums=(0, 1, 2))(*exact)
    loss, grads = run(x, case["head"], bias)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, wanted, rtol=1e-5, atol=1e-7)


def test_no_weight_at_all_is_no_loss_and_no_gradient(case):
    x = jax.random.normal(jax.random.key(1), (3, 5, WIDTH))

    def loss(x):
        weights = jnp.zeros((3, 5))
        return cross_entropy(x, case["head"], case["targets"], vocab_size=VOCAB, weights=weights)

    value, grad = jax.value_and_grad(loss)(x)
    assert value == 0
    np.testing.assert_array_equal(grad, 0)


def test_large_logits_do_not_overflow(case):
    loss = cross_entropy(
        1e4 * jnp.ones((3, 5, WIDTH)), case["table"], case["targets"], vocab_size=VOCAB
    )
    assert jnp.isfinite(loss)


def test_bfloat16_inputs_keep_float32_loss_and_table_gradient(case):
    x = jax.random.normal(jax.random.key(1), (3, 5, WIDTH), jnp.bfloat16)

    def loss(x, table):
        return cross_entropy(x, table, case["targets"], vocab_size=VOCAB)

    value, (dx, dtable) = jax.value_and_grad(loss, argnums=(0, 1))(x, case["head"])
    assert (value.dtype, dx.dtype, dtable.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)


def test_the_logits_are_computed_once(case):
    """Three matmuls: logits, dx and dtable; the backward does not compute the logits again."""
    x = jax.random.normal(jax.random.key(1), (3, 5, WIDTH))

    def loss(x, table):
        return cross_entropy(x, table, case["targets"], vocab_size=VOCAB)

    program = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, case["head"]))
    assert program.count("dot_general[") == 3
