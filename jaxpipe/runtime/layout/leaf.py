"""How one array is split over the mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxpipe.runtime.layout.parts import Slices, Split
from jaxpipe.runtime.mesh import Axes, alone
from jaxpipe.runtime.trees import sum_dtype


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How one array is laid out.

    Where several axes split one dimension, model axes are the outermost, then stages, then data
    shards: what a device has of an array that model axes split is laid out like any other.

    Args:
      shape: its shape.
      dtype: its dtype.
      stage_dim: dimension split over stages, or None.
      data_dim: dimension split over data shards when sharded, or None where none divides.
      data_parts: the parts into which that is split.
      splits: the dimensions that model axes split, none in what a device has of it.
      apart: the axes along which devices hold different arrays, because of these splits.
    """

    shape: tuple[int, ...]
    dtype: Any
    stage_dim: int | None
    data_dim: int | None
    data_parts: int = 1
    splits: tuple[Split, ...] = ()
    apart: tuple[str, ...] = ()

    @property
    def local(self) -> Leaf:
        """The leaf of what a device has of the array, but for stages and data shards."""
        shape = list(self.shape)
        for split in self.splits:
            shape[split.dim] = -(-shape[split.dim] // split.size)
        return dataclasses.replace(self, shape=tuple(shape), splits=())

    @property
    def summed(self) -> Leaf:
        """The leaf of sums of the array's gradients."""
        return dataclasses.replace(self, dtype=sum_dtype(self.dtype))

    def behind(self, *lead: int) -> Leaf:
        """The leaf with leading dimensions, which nothing splits."""
        shift = len(lead)
        return dataclasses.replace(
            self,
            shape=(*lead, *self.shape),
            stage_dim=None if self.stage_dim is None else self.stage_dim + shift,
            data_dim=None if self.data_dim is None else self.data_dim + shift,
            splits=tuple(split._replace(dim=split.dim + shift) for split in self.splits),
        )

    def padded(self, num_stages: int) -> Leaf:
        """The leaf with room for equal slices of its dimension that stages split."""
        if self.stage_dim is None:
            return self
        shape = list(self.shape)
        shape[self.stage_dim] += -shape[self.stage_dim] % (num_stages * self._parts(self.stage_dim))
        return dataclasses.replace(self, shape=tuple(shape))

    def spread(self, num_stages: int) -> Leaf:
        """How the canonical array lies: split by every axis that divides a dimension.

        Stages split ``stage_dim`` where it divides, or another, so that few devices hold all of it.
        """
        splits = tuple(split for split in self.splits if self.shape[split.dim] % split.size == 0)
        leaf = dataclasses.replace(self, splits=splits)
        fits = [
            d
            for d, size in enumerate(self.shape)
            if d != self.data_dim and size and size % (num_stages * leaf._parts(d)) == 0
        ]
        stage = self.stage_dim if self.stage_dim in fits else next(iter(fits), None)
        return dataclasses.replace(leaf, stage_dim=stage)

    def kept_by(self, num_stages: int) -> Leaf:
        """The leaf with a dimension that stages split evenly, if there is one.

        It is another one than data shards split, if there is another.
        """
        if num_stages == 1:
            return self
        stage_dim, dim = self.spread(num_stages).stage_dim, self.data_dim
        if stage_dim is None and dim is not None:
            among = num_stages * self.data_parts * self._parts(dim)
            stage_dim = None if self.shape[dim] % among else dim
        return dataclasses.replace(self, stage_dim=stage_dim)

    def _parts(self, dim: int) -> int:
        """The devices along the model axes that split a dimension."""
        parts = 1
        for split in self.splits:
            parts *= split.size if split.dim == dim else 1
        return parts

    def names(self, axes: Axes, *, sharded: bool) -> dict[int, Any]:
        """The mesh axes of every dimension that is split; ``sharded`` says whether data shards
        split it."""
        pairs: list[tuple[int, tuple[str, ...]]]
        pairs = [(split.dim, split.axes) for split in self.splits]
        if self.stage_dim is not None:
            pairs.append((self.stage_dim, (axes.stage,)))
        if sharded and self.data_dim is not None:
            pairs.append((self.data_dim, axes.sharding(self.apart)))
        found: dict[int, tuple[str, ...]] = {}
        for dim, names in pairs:
            found[dim] = (*found.get(dim, ()), *names)
        return {dim: alone(names) for dim, names in found.items()}

    def cut(self, axes: Axes, *, sharded: bool) -> Slices:
        """How devices share it; ``sharded`` says whether data shards split it."""
        names = self.names(axes, sharded=sharded)
        dims = tuple((axis, dim) for dim, axis in names.items())
        return Slices(self.shape, dims, tuple(split for split in self.splits if split.joined))

    def struct(self, *, sharded: bool = False) -> jax.ShapeDtypeStruct:
        """Its shape and dtype, or those of a data shard's part."""
        shape = list(self.shape)
        if sharded and self.data_dim is not None:
            shape[self.data_dim] //= self.data_parts
        return jax.ShapeDtypeStruct(tuple(shape), self.dtype)
