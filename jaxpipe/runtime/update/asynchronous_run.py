"""One call of an asynchronous pipeline, as one device sees it.

A tick is the executor's; what surrounds it differs. Rows are computed from the tick's number
(`jaxpipe.schedule.lowering.steady_rows`), everything in flight enters and leaves as "flight",
weights are kept in versions, and a tick ends by updating the parts whose minibatch is complete.
Microbatches are numbered through all minibatches, and these numbers take the place of those within
a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.barriers import run_if
from jaxpipe.runtime.layers.dependence import read_leaves
from jaxpipe.runtime.layers.losses import differentiated
from jaxpipe.runtime.layout.data_axis import average, gather
from jaxpipe.runtime.tick import executor
from jaxpipe.runtime.tick.carried import Carried
from jaxpipe.runtime.tick.fixed import RESIDUALS, Fixed, Setup, fix
from jaxpipe.runtime.tick.microbatches import StepMicrobatches
from jaxpipe.runtime.types import Arrays, Batch, Index, Key, OuterParams, States, Tree
from jaxpipe.runtime.update.asynchronous_update import Optimized, Rules, Updated
from jaxpipe.runtime.update.asynchronous_weights import Versioned, Versions
from jaxpipe.runtime.update.optimizer import PARTS
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.generators.pipemare import SteadyState
from jaxpipe.schedule.lowering.steady_rows import SteadyRows
from jaxpipe.schedule.lowering.table import NONE, Row

AsyncState: TypeAlias = dict[str, Any]
"""What a run carries from call to call: "weights" and "delta" by part, "owned" and "rest" of the
optimizer, "states" of stateful layers after the last whole minibatch, "recent" rows and keys,
"clock", the rules "steady", and "flight": what is in flight."""

_INBOXES = ("x", "dy")
_REPLAY = ("inputs", "read_states")


@dataclasses.dataclass(frozen=True)
class Recent:
    """The microbatches in flight.

    Args:
      rows: their rows, leaves ``[slots, ...]``.
      rng: their steps' keys, ``[slots]``, or None.
      scale: the scale of their losses, float32 ``[slots]``, or None if these are not weighted.
      steady: which microbatch is in which slot.
    """

    rows: Batch
    rng: Key
    scale: jax.Array | None
    steady: SteadyState

    def at(self, i: Index) -> tuple[Batch, Key, Index]:
        """As of `jaxpipe.runtime.tick.microbatches.Microbatches`."""
        slot = i % self.steady.num_slots
        rows, rng = jax.tree.map(
            lambda w: lax.dynamic_index_in_dim(w, slot, keepdims=False), (self.rows, self.rng)
        )
        return rows, rng, i % self.steady.num_microbatches

    def scale_of(self, i: Index) -> jax.Array | None:
        """As of `jaxpipe.runtime.tick.microbatches.Microbatches`."""
        return None if self.scale is None else self.scale[i % self.steady.num_slots]


def empty_flight(setup: Setup, rules: Rules, state: AsyncState) -> dict[str, Any]:
    """What is in flight in a pipeline that is empty; arguments as for `call`."""
    own = _own(state)
    fixed = _fix(setup, rules, own)
    sums, num_sums = _outer(setup, own), rules.steady.num_sums(tied=_sink(fixed).tied)
    rotating = jax.tree.map(lambda w: jnp.zeros((num_sums, *w.shape), w.dtype), sums["embed"])
    carried = executor.start(fixed, _held(own), sums | {"embed": rotating}, own["states"])
    norms = dict.fromkeys((*PARTS, "total"), jnp.zeros((), jnp.float32))
    late = 1 + rules.steady.loss_lag
    carried = carried.but(
        finished=Optimized({}, {}, norms),
        layer_losses=jax.tree.map(lambda w: jnp.repeat(w, late, axis=0), carried.layer_losses),
    )
    weighted = fixed.weight is not None
    scale = jnp.zeros(rules.steady.num_slots, jnp.float32) if weighted else None
    return _in_flight(carried) | _present(scale=scale)


def newest_weights(setup: Setup, rules: Rules, state: AsyncState) -> dict[str, Arrays]:
    """Every part's newest version, between two calls."""
    own = _own(state)
    steady, clock, held = rules.steady, own["clock"], _held(own)
    stage, params = lax.axis_index(setup.layout.axes.stage), setup.layout.layers
    parts = {"layers": steady.stage(stage), "embed": steady.embed, "head": steady.head}
    return {
        name: held.at(
            params, steady.newest(part, clock["tick"], clock["first"]), steady.num_versions
        )[name]
        for name, part in parts.items()
    }


