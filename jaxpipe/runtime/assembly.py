"""A model, a schedule and a mesh put together: layouts, tick tables and programs."""

import dataclasses
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache, partial
from typing import NoReturn

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime import checks, filters
from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layout.leaf import most_shares
from jaxpipe.runtime.layout.moving import LayersOnMesh
from jaxpipe.runtime.layout.placed import Placed
from jaxpipe.runtime.layout.placing import Placing
from jaxpipe.runtime.layout.splits import Splits
from jaxpipe.runtime.layout.whole_model import WithFrozen, layer_layout, layer_rows, make_layouts
from jaxpipe.runtime.mesh import Axes, stores_tiles, transfers_overlap
from jaxpipe.runtime.options import Options
from jaxpipe.runtime.tick import executor
from jaxpipe.runtime.tick.microbatches import split_rows
from jaxpipe.runtime.tick.setup import Setup
from jaxpipe.runtime.tick.stamps import Stamps
from jaxpipe.runtime.tick.watch import Watch
from jaxpipe.runtime.trees import elsewhere, num_layers, shapes_of
from jaxpipe.runtime.types import Batch, Key, Params, States, Tree
from jaxpipe.runtime.update.optimizer import PlacedOptimizer
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.lowering.lower import forward_only, lower
from jaxpipe.schedule.lowering.table import TickTable
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.problems import refuse

_FIRST_ORDER = (
    "The gradients of a pipeline were differentiated; a pipeline has only first derivatives, "
    "because a schedule holds one backward."
)
NO_STATES = "This model's layers keep no state: Pipeline was given no states."


