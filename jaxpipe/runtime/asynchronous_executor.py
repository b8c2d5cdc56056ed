"""The executor that `AsyncPipeline` still runs on; all else runs on `jaxpipe.runtime.executor`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.barriers import tie
from jaxpipe.runtime.buffers import Slots, at_slot, put_slot
from jaxpipe.runtime.data_axis import gather, reduce_gradients
from jaxpipe.runtime.fixed import Plan
from jaxpipe.runtime.keys import embed_layer, head_layer, layer_key
from jaxpipe.runtime.layers import LayerKind, sort_layers
from jaxpipe.runtime.layout import layer_rows
from jaxpipe.runtime.mesh import DATA, STAGE
from jaxpipe.runtime.parameters import Leaf
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.table import NONE, Channel

PyTree = Any

_INBOX = {Kind.F: "x", Kind.B: "dy"}
_SUMS = ("gradients", "reduced")


class LayerPasses:
    """One trace of the program, as far as it runs layers; holds what the phases of a tick share."""

    def __init__(self, plan: Plan, placed: PyTree, microbatches: PyTree, rng, states) -> None:
        self.plan, self.table, self.rng = plan, plan.table, rng
        self.params = plan.layout.layers
        self.stage, self.shard = lax.axis_index(STAGE), lax.axis_index(DATA)
        self.num_layers = sum(plan.table.layer_counts)
        rows = layer_rows(plan.table)
        self.layer_of = jnp.asarray(rows)[self.stage]
        self.microbatches = microbatches
        self.layers = jax.tree.map(lambda w: w[0], placed["layers"])
        self.states = jax.tree.map(lambda w: w[0], states)
        outer = {name: placed[name] for name in ("embed", "head")}
        self.outer = gather(outer, plan.layout.outer) if plan.zero == 3 else outer
        self._sort_layers(rows)

    def _sort_layers(self, rows: np.ndarray) -> None:
        """Finds the kinds of layers, and what they leave in buffers."""
        plan, numbers = self.plan, range(self.num_layers)
        self.sorted_layers = sort_layers(
            plan.model,
            [self.params.shape_of(n) for n in numbers],
            jax.eval_shape(lambda: self._embed(self.outer, 0)),
            *jax.eval_shape(lambda: self.context(0, 0)),
            states=None if plan.states is None else [plan.states.shape_of(n) for n in numbers],
            remat=plan.remat,
        )
        self.kinds = self.sorted_layers.kinds
        self.first, self.last = self.sorted_layers.first, self.sorted_layers.last
        kind_of = np.where(rows < 0, -1, np.asarray(self.sorted_layers.kind_of, np.int32)[rows])
        self.kind_of = jnp.asarray(kind_of)[self.stage]
        self.residuals = {
            name: Slots([getattr(kind.split, name) for kind in self.kinds], kind_of)
            for name in ("until_b", "until_w", "crossing")
        }
        self.trees = [jax.tree.structure(x) for x in self.sorted_layers.activations]
        leaves = [jax.tree.leaves(x) for x in self.sorted_layers.activations]
        self.messages = Slots(leaves, np.arange(len(leaves)).reshape(-1, 1, 1))

    # What a microbatch and a layer are on this device.

    def _key(self, microbatch, layer):
        return layer_key(self.rng, microbatch=microbatch, shard=self.shard, layer=layer)

    def _microbatch(self, i):
        return jax.tree.map(
            lambda leaf: lax.dynamic_index_in_dim(leaf, i, 1, keepdims=False), self.microbatches
        )

    def context(self, i, layer):
        """What every function of a layer is given beside its parameters and values."""
        return self._microbatch(i), self._key(i, layer)

    def _embed(self, outer, i):
        return self.plan.model.embed(outer, *self.context(i, embed_layer(self.num_layers)))

    def _head_loss(self, outer, x, i):
        return self.plan.model.head_loss(outer, x, *self.context(i, head_layer(self.num_layers)))

    def _activation(self, message: list, number: int) -> PyTree:
        """A message's content as the activation of that number."""
        values = self.messages.read([w[None] for w in message], number, 0, (number, 0, 0))
        return jax.tree.unflatten(self.trees[number], values)

    def _message(self, message: list, number: int, activation: PyTree) -> list:
        """The message with an activation in it; what is longer than it stays as it was."""
        values = jax.tree.leaves(activation)
        buffers = [w[None] for w in message]
        return [w[0] for w in self.messages.write(buffers, number, 0, (number, 0, 0), values)]

    def _message_shape(self) -> list:
        return [jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in self.messages.shapes(1)]

    def _empty_message(self) -> list:
        return [jnp.zeros(w.shape, w.dtype) for w in self._message_shape()]

    @property
    def reduces_chunks(self) -> bool:
        """Whether a chunk's gradient is reduced when it is finished, or all at the step's end."""
        return self.plan.zero >= 2

    # Layers.

    def _passes(self, state: dict, row: dict) -> tuple[dict, dict[Kind, list]]:
        """Runs this tick's cells; returns what F and the backward produced, to be sent."""
        outputs: dict[Kind, list] = {}
        steps = {Kind.F: self._forward, Kind.B: self._backward, Kind.BW: self._backward_fused}
        for kind in self.table.passes:
            cell = row[f"pass_{kind}"]
            if kind is Kind.W:
                (state, _), outputs = self._loop(cell, self._backward_weights, (state, []), outputs)
                continue
            inbox = "x" if kind is Kind.F else "dy"
            carry = state, at_slot(state[inbox], cell["inbox"])
            (state, value), outputs = self._loop(
                cell, steps[kind], carry, outputs, down=kind is not Kind.F
            )
            if self.table.passes[kind].pauses.any():
                slot = jnp.where(cell["pauses"] == 1, cell["inbox"], NONE)
                state = state | {inbox: put_slot(state[inbox], slot, value)}
            if self.plan.poison:
                ends = (cell["lo"] < cell["hi"]) & (cell["pauses"] == 0)
                value = jax.tree.map(lambda v, ends=ends: jnp.where(ends, v, jnp.nan), value)
            outputs = outputs | {Kind.F if kind is Kind.F else Kind.B: value}
        return state, outputs

    def _loop(self, cell: dict, step, carry, outputs: dict, *, down: bool = False):
        """Runs ``step(kind, cell, layer, (state, message))`` for the cell's layers, last first if
        ``down``.

        What earlier loops of the tick have put out goes through the loop: its message must not be
        sent before, or a stage that has nothing to send would wait for one that has.
        """

        def body(chunk, layer, sums, through):
            (rest, message), outputs = through
            carry = rest | {"gradients": sums}, message
            carry = self._of_its_kind(cell | {"chunk": chunk}, step, layer, carry)
            return _apart(*tie(carry, outputs))

        span = cell["chunk"], cell["lo"], cell["hi"]
        sums, through = self.params.loop(*span, body, *_apart(carry, outputs), down=down)
        (rest, message), outputs = through
        return (rest | {"gradients": sums}, message), outputs

    def _of_its_kind(self, cell: dict, step, layer, carry):
        """Runs a step for the layer's kind: a loop each, of which all but one are empty."""
        if len(self.kinds) == 1:
            return step(self.kinds[0], cell, layer, carry)
        for number, kind in enumerate(self.kinds):
            trips = (self.kind_of[cell["chunk"], layer] == number).astype(jnp.int32)
            carry = lax.fori_loop(
                0, trips, lambda _, carry, kind=kind: step(kind, cell, layer, carry), carry
            )
        return carry

    def _weights(self, state: dict, kind: LayerKind, cell: dict, layer):
        at = self.stage, cell["chunk"], layer, kind.example
        if self.plan.zero == 3:
            return self.params.read(state["weights"], self.params.in_slot(cell["weights"], *at))
        return self.params.read(self.layers, self.params.resident(*at))

    def _layer_context(self, cell: dict, layer):
        return self.context(cell["microbatch"], self.layer_of[cell["chunk"], 0] + layer)

    def _forward(self, kind: LayerKind, cell: dict, layer, carry):
        state, message = carry
        weights, message = tie(self._weights(state, kind, cell, layer), message)
        weights, x = self.params.unpack(weights, kind.example), self._activation(message, kind.x)
        args = weights, x, *self._layer_context(cell, layer)
        held = self._layer_state(state, kind, cell, layer)
        if self._keeps_residuals(cell):
            y, until_b, until_w = kind.split.forward(*args, state=held)
            state = self._save(state, "until_b", kind, cell, layer, until_b)
            state = self._save(state, "until_w", kind, cell, layer, until_w)
        else:
            y = kind.function(*args) if held is None else kind.function(*args, held)
        if held is not None:
            y, new = y
            state = self._renew(state, kind, cell, layer, new)
        return state, self._message(message, kind.y, y)

    def _keeps_residuals(self, cell: dict) -> bool:
        """Whether the forward of a cell leaves residuals for a backward."""
        del cell
        return self.plan.trains

    def _residuals(self, state: dict, kind: LayerKind, cell: dict, layer) -> tuple:
        """What any backward of a layer reads first: its weights and residuals."""
        return (
            self._weights(state, kind, cell, layer),
            self._saved(state, "until_b", kind, cell, layer),
            self._saved(state, "until_w", kind, cell, layer),
        )

    def _backward(self, kind: LayerKind, cell: dict, layer, carry):
        state, message = carry
        read, message = tie(self._residuals(state, kind, cell, layer), message)
        dx, crossing = kind.split.backward_input(
            self.params.unpack(read[0], kind.example),
            *read[1:],
            self._activation(message, kind.y),
            *self._layer_context(cell, layer),
        )
        state = self._save(state, "crossing", kind, cell, layer, crossing)
        return state, self._message(message, kind.x, dx)

    def _backward_fused(self, kind: LayerKind, cell: dict, layer, carry):
        state, message = carry
        read, message = tie(self._residuals(state, kind, cell, layer), message)
        dx, dparams = kind.split.backward_fused(
            self.params.unpack(read[0], kind.example),
            *read[1:],
            self._activation(message, kind.y),
            *self._layer_context(cell, layer),
        )
        state = self._add_gradient(state, kind, cell, layer, dparams)
        return state, self._message(message, kind.x, dx)

    def _backward_weights(self, kind: LayerKind, cell: dict, layer, carry):
        state, message = carry
        read = (
            self._weights(state, kind, cell, layer),
            self._saved(state, "until_w", kind, cell, layer),
            self._saved(state, "crossing", kind, cell, layer),
        )
        read, gradients = tie(read, state["gradients"])
        dparams = kind.split.backward_weights(
            self.params.unpack(read[0], kind.example),
            *read[1:],
            *self._layer_context(cell, layer),
        )
        state = state | {"gradients": gradients}
        return self._add_gradient(state, kind, cell, layer, dparams), message

    def _save(self, state: dict, name: str, kind: LayerKind, cell: dict, layer, values) -> dict:
        """Writes a layer's values into their slot, in place."""
        at = self.stage, cell["chunk"], layer
        kept = self.residuals[name].write(state[name], kind.number, cell[name], at, values)
        return state | {name: kept}

    def _saved(self, state: dict, name: str, kind: LayerKind, cell: dict, layer) -> list:
        at = self.stage, cell["chunk"], layer
        return self.residuals[name].read(state[name], kind.number, cell[name], at)

    def _add_gradient(self, state: dict, kind: LayerKind, cell: dict, layer, dparams) -> dict:
        stored = self.params.pack(dparams, kind.example)
        if self.reduces_chunks:
            return self._sum_in_slot(state, kind, cell, layer, stored)
        place = self.params.resident(self.stage, cell["chunk"], layer, kind.example)
        return state | {"gradients": self.params.add(state["gradients"], place, stored)}

    def _sum_in_slot(self, state: dict, kind: LayerKind, cell: dict, layer, stored) -> dict:
        sums, at = state["gradients"], (self.stage, cell["chunk"], layer, kind.example)
        # The first one of a stay overwrites: clearing a slot after its reduction would copy it.
        place = self.params.in_slot(cell["gradient"], *at)
        total = jax.tree.map(
            lambda old, new: jnp.where(cell["fresh"] == 1, new, old + new),
            self.params.read(sums, place),
            stored,
        )
        return state | {"gradients": self.params.write(sums, place, total)}

    def _layer_state(self, state: dict, kind: LayerKind, cell: dict, layer) -> PyTree:
        """A layer's running statistics, or None for a model without."""
        states = self.plan.states
        if states is None:
            return None
        place = states.resident(self.stage, cell["chunk"], layer, kind.example)
        return states.unpack(states.read(state["states"], place), kind.example)

    def _renew(self, state: dict, kind: LayerKind, cell: dict, layer, new: PyTree) -> dict:
        states = self.plan.states
        assert states is not None
        place = states.resident(self.stage, cell["chunk"], layer, kind.example)
        stored = states.pack(new, kind.example)
        return state | {"states": states.write(state["states"], place, stored)}


def _apart(carry: tuple[dict, list], outputs: dict) -> tuple[PyTree, tuple]:
    """The gradient sums, and what else goes through a loop over layers."""
    state, message = carry
    rest = {name: value for name, value in state.items() if name != "gradients"}
    return state["gradients"], ((rest, message), outputs)


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
        states = jax.tree.map(lambda w: lax.pmean(w, DATA)[None], state["states"])
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
            **{f"pass_{k}": columns._asdict() for k, columns in table.passes.items()},
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
