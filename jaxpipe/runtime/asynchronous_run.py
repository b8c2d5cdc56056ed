"""One call of an asynchronous pipeline, as one device sees it.

The phases of a tick are the synchronous executor's. What differs is around them: a tick's row is
computed from the tick's number (`jaxpipe.schedule.pipemare`) instead of read from a table,
everything in flight comes in and goes out as "flight", and a tick ends with the updates of the
parts whose minibatch is complete. Microbatches are numbered through all minibatches; that number g
stands where the executor has a microbatch of the step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.asynchronous_update import Rules, UpdatingRun, corrected
from jaxpipe.runtime.buffers import at_slot, put_slot
from jaxpipe.runtime.data_axis import average, gather, reduce_gradients
from jaxpipe.runtime.dependence import read_leaves
from jaxpipe.runtime.keys import layer_key
from jaxpipe.runtime.layer_passes import Plan, tie
from jaxpipe.runtime.layers import LayerKind
from jaxpipe.runtime.mesh import DATA, STAGE
from jaxpipe.runtime.parameters import Stacked
from jaxpipe.runtime.part_optimizer import PARTS
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.pipemare import Part
from jaxpipe.schedule.table import NONE

PyTree = Any


class AsynchronousRun(UpdatingRun):
    """One trace of the program.

    Args:
      plan: what to run; of its table only the kinds of action, the channels and the layers count.
      rules: how to train.
      state: this device's part of the state, without the stage dimension: "weights" and "delta" by
        part, "owned" and "rest" of the optimizer, "states" of stateful layers after the last whole
        minibatch, "recent" rows and keys, "clock", and, but for `empty_flight`, "flight".
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
        self.num_sums = self.steady.num_sums(tied=self.tied)
        recomputes = self.steady.recompute_segment is not None
        self.rereads_states = recomputes and any(kind.split.reads_state for kind in self.kinds)

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
        shapes: dict[str, PyTree] = {"x": self.messages.shapes(1), "dy": self.messages.shapes(1)}
        for name, kept in self.residuals.items():
            shapes[name] = kept.shapes(1 if name == "crossing" else self.steady.residual_slots)
        if self.steady.recompute_segment is not None:
            shapes["inputs"] = self.messages.shapes(self.steady.input_slots)
            if self._recompute_edges():
                shapes["recomputed"] = self._message_shape()
        if self.rereads_states:
            shapes["read_states"] = self._states.slots(self.steady.input_slots)
        parts = lax.axis_size(DATA) if self.plan.zero >= 2 else 1
        shapes["gradients"] = jax.tree.map(
            lambda leaf: leaf.struct(parts=parts), self.params.placed
        )
        return shapes

    def empty_flight(self) -> dict[str, Any]:
        """The buffers of a pipeline in which nothing is in flight."""
        flight = self._initial_state()
        rotating = jax.tree.map(
            lambda w: jnp.zeros((self.num_sums, *w.shape), w.dtype), self.outer["embed"]
        )
        outer = flight["outer_gradients"] | {"embed": rotating}
        norms = dict.fromkeys((*PARTS, "total"), jnp.zeros((), jnp.float32))
        return flight | {"outer_gradients": outer, "norms": norms}

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
        carry |= state["flight"] | {"averaged_states": self.states}
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
        states = jax.tree.map(lambda w: w[None], carry.pop("averaged_states"))
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
        if self.plan.states is not None:
            state = self._average_states(state)
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
        if self.steady.recompute_segment is not None:
            state = self._recompute(state)
        state, outputs = self._passes(state, row)
        arriving = [None for _ in self.table.channels]  # every message is needed in the next tick
        state = self._exchange(state, outputs, arriving, row)
        state = self._leave(state, outputs[Kind.F], *row["all"]["head"])
        return self._embed_gradient(state, outputs[Kind.B], row["all"]["embed_gradient"])

    def _recompute(self, state: dict) -> dict:
        """Keeps the input of the first stage of a segment; runs forward again what is next to go
        backward, each stage of a segment a tick after the one before it.
        """
        steady, kept, part = self.steady, state["inputs"], self.steady.stage(self.stage)
        begins = steady.begins_segment(self.stage)
        again = self.now - part.recompute
        message = at_slot(kept, again % steady.input_slots)
        if edges := self._recompute_edges():
            sent = [lax.ppermute(w, STAGE, edges) for w in state["recomputed"]]
            message = [jnp.where(begins, m, w) for m, w in zip(message, sent, strict=True)]
        cell = self._cell(Kind.F, part, again, recomputes=True)
        (state, value), _ = self._loop(cell, self._forward, (state, message), {})
        entering = self.now - part.forward
        keeps = begins & self._runs(entering)
        slot = jnp.where(keeps, entering % steady.input_slots, NONE)
        state = state | {"inputs": put_slot(kept, slot, at_slot(state["x"], 0))}
        return state | {"recomputed": value} if edges else state

    def _average_states(self, state: dict) -> dict:
        """Averages the stage's states over data shards if F has ended a minibatch in this tick."""
        g = self.now - self.steady.stage(self.stage).forward
        ends = self._runs(g) & self.steady.updates(g)

        def body(_, carry):
            states = average(carry["states"])
            return {"states": states, "averaged_states": states}

        carry = {name: state[name] for name in ("states", "averaged_states")}
        return state | lax.fori_loop(0, ends.astype(jnp.int32), body, carry)

    def _recompute_edges(self) -> list[tuple[int, int]]:
        """From each stage to the next of its segment."""
        stages = range(1, self.steady.num_stages)
        return [(d - 1, d) for d in stages if not self.steady.begins_segment(d)]

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

    def _cell(self, kind: Kind, part: Part, g, *, recomputes: bool = False) -> dict[str, Any]:
        steady = self.steady
        read, tau = steady.backward_version, steady.mean_delay(part)
        if recomputes:
            read, tau = steady.recompute_version, tau - steady.mean_recompute_delay(part)
        elif kind is Kind.F:
            read, tau = steady.forward_version, None
        slot, zero = g % steady.residual_slots, jnp.int32(0)
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
            "weights": read(part, g, self.clock["first"]) % steady.num_versions,
            "correction": tau if self.rules.discrepancy_decay is not None else None,
            "recomputes": recomputes,
            "read_states": g % steady.input_slots if self.rereads_states else None,
            "gradient": 0,
            "fresh": (g % steady.num_microbatches == 0).astype(jnp.int32),
        }

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
        if cell["correction"] is not None:
            delta = self.params.read(self.delta["layers"], self.params.in_slot(0, *at))
            weights = corrected(weights, delta, cell["correction"])
        return gather(weights, self._leaves(weights)) if self.plan.zero == 3 else weights

    def _leaves(self, stored: PyTree) -> PyTree:
        """How the arrays of one stored layer are split over data."""
        piece = self.params.piece
        return piece if isinstance(self.params, Stacked) else {g: piece[g] for g in stored}

    def _keeps_residuals(self, cell: dict) -> bool:
        return cell["recomputes"] or self.steady.recompute_segment is None

    def _layer_state(self, state: dict, kind: LayerKind, cell: dict, layer) -> PyTree:
        """A layer's state; for a recomputation the one that its F has read, if that matters."""
        if not (cell["recomputes"] and self.rereads_states):
            return super()._layer_state(state, kind, cell, layer)
        stored = self._states.read(state["read_states"], self._read_state_place(kind, cell, layer))
        return self._states.unpack(stored, kind.example)

    def _renew(self, state: dict, kind: LayerKind, cell: dict, layer, new: PyTree) -> dict:
        if cell["recomputes"]:
            return state
        if self.rereads_states:
            read = self._states.pack(self._layer_state(state, kind, cell, layer), kind.example)
            place = self._read_state_place(kind, cell, layer)
            kept = self._states.write(state["read_states"], place, read)
            state = state | {"read_states": kept}
        return super()._renew(state, kind, cell, layer, new)

    def _read_state_place(self, kind: LayerKind, cell: dict, layer):
        return self._states.in_slot(cell["read_states"], self.stage, 0, layer, kind.example)

    def _add_gradient(self, state: dict, kind: LayerKind, cell: dict, layer, dparams) -> dict:
        stored = self.params.pack(dparams, kind.example)
        if self.plan.zero >= 2:  # sums are split, and never at rest: one reduction a microbatch
            stored = reduce_gradients(stored, self._leaves(stored), zero=self.plan.zero)
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
            (embed, delta), value = tie((outer["embed"], self.delta["embed"]), value)
            tau = self.steady.mean_delay(self.steady.embed)
            outer["embed"] = corrected(embed, delta, tau)
        if self.plan.zero == 3:
            outer, value = tie(outer, value)
            outer = gather(outer, self.plan.layout.outer)
        return outer, value

    def _sum_outer(self, sums: PyTree, new: PyTree, phase: str, i) -> PyTree:
        N = self.steady.num_microbatches
        slot, starts = i // N % self.num_sums, i % N == 0

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
