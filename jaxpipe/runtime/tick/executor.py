"""The executor: one SPMD program that runs any tick table.

`run` is the body of the `jax.shard_map` that `jaxpipe.Pipeline` builds; everything here sees one
device's part. It scans over the table's rows. `tick` is one row: the layers of its cells
(`jaxpipe.runtime.tick.layer_passes`), the messages between stages
(`jaxpipe.runtime.tick.messages`), and the embedding and the loss that all stages compute together
(`jaxpipe.runtime.tick.outer_phases`). Variants differ in where weights come from
(`jaxpipe.runtime.tick.weights`), what becomes of gradients
(`jaxpipe.runtime.tick.gradients`) and how parameters lie (`jaxpipe.runtime.layout.layer_layout`).

Every part of a tick has a `jax.named_scope`, so that profiles and `benchmarks/gpu_roofline.py` can
tell its loops apart.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.layout.data_axis import average
from jaxpipe.runtime.layout.whole_model import SHARED, frozen_part, outer_of
from jaxpipe.runtime.tick import outer_phases
from jaxpipe.runtime.tick.carried import Carried
from jaxpipe.runtime.tick.fixed import Fixed, Setup, fix
from jaxpipe.runtime.tick.gradients import GradientSink, Kept, Reduced
from jaxpipe.runtime.tick.inputs import no_gradients
from jaxpipe.runtime.tick.layer_passes import run_cells
from jaxpipe.runtime.tick.messages import exchange, send_late
from jaxpipe.runtime.tick.microbatches import Microbatches, StepMicrobatches
from jaxpipe.runtime.tick.weights import Gathered, Held, Resident
from jaxpipe.runtime.trees import select
from jaxpipe.runtime.types import Batch, Gradients, Key, Placed, Shapes, States, Tree
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import Row, TickTable

_SUMS = ("gradients", "reduced")
"""Buffers that start as zeros; the others are written before they are read."""


class Step(NamedTuple):
    """What a step returns.

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
    carried = start(fixed, held, outer_gradients_like(setup, held), states)
    carried = carried.but(input_gradients=no_gradients(rows, setup.inputs))
    value, carried, states = run_ticks(fixed, batch, carried)
    gradients = None if sink is None else sink.result(fixed, carried)
    by_row = [w.reshape(-1, *w.shape[2:]) for w in carried.input_gradients]
    return Step(value, gradients, states, by_row)


def sink_of(setup: Setup) -> Kept | Reduced | None:
    """What becomes of gradients in a step that returns them."""
    if not setup.trains:
        return None
    return Reduced() if setup.zero >= 2 else Kept()


def begin(
    setup: Setup, placed: Placed, batch: StepMicrobatches, sink: GradientSink | None
) -> tuple[Fixed, Held]:
    """What no tick of a step changes, and the weights it begins with."""
    weights = Gathered() if setup.zero == 3 else Resident()
    parts = [placed, *frozen_part(placed).values()]
    layers = [jax.tree.map(lambda w: w[0], part["layers"]) for part in parts]
    held = weights.hold(setup, layers, [outer_of(part) for part in parts])
    return fix(setup, batch, held.outer, weights=weights, gradients=sink), held


def outer_gradients_like(setup: Setup, held: Held) -> Gradients:
    """What the gradients of what belongs to no single layer are shaped like."""
    return select(held.outer, setup.layout.outer)


