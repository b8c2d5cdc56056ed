"""Linear attention in chunks, and shared by devices, is the recurrence of its definition."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpipe
from models.context import Context
from models.delta_rule import CHUNK, delta_rule
from models.linear_attention import _over_parts

ROWS, GROUPS, GROUP, KEYS, VALUES = 2, 2, 3, 6, 5


def drawn(length: int) -> list[jax.Array]:
    """Inputs whose tokens decay by all sorts of factors, some to nothing."""
    keys = jax.random.split(jax.random.key(0), 6)
    tokens, heads = (ROWS, length, GROUPS), (GROUPS, GROUP)
    q, k = jax.random.normal(keys[0], (2, *tokens, KEYS))
    v = jax.random.normal(keys[1], (*tokens, GROUP, VALUES))
    decay = -jnp.exp(3 * jax.random.normal(keys[2], (*tokens, GROUP)) - 2)
    rate = jax.nn.sigmoid(jax.random.normal(keys[3], decay.shape))
    return [q, k, v, decay, rate, jax.random.normal(keys[4], (ROWS, *heads, KEYS, VALUES))]


def documents(length: int) -> jax.Array:
    """Of the token before the first and of all others; the first row's begins with one of these."""
    numbers = jnp.sort(jax.random.randint(jax.random.key(1), (ROWS, length + 1), 0, 4))
    return numbers.at[0, 1:].add(1)


def recurrent(q, k, v, decay, rate, state, documents=None):
    """The rule, token by token."""

    def unit(x):
        return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

    kept = jnp.exp(decay)
    if documents is not None:
        kept = kept * (documents[:, 1:] == documents[:, :-1])[..., None, None]

    def step(state, token):
        q, k, v, kept, rate = token
        state = kept[..., None, None] * state
        wrong = v - jnp.einsum("bgrkv,bgk->bgrv", state, k)
        state = state + jnp.einsum("bgr,bgk,bgrv->bgrkv", rate, k, wrong)
        return state, jnp.einsum("bgrkv,bgk->bgrv", state, q)

    given = unit(q) / jnp.sqrt(KEYS), unit(k), v, kept, rate
    state, mixed = jax.lax.scan(step, state, [jnp.moveaxis(x, 1, 0) for x in given])
    return jnp.moveaxis(mixed, 0, 1), state


def results(function, inputs, *given):
    """Values, last state, and gradients by all inputs of a product with both."""

    def loss(*inputs):
        found = function(*inputs, *given)
        return sum(jnp.sum(jnp.sin(jnp.arange(x.size)) * x.reshape(-1)) for x in found), found

    gradients, found = jax.jit(jax.grad(loss, range(6), has_aux=True))(*inputs)
    return *found, *gradients


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert jnp.allclose(one, other, rtol=1e-5, atol=2e-6 * jnp.abs(other).max())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [2 * CHUNK + 9, 5])
def test_chunks_are_the_recurrence(length, packed):
    """Also where a chunk is not full, the decays differ by far, and documents begin in it."""
    inputs, given = drawn(length), [documents(length)] if packed else []
    assert_equal(results(delta_rule, inputs, *given), results(recurrent, inputs, *given))


@pytest.mark.parametrize("packed", [False, True])
def test_devices_that_share_a_sequence_hand_the_state_on(packed):
    """Two devices, with an early and a late part each, given the state of a slice before."""
    length, context = 20, Context("context")
    inputs, given = drawn(length), [documents(length)] if packed else []

    def parts(x):
        return context.own(x, 1).reshape(2 * ROWS, length // 4, *x.shape[2:])

    @functools.partial(
        jax.shard_map, mesh=jaxpipe.make_mesh(stage=1, context=2), in_specs=P(), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    def shared(q, k, v, decay, rate, state, documents=None):
        if documents is not None:
            own = parts(documents[:, 1:]), parts(documents[:, :-1])[:, :1]
            documents = jnp.concatenate(own[::-1], axis=1)
        gates = parts(decay), parts(rate)
        mixed, state = _over_parts(context, *map(parts, (q, k, v)), gates, state, documents)
        return context.gather(mixed.reshape(ROWS, length // 2, *mixed.shape[2:])), state

    assert_equal(jax.jit(shared)(*inputs, *given), jax.jit(recurrent)(*inputs, *given))
