"""Times at which a device runs layers, noted by the host while a step runs.

A stamp is a call from the device to the host. It is tied to what the cell reads and gives, so that
the cell's layers run between its two stamps and nothing else does; without `Setup.stamps` a program
has none of this. Cells that run nothing are not stamped.
"""

import dataclasses
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from jaxpipe.runtime.barriers import after, run_if
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.types import Index, Tree
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import Cell


class Stamp(NamedTuple):
    """A begin or an end of a chunk's action on one stage."""

    stage: int
    kind: Kind
    chunk: int
    microbatch: int
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class Stamps:
    """The stamps of a step, in the order in which they were taken: a cell's begin, then its end.

    Of the devices that share a stage, the first is stamped.
    """

    taken: list[Stamp] = dataclasses.field(default_factory=list)

    def take(self, kind: Kind, cell: Cell, axes: Axes, ready: Tree) -> Index:
        """Stamps a cell once ``ready`` is there, and returns 0 after that; 0 if it is empty."""
        first = lax.axis_index(axes.peers) == 0
        place = lax.axis_index(axes.stage), cell.chunk, cell.microbatch

        def note(told: np.ndarray) -> np.int32:
            seconds = time.perf_counter()
            is_first, stage, chunk, microbatch = np.asarray(told).tolist()
            if is_first:
                self.taken.append(Stamp(stage, kind, chunk, microbatch, seconds))
            return np.int32(0)

        def call(_: jax.Array) -> jax.Array:
            # One array: each that is handed over takes about as long as the rest of the call.
            told = jnp.stack([jnp.asarray(n, jnp.int32) for n in (first, *place)])
            told = after(ready, told, lax.axis_index(axes.names))
            came: jax.Array = io_callback(note, jax.ShapeDtypeStruct((), jnp.int32), told)
            return came

        return run_if(cell.runs, call, jnp.zeros((), jnp.int32))
