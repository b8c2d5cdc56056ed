"""``--dry-run``: draws the schedule, compiles, and says whether the devices have enough memory."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxpipe import axes_across_hosts
from jaxpipe.asynchronous import steady_text
from jaxpipe.errors import counted
from jaxpipe.measure import predicted_bytes
from jaxpipe.schedule import draw, simulate
from train import pipeline_section
from train.config import Config
from train.modes import Asynchronous, Modes, device_bytes
from train.step import Setup
from train.watch.metrics import announced, say

_WIDTH = 120
"""Columns of a line without a terminal."""
_MOST_LINES = 100
"""Lines of the longest schedule that is shown as text; nobody reads more."""
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
    "carry": "values kept from slice to slice",
    "carry_gradient": "their gradients, from slice to slice",
    "gradients": "gradient sums of layers",
    "reduced": "gradient sums, split over data shards",
    "moving": "pieces of chunks on their way over data",
    "working_set": "values of the layer at work",
}
"""Parts that `jaxpipe.measure.predicted_bytes` names, in words."""


def run(config: Config) -> None:
    """Prints what a run would do; writes nothing.

    Args:
      config: a checked configuration; jax already has the devices.
    """
    console = Console(quiet=jax.process_index() != 0)
    if not console.is_terminal:
        console.width = _WIDTH
    setup = Setup(config)
    _show_mesh(console, setup)
    if pipeline_section.is_asynchronous(config):
        mode = Modes(setup).asynchronous
        _show_steady_state(console, setup, mode)
        show_parameters(console, setup)
        _show_carried(console, setup, mode)
    else:
        _show_timeline(console, setup)
        show_parameters(console, setup)
        show_step(console, setup)
        if config.pipeline.update == "chunk":
            _show_updates(console, setup)
        if setup.pipe.options.zero.shards_gradients:
            _show_transfers(console, setup)
    say(console, "dry run: nothing was trained or written")


def _show_mesh(console: Console, setup: Setup) -> None:
    shape, across = setup.mesh.shape, axes_across_hosts(setup.mesh)
    within = [name for name, size in shape.items() if size > 1 and name not in across]
    devices = " x ".join(f"{name} {size}" for name, size in shape.items())
    hosts = f"{' and '.join(across)} across hosts" if across else ""
    inside = f"{' and '.join(within)} within a host" if within else ""
    places = ", ".join(filter(None, (hosts, inside)))
    say(console, f"devices: {devices}{': ' * bool(places)}{places}", wraps=True)


def _show_timeline(console: Console, setup: Setup) -> None:
    runs, free = setup.timeline, simulate(setup.schedule, setup.chunk_costs)
    try:
        drawing = f"{draw.caption(runs)}\n{draw.text(runs, width=console.width)}"
        if len(drawing.splitlines()) > _MOST_LINES:
            remedy = "jaxpipe show --out schedule.svg draws a picture"
            drawing = f"the schedule in text needs {len(drawing.splitlines())} lines; {remedy}"
    except draw.TooWideError as error:  # chunks whose costs are far apart
        drawing = str(error)
    peaks = " ".join(f"{free.in_full_stages(count):g}" for count in free.peak_in_flight)
    flight = f"microbatches in flight at most, stage by stage: {peaks}"
    lines = [drawing, flight, draw.caption(free), draw.caption(runs)]
    say(console, "\n".join(lines), wraps=True)


def _show_steady_state(console: Console, setup: Setup, mode: Asynchronous) -> None:
    """Shows ticks, delays and versions, the utilization, and what T1, T2 and T3 do."""
    config, steady, costs = setup.config, mode.steady, setup.chunk_costs
    warmup = config.asynchronous.warmup_steps
    rescheduling, decay = pipeline_section.techniques(config)
    lines = [
        steady_text(steady),
        f"utilization: {steady.full_utilization(costs):.1%} in the steady state, with filling and "
        f"draining once {steady.utilization(config.train.steps - warmup, costs):.1%}",
        f"T1 rescheduling_steps: {rescheduling or 'off'}; T2 discrepancy_decay: {decay or 'off'}; "
        f"T3 warmup_steps: {warmup or 'off'}",
        f"the loss of a step is that of the batch {steady.loss_lag} steps before it",
    ]
    say(console, "\n".join(lines), wraps=True)


def _show_updates(console: Console, setup: Setup) -> None:
    """Shows the memory that updates chunk by chunk save."""
    after = sum(predicted_bytes(setup.pipe, setup.batch_shapes, setup.rng_shape).values())
    say(
        console,
        f"pipeline.update=chunk: gradients of {setup.pipe.chunk_table.reduces.num_slots} of "
        f"{setup.pipe.schedule.num_chunks} chunks are kept at once; with update=step "
        f"temporaries and gradients would take {after / 1e6:,.2f} MB",
        wraps=True,
    )


def _show_transfers(console: Console, setup: Setup) -> None:
    """Shows how often chunks are gathered and reduced over data, from ZeRO-2 on."""
    table, zero = setup.pipe.table, setup.pipe.options.zero
    gathered, reduced = max(table.gathers.counts), max(table.reduces.counts)
    gathers = (
        f"gathers up to {counted(gathered, 'chunk')} of weights and " if zero.shards_weights else ""
    )
    kept = max(table.gathers.num_slots if zero.shards_weights else 0, table.reduces.num_slots)
    say(
        console,
        f"data axis, ZeRO-{zero}: in a step a stage {gathers}reduces up to {reduced} of gradients; "
        f"of its {table.schedule.num_chunks} it keeps {kept} at once (pipeline.weight_slots)",
        wraps=True,
    )


def _show_carried(console: Console, setup: Setup, mode: Asynchronous) -> None:
    """Shows the buffers that an asynchronous pipeline carries from step to step."""
    with announced(console, "the training step"):
        compiled = mode.compile().memory_analysis()
    assert compiled is not None
    parts = mode.carried_bytes() | {
        "batch": device_bytes(setup.batch_shapes),
        "values of a step": compiled.temp_size_in_bytes,
    }
    show_memory(console, setup, parts, compiled)


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
        f"{sum(counts) + outer:,} parameters: {sum(counts):,} in {counted(len(counts), 'layer')}, "
        f"{outer:,} in embedding and head. Each device holds {per_device:,} between steps.",
        wraps=True,
    )
    columns = ("stage", "chunk", "layers", "parameters", "share of cost")
    table = Table(*columns, title="partition, in the order of the model")
    placement, end = setup.schedule.placement, 0
    for s, number in enumerate(setup.layer_counts):
        first, end = end, end + number
        share = sum(setup.layer_costs[first:end]) / sum(setup.layer_costs)
        layers = str(first) if number == 1 else f"{first} to {end - 1}"
        place = str(placement.stages[s]), str(placement.chunks[s])
        table.add_row(*place, layers, f"{sum(counts[first:end]):,}", f"{share:.1%}")
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
    state, rng = setup.state_shapes, setup.rng_shape
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
