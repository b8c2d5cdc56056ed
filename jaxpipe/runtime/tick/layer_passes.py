"""The layers of a tick: F, B, BW and W of its cells.

A tick runs up to four loops over layers, each over those of its cell, so that an idle stage runs
none. Where a schedule overlaps a forward with a backward, one more loop may run a layer of each per
turn (`Setup.pairs`). Everything here sees one device's part, as in `jaxpipe.runtime.tick.executor`,
which runs the ticks and moves what comes out of these loops.

`jaxpipe.runtime.barriers` says why loops stand in place of conditionals, and why what they read
goes through `tie`. Of residuals the whole buffers do: XLA for GPUs would copy a layer's values out
of them for a barrier, but lets computations read them where they lie.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.barriers import after, run_if, tie, tie_to_smallest
from jaxpipe.runtime.defaults import RESIDUALS_OF_F
from jaxpipe.runtime.layers.losses import WithLoss, addable
from jaxpipe.runtime.layout.buffers import at_slot
from jaxpipe.runtime.layout.layer_layout import Body
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.microbatches import Microbatches
from jaxpipe.runtime.tick.setup import CARRY, CARRY_GRADIENT, INBOX, ON_HOST
from jaxpipe.runtime.tick.values import Carried
from jaxpipe.runtime.tick.work import LayerWork, Work
from jaxpipe.runtime.trees import joined, parted, widened
from jaxpipe.runtime.types import Arrays, Flag, Index, LayerParams, Message, Tree
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import NONE, BodyParts, Cell, Moved, Row

Step: TypeAlias = Callable[[LayerWork, Carried], Carried]
"""Runs an action of one layer."""

_BRANCHES = 6
"""Loops within a loop around several cells; see docs/design/001-executor.md."""


def run_cells(
    fixed: Fixed,
    batch: Microbatches,
    carried: Carried,
    row: Row,
    parts: BodyParts,
    layers: Mapping[Kind, int | None] | None = None,
) -> Carried:
    """Runs the cells of a tick's parts, and leaves what F and the backward have produced among the
    messages. Or, if ``layers`` says so, those of these actions, and of each one layer or all.

    Weights, finished gradients and messages on their way do not pass through the loops over layers.
    Inboxes do, because XLA copies those that do not pass through the loops where they are written.
    Where every layer has arrays of its own for gradient sums, those of one layer alone do.
    """
    works = {
        action: Work(fixed, batch, carried.weights, action, row.cells[action])
        for action in fixed.table.passes
        if parts.has(action) and (layers is None or action in layers)
    }
    passed = {"weights": carried.weights, "finished": carried.finished}
    carried = carried.but(weights=None, finished=None)
    if not fixed.setup.knows_chunks:  # else their cells read what they are given
        for work in works.values():
            carried = _arriving(work, carried)
    done: Index = 0
    for kind in fixed.setup.pairs if parts.forward and parts.backward else ():
        carried, turns = _run_pairs(works, kind, carried)
        done = done + turns
    for action, work in works.items():
        only = layers[action] if layers else None
        carried = run_layers(work, carried, parts, done, only)
    messages, runs = carried.messages, dict[str, Flag]()
    for action in filter(works.__contains__, INBOX if fixed.setup.options.poison else ()):
        name = fixed.outbox(action)
        runs[name] = runs.get(name, False) | works[action].cell.runs
    for name, any_runs in runs.items():
        messages = messages | {name: [jnp.where(any_runs, w, jnp.nan) for w in messages[name]]}
    return carried.but(messages=messages, **passed)


def _arriving(work: Work, carried: Carried) -> Carried:
    """A copy with the message that an action begins with."""
    if work.action not in INBOX:
        return carried
    message = at_slot(carried.inboxes[INBOX[work.action]], work.cell.inbox)
    return carried.but(messages=carried.messages | {work.fixed.outbox(work.action): message})


def _run_pairs(works: dict[Kind, Work], kind: Kind, carried: Carried) -> tuple[Carried, Index]:
    """Runs a layer of F and one of a backward of this kind per turn, in a tick that overlaps them.

    F does not depend on the backward beside it, so what either communicates is hidden by matmuls of
    the other. It only writes its residuals when the backward has read its own: XLA for GPUs copies
    a buffer that is read and written in no order. On CPUs, which hide nothing, collectives need an
    order instead.

    Returns:
      What is carried, and the number of layers that have run of each.
    """
    backward, forward = _overlapped(works, kind), works[Kind.F]
    fixed, device = forward.fixed, lax.axis_index(forward.fixed.axes.names)
    backward = dataclasses.replace(backward, beside_forward=fixed.setup.overlaps)

    def body(
        backwards: tuple[Index, Index], forwards: tuple[Index, Index], sums: Arrays, rest: Carried
    ) -> tuple[Arrays, Carried]:
        carried, beside = _run_layer(backward, *backwards, rest.but(gradients=sums)), forward
        if not fixed.setup.overlaps:
            given = forward.cell, carried.messages
            cell, messages = after(carried.but(messages={}), given, device)
            beside = dataclasses.replace(forward, cell=cell)
            carried = carried.but(messages=messages)
        carried = _run_layer(beside, *forwards, carried)
        return carried.gradients, carried.but(gradients=None)

    sums, rest = carried.gradients, carried.but(gradients=None)
    spans = [(work.cell.chunk, work.cell.layers) for work in (backward, forward)]
    with jax.named_scope(f"{kind.name}_F"):
        sums, rest, turns = fixed.params.loop_pairs(
            spans[0], spans[1], fixed.setup.pairs[kind], body, sums, rest
        )
    return rest.but(gradients=sums), turns


def _overlapped(works: dict[Kind, Work], kind: Kind) -> Work:
    """The backward of this kind that a tick may overlap with F: without layers if there is none.

    Where a schedule splits some backwards, any other is B and W in one tick.
    """
    if Kind.BW in works:
        return works[Kind.BW]
    b, w = works[Kind.B], works[Kind.W].cell
    if kind is Kind.B:
        layers = jnp.where(w.runs, 0, b.cell.layers)
        return dataclasses.replace(b, cell=dataclasses.replace(b.cell, layers=layers))
    cell = dataclasses.replace(
        b.cell,
        layers=jnp.minimum(b.cell.layers, w.layers),
        until_w=w.until_w,
        gradient=w.gradient,
    )
    return dataclasses.replace(b, action=kind, cell=cell)


def run_layers(
    work: Work, carried: Carried, parts: BodyParts, done: Index = 0, only: int | None = None
) -> Carried:
    """Runs the layers of a cell, last first if it is a backward, without the first that are done,
    or one of them.

    The output of earlier loops of the tick goes through this loop: sent before it, a message would
    make a stage that has nothing to send wait for one that has.
    """

    lo, hi, stamps = jnp.int32(0), work.cell.layers, work.fixed.setup.stamps
    stamped = work.action, work.cell, work.fixed.axes
    if stamps is not None:
        lo = lo + stamps.take(*stamped, (carried.messages, carried.inboxes, work.held))
    if work.action.is_forward:
        lo = lo + done
    else:
        hi = hi - done
    span = work.cell.chunk, lo, hi
    sums, rest = carried.gradients, carried.but(gradients=None)
    down = work.action in (Kind.B, Kind.BW)
    with jax.named_scope(work.action.name):
        if work.fixed.setup.knows_chunks:
            number = work.cell.number + lo
            sums, rest = _run_chunks(work, parts, number, sums, rest, down=down, only=only)
        else:
            assert only is None, "only layers of chunks that the program knows run one by one"
            body = _layer_body(work)
            sums, rest = work.fixed.params.loop(span, body, sums, rest, down=down)
    if stamps is not None:
        came = stamps.take(*stamped, (rest.messages, sums))
        device = lax.axis_index(work.fixed.axes.names)
        rest = rest.but(messages=after(came, rest.messages, device))
    return rest.but(gradients=sums)


def _layer_body(work: Work) -> Body:
    """The body of a loop over layers, which carries gradient sums and all else that is carried."""

    def body(chunk: Index, layer: Index, sums: Arrays, rest: Carried) -> tuple[Arrays, Carried]:
        carried = _run_layer(work, chunk, layer, rest.but(gradients=sums))
        if not work.fixed.loops_in_chunk:  # XLA fuses no write that a barrier reads
            carried, messages = tie(carried.but(messages={}), carried.messages)
            carried = carried.but(messages=messages)
        return carried.gradients, carried.but(gradients=None)

    return body


def _run_chunks(
    work: Work,
    parts: BodyParts,
    number: Index,
    sums: Arrays,
    rest: Carried,
    *,
    down: bool,
    only: int | None,
) -> tuple[Arrays, Carried]:
    """Runs the cell of this number, whose place the program knows, or one layer of it; none if the
    number is `NONE`.

    A loop of one trip or none stands around all cells that ticks with these parts have, in it loops
    around fewer of them, and so on down to one: a stage passes few of them, however many cells
    there are.
    """
    fixed, params = work.fixed, work.fixed.params
    places = fixed.cells(work.action, fixed.known_slots, parts)
    layers = {n: range(place["layers"]) for n, place in places.items()}
    if only is not None:
        layers = {
            n: range(only, only + 1) if of_cell else of_cell
            for n, of_cell in layers.items()
            if only in of_cell or not of_cell
        }
    if not layers:
        return sums, rest
    cells = {n: dataclasses.replace(work.cell, number=n, **places[n]) for n in layers}

    def run_one(cell: Cell, sums: Arrays, rest: Carried) -> tuple[Arrays, Carried]:
        known, own = dataclasses.replace(work, cell=cell), layers[cell.number]
        if only is None or not own or known.begins(only):
            rest = _arriving(known, rest)
        if fixed.loops_in_chunk:
            held, messages = tie(work.held, rest.messages)
            known, rest = dataclasses.replace(known, held=held), rest.but(messages=messages)

        def body(chunk: int, layer: int, sums: Arrays, rest: Carried) -> tuple[Arrays, Carried]:
            part = known.part_of(rest, [(cell, [layer])])
            sums, part = _layer_body(known)(chunk, layer, sums, part)
            return sums, known.with_part(rest, part)

        return params.run_chunk(cell.chunk, own, body, sums, rest, down=down)

    def run_among(numbers: Sequence[int], through: tuple[Index, Arrays, Carried]) -> Any:
        """Runs the cell if it is one of these, and returns `NONE` in place of its number."""
        first, last = numbers[0], numbers[-1]
        known = [(cells[n], layers[n]) for n in numbers]

        def body(through: tuple[Index, Arrays, Carried]) -> Any:
            if first == last:
                return jnp.full_like(through[0], NONE), *run_one(cells[first], *through[1:])
            size = -(-len(numbers) // _BRANCHES)
            for start in range(0, len(numbers), size):
                through = run_among(numbers[start : start + size], through)
            return through

        number, sums, rest = through
        own = params.part(sums, [(cell.chunk, cell.layers) for cell, _ in known])
        place = {"cells": first, "to": last} if first < last else places[first]
        name = "_".join(f"{field}{value}" for field, value in place.items())
        if only is not None:
            name = name.replace(f"layers{cells[first].layers}", f"layer{only}")
        with jax.named_scope(name):
            number, own, part = lax.while_loop(
                lambda through: (first <= through[0]) & (through[0] <= last),
                body,
                (number, own, work.part_of(rest, known)),
            )
        return number, params.with_part(sums, own), work.with_part(rest, part)

    return run_among(list(cells), (number, sums, rest))[1:]


def _run_layer(work: Work, chunk: Index, layer: Index, carried: Carried) -> Carried:
    """Runs a layer as its kind does. If it may be of several, each has a loop, and all but one of
    them are empty."""
    fixed, step = work.fixed, _STEPS[work.action]
    kinds = fixed.kinds_at(chunk, layer)
    for kind in kinds:
        layer_work, moved = work.of_layer(chunk, layer, kind), work.cell.moved
        if moved is not None:
            move = _move_out if work.action is Kind.F else _move_back
            return move(layer_work, moved, step, carried)
        if kind.split.hands_back and not work.action.is_forward:
            continue  # the message that has come is the one that goes
        if len(kinds) == 1:
            return step(layer_work, carried)
        is_mine, of_all = fixed.kind_of[chunk, layer] == kind.number, fixed.layers.kind_of
        with jax.named_scope(f"kind{kind.number}_{of_all.count(kind.number)}of{len(of_all)}"):
            carried = run_if(is_mine, functools.partial(step, layer_work), carried)
    return carried


def _move_out(work: LayerWork, moved: Moved, step: Step, carried: Carried) -> Carried:
    """Runs F of a layer, while residuals of an earlier pass leave for the host.

    They are read before the layer runs, which may write its own into their slot. XLA for GPUs has
    at most two arrays on their way out at once.
    """
    leaving = joined([w for name in RESIDUALS_OF_F for w in work.cut(carried, name, moved)])
    leaving, messages = tie(leaving, carried.messages)
    return work.put(step(work, carried.but(messages=messages)), ON_HOST, moved, leaving)


def _move_back(work: LayerWork, moved: Moved, step: Step, carried: Carried) -> Carried:
    """Runs a backward of a layer, while residuals of a later one come back from the host.

    They are written when the layer has run, maybe into the slot of its own.
    """
    fixed, returning = work.fixed, work.cut(carried, ON_HOST, moved)
    moves = moved.on_host < fixed.table.num_slots[ON_HOST] - 1
    carried = step(work, carried)
    made = carried.messages, carried.gradients, carried.residuals.get("crossing")
    moved = after(made, moved, lax.axis_index(fixed.axes.names))
    old = {name: work.cut(carried, name, moved) for name in RESIDUALS_OF_F}
    for name, values in parted(returning, old).items():
        new = [jnp.where(moves, *pair) for pair in zip(values, old[name], strict=True)]
        carried = work.put(carried, name, moved, new)
    return carried


def _forward(work: LayerWork, carried: Carried) -> Carried:
    """F, and R, which neither renews the state nor adds the layer's loss."""
    fixed, kind = work.fixed, work.kind
    weights, source = work.weights(work.source(carried))
    message = work.taken(source)
    x, context = fixed.activation(message, kind.x), work.context()
    if kind.carry is not None:
        x = x, work.carry(carried, CARRY)
    args = work.params(weights), x, *context
    state = _layer_state(work, carried)
    if fixed.setup.trains and work.action is fixed.setup.leaves:
        y, until_b, until_w = kind.split.forward(*args, state=state)
        carried = work.save(carried, until_b=until_b, until_w=until_w)
    elif fixed.setup.quantizes:
        y, *_ = kind.split.forward(*args, state=state)
    else:
        y = kind.function(*args) if state is None else kind.function(*args, state)
    run = kind.split.forward if fixed.setup.quantizes else kind.function
    work.look(run, args if state is None else (*args, state), given=x, made=y)
    if state is not None:
        y, new = y
        carried = _renew(work, carried, new) if work.action is Kind.F else carried
    if isinstance(y, WithLoss):
        carried = _add_loss(carried, y.loss) if work.action is Kind.F else carried
        y = y.x
    if kind.carry is not None:
        y, carry = y
        carried = work.save(carried, carry=jax.tree.leaves(carry))
    return _handing(work, carried, fixed.message(message, kind.y, y))


