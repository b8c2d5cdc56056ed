"""An asynchronous tick beside the executor's: weights in versions, R before layers, and updates.

A part's weights are kept in as many versions as the method reads, which rotate; a row says which
slot an action reads. T2 corrects what a backward reads. When a minibatch is complete, its last tick
ends with an update, which runs in a loop of one trip or none: other ticks touch nothing.
"""

import dataclasses
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.asynchronous.rows import SteadyRow, Update
from jaxpipe.asynchronous.steady import SteadyState
from jaxpipe.runtime.barriers import run_if, tie
from jaxpipe.runtime.layout.buffers import at_slot, put_slot
from jaxpipe.runtime.layout.data_axis import gather, reduce_gradients
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.tick.fixed import Fixed, GradientSink, WeightSource
from jaxpipe.runtime.tick.layer_passes import run_layers
from jaxpipe.runtime.tick.messages import send
from jaxpipe.runtime.tick.microbatches import Microbatches
from jaxpipe.runtime.tick.values import Carried, LayerPlace
from jaxpipe.runtime.tick.work import Work
from jaxpipe.runtime.trees import rounded, widened
from jaxpipe.runtime.types import (
    Arrays,
    Gradients,
    Index,
    Leaves,
    OptimizerState,
    OuterParams,
    Shapes,
    Stored,
    Tree,
)
from jaxpipe.runtime.update.optimizer import PARTS, PlacedOptimizer
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import NONE, BodyParts, Integer, Row

KEPT = ("inputs", "read_states", "recomputed")

Norms: TypeAlias = dict[str, jax.Array]
"""Squares of norms by part, and their "total"."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """Rules by which an asynchronous run trains: see `jaxpipe.AsyncPipeline`."""

    steady: SteadyState
    optimizer: PlacedOptimizer
    rescheduling_steps: int | None
    discrepancy_decay: float | None
    clip_norm: float | None

    @property
    def corrected(self) -> tuple[str, ...]:
        """The parts for which T2 keeps a delta: the head's forward and backward are at once."""
        return ("layers", "embed") if self.discrepancy_decay is not None else ()


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
        return lax.dynamic_index_in_dim(_in_slots(w, count, slot_dim), slot, slot_dim, False)

    return jax.tree.map(read, arrays)


