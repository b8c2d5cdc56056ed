"""The end of an asynchronous tick: the parts whose minibatch is complete are updated.

A part's optimizer runs in a loop of one trip or none, so that ticks without an update touch
nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.barriers import run_if, tie
from jaxpipe.runtime.layout.data_axis import reduce_gradients
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.tick.carried import Carried
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.gradients import GradientSink
from jaxpipe.runtime.tick.work import LayerWork
from jaxpipe.runtime.trees import rounded, widened
from jaxpipe.runtime.types import Arrays, Gradients, Index, Leaves, Shapes, Stored, Tree
from jaxpipe.runtime.update.asynchronous_weights import Versions
from jaxpipe.runtime.update.optimizer import PARTS, PlacedOptimizer
from jaxpipe.schedule.generators.pipemare import Part, SteadyState
from jaxpipe.schedule.lowering.table import NONE, Outer, Row, Update, Updates

Norms: TypeAlias = dict[str, jax.Array]
"""Squares of norms by part, and their "total"."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """How an asynchronous run trains.

    Args:
      steady: ticks, delays and versions.
      optimizer: what updates the parts.
      rescheduling_steps: T1's K, or None.
      discrepancy_decay: T2's D, or None.
      clip_norm: the largest norm over the newest finished gradients of all parts, or None.
    """

    steady: SteadyState
    optimizer: PlacedOptimizer
    rescheduling_steps: int | None
    discrepancy_decay: float | None
    clip_norm: float | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Optimized:
    """What is carried for the updates beside weights.

    Args:
      states: the components of the optimizer's state, by part.
      rest: its leaves that belong to no parameter, by part.
      norms: of the newest finished gradients.
    """

    states: dict[str, list[Tree]]
    rest: dict[str, list[jax.Array]]
    norms: Norms


@dataclasses.dataclass(frozen=True)
class Updated(GradientSink):
    """A part whose minibatch is complete is updated at the end of the tick.

    ``tied`` says whether the head reads the embedding's parameters.
    """

    rules: Rules
    tied: bool

    @property
    def steady(self) -> SteadyState:
        return self.rules.steady

    @property
    def num_sums(self) -> int:
        """Sums of the embedding's gradients that rotate."""
        return self.steady.num_sums(tied=self.tied)

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        placed, sharded = fixed.params.placed, fixed.setup.zero >= 2
        sums = jax.tree.map(lambda leaf: leaf.summed.struct(sharded=sharded), placed)
        return {"gradients": sums}

    def add(self, work: LayerWork, sums: Arrays, stored: Stored) -> Arrays:
        zero, starts = work.fixed.setup.zero, self._starts(work.cell.microbatch)
        stored = widened(stored)
        if zero >= 2:  # sums are split, and never at rest: one reduction per microbatch
            stored = reduce_gradients(stored, work.leaves, work.fixed.axes, zero=zero)
        return work.fixed.params.update(
            sums, work.place(), stored, lambda old, new: jnp.where(starts, new, old + new)
        )

    def add_outer(self, sums: Gradients, new: Gradients, phase: str, row: Outer) -> Gradients:
        i = row.head if phase == "leave" else row.embed_gradient
        slot, starts = i // self.steady.num_microbatches % self.num_sums, self._starts(i)
        new = widened(new)

        def embed(total: jax.Array, value: jax.Array, fresh: Index) -> jax.Array:
            old = lax.dynamic_index_in_dim(total, slot, keepdims=False)
            value = jnp.where(fresh, value, old + value)
            return lax.dynamic_update_index_in_dim(total, value, slot, 0)

        if phase == "leave":
            head = jax.tree.map(lambda t, v: jnp.where(starts, v, t + v), sums["head"], new["head"])
            sums = sums | {"head": head}
            if not self.tied:
                return sums
            fresh = starts
        else:
            fresh = False if self.tied else starts
        table = jax.tree.map(lambda t, v: embed(t, v, fresh), sums["embed"], new["embed"])
        return sums | {"embed": table}

    def _starts(self, microbatch: Index) -> Index:
        """Whether a microbatch is the first of its minibatch, whose sums replace those before."""
        return microbatch % self.steady.num_microbatches == 0

    def tick(self, fixed: Fixed, carried: Carried, row: Row) -> Carried:
        """Measures the finished gradients, then updates their parts."""
        assert row.updates is not None
        updates = row.updates
        if self.rules.clip_norm is not None:
            carried = self._measure(fixed, carried, updates)
        for name in PARTS:
            carried = self._update(fixed, carried, name, getattr(updates, name))
        return carried

    def _part(self, fixed: Fixed, name: str) -> Part:
        if name == "layers":
            return self.steady.stage(fixed.stage)
        return self.steady.embed if name == "embed" else self.steady.head

    def _tau(self, fixed: Fixed, name: str) -> jax.Array:
        return jnp.asarray(self.steady.mean_delay(self._part(fixed, name)), jnp.float32)

    def _sums(self, carried: Carried, name: str, minibatch: Index) -> Gradients:
        """A part's gradient as this data shard has summed it."""
        if name == "layers":
            return carried.gradients
        sums = carried.outer_gradients[name]
        if name == "head":
            return sums
        slot = minibatch % self.num_sums
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, slot, keepdims=False), sums)

    def _finished(self, fixed: Fixed, sums: Gradients, name: str) -> Gradients:
        """A part's gradient, reduced over data; split over it from ZeRO-1 on."""
        leaves, zero = _placed(fixed, name), fixed.setup.zero
        if name != "layers" or zero < 2:
            sums = reduce_gradients(sums, leaves, fixed.axes, zero=zero)
        return rounded(sums, leaves)

    def _update(self, fixed: Fixed, carried: Carried, name: str, update: Update) -> Carried:
        """The optimizer's step of one part, if its minibatch is complete."""
        versions, step = self.steady.num_versions, self.rules.optimizer.step

        def body(through: tuple[Versions, list[Tree], Any]) -> tuple[Versions, list[Tree], Any]:
            sums = self._sums(carried, name, update.minibatch)
            sums, (held, states, rest) = tie(sums, through)
            gradients = self._finished(fixed, sums, name)
            if self.rules.clip_norm is not None:
                gradients = self._clipped(carried, gradients)
            old = held.at(fixed.params, update.version, versions)[name]
            shared = step.share([*rest, *self._scale(fixed, name, update.version)])
            given = [gradients, old, *states]
            new, *states = step.part(name, given, shared)
            weights = held.written(fixed.params, name, (update.version + 1) % versions, new)
            delta = self._moved(fixed, held.delta, name, old, new)
            return Versions(weights, delta), states, step.rest(shared)

        finished = carried.finished
        through = carried.weights, finished.states[name], finished.rest[name]
        held, states, rest = run_if(update.minibatch != NONE, body, through)
        new = dataclasses.replace(
            finished,
            states=finished.states | {name: states},
            rest=finished.rest | {name: rest},
        )
        return carried.but(weights=held, finished=new)

    def _scale(self, fixed: Fixed, name: str, version: Index) -> list[jax.Array]:
        """T1: divides the rate by max(tau, 1)^p, where p falls from 1 to 0 over K updates."""
        if self.rules.rescheduling_steps is None:
            return []
        p = 1 - jnp.minimum(version / self.rules.rescheduling_steps, 1)
        return [jnp.maximum(self._tau(fixed, name), 1) ** -p]

    def _moved(
        self, fixed: Fixed, delta: dict[str, Arrays], name: str, old: Arrays, new: Arrays
    ) -> dict[str, Arrays]:
        """T2: the average of the steps weights have really taken."""
        if name not in delta:
            return delta
        decay = jnp.float32(cast(float, self.rules.discrepancy_decay))
        gamma = decay ** (1 / self._tau(fixed, name))

        def move(d: jax.Array, before: jax.Array, after: jax.Array) -> jax.Array:
            g = gamma.astype(d.dtype)
            return g * d + (1 - g) * (after - before)

        return delta | {name: jax.tree.map(move, delta[name], old, new)}

    # Clipping.

    def _measure(self, fixed: Fixed, carried: Carried, updates: Updates) -> Carried:
        """Renews the norms of the parts that finish a gradient in this tick, before any is updated;
        the others keep the norm of their newest one."""

        def body(norms: Norms) -> Norms:
            for name in PARTS:
                update: Update = getattr(updates, name)

                def square(norms: Norms, name: str = name, update: Update = update) -> Norms:
                    sums, norms = tie(self._sums(carried, name, update.minibatch), norms)
                    finished = self._finished(fixed, sums, name)
                    return norms | {name: self._squared_norm(fixed, finished, name)}

                norms = run_if(update.minibatch != NONE, square, norms)
            layers = lax.psum(norms["layers"], fixed.axes.stage)
            return norms | {"total": layers + norms["embed"] + norms["head"]}

        norms = run_if(updates.any_stage, body, carried.finished.norms)
        return carried.but(finished=dataclasses.replace(carried.finished, norms=norms))

    def _squared_norm(self, fixed: Fixed, gradients: Gradients, name: str) -> jax.Array:
        """The square of a part's norm; of the stage's own layers."""

        def square(leaf: Leaf, g: jax.Array) -> jax.Array:
            total = jnp.sum(jnp.square(g.astype(jnp.float32)))
            if fixed.setup.zero >= 1 and leaf.data_dim is not None:
                total = lax.psum(total, fixed.axes.split)
            return total if leaf.stage_dim is None else lax.psum(total, fixed.axes.stage)

        squares = jax.tree.leaves(jax.tree.map(square, _placed(fixed, name), gradients))
        return sum(squares, jnp.float32(0))

    def _clipped(self, carried: Carried, gradients: Gradients) -> Gradients:
        """Clipped by the norm over the newest finished gradients of all parts."""
        limit = cast(float, self.rules.clip_norm)
        scale = limit / jnp.maximum(jnp.sqrt(carried.finished.norms["total"]), limit)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)


def _placed(fixed: Fixed, name: str) -> Leaves:
    return fixed.params.placed if name == "layers" else fixed.setup.layout.outer[name]
