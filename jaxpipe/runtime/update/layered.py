"""Layered gradient accumulation: the optimizer updates each chunk within the step.

Where a schedule finishes all microbatches of a chunk before it goes on to the next one, the chunk's
gradient is complete while other chunks still run backward. It is reduced and updates the chunk's
weights at once, so that only the gradients of chunks in work are kept: one, or one per slot.
`docs/design/011-layered-update.md` says when this pays.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import optax
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime import checks
from jaxpipe.runtime.barriers import run_if, tie
from jaxpipe.runtime.layers.losses import with_aux
from jaxpipe.runtime.layout.data_axis import gather, own_shard, reduce_gradients
from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.runtime.layout.whole_model import outer_of
from jaxpipe.runtime.mesh import STAGE
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.tick import executor
from jaxpipe.runtime.tick.carried import Carried
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.gradients import GradientSink, reduced_outer
from jaxpipe.runtime.tick.microbatches import StepMicrobatches
from jaxpipe.runtime.types import (
    Arrays,
    Batch,
    Gradients,
    Index,
    Key,
    Leaves,
    OptimizerState,
    OuterParams,
    Placed,
    Shapes,
    States,
    Stored,
)
from jaxpipe.runtime.update.part_optimizer import PartOptimizer, apply
from jaxpipe.schedule.lowering.table import NONE, Transfer
from jaxpipe.schedule.problems import Problem, refuse


class LayeredUpdate:
    """A training step that updates every chunk as soon as its gradient is complete.

    Its result is that of `Pipeline.value_and_grad` followed by the optimizer, without room for the
    gradients of all layers.

    Args:
      pipe: a pipeline whose schedule works on one chunk at a time, such as "modular",
        "breadth-first" or any with one chunk per stage; or with ``weight_slots`` for all chunks.
      optimizer: a transformation that updates every element of a parameter by itself.

    Raises:
      ValueError: a schedule that comes back to a chunk whose slot it has given up, or an optimizer
        that mixes elements.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxpipe.runtime.layers.model import Model
      >>> from jaxpipe.runtime.mesh import make_mesh
      >>> from jaxpipe.schedule.catalog import build
      >>> model = Model(
      ...     embed=lambda outer, batch, rng: batch["x"],
      ...     layer=lambda w, x, batch, rng: jnp.tanh(x @ w),
      ...     head_loss=lambda outer, x, batch, rng: jnp.mean((x - batch["y"]) ** 2),
      ... )
      >>> params = {"embed": {}, "layers": jnp.ones((2, 3, 3)), "head": {}}
      >>> schedule = build("modular", stages=1, microbatches=2, chunks=2)
      >>> pipe = Pipeline(model, params, schedule=schedule, mesh=make_mesh(stage=1))
      >>> optimizer = optax.adam(0.1)
      >>> step = jax.jit(LayeredUpdate(pipe, optimizer).step)
      >>> params = pipe.place(params)
      >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.ones((4, 3))}
      >>> loss, params, state = step(params, pipe.init(optimizer, params), batch)

    Source: Lamy-Poirier, "Layered gradient accumulation and modular pipeline parallelism",
    arXiv 2106.02679, section 3.
    """

    def __init__(self, pipe: Pipeline, optimizer: optax.GradientTransformation) -> None:
        _check(pipe)
        self.pipe = pipe
        self._optimizer = PartOptimizer(optimizer, pipe.layout.placed_shapes())

    def step(
        self,
        params: Placed,
        optimizer_state: OptimizerState,
        batch: Batch,
        rng: Key = None,
        *,
        states: States = None,
    ) -> tuple[Any, Placed, OptimizerState]:
        """One step; donate parameters and optimizer state to `jax.jit`.

        Args:
          params: placed parameters.
          optimizer_state: what `Pipeline.init` gives for them.
          batch, rng, states: as for `Pipeline.value_and_grad`.

        Returns:
          The loss, or ``(loss, aux)`` as of `Pipeline.value_and_grad`; the new parameters; and the
          new optimizer state.

        Raises:
          ValueError: arguments that do not fit the pipeline or the optimizer.
        """
        shapes = self._optimizer.state_shapes
        others = checks.optimizer_state("optimizer_state", optimizer_state, shapes)
        self.pipe.check("params", params, batch, states, others)
        setup, applied = self.pipe.setup(self.pipe.table), Applied(self._optimizer)

        def body(params: Placed, split: Any, batch: Batch, rng: Key, states: States) -> Any:
            rows = StepMicrobatches(self.pipe.split_rows(batch), rng)
            fixed, held = executor.begin(setup, params, rows, applied)
            carried = executor.start(fixed, held, held.outer, states)
            carried = carried.but(finished=applied.begin(fixed, params, *split))
            value, carried, states = executor.run_ticks(fixed, rows, carried)
            return value, applied.result(fixed, carried), states

        weights, *others = self.pipe.in_specs
        shards = jax.tree.leaves(self.pipe.layout.specs(sharded=self.pipe.zero >= 1))
        owned = [shards[owner] for owner in self._optimizer.owned]
        in_specs = weights, (owned, P()), *others
        mapped = self.pipe.shard_map(body, in_specs, (P(), (weights, owned, P()), P(STAGE)))
        split = self._optimizer.split(optimizer_state)
        value, (params, *split), states = mapped(params, split, batch, rng, states)
        return with_aux(value, states), params, self._optimizer.join(*split)


Pieces: TypeAlias = tuple[Stored, dict[int, jax.Array]]
"""Weights, and the optimizer's state that lies where they do, by the number of its leaf."""


