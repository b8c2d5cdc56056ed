"""When do slices of a sequence pay? Needs no device.

Llama 3 8B and 70B on 8 stages x 8 tensor devices, and with 8 context devices, 4 million tokens per
step, one sequence per microbatch. Bubbles are those of the device clock, with attention's FLOPs
growing from slice to slice; memory is that of parameters and of the buffers of jaxpipe's own
program; a step takes its FLOPs at 400 TFLOP/s and its bubble. The other waits of a step, for
collectives and launches, are left out: `jaxpipe plan` counts them, and knows no slices.

    make study-slices
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tyro

import jaxpipe
from benchmarks import harness
from jaxpipe.runtime.measure import traced
from jaxpipe.runtime.measure.memory import tree_bytes
from jaxpipe.schedule import Costs, Schedule, build, device_clock
from jaxpipe.schedule.check.validate import peak_in_flight
from models import gpt

STAGES, TENSOR = 8, 8
TOKENS = 2**22
"""Tokens of a step."""
FLOPS_PER_SECOND = 400e12
BYTES_PER_PARAMETER = 18
"""Float32 parameters, gradients and both moments of Adam, and the bfloat16 copy."""
MOST_BYTES = 80e9
CASES = (
    ("zb-v", 1), ("1f1b-fused", 1), ("zb-h1", 4), ("zb-h1", 16), ("zb-h2", 16), ("zb-h2", 64),
)  # fmt: skip
LLAMA = gpt.GPTConfig(
    vocab_size=128_256, sequence_length=8192, num_layers=32, width=4096, num_heads=32,
    num_kv_heads=8, mlp_width=14_336, tied=False, dtype="bfloat16",
)  # fmt: skip
MODELS = {
    "8B": LLAMA,
    "70B": dataclasses.replace(LLAMA, num_layers=80, width=8192, num_heads=64, mlp_width=28_672),
}


def costs_of(config: gpt.GPTConfig, length: int, remat: str) -> Costs:
    """FLOPs of F, B and W of one sequence on one stage; B attends two and a half times."""
    of_layers = gpt.num_parameters(config) - 2 * config.vocab_size * config.width
    matmuls = 2.0 * of_layers / STAGES * length
    attention = 2.0 * config.width * length**2 * config.num_layers / STAGES
    f, b = matmuls + attention, matmuls + 2.5 * attention
    again = f if remat == "full" else 0.0
    share = (3.5 * attention + (attention if again else 0.0)) / (f + b + again)
    return Costs(f, b + again, matmuls, attention=share)


def activation_bytes(
    config: gpt.GPTConfig, schedule: Schedule, length: int, context: int, remat: str
) -> int:
    """Bytes per device of the buffers of a step, but for the gradients."""
    axes = {"tensor_axis": "tensor"} | ({"context_axis": "context"} if context > 1 else {})
    sizes = {"tensor": TENSOR} | ({"context": context} if context > 1 else {})
    devices = jax.devices()[: STAGES * TENSOR * context]
    pipe = jaxpipe.Pipeline(
        gpt.model(dataclasses.replace(config, sequence_length=length), **axes),
        jax.eval_shape(lambda: gpt.init(config, jax.random.key(0))),
        schedule=schedule,
        mesh=jaxpipe.make_mesh(stage=STAGES, devices=devices, **sizes),
        remat=remat,
        compute_dtype="bfloat16",
    )
    shape = jax.ShapeDtypeStruct((schedule.num_microbatches, length), jnp.int32)
    buffers = traced.buffers(pipe, {"tokens": shape, "targets": shape})
    return sum(tree_bytes(w) for name, w in buffers.items() if name not in ("gradients", "weights"))


def rows(name: str, length: int, context: int) -> Iterator[dict[str, Any]]:
    """One row for each schedule, number of slices and policy."""
    config, m = MODELS[name], TOKENS // length
    kept = gpt.num_parameters(config) * BYTES_PER_PARAMETER / (STAGES * TENSOR)
    for schedule_name, k in CASES:
        # Beyond 64 microbatches, bubbles and slots are those of 64.
        schedule = build(
            schedule_name, stages=STAGES, microbatches=min(m, 64), slices=None if k == 1 else k
        )
        for remat in ("dots", "full"):
            whole = costs_of(config, length, remat)
            parts = k * schedule.num_chunks
            cost = Costs(
                whole.f / parts, whole.b / parts, whole.w / parts, attention=whole.attention
            )
            work = schedule.num_microbatches * (whole.f + whole.b + whole.w)
            bubble = (device_clock(schedule, cost).makespan / work - 1) * min(m, 64) / m
            seconds = m / schedule.num_microbatches * work / (TENSOR * context) / FLOPS_PER_SECOND
            total = kept + activation_bytes(config, schedule, length, context, remat)
            yield {
                "schedule": schedule_name,
                "slices": k,
                "remat": remat,
                "in flight": max(peak_in_flight(schedule)) / parts,
                "attention": whole.attention,
                "bubble": bubble,
                "GB": total / 1e9,
                "seconds": seconds * (1 + bubble),
            }


def main(
    models: tuple[str, ...] = tuple(MODELS),
    lengths: tuple[int, ...] = (8192, 131_072, 1_048_576),
    contexts: tuple[int, ...] = (1, 8),
) -> None:
    """Prints a table for each model, length and number of devices.

    Args:
      models: of MODELS.
      lengths: tokens of a sequence.
      contexts: devices that share a sequence.
    """
    harness.simulate(STAGES * TENSOR * max(contexts))
    for name in models:
        for length in lengths:
            for context in contexts:
                found = list(rows(name, length, context))
                print_table(name, length, context, found)


def print_table(name: str, length: int, context: int, found: Sequence[dict[str, Any]]) -> None:
    """Prints the rows; the fastest that fits is marked."""
    fits = [row for row in found if row["GB"] * 1e9 <= MOST_BYTES]
    best = min(fits, key=lambda row: row["seconds"], default=None)
    gpus = STAGES * TENSOR * context
    share = found[0]["attention"]
    print(f"\n**Llama 3 {name}, {length} tokens, {gpus} GPUs**, m = {TOKENS // length}, ", end="")
    print(f"attention {share:.0%} of F and B\n")
    print(
        "| schedule | slices | remat | in flight | bubble | GB | s |\n|---|---|---|---|---|---|---|"
    )
    for row in found:
        mark = "**" if row is best else ""
        numbers = f"{row['in flight']:.2f} | {row['bubble']:.3f} | {row['GB']:.1f}"
        label = f"{mark}{row['schedule']}{mark} | {row['slices']} | {row['remat']}"
        print(f"| {label} | {numbers} | {row['seconds']:.1f} |")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