def _backward(work: LayerWork, carried: Carried) -> Carried:
    """B, and BW, which finishes the gradient where B keeps what W needs."""
    fixed, kind, fused = work.fixed, work.kind, work.action is Kind.BW
    weights, source = work.weights(work.source(carried))
    buffers, source = tie(carried.residuals, source)
    message, carried = work.taken(source), carried.but(residuals=buffers)
    residuals = work.residuals(carried, *RESIDUALS_OF_F)
    if work.beside_forward:
        residuals, buffers = tie(residuals, carried.residuals)
        carried = carried.but(residuals=buffers)
    run = kind.split.backward_fused if fused else kind.split.backward_input
    dy = fixed.activation(message, kind.y)
    if kind.carry is not None:
        given = work.carry(carried, CARRY_GRADIENT)
        is_last = work.slice_number == fixed.setup.num_slices - 1
        dy = dy, jax.tree.map(lambda w: jnp.where(is_last, 0, w), given)
    args = work.params(weights), *residuals, dy, *work.context()
    dx, rest = run(*args)
    work.look(run, args, given=dy, made=(dx, rest))
    if kind.carry is not None:
        dx, dcarry = dx
        carried = work.save(carried, carry_gradient=jax.tree.leaves(dcarry))
    keep = _add_gradient(work, carried, rest) if fused else work.save(carried, crossing=rest)
    return _handing(work, keep, fixed.message(message, kind.x, dx))


