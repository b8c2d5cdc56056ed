"""Tensor parallelism with sequence parallelism: the communication of a layer beside its matmuls.

Devices along the axis have some heads and some hidden units each. Between their matmuls, norms,
dropout and the residual stream belong to tokens alone, so that each device keeps its part of the
sequence (Korthikanti et al. 2022, section 4.2.2):

    h = gather(norm(x))            the whole sequence
    y = scatter(out(mix(up(h))))   summed over devices, each its part of the sequence
    x = x + dropout(y)

Dimension suffixes: B rows, S the whole sequence, T a device's part of it, E width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpipe import Joined
from models.types import PyTree


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The devices that share a layer.

    Args:
      axis: their mesh axis, inside `jax.shard_map`; None for a layer that is not shared.
      in_pieces: whether a layer may hide its own collectives: `models.pieces`.
    """

    axis: str | None = None
    in_pieces: bool = True

    @property
    def size(self) -> int:
        """Number of devices."""
        return 1 if self.axis is None else lax.axis_size(self.axis)

    def gather(self, x_BTE: jax.Array) -> jax.Array:
        """Gathers the whole sequence [B, S, E]."""
        if self.axis is None:
            return x_BTE
        return lax.all_gather(x_BTE, self.axis, axis=1, tiled=True)

    def scatter(self, y_BSE: jax.Array) -> jax.Array:
        """Sums over devices, and keeps this one's part of the sequence [B, T, E]."""
        if self.axis is None:
            return y_BSE
        return lax.psum_scatter(y_BSE, self.axis, scatter_dimension=1, tiled=True)

    def part(self, count: int, what: str) -> int:
        """Divides a count by the devices; the error calls it ``what`` if it does not divide."""
        if count % self.size:
            below = count - count % self.size
            valid = ", ".join(str(n) for n in (below, below + self.size) if n)
            raise ValueError(
                f"{what}={count} is not divisible by the {self.size} devices along {self.axis!r}, "
                f"which share it.\nNearest valid: {valid}."
            )
        return count // self.size

    def heads(self, columns_BTC: jax.Array, queries: int, width: int) -> list[jax.Array]:
        """Makes query, key and value heads [B, T, heads, width] from this device's columns.

        Where devices have a part of a key head each, all that share it gather it; the gradient of a
        part is the sum over them.
        """
        keys = (columns_BTC.shape[-1] - queries * width) // 2
        if keys % width == 0:  # cut between heads: cut between columns, gradients are copied
            heads = columns_BTC.reshape(*columns_BTC.shape[:2], -1, width)
            return jnp.split(heads, (queries, queries + keys // width), axis=2)
        cuts = (queries * width, queries * width + keys)
        return [self._gathered(part, width) for part in jnp.split(columns_BTC, cuts, axis=2)]

    def _gathered(self, x_BTC: jax.Array, width: int) -> jax.Array:
        """Makes whole heads from columns that are parts of them."""
        columns = x_BTC.shape[-1]
        count = columns * self.size // width
        if not divides_heads(count, width, self.size):
            near = sorted(range(1, count + self.size), key=lambda n: abs(n - count))
            valid = [n for n in near if divides_heads(n, width, self.size)][:2]
            raise ValueError(
                f"{count} key heads of {width} are not divisible by the {self.size} devices along "
                f"{self.axis!r}, nor do equal parts of a head make them up.\nNearest valid: "
                f"{', '.join(map(str, sorted(valid)))}."
            )
        if columns < width:
            sharing = width // columns
            groups = [list(range(n, n + sharing)) for n in range(0, self.size, sharing)]
            x_BTC = lax.all_gather(x_BTC, self.axis, axis=2, tiled=True, axis_index_groups=groups)
        return x_BTC.reshape(*x_BTC.shape[:2], -1, width)

    def mean(self, x: jax.Array) -> jax.Array:
        """Averages over the devices, each of which has as many heads."""
        return x if self.axis is None else lax.pmean(x, self.axis)

    def own_heads(self, x_NH: jax.Array, count: int) -> jax.Array:
        """Takes the rows of this device's heads, of those that `heads` gives it."""
        if self.axis is None:
            return x_NH
        first = lax.axis_index(self.axis) * len(x_NH) // self.size
        return lax.dynamic_slice_in_dim(x_NH, first, count, 0)

    def own(self, x: jax.Array, dim: int) -> jax.Array:
        """Takes this device's part of an array that all devices have whole: the sequence."""
        if self.axis is None:
            return x
        size = self.part(x.shape[dim], "sequence length")
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) * size, size, dim)


def divides_heads(count: int, width: int, devices: int) -> bool:
    """Says whether devices can share so many heads: each has whole ones, or equal parts of one."""
    columns, left = divmod(count * width, devices)
    return not left and (columns % width == 0 or width % columns == 0)


_COLUMNS = ("qkv", "query", "key", "value", "key_value", "qkvz", "ba", "conv", "up", "gate")
_ROWS = ("out", "down")
_OF_HEADS = ("sinks", "a_log", "dt_bias")


def axis_split(
    layer: PyTree, axis: str, joined: Mapping[str, tuple[int, ...]] | None = None
) -> PyTree:
    """Splits a layer's linear maps over the axis, by their names: as `jaxpipe.Model.axis_split`.

    Args:
      layer: parameters of one layer or of all, or their shapes.
      axis: the mesh axis.
      joined: widths of what lies side by side in one kernel, such as queries, keys and values.
    """

    def spec(path: tuple[Any, ...], leaf: Any) -> Any:
        owner, name = (getattr(entry, "key", None) for entry in path[-2:])
        if name in _OF_HEADS:
            return P(axis)
        if owner in _COLUMNS and name != "lora_a":
            columns = P(*[None] * (len(leaf.shape) - 1), axis)
            widths = (joined or {}).get(owner)
            return columns if widths is None else Joined(columns, widths)
        has_inputs = name in ("kernel", "lora_a") or (name == "kernel_scale" and leaf.shape[-2] > 1)
        return P(axis, None) if owner in _ROWS and has_inputs else None

    return jax.tree_util.tree_map_with_path(spec, layer)
