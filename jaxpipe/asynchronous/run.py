"""One call of an asynchronous pipeline, as one device sees it.

A tick is the executor's; what surrounds it differs. Rows are computed from the tick's number
(`jaxpipe.asynchronous.rows`), everything in flight enters and leaves as "flight", weights are kept
in versions, and a tick ends by updating the parts whose minibatch is complete.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.asynchronous.rows import SteadyRows
from jaxpipe.asynchronous.steady import SteadyState
from jaxpipe.asynchronous.updates import KEPT, Extra, Rules, Updated, Versioned, Versions
from jaxpipe.runtime.barriers import run_if
from jaxpipe.runtime.defaults import RESIDUALS
from jaxpipe.runtime.layers.jaxprs import read_leaves
from jaxpipe.runtime.layers.losses import differentiated
from jaxpipe.runtime.layout.data_axis import average, gather
from jaxpipe.runtime.layout.placed import Placed
from jaxpipe.runtime.tick import executor
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.microbatches import StepMicrobatches
from jaxpipe.runtime.tick.prepare import fix
from jaxpipe.runtime.tick.setup import Setup
from jaxpipe.runtime.tick.values import Carried
from jaxpipe.runtime.types import Arrays, Batch, Index, Key, OuterParams, States, Tree
from jaxpipe.runtime.update.per_unit import with_stages, without_stages
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import NONE, Row

AsyncState: TypeAlias = dict[str, Tree]
"""State of a run from call to call: "weights" and "delta" by part, "owned" and "rest" of the
optimizer, "states" of stateful layers after the last whole minibatch, "recent" rows and keys,
"clock", the rules "steady", and "flight": what is in flight.

A new key belongs in `_at_rest` and `_specs` of `AsyncPipeline` and in what `call` returns; also in
`_BY_PART` if it holds a tree for each part; a key of "flight", in `_in_flight` and `_carried`."""

_BY_PART = ("weights", "delta", "rest")


@dataclasses.dataclass(frozen=True)
class Recent:
    """The microbatches in flight.

    Args:
      rows: their rows, leaves ``[slots, ...]``.
      rng: their steps' keys, ``[slots]``, or None.
      scale: the scale of their losses ``[slots]``, or None if these are not weighted.
    """

    rows: Batch
    rng: Key
    scale: jax.Array | None
    steady: SteadyState

    def at(self, i: Index) -> tuple[Batch, Key, Index]:
        slot = i % self.steady.num_slots
        rows, rng = jax.tree.map(
            lambda w: lax.dynamic_index_in_dim(w, slot, keepdims=False), (self.rows, self.rng)
        )
        return rows, rng, i % self.steady.num_microbatches

    def scale_of(self, i: Index) -> jax.Array | None:
        return None if self.scale is None else self.scale[i % self.steady.num_slots]


def empty_flight(setup: Setup, rules: Rules, state: AsyncState) -> dict[str, Tree]:
    """Makes what is in flight in a pipeline that is empty; arguments as for `call`."""
    own, steady = _own(state), rules.steady
    fixed, tied = _fix(setup, rules, own)
    idle = SteadyRows(steady, entered=0, xp=jnp).at(0, fixed.stage, layers=0)
    sums, num_sums = _outer(setup, own), steady.num_sums(tied=tied)
    rotating = jax.tree.map(lambda w: jnp.zeros((num_sums, *w.shape), w.dtype), sums["embed"])
    fixed = _at(fixed, Updated(rules, idle, tied))
    carried = executor.start(fixed, _held(own), sums | {"embed": rotating}, own["states"])
    late = 1 + steady.loss_lag
    losses = jax.tree.map(lambda w: jnp.stack([w] * late), carried.layer_losses)
    scale = None
    if fixed.weight is not None:
        scale = jnp.zeros(steady.num_slots, differentiated(carried.collected).dtype)
    return _in_flight(carried, losses, scale)


def newest_weights(setup: Setup, rules: Rules, state: AsyncState) -> dict[str, Arrays]:
    """Every part's newest version, between two calls."""
    own, steady = _own(state), rules.steady
    clock, count = own["clock"], steady.num_versions
    parts = steady.parts(lax.axis_index(setup.layout.axes.stage))
    newest = {
        name: steady.newest(part, clock["tick"], clock["first"]) for name, part in parts.items()
    }
    slot_dim = setup.layout.layers.slot_dim
    return {name: _held(own).at(name, k % count, count, slot_dim) for name, k in newest.items()}