def write_slot(arrays: Arrays, slot: Index, new: Arrays, slot_dim: int) -> Arrays:
    """The arrays with another slot; `read_slot` reads it."""

    def write(w: jax.Array, n: jax.Array) -> jax.Array:
        slots = _in_slots(w, w.shape[slot_dim] // max(n.shape[slot_dim], 1), slot_dim)
        return lax.dynamic_update_index_in_dim(slots, n, slot, slot_dim).reshape(w.shape)

    return jax.tree.map(write, arrays, new)


def _in_slots(w: jax.Array, count: int, slot_dim: int) -> jax.Array:
    """The array with a dimension of ``count`` slots: int32 may not reach the start of the last."""
    size = w.shape[slot_dim] // count
    return w.reshape(*w.shape[:slot_dim], count, size, *w.shape[slot_dim + 1 :])


@dataclasses.dataclass(frozen=True)
class Versioned(WeightSource):
    """Weights in the versions that the rows say; gathered layer by layer under ZeRO-3.

    ``reads`` says which versions the phases of a tick read.
    """

    rules: Rules
    reads: dict[str, dict[str, Integer]]

    def layer(self, held: Versions, place: LayerPlace) -> list[Stored]:
        fixed, params = place.fixed, place.fixed.params
        weights = params.read(held.weights["layers"], place.trained_at(place.cell.weights))
        if self.rules.corrected and place.action is not Kind.F:
            part = self.rules.steady.stage(fixed.stage)
            tau = self.rules.steady.mean_delay(part)
            if place.action is Kind.R:
                tau -= self.rules.steady.mean_delay(part, Kind.R)
            delta = params.read(held.delta["layers"], place.trained_at(0))
            weights = _corrected(weights, delta, tau)
        if fixed.setup.options.zero.shards_weights:
            weights = gather(weights, place.leaves, fixed.axes)
        return [weights]

    def outer(
        self, fixed: Fixed, held: Versions, phase: str, value: Tree
    ) -> tuple[OuterParams, Tree]:
        slots, count = self.reads[phase], self.rules.steady.num_versions
        outer = {name: held.at(name, slot, count, 0) for name, slot in slots.items()}
        if self.rules.corrected and phase == "embed_gradient":
            (embed, delta), value = tie((outer["embed"], held.delta["embed"]), value)
            tau = self.rules.steady.mean_delay(self.rules.steady.embed)
            outer["embed"] = _corrected(embed, delta, tau)
        if fixed.setup.options.zero.shards_weights:
            outer, value = tie(outer, value)
            outer = gather(outer, fixed.setup.layout.outer, fixed.axes)
        return outer, value


def _corrected(weights: Stored, delta: Stored, tau: Index) -> Stored:
    """T2's guess of what the forward has read."""
    return jax.tree.map(lambda w, d: w - jnp.asarray(tau, w.dtype) * d, weights, delta)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extra:
    """State that is carried beside weights and what the executor knows.

    Args:
      states: the components of the optimizer's state, by part.
      rest: its leaves that belong to no parameter, by part.
      norms: of the newest finished gradients.
      kept: what R reads, by name: "inputs" of segments and the "read_states" of layers, in slots,
        and what the stage before has "recomputed".
    """

    states: dict[str, list[Tree]]
    rest: dict[str, list[jax.Array]]
    norms: Norms
    kept: dict[str, Tree]


@dataclasses.dataclass(frozen=True)
class Updated(GradientSink):
    """A part whose minibatch is complete is updated at the end of the tick.

    Args:
      tied: whether the head reads the embedding's parameters.
    """

    rules: Rules
    row: SteadyRow
    tied: bool = False

    @property
    def steady(self) -> SteadyState:
        return self.rules.steady

    @property
    def num_sums(self) -> int:
        """Sums of the embedding's gradients that rotate."""
        return self.steady.num_sums(tied=self.tied)

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        placed, sharded = fixed.params.placed, fixed.setup.options.zero.shards_gradients
        sums = jax.tree.map(lambda leaf: leaf.summed.struct(sharded=sharded), placed)
        shapes, slots = {"gradients": sums}, self.steady.input_slots
        if slots:
            shapes["inputs"] = fixed.messages.shapes(slots)
        if slots and any(kind.split.reads_state for kind in fixed.layers.kinds):
            assert fixed.setup.states is not None
            shapes["read_states"] = fixed.setup.states.slot_shapes(slots)
        if self.steady.recompute_edges:
            shapes["recomputed"] = fixed.message_shape()
        return shapes

    def finished(self, buffers: dict[str, Arrays]) -> Extra:
        norms = dict.fromkeys((*PARTS, "total"), jnp.zeros((), jnp.float32))
        return Extra({}, {}, norms, {name: buffers[name] for name in KEPT if name in buffers})

    def add(self, place: LayerPlace, sums: Arrays, stored: Stored) -> Arrays:
        fixed, starts, stored = place.fixed, self._starts(place.cell.microbatch), widened(stored)
        zero = fixed.setup.options.zero
        if zero.shards_gradients:  # sums are split, and never at rest: one reduction per microbatch
            stored = reduce_gradients(stored, place.leaves, fixed.axes, zero=zero)
        return fixed.params.update(
            sums, place.trained_at(), stored, lambda old, new: jnp.where(starts, new, old + new)
        )

    def add_outer(self, sums: Gradients, new: Gradients, phase: str) -> Gradients:
        outer = self.row.row.outer
        i = outer.head if phase == "leave" else outer.embed_gradient[0]
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
        """Says whether a microbatch begins a minibatch, whose sums replace those before."""
        return microbatch % self.steady.num_microbatches == 0

    def before_layers(
        self, fixed: Fixed, batch: Microbatches, carried: Carried, row: Row
    ) -> Carried:
        """Runs R."""
        return self._recompute(fixed, batch, carried) if Kind.R in row.cells else carried

    def _recompute(self, fixed: Fixed, batch: Microbatches, carried: Carried) -> Carried:
        """Runs R, each stage of a segment one tick after the stage before it; keeps what F reads.

        The first stage of a segment begins with the input that it has kept, the others with what R
        of the stage before has produced.
        """
        cells, slots, kept = self.row.row.cells, self.row.inputs, carried.finished.kept
        begins = self.steady.begins_segment(fixed.stage)
        message, states = at_slot(kept["inputs"], slots[Kind.R]), carried.states
        if "recomputed" in kept:
            sent = send(kept["recomputed"], self.steady.recompute_edges, fixed.axes)
            message = [jnp.where(begins, m, w) for m, w in zip(message, sent, strict=True)]
        if "read_states" in kept:
            assert fixed.setup.states is not None
            count, slot_dim = self.steady.input_slots, fixed.setup.states.slot_dim
            states = read_slot(kept["read_states"], slots[Kind.R], count, slot_dim)
        given = carried.but(weights=None, finished=None, states=states, messages={"x": message})
        work = Work(fixed, batch, carried.weights, Kind.R, cells[Kind.R])
        after = run_layers(work, given, BodyParts())
        runs = cells[Kind.F].runs
        inbox = at_slot(after.inboxes["x"], cells[Kind.F].inbox)
        inputs = run_if(
            begins & runs, lambda old: put_slot(old, slots[Kind.F], inbox), kept["inputs"]
        )
        new = {"inputs": inputs, "recomputed": after.messages["x"]}
        if "read_states" in kept:
            new["read_states"] = run_if(
                runs,
                lambda old: write_slot(old, slots[Kind.F], carried.states, slot_dim),
                kept["read_states"],
            )
        extra = dataclasses.replace(carried.finished, kept={name: new[name] for name in kept})
        return after.but(
            weights=carried.weights, finished=extra, states=carried.states, messages={}
        )

    def update(self, fixed: Fixed, carried: Carried) -> Carried:
        """Ends a tick: measures the finished gradients, then updates their parts."""
        if self.rules.clip_norm is not None:
            carried = self._measure(fixed, carried)
        for name, update in self.row.updates.items():
            carried = self._update(fixed, carried, name, update)
        return carried

    def _tau(self, fixed: Fixed, name: str) -> jax.Array:
        part = self.steady.parts(fixed.stage)[name]
        return jnp.asarray(self.steady.mean_delay(part), jnp.float32)

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
        leaves, zero = _placed(fixed, name), fixed.setup.options.zero
        if name != "layers" or not zero.shards_gradients:
            sums = reduce_gradients(sums, leaves, fixed.axes, zero=zero)
        return rounded(sums, leaves)

    def _update(self, fixed: Fixed, carried: Carried, name: str, update: Update) -> Carried:
        """The optimizer's step of one part, if its minibatch is complete."""
        versions, step = self.steady.num_versions, self.rules.optimizer.step

        Through = tuple[Versions, list[Tree], OptimizerState]

        def body(through: Through) -> Through:
            sums = self._sums(carried, name, update.minibatch)
            sums, (held, states, rest) = tie(sums, through)
            gradients = self._finished(fixed, sums, name)
            if self.rules.clip_norm is not None:
                gradients = self._clipped(carried, gradients)
            old = held.at(name, update.version % versions, versions, fixed.params.slot_dim)
            shared = step.share([*rest, *self._scale(fixed, name, update.version)])
            given = [gradients, old, *states]
            new, *states = step.part(name, given, shared)
            slot = (update.version + 1) % versions
            weights = held.written(name, slot, new, fixed.params.slot_dim)
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

    def _measure(self, fixed: Fixed, carried: Carried) -> Carried:
        """Renews the norms of the parts that finish a gradient in this tick, before any is updated;
        the others keep the norm of their newest one."""

        def body(norms: Norms) -> Norms:
            for name, update in self.row.updates.items():

                def square(norms: Norms, name: str = name, update: Update = update) -> Norms:
                    sums, norms = tie(self._sums(carried, name, update.minibatch), norms)
                    finished = self._finished(fixed, sums, name)
                    return norms | {name: self._squared_norm(fixed, finished, name)}

                norms = run_if(update.minibatch != NONE, square, norms)
            layers = lax.psum(norms["layers"], fixed.axes.stage)
            return norms | {"total": layers + norms["embed"] + norms["head"]}

        norms = run_if(self.row.any_update, body, carried.finished.norms)
        return carried.but(finished=dataclasses.replace(carried.finished, norms=norms))

    def _squared_norm(self, fixed: Fixed, gradients: Gradients, name: str) -> jax.Array:
        """The square of a part's norm; of the stage's own layers."""

        def square(leaf: Leaf, g: jax.Array) -> jax.Array:
            total = jnp.sum(jnp.square(g.astype(jnp.float32)))
            if fixed.setup.options.zero.shards_state and leaf.data_dim is not None:
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