def call(
    setup: Setup, rules: Rules, state: AsyncState, rows: Batch | None, rng: Key
) -> tuple[AsyncState, Tree]:
    """Runs N ticks in which a minibatch enters, or those that drain the pipeline.

    Args:
      setup: what to run; its table is `jaxpipe.schedule.lowering.steady_rows.steady_table`.
      rules, state: how to train, and this device's part of the state.
      rows, rng: the minibatch, leaves ``[rows, N, ...]``, and its key; None to drain.

    Returns:
      The state afterwards, and loss and metrics of the minibatches that have left,
      ``[minibatches, ...]``, NaN before the first one.
    """
    own, steady = _own(state), rules.steady
    fixed, clock = _fix(setup, rules, own), own["clock"]
    num_ticks = steady.drain_ticks if rows is None else steady.num_microbatches
    entering = 0 if rows is None else steady.num_microbatches
    clock = clock | {"entered": clock["entered"] + entering}
    source = SteadyRows(
        steady,
        entered=clock["entered"],
        first=clock["first"],
        fused=Kind.BW in setup.table.passes,
        xp=jnp,
    )
    layers = jnp.asarray(setup.table.layer_counts)[fixed.stage]
    minibatch = None if rows is None else fixed.weighed(StepMicrobatches(rows, rng))

    def tick(through: Any, offset: Index) -> tuple[Any, Tree]:
        recent, carried, averaged = through
        now = clock["tick"] + offset
        if minibatch is not None:
            recent = _admit(steady, recent, minibatch, offset, now)
        row = source.row(now, fixed.stage, layers=layers)
        carried = executor.tick(fixed, Recent(**recent, steady=steady), carried, row)
        if setup.states is not None:
            carried, averaged = _average_states(fixed, steady, carried, averaged, row)
        carried, left = _left(steady, carried, row)
        return (recent, carried, averaged), left

    recent = own["recent"] | {"scale": own["flight"].get("scale")}
    through = recent, _carried(rules, own), _own_states(own)
    (recent, carried, averaged), left = lax.scan(tick, through, jnp.arange(num_ticks))
    last_ones = _last_ones(steady, num_ticks, drains=rows is None)
    value = fixed.collector.result(*jax.tree.map(lambda w: w[last_ones], left))
    scale = recent.pop("scale")
    own |= {
        "weights": carried.weights.weights,
        "delta": carried.weights.delta,
        "owned": rules.optimizer.flat(carried.finished.states),
        "rest": carried.finished.rest,
        "states": jax.tree.map(lambda w: w[None], averaged),
        "recent": recent,
        "clock": _later(steady, clock, num_ticks, drains=rows is None),
        "flight": _in_flight(carried) | _present(scale=scale),
    }
    return _behind(own), value


def _later(
    steady: SteadyState, clock: dict[str, Any], num_ticks: int, *, drains: bool
) -> dict[str, Any]:
    """The clock after some ticks; a pipeline that has drained begins again."""
    if not drains:
        return clock | {"tick": clock["tick"] + num_ticks}
    first = clock["first"] + clock["entered"] // steady.num_microbatches
    return {"tick": jnp.int32(0), "entered": jnp.int32(0), "first": first}


def _admit(
    steady: SteadyState,
    recent: dict[str, Any],
    minibatch: StepMicrobatches,
    offset: Index,
    now: Index,
) -> dict[str, Any]:
    """Keeps an entering microbatch's rows, key and scale until its last gradient."""
    slot = now % steady.num_slots
    row, rng, _ = minibatch.at(offset)
    return jax.tree.map(
        lambda kept, new: lax.dynamic_update_index_in_dim(kept, new, slot, 0),
        recent,
        {"rows": row, "rng": rng, "scale": minibatch.scale},
    )


def _average_states(
    fixed: Fixed, steady: SteadyState, carried: Carried, averaged: States, row: Row
) -> tuple[Carried, States]:
    """Averages the stage's states over data shards if F has ended a minibatch in this tick."""

    def body(through: Any) -> Any:
        states = average(through[0], fixed.axes)
        return states, states

    cell = row.cells[Kind.F]
    ends = (cell.layers > 0) & steady.updates(cell.microbatch)
    states, averaged = run_if(ends, body, (carried.states, averaged))
    return carried.but(states=states), averaged


def _left(steady: SteadyState, carried: Carried, row: Row) -> tuple[Carried, tuple[Tree, Tree]]:
    """What is collected of the minibatch whose last microbatch has left in this tick, and the sums
    of its layers' losses and metrics; NaN, or 0 for integers, if there is none."""
    ends = (row.outer.head != NONE) & steady.updates(row.outer.head)

    def if_ends(w: jax.Array) -> jax.Array:
        nothing = jnp.nan if jnp.issubdtype(w.dtype, jnp.inexact) else 0
        return jnp.where(ends, w, jnp.asarray(nothing, w.dtype))

    left = jax.tree.map(if_ends, carried.collected)
    carried = carried.but(
        collected=jax.tree.map(lambda w: jnp.where(ends, 0, w), carried.collected)
    )
    sums, late = carried.layer_losses, 1 + steady.loss_lag
    slot = row.outer.head // steady.num_microbatches % late

    def cleared(w: jax.Array) -> jax.Array:
        leaves = ends & (jnp.arange(late) == slot)
        return jnp.where(leaves.reshape(-1, *[1] * (w.ndim - 1)), 0, w)

    kept, gone = jax.tree.map(cleared, sums), jax.tree.map(lambda w: if_ends(w[slot]), sums)
    return carried.but(layer_losses=kept), (left, gone)


