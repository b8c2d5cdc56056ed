"""Comparing a tree of arrays with the one that is expected, before anything is compiled."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpipe.runtime.types import Shapes, Tree


def shape_of(leaf: object) -> jax.ShapeDtypeStruct | None:
    """Shape and dtype of a leaf as JAX would hold it; None if it is not an array."""
    try:
        return jax.eval_shape(_itself, leaf)
    except (TypeError, ValueError, OverflowError):
        return None  # such as of text, a masked array, or a number that no dtype holds


def _itself(leaf: Tree) -> Tree:
    return leaf


def shapes_of(tree: Tree) -> Shapes:
    """The tree with `shape_of` of every leaf."""
    return jax.tree.map(shape_of, tree)


def bare_shapes(tree: Tree) -> Shapes:
    """Shapes and dtypes of arrays or shapes, without the mesh on which they lie."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def form_of(tree: Tree) -> tuple[object, ...]:
    """A key that is equal for trees of the same structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(bare_shapes(tree))
    return structure, *leaves


def is_sequence(tree: Tree) -> bool:
    """Whether a tree is a list or tuple of further trees, one per layer.

    A named tuple is not: it is one tree, whose arrays stack all layers.
    """
    return type(tree) in (tuple, list)


def num_layers(layers: Tree) -> int:
    """Counts the layers of canonical ``params["layers"]``."""
    return len(layers) if is_sequence(layers) else jax.tree.leaves(layers)[0].shape[0]


def select(tree: Tree, like: Tree) -> Tree:
    """A tree with None in place of every leaf that another one lacks.

    Example:
      >>> select({"a": 1, "b": 2}, {"a": "any", "b": None})
      {'a': 1, 'b': None}
    """
    return jax.tree.map(
        lambda one, leaf: None if one is None else leaf, like, tree, is_leaf=_is_none
    )


def divide(tree: Tree, others: Tree) -> tuple[Tree, Tree]:
    """The leaves of a tree that another one has not, and those that it has; `combine` undoes it.

    Example:
      >>> divide({"a": 1, "b": 2}, {"a": None, "b": "any"})
      ({'a': 1, 'b': None}, {'a': None, 'b': 2})
    """
    mine = jax.tree.map(
        lambda other, leaf: leaf if other is None else None, others, tree, is_leaf=_is_none
    )
    return mine, select(tree, others)


def combine(tree: Tree, others: Tree) -> Tree:
    """The leaves of two trees that each have None where the other has a leaf.

    Example:
      >>> combine({"a": 1, "b": None}, {"a": None, "b": 2})
      {'a': 1, 'b': 2}
    """
    return jax.tree.map(
        lambda one, other: other if one is None else one, tree, others, is_leaf=_is_none
    )


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which gradients of this dtype are summed: float32 for narrower floats.

    A sum in bfloat16 no longer grows by a gradient below a 256th of it.
    """
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(jnp.float32) if narrow else dtype


def widened(tree: Tree) -> Tree:
    """The arrays in the dtypes in which their gradients are summed."""
    return jax.tree.map(lambda w: w.astype(sum_dtype(w.dtype)), tree)


def rounded(tree: Tree, like: Tree) -> Tree:
    """The arrays in the dtypes of another tree's leaves; undoes `widened`."""
    return jax.tree.map(lambda leaf, w: w.astype(leaf.dtype), like, tree)


def _is_none(node: object) -> bool:
    return node is None


def describe(tree: Tree) -> str:
    """A tree of arrays or shapes in words: ``{'source': float32[2, 3]}``."""
    return str(jax.tree.map(lambda leaf: _Text(f"{leaf.dtype}{list(leaf.shape)}"), tree))


def describe_leaf(leaf: object) -> str:
    """A leaf in words, whether it is an array or not."""
    shape = shape_of(leaf)
    if shape is not None:
        return describe(shape)
    found = f"a {type(leaf).__name__}, not an array"
    if isinstance(leaf, np.ma.MaskedArray):
        found += " of JAX or NumPy: fill it with `leaf.filled(value)`"
    elif isinstance(leaf, np.ndarray):  # of objects or text
        found = f"an array of dtype {leaf.dtype}, which JAX has not: convert it with `leaf.astype`"
    elif hasattr(leaf, "__dlpack__"):  # a tensor of PyTorch, for example
        found += " of JAX or NumPy: convert it with `numpy.asarray`"
    return found


def strongly_typed(tree: Tree) -> Tree:
    """The arrays without weak types, which a training step would lose and be compiled again."""
    return jax.tree.map(lambda w: jnp.asarray(w, w.dtype), tree)


