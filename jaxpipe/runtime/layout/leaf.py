"""The layout on a mesh of one array, and of a tree of them, canonical and placed."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.layout.parts import AxisSplit, Slices
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.trees import sum_dtype
from jaxpipe.runtime.types import Leaves, Shapes, Shardings, Tree


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Layout of one array.

    Where several axes split one dimension, model axes are the outermost, then stages, then data
    shards: a device's part of an array that model axes split is laid out like any other array.

    Args:
      shape: shape of the array.
      dtype: dtype of the array.
      stage_dim: dimension split over stages, or None.
      data_dim: dimension split over data shards when sharded, or None if none divides.
      data_parts: number of parts into which ``data_dim`` is split.
      splits: the dimensions that model axes split; none in the leaf of a device's part.
      apart: the axes along which devices hold different arrays, because of these splits.
    """

    shape: tuple[int, ...]
    dtype: Any
    stage_dim: int | None
    data_dim: int | None
    data_parts: int = 1
    splits: tuple[AxisSplit, ...] = ()
    apart: tuple[str, ...] = ()

    @property
    def local(self) -> Leaf:
        """The leaf of a device's part of the array, before stages and data shards split it."""
        shape = list(self.shape)
        for split in self.splits:
            shape[split.dim] = -(-shape[split.dim] // split.size)
        return dataclasses.replace(self, shape=tuple(shape), splits=())

    @property
    def summed(self) -> Leaf:
        """The leaf of the array's gradient sums."""
        return dataclasses.replace(self, dtype=sum_dtype(self.dtype))

    def behind(self, *lead: int) -> Leaf:
        """Puts leading dimensions, which nothing splits, before those of the leaf."""
        shift = len(lead)
        return dataclasses.replace(
            self,
            shape=(*lead, *self.shape),
            stage_dim=None if self.stage_dim is None else self.stage_dim + shift,
            data_dim=None if self.data_dim is None else self.data_dim + shift,
            splits=tuple(split._replace(dim=split.dim + shift) for split in self.splits),
        )

    def stacked(self, count: int) -> Leaf:
        """The leaf of so many such arrays, one after the other, which stages split."""
        return dataclasses.replace(self.behind(count), stage_dim=0)

    def padded(self, num_stages: int) -> Leaf:
        """Pads the dimension that stages split, so that their slices are equal."""
        if self.stage_dim is None:
            return self
        shape = list(self.shape)
        shape[self.stage_dim] += -shape[self.stage_dim] % (num_stages * self._parts(self.stage_dim))
        return dataclasses.replace(self, shape=tuple(shape))

    def spread(self, num_stages: int) -> Leaf:
        """The leaf of the canonical array: split by every axis that divides a dimension.

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
        """Lets stages split a dimension evenly, if there is one that divides.

        Another dimension than that of the data shards is preferred.
        """
        if num_stages == 1:
            return self
        stage_dim, dim = self.spread(num_stages).stage_dim, self.data_dim
        if stage_dim is None and dim is not None:
            among = num_stages * self.data_parts * self._parts(dim)
            stage_dim = None if self.shape[dim] % among else dim
        return dataclasses.replace(self, stage_dim=stage_dim)

    def _parts(self, dim: int) -> int:
        """Number of devices along the model axes that split a dimension."""
        parts = 1
        for split in self.splits:
            parts *= split.size if split.dim == dim else 1
        return parts

    def names(self, axes: Axes, *, sharded: bool) -> dict[int, tuple[str, ...]]:
        """The mesh axes of every dimension that is split; ``sharded`` says whether data shards
        split it."""
        pairs = [(split.dim, split.axes) for split in self.splits]
        if self.stage_dim is not None:
            pairs.append((self.stage_dim, (axes.stage,)))
        if sharded and self.data_dim is not None:
            pairs.append((self.data_dim, axes.sharding(self.apart)))
        axes_of: dict[int, tuple[str, ...]] = {}
        for dim, names in pairs:
            axes_of[dim] = (*axes_of.get(dim, ()), *names)
        return axes_of

    def spec(self, axes: Axes, *, sharded: bool) -> P:
        """The partition spec of `names`."""
        names = self.names(axes, sharded=sharded)
        return P(*[names.get(d) for d in range(len(self.shape))])

    def canonical_spec(self, axes: Axes, num_stages: int) -> P:
        """The partition spec of the canonical array: see `spread`."""
        return self.spread(num_stages).spec(axes, sharded=True)

    def cut(self, axes: Axes, *, sharded: bool) -> Slices:
        """The cut by which devices share the array; ``sharded``: whether data shards split it."""
        names = self.names(axes, sharded=sharded)
        dims = tuple((axis, dim) for dim, axis in names.items())
        return Slices(self.shape, dims, tuple(split for split in self.splits if split.joined))

    def struct(self, *, sharded: bool = False) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the array, or of a data shard's part."""
        shape = list(self.shape)
        if sharded and self.data_dim is not None:
            shape[self.data_dim] //= self.data_parts
        return jax.ShapeDtypeStruct(tuple(shape), self.dtype)


class MeshLayout(abc.ABC):
    """Layout of a tree of arrays on a mesh.

    Attributes:
      mesh: the mesh.
      axes: names of its axes.
    """

    mesh: Mesh
    axes: Axes

    @property
    @abc.abstractmethod
    def canonical(self) -> Leaves:
        """The canonical tree, every array a `Leaf`."""

    @property
    @abc.abstractmethod
    def placed(self) -> Leaves:
        """The placed tree, every array a `Leaf`."""

    @abc.abstractmethod
    def place(self, tree: Tree) -> Tree:
        """Brings a canonical tree into placed order."""

    @abc.abstractmethod
    def unplace(self, tree: Tree) -> Tree:
        """Undoes `place`."""

    @property
    def num_stages(self) -> int:
        return self.axes.num_stages(self.mesh)

    def canonical_shapes(self) -> Shapes:
        return jax.tree.map(Leaf.struct, self.canonical)

    def placed_shapes(self) -> Shapes:
        return jax.tree.map(Leaf.struct, self.placed)

    def specs(self, *, sharded: bool) -> Tree:
        """Partition specs of the placed tree; ``sharded`` says whether data shards split it."""
        return jax.tree.map(lambda leaf: leaf.spec(self.axes, sharded=sharded), self.placed)

    def shardings(self, *, sharded: bool) -> Shardings:
        """Shardings of the placed tree, for `specs`."""
        return self._shardings(self.specs(sharded=sharded))

    def canonical_specs(self) -> Tree:
        """Partition specs of the canonical tree, over all devices wherever a size divides."""
        return jax.tree.map(
            lambda leaf: leaf.canonical_spec(self.axes, self.num_stages), self.canonical
        )

    def canonical_shardings(self) -> Shardings:
        """Shardings of the canonical tree, for `canonical_specs`."""
        return self._shardings(self.canonical_specs())

    def _shardings(self, specs: Tree) -> Shardings:
        return jax.tree.map(lambda spec: _compiled_sharding(self.mesh, spec), specs)


def _compiled_sharding(mesh: Mesh, spec: P) -> NamedSharding:
    """Makes a sharding as compiled programs return it: without axes of one device and final Nones.

    `jax.jit` takes an array whose sharding is only written differently for a new kind of argument.
    """

    def without_singles(dim: Any) -> Any:
        names = (dim,) if isinstance(dim, str) else dim or ()
        kept = tuple(name for name in names if mesh.shape[name] > 1)
        return kept[0] if len(kept) == 1 else kept or None

    dims = [without_singles(dim) for dim in spec]
    while dims and dims[-1] is None:
        dims.pop()
    return NamedSharding(mesh, P(*dims))
