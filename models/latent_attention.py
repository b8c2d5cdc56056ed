"""Multi-head latent attention (DeepSeek-AI 2024, section 2.1).

Keys and values of all heads are made from one small vector per token, so that it is all that a
decoder has to keep, and queries likewise. A part of each head has rotary positions; that of the
keys is the same for all heads:

    vector, k_rotary = split(latent(x))
    k, v = key_value(norm(vector)), k = (k, rotate(k_rotary))
    q, q_rotary = query(norm(query_down(x))), q = (q, rotate(q_rotary))

Devices that share the heads exchange the small vectors in place of the residual stream.

Dimension suffixes: B rows, S the whole sequence, T a device's part of it, N heads, H width of a
head's queries and keys, V of its values, R of what is rotated, E width, L of latent vectors.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from models import rotary
from models.attention import Cache, MaxLogits, add_scores, attend, configured, whole_length
from models.blocks import INIT_STDDEV, Linear, rms_norm
from models.gpt_config import GPTConfig, LayerKind
from models.sharing import Sharing

_EPSILON = 1e-6
"""The norms of the latent vectors add this, whatever the others add."""


class LatentAttention(nnx.Module):
    """Causal self-attention whose keys, values and queries come from small vectors."""

    def __init__(self, config: GPTConfig, kind: LayerKind, *, sharing: Sharing, rngs: nnx.Rngs):
        self.config, self.is_local, self.sharing = config, kind.is_local, sharing
        rank, rotated, values = config.kv_rank, config.rotary_size, config.value_size
        assert rank is not None
        assert rotated is not None
        assert values is not None
        self.rank, self.value_size = rank, values

        def linear(in_width: int, out_width: int, stddev: float = INIT_STDDEV) -> Linear:
            return Linear(in_width, out_width, bias=False, stddev=stddev, rngs=rngs)

        def norm(width: int) -> nnx.RMSNorm:
            return rms_norm(width, epsilon=_EPSILON, dtype=config.compute_dtype, rngs=rngs)

        self.latent = linear(config.width, rank + rotated)
        self.latent_norm = norm(rank)
        heads, query_rank = config.num_heads, config.query_rank
        self.key_value = linear(rank, heads * (config.head_width + values))
        if query_rank is not None:
            self.query_down, self.query_norm = linear(config.width, query_rank), norm(query_rank)
        self.query = linear(query_rank or config.width, heads * config.score_width)
        if config.qk_clip is not None:
            self.max_logits = MaxLogits(jnp.zeros(heads))
        self.out = linear(heads * values, config.width, config.residual_stddev)

    def __call__(
        self, x_BTE: jax.Array, documents_BS: jax.Array | None = None, cache: Cache | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, Cache | None]:  # fmt: skip
        """Mixes the tokens of whole sequences, or of slices from ``start``: see `attend`."""
        config, tensor, context = self.config, self.sharing.tensor, self.sharing.context
        tensor.part(config.num_heads, "num_heads")
        latent_BTL, k_rotary_BTR = jnp.split(self.latent(x_BTE), (self.rank,), axis=-1)
        if config.query_rank is not None:
            x_BTE = self.query_norm(self.query_down(x_BTE))
        latent_BSL, k_rotary_BSR, x_BSE = map(
            tensor.gather, (self.latent_norm(latent_BTL), k_rotary_BTR, x_BTE)
        )
        num_rows, length, _ = x_BSE.shape
        q_BSNH = self.query(x_BSE).reshape(num_rows, length, -1, config.score_width)
        keys_values = self.key_value(latent_BSL).reshape(*q_BSNH.shape[:3], -1)
        k_BSNH, v_BSNV = jnp.split(keys_values, (config.head_width,), axis=-1)
        q_BSNH, q_rotary_BSNR = jnp.split(q_BSNH, (config.head_width,), axis=-1)

        whole = whole_length(context, length, cache)
        turns_R = rotary.frequencies(config, is_local=self.is_local, length=whole)
        positions_S = start + context.own(jnp.arange(length * context.size), 0)
        q_rotary_BSNR, k_rotary_BS1R = (
            rotary.rotate(_halves(w), turns_R, positions_S, config.rope_magnitude)
            for w in (q_rotary_BSNR, k_rotary_BSR[:, :, None])
        )
        k_rotary_BSNR = jnp.broadcast_to(k_rotary_BS1R, q_rotary_BSNR.shape)
        q_BSNH = jnp.concatenate((q_BSNH, q_rotary_BSNR), axis=-1)
        k_BSNH = jnp.concatenate((k_BSNH, k_rotary_BSNR), axis=-1)
        if config.qk_clip is not None:
            add_scores(self, q_BSNH, k_BSNH, documents_BS)
        # Values are as wide as keys there.
        padding = config.score_width - self.value_size
        v_BSNH = jnp.pad(v_BSNV, ((0, 0), (0, 0), (0, 0), (0, padding)))
        attention = configured(config, self.is_local)
        mixed_BSNH, cache = attend(
            context, attention, (q_BSNH, k_BSNH, v_BSNH), documents_BS, cache, start
        )
        mixed_BSNV = mixed_BSNH[..., : self.value_size]
        return self.out(mixed_BSNV.reshape(num_rows, length, -1), tensor.scatter), cache


def _halves(x: jax.Array) -> jax.Array:
    """Moves the first numbers of all neighboring pairs before the second ones.

    DeepSeek's weights rotate neighbors against each other, `rotary.rotate` both halves.
    """
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
