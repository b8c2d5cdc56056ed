"""Axes that may split the arrays of a tree: the data shards', and those that the model names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layout.leaf import AxisSplit, Leaf
from jaxpipe.runtime.mesh import Axes, names_of
from jaxpipe.runtime.trees import describe_leaf, is_sequence
from jaxpipe.runtime.types import Params, Path, Tree


@dataclasses.dataclass(frozen=True)
class Joined:
    """Split of an array that joins several, such as queries, keys and values.

    Args:
      spec: the axis that splits the dimension in which the arrays are joined, and no other.
      lengths: lengths of the joined arrays in this dimension. Each is split separately, and a
        device has its part of each.

    Example:
      >>> Joined(P(None, "tensor"), (8, 4, 4)).lengths
      (8, 4, 4)
    """

    spec: P
    lengths: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Splits:
    """The splits of the arrays of a tree.

    Args:
      data: number of devices along each axis over which data shards split arrays.
      model: the splits of those arrays that model axes split, by path.
    """

    data: Mapping[str, int] = dataclasses.field(default_factory=dict)
    model: Mapping[Path, tuple[AxisSplit, ...]] = dataclasses.field(default_factory=dict)

    def part(self, *start: Any) -> Splits:
        """The splits of a part of the tree, at the path ``start``."""
        count = len(start)
        model = {path[count:]: s for path, s in self.model.items() if path[:count] == start}
        return dataclasses.replace(self, model=model)

    def data_parts(self, apart: Collection[str]) -> int:
        """Number of parts into which data shards split an array that these axes already split."""
        return math.prod(size for name, size in self.data.items() if name not in apart)

    def leaf(self, path: Path, array: Tree, *, stage_dim: int | None = None) -> Leaf:
        """Makes the leaf of an array; data shards split the first dimension that divides."""
        splits = self.model.get(path, ())
        apart = tuple(sorted({name for split in splits for name in split.axes}))
        parts = self.data_parts(apart)
        whole = Leaf(tuple(array.shape), array.dtype, stage_dim, None, parts, splits, apart)
        sizes = enumerate(whole.local.shape)
        dims = [d for d, n in sizes if d != stage_dim and n % parts == 0 and n > 0]
        # Along any other than the first, XLA for GPUs transposes whole weight buffers.
        return dataclasses.replace(whole, data_dim=dims[0] if dims and parts > 1 else None)


def splitting(axis_split: Tree) -> set[str]:
    """Collects the names of the axes that split any array; what is no spec, `problems` refuses."""
    specs = filter(None, jax.tree.leaves(axis_split, is_leaf=_is_spec))
    entries = (_spec(spec) for spec in specs if _is_spec(spec))
    return {name for spec in entries for entry in spec for name in names_of(entry)}


def read_splits(axis_split: Tree, params: Params, mesh: Mesh, axes: Axes) -> Splits:
    """Reads the splits of canonical parameters; paths of layers that are alike are one layer's."""
    splits = {}
    for path, spec in _specs(axis_split, params):
        lengths = spec.lengths if isinstance(spec, Joined) else ()
        splits[path] = tuple(
            AxisSplit(names, dim, math.prod(mesh.shape[name] for name in names), lengths)
            for dim, names in enumerate(map(names_of, _spec(spec)))
            if names
        )
    return Splits({name: mesh.shape[name] for name in axes.split}, splits)


