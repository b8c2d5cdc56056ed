"""Linear attention by the gated delta rule (Yang et al. 2024; Qwen3-Next), a layer's alternative.

    q, k, v, z = qkvz(x), b, a = ba(x)
    q, k, v = silu(conv(q, k, v))               along the sequence, each number by itself
    y = delta_rule(q, k, v, -exp(a_log) softplus(a + dt_bias), sigmoid(b))
    out(norm(y) * silu(z))

In the columns of ``qkvz`` and ``ba`` each key head has its value heads beside it, so that devices
have some key heads each, with all that belongs to them.

What later tokens need of earlier ones is a state of fixed size and the last inputs of the
convolution. Slices of a sequence hand both on. Devices that share a sequence compute, for each part
of it, how the part changes any state, S to M S + N, and what it reads of that state: these are
columns of the delta rule's own state. They exchange M and N, and so know the state before each part
(`models.context`).

Dimension suffixes: B rows, S the whole sequence, T a device's part of it, P the device's parts of
the sequence as rows, U tokens of one with those before, E width, C numbers in the convolution, W
its tokens, G key heads, R value heads per key head, K width of keys, V of values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.blocks import INIT_STDDEV, Linear, rms_norm
from models.context import Context
from models.delta_rule import delta_rule
from models.gpt_config import GPTConfig
from models.sharing import Sharing

Cache = dict[str, jax.Array]
"""The state, float32 [B, G, R, K, V], the last inputs of the convolution, [B, W - 1, C], and where
sequences hold documents, the numbers of these tokens' documents, [B, W - 1], in floating point."""


def empty_cache(
    config: GPTConfig, sharing: Sharing, num_rows: int, *, has_documents: bool
) -> Cache:
    """Makes what is before the first token, as `jaxpipe.Model.carry`."""
    assert config.linear_heads is not None
    heads = sharing.tensor.part(config.linear_heads, "linear_heads")
    keys, values, group = config.linear_key_size, config.linear_value_size, config.linear_group
    tokens = num_rows, config.linear_conv - 1
    inputs = jnp.zeros((*tokens, heads * (2 * keys + group * values)), config.compute_dtype)
    cache = {"state": jnp.zeros((num_rows, heads, group, keys, values)), "inputs": inputs}
    return cache | ({"documents": jnp.zeros(tokens)} if has_documents else {})


class Convolution(nnx.Module):
    """A causal convolution of each number along the sequence, whose initial kernel is uniform."""

    def __init__(self, num_tokens: int, width: int, *, rngs: nnx.Rngs):
        bound = num_tokens**-0.5
        self.kernel = nnx.Param(
            jax.random.uniform(rngs.params(), (num_tokens, 1, width), minval=-bound, maxval=bound)
        )

    def __call__(self, x_PUC: jax.Array, documents_PU: jax.Array | None) -> jax.Array:
        """Adds up the inputs of each token and of those before it in its document.

        Takes W - 1 tokens before the first; returns float32 [P, U - W + 1, C].
        """
        kernel_WC = self.kernel[...][:, 0]
        last, length = len(kernel_WC) - 1, x_PUC.shape[1] - len(kernel_WC) + 1
        y = jnp.zeros(())
        for n, kernel_C in enumerate(kernel_WC):
            term = kernel_C * x_PUC[:, n : n + length].astype(jnp.float32)
            if documents_PU is not None:
                is_same = documents_PU[:, n : n + length] == documents_PU[:, last:]
                term = jnp.where(is_same[..., None], term, 0)
            y = y + term
        return y