def _backward_weights(work: LayerWork, carried: Carried) -> Carried:
    buffers, sums = tie_to_smallest(carried.residuals, carried.gradients)
    weights, buffers = work.weights(buffers)
    carried = carried.but(residuals=buffers)
    residuals = work.residuals(carried, "until_w", "crossing")
    args = work.params(weights), *residuals, *work.context()
    dparams = work.kind.split.backward_weights(*args)
    work.look(work.kind.split.backward_weights, args, given=(), made=dparams)
    return _add_gradient(work, carried.but(gradients=sums), dparams)


_STEPS: dict[Kind, Step] = {
    Kind.R: _forward,
    Kind.F: _forward,
    Kind.B: _backward,
    Kind.BW: _backward,
    Kind.W: _backward_weights,
}


def _handing(work: LayerWork, carried: Carried, message: Message) -> Carried:
    """A copy with the message that a layer hands on."""
    return carried.but(messages=carried.messages | {work.fixed.outbox(work.action): message})


def _add_gradient(work: LayerWork, carried: Carried, dparams: LayerParams) -> Carried:
    fixed, example = work.fixed, work.kind.example
    assert fixed.gradients is not None
    if fixed.setup.shares:
        dparams, of_shared = dparams
        shared = jax.tree.map(jnp.add, carried.shared_gradients, widened(of_shared))
        carried = carried.but(shared_gradients=shared)
    stored = fixed.params.pack(dparams, example)
    return carried.but(gradients=fixed.gradients.add(work, carried.gradients, stored))


def _add_loss(carried: Carried, loss: Tree) -> Carried:
    sums = carried.layer_losses
    if sums is None:  # only outputs are wanted
        return carried
    return carried.but(layer_losses=jax.tree.map(jnp.add, sums, addable(loss)))


def _layer_state(work: LayerWork, carried: Carried) -> Tree:
    """A layer's running statistics; None for a model without."""
    layout, example = work.fixed.setup.states, work.kind.example
    if layout is None:
        return None
    place = layout.layer_at(work.at, example)
    return layout.unpack(layout.read(carried.states, place), example)


def _renew(work: LayerWork, carried: Carried, new: Tree) -> Carried:
    layout, example = work.fixed.setup.states, work.kind.example
    assert layout is not None
    place = layout.layer_at(work.at, example)
    states = layout.write(carried.states, place, layout.pack(new, example))
    return carried.but(states=states)
