"""Which arrays of a GPT are split over which mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from models import experts, tensor
from models.gpt_config import GPTConfig

PyTree = Any


def of_tables(outer: PyTree, split: Any) -> PyTree:
    """``split`` for every vocabulary table, None for the rest of embedding and head."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: split if path[-1].key == "table" else None, outer
    )


def shared(
    config: GPTConfig,
    outer: PyTree,
    layers: Sequence[PyTree],
    *,
    tensor_axis: str | None,
    expert_axis: str | None,
) -> dict[str, Any]:
    """What `jaxpipe.Model` says about arrays that devices along these axes share.

    Args:
      config: the model's shape.
      outer: shapes of embedding and head.
      layers: shapes of every layer.
      tensor_axis, expert_axis: as of `models.gpt.model`.

    Raises:
      ValueError: axes for which the model has no place.
    """
    if tensor_axis is not None and config.num_experts is not None:
        raise ValueError(f"tensor_axis={tensor_axis!r}: devices cannot share layers with experts.")
    if expert_axis is not None and config.num_experts is None:
        raise ValueError(f"expert_axis={expert_axis!r}: there are no experts: num_experts=None.")
    if expert_axis is not None:
        found = tuple(experts.axis_split(layer, expert_axis) for layer in layers)
        return {"axis_split": {"layers": found[0] if config.layers_are_alike else found}}
    if tensor_axis is None:
        return {}
    counts = config.num_heads, config.kv_heads, config.kv_heads
    widths = tuple(n * config.head_width for n in counts)
    found = tuple(tensor.axis_split(layer, tensor_axis, widths) for layer in layers)
    split = {"layers": found[0] if config.layers_are_alike else found}
    return {"axes": (tensor_axis,), "axis_split": split | of_tables(outer, P(tensor_axis))}
