"""The options of a pipeline, as one object: how it runs, beside what it runs and where."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxpipe.runtime import filters, host
from jaxpipe.runtime.filters import Filter
from jaxpipe.runtime.float8 import E4M3
from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layers.split import REMAT_POLICIES, chosen_remat
from jaxpipe.runtime.layout.whole_model import LAYOUTS
from jaxpipe.runtime.mesh import Axes, transfers_overlap
from jaxpipe.runtime.zero import zero_level
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.problems import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of `jaxpipe.Pipeline` that say how it runs; what each means is documented there.

    ``vars`` gives them back as arguments, for another pipeline that runs alike.
    """

    trainable: Filter | None
    compute_dtype: DTypeLike | None
    fp8: Filter
    full_precision: Filter
    remat: str
    zero: int
    weights: str
    weight_slots: int
    residuals: str
    pair_layers: bool | None
    layer_counts: Sequence[int] | None
    poison: bool

    def problems(self, mesh: Mesh) -> Iterator[Problem]:
        """Yields what is wrong with single options, whatever the model and the schedule."""
        if self.remat not in ("auto", *REMAT_POLICIES):
            rule = f"is not a policy; choose one of {', '.join(REMAT_POLICIES)}"
            yield Problem("remat", self.remat, rule)
        if not _is_number(self.zero):
            yield Problem("zero", self.zero, "is not a level", (0, 1, 2, 3))
        elif self.zero not in (0, 1, 2, 3):
            yield Problem("zero", self.zero, "is not a level", (min(max(self.zero, 0), 3),))
        if self.weights not in LAYOUTS:
            rule = f"is no layout; choose one of {', '.join(LAYOUTS)}"
            yield Problem("weights", self.weights, rule)
        if not _is_number(self.weight_slots) or self.weight_slots < 1:
            yield Problem("weight_slots", self.weight_slots, "holds no chunk", (1,))
        if self.residuals not in ("device", "host"):
            rule = "is not one of device, host"
            yield Problem("residuals", self.residuals, rule, ("device", "host"))
        elif self.residuals == "host":
            yield from host.problems("residuals", self.residuals, mesh)
        if self.pair_layers not in (None, True, False):
            yield Problem("pair_layers", self.pair_layers, "is no choice", (None, True, False))

    @property
    def narrows(self) -> bool:
        """Whether layers read some weights in narrower dtypes than those of the parameters."""
        return self.compute_dtype is not None or self.fp8 != ()

    def dtype_of(self, path: str, leaf: jax.ShapeDtypeStruct) -> Any:
        """The dtype in which layers read a parameter of theirs; those in `E4M3` have scales."""
        if filters.is_chosen(path, leaf, self.full_precision):
            return leaf.dtype
        if filters.is_chosen(path, leaf, self.fp8):
            return E4M3
        narrow = leaf.dtype if self.compute_dtype is None else jnp.dtype(self.compute_dtype)
        return narrow if is_wider(leaf, narrow) else leaf.dtype

    def on(self, mesh: Mesh, axes: Axes, model: Model, schedule: Schedule) -> Options:
        """Returns the options with those that depend on the mesh decided."""
        remat = chosen_remat(self.remat, mesh.devices.flat[0].platform)
        zero = zero_level(self.zero, axes.num_parts(mesh))
        pairs = self.pair_layers
        if pairs is None:
            communicates = model.uses_axes and transfers_overlap(mesh)
            pairs = communicates and model.layers_are_alike and bool(schedule.overlapped)
        return dataclasses.replace(self, remat=remat, zero=zero, pair_layers=pairs)


def _is_number(value: Any) -> bool:
    """Whether a value is a whole number; True, which equals 1, is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_wider(leaf: jax.ShapeDtypeStruct, narrow: Any) -> bool:
    """Whether a parameter would be rounded."""
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return is_float and leaf.dtype.itemsize > narrow.itemsize
