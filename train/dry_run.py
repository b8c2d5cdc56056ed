"""``--dry-run``: draws the schedule, compiles, and compares predicted with compiled memory."""

from __future__ import annotations

import jax
from rich.console import Console
from rich.table import Table

from jaxpipe.measure import predicted_bytes
from jaxpipe.schedule import chunk_shares, draw, lock_step, neighbor_clock, simulate, steady_text
from train import configured
from train.config import Config
from train.modes import Asynchronous, Modes
from train.step import Setup

_MB = 1e6
_WIDTH = 120
"""Columns of a line without a terminal."""


def run(config: Config) -> None:
    """Prints what a run would do; writes nothing.

    Args:
      config: a checked configuration; jax already has the devices.
    """
    console = Console(quiet=jax.process_index() != 0)
    if not console.is_terminal:
        console.width = _WIDTH
    setup = Setup(config)
    if configured.is_asynchronous(config):
        mode = Modes(setup).asynchronous
        _show_steady_state(console, setup, mode)
        _show_partition(console, setup)
        _show_carried(console, mode)
    else:
        _show_timeline(console, setup)
        _show_partition(console, setup)
        _show_temporaries(console, setup)
    console.print("dry run: nothing was trained or written", highlight=False)


def _show_timeline(console: Console, setup: Setup) -> None:
    costs = setup.chunk_costs
    free = simulate(setup.schedule, costs)
    ticked = neighbor_clock(setup.schedule, costs), lock_step(setup.schedule, costs)
    try:
        drawing = draw.text(free)
    except draw.TooWideError as error:  # chunks whose costs are far apart
        drawing = str(error)
    text = "\n".join([drawing, *(draw.caption(clock) for clock in (free, *ticked))])
    console.print(text, soft_wrap=True, markup=False, highlight=False)


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
    console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)


def _show_partition(console: Console, setup: Setup) -> None:
    chunks = Table("virtual stage", "stage", "chunk", "layers", "share of cost", title="partition")
    for row in chunk_shares(setup.layer_costs, setup.layer_counts, setup.schedule.placement):
        held = f"{row.first_layer} to {row.first_layer + row.num_layers - 1}"
        numbers = str(row.virtual_stage), str(row.stage), str(row.chunk)
        chunks.add_row(*numbers, held, f"{row.share:.1%}")
    console.print(chunks)


def _show_temporaries(console: Console, setup: Setup) -> None:
    compiled = setup.compile().memory_analysis()
    rng = jax.eval_shape(lambda: setup.rng(0))
    by_chunk = setup.optimizer if setup.config.pipeline.update == "chunk" else None
    predicted = predicted_bytes(setup.pipe, setup.batch_shapes, rng, by_chunk=by_chunk)
    buffers = Table("buffer", "MB", title="predicted temporaries and gradients per device")
    for name, size in predicted.items():
        buffers.add_row(name, f"{size / _MB:.2f}")
    console.print(buffers)
    columns = ("stage", "peak in flight", "predicted MB", "compiled MB", "arguments MB")
    stages = Table(*columns, title="temporaries per stage: one setup, sized for the fullest")
    sizes = sum(predicted.values()), compiled.temp_size_in_bytes, compiled.argument_size_in_bytes
    peaks = simulate(setup.schedule, configured.costs(setup.config)).peak_in_flight
    for stage, peak in enumerate(peaks):
        stages.add_row(str(stage), str(peak), *(f"{size / _MB:.2f}" for size in sizes))
    console.print(stages)
    if by_chunk is not None:
        after = sum(predicted_bytes(setup.pipe, setup.batch_shapes, rng).values())
        reduces = setup.pipe.chunk_table.reduces
        console.print(
            f"pipeline.update=chunk: gradients of {reduces.num_slots} of "
            f"{setup.pipe.schedule.num_chunks} chunks are kept at once; with update=step "
            f"temporaries and gradients would take {after / _MB:.2f} MB",
            soft_wrap=True,
            highlight=False,
        )
    if setup.pipe.zero >= 2:
        _show_transfers(console, setup)


def _show_transfers(console: Console, setup: Setup) -> None:
    """Shows how often chunks are gathered and reduced over data, from ZeRO-2 on."""
    table, zero = setup.pipe.table, setup.pipe.zero
    gathered, reduced = max(table.gathers.counts), max(table.reduces.counts)
    gathers = f"gathers up to {gathered} chunks of weights and " if zero == 3 else ""
    kept = max(table.gathers.num_slots if zero == 3 else 0, table.reduces.num_slots)
    console.print(
        f"data axis, ZeRO-{zero}: in a step a stage {gathers}reduces up to {reduced} of gradients; "
        f"of its {table.schedule.num_chunks} it keeps {kept} at once (pipeline.weight_slots)",
        soft_wrap=True,
        highlight=False,
    )


def _show_carried(console: Console, mode: Asynchronous) -> None:
    """Shows the buffers that an asynchronous pipeline carries from step to step."""
    table = Table("carried from step to step", "MB", title="memory per device")
    for name, size in mode.carried_bytes().items():
        table.add_row(name, f"{size / _MB:.2f}")
    compiled = mode.compile().memory_analysis()
    table.add_section()
    sizes = {
        "all compiled arguments, the batch included": compiled.argument_size_in_bytes,
        "compiled temporaries": compiled.temp_size_in_bytes,
    }
    for name, size in sizes.items():
        table.add_row(name, f"{size / _MB:.2f}")
    console.print(table)
