"""``--dry-run``: draw the schedule, compile, and hold predicted against compiled memory."""

from __future__ import annotations

import jax
from rich.console import Console
from rich.table import Table

from jaxpipe.runtime.memory import predicted_bytes
from jaxpipe.schedule import draw
from jaxpipe.schedule.partition import chunk_shares
from jaxpipe.schedule.simulate import lock_step, simulate
from train import schedule
from train.config import Config
from train.step import Program

_MB = 1e6
_WIDTH = 120
"""Columns where there is no terminal to ask."""


def run(config: Config) -> None:
    """Prints what a run would do; writes nothing.

    Args:
      config: a checked configuration; jax already has the devices.
    """
    console = Console(quiet=jax.process_index() != 0)
    if not console.is_terminal:
        console.width = _WIDTH
    program = Program(config)
    costs = schedule.costs(config)
    free, locked = simulate(program.schedule, costs), lock_step(program.schedule, costs)
    text = "\n".join([draw.text(free), draw.caption(free), draw.caption(locked)])
    console.print(text, soft_wrap=True, markup=False, highlight=False)
    chunks = Table("virtual stage", "stage", "chunk", "layers", "share of cost", title="partition")
    for row in chunk_shares(program.layer_costs, program.layer_counts, program.schedule.placement):
        held = f"{row.first_layer} to {row.first_layer + row.num_layers - 1}"
        numbers = str(row.virtual_stage), str(row.stage), str(row.chunk)
        chunks.add_row(*numbers, held, f"{row.share:.1%}")
    console.print(chunks)
    compiled = program.compile().memory_analysis()
    rng = jax.eval_shape(lambda: program.rng(0))
    predicted = predicted_bytes(program.pipe, program.batch_shapes, rng)
    buffers = Table("buffer", "MB", title="predicted temporaries per device")
    for name, size in predicted.items():
        buffers.add_row(name, f"{size / _MB:.2f}")
    console.print(buffers)
    columns = ("stage", "peak in flight", "predicted MB", "compiled MB", "arguments MB")
    stages = Table(*columns, title="temporaries per stage: one program, sized for the fullest")
    sizes = sum(predicted.values()), compiled.temp_size_in_bytes, compiled.argument_size_in_bytes
    for stage, peak in enumerate(free.peak_in_flight):
        stages.add_row(str(stage), str(peak), *(f"{size / _MB:.2f}" for size in sizes))
    console.print(stages)
    console.print("dry run: nothing was trained or written", highlight=False)
