"""Do compiled temporaries follow the schedule's prediction, whatever the number of microbatches?

Compiles (does not run) a GPT of 8 layers, width 256, sequence 128, 4 rows a microbatch, float32, on
4 simulated stages x 2 data shards. Fails if a case is more than 10% off, or if 64 microbatches take
more than 8 where the schedule says they need not.

    python benchmarks/memory.py
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jaxpipe
from jaxpipe.runtime.memory import compiled_bytes, predicted_bytes
from jaxpipe.runtime.split import REMAT_POLICIES
from models import gpt

RESULTS = Path(__file__).parent / "results" / "memory.json"
STAGES, DATA, ROWS = 4, 2, 4
CONFIG = gpt.GPTConfig(
    vocab_size=2048, sequence_length=128, num_layers=8, width=256, num_heads=4, dtype="float32"
)
CASES = [
    (name, remat, zero, microbatches)
    for name, zero in (("1f1b", 0), ("1f1b", 3), ("1f1b-fused", 3), ("gpipe", 3))
    for remat in REMAT_POLICIES
    for microbatches in (8, 64)
    if name != "gpipe" or microbatches == 8
]
TOLERANCE = 0.10


def measure(name: str, remat: str, zero: int, microbatches: int) -> dict:
    """Predicted and compiled temporaries of one case, in bytes on each device."""
    pipe = jaxpipe.Pipeline(
        gpt.model(CONFIG, vocabulary_axis="stage"),
        jax.eval_shape(lambda: gpt.init(CONFIG, jax.random.key(0))),
        schedule=jaxpipe.schedules.build(name, stages=STAGES, microbatches=microbatches),
        mesh=jaxpipe.make_mesh(stage=STAGES, data=DATA),
        remat=remat,
        zero=zero,
    )
    shape = (ROWS * microbatches * DATA, CONFIG.sequence_length + 1)
    batch = {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)}
    predicted = predicted_bytes(pipe, batch)
    return {
        "schedule": name,
        "remat": remat,
        "zero": zero,
        "microbatches": microbatches,
        "predicted_bytes": sum(predicted.values()),
        "compiled_bytes": compiled_bytes(pipe, batch),
        "buffers": predicted,
    }


def main() -> int:
    """Prints the table, writes it as JSON, and returns 1 if a case is off."""
    table = Table(
        *("schedule", "remat", "ZeRO", "microbatches", "predicted MB", "compiled MB", "ratio"),
        title="temporaries per device",
    )
    results, failed = [], False
    console = Console()
    with console.status("compiling") as status:
        for number, case in enumerate(CASES):
            status.update(f"compiling {number + 1} of {len(CASES)}: {case}")
            result = measure(*case)
            results.append(result)
            predicted, compiled = result["predicted_bytes"], result["compiled_bytes"]
            ratio = compiled / predicted
            failed |= abs(ratio - 1) > TOLERANCE
            sizes = (f"{predicted / 1e6:.1f}", f"{compiled / 1e6:.1f}", f"{ratio:.3f}")
            table.add_row(*map(str, case), *sizes)
    console.print(table)
    by_case = {tuple(result.values())[:4]: result["compiled_bytes"] for result in results}
    for (name, remat, zero, microbatches), size in by_case.items():
        other = by_case.get((name, remat, zero, 8), size)
        if microbatches == 64 and abs(size / other - 1) > TOLERANCE / 10:
            console.print(f"{name}, remat {remat}: {other} bytes at 8 microbatches, {size} at 64")
            failed = True
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {RESULTS}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
