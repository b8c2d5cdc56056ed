"""Do large models compile for many hosts, and into how much memory? Needs no GPU, and runs nothing.

Llama 70B on 64 hosts of 8 H100s: 8 stages x 8 data shards x 8 tensor devices, a host per tensor
group; or for four times longer sequences 8 stages x 2 data shards x 4 context x 8 tensor devices.
Llama 405B on 512 hosts: 16 stages x 32 data shards x 8 tensor devices. Or a mixture of 67B
parameters, of which a token uses 2B, on 8 hosts: 8 stages x 8 data shards that split the experts, a
host per stage. Or Llama 2 7B on 8 stages with sequences of 131,072 tokens, whole or in slices.
Printed are the compiled step's bytes per device, its arguments and what it takes beside them, as
`jaxpipe.measure.predicted_bytes` predicts it, and which collectives leave a host.

    .venv-gpu/bin/python benchmarks/gpu_large.py --model llama-70b
    .venv-gpu/bin/python benchmarks/gpu_large.py --model llama-70b-16k
    .venv-gpu/bin/python benchmarks/gpu_large.py --model llama-405b
    .venv-gpu/bin/python benchmarks/gpu_large.py --model mixture-67b
    .venv-gpu/bin/python benchmarks/gpu_large.py --model llama-2-7b --microbatches 8 --slices 16
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import math
import os
import re
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import jaxpipe
from jaxpipe.planning.without_devices import GPUS_PER_HOST, attention_of_gpus, gpus, use_gpu_flags
from jaxpipe.runtime.memory import PLAIN_UPDATES, bytes_beside_arguments, compiled, predicted_bytes
from models import gpt

LLAMA_70B = gpt.GPTConfig(
    vocab_size=128256, sequence_length=4096, num_layers=80, width=8192, num_heads=64,
    num_kv_heads=8, mlp_width=28672, tied=False, dtype="bfloat16", rope_theta=500_000.0,
)  # fmt: skip
LLAMA_405B = dataclasses.replace(
    LLAMA_70B, sequence_length=8192, num_layers=126, width=16384, num_heads=128, mlp_width=53248
)
MIXTURE_67B = gpt.GPTConfig(
    vocab_size=128256, sequence_length=4096, num_layers=32, width=2048, num_heads=16,
    num_kv_heads=4, tied=False, dtype="bfloat16", num_experts=256, experts_per_token=4,
    expert_width=1312, capacity_factor=1.25, balance_loss=0.01,
)  # fmt: skip
LLAMA_2_7B = gpt.GPTConfig(
    vocab_size=32_000, sequence_length=128 * 1024, num_layers=32, width=4096, num_heads=32,
    mlp_width=11_008, tied=False, dtype="bfloat16",
)  # fmt: skip
MODELS = {
    "llama-70b": (LLAMA_70B, {"stage": 8, "data": 8, "tensor": 8}),
    "llama-70b-16k": (
        dataclasses.replace(LLAMA_70B, sequence_length=16384),
        {"stage": 8, "data": 2, "context": 4, "tensor": 8},
    ),
    "llama-405b": (LLAMA_405B, {"stage": 16, "data": 32, "tensor": 8}),
    "mixture-67b": (MIXTURE_67B, {"stage": 8, "data": 8, "expert": 8}),
    "llama-2-7b": (LLAMA_2_7B, {"stage": 8, "data": 1}),
}


def pipeline(config: gpt.GPTConfig, sizes: dict[str, int], *, remat: str = "full", **options):
    """A model on a mesh of these sizes."""
    count = math.prod(n for name, n in sizes.items() if name != "expert")
    axes = {f"{name}_axis": name for name in ("context", "tensor", "expert") if name in sizes}
    return jaxpipe.Pipeline(
        gpt.model(config, vocabulary_axis="stage", **axes),
        jax.eval_shape(lambda: gpt.init(config, jax.random.key(0))),
        mesh=jaxpipe.make_mesh(**sizes, devices=gpus("h100", count)),
        compute_dtype="bfloat16",
        remat=remat,
        **options,
    )


_COLLECTIVE = re.compile(
    r" (all-gather|reduce-scatter|all-reduce|all-to-all)(?:-start)?\(.*?"
    r"replica_groups=\{([\d,{}]+)\}"
)


def groups(text: str) -> list[tuple[str, np.ndarray]]:
    """Every gather, scatter, sum and exchange of a program, with its groups of devices."""
    return [
        (name, np.array([_ints(group) for group in re.findall(r"[\d,]*\d", listed)]))
        for name, listed in _COLLECTIVE.findall(text)
    ]


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _sizes(text: str) -> dict[str, int]:
    pairs = (size.split("=") for size in text.split(","))
    return {name: int(n) for name, n in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama-70b")
    parser.add_argument("--mesh", type=_sizes, help="its sizes, such as stage=8,data=8,tensor=8")
    parser.add_argument("--schedule", default="1f1b-fused")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--slices", type=int, help="of a sequence, with the attention of cuDNN")
    args = parser.parse_args()
    use_gpu_flags()
    config, sizes = MODELS[args.model]
    sizes = args.mesh or sizes
    print(f"{gpt.num_parameters(config) / 1e9:.1f}B parameters")
    schedule = jaxpipe.schedules.build(
        args.schedule, stages=sizes["stage"], microbatches=args.microbatches, slices=args.slices
    )
    pipe = pipeline(config, sizes, schedule=schedule, zero=args.zero, remat=args.remat)
    rows, length = sizes["data"] * args.microbatches, config.sequence_length
    batch = {"tokens": jax.ShapeDtypeStruct((rows, length + 1), "int32")}
    if args.slices:
        batch = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((rows, length), "int32"))
    began = time.perf_counter()
    with attention_of_gpus() if args.slices else contextlib.nullcontext():
        step, parts = compiled(pipe, batch, updates=PLAIN_UPDATES), predicted_bytes(pipe, batch)
    print(f"compiled for {pipe.mesh.size} H100s in {time.perf_counter() - began:.0f} s", flush=True)
    memory = step.memory_analysis()
    kept = bytes_beside_arguments(step)
    print(f"arguments {memory.argument_size_in_bytes / 1e9:.2f} GB, step {kept / 1e9:.2f} GB")
    counts: collections.Counter[str] = collections.Counter()
    for name, members in groups(step.as_text()):
        hosts = members // GPUS_PER_HOST
        where = "within a host" if np.all(hosts == hosts[:, :1]) else "across hosts"
        counts[f"{name} in groups of {members.shape[1]} {where}"] += 1
    for what, count in sorted(counts.items()):
        print(f"  {count} {what}", flush=True)
    print(f"predicted step {sum(parts.values()) / 1e9:.2f} GB")
    for name, size in parts.items():
        print(f"  {name} {size / 1e9:.3f} GB")


if __name__ == "__main__":
    main()
