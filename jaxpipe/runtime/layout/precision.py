"""The dtypes that layers compute in, where they are narrower than those of their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpipe.runtime import filters
from jaxpipe.runtime.filters import Filter
from jaxpipe.runtime.float8 import E4M3
from jaxpipe.runtime.layout.whole_model import Layout
from jaxpipe.runtime.options import Options
from jaxpipe.runtime.trees import describe, is_sequence, shapes_of
from jaxpipe.runtime.types import Params, Shapes, Tree
from jaxpipe.schedule.problems import Problem

EXAMPLES = ("bfloat16", "float16")


def compute_dtypes(layouts: Sequence[Layout | None], options: Options) -> list[Tree] | None:
    """Finds the dtypes in which layers read their weights, as `LayerLayout.compute_dtypes` for
    every layout; None for those of the parameters. Weights in `E4M3` have scales.

    Args:
      layouts: layouts of the parameters; None where there are none.
      options: ``compute_dtype``, ``fp8`` and ``full_precision``.
    """
    if options.compute_dtype is None and options.fp8 == ():
        return None
    narrow = None if options.compute_dtype is None else jnp.dtype(options.compute_dtype)

    def dtype_of(path: str, leaf: jax.ShapeDtypeStruct) -> Any:
        if filters.is_chosen(path, leaf, options.full_precision):
            return leaf.dtype
        if filters.is_chosen(path, leaf, options.fp8):
            return E4M3
        return narrow if narrow is not None and is_wider(leaf, narrow) else leaf.dtype

    return [layout.layers.compute_dtypes(dtype_of) for layout in layouts if layout is not None]


def is_wider(leaf: jax.ShapeDtypeStruct, narrow: Any) -> bool:
    """Whether a parameter would be rounded."""
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return is_float and leaf.dtype.itemsize > narrow.itemsize


def problems(params: Params, options: Options) -> Iterator[Problem | str]:
    """Yields what is wrong with these options for these parameters."""
    layers = {"layers": shapes_of(params["layers"])}
    excepted = options.full_precision
    if options.compute_dtype is not None:
        yield from _of_compute_dtype(options.compute_dtype, layers)
    elif options.fp8 == () and excepted != ():
        yield "full_precision needs compute_dtype or fp8, from which it excepts parameters."
        return
    unknown: list[str] = []
    for name, chosen in (("fp8", options.fp8), ("full_precision", excepted)):
        if chosen == ():
            continue
        if is_sequence(params["layers"]):
            rule = "needs layers that are alike: others share flat arrays, one per dtype"
            yield Problem(name, chosen, rule, ((),))
            return
        unknown += filters.problems(name, chosen, layers)
    yield from unknown
    if options.fp8 != () and not unknown:
        yield from _of_fp8(options.fp8, excepted, layers)


def _of_compute_dtype(dtype: DTypeLike, layers: Shapes) -> Iterator[Problem]:
    try:
        narrow = jnp.dtype(dtype)
    except TypeError:
        yield Problem("compute_dtype", dtype, "is no dtype", EXAMPLES)
        return
    if not jnp.issubdtype(narrow, jnp.floating):
        yield Problem("compute_dtype", str(narrow), "is not floating point", EXAMPLES)
    elif narrow.itemsize == 1:
        rule = "needs scales: choose the weights that are quantized with fp8"
        yield Problem("compute_dtype", str(narrow), rule, ({"fp8": "*kernel"},))
    elif not any(is_wider(leaf, narrow) for leaf in jax.tree.leaves(layers)):
        rule = "is as wide as the layers' parameters: layers would read what they read without it"
        yield Problem("compute_dtype", str(narrow), rule, (None,))


def _of_fp8(chosen: Filter, excepted: Filter, layers: Shapes) -> Iterator[Problem | str]:
    named = [(filters.name_of(path), leaf) for path, leaf in jax.tree.leaves_with_path(layers)]
    quantized = [
        (name, leaf)
        for name, leaf in named
        if filters.is_chosen(name, leaf, chosen) and not filters.is_chosen(name, leaf, excepted)
    ]
    if not quantized:
        yield Problem("fp8", chosen, "chooses no weight", ((),))
    for name, leaf in quantized:
        if not is_wider(leaf, E4M3):
            yield f"fp8 chooses {name}, which is {describe(leaf)}; only wider floats are quantized."
