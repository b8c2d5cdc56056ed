"""What the results of a function depend on, read from its traced program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

import jax

from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.types import Tree

_MIXERS = {
    *("sort", "rev", "transpose", "gather", "scatter", "scatter-add", "dynamic_slice", "fft"),
    *("dot_general", "conv_general_dilated", "cholesky", "triangular_solve", "concatenate"),
    *("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "while", "scan", "cond"),
}
"""Primitives whose result may have their operand's shape although they mix its elements."""


@dataclasses.dataclass(frozen=True)
class Dependence:
    """What one result depends on.

    Args:
      inputs: numbers of the tracked argument leaves.
      mixes: name of a primitive on the way that mixes elements of one of them, or None.
    """

    inputs: frozenset[int] = frozenset()
    mixes: str | None = None

    def __or__(self, other: Dependence) -> Dependence:
        return Dependence(self.inputs | other.inputs, self.mixes or other.mixes)


def read_leaves(function: Callable[..., Any], *args: Tree) -> list[bool]:
    """Which leaves of the arguments the function's result depends on.

    Example:
      >>> read_leaves(lambda tree: tree["a"] + 0 * len(tree), {"a": 1.0, "b": 2.0})
      [True, False]
    """
    jaxpr = jaxprs.flatten(jax.make_jaxpr(function)(*args)).jaxpr
    read = jaxprs.reads(jaxprs.needed(jaxpr.eqns, jaxpr.outvars), jaxpr.outvars)
    return [var in read for var in jaxpr.invars]


def dependences(
    function: Callable[..., Any], *args: Tree, tracked: Collection[int]
) -> list[Dependence]:
    """Follows argument leaves (``tracked``: their numbers) to every leaf of a function's result.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.ones(3)
      >>> dependences(lambda x, y: (2 * x, y / jnp.linalg.norm(x)), x, x, tracked=[0])[0].mixes
      >>> dependences(lambda x, y: (2 * x, y / jnp.linalg.norm(x)), x, x, tracked=[0])[1].mixes
      'reduce_sum'
    """
    jaxpr = jaxprs.flatten(jax.make_jaxpr(function)(*args)).jaxpr
    known = {jaxpr.invars[number]: Dependence(frozenset({number})) for number in tracked}
    for eqn in jaxprs.needed(jaxpr.eqns, jaxpr.outvars):
        read = [v for v in eqn.invars if jaxprs.is_var(v) and v in known]
        if not read:
            continue
        made = Dependence()
        for var in read:
            made |= known[var]
            shape = var.aval.shape
            same = all(out.aval.shape == shape for out in eqn.outvars)
            if math.prod(shape) > 1 and (not same or eqn.primitive.name in _MIXERS):
                made |= Dependence(mixes=eqn.primitive.name)
        known |= dict.fromkeys(eqn.outvars, made)
    nothing = Dependence()
    return [known.get(v, nothing) if jaxprs.is_var(v) else nothing for v in jaxpr.outvars]
