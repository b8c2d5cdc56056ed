"""Results of the pipeline: `Losses` are added up, `Outputs` are put in order."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.layers import losses
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.tick.microbatches import join_rows
from jaxpipe.runtime.trees import describe
from jaxpipe.runtime.types import Batch, Index, Shapes, Tree


class Collector(Protocol):
    """A collector of what the head returns for the microbatches."""

    def empty(self) -> Tree:
        """Makes what is collected before the first microbatch."""

    def add(self, collected: Tree, new: Tree, i: Index) -> Tree:
        """Adds what the head returns for microbatch i."""

    def result(self, collected: Tree, layer_losses: Tree) -> Tree:
        """Makes what a step returns; ``layer_losses`` are this stage's sums over layers, if any."""


@dataclasses.dataclass(frozen=True)
class Losses:
    """Loss and metrics, which are added up.

    Args:
      shapes: of what the head returns for a microbatch, made `losses.addable`.
      microbatches: of a step.
      layers: how many have losses.
      axes: the mesh axes by their use.
    """

    shapes: Shapes
    microbatches: int
    layers: int
    axes: Axes

    def empty(self) -> Tree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.shapes)

    def add(self, collected: Tree, new: Tree, i: Index) -> Tree:
        return jax.tree.map(jnp.add, collected, losses.addable(new))

    def result(self, collected: Tree, layer_losses: Tree) -> Tree:
        """The same on every device."""

        def mean(w: jax.Array) -> jax.Array:
            return lax.pmean(w, self.axes.peers)

        def total(tree: Tree) -> Tree:
            return lax.psum(tree, self.axes.peers)

        copies = lax.axis_size(self.axes.model)
        combined = partial(losses.combined, mean=mean, total=total, copies=copies)
        result = combined(collected, self.microbatches)
        if layer_losses is None:
            return result
        loss, metrics = losses.parts(lax.psum(layer_losses, self.axes.stage))
        metrics = combined(metrics, self.microbatches * self.layers)
        return losses.with_metrics(result, mean(loss / self.microbatches), metrics)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Outputs ``[rows, ...]`` of every microbatch, which are put in the order of the batch's rows.

    ``shapes`` are those of a microbatch, or of one of its slices, of which there are
    ``microbatches`` in all.
    """

    shapes: Shapes
    microbatches: int
    num_slices: int

    def empty(self) -> Tree:
        def buffer(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            rows, *others = leaf.shape
            return jnp.zeros((rows, self.microbatches, *others), leaf.dtype)

        return jax.tree.map(buffer, self.shapes)

    def add(self, collected: Tree, new: Tree, i: Index) -> Tree:
        return jax.tree.map(
            lambda kept, w: lax.dynamic_update_index_in_dim(kept, w, i, 1), collected, new
        )

    def result(self, collected: Tree, layer_losses: Tree) -> Tree:
        """This data shard's rows, the same on every stage."""
        return join_rows(collected, self.num_slices)


def check_output(output: Shapes, rows: Batch, num_slices: int) -> None:
    """Raises ValueError if what `Model.output` returns does not begin with a microbatch's rows, or
    with the rows and the positions of a slice."""
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    leaves = jax.tree.leaves(output)
    if not leaves or any(leaf.shape[:1] != (num_rows,) for leaf in leaves):
        raise ValueError(
            f"Model.output returns {describe(output)}; it must return arrays whose first dimension "
            f"is the {num_rows} rows of a microbatch. What is not per row is a metric of "
            "`Model.head_loss`."
        )
    if num_slices > 1:
        length = next(w.shape[1] for w in jax.tree.leaves(rows) if w.ndim > 1)
        if any(leaf.shape[1:2] != (length,) for leaf in leaves):
            raise ValueError(
                f"Model.output returns {describe(output)} for a slice of a sequence; its arrays "
                f"must begin with rows and the {length} positions of the slice. Use a schedule "
                "without slices for other outputs."
            )
