"""How much memory does a long sequence take, cut into slices? Compiled for H100s; runs nothing.

Llama 2 7B on 8 stages, a sequence per microbatch, as many microbatches as stages, 1F1B with fused
backwards and full recomputation: each layer keeps its input and, with slices, keys and values. The
table has bytes per GPU beside parameters, compiled and predicted, and the bubble at equal costs.

    make gpu-slices
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jaxpipe
from jaxpipe.planning.without_devices import attention_of_gpus, h100s, use_gpu_flags
from jaxpipe.runtime import memory
from jaxpipe.runtime.memory import compiled_bytes, predicted_bytes, tree_bytes
from jaxpipe.schedule.check import peak_in_flight
from jaxpipe.schedule.simulate import UNIT, simulate
from models import gpt

STAGES = 8


def pipeline(length: int, slices: int, remat: str) -> jaxpipe.Pipeline:
    """The pipeline for sequences of this many tokens."""
    config = gpt.GPTConfig(
        vocab_size=32_000,
        sequence_length=length,
        num_layers=32,
        width=4096,
        num_heads=32,
        mlp_width=11_008,
        tied=False,
        dtype="bfloat16",
    )
    return jaxpipe.Pipeline(
        gpt.model(config, vocabulary_axis="stage"),
        jax.eval_shape(lambda: gpt.init(config, jax.random.key(0))),
        schedule=jaxpipe.schedules.build(
            "1f1b-fused", stages=STAGES, microbatches=STAGES, slices=slices
        ),
        mesh=jaxpipe.make_mesh(stage=STAGES, devices=h100s(STAGES)),
        remat=remat,
        compute_dtype="bfloat16",
        weights="unrolled",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=128 * 1024, help="tokens of a sequence")
    parser.add_argument("--slices", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--remat", default="full")
    options = parser.parse_args()
    use_gpu_flags()
    table = Table(title=f"Llama 2 7B, {options.length} tokens, remat {options.remat}")
    for name in ("slices", "peak, microbatches", "bubble ratio", "buffers, GB", "compiled, GB"):
        table.add_column(name, justify="right")
    table.add_column("predicted / compiled", justify="right")
    table.add_column("compile s", justify="right")
    for slices in options.slices:
        pipe, start = pipeline(options.length, slices, options.remat), time.perf_counter()
        schedule, shape = pipe.schedule, (STAGES, options.length)
        names = ("tokens", "targets")
        batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in names}
        with attention_of_gpus():
            buffers = sum(map(tree_bytes, memory.buffers(pipe, batch).values()))
            found = compiled_bytes(pipe, batch)
            seconds = time.perf_counter() - start
            predicted = sum(predicted_bytes(pipe, batch).values())
        timeline = simulate(schedule, UNIT)
        table.add_row(
            str(slices),
            f"{max(peak_in_flight(schedule)) / slices:.2f}",
            f"{timeline.bubble_ratio:.3f}",
            f"{buffers / 1e9:.2f}",
            f"{found / 1e9:.2f}",
            f"{predicted / found:.3f}",
            f"{seconds:.0f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
