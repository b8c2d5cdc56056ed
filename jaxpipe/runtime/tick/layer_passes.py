"""What a tick does with layers: F, B, BW and W of its cells.

A tick runs up to four loops over layers, each over those of its cell, so that an idle stage runs
none. Everything here sees one device's part, as in `jaxpipe.runtime.tick.executor`,
which runs the ticks and moves what comes out of these loops.

Rules that keep it fast and correct:

- no ``cond`` or ``switch`` around buffers: XLA copies whatever passes through one; loops alias in
  place;
- what a gated loop's body reads goes through `tie` with what the loop carries, or XLA hoists its
  uses out and runs them on idle ticks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.runtime.barriers import run_if, tie, tie_to_smallest
from jaxpipe.runtime.layers.losses import WithLoss, addable
from jaxpipe.runtime.layout.buffers import at_slot
from jaxpipe.runtime.tick.carried import Carried
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.messages import INBOX
from jaxpipe.runtime.tick.microbatches import Microbatches
from jaxpipe.runtime.tick.stamps import behind
from jaxpipe.runtime.tick.work import LayerWork, Work
from jaxpipe.runtime.trees import widened
from jaxpipe.runtime.types import Arrays, Index, LayerParams, Message, Tree
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import BodyParts, Row


class Through(NamedTuple):
    """What goes through a loop over layers.

    Args:
      message: the activation or cotangent that layers hand on; nothing in W.
      carried: what the tick carries, without weights, finished gradients and messages on their
        way. Where every layer has arrays of its own for gradient sums, those of one layer alone.
        Inboxes are a part of it because XLA copies those that do not pass through the loops where
        they are written.
    """

    carried: Carried
    message: Message

    def but(self, **changes: Any) -> Through:
        """A copy with these fields of what is carried changed."""
        return self._replace(carried=self.carried.but(**changes))


def run_cells(
    fixed: Fixed,
    batch: Microbatches,
    carried: Carried,
    row: Row,
    parts: BodyParts,
) -> tuple[Carried, dict[Kind, Message]]:
    """Runs the cells of a tick's parts; also returns what F and the backward have produced, to be
    sent."""
    outputs: dict[Kind, Message] = {}
    through = Through(carried.but(weights=None, sent={}, finished=None), [])
    for action in fixed.table.passes:
        if not parts.has(action):
            continue
        cell = row.cells[action]
        work = Work(fixed, batch, carried.weights, action, cell)
        if action is Kind.W:
            through, outputs = run_layers(work, through._replace(message=[]), outputs)
            continue
        inbox = through.carried.inboxes[INBOX[action]]
        through = through._replace(message=at_slot(inbox, cell.inbox))
        through, outputs = run_layers(work, through, outputs)
        message = through.message
        if fixed.setup.poison:
            message = [jnp.where(cell.layers > 0, w, jnp.nan) for w in message]
        outputs = outputs | {Kind.F if action is Kind.F else Kind.B: message}
    passed = {"weights": carried.weights, "sent": carried.sent, "finished": carried.finished}
    return through.carried.but(**passed), outputs


def run_layers(
    work: Work, through: Through, outputs: dict[Kind, Message]
) -> tuple[Through, dict[Kind, Message]]:
    """Runs the layers of a cell, last first if it is a backward.

    The output of earlier loops of the tick goes through this loop: sent before it, a message would
    make a stage that has nothing to send wait for one that has.
    """

    def body(chunk: Index, layer: Index, sums: Arrays, rest: Any) -> tuple[Arrays, Any]:
        through, outputs = rest
        through = _run_layer(work, chunk, layer, through.but(gradients=sums))
        through, outputs = tie(through, outputs)
        return through.carried.gradients, (through.but(gradients=None), outputs)

    lo, stamps = jnp.int32(0), work.fixed.setup.stamps
    if stamps is not None:
        lo = lo + stamps.take(work, (through.message, outputs, work.held))
    span = work.cell.chunk, lo, work.cell.layers
    sums, rest = through.carried.gradients, (through.but(gradients=None), outputs)
    down = work.action in (Kind.B, Kind.BW)
    with jax.named_scope(work.action.name):
        sums, rest = work.fixed.params.loop(span, body, sums, rest, down=down)
    through, outputs = rest
    if stamps is not None:
        came = stamps.take(work, (through.message, sums))
        through = through._replace(message=behind(came, through.message))
        outputs = behind(came, outputs)
    return through.but(gradients=sums), outputs


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
    weights, message = tie(work.weights(), through.message)
    args = work.params(weights), fixed.activation(message, kind.x), *work.context()
    state = _layer_state(work, through)
    if fixed.setup.trains and work.action is fixed.setup.leaves:
        y, until_b, until_w = kind.split.forward(*args, state=state)
        through = _save(work, through, until_b=until_b, until_w=until_w)
    else:
        y = kind.function(*args) if state is None else kind.function(*args, state)
    if state is not None:
        y, new = y
        through = _renew(work, through, new) if work.action is Kind.F else through
    if isinstance(y, WithLoss):
        through = _add_loss(through, y.loss) if work.action is Kind.F else through
        y = y.x
    return through._replace(message=fixed.message(message, kind.y, y))


def _backward(work: LayerWork, through: Through) -> Through:
    """B, and BW, which finishes the gradient where B keeps what W needs."""
    fixed, kind, fused = work.fixed, work.kind, work.action is Kind.BW
    read = work.weights(), *work.saved(through.carried, "until_b", "until_w")
    (weights, *residuals), message = tie(read, through.message)
    run = kind.split.backward_fused if fused else kind.split.backward_input
    dx, rest = run(
        work.params(weights),
        *residuals,
        fixed.activation(message, kind.y),
        *work.context(),
    )
    keep = _add_gradient(work, through, rest) if fused else _save(work, through, crossing=rest)
    return keep._replace(message=fixed.message(message, kind.x, dx))


def _backward_weights(work: LayerWork, through: Through) -> Through:
    read = work.weights(), *work.saved(through.carried, "until_w", "crossing")
    (weights, *residuals), sums = tie_to_smallest(read, through.carried.gradients)
    split = work.kind.split
    dparams = split.backward_weights(work.params(weights), *residuals, *work.context())
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
