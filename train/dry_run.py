"""``--dry-run``: draws the schedule, compiles, and says whether the devices have enough memory."""

from __future__ import annotations

import jax
from rich.console import Console

from jaxpipe import axes_across_hosts
from jaxpipe.asynchronous import steady_text
from jaxpipe.measure import predicted_bytes
from jaxpipe.schedule import draw, simulate
from train import configured, memory_report
from train.config import Config
from train.metrics import announced, say
from train.modes import Asynchronous, Modes, device_bytes
from train.step import Setup

_WIDTH = 120
"""Columns of a line without a terminal."""
_MOST_LINES = 100
"""Lines of the longest schedule that is shown as text; nobody reads more."""


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
    if configured.is_asynchronous(config):
        mode = Modes(setup).asynchronous
        _show_steady_state(console, setup, mode)
        memory_report.show_parameters(console, setup)
        _show_carried(console, setup, mode)
    else:
        _show_timeline(console, setup)
        memory_report.show_parameters(console, setup)
        memory_report.show_step(console, setup)
        if config.pipeline.update == "chunk":
            _show_updates(console, setup)
        if setup.pipe.zero >= 2:
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
    peaks = simulate(setup.schedule, configured.costs(setup.config)).peak_in_flight
    flight = f"microbatches in flight at most, stage by stage: {' '.join(map(str, peaks))}"
    lines = [drawing, flight, draw.caption(free), draw.caption(runs)]
    say(console, "\n".join(lines), wraps=True)


def _show_steady_state(console: Console, setup: Setup, mode: Asynchronous) -> None:
    """Shows ticks, delays and versions, the utilization, and what T1, T2 and T3 do."""
    config, steady, costs = setup.config, mode.steady, setup.chunk_costs
    warmup = config.asynchronous.warmup_steps
    rescheduling, decay = configured.techniques(config)
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
    rng = jax.eval_shape(lambda: setup.rng(0))
    after = sum(predicted_bytes(setup.pipe, setup.batch_shapes, rng).values())
    say(
        console,
        f"pipeline.update=chunk: gradients of {setup.pipe.chunk_table.reduces.num_slots} of "
        f"{setup.pipe.schedule.num_chunks} chunks are kept at once; with update=step "
        f"temporaries and gradients would take {after / 1e6:,.2f} MB",
        wraps=True,
    )


def _show_transfers(console: Console, setup: Setup) -> None:
    """Shows how often chunks are gathered and reduced over data, from ZeRO-2 on."""
    table, zero = setup.pipe.table, setup.pipe.zero
    gathered, reduced = max(table.gathers.counts), max(table.reduces.counts)
    gathers = f"gathers up to {gathered} chunks of weights and " if zero == 3 else ""
    kept = max(table.gathers.num_slots if zero == 3 else 0, table.reduces.num_slots)
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
    parts = mode.carried_bytes() | {
        "batch": device_bytes(setup.batch_shapes),
        "values of a step": compiled.temp_size_in_bytes,
    }
    memory_report.show_memory(console, setup, parts, compiled)