class Assembly:
    """The parts of a pipeline; `jaxpipe.Pipeline` is one, and adds the methods that users call.

    Args:
      axes: which of them are those of stages and of data.
      options: those that depend on the mesh decided.

    Attributes:
      table: the tick table of a step.
      layout, frozen: where the parameters that are trained lie, and the others if there are any.
      compute_dtypes: dtypes in which layers compute, for each of both; None for their own.
      states_placing: places the layers' states; None for a model without, as is ``state_layout``.
      placed_optimizer: makes an optimizer's `PlacedOptimizer`, once.
      program: makes a program, once; see `make_program`.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        schedule: Schedule,
        *,
        mesh: Mesh,
        axes: Axes,
        states: States,
        options: Options,
    ) -> None:
        params, states = shapes_of(params), shapes_of(states)
        self.model, self.schedule, self.mesh, self.axes = model, schedule, mesh, axes
        self.options = options
        self._overlaps = transfers_overlap(mesh)
        layer_counts = options.layer_counts
        if layer_counts is None:
            layer_counts = partition([1] * num_layers(params["layers"]), schedule.placement)
        self._layer_counts = layer_counts
        self.layout, self.frozen = make_layouts(
            *filters.split_trainable(params, options.trainable),
            model,
            mesh=mesh,
            axes=axes,
            rows=layer_rows(schedule.placement, layer_counts),
            weights=options.weights,
            together=self._together,
        )
        parts = self.layout, self.frozen
        self._layers = [part.layers for part in parts if part is not None]
        self.compute_dtypes = None
        if options.narrows:
            dtype_of = options.dtype_of
            self.compute_dtypes = [part.compute_dtypes(dtype_of) for part in self._layers]
        place = partial(Placing, sharded=options.zero.shards_weights, name="params")
        self.params_placing = self.trained_placing = place(self.layout)
        if self.frozen:
            self.params_placing = place(WithFrozen(self.layout, self.frozen))
        make = partial(PlacedOptimizer, params=self.layout, zero=options.zero)
        # Optimizers are told apart by their types, too: `OnHost` equals what it wraps.
        self.placed_optimizer = lru_cache(maxsize=8, typed=True)(make)
        self.program = lru_cache(maxsize=8)(self.make_program)
        self.state_layout, self.states_placing = None, None
        if states is not None:
            layers = layer_layout(states, "stacked")(states, self.layout.layers.rows, Splits())
            self.state_layout = layers
            layout = LayersOnMesh(layers, mesh, axes)
            self.states_placing = Placing(layout, sharded=False, name="states")
        self.table = self._lower(schedule)

    @property
    def _together(self) -> bool:
        """Whether all stages compute embedding and head together."""
        return self.model.stage_split is not None

    @cached_property
    def forward_table(self) -> TickTable:
        return self._lower(forward_only(self.schedule))

    @cached_property
    def chunk_table(self) -> TickTable:
        """The tick table of a step that updates chunk by chunk."""
        return self._lower(self.schedule, by_chunk=True)

    def _lower(self, schedule: Schedule, *, by_chunk: bool = False) -> TickTable:
        """Lowers a schedule whose gradients are used when the step has ended, or by chunk."""
        layers, at_end, slots = self._layers, not by_chunk, self.options.weight_slots
        assert slots is not None  # `Options.on` has decided
        residuals = self.options.residuals
        room_for_all = at_end and not self.options.zero.shards_gradients
        pieces = zip(*(part.pieces for part in layers), strict=True)
        table = lower(
            schedule,
            self._layer_counts,
            weight_slots=slots,
            gradient_slots=schedule.num_chunks if room_for_all else None,
            residuals=None if isinstance(residuals, str) else residuals,
            own_slots=layers[0].own_arrays,
            pieces=layers[0].num_pieces if at_end and slots > 1 else 0,
            shares=min(map(most_shares, pieces)) if layers[0].in_shares else 1,
            within=layers[0].own_arrays,
            together=self._together,
            overlaps=self._overlaps,
        )
        return table if self.setup(table).knows_chunks else table.with_whole_edges

    def setup(self, table: TickTable) -> Setup:
        """Describes the run of a table of this pipeline's placement and layers."""
        frozen = None if self.frozen is None else self.frozen.local
        return Setup(
            self.model,
            self.layout.local,
            frozen,
            table,
            self.options,
            states=self.state_layout,
            compute=self.compute_dtypes,
            overlaps=self._overlaps,
            tiled=stores_tiles(self.mesh),
        )

    def make_program(
        self,
        result: str,
        *,
        inputs: tuple[int, ...] = (),
        stamps: Stamps | None = None,
        watch: Watch | None = None,
    ) -> Callable[..., executor.Step]:
        """Makes what runs a table on all devices: the step's, or that of its forwards.

        It is jitted, so that calls outside `jax.jit` compile it once, and inlined inside. Its
        arguments are placed parameters, batch, key and states.

        Args:
          result: "train" for gradients, too; "loss" alone; its "totals"; or "outputs".
          inputs: numbers of the batch's arrays whose gradients are wanted.
          stamps: where to note when layers run.
          watch: where to note which layers make what is not finite.
        """
        outputs, totals = result == "outputs", result == "totals"
        table = self.table if result == "train" else self.forward_table
        # The layers of a cell that is measured run in one go.
        setup = self.setup(table if stamps is None else table.with_whole_edges)
        setup = dataclasses.replace(
            setup, outputs=outputs, totals=totals, inputs=inputs, stamps=stamps, watch=watch
        )

        def body(placed: Placed, batch: Batch, rng: Key, states: States) -> executor.Step:
            rows = split_rows(batch, self.schedule.num_microbatches, self.schedule.num_slices)
            return executor.run(setup, placed, rows, rng, states)

        data = P(self.axes.data)
        collected = data if outputs else P()
        gradients = (
            self.layout.specs(sharded=self.options.zero.shards_state) if setup.trains else None
        )
        specs = executor.Step(collected, gradients, P(self.axes.stage), data)
        return jax.jit(self.shard_map(body, self.in_specs, specs), inline=True)

    def run_step(self, *args: Tree, inputs: tuple[int, ...] = ()) -> executor.Step:
        """Runs a step; arguments are those of its program and ``inputs`` of `make_program`."""
        run = self.program("train", inputs=inputs)
        step: executor.Step = refusing_derivatives(run, _FIRST_ORDER)(*args)
        return step

    @property
    def in_specs(self) -> Tree:
        """Partition specs of a step's arguments: placed parameters, batch, key and states."""
        return self.params_placing.specs, P(self.axes.data), P(), P(self.axes.stage)

    def shard_map(
        self, body: Callable[..., Tree], in_specs: Tree, out_specs: Tree
    ) -> Callable[..., Tree]:
        """Makes one program of ``body`` on every device."""
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def check(
        self, name: str, placed: Placed, batch: Batch, states: States, others: Iterable[str] = ()
    ) -> None:
        """Raises ValueError for arguments of a step that do not fit, and for problems of others."""
        rest = [*self.batch_problems(batch), *self.states_problems(states)]
        rest = rest or list(elsewhere(self.mesh, batch=batch))
        refuse([*self.params_placing.problems(name, placed), *others, *rest])

    def batch_problems(self, batch: Batch) -> list[str]:
        shards = self.axes.num_shards(self.mesh)
        return list(checks.batch(batch, self.schedule, shards))

    def states_problems(self, states: States) -> list[str]:
        if self.states_placing is None:
            return [] if states is None else [NO_STATES]
        if states is None:
            return ["states=None, but this model's layers keep states: see `pipe.place_states`."]
        return self.states_placing.problems("states", states)


def refusing_derivatives(run: Callable[..., Tree], refusal: str) -> Callable[..., Tree]:
    """``run``, which raises ValueError when it is differentiated."""
    guarded = jax.custom_jvp(run)

    def refuse(primals: Tree, tangents: Tree) -> NoReturn:
        raise ValueError(refusal)

    guarded.defjvp(refuse)
    return guarded
