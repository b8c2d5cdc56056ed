"""What a tick does with layers: F, B, BW and W of its cells.

A tick runs up to four loops over layers, each from ``lo`` to ``hi`` of its cell, so that an idle
stage runs none. Everything here sees one device's part, as in `jaxpipe.runtime.executor`, which
runs the ticks and moves what comes out of these loops.

Rules that keep it fast and correct:

- no ``cond`` or ``switch`` around buffers: XLA copies whatever passes through one; loops alias in
  place;
- what a gated loop's body reads goes through `tie` with what the loop carries, or XLA hoists its
  uses out and runs them on idle ticks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.buffers import Slots, at_slot, put_slot
from jaxpipe.runtime.data_axis import gather
from jaxpipe.runtime.keys import embed_layer, head_layer, layer_key
from jaxpipe.runtime.layers import LayerKind, check_loss, sort_layers
from jaxpipe.runtime.layout import Layout, layer_rows
from jaxpipe.runtime.mesh import DATA, STAGE
from jaxpipe.runtime.model import Model
from jaxpipe.runtime.packed_parameters import Packed
from jaxpipe.runtime.parameters import Stacked, Unrolled
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.table import NONE, TickTable

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything about a run that is known before it is traced.

    Args:
      model: the user's functions.
      layout: where parameters live.
      table: the tick table to run.
      remat: rematerialisation policy, by name.
      zero: ZeRO level 0 to 3; 0 when the data axis has one device.
      states: where the layers' states live, or None for a model without.
      poison: fill buffers and idle messages with NaN, to prove that nothing from a bubble is used.
    """

    model: Model
    layout: Layout
    table: TickTable
    remat: str
    zero: int
    states: Stacked | Unrolled | Packed | None = None
    poison: bool = False

    @property
    def trains(self) -> bool:
        return bool(self.table.passes.keys() & {Kind.B, Kind.BW})


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
        y = self.sorted_layers.activations[self.last]
        check_loss(jax.eval_shape(lambda y: self._head_loss(self.outer, y, 0), y))

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

    @property
    def _states(self) -> Stacked | Unrolled | Packed:
        assert self.plan.states is not None
        return self.plan.states

    def _layer_state(self, state: dict, kind: LayerKind, cell: dict, layer) -> PyTree:
        """A layer's running statistics, or None for a model without."""
        if self.plan.states is None:
            return None
        place = self._states.resident(self.stage, cell["chunk"], layer, kind.example)
        return self._states.unpack(self._states.read(state["states"], place), kind.example)

    def _renew(self, state: dict, kind: LayerKind, cell: dict, layer, new: PyTree) -> dict:
        place = self._states.resident(self.stage, cell["chunk"], layer, kind.example)
        stored = self._states.pack(new, kind.example)
        return state | {"states": self._states.write(state["states"], place, stored)}


def tie(read: PyTree, carried: PyTree) -> tuple[PyTree, PyTree]:
    """Both, each made to depend on the other, so that XLA keeps the uses of ``read`` in the loop.

    Use both: XLA drops what nobody uses from a barrier, and with it the dependence.
    """
    return lax.optimization_barrier((read, carried))


def _apart(carry: tuple[dict, list], outputs: dict) -> tuple[PyTree, tuple]:
    """The gradient sums, and what else goes through a loop over layers."""
    state, message = carry
    rest = {name: value for name, value in state.items() if name != "gradients"}
    return state["gradients"], ((rest, message), outputs)
