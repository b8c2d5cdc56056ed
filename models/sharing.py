"""How devices share a layer: along a tensor axis, a context axis, or both.

The sequence is split over the context axis first, and each device's part of it over the tensor
axis. Dimension suffixes: B rows, T a device's part of the sequence, E width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from models.context import Context
from models.tensor import Tensor


@dataclasses.dataclass(frozen=True)
class Sharing:
    """The devices that share a layer.

    Args:
      tensor: those that share its matmuls.
      context: those that share the sequence.
    """

    tensor: Tensor
    context: Context

    @property
    def axes(self) -> tuple[str, ...]:
        """Their mesh axes."""
        return tuple(name for name in (self.tensor.axis, self.context.axis) if name is not None)

    def own(self, x: jax.Array, dim: int) -> jax.Array:
        """This device's part of what all have whole: the sequence."""
        return self.tensor.own(self.context.own(x, dim), dim)

    def whole(self, x_BTE: jax.Array) -> jax.Array:
        """The whole sequence, of all devices' parts."""
        return self.context.gather(self.tensor.gather(x_BTE))

    def dropout(self, drop: Callable[[jax.Array], jax.Array], x_BTE: jax.Array) -> jax.Array:
        """``drop``, with this device's part of the mask that it would draw for the whole."""
        if not self.axes:
            return drop(x_BTE)
        num_rows, length, width = x_BTE.shape
        length *= self.context.size * self.tensor.size
        kept = drop(jnp.ones((num_rows, length, width), x_BTE.dtype))
        return x_BTE * self.own(kept, 1)


WHOLE = Sharing(Tensor(), Context())
"""For layers that no devices share."""