class LinearAttention(nnx.Module):
    """A mixer of tokens whose memory has a fixed size."""

    def __init__(self, config: GPTConfig, *, sharing: Sharing, rngs: nnx.Rngs):
        assert config.linear_heads is not None
        self.config, self.sharing = config, sharing
        value_heads, (keys, values) = config.value_heads, config.linear_widths

        def linear(in_width: int, out_width: int, stddev: float = INIT_STDDEV) -> Linear:
            return Linear(in_width, out_width, bias=False, stddev=stddev, rngs=rngs)

        self.qkvz = linear(config.width, 2 * keys + 2 * values)
        self.ba = linear(config.width, 2 * value_heads)
        self.conv = Convolution(config.linear_conv, 2 * keys + values, rngs=rngs)
        # As Mamba's (Gu and Dao 2023, section 3.6): steps of 0.001 to 0.1 at rates of 1 to 16.
        size, step = jax.random.uniform(rngs.params(), (2, value_heads))
        self.a_log = nnx.Param(jnp.log(1 + 15 * size))
        self.dt_bias = nnx.Param(jnp.log(jnp.expm1(0.001 * 100**step)))
        self.norm = rms_norm(
            config.linear_value_size, epsilon=config.norm_epsilon, dtype=jnp.float32, rngs=rngs
        )
        self.out = linear(values, config.width, config.residual_stddev)

    def __call__(
        self, x_BTE: jax.Array, documents_BS: jax.Array | None = None, cache: Cache | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, Cache | None]:  # fmt: skip
        """Mixes the tokens of whole sequences, or of slices, given what those before have left."""
        del start
        config, sharing = self.config, self.sharing
        x_BTE = sharing.tensor.gather(x_BTE)
        before = cache
        if before is None:
            has_documents = documents_BS is not None
            before = empty_cache(config, sharing, len(x_BTE), has_documents=has_documents)
        tokens, keys, group = x_BTE.shape[:2], config.linear_key_size, config.linear_group
        heads = *tokens, before["state"].shape[1], -1
        cuts = keys, 2 * keys, 2 * keys + group * config.linear_value_size
        *qkv, z = jnp.split(self.qkvz(x_BTE).reshape(heads), cuts, axis=-1)
        qkv_BTC = jnp.concatenate([w.reshape(*tokens, -1) for w in qkv], axis=-1)
        b, a = jnp.split(self.ba(x_BTE).astype(jnp.float32).reshape(heads), 2, axis=-1)
        a_log, dt_bias = (w[...].reshape(-1, group) for w in (self.a_log, self.dt_bias))
        decay = -jnp.exp(a_log) * jax.nn.softplus(a + dt_bias)

        y, after = self._mix(qkv_BTC, decay, jax.nn.sigmoid(b), documents_BS, before)
        y = self.norm(y) * jax.nn.silu(z.astype(jnp.float32).reshape(y.shape))
        y_BTE = self.out(y.astype(x_BTE.dtype).reshape(*tokens, -1), sharing.tensor.scatter)
        return y_BTE, None if cache is None else after

    def _mix(
        self, qkv_BTC: jax.Array, decay_BTGR: jax.Array, rate_BTGR: jax.Array,
        documents_BS: jax.Array | None, before: Cache,
    ) -> tuple[jax.Array, Cache]:  # fmt: skip
        """Runs convolution and delta rule over the parts of the sequence: [B, T, G, R, V]."""
        config, context = self.config, self.sharing.context
        num_rows, num_before = len(qkv_BTC), config.linear_conv - 1
        length = qkv_BTC.shape[1] // len(context.own_parts)

        def parts(x_BT: jax.Array) -> jax.Array:
            return x_BT.reshape(-1, length, *x_BT.shape[2:])

        def from_parts(x_BS: jax.Array, part: int, count: int) -> jax.Array:
            """Takes so many tokens from the beginning of each part of so many tokens."""
            own = [lax.dynamic_slice_in_dim(x_BS, n * part, count, 1) for n in context.own_parts]
            return jnp.stack(own, axis=1).reshape(-1, count, *x_BS.shape[2:])

        # The last inputs of every part, behind those before the sequence.
        kept = min(num_before, length)
        tails = parts(qkv_BTC)[:, length - kept :].reshape(num_rows, -1, qkv_BTC.shape[-1])
        tails = jnp.concatenate((before["inputs"], context.gather(tails)), axis=1)
        after = {"inputs": tails[:, tails.shape[1] - num_before :]}
        documents_PU = None
        if documents_BS is not None:
            documents = documents_BS.astype(jnp.float32)
            documents = jnp.concatenate((before["documents"], documents), axis=1)
            after["documents"] = documents[:, documents.shape[1] - num_before :]
            documents_PU = from_parts(documents, length, num_before + length)
        x_PUC = jnp.concatenate((from_parts(tails, kept, num_before), parts(qkv_BTC)), axis=1)
        y_PTC = jax.nn.silu(self.conv(x_PUC, documents_PU)).astype(qkv_BTC.dtype)

        heads, group = decay_BTGR.shape[2:]
        keys = heads * config.linear_key_size
        q, k, v = (
            w.reshape(*w.shape[:2], heads, -1) for w in jnp.split(y_PTC, (keys, 2 * keys), axis=-1)
        )
        y, after["state"] = _over_parts(
            context,
            q,
            k,
            v.reshape(*v.shape[:3], group, -1),
            (parts(decay_BTGR), parts(rate_BTGR)),
            before["state"],
            None if documents_PU is None else documents_PU[:, num_before - 1 :],
        )
        return y.reshape(num_rows, -1, *y.shape[2:]), after


def _over_parts(
    context: Context, q: jax.Array, k: jax.Array, v: jax.Array, gates: tuple[jax.Array, jax.Array],
    state_BGRKV: jax.Array, documents_PU: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs `delta_rule` over the parts of sequences that devices have, given a state before them.

    ``gates`` are decay and rate. Returns the values [P, T, G, R, V], and the state behind the last
    part.
    """
    if context.axis is None:
        return delta_rule(q, k, v, *gates, state_BGRKV, documents_PU)
    keys, values = k.shape[-1], v.shape[-1]
    unit = jnp.pad(jnp.eye(keys), ((0, 0), (values, 0)))
    unit_PGRKV = jnp.broadcast_to(unit, (len(v), *v.shape[2:4], *unit.shape))
    v = jnp.pad(v, (*((0, 0),) * 4, (0, keys)))
    y, ends = delta_rule(q, k, v, *gates, unit_PGRKV, documents_PU)
    y, reads_PTGRK = jnp.split(y, (values,), axis=-1)
    ends = context.gather(ends.reshape(len(state_BGRKV), -1, *ends.shape[1:]))

    def follow(state: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        added, kept = jnp.split(end, (values,), axis=-1)
        return added + kept @ state, state

    state_BGRKV, states = lax.scan(follow, state_BGRKV, ends.swapaxes(0, 1))
    own = context.own(states.swapaxes(0, 1), 1).reshape(-1, *state_BGRKV.shape[1:])
    return y + jnp.einsum("ptgrk,pgrkv->ptgrv", reads_PTGRK, own), state_BGRKV