def call(
    setup: Setup, rules: Rules, state: AsyncState, rows: Batch | None, rng: Key
) -> tuple[AsyncState, Tree]:
    """Runs N ticks in which a minibatch enters, or those that drain the pipeline.

    Args:
      rows, rng: the minibatch, leaves ``[rows, N, ...]``, and its key; None to drain.

    Returns:
      The state afterwards, and loss and metrics of the minibatches that have left,
      ``[minibatches, ...]``, NaN before the first one.
    """
    own, steady, drains = _own(state), rules.steady, rows is None
    (fixed, tied), clock = _fix(setup, rules, own), own["clock"]
    num_ticks = steady.drain_ticks if drains else steady.num_microbatches
    clock = clock | {"entered": clock["entered"] + (0 if drains else steady.num_microbatches)}
    source = SteadyRows(
        steady,
        entered=clock["entered"],
        first=clock["first"],
        fused=Kind.BW in setup.table.passes,
        xp=jnp,
    )
    layers = jnp.asarray(setup.table.layer_counts, jnp.int32)[fixed.stage]
    minibatch = None if rows is None else fixed.weighed(StepMicrobatches(rows, rng))

    def tick(through: Tree, offset: Index) -> tuple[Tree, Tree]:
        recent, carried, losses, averaged = through
        now = clock["tick"] + offset
        if minibatch is not None:
            slot, (new, key, _) = now % steady.num_slots, minibatch.at(offset)
            recent = jax.tree.map(
                lambda kept, new: lax.dynamic_update_index_in_dim(kept, new, slot, 0),
                recent,
                {"rows": new, "rng": key, "scale": minibatch.scale},
            )
        row = source.at(now, fixed.stage, layers=layers)
        # Layers add their losses to those of their minibatch.
        slot = steady.loss_slot(row.row.cells[Kind.F].microbatch)
        carried = carried.but(layer_losses=jax.tree.map(lambda w: w[slot], losses))
        sink, batch = Updated(rules, row, tied), Recent(**recent, steady=steady)
        of_tick = _at(fixed, sink)
        carried = executor.tick(of_tick, batch, carried, row.row)
        losses = jax.tree.map(lambda w, new: w.at[slot].set(new), losses, carried.layer_losses)
        carried = sink.update(of_tick, carried)
        if setup.states is not None:
            carried, averaged = _average_states(fixed, steady, carried, averaged, row.row)
        carried, losses, left = _left(steady, carried, losses, row.row)
        return (recent, carried, losses, averaged), left

    recent = own["recent"] | {"scale": own["flight"].get("scale")}
    losses, averaged = (
        own["flight"].get("layer_losses"),
        executor.states_of_stage(own["states"]),
    )
    through = recent, _carried(rules, own), losses, averaged
    (recent, carried, losses, averaged), left = lax.scan(
        tick, through, jnp.arange(num_ticks, dtype=jnp.int32)
    )
    last_ones = _last_ones(steady, num_ticks, drains=drains)
    value = fixed.collector.result(*jax.tree.map(lambda w: w[last_ones], left))
    scale, later = recent.pop("scale"), clock | {"tick": clock["tick"] + num_ticks}
    if drains:  # it begins again
        first = clock["first"] + clock["entered"] // steady.num_microbatches
        later = {"tick": jnp.int32(0), "entered": jnp.int32(0), "first": first}
    own |= {
        "weights": carried.weights.weights,
        "delta": carried.weights.delta,
        "owned": rules.optimizer.flat(carried.finished.states),
        "rest": carried.finished.rest,
        "states": executor.states_of_stages(setup, averaged),
        "recent": recent,
        "clock": later,
        "flight": _in_flight(carried, losses, scale),
    }
    return _behind(setup, own), value


def _average_states(
    fixed: Fixed, steady: SteadyState, carried: Carried, averaged: States, row: Row
) -> tuple[Carried, States]:
    """Averages the stage's states over data shards if F has ended a minibatch in this tick."""

    def body(through: Tree) -> Tree:
        states = average(through[0], fixed.axes)
        return states, states

    cell = row.cells[Kind.F]
    ends = cell.runs & steady.updates(cell.microbatch)
    states, averaged = run_if(ends, body, (carried.states, averaged))
    return carried.but(states=states), averaged


def _left(
    steady: SteadyState, carried: Carried, losses: Tree, row: Row
) -> tuple[Carried, Tree, tuple[Tree, Tree]]:
    """Takes out what is collected of the minibatch whose last microbatch has left in this tick, and
    the sums of its layers' losses and metrics; NaN, or 0 for integers, if there is none."""
    ends = (row.outer.head != NONE) & steady.updates(row.outer.head)
    slot = steady.loss_slot(row.outer.head)

    def if_ends(w: jax.Array) -> jax.Array:
        nothing = jnp.nan if jnp.issubdtype(w.dtype, jnp.inexact) else 0
        return jnp.where(ends, w, jnp.asarray(nothing, w.dtype))

    left = jax.tree.map(if_ends, (carried.collected, jax.tree.map(lambda w: w[slot], losses)))
    collected = jax.tree.map(lambda w: jnp.where(ends, 0, w), carried.collected)
    losses = jax.tree.map(lambda w: w.at[slot].set(jnp.where(ends, 0, w[slot])), losses)
    return carried.but(collected=collected), losses, left


