"""How one array is split over the mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxpipe.runtime.layout.parts import Slices
from jaxpipe.runtime.mesh import Axes


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How one array is laid out.

    Args:
      shape: its shape.
      dtype: its dtype.
      stage_dim: dimension split over stages, or None.
      data_dim: dimension split over data shards when sharded, or None where none divides.
    """

    shape: tuple[int, ...]
    dtype: Any
    stage_dim: int | None
    data_dim: int | None

    def behind(self, *lead: int) -> Leaf:
        """The leaf with leading dimensions, which nothing splits."""
        shift = len(lead)
        return dataclasses.replace(
            self,
            shape=(*lead, *self.shape),
            stage_dim=None if self.stage_dim is None else self.stage_dim + shift,
            data_dim=None if self.data_dim is None else self.data_dim + shift,
        )

    def padded(self, num_stages: int) -> Leaf:
        """The leaf with room for equal slices of its split dimension."""
        if self.stage_dim is None:
            return self
        shape = list(self.shape)
        shape[self.stage_dim] += -shape[self.stage_dim] % num_stages
        return dataclasses.replace(self, shape=tuple(shape))

    def canonical_dims(self, num_stages: int) -> tuple[int | None, int | None]:
        """The dimensions of a canonical array that stages and data shards split.

        Stages split ``stage_dim`` where it divides, or another, so that few devices hold all of it.
        """
        fits = [
            d
            for d, size in enumerate(self.shape)
            if d != self.data_dim and size and size % num_stages == 0
        ]
        stage = self.stage_dim if self.stage_dim in fits else next(iter(fits), None)
        return stage, self.data_dim

    def cut(self, axes: Axes, *, sharded: bool) -> Slices:
        """How devices share it; ``sharded`` says whether data shards split it."""
        dims = (axes.stage, self.stage_dim), (axes.split, self.data_dim if sharded else None)
        return Slices(self.shape, tuple((axis, dim) for axis, dim in dims if dim is not None))

    def struct(self, *, parts: int = 1) -> jax.ShapeDtypeStruct:
        """Its shape and dtype; of one of ``parts`` data shards."""
        shape = list(self.shape)
        if self.data_dim is not None:
            shape[self.data_dim] //= parts
        return jax.ShapeDtypeStruct(tuple(shape), self.dtype)


def make_leaf(array: Any, *, data: int, stage_dim: int | None = None) -> Leaf:
    """The leaf of an array; its first dimension that divides is split over ``data`` shards."""
    dims = [d for d, n in enumerate(array.shape) if d != stage_dim and n % data == 0 and n > 0]
    # The first one: gathered along any other, XLA transposes whole weight buffers on GPUs.
    data_dim = dims[0] if dims and data > 1 else None
    return Leaf(tuple(array.shape), array.dtype, stage_dim, data_dim)
