"""Layered gradient accumulation to its end: a chunk's optimizer update in the step itself.

Where a schedule finishes all microbatches of a chunk before it goes on to the next one, the chunk's
gradient is complete while other chunks still run backward. Reduced, it updates the chunk's weights
at once, so that no gradient is kept but those of the chunks in work: one, or as many as have slots.
`docs/design/011-layered-update.md` says when this pays.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime import checks
from jaxpipe.runtime.data_axis import gather, own_shard, reduce_gradients
from jaxpipe.runtime.executor import Run
from jaxpipe.runtime.layer_passes import Plan, tie
from jaxpipe.runtime.mesh import DATA, STAGE
from jaxpipe.runtime.part_optimizer import PartOptimizer, apply
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule.table import NONE

PyTree = Any


class LayeredUpdate:
    """A training step that updates every chunk as soon as its gradient is complete.

    It gives what `Pipeline.value_and_grad` and the optimizer give one after the other, without room
    for the gradients of all layers.

    Args:
      pipe: a pipeline whose schedule works on one chunk at a time, such as "modular",
        "breadth-first", or any with one chunk a stage; any other with ``weight_slots`` for all
        chunks.
      optimizer: a transformation that treats every element of a parameter alone.

    Raises:
      ValueError: a schedule that comes back to a chunk whose slot it has given up, or an optimizer
        that mixes elements.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxpipe.runtime.mesh import make_mesh
      >>> from jaxpipe.runtime.model import Model
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
      >>> training = LayeredUpdate(pipe, optimizer)
      >>> params = pipe.place(params)
      >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.ones((4, 3))}
      >>> loss, params, state = training.step(params, pipe.init(optimizer, params), batch)

    Source: Lamy-Poirier, "Layered gradient accumulation and modular pipeline parallelism",
    arXiv 2106.02679, section 3.
    """

    def __init__(self, pipe: Pipeline, optimizer: optax.GradientTransformation) -> None:
        _check(pipe)
        self.pipe = pipe
        self._optimizer = PartOptimizer(optimizer, pipe.layout.placed_shapes())

    def step(
        self,
        params: PyTree,
        optimizer_state: PyTree,
        batch: PyTree,
        rng: jax.Array | None = None,
        *,
        states: PyTree = None,
    ) -> tuple[Any, PyTree, PyTree]:
        """One step; donate parameters and optimizer state to `jax.jit`.

        Args:
          params: placed parameters.
          optimizer_state: what `Pipeline.init` gives for them.
          batch, rng, states: as for `Pipeline.value_and_grad`.

        Returns:
          The loss (with the states, for a stateful model), the new parameters and the new optimizer
          state.

        Raises:
          ValueError: arguments that do not fit the pipeline or the optimizer.
        """
        shapes = self._optimizer.state_shapes
        others = checks.optimizer_state("optimizer_state", optimizer_state, shapes)
        self.pipe.check("params", params, batch, states, others)
        plan = self.pipe.plan(self.pipe.table)

        def body(params, owned, rest, batch, rng, states):
            rows = self.pipe.split_rows(batch)
            run = LayeredRun(plan, self._optimizer, params, (owned, rest), rows, rng, states)
            return run.execute()

        weights = self.pipe.layout.specs(sharded=self.pipe.zero == 3)
        shards = jax.tree.leaves(
            self.pipe.layout.specs(sharded=self.pipe.zero >= 1), is_leaf=lambda x: isinstance(x, P)
        )
        owned = [shards[owner] for owner in self._optimizer.owned]
        mapped = jax.shard_map(
            body,
            mesh=self.pipe.mesh,
            in_specs=(weights, owned, P(), P(DATA), P(), P(STAGE)),
            out_specs=(P(), (weights, owned, P()), P(STAGE)),
            check_vma=False,
        )
        split = self._optimizer.split(optimizer_state)
        loss, (params, *split), states = mapped(params, *split, batch, rng, states)
        value = loss if self.pipe.state_layout is None else (loss, states)
        return value, params, self._optimizer.join(*split)


class LayeredRun(Run):
    """One trace of the program.

    Args:
      plan: what to run.
      optimizer: updates one part at a time.
      placed: this device's part of the parameters.
      optimizer_state: this device's part of it, as the optimizer splits it.
      microbatches, rng, states: as for `jaxpipe.runtime.executor.run`.
    """

    reduces_chunks = True

    def __init__(
        self,
        plan: Plan,
        optimizer: PartOptimizer,
        placed: PyTree,
        optimizer_state: tuple[list, list],
        microbatches: PyTree,
        rng: jax.Array | None,
        states: PyTree,
    ) -> None:
        super().__init__(plan, placed, microbatches, rng, states)
        self.optimizer, self.rest = optimizer, optimizer_state[1]
        ends = {name: placed[name] for name in ("embed", "head")}
        self.ends = own_shard(ends, plan.layout.outer, zero=self.plan.zero)
        # The optimizer's state has leaves that belong to parameters. Those of layers change in the
        # tick loop; each has the number of its parameter among the leaves of layers.
        self.layer_tree = self.layers
        self.ends_owned, of_layers, self.number_of = list(optimizer_state[0]), {}, {}
        numbers = [n for n in range(optimizer.num_parameters) if optimizer.part_of(n) == "layers"]
        for k, owner in enumerate(optimizer.owned):
            if owner in numbers:
                self.number_of[k] = numbers.index(owner)
                of_layers[k] = self.ends_owned[k][0]  # without the dimension of stages
                self.ends_owned[k] = None
        self.updated = {"layers": self.layers, "owned": of_layers}

    def _reduced_shapes(self) -> dict[str, PyTree]:
        return {}  # a reduced gradient is used up at once

    def _initial_state(self) -> dict[str, Any]:
        return super()._initial_state() | self.updated

    def _tick(self, state: dict, row: dict) -> dict:
        self.layers = state["layers"]  # nothing reads a chunk again once it is updated
        return super()._tick(state, row)

    def _reduce_chunk(self, state: dict, chunk, slot) -> dict:
        """Updates a chunk whose gradient is complete."""

        def body(number, kept):
            here = self.params.piece_in_slot(slot, chunk, number)
            place = self.params.resident_piece(self.stage, chunk, number)

            def update(_, pieces):
                total, _ = tie(self.params.read(state["gradients"], here), pieces)
                return self._updated(
                    pieces, reduce_gradients(total, self.params.piece, zero=self.plan.zero)
                )

            # In a loop: XLA would compute again what is written, from a copy of what it overwrites.
            pieces = lax.fori_loop(0, (chunk != NONE).astype(int), update, self._read(kept, place))
            return self._write(kept, place, pieces)

        trips = jnp.where(chunk == NONE, 0, self.params.num_pieces)
        kept = {name: state[name] for name in self.updated}
        return state | lax.fori_loop(0, trips, body, kept)

    def _updated(self, pieces: dict, gradients: PyTree) -> dict:
        """A piece of a chunk after its update: weights, and the optimizer state of this shard."""
        leaves, piece = self.params.placed, self.params.piece
        shards = own_shard(pieces["layers"], piece, zero=self.plan.zero)

        def lead(tree):
            return jax.tree.map(lambda w, leaf: _behind(w, 1 + len(leaf.shape)), tree, leaves)

        owned = list(self.ends_owned)
        for k, w in pieces["owned"].items():
            owned[k] = _behind(w, self.updated["owned"][k].ndim + 1)
        updates, owned, _ = self.optimizer.update(
            "layers", lead(gradients), owned, self.rest, self.ends | {"layers": lead(shards)}
        )
        updates = jax.tree.map(lambda u, w: u.reshape(w.shape), updates, shards)
        return {
            "layers": self._whole(apply(shards, updates), piece),
            "owned": {k: owned[k].reshape(w.shape) for k, w in pieces["owned"].items()},
        }

    def _whole(self, shards: PyTree, leaves: PyTree) -> PyTree:
        return gather(shards, leaves) if self.plan.zero in (1, 2) else shards

    # A leaf of the optimizer's state lies where its parameter does.

    def _read(self, kept: dict, place) -> dict:
        owned = {
            k: self._leaf(k, self.params.read(self._among_layers(k, leaf), place))
            for k, leaf in kept["owned"].items()
        }
        return {"layers": self.params.read(kept["layers"], place), "owned": owned}

    def _write(self, kept: dict, place, pieces: dict) -> dict:
        def write(k: int, leaf):
            values = self._among(k, pieces["owned"][k], pieces["layers"])
            return self._leaf(k, self.params.write(self._among_layers(k, leaf), place, values))

        return {
            "layers": self.params.write(kept["layers"], place, pieces["layers"]),
            "owned": {k: write(k, leaf) for k, leaf in kept["owned"].items()},
        }

    def _among_layers(self, k: int, leaf) -> PyTree:
        return self._among(k, leaf, self.layer_tree)

    def _among(self, k: int, leaf, layers: PyTree) -> PyTree:
        """The layers' tree with an owned leaf in place of its parameter."""
        leaves, structure = jax.tree.flatten(layers)
        leaves[self.number_of[k]] = leaf
        return jax.tree.unflatten(structure, leaves)

    def _leaf(self, k: int, layers: PyTree):
        return jax.tree.leaves(layers)[self.number_of[k]]

    def _result(self, state: dict) -> tuple[PyTree, list, list]:
        """This device's part of the new parameters and optimizer state."""
        outer = self.plan.layout.outer
        gradients = reduce_gradients(state["outer_gradients"], outer, zero=self.plan.zero)
        layers = jax.tree.map(lambda w: w[None], state["layers"])
        shards = own_shard(state["layers"], self.params.placed, zero=self.plan.zero)
        params = self.ends | {"layers": jax.tree.map(lambda w: w[None], shards)}
        owned = list(self.ends_owned)
        for k, leaf in state["owned"].items():
            owned[k] = leaf[None]
        rest, ends = self.rest, {}
        for name in self.ends:
            updates, owned, rest = self.optimizer.update(
                name, gradients[name], owned, self.rest, params
            )
            ends[name] = apply(params[name], updates)
        return self._whole(ends, outer) | {"layers": layers}, owned, rest


def _behind(w, ndim: int):
    """An array with leading dimensions of 1, as a placed one has stages and layers in front."""
    return w.reshape((1,) * (ndim - w.ndim) + w.shape)


def _check(pipe: Pipeline) -> None:
    if pipe.weights != "stacked":
        raise ValueError(
            f"weights={pipe.weights!r}: a chunk is updated piece by piece in stacked arrays.\n"
            "Nearest valid: weights='stacked'."
        )
    counts, chunks = pipe.table.reduces.counts, pipe.schedule.num_chunks
    if any(count > chunks for count in counts):
        raise ValueError(
            f"Schedule {pipe.schedule.name!r} comes back to a chunk after it has worked on "
            f"another: a stage finishes a gradient {max(counts)} times a step, with {chunks} "
            "chunks. To update within the step, every chunk's gradient must be complete at once.\n"
            "Nearest valid: 'modular' or 'breadth-first' without group, one chunk a stage, or "
            f"weight_slots={chunks}, with the sums of all chunks."
        )