def start(fixed: Fixed, held: Tree, outer: Gradients, states: States) -> Carried:
    """What the first tick is handed: nothing is in flight.

    ``held`` is what the weights' source begins with, ``outer`` like the gradient sums of what
    belongs to no single layer.
    """

    def empty(shape: jax.ShapeDtypeStruct) -> jax.Array:
        inexact = jnp.issubdtype(shape.dtype, jnp.inexact)
        value = np.nan if fixed.setup.poison and inexact else 0
        return jnp.full(shape.shape, value, shape.dtype)

    found = {
        name: jax.tree.map(jnp.zeros_like if name in _SUMS else empty, shape)
        for name, shape in buffer_shapes(fixed).items()
    }
    sink, sums = fixed.gradients, jax.tree.map(jnp.zeros_like, outer)
    return Carried(
        weights=fixed.weights.with_buffers(held, found),
        inboxes={name: found[name] for name in ("x", "dy") if name in found},
        residuals={name: found[name] for name in fixed.residuals if name in found},
        sent=found.get("sent", {}),
        replay={name: found[name] for name in ("inputs", "read_states") if name in found},
        # An evaluation has no gradients; its loops over layers carry their place all the same.
        gradients=found.get("gradients", {}),
        outer_gradients=None if sink is None else sums,
        shared_gradients=None if sink is None else sums.get(SHARED),
        finished=None if sink is None else sink.finished(found),
        collected=fixed.collector.empty(),
        layer_losses=jnp.zeros(1, jnp.float32) if fixed.adds_layer_losses else None,
        states=jax.tree.map(lambda w: w[0], states),
        input_gradients=[],
    )


def buffer_shapes(fixed: Fixed) -> dict[str, Shapes]:
    """Shapes of every buffer that the tick loop carries, by name; they follow from the schedule."""
    slots = fixed.table.num_slots
    shapes: dict[str, Shapes] = {"x": fixed.messages.shapes(slots["x"])}
    if late := {channel.kind for channel in fixed.table.channels if channel.late}:
        shapes["sent"] = {kind: fixed.message_shape() for kind in late}
    shapes |= fixed.weights.shapes(fixed)
    if fixed.gradients is None:
        return shapes
    shapes["dy"] = fixed.messages.shapes(slots["dy"])
    shapes |= {name: kept.shapes(slots[name]) for name, kept in fixed.residuals.items()}
    if fixed.recomputes:
        shapes["inputs"] = fixed.messages.shapes(slots["replay"])
    if fixed.rereads_states:
        assert fixed.setup.states is not None
        shapes["read_states"] = fixed.setup.states.slot_shapes(slots["replay"])
    return shapes | fixed.gradients.shapes(fixed)


def run_ticks(
    fixed: Fixed, batch: StepMicrobatches, carried: Carried
) -> tuple[Tree, Carried, States]:
    """Runs all rows of the table.

    Returns:
      What is collected, such as the loss; what the last tick leaves; and the mean over data shards
      of the states.
    """
    rows, batch = _of_stage(fixed.table, fixed.stage), fixed.weighed(batch)
    carried, _ = lax.scan(lambda c, row: (tick(fixed, batch, c, row), None), carried, rows)
    layer_losses = None if carried.layer_losses is None else carried.layer_losses[0]
    value = fixed.collector.result(carried.collected, layer_losses)
    return value, carried, jax.tree.map(lambda w: w[None], average(carried.states, fixed.axes))


def _of_stage(table: TickTable, stage: jax.Array) -> Row:
    """The rows as one stage sees them, int32 ``[ticks]``."""
    rows = jax.tree.map(jnp.asarray, table.rows)

    def own(columns: Tree) -> Tree:
        return jax.tree.map(lambda column: column[:, stage], columns)

    return rows._replace(
        cells=own(rows.cells),
        arrivals=own(rows.arrivals),
        gather=own(rows.gather),
        reduce=own(rows.reduce),
    )


def tick(fixed: Fixed, batch: Microbatches, carried: Carried, row: Row) -> Carried:
    """Runs one row."""
    sink = fixed.gradients
    arriving = send_late(fixed.table, carried.sent, fixed.axes)
    held = fixed.weights.gather(fixed, carried.weights, row.gather)
    carried = outer_phases.enter(fixed, batch, carried.but(weights=held), row.outer)
    carried, outputs = run_cells(fixed, batch, carried, row, arriving)
    if sink is not None:
        carried = sink.chunk(fixed, carried, row.reduce)
    carried = exchange(fixed.table, carried, row, outputs, arriving, fixed.axes)
    if sink is None:
        return outer_phases.evaluate(fixed, batch, carried, row.outer, outputs[Kind.F])
    carried = outer_phases.leave(fixed, batch, carried, row.outer, outputs[Kind.F])
    carried = outer_phases.embed_gradient(fixed, batch, carried, row.outer, outputs[Kind.B])
    return sink.tick(fixed, carried, row)
