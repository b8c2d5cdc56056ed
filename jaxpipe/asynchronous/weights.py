"""Weights in versions: where the actions of an asynchronous pipeline find theirs.

A part's weights are kept in as many versions as the method reads, which rotate; a row says which
slot an action reads. T2 corrects what a backward reads.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.asynchronous.steady import SteadyState
from jaxpipe.runtime.barriers import tie
from jaxpipe.runtime.layout.data_axis import gather
from jaxpipe.runtime.tick.fixed import Fixed, LayerWork, WeightSource
from jaxpipe.runtime.types import Arrays, Index, OuterParams, Stored, Tree
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import Integer


class Versions(NamedTuple):
    """All versions of a stage's weights.

    Args:
      weights: by part: of layers, versions follow each other as slots do; of embedding and head
        they have a leading dimension.
      delta: T2's mean steps of the parts that it corrects.
    """

    weights: dict[str, Arrays]
    delta: dict[str, Arrays]

    def at(self, name: str, slot: Index, num_versions: int, slot_dim: int) -> Tree:
        """One version of a part; layers are laid out as one chunk is."""
        if name == "layers":
            return read_slot(self.weights[name], slot, num_versions, slot_dim)
        return jax.tree.map(
            lambda w: lax.dynamic_index_in_dim(w, slot, keepdims=False), self.weights[name]
        )

    def written(self, name: str, slot: Index, new: Arrays, slot_dim: int) -> dict[str, Arrays]:
        """The weights of all parts with another version of one in a slot."""
        if name != "layers":
            slot_dim, new = 0, jax.tree.map(lambda w: w[None], new)
        return self.weights | {name: write_slot(self.weights[name], slot, new, slot_dim)}


def read_slot(arrays: Arrays, slot: Index, count: int, slot_dim: int) -> Arrays:
    """One slot of ``count`` that follow each other along a dimension."""

    def read(w: jax.Array) -> jax.Array:
        size = w.shape[slot_dim] // count
        return lax.dynamic_slice_in_dim(w, slot * size, size, slot_dim)

    return jax.tree.map(read, arrays)


def write_slot(arrays: Arrays, slot: Index, new: Arrays, slot_dim: int) -> Arrays:
    """The arrays with another slot; `read_slot` reads it."""

    def write(w: jax.Array, n: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(w, n, slot * n.shape[slot_dim], slot_dim)

    return jax.tree.map(write, arrays, new)


@dataclasses.dataclass(frozen=True)
class Versioned(WeightSource):
    """Weights in the versions that the rows say; gathered layer by layer under ZeRO-3.

    ``corrects`` says whether T2 corrects what a backward reads, ``reads`` which versions the phases
    of a tick read.
    """

    steady: SteadyState
    corrects: bool
    reads: dict[str, dict[str, Integer]] = dataclasses.field(default_factory=dict)

    def layer(self, work: LayerWork) -> list[Stored]:
        params, held = work.fixed.params, work.held
        weights = params.read(held.weights["layers"], work.place(work.cell.weights))
        if self.corrects and work.action is not Kind.F:
            part = self.steady.stage(work.fixed.stage)
            tau = self.steady.mean_delay(part)
            if work.action is Kind.R:
                tau -= self.steady.mean_recompute_delay(part)
            weights = _corrected(weights, params.read(held.delta["layers"], work.place(0)), tau)
        if work.fixed.setup.options.zero == 3:
            weights = gather(weights, work.leaves, work.fixed.axes)
        return [weights]

    def outer(
        self, fixed: Fixed, held: Versions, phase: str, value: Tree
    ) -> tuple[OuterParams, Tree]:
        slots, count = self.reads[phase], self.steady.num_versions
        outer = {name: held.at(name, slot, count, 0) for name, slot in slots.items()}
        if self.corrects and phase == "embed_gradient":
            (embed, delta), value = tie((outer["embed"], held.delta["embed"]), value)
            tau = self.steady.mean_delay(self.steady.embed)
            outer["embed"] = _corrected(embed, delta, tau)
        if fixed.setup.options.zero == 3:
            outer, value = tie(outer, value)
            outer = gather(outer, fixed.setup.layout.outer, fixed.axes)
        return outer, value


def _corrected(weights: Stored, delta: Stored, tau: Index) -> Stored:
    """T2's guess of what the forward has read."""
    return jax.tree.map(lambda w, d: w - jnp.asarray(tau, w.dtype) * d, weights, delta)
