"""The end of an asynchronous tick: the parts whose minibatch is complete are updated.

A part's weights are kept in as many versions as the method reads, which rotate; its optimizer runs
in a loop of one trip or none, so that ticks without an update touch nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.data_axis import gather, own_shard, reduce_gradients
from jaxpipe.runtime.executor import Run
from jaxpipe.runtime.layer_passes import tie
from jaxpipe.runtime.mesh import DATA, STAGE
from jaxpipe.runtime.packed_parameters import Packed
from jaxpipe.runtime.parameters import Stacked, Unrolled
from jaxpipe.runtime.part_optimizer import PARTS, PartOptimizer, apply
from jaxpipe.schedule.pipemare import Part, SteadyState

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Rules:
    """How an asynchronous run trains.

    Args:
      steady: ticks, delays and versions.
      optimizer: updates one part at a time.
      rescheduling_steps: T1's K, or None.
      discrepancy_decay: T2's D, or None.
      clip_norm: the largest norm over the newest finished gradients of all parts, or None.
    """

    steady: SteadyState
    optimizer: PartOptimizer
    rescheduling_steps: int | None
    discrepancy_decay: float | None
    clip_norm: float | None


class UpdatingRun(Run):
    """A run whose weights are updated within it, part by part.

    Attributes:
      rules: how to train.
      steady: ticks, delays and versions.
      now: the tick, counted since the pipeline was last empty.
      clock: "entered" microbatches, and the "first" version.
      num_sums: sums of the embedding's gradients that rotate.
    """

    rules: Rules
    steady: SteadyState
    now: Any
    clock: dict[str, Any]
    num_sums: int

    def _runs(self, g):
        return (g >= 0) & (g < self.clock["entered"])

    def _part(self, name: str) -> Part:
        if name == "layers":
            return self.steady.stage(self.stage)
        return self.steady.embed if name == "embed" else self.steady.head

    def _tau(self, part: Part):
        return jnp.asarray(self.steady.mean_delay(part), jnp.float32)

    def _due(self, name: str):
        """Whether a part's minibatch is complete in this tick, and its number since the fill."""
        g = self.now - self._part(name).backward
        return self._runs(g) & self.steady.updates(g), g // self.steady.num_microbatches

    def _sums(self, state: dict, name: str, minibatch) -> PyTree:
        """A part's gradient as this data shard has summed it."""
        if name == "layers":
            return state["gradients"]
        sums = state["outer_gradients"][name]
        if name == "head":
            return sums
        slot = minibatch % self.num_sums
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, slot, keepdims=False), sums)

    def _finished(self, sums: PyTree, name: str) -> PyTree:
        """A part's gradient, reduced over data; split over it from ZeRO-1 on."""
        if name == "layers" and self.plan.zero >= 2:
            return sums
        return reduce_gradients(sums, self._placed(name), zero=self.plan.zero)

    def _placed(self, name: str) -> PyTree:
        return self.params.placed if name == "layers" else self.plan.layout.outer[name]

    def _update(self, state: dict, name: str) -> dict:
        """The optimizer's step of one part, if its minibatch is complete."""
        due, minibatch = self._due(name)
        version = self.clock["first"] + minibatch
        changed = ("weights", "delta", "owned", "rest")

        def body(_, carry):
            sums, carry = tie(self._sums(state, name, minibatch), carry)
            gradients = self._finished(sums, name)
            if self.rules.clip_norm is not None:
                gradients = self._clipped(state, gradients)
            whole = {part: self._version(carry["weights"], part, version) for part in PARTS}
            shards = {
                part: own_shard(whole[part], self._placed(part), zero=self.plan.zero)
                for part in PARTS
            }
            # The optimizer sees layers as they are placed, behind a dimension for the stages.
            behind_stage = shards | {"layers": _lead(shards["layers"])}
            updates, owned, rest = self.rules.optimizer.update(
                name,
                _lead(gradients) if name == "layers" else gradients,
                carry["owned"],
                carry["rest"][name],
                behind_stage,
            )
            if name == "layers":
                updates = jax.tree.map(lambda u: u[0], updates)
            new = apply(shards[name], self._rescheduled(updates, name, version))
            if self.plan.zero in (1, 2):
                new = gather(new, self._placed(name))
            return {
                "weights": carry["weights"]
                | {name: self._with_version(carry["weights"][name], name, version + 1, new)},
                "delta": self._moved(carry["delta"], name, whole[name], new),
                "owned": owned,
                "rest": carry["rest"] | {name: rest},
            }

        carry = {key: state[key] for key in changed}
        return state | lax.fori_loop(0, due.astype(jnp.int32), body, carry)

    def newest_weights(self, state: dict) -> PyTree:
        """Every part's newest version, between two calls."""
        now, first = state["clock"]["tick"], state["clock"]["first"]
        return {
            name: self._version(
                state["weights"], name, self.steady.newest(self._part(name), now, first)
            )
            for name in PARTS
        }

    def _version(self, weights: dict, name: str, version) -> PyTree:
        """One version of a part's weights, laid out as one chunk is."""
        slot = version % self.steady.num_versions
        if name != "layers":
            return jax.tree.map(
                lambda w: lax.dynamic_index_in_dim(w, slot, keepdims=False), weights[name]
            )

        def read(w):
            size = w.shape[slot_axis(self.params)] // self.steady.num_versions
            return lax.dynamic_slice_in_dim(w, slot * size, size, slot_axis(self.params))

        return jax.tree.map(read, weights[name])

    def _with_version(self, ring: PyTree, name: str, version, new: PyTree) -> PyTree:
        slot = version % self.steady.num_versions
        if name != "layers":
            return jax.tree.map(
                lambda w, n: lax.dynamic_update_index_in_dim(w, n, slot, 0), ring, new
            )

        def write(w, n):
            start = slot * n.shape[slot_axis(self.params)]
            return lax.dynamic_update_slice_in_dim(w, n, start, slot_axis(self.params))

        return jax.tree.map(write, ring, new)

    def _rescheduled(self, updates: PyTree, name: str, version) -> PyTree:
        """T1: divides the rate by max(tau, 1)^p, where p falls from 1 to 0 over K updates."""
        if self.rules.rescheduling_steps is None:
            return updates
        p = 1 - jnp.minimum(version / self.rules.rescheduling_steps, 1)
        scale = jnp.maximum(self._tau(self._part(name)), 1) ** -p
        return jax.tree.map(lambda u: u * scale.astype(u.dtype), updates)

    def _moved(self, delta: dict, name: str, old: PyTree, new: PyTree) -> dict:
        """T2: the average of the steps weights have really taken."""
        if name not in delta:
            return delta
        gamma = jnp.float32(cast(float, self.rules.discrepancy_decay)) ** (
            1 / self._tau(self._part(name))
        )

        def move(d, before, after):
            g = gamma.astype(d.dtype)
            return g * d + (1 - g) * (after - before)

        return delta | {name: jax.tree.map(move, delta[name], old, new)}

    # Clipping.

    def _measure(self, state: dict) -> dict:
        """Renews the norms of the parts that finish a gradient in this tick, before any is updated;
        the others keep the norm of their newest one."""
        ends = self.steady.updates
        parts = [self.steady.stage(d) for d in range(self.steady.num_stages)]
        gs = [self.now - part.backward for part in [*parts, self.steady.head]]
        any_due = jnp.stack([self._runs(g) & ends(g) for g in gs]).any()

        def body(_, norms):
            for name in PARTS:
                due, minibatch = self._due(name)

                def square(_, norms, name=name, minibatch=minibatch):
                    sums, norms = tie(self._sums(state, name, minibatch), norms)
                    return norms | {name: self._squared_norm(self._finished(sums, name), name)}

                norms = lax.fori_loop(0, due.astype(jnp.int32), square, norms)
            layers = lax.psum(norms["layers"], STAGE)
            return norms | {"total": layers + norms["embed"] + norms["head"]}

        return state | {"norms": lax.fori_loop(0, any_due.astype(jnp.int32), body, state["norms"])}

    def _squared_norm(self, gradients: PyTree, name: str):
        """The square of a part's norm; of the stage's own layers."""

        def square(leaf, g):
            axes = [DATA] if self.plan.zero >= 1 and leaf.data_dim is not None else []
            axes += [STAGE] if leaf.stage_dim is not None else []
            total = jnp.sum(jnp.square(g.astype(jnp.float32)))
            return lax.psum(total, axes) if axes else total

        squares = jax.tree.leaves(jax.tree.map(square, self._placed(name), gradients))
        return sum(squares, jnp.float32(0))

    def _clipped(self, state: dict, gradients: PyTree) -> PyTree:
        """Clipped by the norm over the newest finished gradients of all parts."""
        limit = cast(float, self.rules.clip_norm)
        scale = limit / jnp.maximum(jnp.sqrt(state["norms"]["total"]), limit)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)


def slot_axis(layers: Stacked | Unrolled | Packed) -> int:
    """The dimension of a stage's arrays along which chunks, and here versions, follow."""
    return 1 if isinstance(layers, Packed) else 0


def corrected(weights: PyTree, delta: PyTree, tau) -> PyTree:
    """T2's guess of what the forward has read."""
    return jax.tree.map(lambda w, d: w - jnp.asarray(tau, w.dtype) * d, weights, delta)


def _lead(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda w: w[None], tree)