def mismatches(name: str, found: Tree, expected: Shapes, *, dtypes: bool = True) -> list[str]:
    """Says everything in which a tree differs from the expected one.

    Args:
      name: the argument's name, with which every path begins.
      found: a tree of arrays, of shapes, or of anything else.
      expected: a tree of shapes.
      dtypes: whether dtypes must agree, too.

    Returns:
      A line for every difference, with its path, what was found and what was expected.

    Example:
      >>> mismatches("params", {"w": jnp.ones(3)}, {"w": jax.ShapeDtypeStruct((2,), "float32")})
      ["params['w'] is float32[3]; expected float32[2]."]
    """
    lines = list(leaf_mismatches(name, found, expected, dtypes=dtypes))
    structures: list[Any] = [jax.tree.structure(tree) for tree in (found, expected)]
    if not lines and structures[0] != structures[1]:
        lines.append(f"{name} has the structure {structures[0]}; expected {structures[1]}.")
    return lines


def leaf_mismatches(
    name: str, found: Tree, expected: Shapes, *, dtypes: bool = True
) -> Iterator[str]:
    """Says in which leaves a tree differs, as `mismatches`; what holds no leaf may differ."""
    have, want = dict(jax.tree.leaves_with_path(found)), dict(jax.tree.leaves_with_path(expected))
    for path, leaf in want.items():
        at = name + jax.tree_util.keystr(path)
        if path not in have:
            yield f"{at} is missing; expected {describe(leaf)}."
            continue
        shape = shape_of(have[path])
        same_dtype = shape is not None and shape.dtype == leaf.dtype
        if shape is None or shape.shape != leaf.shape or (dtypes and not same_dtype):
            yield f"{at} is {describe_leaf(have[path])}; expected {describe(leaf)}."
    for path in [path for path in have if path not in want]:
        at = name + jax.tree_util.keystr(path)
        yield f"{at} is {describe_leaf(have[path])}; nothing is expected there."


def deleted(**trees: Tree) -> Iterator[str]:
    """Names the trees that hold an array which has been donated or deleted."""
    for name, tree in trees.items():
        for path, leaf in jax.tree.leaves_with_path(tree):
            is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
            if is_array and leaf.is_deleted():
                yield (
                    f"{name}{jax.tree_util.keystr(path)} has been deleted: a training step donates "
                    "its arguments and reuses their memory. Go on with what it has returned: "
                    "`loss, params, state = step(params, state, batch)`."
                )
                break


def elsewhere(mesh: Mesh, **trees: Tree) -> Iterator[str]:
    """Names what a program for the devices of a mesh cannot take: arrays that have been put on
    others, and objects that are no arrays."""
    devices = set(mesh.devices.flat)
    for name, tree in trees.items():
        for path, leaf in jax.tree.leaves_with_path(tree):
            at = f"{name}{jax.tree_util.keystr(path)}"
            if hasattr(leaf, "__dlpack__") and shape_of(leaf) is None:
                yield f"{at} is {describe_leaf(leaf)}."
            elif isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
                continue
            elif leaf.committed and leaf.sharding.device_set != devices:
                found: set[jax.Device] = leaf.sharding.device_set
                numbers = sorted(device.id for device in found)
                yield (
                    f"{at} has been put on the devices {numbers}, and not on all {len(devices)} of "
                    "the mesh. Leave it in numpy, or put a batch where it belongs: "
                    "`jax.device_put(batch, pipe.batch_sharding)`."
                )


class _Text(str):
    """A string that prints itself without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def joined(tree: Tree) -> list[jax.Array]:
    """Puts all arrays of a tree into one row for each dtype, ``[1, elements]``.

    Example:
      >>> joined({"a": jnp.ones(2), "b": jnp.zeros((1, 2))})[0].tolist()
      [[1.0, 1.0, 0.0, 0.0]]
    """
    arrays = jax.tree.leaves(tree)
    return [
        jnp.concatenate([w.reshape(1, -1) for w in arrays if w.dtype == dtype], axis=1)
        for dtype in dict.fromkeys(w.dtype for w in arrays)
    ]


def parted(rows: list[jax.Array], like: Tree) -> Tree:
    """Undoes `joined` of a tree like this one."""
    row_of, taken = {row.dtype: row for row in rows}, {row.dtype: 0 for row in rows}

    def take(w: jax.Array) -> jax.Array:
        start = taken[w.dtype]
        taken[w.dtype] += w.size
        return row_of[w.dtype][0, start : taken[w.dtype]].reshape(w.shape)

    return jax.tree.map(take, like)
