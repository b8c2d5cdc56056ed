"""Context parallelism: devices share a sequence, and attention gathers what their tokens see.

A causal token sees the tokens before it, so that late tokens see more. The sequence has 2 c equal
parts, and device i of c has an early one, i, and a late one, 2 c - 1 - i; on every device these two
together see equally many tokens. Only attention knows of this: queries are a device's own, keys and
values are gathered (Llama Team 2024, section 3.3.2).

Dimension suffixes: B rows, S the whole sequence, T a device's part of it, N heads, H head width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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

    def own(self, x: jax.Array, dim: int) -> jax.Array:
        """Takes this device's two parts of an array that all devices have whole."""
        if self.axis is None:
            return x
        number, length = lax.axis_index(self.axis), self._part(x.shape[dim])
        starts = length * number, length * (2 * self.size - 1 - number)
        parts = [lax.dynamic_slice_in_dim(x, start, length, dim) for start in starts]
        return jnp.concatenate(parts, dim)

    def gather(self, x_BT: jax.Array) -> jax.Array:
        """Gathers the whole sequence [B, S, ...], in order."""
        if self.axis is None:
            return x_BT
        num_rows, length, *dims = x_BT.shape
        parts = x_BT.reshape(num_rows, 2, length // 2, *dims)
        gathered = lax.all_gather(parts, self.axis, axis=1)
        in_order = jnp.concatenate((gathered[:, :, 0], gathered[:, ::-1, 1]), axis=1)
        return in_order.reshape(num_rows, length * self.size, *dims)

    def attend(
        self,
        attention: Callable[..., jax.Array],
        q_BTNH: jax.Array,
        k_BTNH: jax.Array,
        v_BTNH: jax.Array,
    ) -> jax.Array:
        """Runs causal attention for a device's queries.

        Args:
          attention: ``attention(q, k, v, positions)``, where queries stand at ``positions`` of the
            sequence, and keys and values at its first ones; None where both are the same tokens.
          q_BTNH, k_BTNH, v_BTNH: queries, keys and values of this device's tokens.
        """
        if self.axis is None:
            return attention(q_BTNH, k_BTNH, v_BTNH, None)
        k_BSNH, v_BSNH = self.gather(k_BTNH), self.gather(v_BTNH)
        positions_T = self.own(jnp.arange(k_BSNH.shape[1]), 0)
        return attention(q_BTNH, k_BSNH, v_BSNH, positions_T)

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
