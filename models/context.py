"""Context parallelism: devices share a sequence, and attention exchanges what their tokens see.

A causal token sees the tokens before it, so that late tokens see more. The sequence has 2 c equal
parts, and device i of c has an early one, i, and a late one, 2 c - 1 - i; on every device these two
together see equally many tokens. Only attention knows of this. Either queries are a device's own,
and keys and values are gathered (Llama Team 2024, section 3.3.2); or, where that sends fewer bytes,
devices exchange tokens for heads: each then has the whole sequence of some heads (Jacobs et al.
2023, DeepSpeed Ulysses). Linear attention exchanges states: `models.linear_attention`.

Dimension suffixes: B rows, S the whole sequence, T a device's part of it, N heads, H head width.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Context:
    """The devices that share a sequence.

    Args:
      axis: their mesh axis, inside `jax.shard_map`; None for a sequence that is not shared.
    """

    axis: str | None = None

    @property
    def size(self) -> int:
        """Number of devices."""
        return 1 if self.axis is None else lax.axis_size(self.axis)

    @property
    def own_parts(self) -> list[jax.Array | int]:
        """The numbers of this device's parts of a sequence."""
        if self.axis is None:
            return [0]
        number = lax.axis_index(self.axis)
        return [number, 2 * self.size - 1 - number]

    def own(self, x: jax.Array, dim: int) -> jax.Array:
        """Takes this device's two parts of an array that all devices have whole."""
        if self.axis is None:
            return x
        length = self._part(x.shape[dim])
        parts = [lax.dynamic_slice_in_dim(x, n * length, length, dim) for n in self.own_parts]
        return jnp.concatenate(parts, dim)

    def gather(self, x_BT: jax.Array) -> jax.Array:
        """Gathers the whole sequence [B, S, ...], in order."""
        if self.axis is None:
            return x_BT
        return self._in_order(lax.all_gather(x_BT, self.axis, axis=1, tiled=True))

    def exchanges_heads(self, num_heads: int, kv_heads: int) -> bool:
        """Whether devices exchange tokens for heads: if these suffice and fewer bytes are sent.

        Gathering sends a device's keys and values to c - 1 others. An exchange sends them, the
        queries and the mixed values once, but for 1/c.
        """
        if self.axis is None:
            return False
        return kv_heads % self.size == 0 and num_heads + kv_heads <= self.size * kv_heads

    def by_heads(self, x_BTNH: jax.Array) -> jax.Array:
        """Exchanges this device's tokens of all heads for all tokens, in order, of its heads."""
        assert self.axis is not None
        return self._in_order(lax.all_to_all(x_BTNH, self.axis, 2, 1, tiled=True))

    def by_tokens(self, x_BSNH: jax.Array) -> jax.Array:
        """Undoes `by_heads`."""
        assert self.axis is not None
        num_rows, length, *dims = x_BSNH.shape
        early, late = x_BSNH.reshape(num_rows, 2, self.size, -1, *dims).swapaxes(0, 1)
        by_device = jnp.stack((early, late[:, ::-1]), axis=2).reshape(num_rows, length, *dims)
        return lax.all_to_all(by_device, self.axis, 1, 2, tiled=True)

    def own_heads(self, x_N: jax.Array) -> jax.Array:
        """Takes the heads that this device has after `by_heads`."""
        assert self.axis is not None
        return x_N.reshape(self.size, -1)[lax.axis_index(self.axis)]

    def _in_order(self, x_BS: jax.Array) -> jax.Array:
        """Orders the tokens of a sequence that stand by device."""
        num_rows, length, *dims = x_BS.shape
        parts = x_BS.reshape(num_rows, self.size, 2, -1, *dims)
        in_order = jnp.concatenate((parts[:, :, 0], parts[:, ::-1, 1]), axis=1)
        return in_order.reshape(num_rows, length, *dims)

    def _part(self, length: int) -> int:
        parts = 2 * self.size
        if length % parts:
            below = length - length % parts
            valid = ", ".join(str(n) for n in (below, below + parts) if n)
            raise ValueError(
                f"sequence length={length} is not divisible by {parts}: each of the {self.size} "
                f"devices along {self.axis!r} has an early and a late part of it.\n"
                f"Nearest valid: {valid}."
            )
        return length // parts
