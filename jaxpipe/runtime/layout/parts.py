"""Arrays of which every device holds a part; and how a part is made and completed.

Every method runs inside `jax.shard_map`. The data axis and model axes may split parameters and what
belongs to them; the stage axis may split those of embedding and head.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.types import Tree


def communicate(
    collective: Callable[..., Tree], array: jax.Array, axes: str | tuple[str, ...]
) -> jax.Array:
    """Runs a collective over mesh axes; also on booleans, which collectives do not take."""
    number = array.astype(jnp.int32) if array.dtype == jnp.bool_ else array
    return collective(number, axes).astype(array.dtype)


class Cut(abc.ABC):
    """The way in which devices share an array.

    Attributes:
      shape: shape of the whole array.
    """

    shape: tuple[int, ...]

    @property
    @abc.abstractmethod
    def axes(self) -> tuple[str, ...]:
        """The mesh axes whose devices hold parts."""

    @abc.abstractmethod
    def own(self, whole: jax.Array) -> jax.Array:
        """Takes this device's part of an array that every device has."""

    @abc.abstractmethod
    def whole(self, part: jax.Array) -> jax.Array:
        """Makes the array from all devices' parts."""

    @abc.abstractmethod
    def counts(self) -> jax.Array | None:
        """Marks the elements of a part that belong to the array; None if all do."""

    def with_padding(self, part: jax.Array) -> jax.Array:
        """Sets the elements that only pad a part to zero."""
        counts = self.counts()
        return part if counts is None else jnp.where(counts, part, jnp.zeros((), part.dtype))


class DevicePart(NamedTuple):
    """A device's part of an array."""

    value: jax.Array
    cut: Cut


class AxisSplit(NamedTuple):
    """A dimension that model axes split.

    Args:
      axes: the mesh axes, the outermost first.
      dim: the dimension.
      size: devices along them.
      joined: the lengths of the arrays that are joined in this dimension, if there are several.
        Every one is split by itself, and a device has its part of each.
    """

    axes: tuple[str, ...]
    dim: int
    size: int
    joined: tuple[int, ...] = ()

    def own(self, number: int, total: int) -> list[slice]:
        """Finds a device's part of the whole dimension, as slices."""
        starts = itertools.accumulate(self.joined, initial=0)
        slices = []
        for start, length in zip(starts, self.joined or (total,), strict=False):
            part = length // self.size
            slices.append(slice(start + number * part, start + (number + 1) * part))
        return slices

    def in_parts(self, whole: jax.Array) -> jax.Array:
        """Brings the whole array into the order in which devices have its parts."""
        return self._of_runs(whole, self._parts(whole.shape[self.dim]))

    def in_order(self, parts: jax.Array) -> jax.Array:
        """Undoes `in_parts`."""
        starts, position = {}, 0
        for run in self._parts(parts.shape[self.dim]):
            starts[run.start] = slice(position, position + run.stop - run.start)
            position = starts[run.start].stop
        return self._of_runs(parts, [starts[start] for start in sorted(starts)])

    def _parts(self, total: int) -> list[slice]:
        return [run for number in range(self.size) for run in self.own(number, total)]

    def _of_runs(self, array: jax.Array, runs: Sequence[slice]) -> jax.Array:
        parts = [lax.slice_in_dim(array, run.start, run.stop, axis=self.dim) for run in runs]
        return jnp.concatenate(parts, axis=self.dim)


@dataclasses.dataclass(frozen=True)
class Slices(Cut):
    """A cut in which some dimensions are split over mesh axes each; the last part may be padded.

    Args:
      shape: shape of the whole array.
      dims: the dimensions, with the axes that split each.
      joined: the splits of dimensions in which several arrays are joined.
    """

    shape: tuple[int, ...]
    dims: tuple[tuple[tuple[str, ...], int], ...]
    joined: tuple[AxisSplit, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for axes, _ in self.dims for name in axes)

    def _size(self, axes: tuple[str, ...], dim: int) -> int:
        return -(-self.shape[dim] // lax.axis_size(axes))

    def own(self, whole: jax.Array) -> jax.Array:
        for split in self.joined:
            whole = split.in_parts(whole)
        for axes, dim in self.dims:
            size = self._size(axes, dim)
            room = size * lax.axis_size(axes) - self.shape[dim]
            padded = jnp.pad(whole, [(0, room if d == dim else 0) for d in range(whole.ndim)])
            whole = lax.dynamic_slice_in_dim(padded, lax.axis_index(axes) * size, size, dim)
        return whole

    def whole(self, part: jax.Array) -> jax.Array:
        for axes, dim in self.dims:
            part = lax.all_gather(part, axes, axis=dim, tiled=True)
            part = lax.slice_in_dim(part, 0, self.shape[dim], axis=dim)
        for split in self.joined:
            part = split.in_order(part)
        return part

    def counts(self) -> jax.Array | None:
        masks = []
        for axes, dim in self.dims:
            size = self._size(axes, dim)
            if size * lax.axis_size(axes) > self.shape[dim]:
                at = lax.axis_index(axes) * size + jnp.arange(size)
                inside = at < self.shape[dim]
                masks.append(
                    inside.reshape([-1 if d == dim else 1 for d in range(len(self.shape))])
                )
        return math.prod(masks[1:], start=masks[0]) if masks else None


@dataclasses.dataclass(frozen=True)
class Flat(Cut):
    """A cut in which data shards hold equal parts of the flat array; the last may be padded.

    Args:
      local: split of the whole array over model axes; data shards split a device's part of it.
      own_shape: shape of a device's part.
      data: axes of the data shards.
    """

    local: Slices
    own_shape: tuple[int, ...]
    data: tuple[str, ...]

    # Other cuts are given their shape; mypy has no read-only attributes to say so.
    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of the whole array."""
        return self.local.shape

    @property
    def axes(self) -> tuple[str, ...]:
        return (*self.local.axes, *self.data)

    @property
    def _shards(self) -> Slices:
        return Slices((math.prod(self.own_shape),), ((self.data, 0),) if self.data else ())

    def own(self, whole: jax.Array) -> jax.Array:
        return self._shards.own(self.local.own(whole).reshape(-1))

    def whole(self, part: jax.Array) -> jax.Array:
        return self.local.whole(self._shards.whole(part).reshape(self.own_shape))

    def counts(self) -> jax.Array | None:
        return self._shards.counts()
