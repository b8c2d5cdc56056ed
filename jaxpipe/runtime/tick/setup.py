"""Everything about a run that is known before its program is traced."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
from jax import lax
from jax.tree_util import DictKey

from jaxpipe.runtime.defaults import FUSES_SLICES
from jaxpipe.runtime.filters import name_of
from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.layout.whole_model import SHARED, Layout
from jaxpipe.runtime.options import Options
from jaxpipe.runtime.tick.stamps import Stamps
from jaxpipe.runtime.tick.watch import Watch
from jaxpipe.runtime.trees import combine
from jaxpipe.runtime.types import Path, Tree
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import Pairs, TickTable

ON_HOST = "on_host"
"""Residuals of F that have left the device."""
INBOX = {Kind.F: "x", Kind.R: "x", Kind.B: "dy", Kind.BW: "dy"}
"""The buffer in which the input of an action waits, by its kind."""
CARRY, CARRY_GRADIENT = "carry", "carry_gradient"
"""Values that it hands from slice to slice of a sequence, and their cotangents."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything about a run that is known before it is traced.

    Args:
      layout: where the parameters that are trained live, as a device has them: `Layout.local`.
      frozen: where the others live, likewise; None if all are trained.
      states: where the layers' states live, or None for a model without.
      compute: dtypes that layers compute in, a tree like a piece for each of `layouts`; None for
        those of the parameters. Weights in `E4M3` are quantized.
      outputs: collect what `Model.output` returns, not the loss; forward only.
      totals: return what adds up over batches, not its means; forward only.
      inputs: numbers of the batch's arrays whose gradients are wanted.
      leaves: the kind of forward that leaves residuals.
      early: whether B does what belongs to W where less then crosses, and what belongs to F where
        less is then kept; not where W follows at once.
      overlaps: whether devices communicate while they compute.
      cells_in_table: whether the table has every cell that ticks run.
      stamps: where the host notes when cells begin and end; None for a step that is not measured.
      watch: where the host notes what is not finite; None for a step that is not watched.
    """

    model: Model
    layout: Layout
    frozen: Layout | None
    table: TickTable
    options: Options
    states: LayerLayout | None = None
    compute: Sequence[Tree] | None = None
    outputs: bool = False
    totals: bool = False
    inputs: tuple[int, ...] = ()
    leaves: Kind = Kind.F
    early: bool = True
    overlaps: bool = True
    cells_in_table: bool = True
    tiled: bool = False
    stamps: Stamps | None = None
    watch: Watch | None = None

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of all parameters: `layout`, and `frozen` if there is one."""
        return [self.layout] if self.frozen is None else [self.layout, self.frozen]

    @property
    def layer_layouts(self) -> list[LayerLayout]:
        return [layout.layers for layout in self.layouts]

    @property
    def shares(self) -> bool:
        """Whether layers share parameters."""
        return SHARED in self.layout.outer

    @property
    def quantizes(self) -> bool:
        """Whether matmuls run in 8-bit floats."""
        return self.options.fp8 != ()

    def quantized(self, layer: int) -> list[str | None]:
        """Names of a layer's quantized weights, in the order of its parameters, None for others."""
        if not self.quantizes:
            return []

        def name(path: Path, leaf: Leaf) -> str:
            name = name_of((DictKey("layers"), *path))
            return name if self.options.quantizes(name, leaf.struct()) else ""

        names = [
            layout.of_layer(jax.tree.map_with_path(name, layout.canonical), layer)
            for layout in self.layer_layouts
        ]
        return [one or None for one in jax.tree.leaves(functools.reduce(combine, names))]

    @property
    def pairs(self) -> Pairs:
        """The actions whose layers share a loop: none where cells are measured one by one."""
        together = self.options.pair_layers and self.stamps is None
        return self.table.pairs if together else {}

    @property
    def knows_chunks(self) -> bool:
        """Whether an action has a loop for every chunk, in which the chunk's layers are unrolled,
        or loop with trips that are known: on GPUs, unless pairs leave a part of a chunk to run.

        Stacked layers gain where XLA fuses slices whose place follows from a loop's number into
        matmuls. XLA for CPUs gains nothing, and keeps what several layers of a chunk compute.
        """
        layers = self.layout.layers
        on_gpu = self.overlaps and not self.tiled and self.cells_in_table
        gains = layers.own_arrays or (layers.in_rows and FUSES_SLICES)
        return on_gpu and gains and not self.pairs

    @property
    def num_slices(self) -> int:
        return self.table.schedule.num_slices

    @property
    def trains(self) -> bool:
        return bool(self.table.passes.keys() & {Kind.B, Kind.BW})


def mean_scale(setup: Setup) -> float:
    """The cotangent of what is averaged over microbatches and the devices of a stage."""
    return 1 / (setup.table.schedule.num_passes * lax.axis_size(setup.layout.axes.peers))
