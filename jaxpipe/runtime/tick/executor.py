"""The executor: one SPMD program that runs any tick table.

`run` is the body of the `jax.shard_map` that `jaxpipe.Pipeline` builds; everything here sees one
device's part. It scans over the table's rows. `tick` is one row: the layers of its cells
(`layer_passes`), the messages between stages (`messages`), and the embedding and the loss
(`outer_phases`). `jaxpipe.runtime.tick.fixed` says in what programs differ.

Every part of a tick has a `jax.named_scope`, so that profiles and `benchmarks/gpu_roofline.py` can
tell its loops apart.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxpipe.runtime.barriers import after, always
from jaxpipe.runtime.defaults import RESIDUALS
from jaxpipe.runtime.layout.data_axis import average
from jaxpipe.runtime.layout.placed import Placed
from jaxpipe.runtime.layout.whole_model import SHARED, frozen_part, outer_of
from jaxpipe.runtime.tick import moves, outer_phases
from jaxpipe.runtime.tick.fixed import Fixed, GradientSink
from jaxpipe.runtime.tick.gradients import Summed
from jaxpipe.runtime.tick.messages import exchange, send_late
from jaxpipe.runtime.tick.microbatches import (
    Microbatches,
    StepMicrobatches,
    inputs_of,
    join_rows,
)
from jaxpipe.runtime.tick.prepare import fix
from jaxpipe.runtime.tick.setup import Setup
from jaxpipe.runtime.tick.values import Carried
from jaxpipe.runtime.tick.weights import Gathered, Held, Resident
from jaxpipe.runtime.trees import select, widened
from jaxpipe.runtime.types import Batch, Gradients, Index, Key, Shapes, States, Tree
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import NONE, BodyParts, Row, Transfer, Transfers

_SUMS = ("gradients", "reduced")
"""Buffers that start as zeros; the others are written before they are read."""

_BOTH_WAYS = BodyParts()

Moved = TypeVar("Moved")


class Step(NamedTuple):
    """The results of a step.

    Args:
      value: loss and metrics, or outputs.
      gradients: this device's part, reduced over data and shaped like the placed parameters; None
        if the table has no backward.
      states: those after the last microbatch, the mean over data shards.
      input_gradients: of the batch's arrays whose gradients are wanted, ``[rows, ...]``.
    """

    value: Tree
    gradients: Gradients
    states: States
    input_gradients: Tree


def run(setup: Setup, placed: Placed, rows: Batch, rng: Key, states: States) -> Step:
    """Runs one step on this device, with its part of parameters, rows and states."""
    batch, sink = StepMicrobatches(rows, rng), sink_of(setup)
    fixed, held = begin(setup, placed, batch, sink)
    carried = start(fixed, held, select(held.outer, setup.layout.outer), states)
    no_gradients = jax.tree.map(jnp.zeros_like, inputs_of(rows, setup.inputs))
    carried = carried.but(input_gradients=no_gradients)
    value, carried, states = run_ticks(fixed, batch, carried)
    gradients = None if sink is None else sink.result(fixed, carried)
    by_row = join_rows(carried.input_gradients, setup.num_slices)
    axes = fixed.axes
    # Devices along the model's axes read the same rows, and each stage reads some of them.
    by_row = lax.psum(by_row, axes.model if setup.table.together else (axes.stage, *axes.model))
    return Step(value, gradients, states, by_row)


def sink_of(setup: Setup) -> Summed | None:
    """Makes the sink of a step that returns gradients."""
    return Summed(setup.options.zero) if setup.trains else None


def begin(
    setup: Setup, placed: Placed, batch: StepMicrobatches, sink: GradientSink | None
) -> tuple[Fixed, Held]:
    """Makes what no tick of a step changes, and the weights it begins with."""
    weights = Gathered() if setup.options.zero.shards_weights else Resident()
    parts = [placed, *frozen_part(placed).values()]
    layers = [jax.tree.map(lambda w: w[0], part["layers"]) for part in parts]
    held = weights.hold(setup, layers, [outer_of(part) for part in parts])
    return fix(setup, batch, held.outer, weights=weights, gradients=sink), held


def start(fixed: Fixed, held: Tree, outer: Gradients, states: States) -> Carried:
    """Makes what the first tick is handed: nothing is in flight.

    ``held`` is what the weights' source begins with, ``outer`` like the gradient sums of what
    belongs to no single layer.
    """

    def empty(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if fixed.setup.options.poison and jnp.issubdtype(shape.dtype, jnp.inexact):
            return jnp.full(shape.shape, np.nan, shape.dtype)
        return lax.empty(shape.shape, shape.dtype)

    shapes = buffer_shapes(fixed)
    residuals = {
        # What later slices have not appended yet has no influence, but must be finite.
        name: kept.filled(
            fixed.table.num_slots[name], empty if name in RESIDUALS else jnp.zeros_like
        )
        for name, kept in fixed.residuals.items()
    }
    found = {
        name: jax.tree.map(jnp.zeros_like if name in _SUMS else empty, shape)
        for name, shape in shapes.items()
        if name not in residuals
    }
    sink, sums = fixed.gradients, jax.tree.map(jnp.zeros_like, widened(outer))
    return Carried(
        weights=fixed.weights.with_buffers(held, found),
        inboxes={name: found[name] for name in ("x", "dy") if name in found},
        residuals=residuals,
        # An evaluation has no gradients; its loops over layers carry their place all the same.
        gradients=found.get("gradients", {}),
        outer_gradients=None if sink is None else sums,
        shared_gradients=None if sink is None else sums.get(SHARED),
        finished=None if sink is None else sink.finished(found),
        collected=fixed.collector.empty(),
        layer_losses=jax.tree.map(jnp.zeros_like, fixed.layer_losses),
        states=states_of_stage(states),
        input_gradients=[],
        messages=found.get("messages", {}),
    )


def states_of_stage(placed: Placed | None) -> States:
    """A device's part of placed states, without the dimension of stages."""
    return None if placed is None else jax.tree.map(lambda w: w[0], placed["layers"])


