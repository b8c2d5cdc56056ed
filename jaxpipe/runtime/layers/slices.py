"""Layers that run a sequence slice by slice, and carry what later slices read.

A layer that mixes the tokens of a sequence is given, beside a slice of its input, what it has left
behind after the slices before: a tree of arrays, its carry. Keys and values of attention are
buffers for the whole sequence, to which every slice appends its own (`Appended`); recurrent layers
carry their state. The pipeline keeps one carry for every layer and sequence in flight, and in the
backward, which takes the slices from the last to the first, its cotangent.

Source: Li et al., "TeraPipe", arXiv 2102.07988; Sun et al., "Seq1F1B", arXiv 2406.03488.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.runtime.layers.losses import WithLoss
from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.trees import bare_shapes, describe
from jaxpipe.runtime.types import Activation, Batch, Index, Key, LayerParams, Shapes, Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Appended:
    """Marks an array of a carry as a buffer of the whole sequence, to which slices append.

    A layer writes the positions of its slice. Its results must not depend on later positions, which
    may hold any finite values. So a backward may read the buffer after later slices have written to
    it, and no slice keeps a copy.

    Args:
      array: the empty buffer.

    Example:
      >>> import jax.numpy as jnp
      >>> def carry(x, microbatch, num_slices):  # a key of 8 numbers for each token
      ...     rows, length, _ = x.shape
      ...     return {"keys": Appended(jnp.zeros((rows, num_slices * length, 8), x.dtype))}
    """

    array: jax.Array


class Carry(NamedTuple):
    """The carry of a kind of layer.

    Args:
      empty: makes the carry of a first slice from that slice of the layer's input and of the
        microbatch.
      appended: for each of its arrays, whether slices append to it.
    """

    empty: Callable[[Activation, Batch], Tree]
    shapes: Shapes
    appended: tuple[bool, ...]

    def begun(self, x: Activation, microbatch: Batch, before: Tree, start: Index) -> Tree:
        """The carry that a layer is given for a slice, from what was left before: a first slice has
        an empty one."""
        leaves, structure = jax.tree.flatten(before)
        empty = jax.tree.leaves(self.empty(x, microbatch))
        chosen = [
            value if is_one else jnp.where(start == 0, first, value)
            for value, first, is_one in zip(leaves, empty, self.appended, strict=True)
        ]
        return jax.tree.unflatten(structure, chosen)

    @property
    def buffers(self) -> list[Shapes]:
        """The shapes of the arrays to which slices append."""
        leaves = jax.tree.leaves(self.shapes)
        return [leaf for leaf, is_one in zip(leaves, self.appended, strict=True) if is_one]


def carry_of(model: Model, layer: int, x: Activation, microbatch: Batch, num_slices: int) -> Carry:
    """Makes the carry of a layer, by its canonical number, that is given slices of these shapes."""

    def marked(x: Activation, microbatch: Batch) -> Tree:
        return jax.tree.map(jnp.asarray, model.carry_function(layer)(x, microbatch, num_slices))

    def is_marked(value: Tree) -> bool:
        return isinstance(value, Appended)

    def empty(x: Activation, microbatch: Batch) -> Tree:
        arrays = marked(x, microbatch)
        return jax.tree.map(lambda w: w.array if is_marked(w) else w, arrays, is_leaf=is_marked)

    leaves = jax.tree.leaves(jax.eval_shape(marked, x, microbatch), is_leaf=is_marked)
    shapes = bare_shapes(jax.eval_shape(empty, x, microbatch))
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(shapes)):
        raise ValueError(
            f"Model.carry returns {describe(shapes)} for layer {layer}; only floating-point arrays "
            "go from slice to slice, since their cotangents come back. Integers up to 2**24 are "
            "exact in float32."
        )
    return Carry(empty, shapes, tuple(map(is_marked, leaves)))


def on_slices(layer: Callable[..., Tree], carry: Carry) -> Callable[..., Tree]:
    """Makes of a layer that carries one that maps the pair of x and the carry to the next pair.

    The empty carry is a part of it, since it may depend on x."""

    def run(
        params: LayerParams,
        x: tuple[Activation, Tree],
        microbatch: Batch,
        rng: Key,
        start: Index,
    ) -> Tree:
        own, before = x
        begun = carry.begun(own, microbatch, before, start)
        y, after = layer(params, own, microbatch, rng, begun, start)
        return WithLoss((y.x, after), y.loss) if isinstance(y, WithLoss) else (y, after)

    return run
