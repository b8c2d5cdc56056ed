"""The layers of a tick: F, B, BW and W of its cells.

A tick runs up to four loops over layers, each over those of its cell, so that an idle stage runs
none. Where a schedule overlaps a forward with a backward, one more loop may run a layer of each per
turn (`Fixed.pairs`). Everything here sees one device's part, as in `jaxpipe.runtime.tick.executor`,
which runs the ticks and moves what comes out of these loops.

Rules that keep it fast and correct:

- no ``cond`` or ``switch`` around buffers: XLA copies whatever passes through one; loops alias in
  place;
- what a gated loop's body reads goes through `tie` with what the loop carries, or XLA hoists its
  uses out and runs them on idle ticks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.barriers import after, run_if, tie, tie_to_smallest
from jaxpipe.runtime.layers.losses import WithLoss, addable
from jaxpipe.runtime.layout.buffers import at_slot
from jaxpipe.runtime.tick.carried import Carried
from jaxpipe.runtime.tick.fixed import CARRY, CARRY_GRADIENT, Fixed, LayerWork, Work
from jaxpipe.runtime.tick.messages import INBOX, Inboxes
from jaxpipe.runtime.tick.microbatches import Microbatches
from jaxpipe.runtime.tick.stamps import behind
from jaxpipe.runtime.trees import widened
from jaxpipe.runtime.types import Arrays, Index, LayerParams, Message, Tree
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import BodyParts, Row


class Through(NamedTuple):
    """Values that go through a loop over layers.

    Args:
      carried: what the tick carries, without weights, finished gradients and messages on their
        way. Where every layer has arrays of its own for gradient sums, those of one layer alone.
        Inboxes are a part of it because XLA copies those that do not pass through the loops where
        they are written.
      messages: the activations or cotangents that layers hand on, by the inbox they came from.
    """

    carried: Carried
    messages: Inboxes

    def but(self, **changes: Any) -> Through:
        """A copy with these fields of what is carried changed."""
        return self._replace(carried=self.carried.but(**changes))

    def arriving(self, work: Work) -> Through:
        """A copy with the message that an action begins with, if there is none yet."""
        name = INBOX.get(work.action)
        if name is None or name in self.messages:
            return self
        message = at_slot(self.carried.inboxes[name], work.cell.inbox)
        return self._replace(messages=self.messages | {name: message})

    def handing(self, action: Kind, message: Message) -> Through:
        """A copy with the message that an action's layer hands on."""
        return self._replace(messages=self.messages | {INBOX[action]: message})


def run_cells(
    fixed: Fixed,
    batch: Microbatches,
    carried: Carried,
    row: Row,
    parts: BodyParts,
) -> tuple[Carried, dict[Kind, Message]]:
    """Runs the cells of a tick's parts; also returns what F and the backward have produced, to be
    sent."""
    works = {
        action: Work(fixed, batch, carried.weights, action, row.cells[action])
        for action in fixed.table.passes
        if parts.has(action)
    }
    through = Through(carried.but(weights=None, sent={}, finished=None), {})
    done: Index = 0
    for kind in fixed.pairs if parts.forward and parts.backward else ():
        through, turns = _run_pairs(works, kind, through)
        done = done + turns
    for work in works.values():
        through = run_layers(work, through.arriving(work), done)
    messages = through.messages
    if fixed.setup.options.poison:
        for action, work in works.items():
            if name := INBOX.get(action):
                message = [jnp.where(work.cell.layers > 0, w, jnp.nan) for w in messages[name]]
                messages = messages | {name: message}
    outputs = {kind: messages[INBOX[kind]] for kind in (Kind.F, Kind.B) if INBOX[kind] in messages}
    passed = {"weights": carried.weights, "sent": carried.sent, "finished": carried.finished}
    return through.carried.but(**passed), outputs