def states_of_stages(setup: Setup, states: States) -> Placed | None:
    """Undoes `states_of_stage`."""
    if setup.states is None:
        return None
    return Placed({"layers": jax.tree.map(lambda w: w[None], states)}, setup.states.order)


def buffer_shapes(fixed: Fixed) -> dict[str, Shapes]:
    """Shapes of every buffer that the tick loop carries, by name; they follow from the schedule."""
    slots = fixed.table.num_slots
    shapes: dict[str, Shapes] = {"x": fixed.messages.shapes(slots["x"])}
    kept = {channel.kind for channel in fixed.table.channels if channel.late_edges}
    if fixed.setup.knows_chunks:  # its cells write messages where they are
        kept |= fixed.table.passes.keys() & {Kind.F, Kind.B, Kind.BW}
    if kept:
        shapes["messages"] = {fixed.outbox(kind): fixed.message_shape() for kind in kept}
    shapes |= fixed.weights.shapes(fixed)
    shapes |= {name: kept.shapes(slots[name]) for name, kept in fixed.residuals.items()}
    if fixed.gradients is None:
        return shapes
    shapes["dy"] = fixed.messages.shapes(slots["dy"])
    return shapes | fixed.gradients.shapes(fixed)


def run_ticks(
    fixed: Fixed, batch: StepMicrobatches, carried: Carried
) -> tuple[Tree, Carried, States]:
    """Runs all rows of the table.

    Returns:
      What is collected, such as the loss; what the last tick leaves; and the mean over data shards
      of the states.
    """
    table, sink, batch = fixed.table, fixed.gradients, fixed.weighed(batch)
    held = carried.weights
    if fixed.weights.gathers:
        held = moves.gather_first(fixed, held) if table.gathers.within else held
        held = _at_edge(table.gathers, fixed.stage, partial(fixed.weights.gather, fixed), held)
    carried = _run_rows(fixed, batch, carried.but(weights=held))
    if sink is not None and sink.reduces(fixed):
        carried = moves.reduce_last(fixed, carried) if table.reduces.within else carried
        carried = _at_edge(table.reduces, fixed.stage, partial(sink.chunk, fixed), carried)
    collected = carried.collected
    if not table.together:  # only the last stage has collected any
        # A sum of booleans has integers.
        collected = jax.tree.map(lambda w: lax.psum(w, fixed.axes.stage).astype(w.dtype), collected)
    value = fixed.collector.result(collected, carried.layer_losses)
    return value, carried, states_of_stages(fixed.setup, average(carried.states, fixed.axes))


_Turn = tuple[jax.Array, Carried]
"""The number of the next row, and what rows carry."""

_Step = Callable[[Carried, Row], Carried]


def _run_rows(fixed: Fixed, batch: Microbatches, carried: Carried) -> Carried:
    """Runs the rows: ticks with equal parts have a body, and those in a row are a loop.

    Its trip count is the same on every device.
    """
    rows, row_of = _of_stage(fixed)
    found, rounds = fixed.bodies
    steps = [partial(tick, fixed, batch, parts=parts) for parts in found]
    if len(rounds) == 1:
        ends = np.cumsum(rounds[0])
        for parts, step, start, end in zip(found, steps, ends - rounds[0], ends, strict=True):

            def next_row(carried: Carried, row: jax.Array, step: _Step = step) -> Any:
                return step(carried, row_of(row)), None

            with jax.named_scope(parts.name):
                carried, _ = lax.scan(next_row, carried, rows[start:end])
        return carried

    def run_round(through: _Turn, counts: jax.Array) -> tuple[_Turn, None]:
        for parts, step, count in zip(found, steps, counts, strict=True):

            def one(_: Index, through: _Turn, step: _Step = step) -> _Turn:
                number, carried = through
                return number + 1, step(carried, row_of(rows[number]))

            with jax.named_scope(parts.name):
                through = lax.fori_loop(0, count, one, through)
        return through, None

    start = jnp.zeros((), jnp.int32), carried
    (_, carried), _ = lax.scan(run_round, start, jnp.asarray(rounds))
    return carried


