"""The options of a pipeline, as one object: how it runs, beside what it runs and where."""

from __future__ import annotations

import dataclasses
import itertools
import numbers
from collections.abc import Iterator, Sequence
from typing import TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.tree_util import DictKey
from jax.typing import DTypeLike

from jaxpipe.runtime import defaults, filters, host
from jaxpipe.runtime.filters import Filter
from jaxpipe.runtime.float8 import E4M3
from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layers.quantized import RECIPES
from jaxpipe.runtime.layers.split import REMAT_POLICIES, chosen_remat
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.layout.splits import read_splits
from jaxpipe.runtime.layout.whole_model import LAYOUTS, layer_rows
from jaxpipe.runtime.mesh import Axes, transfers_overlap
from jaxpipe.runtime.trees import num_layers
from jaxpipe.runtime.types import Params
from jaxpipe.runtime.zero import Zero
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.problems import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `jaxpipe.Pipeline` that decide how it runs.

    ``vars(options)`` are arguments for another pipeline that runs in the same way.

    Args:
      trainable: the trained parameters: patterns of paths such as "layers/*/lora_*", or a function
        of a path and a shape; by default all. All others have no gradient and no optimizer state,
        and may be integers.
      compute_dtype: the dtype in which layers multiply, such as "bfloat16". A step casts each
        weight once, and all-gathers it in this dtype. Layers see the rounded weights in the
        parameters' own dtype, which gradients and updates keep.
      fp8: weights of layers whose matmuls run in 8-bit floats, chosen as by ``trainable``, such as
        "*kernel". Layers may only multiply by these weights, and are unrolled if they differ.
      fp8_recipe: the scales of these matmuls. "tensorwise" scales each tensor by its largest value:
        a step quantizes and all-gathers weights in E4M3, whatever ``compute_dtype`` is, activations
        are quantized to E4M3, and gradients at a matmul's output to E5M2. "mxfp8" scales each 32
        values that are summed up, all in E4M3; weights are all-gathered in ``compute_dtype`` and
        quantized where they are read. It needs GPUs of Blackwell, whose matmuls take such scales,
        or CPUs, for tests.
      full_precision: parameters of layers that are neither rounded nor quantized, chosen as by
        ``trainable``, such as "*norm*". Layers that differ are unrolled.
      remat: the values that a layer keeps for its backward: all but sums and products of others
        ("none"), outputs of weight matmuls and of fused attention ("dots"), or its input ("full").
        "auto" is "dots" on GPUs, where it takes less memory and about as long, else "none".
      zero: the arrays sharded over data, and over model axes that split no parameter, such as
        context: none (0), optimizer state (1), also gradients (2), also weights (3).
      weights: the layout of a stage's weights. "stacked" is one array per parameter, for any
        depth; layers that differ share flat arrays. "unrolled" is one array per layer, which saves
        GPUs copies of weights and residuals, but the program grows with the layers of a stage and,
        up to a limit, with the residuals kept at once. If layers differ, each position in a chunk
        has room for every kind of layer that some chunk has there. "auto" unrolls on GPUs, up to 16
        layers per stage, unless layers differ and would take over 10% more memory; and wherever
        layers differ and another option needs it.
      weight_slots: chunks of gathered weights (ZeRO-3) and of gradient sums (from ZeRO-2 on) that a
        stage keeps at once, at least as many as a tick uses. With 2 or more, chunks move over data
        under the layers of other chunks, if there is time; ``pipe.table.gathers.counts`` counts
        the gathers. None is 2 on GPUs and TPUs, and 1 on CPUs.
      residuals: the memory in which residuals wait for their backward: the "device", or the "host",
        over the device's bus; best with ``remat="full"``, which keeps least. Or a number of
        microbatches, such as 2.5, whose residuals a device keeps at once: of all others, those that
        wait longest move to the host and back while layers run. Layers must then be alike.
      pair_layers: whether a forward and a backward that the schedule overlaps run layer by layer in
        one loop, so that matmuls of one hide communication of the other. Layers that differ are
        unrolled. By default True on GPUs if layers use mesh axes.
      layer_counts: layers of each virtual stage, in model order; by default as equal as possible.
      poison: fills bubbles with NaN, for tests.
    """

    trainable: Filter | None = None
    compute_dtype: DTypeLike | None = None
    fp8: Filter = ()
    fp8_recipe: str = "tensorwise"
    full_precision: Filter = ()
    remat: str = "auto"
    zero: Zero = Zero.NOTHING
    weights: str = "auto"
    weight_slots: int | None = None
    residuals: str | float = "device"
    pair_layers: bool | None = None
    layer_counts: Sequence[int] | None = None
    poison: bool = False

    def problems(self, mesh: Mesh) -> Iterator[Problem]:
        """Yields what is wrong with single options, whatever the model and the schedule."""
        if self.remat not in ("auto", *REMAT_POLICIES):
            rule = f"is not a policy; choose one of {', '.join(REMAT_POLICIES)}"
            yield Problem("remat", self.remat, rule)
        yield from self._recipe_problems(mesh)
        if not is_number(self.zero):
            yield Problem("zero", self.zero, "is not a level", (0, 1, 2, 3))
        elif self.zero not in (0, 1, 2, 3):
            yield Problem("zero", self.zero, "is not a level", (min(max(self.zero, 0), 3),))
        if self.weights not in ("auto", *LAYOUTS):
            rule = f"is not a layout; choose one of auto, {', '.join(LAYOUTS)}"
            yield Problem("weights", self.weights, rule)
        slots = self.weight_slots
        if slots is not None and (not is_number(slots) or slots < 1):
            yield Problem("weight_slots", slots, "must be a whole number of at least 1", (1,))
        kept = not isinstance(self.residuals, (str, bool)) and self.residuals
        if not (kept and kept > 0) and self.residuals not in ("device", "host"):
            rule = "is not one of device, host, or a number of microbatches above 0"
            yield Problem("residuals", self.residuals, rule, ("device", "host"))
        elif self.residuals != "device":
            yield from host.problems("residuals", self.residuals, mesh)
        if self.pair_layers not in (None, True, False):
            yield Problem("pair_layers", self.pair_layers, "is not a choice", (None, True, False))

    def _recipe_problems(self, mesh: Mesh) -> Iterator[Problem]:
        if self.fp8_recipe not in RECIPES:
            rule = f"is not a recipe; choose one of {', '.join(RECIPES)}"
            yield Problem("fp8_recipe", self.fp8_recipe, rule)
        elif self.fp8_recipe == "mxfp8":
            device = mesh.devices.flat[0]
            major = str(getattr(device, "compute_capability", "")).partition(".")[0]
            multiplies_blocks = major.isdigit() and int(major) >= 10
            if self.fp8 == ():
                rule = "needs weights to quantize: choose them by fp8"
                yield Problem("fp8_recipe", self.fp8_recipe, rule, ("tensorwise",))
            elif device.platform != "cpu" and not multiplies_blocks:
                rule = f"needs GPUs of Blackwell or newer, and this is a {device.device_kind}"
                yield Problem("fp8_recipe", self.fp8_recipe, rule, ("tensorwise",))

    @property
    def narrows(self) -> bool:
        """Whether layers read some weights in narrower dtypes than those of the parameters."""
        return self.compute_dtype is not None or self.stores_fp8

    @property
    def stores_fp8(self) -> bool:
        """Whether a step keeps and gathers chosen weights in 8 bits, with their scales."""
        return self.fp8 != () and self.fp8_recipe == "tensorwise"

    def quantizes(self, path: str, leaf: jax.ShapeDtypeStruct) -> bool:
        """Whether matmuls of a parameter of layers run in 8-bit floats."""
        excepted = filters.is_chosen(path, leaf, self.full_precision)
        return not excepted and filters.is_chosen(path, leaf, self.fp8)

    def dtype_of(self, path: str, leaf: jax.ShapeDtypeStruct) -> jnp.dtype:
        """The dtype in which layers read a parameter of theirs; those in `E4M3` have scales."""
        if self.stores_fp8 and self.quantizes(path, leaf):
            return E4M3
        if filters.is_chosen(path, leaf, self.full_precision):
            return leaf.dtype
        narrow = leaf.dtype if self.compute_dtype is None else jnp.dtype(self.compute_dtype)
        return narrow if is_wider(leaf, narrow) else leaf.dtype

    @property
    def of_places(self) -> list[str]:
        """Names the chosen options that need arrays of their own for every layer."""
        chosen = {
            "weights": self.weights == "unrolled",
            "fp8": self.fp8 != (),
            "full_precision": self.full_precision != (),
            "pair_layers": self.pair_layers is True,
        }
        return [name for name, needed in chosen.items() if needed]

    def misread(self, params: Params, schedule: Schedule) -> tuple[int, int] | None:
        """Finds two layers that would share an array at a place of their chunks, but read it in
        different dtypes; None if layers can be unrolled."""
        read: dict[tuple[object, ...], tuple[int, jnp.dtype]] = {}
        for chunks in self._stages(params, schedule):
            for place, n in itertools.chain(*map(enumerate, chunks)):
                one = {"layers": {n: params["layers"][n]}}
                for path, w in jax.tree.leaves_with_path(one):
                    dtype = self.dtype_of(filters.name_of(path), w)
                    array = (place, *path[2:], w.shape, w.dtype)
                    first, other = read.setdefault(array, (n, dtype))
                    if other != dtype:
                        return first, n
        return None

    def _in_excess(
        self, mesh: Mesh, axes: Axes, model: Model, schedule: Schedule, params: Params
    ) -> bool:
        """Whether unrolled layers take too much room."""
        if model.layers_are_alike:
            return False
        splits = read_splits(model.axis_split, params, mesh, axes).part(DictKey("layers"))

        def size(leaf: Leaf) -> defaults.Size:
            own = leaf.local.struct()
            return defaults.Size((leaf.dtype, leaf.apart), own.size * own.dtype.itemsize)

        layers = [
            {array: size(array[1]) for array in jax.tree.leaves_with_path(layer)}
            for layer in jax.tree.map_with_path(splits.leaf, params["layers"])
        ]
        return defaults.room(self._stages(params, schedule), layers).in_excess

    def _stages(self, params: Params, schedule: Schedule) -> list[list[list[int]]]:
        """The chunks of every stage, as numbers of layers."""
        counts = self.layer_counts or partition([1] * len(params["layers"]), schedule.placement)
        rows = layer_rows(schedule.placement, counts)
        return [[[n for n in chunk if n >= 0] for chunk in stage] for stage in rows.tolist()]

    def on(
        self, mesh: Mesh, axes: Axes, model: Model, schedule: Schedule, params: Params
    ) -> Options:
        """Returns the options with those that depend on the mesh, or on layers, decided."""
        platform, weights, slots = mesh.devices.flat[0].platform, self.weights, self.weight_slots
        if weights == "auto" and self.of_places and not model.layers_are_alike:
            weights = "unrolled"
        elif weights == "auto":
            weights = defaults.weights(
                platform=platform,
                in_excess=self._in_excess(mesh, axes, model, schedule, params),
                num_layers=num_layers(params["layers"]),
                num_stages=schedule.num_stages,
            )
        if slots is None:
            slots = defaults.weight_slots(platform)
        remat = chosen_remat(self.remat, platform)
        zero = Zero(self.zero).over(axes.num_parts(mesh))
        pairs = self.pair_layers
        if pairs is None:
            communicates = model.uses_axes and transfers_overlap(mesh)
            alike = model.layers_are_alike or weights == "unrolled"
            waits = self.residuals != "device"
            pairs = communicates and alike and bool(schedule.overlapped) and not waits
        return dataclasses.replace(
            self, remat=remat, zero=zero, weights=weights, weight_slots=slots, pair_layers=pairs
        )


class Arguments(TypedDict, total=False):
    """The fields of `Options` as type checkers know them among the arguments of a pipeline."""

    trainable: Filter | None
    compute_dtype: DTypeLike | None
    fp8: Filter
    fp8_recipe: str
    full_precision: Filter
    remat: str
    zero: int
    weights: str
    weight_slots: int | None
    residuals: str | float
    pair_layers: bool | None
    layer_counts: Sequence[int] | None
    poison: bool


def is_number(value: object) -> bool:
    """Whether a value is a whole number; True is not, although it equals 1."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_wider(leaf: jax.ShapeDtypeStruct, narrow: jnp.dtype) -> bool:
    """Whether a parameter would be rounded."""
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return is_float and leaf.dtype.itemsize > narrow.itemsize