def _run_pairs(works: dict[Kind, Work], kind: Kind, through: Through) -> tuple[Through, Index]:
    """Runs a layer of F and one of a backward of this kind per turn, in a tick that overlaps them.

    F does not depend on the backward beside it, so what either communicates is hidden by matmuls of
    the other. F comes last, since it writes residuals: the backward would wait to read them. On
    CPUs, which hide nothing, collectives need an order instead.

    Returns:
      What goes through the loop, and the number of layers that have run of each.
    """
    backward, forward = _overlapped(works, kind), works[Kind.F]
    fixed, device = forward.fixed, lax.axis_index(forward.fixed.axes.names)

    def body(
        backwards: tuple[Index, Index], forwards: tuple[Index, Index], sums: Arrays, rest: Through
    ) -> tuple[Arrays, Through]:
        through, beside = _run_layer(backward, *backwards, rest.but(gradients=sums)), forward
        if not fixed.setup.overlaps:
            given = forward.cell, through.messages
            cell, messages = after(through.carried, given, device)
            beside = dataclasses.replace(forward, cell=cell)
            through = through._replace(messages=messages)
        through = _run_layer(beside, *forwards, through)
        return through.carried.gradients, through.but(gradients=None)

    through = through.arriving(backward).arriving(forward)
    sums, through = through.carried.gradients, through.but(gradients=None)
    spans = [(work.cell.chunk, work.cell.layers) for work in (backward, forward)]
    with jax.named_scope(f"{kind.name}_F"):
        sums, through, turns = fixed.params.loop_pairs(
            spans[0], spans[1], fixed.pairs[kind], body, sums, through
        )
    return through.but(gradients=sums), turns


def _overlapped(works: dict[Kind, Work], kind: Kind) -> Work:
    """The backward of this kind that a tick may overlap with F: without layers if there is none.

    Where a schedule splits some backwards, any other is B and W in one tick.
    """
    if Kind.BW in works:
        return works[Kind.BW]
    b, w = works[Kind.B], works[Kind.W].cell
    if kind is Kind.B:
        layers = jnp.where(w.layers > 0, 0, b.cell.layers)
        return dataclasses.replace(b, cell=dataclasses.replace(b.cell, layers=layers))
    cell = dataclasses.replace(
        b.cell,
        layers=jnp.minimum(b.cell.layers, w.layers),
        until_w=w.until_w,
        gradient=w.gradient,
    )
    return dataclasses.replace(b, action=kind, cell=cell)


def run_layers(work: Work, through: Through, done: Index = 0) -> Through:
    """Runs the layers of a cell, last first if it is a backward, without the first that are done.

    The output of earlier loops of the tick goes through this loop: sent before it, a message would
    make a stage that has nothing to send wait for one that has.
    """

    def body(chunk: Index, layer: Index, sums: Arrays, rest: Through) -> tuple[Arrays, Through]:
        through = _run_layer(work, chunk, layer, rest.but(gradients=sums))
        carried, messages = tie(through.carried, through.messages)
        return carried.gradients, Through(carried.but(gradients=None), messages)

    lo, hi, stamps = jnp.int32(0), work.cell.layers, work.fixed.setup.stamps
    stamped = work.action, work.cell, work.fixed.axes
    if stamps is not None:
        lo = lo + stamps.take(*stamped, (through.messages, work.held))
    if work.action.is_forward:
        lo = lo + done
    else:
        hi = hi - done
    span = work.cell.chunk, lo, hi
    sums, through = through.carried.gradients, through.but(gradients=None)
    down = work.action in (Kind.B, Kind.BW)
    with jax.named_scope(work.action.name):
        sums, through = work.fixed.params.loop(span, body, sums, through, down=down)
    if stamps is not None:
        came = stamps.take(*stamped, (through.messages, sums))
        through = through._replace(messages=behind(came, through.messages))
    return through.but(gradients=sums)


def _run_layer(work: Work, chunk: Index, layer: Index, through: Through) -> Through:
    """Runs a layer as its kind does: one loop per kind, all but one of them empty."""
    kinds, step = work.fixed.layers.kinds, _STEPS[work.action]
    if len(kinds) == 1:
        return step(work.of_layer(chunk, layer, kinds[0]), through)
    for kind in kinds:
        is_mine = work.fixed.kind_of[chunk, layer] == kind.number
        one = functools.partial(step, work.of_layer(chunk, layer, kind))
        through = run_if(is_mine, one, through)
    return through


