"""The arguments that the results of a function depend on, read from its traced program."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.types import Tree


def read_leaves(function: Callable[..., Tree], *args: Tree) -> list[bool]:
    """Marks the leaves of the arguments on which the function's result depends.

    Example:
      >>> read_leaves(lambda tree: tree["a"] + 0 * len(tree), {"a": 1.0, "b": 2.0})
      [True, False]
    """
    jaxpr = jaxprs.flatten(jax.make_jaxpr(function)(*args)).jaxpr
    read = jaxprs.reads(jaxprs.needed(jaxpr.eqns, jaxpr.outvars), jaxpr.outvars)
    return [var in read for var in jaxpr.invars]
