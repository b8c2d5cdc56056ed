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

from jaxpipe.runtime.barriers import tie
from jaxpipe.runtime.layout.data_axis import gather
from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.weights import WeightSource
from jaxpipe.runtime.tick.work import LayerWork
from jaxpipe.runtime.types import Arrays, Index, OuterParams, Stored, Tree
from jaxpipe.runtime.update.optimizer import PARTS
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.generators.pipemare import SteadyState
from jaxpipe.schedule.lowering.table import Outer


class Versions(NamedTuple):
    """All versions of a stage's weights.

    Args:
      weights: by part: of layers, versions follow each other as slots do; of embedding and head
        they have a leading dimension.
      delta: T2's mean steps of the parts that it corrects.
    """

    weights: dict[str, Arrays]
    delta: dict[str, Arrays]

    def layers_at(self, params: LayerLayout, slot: Index, num_versions: int) -> Arrays:
        """One version of the layers, laid out as one chunk is."""

        def read(w: jax.Array) -> jax.Array:
            size = w.shape[params.slot_dim] // num_versions
            return lax.dynamic_slice_in_dim(w, slot * size, size, params.slot_dim)

        return jax.tree.map(read, self.weights["layers"])

    def outer_at(self, name: str, slot: Index) -> Tree:
        """One version of embedding or head."""
        return jax.tree.map(
            lambda w: lax.dynamic_index_in_dim(w, slot, keepdims=False), self.weights[name]
        )

    def at(self, params: LayerLayout, version: Index, num_versions: int) -> dict[str, Arrays]:
        """One version of every part."""
        slot = version % num_versions
        return {
            name: self.layers_at(params, slot, num_versions)
            if name == "layers"
            else self.outer_at(name, slot)
            for name in PARTS
        }

    def written(
        self, params: LayerLayout, name: str, slot: Index, new: Arrays
    ) -> dict[str, Arrays]:
        """The weights of all parts with another version of one in a slot."""

        def layers(w: jax.Array, n: jax.Array) -> jax.Array:
            start = slot * n.shape[params.slot_dim]
            return lax.dynamic_update_slice_in_dim(w, n, start, params.slot_dim)

        def outer(w: jax.Array, n: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(w, n, slot, 0)

        write = layers if name == "layers" else outer
        return self.weights | {name: jax.tree.map(write, self.weights[name], new)}


@dataclasses.dataclass(frozen=True)
class Versioned(WeightSource):
    """Weights in the versions that the rows say; gathered layer by layer under ZeRO-3.

    ``corrects`` says whether T2 corrects what a backward reads.
    """

    steady: SteadyState
    corrects: bool

    def layer(self, work: LayerWork) -> list[Stored]:
        params, held = work.fixed.params, work.held
        weights = params.read(held.weights["layers"], work.place(work.cell.weights))
        if self.corrects and work.action is not Kind.F:
            part = self.steady.stage(work.fixed.stage)
            tau = self.steady.mean_delay(part)
            if work.action is Kind.R:
                tau -= self.steady.mean_recompute_delay(part)
            weights = _corrected(weights, params.read(held.delta["layers"], work.place(0)), tau)
        if work.fixed.setup.zero == 3:
            weights = gather(weights, work.leaves, work.fixed.axes)
        return [weights]

    def outer(
        self, fixed: Fixed, held: Versions, phase: str, row: Outer, value: Tree
    ) -> tuple[OuterParams, Tree]:
        assert row.reads is not None
        slots = row.reads[phase]._asdict()
        outer = {name: held.outer_at(name, slot) for name, slot in slots.items()}
        if self.corrects and phase == "embed_gradient":
            (embed, delta), value = tie((outer["embed"], held.delta["embed"]), value)
            tau = self.steady.mean_delay(self.steady.embed)
            outer["embed"] = _corrected(embed, delta, tau)
        if fixed.setup.zero == 3:
            outer, value = tie(outer, value)
            outer = gather(outer, fixed.setup.layout.outer, fixed.axes)
        return outer, value


def _corrected(weights: Stored, delta: Stored, tau: Index) -> Stored:
    """T2's guess of what the forward has read."""
    return jax.tree.map(lambda w, d: w - jnp.asarray(tau, w.dtype) * d, weights, delta)
