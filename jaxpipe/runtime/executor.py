"""The executor: one SPMD program that runs any tick table.

`run` is the body of the `jax.shard_map` that `jaxpipe.Pipeline` builds; everything here sees one
device's part. It scans over the table's ticks. A tick runs up to four loops over layers (F, B, BW,
W), each from ``lo`` to ``hi`` of its cell, so that an idle stage runs none; then it exchanges
messages with ``ppermute``, unless all can wait for the next tick, and all stages together compute
the embedding of the microbatch that enters and the loss of the one that leaves.

Rules that keep it fast and correct:

- no ``cond`` or ``switch`` around buffers: XLA copies whatever passes through one; loops alias in
  place;
- what a gated loop's body reads goes through `_tie` with what the loop carries, or XLA hoists its
  uses out and runs them on idle ticks;
- ``ppermute`` is never inside control flow that differs by stage: its rendezvous spans all devices;
- a late message is sent before the tick's loops and received after them, so that on a GPU it
  travels while they run.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.keys import embed_layer, head_layer, layer_key
from jaxpipe.runtime.layout import Layout
from jaxpipe.runtime.mesh import DATA, STAGE
from jaxpipe.runtime.model import Model
from jaxpipe.runtime.split import Split, split_layer
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.table import NONE, Channel, TickTable

PyTree = Any

_INBOX = {Kind.F: "x", Kind.B: "dy"}
"""The buffer in which a message of each kind waits for its reader."""

_SUMS = ("gradients", "reduced")
"""Buffers that start as zeros; the others are written before they are read."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything about a run that is known before it is traced.

    Args:
      model: the user's functions.
      layout: where parameters live.
      table: the tick table to run.
      remat: rematerialisation policy, by name.
      zero: ZeRO level 0 to 3; 0 when the data axis has one device.
      poison: fill buffers and idle messages with NaN, to prove that nothing from a bubble is used.
    """

    model: Model
    layout: Layout
    table: TickTable
    remat: str
    zero: int
    poison: bool = False

    @property
    def trains(self) -> bool:
        return bool(self.table.passes.keys() & {Kind.B, Kind.BW})


def run(plan: Plan, placed: PyTree, microbatches: PyTree, rng: jax.Array | None):
    """Runs one step on this device.

    Args:
      plan: what to run.
      placed: this device's part of the placed parameters.
      microbatches: this data shard's rows, leaves ``[rows, m, ...]``.
      rng: the step's key, or None.

    Returns:
      The mean loss of this data shard, equal on every stage, and this device's part of the
      gradients, reduced over data and shaped like ``placed``; only the loss if the table has no
      backward.
    """
    return _Run(plan, placed, microbatches, rng).execute()


def buffers(plan: Plan, placed: PyTree, microbatches: PyTree, rng) -> dict[str, PyTree]:
    """What `buffer_shapes` says for a run with these arguments."""
    run = _Run(plan, placed, microbatches, rng)
    return buffer_shapes(plan, run.x, run.split)


def buffer_shapes(plan: Plan, x: Any, split: Split) -> dict[str, Any]:
    """Shapes of every buffer the tick loop carries, by name; their bytes are the schedule's
    prediction.

    Args:
      plan: what will run.
      x: shape of one layer's input, on one device.
      split: of one layer; not read if the table has no backward.
    """
    slots, room = plan.table.num_slots, plan.table.layers_per_chunk
    shapes: dict[str, Any] = {"x": jax.ShapeDtypeStruct((slots["x"], x.size), x.dtype)}
    if late := {channel.kind for channel in plan.table.channels if channel.late}:
        shapes["sent"] = {kind: jax.ShapeDtypeStruct((x.size,), x.dtype) for kind in late}
    if plan.zero == 3:
        rows = plan.table.gathers.num_slots * room
        shapes["weights"] = _stacked(plan.layout.layers, rows)
    if not plan.trains:
        return shapes
    shapes["dy"] = jax.ShapeDtypeStruct((slots["dy"], x.size), x.dtype)
    for name in ("until_b", "until_w", "crossing"):
        shapes[name] = [
            jax.ShapeDtypeStruct((slots[name], room, leaf.size), leaf.dtype)
            for leaf in getattr(split, name)
        ]
    chunks = plan.table.reduces.num_slots if plan.zero >= 2 else plan.table.schedule.num_chunks
    shapes["gradients"] = _stacked(plan.layout.layers, chunks * room)
    if plan.zero >= 2:
        rows = plan.table.schedule.num_chunks * room
        shapes["reduced"] = _stacked(plan.layout.shards, rows)
    return shapes


def _stacked(layers: PyTree, rows: int) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype), layers)


class _Run:
    """One trace of the program; holds what the phases of a tick share."""

    def __init__(self, plan: Plan, placed: PyTree, microbatches: PyTree, rng) -> None:
        self.plan, self.table, self.rng = plan, plan.table, rng
        self.stage, self.shard = lax.axis_index(STAGE), lax.axis_index(DATA)
        self.room = plan.table.layers_per_chunk
        self.num_layers = sum(plan.table.layer_counts)
        self.first_layer = jnp.asarray(plan.layout.first_layers)[self.stage]
        self.microbatches = microbatches
        self.layers = jax.tree.map(lambda w: w[0], placed["layers"])  # [chunks * room, ...]
        outer = {name: placed[name] for name in ("embed", "head")}
        self.outer = self._gather(outer, plan.layout.outer) if plan.zero == 3 else outer
        self.x = jax.eval_shape(lambda: self._embed(self.outer, 0))
        self.split = self._split() if plan.trains else cast(Split, None)

    def _split(self) -> Split:
        params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.plan.layout.layers
        )
        key = None if self.rng is None else jax.eval_shape(lambda: self._key(0, 0))
        return split_layer(self.plan.model.layer, params, self.x, key, remat=self.plan.remat)

    # What a microbatch and a layer are on this device.

    def _key(self, microbatch, layer):
        return layer_key(self.rng, microbatch=microbatch, shard=self.shard, layer=layer)

    def _microbatch(self, i):
        return jax.tree.map(
            lambda leaf: lax.dynamic_index_in_dim(leaf, i, 1, keepdims=False), self.microbatches
        )

    def _embed(self, outer, i):
        key = self._key(i, embed_layer(self.num_layers))
        return self.plan.model.embed(outer, self._microbatch(i), key)

    def _head_loss(self, outer, x, i):
        key = self._key(i, head_layer(self.num_layers))
        return self.plan.model.head_loss(outer, x, self._microbatch(i), key)

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
        if not self.plan.trains:
            return loss
        return loss, self._gradients(state)

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
        def empty(shape):
            inexact = jnp.issubdtype(shape.dtype, jnp.inexact)
            value = np.nan if self.plan.poison and inexact else 0
            return jnp.full(shape.shape, value, shape.dtype)

        shapes = buffer_shapes(self.plan, self.x, self.split)
        state = {
            name: jax.tree.map(jnp.zeros_like if name in _SUMS else empty, shape)
            for name, shape in shapes.items()
        }
        state["loss"] = jnp.zeros((), jnp.float32)
        if self.plan.trains:
            state["outer_gradients"] = jax.tree.map(jnp.zeros_like, self.outer)
        return state

    def _tick(self, state: dict, row: dict) -> dict:
        arriving = self._late_messages(state)
        if self.plan.zero == 3:
            state = self._gather_chunk(state, *row["gather"])
        state = self._enter(state, *row["all"]["embed"])
        state, outputs = self._passes(state, row)
        if self.plan.trains and self.plan.zero >= 2:
            state = self._reduce_chunk(state, *row["reduce"])
        state = self._exchange(state, outputs, arriving, row)
        state = self._leave(state, outputs[Kind.F], *row["all"]["head"])
        if self.plan.trains:
            state = self._embed_gradient(state, outputs[Kind.B], row["all"]["embed_gradient"])
        return state

    # Layers.

    def _weights(self, state: dict, cell: dict, layer):
        if self.plan.zero == 3:
            return _at(state["weights"], cell["weights"] * self.room + layer)
        return _at(self.layers, cell["chunk"] * self.room + layer)

    def _layer_key(self, cell: dict, layer):
        return self._key(cell["microbatch"], self.first_layer[cell["chunk"]] + layer)

    def _passes(self, state: dict, row: dict) -> tuple[dict, dict[Kind, jax.Array]]:
        """Runs this tick's cells; returns what F and the backward produced, to be sent."""
        outputs: dict[Kind, jax.Array] = {}
        steps = {Kind.F: self._forward, Kind.B: self._backward, Kind.BW: self._backward_fused}
        for kind in self.table.passes:
            cell = row[f"pass_{kind}"]
            if kind is Kind.W:
                state, outputs = self._loop(cell, self._backward_weights, state, outputs)
                continue
            inbox = "x" if kind is Kind.F else "dy"
            value = _at(state[inbox], cell["inbox"]).reshape(self.x.shape)
            carry = state, value
            (state, value), outputs = self._loop(
                cell, steps[kind], carry, outputs, down=kind is not Kind.F
            )
            if self.table.passes[kind].pauses.any():
                slot = jnp.where(cell["pauses"] == 1, cell["inbox"], NONE)
                state = state | {inbox: _put(state[inbox], slot, value.reshape(-1))}
            if self.plan.poison:
                ends = (cell["lo"] < cell["hi"]) & (cell["pauses"] == 0)
                value = jnp.where(ends, value, jnp.nan)
            outputs = outputs | {Kind.F if kind is Kind.F else Kind.B: value}
        return state, outputs

    def _loop(self, cell: dict, step, carry, outputs: dict, *, down: bool = False):
        """Runs ``step(cell, layer, carry)`` for the cell's layers, last first if ``down``.

        What earlier loops of the tick have put out goes through the loop: its message must not be
        sent before, or a stage that has nothing to send would wait for one that has.
        """

        def body(i, through):
            carry, outputs = through
            layer = cell["lo"] + cell["hi"] - 1 - i if down else i
            return _tie(step(cell, layer, carry), outputs)

        return lax.fori_loop(cell["lo"], cell["hi"], body, (carry, outputs))

    def _forward(self, cell: dict, layer, carry):
        state, x = carry
        weights, x = _tie(self._weights(state, cell, layer), x)
        key = self._layer_key(cell, layer)
        if not self.plan.trains:
            return state, self.plan.model.layer(weights, x, key)
        y, until_b, until_w = self.split.forward(weights, x, key)
        state = self._save(state, "until_b", cell, layer, until_b)
        state = self._save(state, "until_w", cell, layer, until_w)
        return state, y

    def _residuals(self, state: dict, cell: dict, layer) -> tuple:
        """What any backward of a layer reads first: its weights and residuals."""
        return (
            self._weights(state, cell, layer),
            self._saved(state, "until_b", cell, layer),
            self._saved(state, "until_w", cell, layer),
        )

    def _backward(self, cell: dict, layer, carry):
        state, dy = carry
        residuals, dy = _tie(self._residuals(state, cell, layer), dy)
        key = self._layer_key(cell, layer)
        dx, crossing = self.split.backward_input(*residuals, dy, key)
        return self._save(state, "crossing", cell, layer, crossing), dx

    def _backward_fused(self, cell: dict, layer, carry):
        state, dy = carry
        residuals, dy = _tie(self._residuals(state, cell, layer), dy)
        key = self._layer_key(cell, layer)
        dx, dparams = self.split.backward_fused(*residuals, dy, key)
        return self._add_gradient(state, cell, layer, dparams), dx

    def _backward_weights(self, cell: dict, layer, state: dict):
        read = (
            self._weights(state, cell, layer),
            self._saved(state, "until_w", cell, layer),
            self._saved(state, "crossing", cell, layer),
        )
        read, gradients = _tie(read, state["gradients"])
        dparams = self.split.backward_weights(*read, self._layer_key(cell, layer))
        state = state | {"gradients": gradients}
        return self._add_gradient(state, cell, layer, dparams)

    def _save(self, state: dict, name: str, cell: dict, layer, values: list) -> dict:
        """Writes a layer's values into their slot, in place."""
        buffers = [
            lax.dynamic_update_slice(buffer, value.reshape(1, 1, -1), (cell[name], layer, 0))
            for buffer, value in zip(state[name], values, strict=True)
        ]
        return state | {name: buffers}

    def _saved(self, state: dict, name: str, cell: dict, layer) -> list:
        return [
            lax.dynamic_slice(buffer, (cell[name], layer, 0), (1, 1, buffer.shape[2])).reshape(
                leaf.shape
            )
            for buffer, leaf in zip(state[name], getattr(self.split, name), strict=True)
        ]

    def _add_gradient(self, state: dict, cell: dict, layer, dparams) -> dict:
        if self.plan.zero < 2:
            row = cell["chunk"] * self.room + layer
            return state | {"gradients": _add_at(state["gradients"], row, dparams)}
        # The first one of a stay overwrites: clearing a slot after its reduction would copy it.
        row = cell["gradient"] * self.room + layer
        held = _at(state["gradients"], row)
        total = jax.tree.map(
            lambda old, new: jnp.where(cell["fresh"] == 1, new, old + new), held, dparams
        )
        return state | {"gradients": _set_at(state["gradients"], row, total)}

    # Messages: the lines that move data between stages.

    def _late_messages(self, state: dict) -> list[jax.Array | None]:
        """Sends what the last tick has put out: it travels while this tick's layers run."""
        return [
            lax.ppermute(state["sent"][channel.kind], STAGE, channel.edges)
            if channel.late
            else None
            for channel in self.table.channels
        ]

    def _exchange(self, state: dict, outputs: dict, arriving: list, row: dict) -> dict:
        outputs = {kind: value.reshape(-1) for kind, value in outputs.items()}
        inboxes = {name: state[name] for name in _INBOX.values() if name in state}
        columns = list(zip(self.table.channels, row["receive"], arriving, strict=True))

        def receive(inboxes: dict, channel: Channel, slot, message) -> dict:
            name = _INBOX[channel.kind]
            return inboxes | {name: _put(inboxes[name], slot, message)}

        def meet(_, inboxes: dict) -> dict:
            sent, inboxes = _tie(outputs, inboxes)
            for channel, (slot, _), _ in columns:
                if not channel.local:
                    message = lax.ppermute(sent[channel.kind], STAGE, channel.edges)
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

    def _from_stage(self, value: jax.Array, stage: int) -> jax.Array:
        """One stage's value, on every stage."""
        return lax.psum(jnp.where(self.stage == stage, value, 0), STAGE)

    def _enter(self, state: dict, i, slot) -> dict:
        here = jnp.where(self.stage == self._stage_of(0), slot, NONE)

        def body(_, inbox):
            entering, inbox = _tie(i, inbox)
            return _put(inbox, here, self._embed(self.outer, entering).reshape(-1))

        return state | {"x": lax.fori_loop(0, (i != NONE).astype(jnp.int32), body, state["x"])}

    def _leave(self, state: dict, y, i, slot) -> dict:
        last = self._stage_of(-1)
        scale = 1 / (self.table.schedule.num_microbatches * lax.axis_size(DATA))

        def evaluate(_, loss):
            mine, loss = _tie(y, loss)
            return loss + self._head_loss(self.outer, self._from_stage(mine, last), i)

        def train(_, carry):
            mine, (loss, inbox, gradients) = _tie(y, carry)
            x = self._from_stage(mine, last)
            value, vjp = jax.vjp(lambda outer, x: self._head_loss(outer, x, i), self.outer, x)
            douter, dx = vjp(jnp.asarray(scale, value.dtype))
            here = jnp.where(self.stage == last, slot, NONE)
            gradients = jax.tree.map(jnp.add, gradients, douter)
            return loss + value, _put(inbox, here, dx.reshape(-1)), gradients

        trips = (i != NONE).astype(jnp.int32)
        if not self.plan.trains:
            return state | {"loss": lax.fori_loop(0, trips, evaluate, state["loss"])}
        carry = (state["loss"], state["dy"], state["outer_gradients"])
        loss, inbox, gradients = lax.fori_loop(0, trips, train, carry)
        return state | {"loss": loss, "dy": inbox, "outer_gradients": gradients}

    def _embed_gradient(self, state: dict, dx, i) -> dict:
        def body(_, gradients):
            mine, gradients = _tie(dx, gradients)
            cotangent = self._from_stage(mine, self._stage_of(0))
            _, vjp = jax.vjp(lambda outer: self._embed(outer, i), self.outer)
            return jax.tree.map(jnp.add, gradients, vjp(cotangent)[0])

        trips = (i != NONE).astype(jnp.int32)
        gradients = lax.fori_loop(0, trips, body, state["outer_gradients"])
        return state | {"outer_gradients": gradients}

    # The data axis.

    def _gather(self, shards: PyTree, leaves: PyTree) -> PyTree:
        def gather(leaf, shard):
            if leaf.data_dim is None:
                return shard
            return lax.all_gather(shard, DATA, axis=leaf.data_dim, tiled=True)

        return jax.tree.map(gather, leaves, shards)

    def _reduce(self, values: PyTree, leaves: PyTree) -> PyTree:
        """Sums over data shards; each keeps its own part from ZeRO-1 on."""
        if lax.axis_size(DATA) == 1:  # a sum over one device would still copy on some backends
            return values

        def reduce(leaf, value):
            if leaf.data_dim is None or self.plan.zero == 0:
                return lax.psum(value, DATA)
            return lax.psum_scatter(value, DATA, scatter_dimension=leaf.data_dim, tiled=True)

        return jax.tree.map(reduce, leaves, values)

    def _gather_chunk(self, state: dict, chunk, slot) -> dict:
        def body(layer, weights):
            shards, weights = _tie(_at(self.layers, chunk * self.room + layer), weights)
            full = self._gather(shards, self.plan.layout.layers)
            return _set_at(weights, slot * self.room + layer, full)

        trips = jnp.where(chunk == NONE, 0, self.room)
        return state | {"weights": lax.fori_loop(0, trips, body, state["weights"])}

    def _reduce_chunk(self, state: dict, chunk, slot) -> dict:
        def body(layer, reduced):
            total, reduced = _tie(_at(state["gradients"], slot * self.room + layer), reduced)
            shards = self._reduce(total, self.plan.layout.layers)
            return _add_at(reduced, chunk * self.room + layer, shards)

        trips = jnp.where(chunk == NONE, 0, self.room)
        return state | {"reduced": lax.fori_loop(0, trips, body, state["reduced"])}

    def _gradients(self, state: dict) -> PyTree:
        """The finished gradients of this device, shaped like its placed parameters."""
        if self.plan.zero >= 2:
            layers = state["reduced"]
        else:
            stacked = jax.tree.map(
                lambda leaf: dataclasses.replace(
                    leaf, data_dim=None if leaf.data_dim is None else leaf.data_dim + 1
                ),
                self.plan.layout.layers,
            )
            layers = self._reduce(state["gradients"], stacked)
        return {
            "layers": jax.tree.map(lambda w: w[None], layers),
            **self._reduce(state["outer_gradients"], self.plan.layout.outer),
        }


def _tie(read: PyTree, carried: PyTree) -> tuple[PyTree, PyTree]:
    """Both, each made to depend on the other, so that XLA keeps the uses of ``read`` in the loop.

    Use both: XLA drops what nobody uses from a barrier, and with it the dependence.
    """
    return lax.optimization_barrier((read, carried))


def _at(tree: PyTree, row) -> PyTree:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, row, keepdims=False), tree)


def _set_at(tree: PyTree, row, values: PyTree) -> PyTree:
    return jax.tree.map(
        lambda leaf, value: lax.dynamic_update_index_in_dim(leaf, value.astype(leaf.dtype), row, 0),
        tree,
        values,
    )


def _add_at(tree: PyTree, row, values: PyTree) -> PyTree:
    return _set_at(tree, row, jax.tree.map(jnp.add, _at(tree, row), values))


def _put(inbox: jax.Array, slot, message: jax.Array) -> jax.Array:
    """Writes a message into its slot; slot `NONE` leaves the inbox as it is."""
    row = jnp.maximum(slot, 0)
    kept = lax.dynamic_index_in_dim(inbox, row, keepdims=False)
    value = jnp.where(slot == NONE, kept, message)
    return lax.dynamic_update_index_in_dim(inbox, value, row, 0)
