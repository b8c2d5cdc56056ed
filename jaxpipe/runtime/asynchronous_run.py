"""One call of an asynchronous pipeline, as one device sees it.

The phases of a tick are the synchronous executor's. What differs is around them: a tick's row is
computed from the tick's number (`jaxpipe.schedule.pipemare`) instead of read from a table,
everything in flight comes in and goes out as `Flight`, and a tick ends with the updates of the
parts whose minibatch is complete. Microbatches are numbered through all minibatches; that number g
stands where the executor has a microbatch of the step.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.asynchronous_optimizer import PARTS, PartOptimizer, apply
from jaxpipe.runtime.dependence import read_leaves
from jaxpipe.runtime.executor import Plan, _Run, _tie
from jaxpipe.runtime.keys import layer_key
from jaxpipe.runtime.layers import LayerKind
from jaxpipe.runtime.mesh import DATA, STAGE
from jaxpipe.runtime.parameters import Packed, Stacked
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.pipemare import Part, SteadyState
from jaxpipe.schedule.table import NONE

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Rules:
    """How an asynchronous run trains.

    Args:
      steady: ticks, delays and versions.
      optimizer: updates one part at a time.
      rescheduling_steps: T1's K, or None.
      discrepancy_decay: T2's D, or None.
      clip_norm: the largest norm of a gradient as far as it is known, or None.
    """

    steady: SteadyState
    optimizer: PartOptimizer
    rescheduling_steps: int | None
    discrepancy_decay: float | None
    clip_norm: float | None


class AsynchronousRun(_Run):
    """One trace of the program.

    Args:
      plan: what to run; of its table only the kinds of action, the channels and the layers count.
      rules: how to train.
      state: this device's part of the state, without the stage dimension: "weights" and "delta" by
        part, "owned" and "rest" of the optimizer, "states" of stateful layers, "recent" rows and
        keys, "clock", and, but for `empty_flight`, "flight".
    """

    def __init__(self, plan: Plan, rules: Rules, state: dict) -> None:
        self.rules, self.steady = rules, rules.steady
        self.recent = state["recent"]
        weights = state["weights"]
        newest = {name: jax.tree.map(lambda w: w[0], weights[name]) for name in ("embed", "head")}
        placed = {"layers": weights["layers"], **newest}
        super().__init__(plan, placed, self.recent["rows"], None, state["states"])
        self.count = jnp.asarray(plan.table.layer_counts)[self.stage]
        self.tied = self._check_reads()

    def _check_reads(self) -> bool:
        """Whether the head reads the embedding's parameters; the contrary is refused."""

        def read(function, name: str) -> bool:
            def of(part):
                return function(self.outer | {name: part})

            return any(read_leaves(of, self.outer[name]))

        if read(lambda outer: self._embed(outer, 0), "head"):
            raise ValueError(
                "Model.embed reads parameters of 'head', which are updated before the embedding's "
                "gradient is there. Parameters that both read belong to params['embed']."
            )
        x = self._activation(self._empty_message(), self.last)
        return read(lambda outer: self._head_loss(outer, x, 0), "embed")

    # What is in flight.

    def buffer_shapes(self) -> dict[str, PyTree]:
        """As for a synchronous run: shapes of the buffers, by name."""
        slots = self.steady.num_slots
        shapes: dict[str, PyTree] = {"x": self.messages.shapes(1), "dy": self.messages.shapes(1)}
        for name, kept in self.residuals.items():
            shapes[name] = kept.shapes(1 if name == "crossing" else slots)
        parts = lax.axis_size(DATA) if self.plan.zero >= 2 else 1
        shapes["gradients"] = jax.tree.map(
            lambda leaf: leaf.struct(parts=parts), self.params.placed
        )
        return shapes

    def empty_flight(self) -> dict[str, Any]:
        """The buffers of a pipeline in which nothing is in flight."""
        flight = self._initial_state()
        del flight["states"]
        rotating = jax.tree.map(
            lambda w: jnp.zeros((self._num_sums(), *w.shape), w.dtype), self.outer["embed"]
        )
        outer = flight["outer_gradients"] | {"embed": rotating}
        norms = dict.fromkeys((*PARTS, "total"), jnp.zeros((), jnp.float32))
        return flight | {"outer_gradients": outer, "norms": norms}

    def _num_sums(self) -> int:
        """Minibatches whose gradients of the embedding are being summed at once."""
        if not self.tied:
            return 1
        N, first, last = self.steady.num_microbatches, self.steady.head, self.steady.embed
        return 1 + -((first.backward - last.backward) // N)

    # The program.

    def call(self, state: dict, rows: PyTree | None, rng: jax.Array | None) -> tuple[dict, Any]:
        """Runs N ticks in which a minibatch enters, or those that drain the pipeline.

        Args:
          state: as for the class.
          rows: the minibatch, leaves ``[rows, N, ...]``; None to drain.
          rng: its key.

        Returns:
          The state afterwards, and the losses of the minibatches that have left, float32
          ``[minibatches]``, NaN before the first one.
        """
        num_ticks = self.steady.drain_ticks if rows is None else self.steady.num_microbatches
        carry = {k: v for k, v in state.items() if k not in ("flight", "clock", "states")}
        carry |= state["flight"] | {"states": self.states}
        clock = state["clock"]
        entering = 0 if rows is None else self.steady.num_microbatches
        clock = clock | {"entered": clock["entered"] + entering}

        def tick(carry, offset):
            now = clock["tick"] + offset
            if rows is not None:
                carry = carry | {"recent": self._admit(carry["recent"], rows, rng, offset, now)}
            return self._asynchronous_tick(carry, now, clock)

        carry, losses = lax.scan(tick, carry, jnp.arange(num_ticks))
        losses = lax.pmean(losses[self._last_ones(num_ticks, drains=rows is None)], DATA)
        clock = clock | {"tick": clock["tick"] + num_ticks}
        if rows is None:
            first = clock["first"] + clock["entered"] // self.steady.num_microbatches
            clock = {"tick": jnp.int32(0), "entered": jnp.int32(0), "first": first}
        states = jax.tree.map(lambda w: lax.pmean(w, DATA)[None], carry.pop("states"))
        flight = {name: carry.pop(name) for name in state["flight"]}
        return carry | {"flight": flight, "clock": clock, "states": states}, losses

    def _last_ones(self, num_ticks: int, *, drains: bool) -> np.ndarray:
        """The ticks of a call in which the last microbatch of a minibatch leaves."""
        behind = self.steady.head.forward
        ticks = range(behind if drains else num_ticks)
        return np.asarray([t for t in ticks if self.steady.updates(t - behind)], np.int32)

    def _admit(self, recent: dict, rows: PyTree, rng, offset, now) -> dict:
        """Keeps an entering microbatch's rows and key until its last gradient."""
        slot = now % self.steady.num_slots
        row = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, offset, 1, keepdims=False), rows)
        return jax.tree.map(
            lambda kept, new: lax.dynamic_update_index_in_dim(kept, new, slot, 0),
            recent,
            {"rows": row, "rng": rng},
        )

    def _asynchronous_tick(self, state: dict, now, clock: dict) -> tuple[dict, jax.Array]:
        self.now, self.clock = now, clock
        self.recent, self.weights, self.delta = state["recent"], state["weights"], state["delta"]
        state = self._phases(state, self._row())
        leaving = now - self.steady.head.forward
        ends = self._runs(leaving) & self.steady.updates(leaving)
        loss = jnp.where(ends, state["loss"] / self.steady.num_microbatches, jnp.nan)
        state = state | {"loss": jnp.where(ends, 0, state["loss"])}
        if self.rules.clip_norm is not None:
            state = self._measure(state)
        for name in PARTS:
            state = self._update(state, name)
        return state, loss

    def _phases(self, state: dict, row: dict) -> dict:
        """A tick of the executor; weights are gathered and gradients reduced layer by layer."""
        state = self._enter(state, *row["all"]["embed"])
        state, outputs = self._passes(state, row)
        arriving = [None for _ in self.table.channels]  # every message is needed in the next tick
        state = self._exchange(state, outputs, arriving, row)
        state = self._leave(state, outputs[Kind.F], *row["all"]["head"])
        return self._embed_gradient(state, outputs[Kind.B], row["all"]["embed_gradient"])

    def _row(self) -> dict[str, Any]:
        """The row of this tick, as the executor would read it from a table."""
        stage = self.steady.stage
        passes = {}
        for kind in self.table.passes:
            part = stage(self.stage)
            g = self.now - (part.forward if kind is Kind.F else part.backward)
            passes[f"pass_{kind}"] = self._cell(kind, part, g)
        receive = []
        for channel in self.table.channels:
            forward = channel.kind is Kind.F
            sender = self.stage + (-1 if forward else 1)
            part = stage(sender)
            g = self.now - (part.forward if forward else part.backward)
            there = (sender >= 0) & (sender < self.steady.num_stages)
            receive.append((jnp.where(there & self._runs(g), 0, NONE), NONE))
        uniform = {
            "embed": [self._or_none(self.now - self.steady.embed.forward), 0],
            "head": [self._or_none(self.now - self.steady.head.forward), 0],
            "embed_gradient": self._or_none(self.now - self.steady.embed.backward),
            "meets": 1,
        }
        return passes | {"receive": receive, "all": uniform}

    def _cell(self, kind: Kind, part: Part, g) -> dict[str, Any]:
        read = self.steady.forward_version if kind is Kind.F else self.steady.backward_version
        slot, zero = g % self.steady.num_slots, jnp.int32(0)
        return {
            "lo": zero,
            "hi": jnp.where(self._runs(g), self.count, 0),
            "pauses": zero,
            "chunk": 0,
            "microbatch": g,
            "inbox": zero,
            "until_b": slot,
            "until_w": slot,
            "crossing": zero,
            "weights": read(part, g, self.clock["first"]) % self.steady.num_versions,
            "corrected": kind is not Kind.F and self.rules.discrepancy_decay is not None,
            "gradient": 0,
            "fresh": (g % self.steady.num_microbatches == 0).astype(jnp.int32),
        }

    def _runs(self, g):
        return (g >= 0) & (g < self.clock["entered"])

    def _or_none(self, g):
        return jnp.where(self._runs(g), g, NONE)

    # What a microbatch, a weight and a sum are here.

    def _microbatch(self, i):
        return self._recent("rows", i)

    def _key(self, microbatch, layer):
        j = microbatch % self.steady.num_microbatches
        return layer_key(
            self._recent("rng", microbatch), microbatch=j, shard=self.shard, layer=layer
        )

    def _recent(self, name: str, g) -> PyTree:
        slot = g % self.steady.num_slots
        return jax.tree.map(
            lambda w: lax.dynamic_index_in_dim(w, slot, keepdims=False), self.recent[name]
        )

    def _weights(self, state: dict, kind: LayerKind, cell: dict, layer):
        at = self.stage, 0, layer, kind.example
        place = self.params.in_slot(cell["weights"], *at)
        weights = self.params.read(self.weights["layers"], place)
        if cell["corrected"]:
            delta = self.params.read(self.delta["layers"], self.params.in_slot(0, *at))
            weights = _corrected(weights, delta, self._tau(self.steady.stage(self.stage)))
        return self._gather(weights, self._leaves(weights)) if self.plan.zero == 3 else weights

    def _leaves(self, stored: PyTree) -> PyTree:
        """How the arrays of one stored layer are split over data."""
        piece = self.params.piece
        return piece if isinstance(self.params, Stacked) else {g: piece[g] for g in stored}

    def _add_gradient(self, state: dict, kind: LayerKind, cell: dict, layer, dparams) -> dict:
        stored = self.params.pack(dparams, kind.example)
        if self.plan.zero >= 2:  # sums are split, and never at rest: one reduction a microbatch
            stored = self._reduce(stored, self._leaves(stored))
        return self._sum_in_slot(state, kind, cell, layer, stored)

    def _outer(self, phase: str, value: PyTree) -> tuple[PyTree, PyTree]:
        """Embedding and head in the versions that a phase reads; T2 where it is a backward."""
        first, backward = self.clock["first"], phase == "embed_gradient"
        if phase == "leave" and self.steady.method != "2bw":
            read = {
                name: self.steady.newest(self._part(name), self.now, first)
                for name in ("embed", "head")
            }
        else:
            part = self.steady.head if phase == "leave" else self.steady.embed
            of = self.steady.backward_version if backward else self.steady.forward_version
            g = self.now - (part.backward if backward else part.forward)
            read = dict.fromkeys(("embed", "head"), of(part, g, first))
        outer = {name: self._version(self.weights, name, version) for name, version in read.items()}
        if backward and self.rules.discrepancy_decay is not None:
            (embed, delta), value = _tie((outer["embed"], self.delta["embed"]), value)
            tau = self.steady.mean_delay(self.steady.embed)
            outer["embed"] = _corrected(embed, delta, tau)
        if self.plan.zero == 3:
            outer, value = _tie(outer, value)
            outer = self._gather(outer, self.plan.layout.outer)
        return outer, value

    def _sum_outer(self, sums: PyTree, new: PyTree, phase: str, i) -> PyTree:
        N = self.steady.num_microbatches
        slot, starts = i // N % self._num_sums(), i % N == 0

        def embed(total, value, fresh):
            old = lax.dynamic_index_in_dim(total, slot, keepdims=False)
            value = value if fresh is None else jnp.where(fresh, value, old + value)
            return lax.dynamic_update_index_in_dim(total, value, slot, 0)

        if phase == "leave":
            head = jax.tree.map(lambda t, v: jnp.where(starts, v, t + v), sums["head"], new["head"])
            sums = sums | {"head": head}
            fresh = starts if self.tied else None
        else:
            fresh = False if self.tied else starts
        if fresh is None:
            return sums
        table = jax.tree.map(lambda t, v: embed(t, v, fresh), sums["embed"], new["embed"])
        return sums | {"embed": table}

    # Updates.

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
        slot = minibatch % self._num_sums()
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, slot, keepdims=False), sums)

    def _finished(self, sums: PyTree, name: str) -> PyTree:
        """A part's gradient, reduced over data; split over it from ZeRO-1 on."""
        if name == "layers" and self.plan.zero >= 2:
            return sums
        return self._reduce(sums, self._placed(name))

    def _placed(self, name: str) -> PyTree:
        return self.params.placed if name == "layers" else self.plan.layout.outer[name]

    def _update(self, state: dict, name: str) -> dict:
        """The optimizer's step of one part, if its minibatch is complete."""
        due, minibatch = self._due(name)
        version = self.clock["first"] + minibatch
        changed = ("weights", "delta", "owned", "rest")

        def body(_, carry):
            sums, carry = _tie(self._sums(state, name, minibatch), carry)
            gradients = self._finished(sums, name)
            if self.rules.clip_norm is not None:
                gradients = self._clipped(state, gradients)
            whole = {part: self._version(carry["weights"], part, version) for part in PARTS}
            shards = {part: self._shard(whole[part], part) for part in PARTS}
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
                new = self._gather(new, self._placed(name))
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

    def _shard(self, whole: PyTree, name: str) -> PyTree:
        """The part of weights whose optimizer state this data shard holds."""
        if self.plan.zero not in (1, 2):
            return whole

        def shard(leaf, w):
            if leaf.data_dim is None:
                return w
            size = w.shape[leaf.data_dim] // lax.axis_size(DATA)
            return lax.dynamic_slice_in_dim(w, self.shard * size, size, leaf.data_dim)

        return jax.tree.map(shard, self._placed(name), whole)

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
        """Renews the norms of the parts whose minibatch is complete, in the ticks that have one."""
        ends = self.steady.updates
        parts = [self.steady.stage(d) for d in range(self.steady.num_stages)]
        gs = [self.now - part.backward for part in [*parts, self.steady.head]]
        any_due = jnp.stack([self._runs(g) & ends(g) for g in gs]).any()

        def body(_, norms):
            for name in PARTS:
                due, minibatch = self._due(name)

                def square(_, norms, name=name, minibatch=minibatch):
                    sums, norms = _tie(self._sums(state, name, minibatch), norms)
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
        """Clipped by the norm of every part's newest finished gradient."""
        limit = cast(float, self.rules.clip_norm)
        scale = limit / jnp.maximum(jnp.sqrt(state["norms"]["total"]), limit)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)


def slot_axis(layers: Stacked | Packed) -> int:
    """The dimension of a stage's arrays along which chunks, and here versions, follow."""
    return 0 if isinstance(layers, Stacked) else 1


def _corrected(weights: PyTree, delta: PyTree, tau) -> PyTree:
    """T2's guess of what the forward has read."""
    return jax.tree.map(lambda w, d: w - jnp.asarray(tau, w.dtype) * d, weights, delta)


def _lead(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda w: w[None], tree)
