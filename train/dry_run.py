"""``--dry-run``: draw the schedule, compile, and hold predicted against compiled memory."""

from __future__ import annotations

import jax
from rich.console import Console
from rich.table import Table

from jaxpipe.schedule import draw
from jaxpipe.schedule.simulate import Costs, lock_step, simulate
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
    costs = Costs(f=1, b=1, w=1)
    free, locked = simulate(program.schedule, costs), lock_step(program.schedule, costs)
    text = "\n".join([draw.text(free), draw.caption(free), draw.caption(locked)])
    console.print(text, soft_wrap=True, markup=False, highlight=False)
    compiled = program.compile().memory_analysis()
    rng = jax.eval_shape(lambda: program.rng(0))
    predicted = program.pipe.predicted_bytes(program.batch_shapes, rng)
    table = Table(
        "stage",
        "peak in flight",
        *(f"{name} MB" for name in predicted),
        "predicted MB",
        "compiled temporaries MB",
        "arguments MB",
        title="memory per device",
    )
    # One program runs on every stage, so its buffers are those of the fullest one.
    for stage, peak in enumerate(free.peak_in_flight):
        sizes = [*predicted.values(), sum(predicted.values())]
        sizes += [compiled.temp_size_in_bytes, compiled.argument_size_in_bytes]
        table.add_row(str(stage), str(peak), *(f"{size / _MB:.2f}" for size in sizes))
    console.print(table)
    console.print("dry run: nothing was trained or written", highlight=False)