def problems(model: Model, params: Params, mesh: Mesh, axes: Axes) -> Iterator[str]:
    """Yields what is wrong with `Model.axis_split`, or with states along `Model.axes`."""
    for name in model.axes if model.stateful else ():
        # Each device would renew a state from its own part.
        if mesh.shape[name] > 1:
            yield (
                f"Model.stateful=True, but Model.axes names {name!r}, along which "
                f"{mesh.shape[name]} devices have a part of every microbatch each: what a layer "
                "hands on in its state, such as a recurrence over the sequence, needs all of it. "
                f"Nearest valid: a mesh with one device along {name!r}, or layers without states."
            )
    try:
        specs = dict(_specs(model.axis_split, params))
    except (KeyError, TypeError, ValueError) as error:
        yield (
            "Model.axis_split must be a dictionary like params, or a prefix of it below the first "
            "keys, whose leaves are None or the jax.sharding.PartitionSpec of an array, of one "
            f"layer where layers are alike: {error}"
        )
        return
    of_stages = dict(jax.tree.leaves_with_path(model.stage_split))
    yield from _misplaced(of_stages, params)
    for path, array in jax.tree.leaves_with_path(params):
        if path in specs:
            at = f"Model.axis_split: params{jax.tree_util.keystr(path)}"
            stacked = path[0].key == "layers" and not is_sequence(params["layers"])
            shape = array.shape[1:] if stacked else array.shape
            yield from _misfits(at, specs[path], shape, of_stages.get(path), mesh, axes)


def _misplaced(of_stages: Mapping[Path, Tree], params: Params) -> Iterator[str]:
    """Yields what is wrong with `Model.stage_split`, by path."""
    outer = {part: params[part] for part in ("embed", "head")}
    arrays = dict(jax.tree.leaves_with_path(outer))
    for path, dim in of_stages.items():
        at = jax.tree_util.keystr(path)
        if path not in arrays:
            yield (
                f"Model.stage_split{at} is {dim!r}, and splits no array of params['embed'] or "
                "params['head']; stages can split no others. Leave it out, or make it None."
            )
        elif type(dim) is not int or not 0 <= dim < len(np.shape(arrays[path])):
            yield (
                f"Model.stage_split{at} is {dim!r}, and params{at} is "
                f"{describe_leaf(arrays[path])}; give the number of one of its dimensions, or None."
            )


def _misfits(
    at: str, spec: P | Joined, shape: tuple[int, ...], padded: int | None, mesh: Mesh, axes: Axes
) -> Iterator[str]:
    """Says why an array cannot be split so; the dimension ``padded`` may be padded."""
    allowed = (*axes.model, *axes.split)
    for dim, entry in enumerate(_spec(spec)):
        for name in names_of(entry):
            if name not in allowed or name not in mesh.shape:
                yield (
                    f"{at} is split over {name!r}, which is none of Model.axes={axes.model} "
                    f"and no axis of data shards: {axes.split}."
                )
                return
        parts = math.prod(mesh.shape[name] for name in names_of(entry))
        if dim >= len(shape):
            yield f"{at} has the shape {shape}, and no dimension {dim} to split."
            continue
        lengths = spec.lengths if isinstance(spec, Joined) and entry else (shape[dim],)
        if sum(lengths) != shape[dim]:
            yield f"{at} joins {lengths} in dimension {dim}, but has {shape[dim]} elements there."
        elif math.gcd(*lengths) % parts and dim != padded:
            near = [n for n in range(1, shape[dim] + 1) if math.gcd(*lengths) % n == 0]
            valid = ", ".join(map(str, sorted(sorted(near, key=lambda n: abs(n - parts))[:2])))
            joined = f" (joined of {lengths})" if len(lengths) > 1 else ""
            yield (
                f"{at} has {shape[dim]} elements in dimension {dim}{joined}, which the {parts} "
                f"devices along {entry!r} do not divide.\nNearest valid: {valid} devices."
            )


def _specs(axis_split: Tree, params: Params) -> Iterator[tuple[Path, P | Joined]]:
    if not isinstance(axis_split, dict | None):
        raise TypeError(f"it is a {type(axis_split).__name__}, not a dictionary")
    for part, prefix in (axis_split or {}).items():
        spread = jax.tree.map(
            lambda spec, tree: jax.tree.map(lambda _: spec, tree),
            prefix,
            params[part],
            is_leaf=_is_spec,
        )
        for path, spec in jax.tree.leaves_with_path(spread, is_leaf=_is_spec):
            if spec is not None:
                yield (jax.tree_util.DictKey(part), *path), spec


def _is_spec(node: Tree) -> bool:
    return node is None or isinstance(node, P | Joined)


def _spec(spec: P | Joined) -> P:
    return spec.spec if isinstance(spec, Joined) else spec
