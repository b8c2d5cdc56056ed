"""The executor: one SPMD program that runs any tick table.

`run` is the body of the `jax.shard_map` that `jaxpipe.Pipeline` builds; everything here sees one
device's part. It scans over the table's ticks. A tick runs its layers
(`jaxpipe.runtime.layer_passes`); then it exchanges messages with ``ppermute``, unless all can wait
for the next tick, and all stages together compute the embedding of the microbatch that enters and
the loss of the one that leaves.

Rules that keep it fast and correct, beside those of the layers:

- ``ppermute`` is never inside control flow that differs by stage: its rendezvous spans all devices;
- a late message is sent before the tick's loops and received after them, so that on a GPU it
  travels while they run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.buffers import put_slot
from jaxpipe.runtime.data_axis import average, gather, reduce_gradients
from jaxpipe.runtime.layer_passes import LayerPasses, Plan, tie
from jaxpipe.runtime.layers import Layers
from jaxpipe.runtime.mesh import DATA, STAGE
from jaxpipe.runtime.parameters import Leaf
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.table import NONE, Channel

PyTree = Any

_INBOX = {Kind.F: "x", Kind.B: "dy"}
"""The buffer in which a message of each kind waits for its reader."""

_SUMS = ("gradients", "reduced")
"""Buffers that start as zeros; the others are written before they are read."""


def run(plan: Plan, placed: PyTree, microbatches: PyTree, rng: jax.Array | None, states: PyTree):
    """Runs one step on this device.

    Args:
      plan: what to run.
      placed: this device's part of the placed parameters.
      microbatches: this data shard's rows, leaves ``[rows, m, ...]``.
      rng: the step's key, or None.
      states: this device's part of the placed states, or None.

    Returns:
      The mean loss of this data shard, equal on every stage; this device's part of the gradients,
      reduced over data and shaped like ``placed``, or None if the table has no backward; and the
      states after the last microbatch, the mean over data shards.
    """
    return Run(plan, placed, microbatches, rng, states).execute()


def buffers(plan: Plan, placed: PyTree, microbatches: PyTree, rng, states) -> dict[str, PyTree]:
    """Shapes of what the tick loop keeps from the schedule, by name; arguments as for `run`."""
    return Run(plan, placed, microbatches, rng, states).buffer_shapes()


def layers(plan: Plan, placed: PyTree, microbatches: PyTree, rng, states) -> tuple[Layers, tuple]:
    """The layers by kind, and the shapes of what each is given beside parameters and values;
    arguments as for `run`.
    """
    run = Run(plan, placed, microbatches, rng, states)
    context = jax.eval_shape(lambda: run.context(0, 0))
    # Without the mesh that they are traced in.
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), context)
    return run.sorted_layers, shapes


class Run(LayerPasses):
    """One trace of the program: its ticks, and what is in them beside the layers."""

    # The program.

    def execute(self):
        state = self._initial_state()
        rows = jax.tree.map(jnp.asarray, self._rows())
        rows = {
            name: jax.tree.map(lambda column: column[:, self.stage], columns)
            for name, columns in rows.items()
            if name != "all"
        } | {"all": rows["all"]}
        state, _ = lax.scan(lambda state, row: (self._tick(state, row), None), state, rows)
        loss = lax.pmean(state["loss"] / self.table.schedule.num_microbatches, DATA)
        states = jax.tree.map(lambda w: w[None], average(state["states"]))
        return loss, self._result(state) if self.plan.trains else None, states

    def buffer_shapes(self) -> dict[str, PyTree]:
        """Shapes of every buffer the tick loop carries, by name; their bytes are the schedule's
        prediction.
        """
        slots, zero = self.table.num_slots, self.plan.zero
        shapes: dict[str, PyTree] = {"x": self.messages.shapes(slots["x"])}
        if late := {channel.kind for channel in self.table.channels if channel.late}:
            shapes["sent"] = {kind: self._message_shape() for kind in late}
        if zero == 3:
            shapes["weights"] = self.params.slots(self.table.gathers.num_slots)
        if not self.plan.trains:
            return shapes
        shapes["dy"] = self.messages.shapes(slots["dy"])
        shapes |= {name: kept.shapes(slots[name]) for name, kept in self.residuals.items()}
        if self.reduces_chunks:
            shapes["gradients"] = self.params.slots(self.table.reduces.num_slots)
        else:
            shapes["gradients"] = jax.tree.map(Leaf.struct, self.params.placed)
        return shapes | (self._reduced_shapes() if zero else {})

    def _reduced_shapes(self) -> dict[str, PyTree]:
        parts = lax.axis_size(DATA)
        return {"reduced": jax.tree.map(lambda leaf: leaf.struct(parts=parts), self.params.placed)}

    def _rows(self) -> dict[str, Any]:
        """The table's columns, ``[ticks, stages]``; those under "all" hold for every stage."""
        table = self.table
        return {
            **{f"pass_{k}": dataclasses.asdict(columns) for k, columns in table.passes.items()},
            "receive": [(channel.slot, channel.late_slot) for channel in table.channels],
            "gather": [table.gathers.chunk, table.gathers.slot],
            "reduce": [table.reduces.chunk, table.reduces.slot],
            "all": {
                "embed": [table.embed, table.embed_slot],
                "head": [table.head, table.head_slot],
                "embed_gradient": table.embed_gradient,
                "meets": table.meets.astype(np.int32),
            },
        }

    def _initial_state(self) -> dict[str, Any]:
        # An evaluation has no gradients; its loops over layers carry their place all the same.
        shapes: dict[str, PyTree] = {"gradients": {}} | self.buffer_shapes()

        def empty(shape):
            inexact = jnp.issubdtype(shape.dtype, jnp.inexact)
            value = np.nan if self.plan.poison and inexact else 0
            return jnp.full(shape.shape, value, shape.dtype)

        state = {
            name: jax.tree.map(jnp.zeros_like if name in _SUMS else empty, shape)
            for name, shape in shapes.items()
        }
        state |= {"loss": jnp.zeros((), jnp.float32), "states": self.states}
        if self.plan.trains:
            state["outer_gradients"] = jax.tree.map(jnp.zeros_like, self.outer)
        return state

    def _tick(self, state: dict, row: dict) -> dict:
        arriving = self._late_messages(state)
        if self.plan.zero == 3:
            state = self._gather_chunk(state, *row["gather"])
        state = self._enter(state, *row["all"]["embed"])
        state, outputs = self._passes(state, row)
        if self.plan.trains and self.reduces_chunks:
            state = self._reduce_chunk(state, *row["reduce"])
        state = self._exchange(state, outputs, arriving, row)
        state = self._leave(state, outputs[Kind.F], *row["all"]["head"])
        if self.plan.trains:
            state = self._embed_gradient(state, outputs[Kind.B], row["all"]["embed_gradient"])
        return state

    # Messages: the lines that move data between stages.

    def _late_messages(self, state: dict) -> list[list | None]:
        """Sends what the last tick has put out: it travels while this tick's layers run."""
        return [
            _sent(state["sent"][channel.kind], channel) if channel.late else None
            for channel in self.table.channels
        ]

    def _exchange(self, state: dict, outputs: dict, arriving: list, row: dict) -> dict:
        inboxes = {name: state[name] for name in _INBOX.values() if name in state}
        columns = list(zip(self.table.channels, row["receive"], arriving, strict=True))

        def receive(inboxes: dict, channel: Channel, slot, message) -> dict:
            name = _INBOX[channel.kind]
            return inboxes | {name: put_slot(inboxes[name], slot, message)}

        def meet(_, inboxes: dict) -> dict:
            sent, inboxes = tie(outputs, inboxes)
            for channel, (slot, _), _ in columns:
                if not channel.local:
                    message = _sent(sent[channel.kind], channel)
                    inboxes = receive(inboxes, channel, slot, message)
            return inboxes

        for channel, (slot, late_slot), message in columns:
            if channel.local:
                inboxes = receive(inboxes, channel, slot, outputs[channel.kind])
            if message is not None:
                inboxes = receive(inboxes, channel, late_slot, message)
        # All stages meet or none: the trip count is the same on every device.
        skips = not self.table.meets.all()
        trips = row["all"]["meets"]
        inboxes = lax.fori_loop(0, trips, meet, inboxes) if skips else meet(0, inboxes)
        kept = {kind: outputs[kind] for kind in state.get("sent", {})}
        return state | inboxes | ({"sent": kept} if kept else {})

    # Embedding and head: computed by all stages together.

    def _stage_of(self, virtual_stage: int) -> int:
        return self.table.schedule.placement.stages[virtual_stage]

    def _from_stage(self, message: list, stage: int) -> list:
        """One stage's message, on every stage."""
        return [lax.psum(jnp.where(self.stage == stage, w, 0), STAGE) for w in message]

    def _outer(self, phase: str, value: PyTree) -> tuple[PyTree, PyTree]:
        """What a phase ("enter", "leave", "embed_gradient") reads of embedding and head, and a
        value of its loop that goes with it, for reads that must not be hoisted out."""
        del phase
        return self.outer, value

    def _sum_outer(self, sums: PyTree, new: PyTree, phase: str, i) -> PyTree:
        """Gradient sums of embedding and head with a microbatch's share of a phase."""
        del phase, i
        return jax.tree.map(jnp.add, sums, new)

    def _enter(self, state: dict, i, slot) -> dict:
        here = jnp.where(self.stage == self._stage_of(0), slot, NONE)

        def body(_, inbox):
            entering, inbox = tie(i, inbox)
            outer, entering = self._outer("enter", entering)
            x = self._embed(outer, entering)
            return put_slot(inbox, here, self._message(self._empty_message(), self.first, x))

        return state | {"x": lax.fori_loop(0, (i != NONE).astype(jnp.int32), body, state["x"])}

    def _leave(self, state: dict, y, i, slot) -> dict:
        last = self._stage_of(-1)
        scale = 1 / (self.table.schedule.num_microbatches * lax.axis_size(DATA))

        def evaluate(_, loss):
            mine, loss = tie(y, loss)
            x = self._activation(self._from_stage(mine, last), self.last)
            return loss + self._head_loss(self.outer, x, i)

        def train(_, carry):
            mine, (loss, inbox, gradients) = tie(y, carry)
            x = self._activation(self._from_stage(mine, last), self.last)
            outer, x = self._outer("leave", x)
            value, vjp = jax.vjp(lambda outer, x: self._head_loss(outer, x, i), outer, x)
            douter, dx = vjp(jnp.asarray(scale, value.dtype))
            here = jnp.where(self.stage == last, slot, NONE)
            gradients = self._sum_outer(gradients, douter, "leave", i)
            message = self._message(self._empty_message(), self.last, dx)
            return loss + value, put_slot(inbox, here, message), gradients

        trips = (i != NONE).astype(jnp.int32)
        if not self.plan.trains:
            return state | {"loss": lax.fori_loop(0, trips, evaluate, state["loss"])}
        carry = (state["loss"], state["dy"], state["outer_gradients"])
        loss, inbox, gradients = lax.fori_loop(0, trips, train, carry)
        return state | {"loss": loss, "dy": inbox, "outer_gradients": gradients}

    def _embed_gradient(self, state: dict, dx, i) -> dict:
        def body(_, gradients):
            mine, gradients = tie(dx, gradients)
            cotangent = self._activation(self._from_stage(mine, self._stage_of(0)), self.first)
            outer, cotangent = self._outer("embed_gradient", cotangent)
            _, vjp = jax.vjp(lambda outer: self._embed(outer, i), outer)
            return self._sum_outer(gradients, vjp(cotangent)[0], "embed_gradient", i)

        trips = (i != NONE).astype(jnp.int32)
        gradients = lax.fori_loop(0, trips, body, state["outer_gradients"])
        return state | {"outer_gradients": gradients}

    # The data axis.

    def _gather_chunk(self, state: dict, chunk, slot) -> dict:
        def body(chunk, number, weights):
            here = self.params.resident_piece(self.stage, chunk, number)
            shards, weights = tie(self.params.read(self.layers, here), weights)
            full = gather(shards, self.params.piece)
            return self.params.write(weights, self.params.piece_in_slot(slot, chunk, number), full)

        return state | {"weights": self.params.loop_pieces(chunk, body, state["weights"])}

    def _reduce_chunk(self, state: dict, chunk, slot) -> dict:
        def body(chunk, number, reduced):
            here = self.params.piece_in_slot(slot, chunk, number)
            total, reduced = tie(self.params.read(state["gradients"], here), reduced)
            shards = reduce_gradients(total, self.params.piece, zero=self.plan.zero)
            there = self.params.resident_piece(self.stage, chunk, number)
            return self.params.add(reduced, there, shards)

        return state | {"reduced": self.params.loop_pieces(chunk, body, state["reduced"])}

    def _reduce_all(self, state: dict) -> dict:
        """Reduces what the step has summed, piece by piece: no second copy of all of it."""
        target = "reduced" if self.plan.zero else "gradients"

        def body(chunk, number, kept):
            place = self.params.resident_piece(self.stage, chunk, number)
            total = self.params.read((state | {target: kept})["gradients"], place)
            shards = reduce_gradients(total, self.params.piece, zero=self.plan.zero)
            return self.params.write(kept, place, shards)

        return state | {target: self.params.every_piece(body, state[target])}

    def _result(self, state: dict) -> PyTree:
        """The finished gradients of this device, shaped like its placed parameters."""
        if not self.reduces_chunks and lax.axis_size(DATA) > 1:
            state = self._reduce_all(state)
        layers = state["reduced" if self.plan.zero else "gradients"]
        return {
            "layers": jax.tree.map(lambda w: w[None], layers),
            **reduce_gradients(
                state["outer_gradients"], self.plan.layout.outer, zero=self.plan.zero
            ),
        }


def _sent(message: list, channel: Channel) -> list:
    """The message that reaches this stage when every stage sends its own."""
    return [lax.ppermute(w, STAGE, channel.edges) for w in message]
