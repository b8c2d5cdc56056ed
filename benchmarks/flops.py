"""Does a compiled step multiply as much as the model needs, and no more?

Counts the matmuls of the compiled program: those of a layer in each of a tick's loops, times the
layers that the tick table runs there, on all devices; and those of the head. The model's are 3
times its forward, plus those that the remat policy recomputes. The model is the GPT of
`benchmarks.memory`; it is compiled and not run. Fails if a case is more than 2% off.

    python -m benchmarks.flops [--names 1f1b zb-v] [--microbatches 8]
"""

from __future__ import annotations

import itertools
import sys

import jax
import numpy as np
import tyro

import jaxpipe
from benchmarks import harness, memory
from benchmarks.hlo import HloProgram
from jaxpipe.runtime.layers.split import REMAT_POLICIES
from jaxpipe.runtime.memory import compiled
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import NONE
from models import gpt

NAMES = ("1f1b", "1f1b-fused", "interleaved", "breadth-first", "hanayo", "zb-v", "v-half", "auto")
TOLERANCE = 0.02


def model_flops(config: gpt.GPTConfig, tokens: int, remat: str) -> int:
    """Multiplications and additions of the matmuls of one microbatch of this many tokens."""
    weights = config.width * (4 * config.width + 3 * config.hidden_width)
    attention = 4 * tokens * config.sequence_length * config.width
    down = 2 * tokens * config.width * config.hidden_width
    forward = 2 * tokens * weights + attention
    # The layer's output is not a residual, so nothing needs its last matmul again.
    again = {"none": 0, "dots": attention, "full": forward - down}[remat]
    head = 3 * 2 * tokens * config.width * config.vocab_size
    return config.num_layers * (3 * forward + again) + head


def compiled_flops(pipe: jaxpipe.Pipeline, program: HloProgram) -> int:
    """The same for a whole compiled step, on all devices."""
    bodies = program.tick_bodies().values()
    if any(i.opcode == "dot" for body in bodies for i in program.reached(body, into_loops=False)):
        raise ValueError("A matmul runs in every tick, whatever the table says.")
    loops = [loop for body in bodies for loop in program.loops(body)]
    flops = {loop.name: program.dot_flops(loop.calls["body"]) for loop in loops}
    layers = {name: flops[loop.name] for name, (loop,) in program.layer_loops().items()}
    runs = {kind: int(np.sum(cell.layers)) for kind, cell in pipe.table.passes.items()}
    head = sum(flops.values()) - sum(layers.values())
    head *= int(np.sum(pipe.table.outer.head != NONE)) * pipe.schedule.num_stages
    return head + sum(runs[Kind(name)] * count for name, count in layers.items())


def main(names: tuple[str, ...] = NAMES, microbatches: int = 8) -> int:
    """Prints the table, writes it, and returns 1 if a case is off.

    Args:
      names: schedules to compile; "all" is every one that can be executed.
      microbatches: m.
    """
    harness.simulate(memory.STAGES)
    jax.config.update("jax_disable_most_optimizations", True)  # of LLVM: nothing runs
    rows = []
    for name, remat in itertools.product(harness.chosen(names), REMAT_POLICIES):
        harness.note(f"{name}, {remat}")
        case = (name, remat, 0, microbatches)
        pipe, batch = memory.pipeline(case, stages=memory.STAGES, data=1)
        found = compiled_flops(pipe, HloProgram(compiled(pipe, batch).as_text() or ""))
        tokens = memory.ROWS * memory.CONFIG.sequence_length
        expected = microbatches * model_flops(memory.CONFIG, tokens, remat)
        row = {"schedule": name, "remat": remat, "model GFLOP": expected / 1e9}
        rows.append(row | {"compiled GFLOP": found / 1e9, "compiled / model": found / expected})
    harness.report(
        "flops",
        rows,
        title=f"matmuls of a step, p={memory.STAGES} m={microbatches}",
        label=["schedule", "remat"],
        bars=["model GFLOP", "compiled GFLOP"],
        axis="GFLOP",
    )
    return int(any(abs(row["compiled / model"] - 1) > TOLERANCE for row in rows))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
