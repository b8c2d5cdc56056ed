"""One array on a mesh, and trees of them: its layout, canonical and placed; the parts that devices
have of it, how a part is made and completed; and shares of a layer, which may move one at a time.

The methods of cuts run inside `jax.shard_map`. The data axis and model axes may split parameters
and what belongs to them; the stage axis may split those of embedding and head.

Data shards each have a part of an array; a share is an equal part of every one of those. With the
whole array seen as ``[data shards, shares, rest]``, it is a strided row, and is gathered or reduced
in the same dimension as the array. An array that does not divide goes with the first share.
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
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.indices import start_at
from jaxpipe.runtime.mesh import Axes, names_of
from jaxpipe.runtime.trees import sum_dtype
from jaxpipe.runtime.types import Dim, Index, Leaves, Shapes, Shardings, Tree
from jaxpipe.schedule.lowering.transfers import SMALLEST_SHARE, dividing_shares

# Parts of an array.


def communicate(
    collective: Callable[..., Tree], array: jax.Array, axes: str | tuple[str, ...]
) -> jax.Array:
    """Runs a collective over mesh axes; also on booleans, which collectives do not take."""
    number = array.astype(jnp.int32) if array.dtype == jnp.bool_ else array
    return collective(number, axes).astype(array.dtype)


class AxisSplit(NamedTuple):
    """A dimension that model axes split.

    Args:
      axes: the mesh axes, the outermost first.
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
class Cut:
    """The way in which devices share an array: mesh axes split some dimensions each.

    Args:
      dims: the dimensions, with the axes that split each; the last part may be padded.
      joined: the splits of dimensions in which several arrays are joined.
    """

    shape: tuple[int, ...]
    dims: tuple[tuple[tuple[str, ...], int], ...]
    joined: tuple[AxisSplit, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes whose devices hold parts."""
        return tuple(name for axes, _ in self.dims for name in axes)

    def _size(self, axes: tuple[str, ...], dim: int) -> int:
        return -(-self.shape[dim] // lax.axis_size(axes))

    def own(self, whole: jax.Array) -> jax.Array:
        """Takes this device's part of an array that every device has."""
        for split in self.joined:
            whole = split.in_parts(whole)
        for axes, dim in self.dims:
            size = self._size(axes, dim)
            room = size * lax.axis_size(axes) - self.shape[dim]
            padded = jnp.pad(whole, [(0, room if d == dim else 0) for d in range(whole.ndim)])
            whole = lax.dynamic_slice_in_dim(padded, lax.axis_index(axes) * size, size, dim)
        return whole

    def whole(self, part: jax.Array) -> jax.Array:
        """Makes the array from all devices' parts."""
        for axes, dim in self.dims:
            for name in reversed(axes):  # JAX batches no gather over several
                part = lax.all_gather(part, name, axis=dim, tiled=True)
            part = lax.slice_in_dim(part, 0, self.shape[dim], axis=dim)
        for split in self.joined:
            part = split.in_order(part)
        return part

    def counts(self) -> jax.Array | None:
        """Marks the elements of a part that belong to the array; None if all do."""
        masks = []
        for axes, dim in self.dims:
            size = self._size(axes, dim)
            parts = lax.axis_size(axes)
            if size * parts > self.shape[dim]:
                ends = np.clip(self.shape[dim] - size * np.arange(parts), 0, size)
                end = jnp.asarray(ends, jnp.int32)[lax.axis_index(axes)]
                inside = jnp.arange(size, dtype=jnp.int32) < end
                masks.append(
                    inside.reshape([-1 if d == dim else 1 for d in range(len(self.shape))])
                )
        return math.prod(masks[1:], start=masks[0]) if masks else None

    def with_padding(self, part: jax.Array) -> jax.Array:
        """Sets the elements that only pad a part to zero."""
        counts = self.counts()
        return part if counts is None else jnp.where(counts, part, jnp.zeros((), part.dtype))


@dataclasses.dataclass(frozen=True)
class Flat(Cut):
    """A cut whose parts, of this shape, data shards split further: each holds an equal run of the
    flat part, of which the last may be padded."""

    part_shape: tuple[int, ...] = ()
    data: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        return (*super().axes, *self.data)

    @property
    def _shards(self) -> Cut:
        return Cut((math.prod(self.part_shape),), ((self.data, 0),) if self.data else ())

    def own(self, whole: jax.Array) -> jax.Array:
        flat = super().own(whole).reshape(-1)
        if not self.data:
            return flat
        parts = lax.axis_size(self.data)
        runs = jnp.pad(flat, (0, -flat.size % parts)).reshape(parts, -1)  # int32 counts the parts
        return lax.dynamic_index_in_dim(runs, lax.axis_index(self.data), keepdims=False)

    def whole(self, part: jax.Array) -> jax.Array:
        return super().whole(self._shards.whole(part).reshape(self.part_shape))

    def counts(self) -> jax.Array | None:
        return self._shards.counts()


class DevicePart(NamedTuple):
    """A device's part of an array."""

    value: jax.Array
    cut: Cut


# Layouts.


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Layout of one array.

    Where several axes split one dimension, model axes are the outermost, then stages, then data
    shards: a device's part of an array that model axes split is laid out like any other array.

    Args:
      stage_dim: dimension split over stages, or None.
      data_dim: dimension split over data shards when sharded, or None if none divides.
      data_parts: number of parts into which ``data_dim`` is split.
      splits: the dimensions that model axes split; none in the leaf of a device's part.
      apart: the axes along which devices hold different arrays, because of these splits.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
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
        return math.prod(split.size for split in self.splits if split.dim == dim)

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

    def cut(self, axes: Axes, *, sharded: bool) -> Cut:
        """The cut by which devices share the array; ``sharded``: whether data shards split it."""
        names = self.names(axes, sharded=sharded)
        dims = tuple((axis, dim) for dim, axis in names.items())
        return Cut(self.shape, dims, tuple(split for split in self.splits if split.joined))

    def struct(self, *, sharded: bool = False) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the array, or of a data shard's part."""
        shape = list(self.shape)
        if sharded and self.data_dim is not None:
            shape[self.data_dim] //= self.data_parts
        return jax.ShapeDtypeStruct(tuple(shape), self.dtype)


class MeshLayout(abc.ABC):
    """Layout of a tree of arrays on a mesh."""

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

    def without_singles(dim: Dim) -> Dim:
        kept = tuple(name for name in names_of(dim) if mesh.shape[name] > 1)
        return kept[0] if len(kept) == 1 else kept or None

    dims = [without_singles(dim) for dim in spec]
    while dims and dims[-1] is None:
        dims.pop()
    return NamedSharding(mesh, P(*dims))


# Shares of a layer.


class Share(NamedTuple):
    """One of ``of`` shares of a layer."""

    number: Index
    of: int


def most_shares(layer: Leaves, smallest: float = SMALLEST_SHARE) -> int:
    """Largest number of shares in which a layer may move (`dividing_shares`)."""
    leaves = [leaf.local for leaf in jax.tree.leaves(layer)]
    return dividing_shares([(_bytes(leaf), _length(leaf)) for leaf in leaves], smallest)


def share_of(layer: Leaves, of: int) -> Leaves:
    """A share of a layer, every array a `Leaf`; the layer itself if it has one share."""

    def share(leaf: Leaf) -> Leaf:
        if not _divides(leaf, of):
            return leaf
        shape = list(leaf.shape)
        shape[leaf.data_dim or 0] //= of
        return dataclasses.replace(leaf, shape=tuple(shape))

    return jax.tree.map(share, layer)


def read_share(leaf: Leaf, array: jax.Array, lead: Sequence[Index], share: Share) -> jax.Array:
    """Reads the share of the array that lies at ``lead`` in the leading dimensions."""
    rows, shape = len(lead), list(array.shape[len(lead) :])
    if not _divides(leaf, share.of):
        start = start_at(*lead, *[0] * len(shape))
        part = lax.dynamic_slice(array, start, (*[1] * rows, *shape))
        return part.reshape(shape)
    view, start, size = _view(leaf, array, lead, share)
    shape[leaf.data_dim or 0] //= share.of
    return lax.dynamic_slice(view, start, size).reshape(shape)


def write_share(
    leaf: Leaf, array: jax.Array, lead: Sequence[Index], share: Share, value: jax.Array
) -> jax.Array:
    """Writes the share that `read_share` reads, and returns the array."""
    value = value.astype(array.dtype)
    if not _divides(leaf, share.of):
        value = jnp.where(share.number == 0, value, read_share(leaf, array, lead, share))
        start = start_at(*lead, *[0] * value.ndim)
        return lax.dynamic_update_slice(
            array, value.reshape([1] * len(lead) + [*value.shape]), start
        )
    view, start, size = _view(leaf, array, lead, share)
    return lax.dynamic_update_slice(view, value.reshape(size), start).reshape(array.shape)


def _view(
    leaf: Leaf, array: jax.Array, lead: Sequence[Index], share: Share
) -> tuple[jax.Array, tuple[jax.Array | np.int32, ...], tuple[int, ...]]:
    """Views the array with a dimension for shares; returns the share's start and size, too."""
    rows, shape, dim = len(lead), array.shape[len(lead) :], leaf.data_dim or 0
    shards = leaf.data_parts if shape[dim] == leaf.shape[dim] else 1
    length = shape[dim] // (shards * share.of)
    before, behind = shape[:dim], shape[dim + 1 :]
    view = array.reshape(*array.shape[:rows], *before, shards, share.of, length, *behind)
    start = start_at(*lead, *[0] * len(before), 0, share.number, 0, *[0] * len(behind))
    return view, start, (*[1] * rows, *before, shards, 1, length, *behind)


def _divides(leaf: Leaf, of: int) -> bool:
    """Whether data shards split the array, and shares divide each shard's part."""
    length = _length(leaf)
    return length > 0 and length % of == 0


def _length(leaf: Leaf) -> int:
    """Length of a data shard's part of an array in the dimension that shards split; or 0."""
    return 0 if leaf.data_dim is None else leaf.shape[leaf.data_dim] // leaf.data_parts


def _bytes(leaf: Leaf) -> int:
    return math.prod(leaf.shape) * leaf.struct().dtype.itemsize
