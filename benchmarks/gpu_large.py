"""Do large models compile for many hosts, and into how much memory? Needs no GPU, and runs nothing.

Llama 70B on 64 hosts of 8 H100s: 8 stages x 8 data shards x 8 tensor devices, a host per tensor
group. Printed are the compiled step's bytes per device, its arguments and what it takes beside
them, as `jaxpipe.measure.predicted_bytes` predicts it, and which collectives leave a host.

    .venv-gpu/bin/python benchmarks/gpu_large.py
"""

from __future__ import annotations

import argparse
import collections
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
from jax.experimental import topologies

import jaxpipe
from jaxpipe import gpu_flags
from jaxpipe.runtime.measure.memory import compiled, predicted_bytes
from models import gpt

TARGET = Path(__file__).parent / "h100.txtpb"
LLAMA_70B = gpt.GPTConfig(
    vocab_size=128256, sequence_length=4096, num_layers=80, width=8192, num_heads=64,
    num_kv_heads=8, mlp_width=28672, tied=False, dtype="bfloat16", rope_theta=500_000.0,
)  # fmt: skip
PER_HOST = 8


def pipeline(stages: int, data: int, tensor: int, *, schedule: str, microbatches: int, zero: int):
    """Llama 70B on so many devices."""
    hosts = stages * data * tensor // PER_HOST
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology=f"1x{hosts}x{PER_HOST}",
        target_config=TARGET.read_text("utf-8"),
    )
    return jaxpipe.Pipeline(
        gpt.model(LLAMA_70B, vocabulary_axis="stage", tensor_axis="tensor"),
        jax.eval_shape(lambda: gpt.init(LLAMA_70B, jax.random.key(0))),
        schedule=schedule,
        microbatches=microbatches,
        mesh=jaxpipe.make_mesh(stage=stages, data=data, tensor=tensor, devices=topology.devices),
        compute_dtype="bfloat16",
        remat="full",
        zero=zero,
    )


_COLLECTIVE = re.compile(
    r" (all-gather|reduce-scatter|all-reduce)(?:-start)?\(.*?replica_groups=\{([\d,{}]+)\}"
)


def groups(text: str) -> list[tuple[str, np.ndarray]]:
    """Every gather, scatter and sum of a program, with its groups of devices."""
    return [
        (name, np.array([_ints(group) for group in re.findall(r"[\d,]*\d", listed)]))
        for name, listed in _COLLECTIVE.findall(text)
    ]


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", type=_ints, default=[8, 8, 8], help="stages,data,tensor")
    parser.add_argument("--schedule", default="1f1b-fused")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--zero", type=int, default=3)
    args = parser.parse_args()
    variables = os.environ | {"JAX_PLATFORMS": "cuda"}
    gpu_flags.apply(variables)
    os.environ["XLA_FLAGS"] = variables["XLA_FLAGS"]
    pipe = pipeline(
        *args.mesh, schedule=args.schedule, microbatches=args.microbatches, zero=args.zero
    )
    length = LLAMA_70B.sequence_length + 1
    batch = {"tokens": jax.ShapeDtypeStruct((args.mesh[1] * args.microbatches, length), "int32")}
    began = time.perf_counter()
    step = compiled(pipe, batch)
    print(f"compiled for {pipe.mesh.size} H100s in {time.perf_counter() - began:.0f} s", flush=True)
    memory = step.memory_analysis()
    kept = memory.temp_size_in_bytes + memory.output_size_in_bytes
    print(f"arguments {memory.argument_size_in_bytes / 1e9:.2f} GB, step {kept / 1e9:.2f} GB")
    counts: collections.Counter[str] = collections.Counter()
    for name, members in groups(step.as_text()):
        hosts = members // PER_HOST
        where = "within a host" if np.all(hosts == hosts[:, :1]) else "across hosts"
        counts[f"{name} in groups of {members.shape[1]} {where}"] += 1
    for what, count in sorted(counts.items()):
        print(f"  {count} {what}", flush=True)
    parts = predicted_bytes(pipe, batch)
    print(f"predicted step {sum(parts.values()) / 1e9:.2f} GB")
    for name, size in parts.items():
        print(f"  {name} {size / 1e9:.3f} GB")


if __name__ == "__main__":
    main()