def _last_ones(steady: SteadyState, num_ticks: int, *, drains: bool) -> np.ndarray:
    """The ticks of a call in which the last microbatch of a minibatch leaves."""
    behind = steady.head.forward
    ticks = range(behind if drains else num_ticks)
    return np.asarray([t for t in ticks if steady.updates(t - behind)], np.int32)


# What no tick changes, and what one does.


def _fix(setup: Setup, rules: Rules, own: AsyncState) -> tuple[Fixed, bool]:
    """Arguments as for `call`; also returns whether the head reads the embedding's parameters."""
    outer, recent = _outer(setup, own), Recent(**own["recent"], scale=None, steady=rules.steady)
    fixed = fix(setup, recent, outer, weights=Versioned(rules, {}), gradients=None)

    def read(function: Callable[[OuterParams], Tree], name: str) -> bool:
        return any(read_leaves(lambda part: function(outer | {name: part}), outer[name]))

    if read(lambda outer: setup.model.embed(outer, *fixed.embed_context(recent, 0)), "head"):
        raise ValueError(
            "Model.embed reads parameters of 'head', which are updated before the embedding's "
            "gradient is there. Parameters that both read belong to params['embed']."
        )
    x = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), fixed.layers.merged)
    context = fixed.head_context(recent, 0)
    return fixed, read(lambda outer: differentiated(fixed.head(outer, x, *context)), "embed")


def _at(fixed: Fixed, sink: Updated) -> Fixed:
    """Adds the weights and the gradient sink of one tick."""
    weights = Versioned(sink.rules, sink.row.reads)
    return dataclasses.replace(fixed, weights=weights, gradients=sink)


def _outer(setup: Setup, own: AsyncState) -> OuterParams:
    """A version of embedding and head, whole."""
    outer = {name: jax.tree.map(lambda w: w[0], own["weights"][name]) for name in ("embed", "head")}
    layout = setup.layout
    return gather(outer, layout.outer, layout.axes) if setup.options.zero.shards_weights else outer


# The state between calls.


def _held(own: AsyncState) -> Versions:
    return Versions(own["weights"], own["delta"])


def _carried(rules: Rules, own: AsyncState) -> Carried:
    """Makes the carry of the first tick of a call."""
    flight, states = own["flight"], rules.optimizer.by_part(own["owned"])
    kept = {name: flight[name] for name in KEPT if name in flight}
    return Carried(
        weights=_held(own),
        inboxes={name: flight[name] for name in ("x", "dy")},
        residuals={name: flight[name] for name in RESIDUALS},
        gradients=flight["gradients"],
        outer_gradients=flight["outer_gradients"],
        finished=Extra(states, own["rest"], flight["norms"], kept),
        collected=flight["loss"],
        shared_gradients=None,
        layer_losses=jax.tree.map(lambda w: w[0], flight.get("layer_losses")),
        states=flight["states"],
        input_gradients=[],
    )


def _in_flight(carried: Carried, losses: Tree, scale: jax.Array | None) -> dict[str, Tree]:
    """Undoes `_carried`, as far as it is in flight.

    ``losses`` are those of layers, by minibatch, ``scale`` is that of weighted losses.
    """
    extra, optional = carried.finished, {"layer_losses": losses, "scale": scale}
    return {
        **carried.inboxes,
        **carried.residuals,
        **extra.kept,
        "gradients": carried.gradients,
        "outer_gradients": carried.outer_gradients,
        "norms": extra.norms,
        "loss": carried.collected,
        "states": carried.states,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _own(state: AsyncState) -> AsyncState:
    """A device's part of the state, without its leading dimensions of 1."""
    own = {name: without_stages(state[name]) if state[name] else {} for name in _BY_PART}
    if "flight" in state:
        own["flight"] = jax.tree.map(lambda w: w[0, 0], state["flight"])
    return state | own


def _behind(setup: Setup, own: AsyncState) -> AsyncState:
    """Undoes `_own`."""
    state = {name: with_stages(own[name]) if own[name] else {} for name in _BY_PART}
    weights = Placed(state["weights"], setup.layout.layers.order)
    flight = jax.tree.map(lambda w: w[None, None], own["flight"])
    return own | state | {"weights": weights, "flight": flight}
