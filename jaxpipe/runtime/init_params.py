"""Parameters made where they belong, so that no device and no host ever holds the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime import checks
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.trees import is_sequence
from jaxpipe.runtime.types import Params, Placed, Shapes
from jaxpipe.schedule.problems import refuse


def init_params(pipe: Pipeline, init: Callable[[jax.Array], Params], key: jax.Array) -> Placed:
    """Makes ``pipe.place(init(key))`` on the devices that hold it, never whole anywhere.

    Random bits are the same wherever they are drawn; XLA may round what is computed from them
    differently in the last place where it computes fewer at once.

    Args:
      pipe: where parameters are placed.
      init: a function of the key alone that returns canonical parameters; `jax.jit` must take it.
        An array that XLA cannot split is whole on a device while it is made: random numbers,
        constants and `jax.vmap` over layers split, a decomposition such as that of
        `jax.nn.initializers.orthogonal` does not.
      key: a random key.

    Raises:
      ValueError: parameters unlike those that the pipeline was built for.

    Example:
      >>> from jaxpipe.runtime.layers.model import Model
      >>> from jaxpipe.runtime.mesh import make_mesh
      >>> model = Model(
      ...     embed=lambda outer, batch, rng: batch["x"],
      ...     layer=lambda w, x, batch, rng: x @ w,
      ...     head_loss=lambda outer, x, batch, rng: x.mean(),
      ... )
      >>> def init(key):
      ...     return {"embed": {}, "layers": jax.random.normal(key, (2, 3, 3)), "head": {}}
      >>> shapes, mesh = jax.eval_shape(init, jax.random.key(0)), make_mesh(stage=1)
      >>> pipe = Pipeline(model, shapes, schedule="1f1b", mesh=mesh)
      >>> init_params(pipe, init, jax.random.key(0))["layers"].shape
      (1, 2, 3, 3)
    """
    # Every array has a program of its own, or every layer if layers differ: XLA then keeps no more
    # than one of them whole, whatever it cannot split.
    placing = pipe.params_placing
    jaxpr, shapes = jax.make_jaxpr(init, return_shape=True)(key)
    refuse(checks.canonical("init(key)", shapes, placing.canonical, if_placed=placing.placed))
    run = jaxpr_as_fun(jaxpr)
    expected, structure = jax.tree.flatten(placing.canonical)
    leaves: list[jax.Array] = []
    for first, end in _parts(shapes):

        def make(key: jax.Array, first: int = first, end: int = end) -> list[jax.Array]:
            made = run(*jax.tree.leaves(key))[first:end]
            return [_split_within(w, n) for w, n in zip(made, expected[first:end], strict=True)]

        shardings = [leaf.sharding for leaf in expected[first:end]]
        # One after the other: programs in flight at once would take their memory at once.
        leaves += jax.block_until_ready(jax.jit(make, out_shardings=shardings)(key))
    return placing.place(jax.tree.unflatten(structure, leaves))


def _parts(params: Shapes) -> Iterator[tuple[int, int]]:
    """The leaves that one program makes, as ranges of their numbers."""
    units = [unit for name in sorted(params) for unit in _units(params[name])]
    end = 0
    for unit in units:
        first, end = end, end + len(jax.tree.leaves(unit))
        if end > first:
            yield first, end


def _units(part: Any) -> list[Any]:
    return list(part) if is_sequence(part) else jax.tree.leaves(part)


def _split_within(w: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of stacked layers, split within the layers first.

    An init function that makes one layer after the other and stacks them would otherwise have to
    send each to its stage; random bits are drawn anywhere.
    """
    sharding: Any = leaf.sharding
    dims = [*sharding.spec, *[None] * (w.ndim - len(sharding.spec))]
    if w.ndim < 2 or dims[0] is None:
        return w
    size = sharding.mesh.shape[dims[0]] if isinstance(dims[0], str) else 0
    free = [d for d in range(1, w.ndim) if dims[d] is None and size and w.shape[d] % size == 0]
    if not free:
        return w
    dims[free[-1]], dims[0] = dims[0], None
    return jax.lax.with_sharding_constraint(w, NamedSharding(sharding.mesh, P(*dims)))
