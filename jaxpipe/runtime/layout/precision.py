"""The dtypes that layers compute in, where they are narrower than those of their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpipe.runtime import filters
from jaxpipe.runtime.filters import Filter
from jaxpipe.runtime.layout.whole_model import Layout
from jaxpipe.runtime.trees import is_sequence, shapes_of
from jaxpipe.runtime.types import Params, Tree
from jaxpipe.schedule.problems import Problem

EXAMPLES = ("bfloat16", "float16")


def compute_dtypes(
    layouts: Sequence[Layout | None], dtype: DTypeLike | None, full_precision: Filter
) -> list[Tree] | None:
    """Finds the dtypes in which layers read their weights, as `LayerLayout.compute_dtypes` for
    every layout; None for those of the parameters.

    Args:
      layouts: layouts of the parameters; None where there are none.
      dtype: the narrower dtype, or None.
      full_precision: chooses the parameters that are not rounded.
    """
    if dtype is None:
        return None
    narrow = jnp.dtype(dtype)

    def dtype_of(path: str, leaf: jax.ShapeDtypeStruct) -> Any:
        rounds = is_wider(leaf, narrow) and not filters.is_chosen(path, leaf, full_precision)
        return narrow if rounds else leaf.dtype

    return [layout.layers.compute_dtypes(dtype_of) for layout in layouts if layout is not None]


def is_wider(leaf: jax.ShapeDtypeStruct, narrow: Any) -> bool:
    """Whether a parameter would be rounded."""
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return is_float and leaf.dtype.itemsize > narrow.itemsize


def problems(
    params: Params, dtype: DTypeLike | None, full_precision: Filter
) -> Iterator[Problem | str]:
    """Yields what is wrong with these arguments of `Pipeline`."""
    if dtype is None:
        if full_precision != ():
            yield "full_precision needs compute_dtype, from which it excepts parameters."
        return
    try:
        narrow = jnp.dtype(dtype)
    except TypeError:
        yield Problem("compute_dtype", dtype, "is no dtype", EXAMPLES)
        return
    if not jnp.issubdtype(narrow, jnp.floating):
        yield Problem("compute_dtype", str(narrow), "is not floating point", EXAMPLES)
        return
    layers = {"layers": shapes_of(params["layers"])}
    if not any(is_wider(leaf, narrow) for leaf in jax.tree.leaves(layers)):
        rule = "is as wide as the layers' parameters: layers would read what they read without it"
        yield Problem("compute_dtype", str(narrow), rule, (None,))
    if full_precision == ():
        return
    if is_sequence(params["layers"]):
        rule = "needs layers that are alike: layers that differ share flat arrays, one per dtype"
        yield Problem("full_precision", full_precision, rule, ((),))
    else:
        yield from filters.problems("full_precision", full_precision, layers)
