"""Splits of a GPT's arrays over mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from models import tensor
from models.gpt_config import GPTConfig
from models.sharing import Sharing
from models.types import PyTree


def of_tables(outer: PyTree, split: Any) -> PyTree:
    """Makes a tree with ``split`` for what has a row per token, None for all else of the ends."""

    def is_of_tokens(path: tuple[Any, ...]) -> bool:
        of_head = [entry.key for entry in path] == ["head", "bias"]
        return of_head or path[-1].key == "table"

    return jax.tree_util.tree_map_with_path(
        lambda path, _: split if is_of_tokens(path) else None, outer
    )


def of_parameters(
    config: GPTConfig, outer: PyTree, layers: Sequence[PyTree], sharing: Sharing
) -> PyTree:
    """Makes the splits over axes along which devices share layers, as `jaxpipe.Model.axis_split`.

    Returns:
      None if layers name no axes.
    """
    axis, expert_axis = sharing.tensor.axis, sharing.expert_axis
    if expert_axis is not None and config.num_experts is None:
        raise ValueError(f"expert_axis={expert_axis!r}: there are no experts: num_experts=None.")
    if axis is None and expert_axis is None:
        return {"layers": None} if sharing.data_axes else None
    queries, *others = config.qkv_widths.values()
    halves = [queries // 2] * 2 if config.attention_gate else [queries]
    keys, values = config.linear_widths
    joined = {"qkv": (*halves, *others), "conv": (keys, keys, values)}
    if config.attention_gate:  # of adapters
        joined["query"] = tuple(halves)

    def of_layer(layer: PyTree) -> PyTree:
        split = jax.tree.map(lambda _: None, layer)
        if axis is not None:
            split = tensor.axis_split(layer, axis, joined)
        if "experts" in layer["mlp"]:
            of_experts = None if expert_axis is None else P(expert_axis)
            split["mlp"]["experts"] = jax.tree.map(lambda _: of_experts, layer["mlp"]["experts"])
        return split

    splits = tuple(map(of_layer, layers))
    of_layers = {"layers": splits[0] if config.layers_are_alike else splits}
    if axis is None:
        return of_layers
    of_outer = of_tables(outer, P(axis))
    if not config.tied:  # by columns, which `vocabulary.lookup` exchanges with fewer bytes
        of_outer["embed"]["table"] = P(None, axis)
    return of_layers | of_outer
