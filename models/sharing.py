"""Sharing of a layer by devices: along a tensor axis, a context axis, or both, and of its experts.

The sequence is split over the context axis first, and each device's part of it over the tensor
axis. Dimension suffixes: B rows, T a device's part of the sequence, E width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from models.context import Context
from models.tensor import Tensor


@dataclasses.dataclass(frozen=True)
class Sharing:
    """The devices that share a layer.

    Args:
      tensor: devices that share its matmuls.
      context: devices that share the sequence.
      expert_axis: axis of data shards that have some of the experts each; None if all have all.
      data_axes: all axes of data shards, if layers look at the tokens of all of them.
    """

    tensor: Tensor
    context: Context
    expert_axis: str | None = None
    data_axes: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which devices share a microbatch."""
        return tuple(name for name in (self.tensor.axis, self.context.axis) if name is not None)

    def mean(self, x: jax.Array) -> jax.Array:
        """Averages over the devices that share a microbatch."""
        return lax.pmean(x, self.axes) if self.axes else x

    def own(self, x: jax.Array, dim: int) -> jax.Array:
        """Takes this device's part of an array that all devices have whole: the sequence."""
        return self.tensor.own(self.context.own(x, dim), dim)

    def whole(self, x_BTE: jax.Array) -> jax.Array:
        """Gathers the whole sequence from all devices' parts."""
        return self.context.gather(self.tensor.gather(x_BTE))

    def dropout(self, drop: Callable[[jax.Array], jax.Array], x_BTE: jax.Array) -> jax.Array:
        """Applies ``drop`` with this device's part of the mask for the whole sequence."""
        if not self.axes:
            return drop(x_BTE)
        num_rows, length, width = x_BTE.shape
        length *= self.context.size * self.tensor.size
        kept = drop(jnp.ones((num_rows, length, width), x_BTE.dtype))
        return x_BTE * self.own(kept, 1)


WHOLE = Sharing(Tensor(), Context())
"""Sharing of layers that no devices share."""
