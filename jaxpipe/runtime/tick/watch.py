"""The first values of a step that are not finite, told to the host while the step runs.

Where an action of a layer makes one from finite values, the device calls the host; without
`Setup.watch` a program has none of this.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.runtime.barriers import run_if
from jaxpipe.runtime.types import Flag, Index, Tree
from jaxpipe.schedule.actions import Kind


class Broken(NamedTuple):
    """An action of a layer that made values that are not finite.

    Args:
      layer: its canonical number.
      microbatch: number of the pass; slices of a sequence are passes of their own.
      was_given: whether its input was not finite either: it came from the embedding or the head.
      run, args: the action's function, None if it runs on the mesh alone, and what the device gave
        to it.
    """

    kind: Kind
    stage: int
    chunk: int
    layer: int
    microbatch: int
    shard: int
    was_given: bool
    run: Callable[..., Tree] | None
    args: tuple[Tree, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Watch:
    """Collects what devices tell, in any order."""

    told: list[Broken] = dataclasses.field(default_factory=list)

    def look(
        self,
        kind: Kind,
        place: Sequence[Index],
        run: Callable[..., Tree] | None,
        args: tuple[Tree, ...],
        *,
        given: Tree,
        made: Tree,
        begins: Flag,
    ) -> None:
        """Tells the host if an action of a layer is the first to make what is not finite.

        Args:
          place: stage, chunk, layer, microbatch and data shard.
          run, args: the function of the action, and its arguments.
          given: the activation or cotangent that reached it.
          made: what it has made.
          begins: whether ``given`` came from the embedding or the head, and from no layer.
        """
        is_fine = _is_finite(given)
        told = jnp.stack([jnp.asarray(n, jnp.int32) for n in (*place, ~is_fine)])
        leaves, structure = jax.tree.flatten(args)
        is_key = [jnp.issubdtype(w.dtype, jax.dtypes.prng_key) for w in leaves]

        def note(told: np.ndarray, *arrays: np.ndarray) -> None:
            stage, chunk, layer, microbatch, shard, was_given = np.asarray(told).tolist()
            args = jax.tree.unflatten(structure, map(np.asarray, arrays))
            place = stage, chunk, layer, microbatch, shard
            whole = None if run is None else functools.partial(with_keys, run)
            self.told.append(Broken(kind, *place, bool(was_given), whole, args))

        def with_keys(run: Callable[..., Tree], *args: Tree) -> Tree:
            pairs = zip(jax.tree.leaves(args), is_key, strict=True)
            whole = [jax.random.wrap_key_data(w) if key else w for w, key in pairs]
            return run(*jax.tree.unflatten(structure, whole))

        def tell(count: jax.Array) -> jax.Array:
            pairs = zip(leaves, is_key, strict=True)
            arrays = [jax.random.key_data(w) if key else w for w, key in pairs]
            jax.debug.callback(note, told, *arrays)
            return count

        run_if((is_fine | begins) & ~_is_finite(made), tell, jnp.zeros((), jnp.int32))


def _is_finite(values: Tree) -> jax.Array:
    floats = [w for w in jax.tree.leaves(values) if jnp.issubdtype(w.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(w).all() for w in floats]).all() if floats else jnp.asarray(True)
