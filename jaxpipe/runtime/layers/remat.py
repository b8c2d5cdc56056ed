"""Policies of rematerialization by name, which say what a layer keeps from F until its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax
from jax.extend.core import Primitive

from jaxpipe.runtime.layers.jaxprs import stated_flops
from jaxpipe.runtime.types import Tree
from jaxpipe.schedule.problems import Problem

Policy: TypeAlias = Callable[..., bool]
"""A policy of `jax.checkpoint`: whether a primitive's results are kept."""
_COMMUNICATES = ("psum", "reduce_scatter", "all_to_all")
"""Primitives that would communicate again if they were repeated, and whose results are no larger
than their operands."""


def _dots(primitive: Primitive, *args: Tree, **params: Tree) -> bool:
    """Keeps the outputs of weight matmuls, or their sum where devices sum them up, and the values
    that devices exchange. Composites that state their FLOPs are matmuls."""
    if primitive.name in _COMMUNICATES or stated_flops(primitive, params) is not None:
        return True
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)


REMAT_POLICIES: dict[str, Policy | None] = {
    "none": None,
    "dots": _dots,
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""Rematerialization by name: keep every residual; keep the outputs of weight matmuls and recompute
the rest; keep only the layer's input and recompute the layer."""


def chosen_remat(remat: str, platform: str) -> str:
    """The policy that a name stands for on a platform: "auto" is "dots" on GPUs, and else "none".

    GPUs recompute what stands between weight matmuls in less time than they write it and read it.
    """
    if remat != "auto":
        return remat
    return "dots" if platform == "gpu" else "none"


def unknown_remat(remat: str) -> Iterator[Problem]:
    """Says that a name is not in `REMAT_POLICIES`."""
    if remat not in REMAT_POLICIES:
        rule = f"is not a policy; choose one of {', '.join(REMAT_POLICIES)}"
        yield Problem("remat", remat, rule)