def _forward(work: LayerWork, through: Through) -> Through:
    """F, and R, which neither renews the state nor adds the layer's loss."""
    fixed, kind = work.fixed, work.kind
    weights, message = tie(work.weights(), through.messages[INBOX[work.action]])
    x, context = fixed.activation(message, kind.x), work.context()
    if kind.carry is not None:
        x = x, work.carry(*work.saved(through.carried, CARRY))
    args = work.params(weights), x, *context
    state = _layer_state(work, through)
    if fixed.setup.trains and work.action is fixed.setup.leaves:
        y, until_b, until_w = kind.split.forward(*args, state=state)
        through = _save(work, through, until_b=until_b, until_w=until_w)
    elif fixed.setup.quantizes:
        y, *_ = kind.split.forward(*args, state=state)
    else:
        y = kind.function(*args) if state is None else kind.function(*args, state)
    if state is not None:
        y, new = y
        through = _renew(work, through, new) if work.action is Kind.F else through
    if isinstance(y, WithLoss):
        through = _add_loss(through, y.loss) if work.action is Kind.F else through
        y = y.x
    if kind.carry is not None:
        y, carry = y
        through = _save(work, through, carry=jax.tree.leaves(carry))
    return through.handing(work.action, fixed.message(message, kind.y, y))


def _backward(work: LayerWork, through: Through) -> Through:
    """B, and BW, which finishes the gradient where B keeps what W needs."""
    fixed, kind, fused = work.fixed, work.kind, work.action is Kind.BW
    read = work.weights(), *work.saved(through.carried, "until_b", "until_w", *work.carries)
    (weights, until_b, until_w, *carry), message = tie(read, through.messages[INBOX[work.action]])
    run = kind.split.backward_fused if fused else kind.split.backward_input
    dy = fixed.activation(message, kind.y)
    if kind.carry is not None:
        dy = dy, work.carry_gradient(*work.saved(through.carried, CARRY_GRADIENT))
    dx, rest = run(
        work.params(weights),
        until_b,
        until_w,
        dy,
        *work.context(),
        buffers=work.buffers(*carry),
    )
    if kind.carry is not None:
        dx, dcarry = dx
        through = _save(work, through, carry_gradient=jax.tree.leaves(dcarry))
    keep = _add_gradient(work, through, rest) if fused else _save(work, through, crossing=rest)
    return keep.handing(work.action, fixed.message(message, kind.x, dx))


def _backward_weights(work: LayerWork, through: Through) -> Through:
    read = work.weights(), *work.saved(through.carried, "until_w", "crossing", *work.carries)
    (weights, until_w, crossing, *carry), sums = tie_to_smallest(read, through.carried.gradients)
    dparams = work.kind.split.backward_weights(
        work.params(weights), until_w, crossing, *work.context(), buffers=work.buffers(*carry)
    )
    return _add_gradient(work, through.but(gradients=sums), dparams)


_STEPS: dict[Kind, Callable[[LayerWork, Through], Through]] = {
    Kind.R: _forward,
    Kind.F: _forward,
    Kind.B: _backward,
    Kind.BW: _backward,
    Kind.W: _backward_weights,
}


def _save(work: LayerWork, through: Through, **values: list[jax.Array]) -> Through:
    """Writes a layer's residuals into their slots, in place, by name."""
    kept = through.carried.residuals
    for name, new in values.items():
        slots, slot = work.fixed.residuals[name], getattr(work.cell, name)
        kept = kept | {name: slots.write(kept[name], work.kind.number, slot, work.at, new)}
    return through.but(residuals=kept)


def _add_gradient(work: LayerWork, through: Through, dparams: LayerParams) -> Through:
    fixed, example = work.fixed, work.kind.example
    assert fixed.gradients is not None
    if fixed.setup.shares:
        dparams, of_shared = dparams
        shared = jax.tree.map(jnp.add, through.carried.shared_gradients, widened(of_shared))
        through = through.but(shared_gradients=shared)
    stored = fixed.params.pack(dparams, example)
    sums = fixed.gradients.add(work, through.carried.gradients, stored)
    return through.but(gradients=sums)


def _add_loss(through: Through, loss: Tree) -> Through:
    """Adds a layer's loss and metrics to the sums."""
    sums = through.carried.layer_losses
    if sums is None:  # only outputs are wanted
        return through
    return through.but(layer_losses=jax.tree.map(jnp.add, sums, addable(loss)))


def _layer_state(work: LayerWork, through: Through) -> Tree:
    """A layer's running statistics; None for a model without."""
    layout, example = work.fixed.setup.states, work.kind.example
    if layout is None:
        return None
    place = layout.layer_at(work.at, example)
    return layout.unpack(layout.read(through.carried.states, place), example)


def _renew(work: LayerWork, through: Through, new: Tree) -> Through:
    """Writes a layer's new state."""
    layout, example = work.fixed.setup.states, work.kind.example
    assert layout is not None
    place = layout.layer_at(work.at, example)
    states = layout.write(through.carried.states, place, layout.pack(new, example))
    return through.but(states=states)
