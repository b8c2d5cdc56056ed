"""The needs of a run: parameters, bytes per device by part, and whether the devices have them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxpipe.measure import predicted_bytes
from jaxpipe.schedule import chunk_shares
from train.metrics import announced, say
from train.modes import device_bytes
from train.step import Setup

_GB = 1e9

_PARTS = {
    "x": "activations on their way to the next stage",
    "sent": "messages under way",
    "inputs": "inputs kept to run layers again",
    "read_states": "states of layers kept to run them again",
    "weights": "weights gathered, or copied in the compute dtype",
    "dy": "gradients on their way to the stage before",
    "until_b": "activations kept from F to B",
    "until_w": "activations kept from F to W",
    "crossing": "values kept from B to W",
    "gradients": "gradient sums of layers",
    "reduced": "gradient sums, split over data shards",
    "moving": "pieces of chunks on their way over data",
    "working_set": "values of the layer at work",
}
"""Parts that `jaxpipe.measure.predicted_bytes` names, in words."""


def show_parameters(console: Console, setup: Setup) -> None:
    """Shows how many parameters there are, which chunk has which layers, and at what cost."""
    counts = _layer_parameters(setup)
    outer = setup.task.num_parameters() - sum(counts)
    per_device = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(setup.state_shapes.params)
    )
    say(
        console,
        f"{sum(counts) + outer:,} parameters: {sum(counts):,} in {len(counts)} layers, {outer:,} "
        f"in embedding and head. Each device holds {per_device:,} between steps.",
        wraps=True,
    )
    columns = ("stage", "chunk", "layers", "parameters", "share of cost")
    table = Table(*columns, title="partition, in the order of the model")
    for row in chunk_shares(setup.layer_costs, setup.layer_counts, setup.schedule.placement):
        last = row.first_layer + row.num_layers - 1
        own = sum(counts[row.first_layer : last + 1])
        layers = str(last) if row.num_layers == 1 else f"{row.first_layer} to {last}"
        table.add_row(str(row.stage), str(row.chunk), layers, f"{own:,}", f"{row.share:.1%}")
    console.print(table)


def _layer_parameters(setup: Setup) -> list[int]:
    layers, number = setup.shapes["layers"], setup.task.num_layers
    if isinstance(layers, tuple):
        return [sum(leaf.size for leaf in jax.tree.leaves(layer)) for layer in layers]
    return [sum(leaf.size for leaf in jax.tree.leaves(layers)) // number] * number


def show_step(console: Console, setup: Setup) -> None:
    """Compiles the step and shows its memory, as predicted and as compiled, and a verdict."""
    with announced(console, "the training step"):
        compiled = setup.compile().memory_analysis()
    state, rng = setup.state_shapes, jax.eval_shape(lambda: setup.rng(0))
    by_chunk = setup.optimizer if setup.config.pipeline.update == "chunk" else None
    with announced(console, "its smallest form, for the layer at work"):
        predicted = predicted_bytes(setup.pipe, setup.batch_shapes, rng, by_chunk=by_chunk)
    fetched = ", during the update only" if setup.config.optimizer.offload else ""
    parts = {
        "parameters": device_bytes(state.params),
        f"optimizer state{fetched}": device_bytes(state.optimizer),
        "states of layers": device_bytes(state.layers),
        "batch": device_bytes(setup.batch_shapes),
    }
    parts |= {_PARTS[name]: size for name, size in predicted.items()}
    show_memory(console, setup, parts, compiled)


def show_memory(
    console: Console,
    setup: Setup,
    parts: Mapping[str, int],
    compiled: Any,
) -> None:
    """Shows bytes per device and whether they fit.

    Args:
      console: where to print.
      setup: setup of the run.
      parts: predicted bytes by part, in words.
      compiled: what the compiler says of the step.
    """
    total = (
        compiled.argument_size_in_bytes
        + compiled.temp_size_in_bytes
        + compiled.output_size_in_bytes
        - compiled.alias_size_in_bytes
    )
    table = Table("part", "MB", title="memory of each device during a step")
    table.columns[1].justify = "right"
    for name, size in parts.items():
        if size:
            table.add_row(name, f"{size / 1e6:,.2f}")
    table.add_section()
    table.add_row("all of these, predicted", f"{sum(parts.values()) / 1e6:,.2f}")
    table.add_row("all, compiled", f"{total / 1e6:,.2f}")
    console.print(table)
    say(console, verdict(setup, total), wraps=True)


def verdict(setup: Setup, total: int) -> str:
    """Says whether a step fits into the memory of the devices.

    Args:
      setup: setup of the run.
      total: bytes of the compiled step on each device.
    """
    device, count = setup.mesh.devices.flat[0], setup.mesh.devices.size
    if device.platform == "cpu":
        # Simulated devices share the memory of this host.
        here = sum(d.process_index == device.process_index for d in setup.mesh.devices.flat)
        limit, needed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), here * total
        what = f"{here} simulated devices of {total / _GB:.3g} GB each need"
    else:
        stats = device.memory_stats() or {}
        limit, needed = stats.get("bytes_limit", 0), total
        what = f"each of the {count} devices ({device.device_kind}) needs"
    what += f" {needed / _GB:.3g} GB of memory"
    if not limit:
        return f"{what}; how much there is, is not known"
    fits = f"fits, at {needed / limit:.0%} of" if needed <= limit else "DOES NOT FIT into"
    return f"{what}: this {fits} the {limit / _GB:.3g} GB that there are"
