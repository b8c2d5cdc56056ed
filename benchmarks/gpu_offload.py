"""What a training step takes of an H100 when some of it lies on its host. Needs no GPU.

A GPT of width 2048 on stages x data shards, compiled with its optimizer: with all on the devices,
with Adam's moments on the host (`jaxpipe.on_host`), and with residuals there.

    make gpu-offload
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax

import jaxpipe
from benchmarks import harness
from jaxpipe.planning.without_devices import (
    attention_of_gpus,
    device_bytes,
    gpus,
    put_on_host,
    use_gpu_flags,
)
from models import gpt

CONFIG = gpt.GPTConfig(
    vocab_size=32768, sequence_length=512, num_layers=8, width=2048, num_heads=16,
    dtype="bfloat16",
)  # fmt: skip
MICROBATCHES, ROWS = 4, 4
CASES = [(2, 1, 0, "none"), (2, 1, 0, "full"), (2, 2, 1, "none"), (2, 2, 3, "full")]
"""Stages, data shards, ZeRO level and rematerialization."""


@attention_of_gpus()
def compiled(stage: int, data: int, zero: int, remat: str, *, on_host: str) -> jax.stages.Compiled:
    """A whole training step on H100s."""
    optimizer = optax.adam(1e-3)
    if on_host == "state":
        optimizer = jaxpipe.on_host(optimizer)
    pipe = jaxpipe.Pipeline(
        gpt.model(CONFIG, vocabulary_axis="stage"),
        jax.eval_shape(lambda: gpt.init(CONFIG, jax.random.key(0))),
        schedule="1f1b",
        microbatches=MICROBATCHES,
        mesh=jaxpipe.make_mesh(stage=stage, data=data, devices=gpus("h100", stage * data)),
        remat=remat,
        zero=zero,
        weights="stacked",
        weight_slots=1,
        residuals="host" if on_host == "residuals" else "device",
    )
    rows = MICROBATCHES * ROWS * data, CONFIG.sequence_length + 1
    tokens = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=pipe.batch_sharding)
    params, state = pipe.placed_params, pipe.optimizer_placing(optimizer).placed
    lowered = pipe.train_step(optimizer).lower(params, state, {"tokens": tokens})
    if on_host == "state":
        first = len(jax.tree.leaves(params))
        moments = [first + n for n, leaf in enumerate(jax.tree.leaves(state)) if leaf.ndim]
        put_on_host(lowered, moments)
    return lowered.compile()


def main() -> None:
    """Compiles every case three times, and prints and writes a table."""
    use_gpu_flags()
    rows = []
    for case in CASES:
        for on_host in ("nothing", "state", "residuals"):
            began = time.perf_counter()
            program = compiled(*case, on_host=on_host)
            memory = program.memory_analysis()
            on_its_host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
            stage, data, zero, remat = case
            rows.append(
                {
                    "case": f"{stage} x {data}, ZeRO-{zero}, remat {remat}, {on_host} on the host",
                    "arguments, GB": memory.argument_size_in_bytes / 1e9,
                    "temporaries, GB": memory.temp_size_in_bytes / 1e9,
                    "device, GB": device_bytes(program) / 1e9,
                    "host, GB": on_its_host / 1e9,
                }
            )
            harness.note(f"{rows[-1]} in {time.perf_counter() - began:.0f} s")
    harness.report(
        "gpu-offload",
        rows,
        title="On the host",
        label=["case"],
        bars=["device, GB"],
        axis="GB of a device",
    )


if __name__ == "__main__":
    main()