class Updating(NamedTuple):
    """What a step that updates its weights carries beside them.

    Args:
      owned: leaves of the optimizer's state that belong to parameters of layers, by their number.
      others: its other leaves that belong to parameters, None in place of those of layers.
      rest: its leaves that belong to no parameter.
      outer: this shard's part of embedding and head.
    """

    owned: dict[int, jax.Array]
    others: list[Any]
    rest: list[Any]
    outer: OuterParams


class Applied(GradientSink):
    """A finished gradient is reduced and updates its chunk's weights at once."""

    def __init__(self, optimizer: PartOptimizer) -> None:
        self._optimizer = optimizer
        # A leaf of the optimizer's state that belongs to a parameter of layers, and the number of
        # that parameter among them.
        of_layers = [
            number
            for number in range(optimizer.num_parameters)
            if optimizer.part_of(number) == "layers"
        ]
        self._parameter = {
            k: of_layers.index(owner)
            for k, owner in enumerate(optimizer.owned)
            if owner in of_layers
        }

    def begin(self, fixed: Fixed, placed: Placed, owned: list[Any], rest: list[Any]) -> Updating:
        """What is carried when the step begins, with the optimizer's state as it splits it."""
        return Updating(
            # Without the dimension of stages.
            {k: owned[k][0] for k in self._parameter},
            [None if k in self._parameter else leaf for k, leaf in enumerate(owned)],
            rest,
            own_shard(outer_of(placed), fixed.setup.layout.outer, zero=fixed.setup.zero),
        )

    def shapes(self, fixed: Fixed) -> dict[str, Shapes]:
        return {"gradients": fixed.params.slot_shapes(fixed.table.reduces.num_slots)}

    def chunk(self, fixed: Fixed, carried: Carried, transfer: Transfer) -> Carried:
        """Updates a chunk whose gradient is complete; nothing reads it again."""
        params, updating = fixed.params, carried.finished

        def body(chunk: Index, number: Index, kept: Pieces) -> Pieces:
            here = params.piece_at((fixed.stage, chunk, number), slot=transfer.slot)
            place = params.piece_at((fixed.stage, chunk, number))

            def update(pieces: Pieces) -> Pieces:
                total, _ = tie(params.read(carried.gradients, here), pieces)
                gradients = reduce_gradients(total, params.piece, zero=fixed.setup.zero)
                return self._updated(fixed, updating, pieces, gradients)

            pieces = run_if(chunk != NONE, update, self._read(params, kept, place))
            return self._write(params, kept, place, pieces)

        kept = carried.weights.layers, updating.owned
        layers, owned = params.loop_pieces(transfer.chunk, body, kept)
        return carried.but(
            weights=carried.weights._replace(layers=layers),
            finished=updating._replace(owned=owned),
        )

    def _updated(
        self, fixed: Fixed, updating: Updating, pieces: Pieces, gradients: Gradients
    ) -> Pieces:
        """A piece of a chunk after its update."""
        layers, owned = pieces
        leaves, piece, zero = fixed.params.placed, fixed.params.piece, fixed.setup.zero
        shards = own_shard(layers, piece, zero=zero)

        def lead(tree: Stored) -> Placed:
            return jax.tree.map(lambda w, leaf: _behind(w, 1 + len(leaf.shape)), tree, leaves)

        state = list(updating.others)
        for k, w in owned.items():
            state[k] = _behind(w, updating.owned[k].ndim + 1)
        params = updating.outer | {"layers": lead(shards)}
        updates, state, _ = self._optimizer.update(
            "layers", lead(gradients), state, updating.rest, params
        )
        updates = jax.tree.map(lambda u, w: u.reshape(w.shape), updates, shards)
        new = _whole(apply(shards, updates), piece, zero)
        return new, {k: state[k].reshape(w.shape) for k, w in owned.items()}

    # A leaf of the optimizer's state lies where its parameter does.

    def _read(self, params: LayerLayout, kept: Pieces, place: Any) -> Pieces:
        layers, owned = kept
        return params.read(layers, place), {
            k: self._leaf(k, params.read(self._among(k, leaf, layers), place))
            for k, leaf in owned.items()
        }

    def _write(self, params: LayerLayout, kept: Pieces, place: Any, pieces: Pieces) -> Pieces:
        layers, owned = kept

        def write(k: int, leaf: jax.Array) -> jax.Array:
            values = self._among(k, pieces[1][k], pieces[0])
            return self._leaf(k, params.write(self._among(k, leaf, layers), place, values))

        written = {k: write(k, leaf) for k, leaf in owned.items()}
        return params.write(layers, place, pieces[0]), written

    def _among(self, k: int, leaf: jax.Array, layers: Arrays) -> Arrays:
        """The layers' tree with an owned leaf in place of its parameter."""
        leaves, structure = jax.tree.flatten(layers)
        leaves[self._parameter[k]] = leaf
        return jax.tree.unflatten(structure, leaves)

    def _leaf(self, k: int, layers: Arrays) -> Any:
        return jax.tree.leaves(layers)[self._parameter[k]]

    def result(self, fixed: Fixed, carried: Carried) -> tuple[Placed, list[Any], list[Any]]:
        """This device's part of the new parameters and optimizer state."""
        updating, zero = carried.finished, fixed.setup.zero
        gradients = reduced_outer(fixed, carried)

        def lead(tree: Arrays) -> Placed:
            return jax.tree.map(lambda w: w[None], tree)

        shards = own_shard(carried.weights.layers, fixed.params.placed, zero=zero)
        params = updating.outer | {"layers": lead(shards)}
        owned = [
            updating.owned[k][None] if k in self._parameter else leaf
            for k, leaf in enumerate(updating.others)
        ]
        rest, outer = updating.rest, {}
        for name in updating.outer:
            updates, owned, rest = self._optimizer.update(
                name, gradients[name], owned, updating.rest, params
            )
            outer[name] = apply(params[name], updates)
        outer = _whole(outer, fixed.setup.layout.outer, zero)
        return outer | {"layers": lead(carried.weights.layers)}, owned, rest


def _whole(shards: Stored, leaves: Leaves, zero: int) -> Stored:
    """New weights as they are placed: whole, but under ZeRO-3."""
    return gather(shards, leaves) if zero in (1, 2) else shards


def _behind(w: jax.Array, ndim: int) -> jax.Array:
    """An array with leading dimensions of 1, as a placed one has stages and layers in front."""
    return w.reshape((1,) * (ndim - w.ndim) + w.shape)


def _check(pipe: Pipeline) -> None:
    if pipe.layout.layers.own_arrays:
        rule = "is not stacked: a chunk is updated piece by piece in stacked arrays"
        refuse([Problem("weights", pipe.weights, rule, {"weights": "stacked"})])
    counts, chunks = pipe.table.reduces.counts, pipe.schedule.num_chunks
    if any(count > chunks for count in counts):
        raise ValueError(
            f"Schedule {pipe.schedule.name!r} comes back to a chunk after it has worked on "
            f"another: a stage finishes a gradient {max(counts)} times per step, with {chunks} "
            "chunks. To update within the step, every chunk's gradient must be complete at once.\n"
            "Nearest valid: 'modular' or 'breadth-first' without group, one chunk a stage, or "
            f"weight_slots={chunks}, with the sums of all chunks."
        )