def _last_ones(steady: SteadyState, num_ticks: int, *, drains: bool) -> np.ndarray:
    """The ticks of a call in which the last microbatch of a minibatch leaves."""
    behind = steady.head.forward
    ticks = range(behind if drains else num_ticks)
    return np.asarray([t for t in ticks if steady.updates(t - behind)], np.int32)


# What no tick changes.


def _fix(setup: Setup, rules: Rules, own: AsyncState) -> Fixed:
    """Arguments as for `call`; raises ValueError if the embedding reads parameters of the head."""
    outer, recent = _outer(setup, own), Recent(**own["recent"], scale=None, steady=rules.steady)
    weights = Versioned(rules.steady, corrects=rules.discrepancy_decay is not None)
    fixed = fix(setup, recent, outer, weights=weights, gradients=None)
    return dataclasses.replace(fixed, gradients=Updated(rules, _is_tied(fixed, recent, outer)))


def _is_tied(fixed: Fixed, recent: Recent, outer: OuterParams) -> bool:
    """Whether the head reads the embedding's parameters; the embedding may not read the head's."""

    def read(function: Callable[[OuterParams], Any], name: str) -> bool:
        return any(read_leaves(lambda part: function(outer | {name: part}), outer[name]))

    if read(lambda outer: fixed.embed(recent, outer, 0), "head"):
        raise ValueError(
            "Model.embed reads parameters of 'head', which are updated before the embedding's "
            "gradient is there. Parameters that both read belong to params['embed']."
        )
    x = fixed.activation(fixed.empty_message(), fixed.layers.last)
    return read(lambda outer: differentiated(fixed.head(recent, outer, x, 0)), "embed")


def _sink(fixed: Fixed) -> Updated:
    assert isinstance(fixed.gradients, Updated)
    return fixed.gradients


def _outer(setup: Setup, own: AsyncState) -> OuterParams:
    """A version of embedding and head, whole."""
    outer = {name: _held(own).outer_at(name, 0) for name in ("embed", "head")}
    return gather(outer, setup.layout.outer, setup.layout.axes) if setup.zero == 3 else outer


# The state between calls.


def _held(own: AsyncState) -> Versions:
    return Versions(own["weights"], own["delta"])


def _own_states(own: AsyncState) -> States:
    return jax.tree.map(lambda w: w[0], own["states"])


def _carried(rules: Rules, own: AsyncState) -> Carried:
    """What the first tick of a call is handed."""
    flight = own["flight"]
    return Carried(
        weights=_held(own),
        inboxes={name: flight[name] for name in _INBOXES},
        residuals={name: flight[name] for name in RESIDUALS},
        sent={Kind.R: flight["recomputed"]} if "recomputed" in flight else {},
        replay={name: flight[name] for name in _REPLAY if name in flight},
        gradients=flight["gradients"],
        outer_gradients=flight["outer_gradients"],
        finished=Optimized(rules.optimizer.by_part(own["owned"]), own["rest"], flight["norms"]),
        collected=flight["loss"],
        shared_gradients=None,
        layer_losses=flight.get("layer_losses"),
        states=flight["states"],
        input_gradients=[],
    )


def _in_flight(carried: Carried) -> dict[str, Any]:
    """Undoes `_carried`, as far as it is in flight."""
    return {
        **carried.inboxes,
        **carried.residuals,
        **_present(recomputed=carried.sent.get(Kind.R), layer_losses=carried.layer_losses),
        **carried.replay,
        "gradients": carried.gradients,
        "outer_gradients": carried.outer_gradients,
        "norms": carried.finished.norms,
        "loss": carried.collected,
        "states": carried.states,
    }


def _present(**values: Tree) -> dict[str, Tree]:
    """Those of the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _own(state: AsyncState) -> AsyncState:
    """A device's part of the state, without its leading dimensions of 1."""
    part = _of_layers(state, lambda w: w[0])
    if "flight" in state:
        part["flight"] = jax.tree.map(lambda w: w[0, 0], state["flight"])
    return part


def _behind(own: AsyncState) -> AsyncState:
    """Undoes `_own`."""
    state = _of_layers(own, lambda w: w[None])
    return state | {"flight": jax.tree.map(lambda w: w[None, None], own["flight"])}


def _of_layers(state: AsyncState, fn: Callable[[jax.Array], jax.Array]) -> AsyncState:
    """The state with ``fn`` applied to what has a dimension for the stages."""
    names = [name for name in ("weights", "delta", "rest") if "layers" in state[name]]
    changed = {
        name: state[name] | {"layers": jax.tree.map(fn, state[name]["layers"])} for name in names
    }
    return state | changed
