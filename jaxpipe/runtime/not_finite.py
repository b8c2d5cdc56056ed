"""Finds the first value of a step that is not finite, and what made it."""

import functools
import pickle
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify, multihost_utils

from jaxpipe.runtime import checks
from jaxpipe.runtime.filters import name_of
from jaxpipe.runtime.layout.placed import Placed
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.tick.watch import Broken, Watch
from jaxpipe.runtime.types import Batch, Key, States, Tree
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import TickTable

_PASSES = {
    Kind.F: "forward",
    Kind.B: "backward for the input",
    Kind.BW: "backward",
    Kind.W: "backward for the weights",
}

_WATCH = Watch()
"""The watch of all calls, so that a pipeline's program is compiled once."""
_MOST_BYTES = 8192
"""Bytes that a process tells the others."""
_MOST_CHARACTERS = 1000
"""Length of a detail: many parameters may have names, and a process must be able to tell them."""


class NotFinite(NamedTuple):
    """The first value of a step that is not finite, and where it was made.

    Args:
      part: "layer", "embedding", "head", or the path of a gradient that is a sum over microbatches.
      kind: the action, `Kind.F`, `Kind.B`, `Kind.BW` or `Kind.W`; None outside of layers.
      layer: number of the layer in model order; None outside of layers.
      stage, microbatch, shard: where and of what; None if it is of no single microbatch.
      slice: slice of the sequence, 0 where sequences are whole.
      detail: the operation that made it, with its line, or the layer's parameters that were not
        finite; empty if neither is known.

    ``str`` says it in a sentence.
    """

    part: str
    kind: Kind | None = None
    layer: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    shard: int | None = None
    slice: int = 0
    detail: str = ""

    def __str__(self) -> str:
        what = self.part if self.layer is None else f"{self.part} {self.layer}"
        what += "" if self.kind is None else f", {_PASSES[self.kind]}"
        if self.microbatch is not None:
            what += f", microbatch {self.microbatch}"
            what += f", slice {self.slice}" if self.slice else ""
            what += f" (stage {self.stage}, data shard {self.shard})"
        return what + (f": {self.detail}" if self.detail else "")


def find_nan(
    pipe: Pipeline, placed: Placed, batch: Batch, rng: Key = None, *, states: States = None
) -> NotFinite | None:
    """Finds the first value of a step that is NaN or infinite.

    Runs forward and backward of a batch once, in the pipeline's own program, to which a check of
    what every layer makes is added: it takes about as long to compile as the step, and to run. The
    operation within the layer is found where no layer uses a mesh axis.

    Args:
      pipe: any pipeline.
      placed: placed parameters, as they were before the step; these and the other arguments are
        those of `Pipeline.value_and_grad`. With several processes all must call it.

    Returns:
      Where the value was made; None if loss and gradients are finite.

    Raises:
      ValueError: as of `Pipeline.value_and_grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxpipe.runtime.layers.model import Model
      >>> from jaxpipe.runtime.mesh import make_mesh
      >>> model = Model(
      ...     embed=lambda outer, batch, rng: batch,
      ...     layer=lambda w, x, batch, rng: jnp.log(x) * w,
      ...     head_loss=lambda outer, x, batch, rng: jnp.mean(x**2),
      ... )
      >>> params = {"embed": {}, "layers": jnp.ones((4,)), "head": {}}
      >>> pipe = Pipeline(model, params, schedule="1f1b", microbatches=2, mesh=make_mesh(stage=1))
      >>> found = find_nan(pipe, pipe.place(params), 2 * jnp.ones((4, 3)))
      >>> found.layer, found.kind.name, found.microbatch
      (2, 'F', 0)
    """
    pipe.check("placed", placed, batch, states, checks.key(rng))
    step = pipe.program("train", watch=_WATCH)(placed, batch, rng, states)
    jax.block_until_ready(step)
    jax.effects_barrier()
    table, slices = pipe.table, pipe.schedule.num_slices
    first = min(_WATCH.told, key=functools.partial(_when, table), default=None)
    _WATCH.told.clear()
    found = None if first is None else (_when(table, first), _described(first, slices))
    if jax.process_count() > 1:
        found = _first_of_all(found)
    return _of_sums(step.value, pipe.unplace(step.gradients)) if found is None else found[1]


def _when(table: TickTable, broken: Broken) -> tuple[int, ...]:
    """Orders actions as the values that they make depend on each other."""
    column, stage = table.passes[broken.kind], broken.stage
    is_it = (column.microbatch[:, stage] == broken.microbatch) & (
        column.chunk[:, stage] == broken.chunk
    )
    backward = not broken.kind.is_forward
    depth = -broken.layer if backward else broken.layer
    return int(np.argmax(is_it)), int(backward), int(broken.kind is Kind.W), depth, broken.shard


def _described(broken: Broken, num_slices: int) -> NotFinite:
    microbatch, slice_number = divmod(broken.microbatch, num_slices)
    place = broken.stage, microbatch, broken.shard, slice_number
    if broken.was_given:
        return NotFinite("embedding" if broken.kind.is_forward else "head", None, None, *place)
    return NotFinite("layer", broken.kind, broken.layer, *place, _detail(broken)[:_MOST_CHARACTERS])


def _detail(broken: Broken) -> str:
    """Names what in a layer made the value, as far as it can be known."""
    if names := _not_finite(broken.args[0]):
        return f"parameters that are not finite: {', '.join(names)}"
    if broken.run is None:
        return ""
    checked = checkify.checkify(broken.run, errors=checkify.nan_checks)
    try:
        error, _ = jax.jit(checked)(*broken.args)
    except NotImplementedError:  # of an operation that checkify does not know
        return ""
    raised = error.get_exception()
    if raised is None:
        return ""  # infinite, and nowhere NaN
    own = str(Path(jax.__file__).parent), str(Path(__file__).parent)
    lines = (
        f" ({frame.file_name}:{frame.line_num}, {frame.function_name})"
        for frame in raised.traceback_info.frames
        if not frame.file_name.startswith(own)
    )
    return f"{raised}".rstrip(".") + next(lines, "")


def _not_finite(values: Tree) -> list[str]:
    floats = [
        (path, w)
        for path, w in jax.tree.leaves_with_path(values)
        if jnp.issubdtype(w.dtype, jnp.inexact)
    ]
    return [name_of(path) for path, w in floats if not jnp.isfinite(w).all()]


def _of_sums(value: Tree, gradients: Tree) -> NotFinite | None:
    """Names a sum that is not finite, though what layers made is."""
    if names := _not_finite({"gradients": gradients}):
        return NotFinite(names[0])
    return NotFinite("head") if _not_finite(value) else None


def _first_of_all(found: tuple[tuple[int, ...], NotFinite] | None) -> Tree:
    """The first of what the processes have found, on each of them."""
    own = pickle.dumps(found)
    every = multihost_utils.process_allgather(np.frombuffer(own.ljust(_MOST_BYTES), np.uint8))
    return min(filter(None, (pickle.loads(one.tobytes()) for one in every)), default=None)