def _at_edge(
    transfers: Transfers,
    stage: jax.Array,
    move: Callable[[Moved, Transfer], Moved],
    through: Moved,
) -> Moved:
    """Moves whole chunks before the first tick, or after the last."""
    whole = Transfer(*(column[int(transfers.within) :] for column in transfers.edge))
    if not len(whole.chunk):
        return through
    own = Transfer(*(jnp.asarray(column)[:, stage] for column in whole))
    own = own._replace(chunk=jnp.where(always(stage), own.chunk, NONE))
    return lax.scan(lambda through, one: (move(through, one), None), through, own)[0]


def _of_stage(fixed: Fixed) -> tuple[jax.Array, Callable[[jax.Array], Row]]:
    """The rows as the stage sees them, int32 ``[ticks, fields]``, and what makes a `Row` of one.

    In one array, or a GPU would start a kernel for every field that a tick reads; and as numbers
    that XLA does not know to be parts of one, or the GPU would copy many of them one by one.
    """
    rows = jax.tree.map(jnp.asarray, fixed.table.rows)
    cells = rows.cells
    if fixed.setup.knows_chunks:
        cells = {kind: fixed.numbered(kind, cell) for kind, cell in cells.items()}

    def own(columns: Tree) -> Tree:
        return jax.tree.map(lambda column: column[:, fixed.stage], columns)

    rows = rows._replace(
        cells=own(cells),
        arrivals=own(rows.arrivals),
        gather=own(rows.gather),
        reduce=own(rows.reduce),
    )
    _, unravel = ravel_pytree(jax.tree.map(lambda column: column[0], rows))
    table = jax.vmap(lambda row: ravel_pytree(row)[0])(rows)

    def row_of(row: jax.Array) -> Row:
        row = lax.optimization_barrier(row)
        return unravel(jnp.where(always(fixed.stage), row, NONE) if fixed.setup.overlaps else row)

    return table, row_of


def _in_turn(fixed: Fixed, first: Tree, then: Tree, device: Index) -> Tree:
    """``then``, which on CPUs waits for ``first``: embedding, layers and head may communicate among
    the same devices, and depend on each other only where a microbatch does.

    Test: ``test_parallel.py``, "bert".
    """
    return then if fixed.setup.overlaps else after(first, then, device)


def tick(
    fixed: Fixed, batch: Microbatches, carried: Carried, row: Row, *, parts: BodyParts = _BOTH_WAYS
) -> Carried:
    """Runs those parts of one row."""
    sink, weights = fixed.gradients, fixed.weights
    # In a body that runs once, XLA would leave out the loops of an embedding or a head.
    device = lax.axis_index(fixed.axes.names)
    runs = jax.tree.map(lambda number: jnp.where(always(device), number, NONE), row.outer)
    row = row._replace(outer=runs)
    # Before the first tick nothing was sent.
    kept = carried.messages.keys()
    arriving = send_late(fixed, parts, {} if parts.first else carried.messages)
    if fixed.table.gathers.whole:
        carried = carried.but(weights=weights.gather(fixed, carried.weights, row.gather))
    if parts.forward and fixed.runs("embed", parts):
        carried = outer_phases.enter(fixed, batch, carried, row.outer)
        row = row._replace(cells=_in_turn(fixed, carried.inboxes, row.cells, device))
    if sink is not None:
        carried = sink.before_layers(fixed, batch, carried, row)
    carried = moves.run_and_move(fixed, batch, carried, row, parts)
    outputs = {
        kind: carried.messages[fixed.outbox(kind)]
        for kind in (Kind.F, Kind.B)
        if parts.has(kind) and (kind is Kind.F or fixed.setup.trains)
    }
    carried = carried.but(messages={name: carried.messages[name] for name in kept})
    if sink is not None and sink.reduces(fixed) and fixed.table.reduces.whole and parts.backward:
        carried = sink.chunk(fixed, carried, row.reduce)
    carried = exchange(fixed.table, carried, row, outputs, arriving, fixed.axes)
    layers = carried.gradients, outputs
    row = row._replace(outer=_in_turn(fixed, layers, row.outer, device))
    if sink is None:
        return outer_phases.evaluate(fixed, batch, carried, row.outer, outputs[Kind.F])
    if parts.backward and fixed.runs("embed_gradient", parts):
        carried = outer_phases.embed_gradient(fixed, batch, carried, row.outer, outputs[Kind.B])
        row = row._replace(outer=_in_turn(fixed, carried.outer_gradients, row.outer, device))
    if parts.forward and fixed.runs("head", parts):
        carried = outer_phases.leave(fixed, batch, carried, row.outer, outputs[Kind.F])
    return carried
